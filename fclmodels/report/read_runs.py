"""Finished runs as their folders have them, and groups of runs that differ in their seeds alone."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, ValidationError

from fclmodels.errors import UserError
from fclmodels.metrics import accuracy_matrix, select_shown
from fclmodels.settings.load import flatten_settings
from fclmodels.settings.preset import NEUTRAL, PresetSettings, format_setting, is_seed
from fclmodels.storage import untrusted
from fclmodels.storage.sealed_json import describe_remedy, read_result, refuse_changed
from fclmodels.tables import ACCURACY, CONFUSION, LEDGER, MONITORS, ROUNDS

FORMAT = 1
REFERENCES = ("joint", "single-task")  # upper references, not federated methods: never marked as the best

# The columns that a comparison reads.
TABLES = {
    "accuracy": ACCURACY,
    "confusion": CONFUSION,
    "monitors": MONITORS,
    "rounds": pl.Schema({name: ROUNDS[name] for name in ("task", "round", "step", "loss", "seconds")}),
    "ledger": pl.Schema({name: kind for name, kind in LEDGER.items() if name != "base_round"}),
}

OPTIONAL = ("confusion", "monitors")  # tables of methods that predict tasks, and of monitors that were on


class Privacy(BaseModel):
    """Privacy that a method's noise gives, as far as a comparison reads it."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    epsilon: NonNegativeFloat
    delta: NonNegativeFloat
    covers: str


class Result(BaseModel):
    """Content of result.json, as far as a comparison reads it."""

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
    client_bytes: dict[str, NonNegativeInt] = {}
    peaks: dict[str, NonNegativeInt | None] = {}
    command: str | None = None
    preset: PresetSettings | None = None
    scaled: dict[str, list[int]] | None = None
    rounds_to_best: int | None = None
    faults: dict[str, int] | None = None
    privacy: Privacy | None = None
    remarks: list[str] = []


@dataclass(frozen=True)
class RunFolder:
    """Folder of one method's run with one seed, and its content."""

    folder: Path
    result: Result
    accuracy: pl.DataFrame
    confusion: pl.DataFrame
    monitors: pl.DataFrame
    rounds: pl.DataFrame
    ledger: pl.DataFrame

    @cached_property
    def metrics(self) -> dict[str, dict[str, float | None]]:
        """Metrics of each reading that is shown."""
        return select_shown(self.result.metrics)

    @cached_property
    def matrices(self) -> dict[str, np.ndarray]:
        """Accuracy matrix [T + 1, T] of each reading."""
        return {reading: accuracy_matrix(self.accuracy, reading) for reading in self.metrics}

    @cached_property
    def settings(self) -> dict[str, str]:
        """Effective settings by dotted name, as text."""
        return {name: format_setting(value) for name, value in flatten_settings(self.result.settings).items()}

    @property
    def costs(self) -> dict[str, float | None]:
        """Bytes, seconds, rounds and memory, None where unknown; monitors do not count in the seconds of a round."""
        result = self.result
        of_run = {name: getattr(result, name) for name in ("bytes_up", "bytes_down", "bytes_kept", "seconds")}
        seconds = self.rounds.select(pl.mean("seconds")).item()
        memory: dict[str, float | None] = {f"peak_{who}": result.peaks.get(who) for who in ("server", "worker")}
        memory["client_bytes"] = sum(result.client_bytes.values()) if result.client_bytes else None
        return {**of_run, "seconds_per_round": seconds, "rounds_to_best": result.rounds_to_best, **memory}

    @property
    def tasks(self) -> int:
        return next((a.shape[1] for a in self.matrices.values()), 0)


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seeds: one row of a comparison."""

    label: str
    runs: tuple[RunFolder, ...]

    @property
    def is_reference(self) -> bool:
        return self.runs[0].result.method in REFERENCES


def read_runs(folders: Sequence[Path | str]) -> tuple[RunFolder, ...]:
    """Read the runs to compare, in this order; the same run twice is refused, for it would shrink the spread."""
    if not folders:
        raise UserError("no run folders: name some, such as runs/fedavg-0 (fcl run makes them).")
    runs = tuple(read_run(Path(folder)) for folder in folders)
    by_key: dict[tuple, RunFolder] = {}
    for run in runs:
        key = (*_identify(run), run.result.seed, *_list_seeds(run))
        if key in by_key:
            raise UserError(
                f"{run.folder}: the same method, settings and seed as {by_key[key].folder}. Leave one of the two out."
            )
        by_key[key] = run
    return runs


def read_run(folder: Path) -> RunFolder:
    """Read one run folder, and check it as far as a comparison needs it."""
    refuse_missing(folder)
    run = RunFolder(folder, load_result(folder / "result.json"), **{name: read_table(folder, name) for name in TABLES})
    _check_accuracy(run)
    _check_confusion(run)
    _check_monitors(run)
    return run


def group_runs(runs: Sequence[RunFolder]) -> tuple[Group, ...]:
    """Group runs by experiment in order of appearance, references last; labels tell groups of one method apart."""
    by_identity: dict[tuple, list[RunFolder]] = defaultdict(list)
    for run in runs:
        by_identity[_identify(run)].append(run)
    variants_by_method: dict[str, list[list[RunFolder]]] = defaultdict(list)
    for seeds in by_identity.values():
        variants_by_method[seeds[0].result.method].append(seeds)
    groups = [
        Group(method if len(variants) == 1 else f"{method} ({_describe_difference(seeds, variants)})", tuple(seeds))
        for method, variants in variants_by_method.items()
        for seeds in variants
    ]
    return tuple(sorted(groups, key=lambda group: group.is_reference))


def describe_batch_size(groups: Iterable[Group]) -> str:
    """Return the samples of an evaluation batch as the groups' settings have them, such as "256" or "48 or 256"."""
    return " or ".join(dict.fromkeys(group.runs[0].settings.get("evaluation.batch_size", "?") for group in groups))


