"""What a comparison says of presets: a paper's own figures beside the measured ones, and what was run smaller."""

import json
from collections.abc import Iterable
from typing import NamedTuple

from fclmodels.report.runs import Group, Run
from fclmodels.settings import PaperTable, PresetSettings


class Figure(NamedTuple):
    """A method's row in a paper's table."""

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
        """A figure in percent with its standard deviation, in the paper's decimals; a dash where it has none."""
        if name not in self.values:
            return "–"
        known = [self.values[column] for column in (name, f"{name}_std") if column in self.values]
        return " ± ".join(f"{value:.{self.decimals}f}" for value in known).replace("-", "−")


def published(groups: Iterable[Group]) -> dict[str, list[Figure]]:
    """By reading the papers' figures of what was run, each once."""
    found: dict[str, list[Figure]] = {}
    for run in (run for group in groups for run in group.runs):
        for figure in _figures_for(run, run.result.preset or PresetSettings()):
            of_reading = found.setdefault(figure.table.reading, [])
            of_reading += [figure] if figure not in of_reading else []
    return found


def shrunk(groups: Iterable[Group]) -> list[str]:
    """What was run with fewer rounds than its settings name, in sentences."""
    texts = []
    for group in groups:
        if scaled := group.runs[0].result.scaled:
            rounds, of = (sum(scaled[name]) for name in ("rounds", "of"))
            texts.append(f"{group.label}: {rounds} rounds in place of {of} (federation.rounds_scale).")
    return texts


def figures_of(preset: PresetSettings, method: str) -> list[Figure]:
    """All that a preset has of a method."""
    tables = [table for table in preset.figures if method in table.rows]
    return [Figure(str(preset.name), method, table, _decimals(preset, table.table)) for table in tables]


def _figures_for(run: Run, preset: PresetSettings) -> list[Figure]:
    """Those of the run's method: where some are for just its settings, in their reading only these."""
    found = [
        figure
        for figure in figures_of(preset, run.result.method)
        if all(run.settings.get(name) == _text(value) for name, value in figure.table.where.items())
    ]
    special = {figure.table.reading for figure in found if figure.table.where}
    return [figure for figure in found if figure.table.where or figure.table.reading not in special]


def _decimals(preset: PresetSettings, name: str) -> int:
    """The most that a figure of the paper's table of this name needs."""
    rows = [row for table in preset.figures if table.table == name for row in table.rows.values()]
    return max(len(f"{value:g}".partition(".")[2]) for row in rows for value in row)


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else json.dumps(value)
