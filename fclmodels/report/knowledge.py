"""What the knowledge that runs leave tells: how full the protected layers are, and where classes' prototypes lie.

Prototypes are drawn on the first two principal components of their means mu: centred, M = U S V^T, a class lies at
V^T (mu - mean), and its features, uncorrelated and with variances sigma^2, have variances sum_i V_ik^2 sigma_i^2 there.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from fclmodels.errors import UserError
from fclmodels.report.planes import Plane, Spot, like_a_map
from fclmodels.report.runs import TABLES, Group, Run
from fclmodels.sealed import refuse_changed

Tree = Any
Found = tuple[str, int, np.ndarray, np.ndarray]  # where it goes on, label, mu, sigma^2

MOST_LABELS = 40


class Prototype(NamedTuple):
    """Mean [F] and variances [F] of the features of a class in a task."""

    task: int
    label: int
    mu: np.ndarray
    sigma2: np.ndarray


def used_shares(run: Run) -> pl.DataFrame:
    """r / d of each protected layer after each task and, without a layer, their mean, in the columns of monitors."""
    seen = run.monitors.filter(pl.col("monitor") == "used_share")
    files = _files(run)
    if not seen.is_empty() or not files:
        return seen
    from fclmodels import state  # torch, which a table of runs does not need

    refuse_changed(run.folder, f"knowledge/{files[-1].name}")
    with named(files[-1]):
        known = state.shapes(files[-1])
        if "ranks" not in known:
            return seen
        shares = {layer: np.array(ranks) / known["bases"][layer][0] for layer, ranks in known["ranks"].items()}
        of_layers = [*shares.items(), (None, np.mean(list(shares.values()), axis=0))] if shares else []
    rows = [
        {"monitor": "used_share", "task": task, "layer": layer, "value": float(share)}
        for layer, of_tasks in of_layers
        for task, share in enumerate(of_tasks)
    ]
    return pl.DataFrame(rows, schema=TABLES["monitors"])


def prototypes(groups: Sequence[Group]) -> list[Plane]:
    """Of the first run of each group whose server knows some: another seed has other features."""
    found = [(group, prototypes_of(group.runs[0])) for group in groups]
    return [_plane(group, of_run) for group, of_run in found if _span_a_plane([of.mu for of in of_run])]


def prototypes_of(run: Run) -> list[Prototype]:
    """In the order of tasks. A mean that goes on over tasks stands at the one that first told of its class."""
    found: dict[tuple[str, int], Prototype] = {}
    for file in _files(run):
        with named(file):
            known = _known(file)
            of_file = [*_of_task(known, file.stem), *_told(known, run.folder)]
        for place, label, mu, sigma2 in of_file:
            first = found[place, label].task if (place, label) in found else _task(file)
            found[place, label] = Prototype(first, label, mu, sigma2)
    return list(found.values())


@contextmanager
def named(file: Path) -> Iterator[None]:
    """Parts that do not fit each other can raise nearly anything: it is a mistake in this file."""
    try:
        yield
    except UserError:
        raise
    except Exception as problem:
        reason = " ".join(f"{type(problem).__name__}: {problem}".split())
        raise UserError(f"{file} holds no knowledge of a run ({reason}). Make it again: fcl run.") from problem


def _of_task(known: Tree, task: str) -> Iterator[Found]:
    """PIP's Gaussians of a task (methods/injected.py)."""
    if "prototypes" in known:
        of = {name: known["prototypes"][name].numpy() for name in ("mu", "sigma2", "known", "labels")}
        rows = np.flatnonzero(of["known"])
        yield from ((task, int(of["labels"][row]), of["mu"][row], of["sigma2"][row]) for row in rows)


def _told(known: Tree, folder: Path) -> Iterator[Found]:
    """Sums over all tasks so far, by head (methods/nearest_prototype.py)."""
    for head, total in known.get("told", {}).items():
        from fclmodels.numerics.prototypes import gaussians

        of = {name: value.numpy() for name, value in gaussians(total)._asdict().items()}
        refuse_changed(folder, "model/spec.json")
        spec = json.loads((folder / "model" / "spec.json").read_text("utf-8"))
        labels = spec["tasks"][int(head.split(".")[1])] if spec["head"] == "per-task" else range(len(of["mu"]))
        rows = np.flatnonzero(of["known"])
        yield from ((head, labels[row], of["mu"][row], of["sigma2"][row]) for row in rows)


def _known(file: Path) -> Tree:
    """What it holds, where there are prototypes; bases can be large."""
    from fclmodels import state

    refuse_changed(file.parents[1], f"knowledge/{file.name}")
    return state.load(file) if state.shapes(file).keys() & {"prototypes", "told"} else {}


def _files(run: Run) -> list[Path]:
    return sorted((run.folder / "knowledge").glob("task-*.safetensors"), key=_task)


def _task(file: Path) -> int:
    return int(file.stem.removeprefix("task-"))


def _plane(group: Group, found: Sequence[Prototype]) -> Plane:
    """Colours and shapes are the tasks."""
    places, directions, shares = principal_plane(np.stack([of.mu for of in found]))
    spots = [_spot(of, x, y, directions, len(found)) for of, (x, y) in zip(found, places.tolist(), strict=True)]
    across, up = (f"{100 * share:.0f} %" for share in shares)
    run = group.runs[0]
    title = f"{group.label}, seed {run.result.seed}"
    return like_a_map(title, spots, f"across: {across} of the means’ variance", f"up: {up} of it", [run.folder])


def _span_a_plane(mu: Sequence[np.ndarray]) -> bool:
    """Not so where there are two or fewer, or where training has diverged."""
    points = np.array(mu)
    return bool(len(points) and np.isfinite(points).all() and np.linalg.matrix_rank(points - points.mean(0)) > 1)


def _spot(of: Prototype, x: float, y: float, directions: np.ndarray, count: int) -> Spot:
    rx, ry = np.sqrt(of.sigma2 @ directions**2).tolist()
    label = str(of.label) if count <= MOST_LABELS else ""
    return Spot(of.task, f"task {of.task + 1}, class {of.label}", x, y, label, (rx, ry))


def principal_plane(mu: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of points [n, F]: their places [n, 2], the directions [F, 2], and the share of their variance on each.

    The sign of a direction is free: its largest entry is positive.
    """
    centred = mu - mu.mean(0)
    _, S, Vt = np.linalg.svd(centred, full_matrices=False)
    directions = Vt[:2].T * np.sign(Vt[np.arange(2), np.abs(Vt[:2]).argmax(1)])
    return centred @ directions, directions, S[:2] ** 2 / (S**2).sum()