def _identify(run: RunFolder) -> tuple:
    return run.result.method, tuple(sorted(list_distinguishing_facts(run).items()))


def list_distinguishing_facts(run: RunFolder) -> dict[str, str]:
    """Return what makes runs of one method different experiments: settings by dotted name, tasks, code and data."""
    settings = {k: v for k, v in run.settings.items() if not is_seed(k) and not k.startswith(NEUTRAL)}
    digests = {name: str(run.result.digests.get(of)) for name, of in (("code", "code"), ("data", "prepared"))}
    return settings | {"tasks": str(run.tasks)} | {name: digest[:8] for name, digest in digests.items()}


def _list_seeds(run: RunFolder) -> tuple:
    return tuple(sorted((name, value) for name, value in run.settings.items() if is_seed(name)))


def _describe_difference(seeds: list[RunFolder], variants: list[list[RunFolder]]) -> str:
    """Return the settings in which these runs differ from other variants of their method, as 'mu=0.1, lr=0.5'."""
    own, others = list_distinguishing_facts(seeds[0]), [list_distinguishing_facts(other[0]) for other in variants]
    names = sorted({name for other in others for name in {**own, **other} if own.get(name) != other.get(name)})
    leaves = [name.rpartition(".")[2] for name in names]
    short = {name: leaf if leaves.count(leaf) == 1 else name for name, leaf in zip(names, leaves, strict=True)}
    return ", ".join(f"{short[name]}={own.get(name, 'none')}" for name in names)


def refuse_missing(folder: Path) -> None:
    """Raise UserError where the folder is not there."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder. Give folders that fcl run made, such as runs/fedavg-0.")


def load_result(path: Path) -> Result:
    """Read result.json of a run folder; UserError where it is missing, changed or of another format."""
    if not path.is_file():
        raise UserError(f"{path.parent}: no result.json, so no finished run. Finish it with fcl run, or leave it out.")
    content = read_result(path)
    number = content.get("format") if isinstance(content, dict) else None
    if number != FORMAT:
        raise UserError(f"{path}: format {number!r}, this fclflow reads {FORMAT}. {describe_remedy(path.parent)}")
    try:
        return Result.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{path}: {where}: {first['msg'].lower()}. {describe_remedy(path.parent)}") from error


def read_table(folder: Path, name: str) -> pl.DataFrame:
    """Read one of TABLES from a run folder; UserError where its columns or types are not fclflow's."""
    path = folder / f"{name}.parquet"
    refuse_changed(folder, path.name)
    if name in OPTIONAL and not path.exists():
        return pl.DataFrame(schema=TABLES[name])
    if not path.is_file():
        raise UserError(f"{folder}: no {path.name}. {describe_remedy(folder)}")
    try:
        table = untrusted.read_table(path).select(list(TABLES[name])).cast(TABLES[name])
        if table.schema != TABLES[name]:  # a nested column stays one
            raise ValueError("a column of another type")
        return table
    except (pl.exceptions.PolarsError, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: not readable or not fclflow's ({reason}). {describe_remedy(folder)}") from error


def _check_accuracy(run: RunFolder) -> None:
    """Refuse impossible or duplicate counts, and a reading of result.json without any."""
    path, table = run.folder / "accuracy.parquet", run.accuracy
    sound = (pl.col("after") >= 0) & (pl.col("task") >= 0) & pl.col("correct").is_between(0, pl.col("total"))
    if not table.select(sound.fill_null(False).all()).item():
        raise UserError(f"{path}: has impossible counts. {describe_remedy(run.folder)}")
    if table.select("reading", "after", "task", "client").is_duplicated().any():
        raise UserError(f"{path}: measures the same thing twice. {describe_remedy(run.folder)}")
    missing = sorted(set(run.result.metrics) - set(table["reading"]))
    if missing:
        raise UserError(
            f"{path}: no rows for {', '.join(missing)}, which result.json has. {describe_remedy(run.folder)}"
        )


def _check_confusion(run: RunFolder) -> None:
    """Refuse counts of tasks that were not learned yet, true or predicted, and duplicates."""
    path, table = run.folder / "confusion.parquet", run.confusion
    learned = [pl.col(name).is_between(0, pl.col("after") - 1) for name in ("task", "predicted")]
    sound = pl.all_horizontal(*learned, pl.col("after") <= run.tasks, pl.col("count") >= 0)
    if not table.select(sound.fill_null(False).all()).item():
        raise UserError(f"{path}: has impossible counts. {describe_remedy(run.folder)}")
    if table.select("reading", "after", "task", "predicted").is_duplicated().any():
        raise UserError(f"{path}: counts the same thing twice. {describe_remedy(run.folder)}")


def _check_monitors(run: RunFolder) -> None:
    """Refuse values that are not finite, or of tasks that the run does not have."""
    tasks = [pl.col(name).is_between(0, run.tasks - 1).fill_null(name == "about") for name in ("task", "about")]
    sound = pl.all_horizontal(*tasks, pl.col("value").is_finite().fill_null(False))
    if not run.monitors.select(sound.all()).item():
        path = run.folder / "monitors.parquet"
        raise UserError(f"{path}: has impossible values. {describe_remedy(run.folder)}")
