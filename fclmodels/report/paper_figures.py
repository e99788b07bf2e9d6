"""Papers' own figures beside the measured ones, from the presets of runs; and which runs had fewer rounds."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from fclmodels.report.comparison import METRICS
from fclmodels.report.read_runs import Group, RunFolder
from fclmodels.settings.preset import PaperTable, PresetSettings, find_unit, format_setting


class Figure(NamedTuple):
    """Row of a method in a paper's table."""

    preset: str
    method: str
    table: PaperTable
    decimals: dict[str, int]  # of each column, as the paper's table has them, as far as its figures tell

    @property
    def values(self) -> dict[str, float]:
        row = zip(self.table.columns, self.table.rows[self.method], strict=True)
        return {column: value for column, value in row if value is not None}

    @property
    def has_metrics(self) -> bool:
        """Whether a comparison has a column for one of its figures."""
        return any(name in METRICS for name in self.values)

    @property
    def title(self) -> str:
        where = "".join(f", {name.rpartition('.')[2]}={value}" for name, value in self.table.where.items())
        return f"{self.method}, {self.table.table}{where}"

    def text(self, name: str) -> str:
        """Return a figure with its standard deviation, in the paper's unit and decimals; a dash if it has none."""
        if name not in self.values:
            return "–"
        numbers = [self.values[column] for column in (name, f"{name}_std") if column in self.values]
        return " ± ".join(f"{value:.{self.decimals[_drop_suffixes(name)]}f}" for value in numbers).replace("-", "−")


def collect_figures(groups: Iterable[Group]) -> dict[str | None, list[Figure]]:
    """Return the papers' figures of these runs by reading, each once; None: those that are not of accuracies."""
    figures: dict[str | None, list[Figure]] = {}
    for run in (run for group in groups for run in group.runs):
        for figure in _match_figures(run, run.result.preset or PresetSettings()):
            of_reading = figures.setdefault(figure.table.reading, [])
            of_reading += [figure] if figure not in of_reading else []
    return figures


def list_paper_notes(groups: Sequence[Group]) -> list[str]:
    """Return what must be said of runs beside their paper: other settings, fewer rounds, and its other figures."""
    return [*describe_changes(groups), *describe_fewer_rounds(groups), *describe_other_figures(groups)]


def describe_other_figures(groups: Iterable[Group]) -> list[str]:
    """Return a line for each of the papers' figures of these runs that a comparison has no column for."""
    lines = []
    for figure in (figure for figures in collect_figures(groups).values() for figure in figures):
        text = describe_others(figure)
        lines += [f"paper: {figure.title}: {text}."] if text else []
    return lines


def describe_others(figure: Figure) -> str:
    """Return a row's figures that a comparison has no column for, with their units; those after each task together."""
    names = [name for name in figure.values if not name.endswith("_std") and name not in METRICS]
    texts = []
    for quantity, group in groupby(names, key=lambda name: name.partition("_after_")[0]):
        same = list(group)
        after = f" after tasks {same[0].rpartition('_')[2]} to {same[-1].rpartition('_')[2]}" if len(same) > 1 else ""
        numbers = ", ".join(figure.text(name) for name in same)
        texts.append(f"{_name_quantity(quantity if after else same[0])}{after} {numbers} {find_unit(same[0])}".rstrip())
    return "; ".join(texts)


def describe_changes(groups: Iterable[Group]) -> list[str]:
    """Return a sentence for each group whose settings are not its preset's, nor those of another table of the paper."""
    texts = []
    for group in groups:
        run, preset = group.runs[0], group.runs[0].result.preset or PresetSettings()
        if preset.changes and not _match_figures(run, preset):
            changes = ", ".join(f"{name} {own} (there {theirs})" for name, (own, theirs) in preset.changes.items())
            texts.append(f"{group.label} differs from the paper's setting, {preset.name}, in: {changes}.")
    return texts


def list_figures(preset: PresetSettings, method: str) -> list[Figure]:
    """Return all figures that a preset has of a method."""
    tables = [table for table in preset.figures if method in table.rows]
    return [Figure(str(preset.name), method, table, _count_decimals(preset, table.table)) for table in tables]


def describe_fewer_rounds(groups: Iterable[Group]) -> list[str]:
    """Return a sentence for each group that ran fewer rounds than its settings name."""
    texts = []
    for group in groups:
        if scaled := group.runs[0].result.scaled:
            rounds, of = (sum(scaled[name]) for name in ("rounds", "of"))
            texts.append(f"{group.label}: {rounds} rounds in place of {of} (federation.rounds_scale).")
    return texts


def _match_figures(run: RunFolder, preset: PresetSettings) -> list[Figure]:
    """Return the figures of the run's method that belong to just its settings.

    These are the preset's but for what a table names in `where`. Where a reading has figures of a table with such
    settings, they stand in place of those without.
    """
    figures = [
        figure
        for figure in list_figures(preset, run.result.method)
        if preset.changes.keys() <= figure.table.where.keys()
        and all(run.settings.get(name) == format_setting(value) for name, value in figure.table.where.items())
    ]
    special = {figure.table.reading for figure in figures if figure.table.where}
    return [figure for figure in figures if figure.table.where or figure.table.reading not in special]


def _drop_suffixes(column: str) -> str:
    """Return the quantity of a column: without `_std`, and without `_after_3`."""
    return column.removesuffix("_std").partition("_after_")[0]


def _name_quantity(name: str) -> str:
    return name.replace("_", " ")


def _count_decimals(preset: PresetSettings, name: str) -> dict[str, int]:
    """Return, for each quantity in the paper's table of this name, the most decimals that a figure of it needs."""
    decimals: dict[str, int] = {}
    for table in (table for table in preset.figures if table.table == name):
        for row in table.rows.values():
            for column, value in zip(table.columns, row, strict=True):
                digits = repr(value or 0.0).removesuffix(".0").partition(".")[2]
                quantity = _drop_suffixes(column)
                decimals[quantity] = max(decimals.get(quantity, 0), len(digits))
    return decimals
