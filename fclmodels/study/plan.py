"""The plan of a study, as its file has it: settings, rows, seeds; and every run that follows from it."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from fclmodels.errors import Place, UserError, suggest_name
from fclmodels.metrics import CLIENT_METRICS, CONFUSION_METRICS, MATRIX_METRICS
from fclmodels.plugins import find
from fclmodels.settings.base import Settings
from fclmodels.settings.load import SettingsCheck, load_params
from fclmodels.settings.schema import Params
from fclmodels.settings.yaml_source import YamlSource
from fclmodels.tables import READINGS

# One thread and one process for each run, so that runs side by side equal runs one after another to the bit.
ALONE = ("federation.executor=serial", "federation.threads=1")
METRICS = (*MATRIX_METRICS, *CLIENT_METRICS, *CONFUSION_METRICS)
Point = tuple[str, ...]  # settings `a.b=value` of one choice


class ValueRange(Settings):
    low: float = Field(description="the least value")
    high: float = Field(description="the largest value")
    log: bool = Field(False, description="true: values are drawn evenly by their logarithm")
    whole: bool = Field(False, description="true: whole numbers only")

    @model_validator(mode="after")
    def _is_a_range(self) -> "ValueRange":
        if not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError(f"low {self.low:g}, high {self.high:g} is no range: low below high, above 0 where log")
        if self.whole and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError("low and high must be whole numbers where whole is true")
        return self


class StudyRow(Settings):
    method: str = Field(description="the method: fcl list methods")
    set: tuple[str, ...] = Field((), description="settings `a.b=value` of this row, over all others")
    grid: dict[str, tuple[Any, ...]] = Field({}, description="setting: its values; every combination is tried")
    search: dict[str, tuple[Any, ...] | ValueRange] = Field(
        {}, description="setting: its values, or their low and high; Optuna tries `budget` choices, and prunes"
    )
    like: str | None = Field(None, description="a row whose chosen settings this one takes")
    seeds: tuple[NonNegativeInt, ...] | None = Field(None, description="seeds of this row; null: the study's")

    @model_validator(mode="after")
    def _is_tuned_in_one_way(self) -> "StudyRow":
        if sum(map(bool, (self.grid, self.search, self.like))) > 1:
            raise ValueError("a row has one of grid, search and like")
        if empty := [key for key, values in (self.grid | self.search).items() if values == ()]:
            raise ValueError(f"{empty[0]} has no values. Name one at least, or leave it out")
        if set_twice := [text for text in self.set if text.partition("=")[0] in self.grid | self.search]:
            raise ValueError(f"{set_twice[0]} is set, and its values are tried. Have it in one place")
        if self.seeds == ():
            raise ValueError("seeds has none. Name one at least, or leave it out")
        return self

    @property
    def points(self) -> list[Point]:
        """Return the choices of the grid; one without settings where there is none."""
        axes = [[format_override(key, value) for value in values] for key, values in self.grid.items()]
        return list(itertools.product(*axes))


class Study(Settings):
    """All of a study's file."""

    params: str = Field(description="the settings file that all runs share, such as a preset's")
    set: tuple[str, ...] = Field((), description="settings `a.b=value` over that file")
    scale: float | None = Field(None, gt=0, le=1, description="federation.rounds_scale of all runs; null: the file's")
    seeds: tuple[NonNegativeInt, ...] = Field(
        min_length=1,
        description="seeds that are judged, on test rows; stream and partition follow where theirs is null",
    )
    tuning_seeds: tuple[NonNegativeInt, ...] = Field(
        (100,), min_length=1, description="seeds that choose settings, on val rows; none of them is judged"
    )
    budget: PositiveInt | None = Field(None, description="the most choices a row may try; null: its grid's")
    reading: str = Field("task_agnostic", description="the reading of accuracy that chooses and is shown")
    metrics: tuple[str, ...] = Field(
        ("acc",), min_length=1, description="what is shown, also as reading.metric; the first is compared and ranked"
    )
    after_each: tuple[str, ...] = Field((), description="metrics of a further table, after each task")
    reference: str | None = Field(None, description="the row that the others are compared with; null: the first")
    rows: dict[str, StudyRow] = Field(min_length=1, description="label: row")

    @model_validator(mode="after")
    def _rows_fit(self) -> "Study":
        for label, row in self.rows.items():
            if row.like is not None and not ((other := self.rows.get(row.like)) and (other.grid or other.search)):
                raise ValueError(f"rows.{label}.like is {row.like}, which is no row with a grid or a search")
            if row.search and self.budget is None:
                raise ValueError(f"rows.{label} has a search: set budget, the number of choices that it tries")
            if self.budget is not None and len(row.points) > self.budget:
                raise ValueError(f"rows.{label}.grid has {len(row.points)} choices, and budget is {self.budget}")
            is_tuned = row.grid or row.search or row.like
            if is_tuned and (both := {*self.tuning_seeds} & {*self.seeds, *(row.seeds or ())}):
                raise ValueError(f"seed {min(both)} is in seeds and in tuning_seeds: what chooses settings judges none")
        of_rows = {f"rows.{label}.seeds": row.seeds or () for label, row in self.rows.items()}
        for name, seeds in {"seeds": self.seeds, "tuning_seeds": self.tuning_seeds, **of_rows}.items():
            if len(set(seeds)) < len(seeds):
                raise ValueError(f"{name} has a seed twice: a draw counts once")
        folders = [name_folder(label) for label in self.rows]
        if twice := [label for label, name in zip(self.rows, folders, strict=True) if folders.count(name) > 1]:
            raise ValueError(f"{' and '.join(twice)} would share a folder. Name the rows differently")
        return self

    @model_validator(mode="after")
    def _names_exist(self) -> "Study":
        if self.reference is not None and self.reference not in self.rows:
            raise ValueError(f"reference is {self.reference}. {suggest_name(self.reference, self.rows)}")
        readings = [metric.rpartition(".")[0] for metric in self.metrics]
        for reading in filter(None, [self.reading, *readings]):
            if reading not in READINGS:
                raise ValueError(f"{reading} is no reading. {suggest_name(reading, READINGS)}")
        shown = [metric.rpartition(".")[2] for metric in self.metrics]
        for names, valid in ((shown, METRICS), (self.after_each, tuple(MATRIX_METRICS))):
            for name in names:
                if name not in valid:
                    raise ValueError(f"{name} is no metric here. {suggest_name(name, valid)}")
        return self

    @property
    def compared_with(self) -> str:
        """Return the label of the reference."""
        return self.reference or next(iter(self.rows))

    def get_seeds(self, label: str) -> tuple[int, ...]:
        """Return the seeds by which a row is judged."""
        return self.rows[label].seeds or self.seeds

    def select_rows(self, labels: Sequence[str]) -> "Study":
        """Return the study of these rows alone, and of the rows whose choice they take; of all where none is named."""
        if not labels:
            return self
        for label in labels:
            if label not in self.rows:
                raise UserError(f"{label} is no row of the study. {suggest_name(label, self.rows)}")
        needed = {*labels, *(like for label in labels if (like := self.rows[label].like))}
        reference = self.reference if self.reference in needed else None
        rows = {label: row for label, row in self.rows.items() if label in needed}
        return self.model_copy(update={"rows": rows, "reference": reference})


