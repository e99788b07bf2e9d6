"""What a comparison says of presets: a paper's own figures beside the measured ones, and what was run smaller."""

import json
from collections.abc import Iterable
from typing import NamedTuple

from fclmodels.report import words
from fclmodels.report.runs import Group, Run
from fclmodels.settings import PaperTable, PresetSettings


class Figure(NamedTuple):
    """A method's row in a paper's table."""

    method: str
    table: PaperTable

    @property
    def values(self) -> dict[str, float]:
        return dict(zip(self.table.columns, self.table.rows[self.method], strict=True))

    @property
    def title(self) -> str:
        where = "".join(f", {name.rpartition('.')[2]}={value}" for name, value in self.table.where.items())
        return f"{self.method}, {self.table.table}{where}"


Published = dict[str, dict[str, list[Figure]]]


def published(groups: Iterable[Group]) -> Published:
    """By preset and reading the paper's figures of what was run, each once."""
    found: Published = {}
    for run in (run for group in groups for run in group.runs):
        preset = run.result.preset or PresetSettings()
        for figure in _figures_of(run, preset):
            of_reading = found.setdefault(str(preset.name), {}).setdefault(figure.table.reading, [])
            of_reading += [figure] if figure not in of_reading else []
    return found


def in_words(groups: Iterable[Group]) -> list[str]:
    """The same as sentences."""
    return [
        f"{preset}, {words.reading(reading).title.lower()}, in the paper: {'; '.join(map(_in_words, figures))}."
        for preset, readings in published(groups).items()
        for reading, figures in readings.items()
    ]


def shrunk(groups: Iterable[Group]) -> list[str]:
    """What was run with fewer rounds than its settings name, in sentences."""
    texts = []
    for group in groups:
        if scaled := group.runs[0].result.scaled:
            rounds, of = (sum(scaled[name]) for name in ("rounds", "of"))
            texts.append(f"{group.label}: {rounds} rounds in place of {of} (federation.rounds_scale).")
    return texts


def _figures_of(run: Run, preset: PresetSettings) -> list[Figure]:
    """Those of the run's method: where some are for just its settings, in their reading only these."""
    tables = [
        table
        for table in preset.figures
        if run.result.method in table.rows
        and all(run.settings.get(name) == _text(value) for name, value in table.where.items())
    ]
    special = {table.reading for table in tables if table.where}
    return [Figure(run.result.method, table) for table in tables if table.where or table.reading not in special]


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _in_words(figure: Figure) -> str:
    of = figure.values
    figures = [
        f"{words.METRICS[name].title} {value:.2f}" + (f" ± {of[f'{name}_std']:.2f}" if f"{name}_std" in of else "")
        for name, value in of.items()
        if name in words.METRICS
    ]
    return f"{figure.title}: {', '.join(figures)}"
