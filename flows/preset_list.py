"""The presets of a project: files of settings that mimic a paper, each with the paper's figures in it."""

from collections.abc import Sequence
from pathlib import Path
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


def row(preset: PresetSettings, methods: Sequence[str]) -> dict[str, Any]:
    """A preset in a list, with the paper's figures of these methods as it runs them."""
    tables = [table for table in preset.figures if not table.where]
    return {
        "preset": preset.name,
        "the paper's accuracy / forgetting, in %": "\n".join(filter(None, (_figures(t, methods) for t in tables))),
        "needs": "\n".join(preset.needs),
    }


def _files() -> list[Path]:
    files = sorted(PRESETS.glob("*.yaml"))
    if not files:
        raise UserError(f"{PRESETS}: no presets here. Work in the project's folder, which holds them.")
    return files


def _figures(table: PaperTable, methods: Sequence[str]) -> str:
    rows = {
        method: dict(zip(table.columns, row, strict=True)) for method, row in table.rows.items() if method in methods
    }
    texts = [
        f"{method} {' / '.join(f'{of[c]:g}' for c in ('acc', 'ft', 'fgt') if c in of)}" for method, of in rows.items()
    ]
    return f"{table.reading.replace('_', '-')}: {', '.join(texts)} ({table.table})" if texts else ""
