"""Papers' own figures beside the measured ones, from the presets of runs; and which runs had fewer rounds."""

import json
from collections.abc import Iterable
from typing import NamedTuple

from fclmodels.report.read_runs import Group, RunFolder
from fclmodels.settings.schema import PaperTable, PresetSettings


class Figure(NamedTuple):
    """Row of a method in a paper's table."""

    preset: str
    method: str
    table: PaperTable
    decimals: int  # as the paper's table has them, as far as its figures tell

    @property
    def values(self) -> dict[str, float]:
        return dict(zip(self.table.columns, self.table.rows[self.method], strict=True))

    @property
    def title(self) -> str:
        where = "".join(f", {name.rpartition('.')[2]}={value}" for name, value in self.table.where.items())
        return f"{self.method}, {self.table.table}{where}"

    def text(self, name: str) -> str:
        """Return a figure in percent with its standard deviation, in the paper's decimals; a dash if it has none."""
        if name not in self.values:
            return "–"
        numbers = [self.values[column] for column in (name, f"{name}_std") if column in self.values]
        return " ± ".join(f"{value:.{self.decimals}f}" for value in numbers).replace("-", "−")


def collect_figures(groups: Iterable[Group]) -> dict[str, list[Figure]]:
    """Return the papers' figures of these runs by reading, each once."""
    figures: dict[str, list[Figure]] = {}
    for run in (run for group in groups for run in group.runs):
        for figure in _match_figures(run, run.result.preset or PresetSettings()):
            of_reading = figures.setdefault(figure.table.reading, [])
            of_reading += [figure] if figure not in of_reading else []
    return figures


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
    """Return the figures of the run's method; where a reading has some for just its settings, only these."""
    figures = [
        figure
        for figure in list_figures(preset, run.result.method)
        if all(run.settings.get(name) == _as_text(value) for name, value in figure.table.where.items())
    ]
    special = {figure.table.reading for figure in figures if figure.table.where}
    return [figure for figure in figures if figure.table.where or figure.table.reading not in special]


def _count_decimals(preset: PresetSettings, name: str) -> int:
    """Return the most decimals that a figure of the paper's table of this name needs."""
    rows = [row for table in preset.figures if table.table == name for row in table.rows.values()]
    return max(len(f"{value:g}".partition(".")[2]) for row in rows for value in row)


def _as_text(value: str | float) -> str:
    return value if isinstance(value, str) else json.dumps(value)
