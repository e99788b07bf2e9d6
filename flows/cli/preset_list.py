"""The presets of a project: settings files that follow a paper, each with the paper's figures."""

from pathlib import Path
from textwrap import shorten
from typing import Any

from fclmodels.errors import UserError, suggest_name
from fclmodels.settings.load import load_preset
from fclmodels.settings.preset import PaperTable, PresetSettings
from fclmodels.settings.schema import ExperimentSettings

PRESETS = Path("presets")


def find_preset(name: str) -> Path:
    """Return the file of a preset; raise UserError if there is none of this name."""
    files = {path.stem: path for path in _list_files()}
    if name not in files:
        raise UserError(f"{name} is not a preset. {suggest_name(name, files)}")
    return files[name]


def load_presets() -> list[tuple[PresetSettings, ExperimentSettings]]:
    """Return the blocks `preset` and `experiment` of each file."""
    return [load_preset(path) for path in _list_files()]


def summarize_preset(preset: PresetSettings, experiment: ExperimentSettings) -> dict[str, Any]:
    """Return a row of at most 80 columns: needs, and the paper's first figure of its own method, which comes last."""
    needs = ", ".join(need.partition(" as ")[0] for need in preset.needs)
    figures = [(m, table) for m in reversed(experiment.methods) for table in preset.figures if m in table.rows]
    figure = ""
    if figures:
        method, table = figures[0]
        figure = f"{method} {table.columns[0]} {table.rows[method][0]:g}"
    return {"preset": preset.name, "the paper's": figure, "needs": shorten(needs, 30, placeholder=" ...")}


def list_figures(preset: PresetSettings) -> list[dict[str, Any]]:
    """Return all figures of its paper, a row for each method of each table."""
    columns = list(dict.fromkeys(column for table in preset.figures for column in table.columns))
    return [
        {"table": table.table, "reading": table.reading, "where": format_conditions(table), "method": method}
        | {column: dict(zip(table.columns, values, strict=True)).get(column) for column in columns}
        for table in preset.figures
        for method, values in table.rows.items()
    ]


def format_conditions(table: PaperTable) -> str:
    return ", ".join(f"{name}={value}" for name, value in table.where.items())


def _list_files() -> list[Path]:
    files = sorted(PRESETS.glob("*.yaml"))
    if not files:
        raise UserError(f"{PRESETS}: no presets here. Work in the project's folder, which holds them.")
    return files