@dataclass(frozen=True)
class StudyJob:
    """One run of a study: a method with a seed and the settings over the shared file."""

    label: str
    method: str
    seed: int
    params: str
    overrides: tuple[str, ...]

    def load(self) -> Params:
        return load_params(self.params, self.overrides, self.method, self.seed)


class _StudyCheck(SettingsCheck):
    @cached_property
    def valid_paths(self) -> list[str]:
        rows = (f"rows.{label}.{name}" for label in self.read_block(("rows",)) for name in StudyRow.model_fields)
        ranges = (
            f"rows.{label}.search.{key}.{name}"
            for label in self.read_block(("rows",))
            for key in self.read_block(("rows", label, "search"))
            for name in ValueRange.model_fields
        )
        return [*Study.model_fields, *rows, *ranges]


def load_study(path: Path, overrides: Sequence[str] = (), scale: float | None = None) -> Study:
    """Read a study's file; overrides and the scale are over its own. One error lists all mistakes, in file order."""
    source = YamlSource(str(path))
    source.read_file(path)
    check = _StudyCheck(source)
    labels = list(check.read_block(("rows",)))
    for label in labels:
        for key, values in check.read_block(("rows", label, "search")).items():
            if isinstance(values, dict):
                check.build_settings(("rows", label, "search", key), ValueRange)
    check.raise_problems()
    rows = {label: check.build_settings(("rows", label), StudyRow) for label in labels}
    check.raise_problems()
    outside = {key: value for key, value in check.read_block(()).items() if key != "rows"}
    dumped = {label: row.model_dump(mode="json") for label, row in rows.items()}
    study = check.build_settings((), Study, {**outside, "rows": dumped})
    check.raise_problems()
    changed = {"set": (*study.set, *overrides)} | ({} if scale is None else {"scale": scale})
    return study.model_copy(update=changed)


