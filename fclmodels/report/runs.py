"""Reading run folders, and which of them are the same experiment with another seed."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, ValidationError

from fclmodels import foreign
from fclmodels.errors import UserError
from fclmodels.metrics import matrix
from fclmodels.params import flat
from fclmodels.sealed import read_result, refuse_changed, remake
from fclmodels.settings import PresetSettings

FORMAT = 1
REFERENCES = ("joint", "single-task")  # upper references, not federated methods: never marked as the best

# The columns that a comparison reads.
TABLES = {
    "accuracy": pl.Schema(
        {
            "reading": pl.String,
            "after": pl.Int16,
            "task": pl.Int16,
            "client": pl.Int32,
            "correct": pl.Int64,
            "total": pl.Int64,
        }
    ),
    "confusion": pl.Schema(
        {"reading": pl.String, "after": pl.Int16, "task": pl.Int16, "predicted": pl.Int16, "count": pl.Int64}
    ),
    "monitors": pl.Schema(
        {
            "monitor": pl.String,
            "task": pl.Int16,
            "round": pl.Int32,
            "about": pl.Int16,
            "layer": pl.String,
            "value": pl.Float64,
        }
    ),
    "rounds": pl.Schema(
        {"task": pl.Int16, "round": pl.Int32, "step": pl.Int32, "loss": pl.Float64, "seconds": pl.Float64}
    ),
    "ledger": pl.Schema(
        {
            "task": pl.Int16,
            "round": pl.Int32,
            "client": pl.Int32,
            "direction": pl.String,
            "part": pl.String,
            "kind": pl.String,
            "least": pl.String,
            "bytes": pl.Int64,
        }
    ),
}

OPTIONAL = ("confusion", "monitors")  # tables of methods that predict tasks, and of monitors that were on

# Settings that say how a run was made, not what it computes: they do not tell experiments apart.
NEUTRAL = ("federation.executor", "federation.workers", "federation.checkpoint_seconds", "monitors.")


class Privacy(BaseModel):
    """What a method's noise is worth, as far as a comparison reads it."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    epsilon: NonNegativeFloat
    delta: NonNegativeFloat
    covers: str


class Result(BaseModel):
    """result.json, as far as a comparison reads it."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    format: int
    method: str
    seed: int
    metrics: dict[str, dict[str, float | None]]
    settings: dict[str, Any]
    digests: dict[str, Any]
    versions: dict[str, Any]
    seconds: NonNegativeFloat
    timings: dict[str, Any] = {}
    bytes_up: NonNegativeInt
    bytes_down: NonNegativeInt
    bytes_kept: NonNegativeInt | None = None
    command: str | None = None
    preset: PresetSettings | None = None
    scaled: dict[str, list[int]] | None = None
    rounds_to_best: int | None = None
    faults: dict[str, int] | None = None
    privacy: Privacy | None = None
    remarks: list[str] = []


@dataclass(frozen=True)
class Run:
    """One method with one seed, as its folder has it."""

    folder: Path
    result: Result
    accuracy: pl.DataFrame
    confusion: pl.DataFrame
    monitors: pl.DataFrame
    rounds: pl.DataFrame
    ledger: pl.DataFrame

    @cached_property
    def matrices(self) -> dict[str, np.ndarray]:
        """The accuracy matrix [T + 1, T] of each reading."""
        return {reading: matrix(self.accuracy, reading) for reading in self.result.metrics}

    @cached_property
    def settings(self) -> dict[str, str]:
        """Effective settings by dotted name, as text."""
        return {k: v if isinstance(v, str) else json.dumps(v) for k, v in flat(self.result.settings).items()}

    @property
    def costs(self) -> dict[str, float | None]:
        """What the run took; of a round, without what monitors took. None where it is not known."""
        result = self.result
        travelled = {name: getattr(result, name) for name in ("bytes_up", "bytes_down", "bytes_kept", "seconds")}
        seconds = self.rounds.select(pl.mean("seconds")).item()
        return {**travelled, "seconds_per_round": seconds, "rounds_to_best": result.rounds_to_best}

    @property
    def tasks(self) -> int:
        return next((a.shape[1] for a in self.matrices.values()), 0)


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seeds: one row of a comparison."""

    label: str
    runs: tuple[Run, ...]

    @property
    def reference(self) -> bool:
        return self.runs[0].result.method in REFERENCES


def read_runs(folders: Sequence[Path | str]) -> tuple[Run, ...]:
    """All the runs to compare, in the order given; the same run twice is refused, for it would shrink the spread."""
    if not folders:
        raise UserError("no run folders given: name some, such as runs/fedavg-0 (fcl run makes them).")
    runs = tuple(read_run(Path(folder)) for folder in folders)
    seen: dict[tuple, Run] = {}
    for run in runs:
        key = (*_identity(run), run.result.seed, *_seeds(run))
        if key in seen:
            raise UserError(
                f"{run.folder}: the same method, settings and seed as {seen[key].folder}. Leave one of the two out."
            )
        seen[key] = run
    return runs


def read_run(folder: Path) -> Run:
    """One run folder, checked as far as a comparison needs it."""
    refuse_missing(folder)
    run = Run(folder, result_of(folder / "result.json"), **{name: read_table(folder, name) for name in TABLES})
    _check_accuracy(run)
    _check_confusion(run)
    _check_monitors(run)
    return run


