"""Knowledge that runs leave, for the page: how full the protected layers are, and where classes' prototypes lie.

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

from fclmodels.backbones.inputs.layer_names import find_module_name
from fclmodels.errors import UserError
from fclmodels.report.charts.scatter_charts import Plane, Spot, draw_map
from fclmodels.report.read_runs import Group, RunFolder
from fclmodels.storage.sealed_json import refuse_changed
from fclmodels.tables import MONITORS

Tree = Any

MOST_LABELS = 40


class Prototype(NamedTuple):
    """Mean [F] and variances [F] of the features of a class in a task."""

    task: int
    label: int
    mu: np.ndarray
    sigma2: np.ndarray


class StoredPrototype(NamedTuple):
    """A prototype as a file has it; later files go on with the mean of the same group and label."""

    group: str
    label: int
    mu: np.ndarray
    sigma2: np.ndarray


def load_used_shares(run: RunFolder) -> pl.DataFrame:
    """Return r / d of each protected layer after each task and, without a layer, their mean, as a table of monitors.

    They are those of the monitor `used_share` where it was on, else computed from the bases.
    """
    monitored = run.monitors.filter(pl.col("monitor") == "used_share")
    files = _list_files(run)
    if not monitored.is_empty() or not files:
        return monitored
    from fclmodels.storage import trees  # torch, which a table of runs does not need

    refuse_changed(run.folder, f"knowledge/{files[-1].name}")
    with name_broken_file(files[-1]):
        shapes = trees.load_shapes(files[-1])
        if "ranks" not in shapes:
            return monitored
        groups: dict[str, list[np.ndarray]] = {}
        for layer, ranks in shapes["ranks"].items():
            groups.setdefault(find_module_name(layer), []).append(np.array(ranks) / shapes["bases"][layer][0])
        shares = {module: np.mean(of_groups, axis=0) for module, of_groups in groups.items()}
        of_layers = [*shares.items(), (None, np.mean(list(shares.values()), axis=0))] if shares else []
    rows = [
        {"monitor": "used_share", "task": task, "layer": layer, "value": float(share)}
        for layer, of_tasks in of_layers
        for task, share in enumerate(of_tasks)
    ]
    return pl.DataFrame(rows, schema=MONITORS)


def draw_prototypes(groups: Sequence[Group]) -> list[Plane]:
    """Draw those of the first run of each group whose server has some: another seed has other features."""
    of_groups = [(group, load_prototypes(group.runs[0])) for group in groups]
    return [_draw_plane(group, of_run) for group, of_run in of_groups if _do_span_a_plane([of.mu for of in of_run])]


def load_prototypes(run: RunFolder) -> list[Prototype]:
    """Return prototypes in the order of tasks. A mean that goes on over tasks has the first task of its class."""
    prototypes: dict[tuple[str, int], Prototype] = {}
    for file in _list_files(run):
        with name_broken_file(file):
            knowledge = _load_knowledge(file)
            of_file = [*_read_gaussians(knowledge, file.stem), *_read_class_means(knowledge, run.folder)]
        for group, label, mu, sigma2 in of_file:
            first = prototypes[group, label].task if (group, label) in prototypes else _parse_task(file)
            prototypes[group, label] = Prototype(first, label, mu, sigma2)
    return list(prototypes.values())


@contextmanager
def name_broken_file(file: Path) -> Iterator[None]:
    """Turn any error into a UserError that names the file: parts that do not fit each other can raise nearly all."""
    try:
        yield
    except UserError:
        raise
    except Exception as problem:
        reason = " ".join(f"{type(problem).__name__}: {problem}".split())
        raise UserError(f"{file} holds no knowledge of a run ({reason}). Make it again: fcl run.") from problem


def _read_gaussians(knowledge: Tree, task: str) -> Iterator[StoredPrototype]:
    """Yield PIP's Gaussians of a task (methods/parts/prototype_injection.py)."""
    if "prototypes" in knowledge:
        of = {name: knowledge["prototypes"][name].numpy() for name in ("mu", "sigma2", "known", "labels")}
        for row in np.flatnonzero(of["known"]):
            yield StoredPrototype(task, int(of["labels"][row]), of["mu"][row], of["sigma2"][row])


def _read_class_means(knowledge: Tree, folder: Path) -> Iterator[StoredPrototype]:
    """Yield Gaussians from sums over all tasks so far, by head (methods/nearest_prototype.py)."""
    for head, total in knowledge.get("told", {}).items():
        from fclmodels.numerics.prototypes import fit_gaussians

        of = {name: value.numpy() for name, value in fit_gaussians(total).to_tree().items()}
        refuse_changed(folder, "model/spec.json")
        spec = json.loads((folder / "model" / "spec.json").read_text("utf-8"))
        labels = spec["tasks"][int(head.split(".")[1])] if spec["head"] == "per-task" else range(len(of["mu"]))
        for row in np.flatnonzero(of["known"]):
            yield StoredPrototype(head, labels[row], of["mu"][row], of["sigma2"][row])


def _load_knowledge(file: Path) -> Tree:
    """Return the content of a file that has prototypes, else an empty tree: bases can be large."""
    from fclmodels.storage import trees

    refuse_changed(file.parents[1], f"knowledge/{file.name}")
    return trees.load(file) if trees.load_shapes(file).keys() & {"prototypes", "told"} else {}


def _list_files(run: RunFolder) -> list[Path]:
    return sorted((run.folder / "knowledge").glob("task-*.safetensors"), key=_parse_task)


def _parse_task(file: Path) -> int:
    return int(file.stem.removeprefix("task-"))


def _draw_plane(group: Group, prototypes: Sequence[Prototype]) -> Plane:
    """Draw a run's prototypes; colours and shapes are the tasks."""
    places, directions, shares = project_to_plane(np.stack([of.mu for of in prototypes]))
    placed = zip(prototypes, places.tolist(), strict=True)
    spots = [_build_spot(of, x, y, directions, len(prototypes)) for of, (x, y) in placed]
    across, up = (f"{100 * share:.0f} %" for share in shares)
    run = group.runs[0]
    title = f"{group.label}, seed {run.result.seed}"
    return draw_map(title, spots, f"across: {across} of the means’ variance", f"up: {up} of it", [run.folder])


def _do_span_a_plane(mu: Sequence[np.ndarray]) -> bool:
    """Return whether they do: two or fewer do not, nor any after training has diverged."""
    points = np.array(mu)
    return bool(len(points) and np.isfinite(points).all() and np.linalg.matrix_rank(points - points.mean(0)) > 1)


def _build_spot(of: Prototype, x: float, y: float, directions: np.ndarray, count: int) -> Spot:
    rx, ry = np.sqrt(of.sigma2 @ directions**2).tolist()
    label = str(of.label) if count <= MOST_LABELS else ""
    return Spot(of.task, f"task {of.task + 1}, class {of.label}", x, y, label, (rx, ry))


def project_to_plane(mu: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the places [n, 2] of points [n, F] on their principal plane, its directions [F, 2], and the share of
    their variance on each.

    The sign of a direction is free: its largest entry is positive.
    """
    centred = mu - mu.mean(0)
    _, S, Vt = np.linalg.svd(centred, full_matrices=False)
    directions = Vt[:2].T * np.sign(Vt[np.arange(2), np.abs(Vt[:2]).argmax(1)])
    return centred @ directions, directions, S[:2] ** 2 / (S**2).sum()