def make_tuning(
    method: str,
    params: Path,
    overrides: Sequence[str],
    grids: Sequence[str],
    ranges: Sequence[str],
    budget: int | None,
    seeds: Sequence[int],
    reading: str,
) -> Study:
    """Return the study of one row that tunes a method: grids as KEY=A,B, ranges as KEY=LOW:HIGH or KEY=LOW:HIGH:log."""
    if bool(grids) == bool(ranges):
        raise UserError(f"Name what to tune {method} by: --grid KEY=A,B, or --search KEY=LOW:HIGH and --budget.")
    if reading not in READINGS:
        raise UserError(f"--by is {reading}. {suggest_name(reading, READINGS)}")
    if ranges and budget is None:
        raise UserError("--search needs --budget, the number of choices that it tries.")
    grid = {key: tuple(_read_value(v, text) for v in values.split(",")) for key, values, text in _split(grids, "A,B")}
    search = {key: _read_range(values, text) for key, values, text in _split(ranges, "LOW:HIGH")}
    row = StudyRow(method=method, grid=grid, search=search)
    if budget is not None and len(row.points) > budget:
        raise UserError(f"--grid has {len(row.points)} choices, and --budget is {budget}.")
    spare = (max(seeds) + 1,)  # judged by nobody
    chosen = {"tuning_seeds": tuple(seeds), "seeds": spare, "reading": reading, "budget": budget}
    return Study(params=str(params), set=tuple(overrides), rows={method: row}, **chosen)


def check_plan(study: Study) -> None:
    """Raise UserError for a mistake in the settings of any run, or where val rows are missing, before anything runs."""
    for label, row in study.rows.items():
        lowest = tuple(format_override(key, _get_first(values)) for key, values in row.search.items())
        for point in [lowest] if row.search else row.points:
            try:
                find("method", row.method)
                params = build_job(study, label, point, study.get_seeds(label)[0]).load()
            except UserError as problem:
                raise UserError(f"rows.{label}: {problem}") from None
        if (row.grid or row.search) and params.partition.val == 0:
            raise UserError(f"rows.{label}: partition.val is 0, and val rows choose settings. Set it above 0.")


def load_rows(study: Study) -> dict[str, Params]:
    """Return each row's settings as the files have them, before stream and partition follow a run's seed."""
    jobs = (build_job(study, label, (), seed=0) for label in study.rows)
    return {job.label: load_params(job.params, job.overrides, job.method) for job in jobs}


def build_job(study: Study, label: str, point: Point, seed: int) -> StudyJob:
    """Return the run of a row with the settings of a point and a seed."""
    row = study.rows[label]
    scale = () if study.scale is None else (f"federation.rounds_scale={study.scale}",)
    return StudyJob(label, row.method, seed, study.params, (*ALONE, *scale, *study.set, *point, *row.set))


def format_override(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"


def _get_first(values: tuple[Any, ...] | ValueRange) -> Any:
    """Return a value that a search may try."""
    if isinstance(values, tuple):
        return values[0]
    return int(values.low) if values.whole else values.low


def name_folder(label: str) -> str:
    """Return a row's label as the name of its folder."""
    return re.sub(r"[^\w.+-]+", "-", label).strip("-.").lower() or "row"


def _split(texts: Sequence[str], form: str) -> list[tuple[str, str, str]]:
    """Return key, values and the text itself of each KEY=VALUES."""
    for text in texts:
        key, _, values = text.partition("=")
        if not key or not values:
            raise UserError(f"{text}: write a setting and its values, as in KEY={form}.")
    return [(*text.split("=", 1), text) for text in texts]  # type: ignore[misc]


def _read_value(value: str, text: str) -> Any:
    """Return a value of a list, as YAML has it."""
    return YamlSource(text).parse(value, (), lambda line: Place(True, 0, text))


def _read_range(values: str, text: str) -> ValueRange:
    low, _, high = values.removesuffix(":log").partition(":")
    try:
        numbers = [json.loads(low), json.loads(high)]
        return ValueRange(
            low=low, high=high, log=values.endswith(":log"), whole=all(isinstance(n, int) for n in numbers)
        )
    except ValueError:
        raise UserError(f"{text}: no range. Write LOW:HIGH, two numbers, and :log for a range above 0.") from None
