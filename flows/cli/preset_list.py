"""The presets of a project: settings files that follow a paper, each with the paper's figures."""

from pathlib import Path
from textwrap import shorten
from typing import Any

from fclmodels.errors import UserError, suggest_name
from fclmodels.report.comparison import METRICS
from fclmodels.report.paper_figures import Figure, describe_others, list_figures
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


def summarise_preset(preset: PresetSettings, experiment: ExperimentSettings) -> dict[str, Any]:
    """Return a row of at most 80 columns: needs, and the paper's first figure of its own method.

    That is the last one in whose family's name the preset's begins: pip-dualp in pip-digits.
    """
    needs = ", ".join(need.partition(" as ")[0] for need in preset.needs)
    own = [m for m in reversed(experiment.methods) if m.partition("-")[0] == (preset.name or "").partition("-")[0]]
    figures = [(m, table) for m in own or reversed(experiment.methods) for table in preset.figures if m in table.rows]
    figure = ""
    if figures:
        method, table = figures[0]
        figure = f"{method} {table.columns[0]} {table.rows[method][0]:g}"
    return {"preset": preset.name, "the paper's": figure, "needs": shorten(needs, 30, placeholder=" ...")}


def list_accuracies(preset: PresetSettings) -> list[dict[str, Any]]:
    """Return the paper's figures that a comparison has columns for, a row for each method of each table, in %."""
    rows = [row for row in list_rows(preset) if row.has_metrics]
    names = dict.fromkeys(name for row in rows for name in row.values if name.removesuffix("_std") in METRICS)
    return [
        {"table": row.table.table, "reading": row.table.reading, "where": format_conditions(row.table)}
        | {"method": row.method}
        | {name: row.values.get(name) for name in names}
        for row in rows
    ]


def list_others(preset: PresetSettings) -> list[dict[str, Any]]:
    """Return the paper's other figures, such as bytes and seconds, a row for each method of each table."""
    return [
        {"table": row.table.table, "where": format_conditions(row.table), "method": row.method, "figures": figures}
        for row in list_rows(preset)
        if (figures := describe_others(row))
    ]


def list_rows(preset: PresetSettings) -> list[Figure]:
    """Return each row of the paper's tables, in their order."""
    methods = dict.fromkeys(method for table in preset.figures for method in table.rows)
    by_method = {method: iter(list_figures(preset, method)) for method in methods}
    return [next(by_method[method]) for table in preset.figures for method in table.rows]


def format_conditions(table: PaperTable) -> str:
    return ", ".join(f"{name}={value}" for name, value in table.where.items())


def _list_files() -> list[Path]:
    files = sorted(PRESETS.glob("*.yaml"))
    if not files:
        raise UserError(f"{PRESETS}: no presets here. Work in the project's folder, which holds them.")
    return files