def grouped(runs: Sequence[Run]) -> tuple[Group, ...]:
    """Runs by experiment in order of appearance, references last; labels tell groups of one method apart."""
    by_identity: dict[tuple, list[Run]] = defaultdict(list)
    for run in runs:
        by_identity[_identity(run)].append(run)
    variants: dict[str, list[list[Run]]] = defaultdict(list)
    for same in by_identity.values():
        variants[same[0].result.method].append(same)
    groups = [
        Group(method if len(siblings) == 1 else f"{method} ({_difference(same, siblings)})", tuple(same))
        for method, siblings in variants.items()
        for same in siblings
    ]
    return tuple(sorted(groups, key=lambda group: group.reference))


def batch_size(groups: Iterable[Group]) -> str:
    """Samples of an evaluation batch, as the groups' settings have it."""
    return " or ".join(dict.fromkeys(group.runs[0].settings.get("evaluation.batch_size", "?") for group in groups))


def is_seed(name: str) -> bool:
    return name.rpartition(".")[2] == "seed"


def _identity(run: Run) -> tuple:
    return run.result.method, tuple(sorted(telling_facts(run).items()))


def telling_facts(run: Run) -> dict[str, str]:
    """What makes runs of one method different experiments: settings by dotted name, tasks, code and data."""
    settings = {k: v for k, v in run.settings.items() if not is_seed(k) and not k.startswith(NEUTRAL)}
    digests = {name: str(run.result.digests.get(of)) for name, of in (("code", "code"), ("data", "prepared"))}
    return settings | {"tasks": str(run.tasks)} | {name: digest[:8] for name, digest in digests.items()}


def _seeds(run: Run) -> tuple:
    return tuple(sorted((name, value) for name, value in run.settings.items() if is_seed(name)))


def _difference(same: list[Run], siblings: list[list[Run]]) -> str:
    """What tells these runs from the other variants of their method, as 'mu=0.1, lr=0.5'."""
    own, others = telling_facts(same[0]), [telling_facts(other[0]) for other in siblings]
    names = sorted({name for other in others for name in {**own, **other} if own.get(name) != other.get(name)})
    leaves = [name.rpartition(".")[2] for name in names]
    short = {name: leaf if leaves.count(leaf) == 1 else name for name, leaf in zip(names, leaves, strict=True)}
    return ", ".join(f"{short[name]}={own.get(name, 'none')}" for name in names)


def refuse_missing(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder. Give folders that fcl run made, such as runs/fedavg-0.")


def result_of(path: Path) -> Result:
    """What result.json of a run folder says."""
    if not path.is_file():
        raise UserError(f"{path.parent}: no result.json, so no finished run. Finish it with fcl run, or leave it out.")
    content = read_result(path)
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise UserError(f"{path}: format {found!r}, this fclflow reads {FORMAT}. {remake(path.parent)}")
    try:
        return Result.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {where}: {first['msg'].lower()}. {remake(path.parent)}") from error


def read_table(folder: Path, name: str) -> pl.DataFrame:
    """One of TABLES as a run folder has it."""
    path = folder / f"{name}.parquet"
    refuse_changed(folder, path.name)
    if name in OPTIONAL and not path.exists():
        return pl.DataFrame(schema=TABLES[name])
    if not path.is_file():
        raise UserError(f"{folder}: no {path.name}. {remake(folder)}")
    try:
        table = foreign.read_table(path).select(list(TABLES[name])).cast(TABLES[name])
        if table.schema != TABLES[name]:  # a nested column stays one
            raise ValueError("a column of another type")
        return table
    except (pl.exceptions.PolarsError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: not readable or not fclflow's ({reason}). {remake(folder)}") from error


def _check_accuracy(run: Run) -> None:
    """Counts that can be, once for each place in the matrix, for every reading that result.json speaks of."""
    path, table = run.folder / "accuracy.parquet", run.accuracy
    sound = (pl.col("after") >= 0) & (pl.col("task") >= 0) & pl.col("correct").is_between(0, pl.col("total"))
    if not table.select(sound.fill_null(False).all()).item():
        raise UserError(f"{path}: has impossible counts. {remake(run.folder)}")
    if table.select("reading", "after", "task", "client").is_duplicated().any():
        raise UserError(f"{path}: measures the same thing twice. {remake(run.folder)}")
    missing = sorted(set(run.result.metrics) - set(table["reading"]))
    if missing:
        raise UserError(f"{path}: no rows for {', '.join(missing)}, which result.json has. {remake(run.folder)}")


def _check_confusion(run: Run) -> None:
    """Counts of learned tasks that were taken for learned tasks."""
    path, table = run.folder / "confusion.parquet", run.confusion
    learned = [pl.col(name).is_between(0, pl.col("after") - 1) for name in ("task", "predicted")]
    sound = pl.all_horizontal(*learned, pl.col("after") <= run.tasks, pl.col("count") >= 0)
    if not table.select(sound.fill_null(False).all()).item():
        raise UserError(f"{path}: has impossible counts. {remake(run.folder)}")
    if table.select("reading", "after", "task", "predicted").is_duplicated().any():
        raise UserError(f"{path}: counts the same thing twice. {remake(run.folder)}")


def _check_monitors(run: Run) -> None:
    """Finite values of tasks that the run has."""
    tasks = [pl.col(name).is_between(0, run.tasks - 1).fill_null(name == "about") for name in ("task", "about")]
    sound = pl.all_horizontal(*tasks, pl.col("value").is_finite().fill_null(False))
    if not run.monitors.select(sound.all()).item():
        path = run.folder / "monitors.parquet"
        raise UserError(f"{path}: has impossible values. {remake(run.folder)}")
