"""The presets of a project: files of settings that mimic a paper, each with the paper's figures in it."""

from pathlib import Path
from textwrap import shorten
from typing import Any

from fclmodels.errors import UserError, did_you_mean
from fclmodels.params import preset_of
from fclmodels.settings import ExperimentSettings, PaperTable, PresetSettings

PRESETS = Path("presets")


def file_of(name: str) -> Path:
    files = {path.stem: path for path in _files()}
    if name not in files:
        raise UserError(f"{name} is not a preset. {did_you_mean(name, files)}")
    return files[name]


def every() -> list[tuple[PresetSettings, ExperimentSettings]]:
    """What each preset says of itself, and what it runs."""
    return [preset_of(path) for path in _files()]


def row(preset: PresetSettings, experiment: ExperimentSettings) -> dict[str, Any]:
    """A preset on one line of 80 columns: what it needs, and its paper's first figure of the last method that it runs,
    which is the paper's own."""
    needs = ", ".join(need.partition(" as ")[0] for need in preset.needs)
    told = [(m, table) for m in reversed(experiment.methods) for table in preset.figures if m in table.rows]
    figure = ""
    if told:
        method, table = told[0]
        figure = f"{method} {table.columns[0]} {table.rows[method][0]:g}"
    return {"preset": preset.name, "the paper's": figure, "needs": shorten(needs, 30, placeholder=" ...")}


def figures(preset: PresetSettings) -> list[dict[str, Any]]:
    """All figures of its paper, a method of a table on each line."""
    columns = list(dict.fromkeys(column for table in preset.figures for column in table.columns))
    return [
        {"table": table.table, "reading": table.reading, "where": shown_where(table), "method": method}
        | {column: dict(zip(table.columns, values, strict=True)).get(column) for column in columns}
        for table in preset.figures
        for method, values in table.rows.items()
    ]


def shown_where(table: PaperTable) -> str:
    return ", ".join(f"{name}={value}" for name, value in table.where.items())


def _files() -> list[Path]:
    files = sorted(PRESETS.glob("*.yaml"))
    if not files:
        raise UserError(f"{PRESETS}: no presets here. Work in the project's folder, which holds them.")
    return files
