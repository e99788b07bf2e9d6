"""The presets of a project: files of settings that mimic a paper, each with the paper's figures in it."""

from pathlib import Path
from textwrap import shorten
from typing import Any

from fclmodels.errors import UserError, did_you_mean
from fclmodels.params import preset_of
from fclmodels.settings import ExperimentSettings, PresetSettings

PRESETS = Path("presets")


def file_of(name: str) -> Path:
    files = {path.stem: path for path in _files()}
    if name not in files:
        raise UserError(f"{name} is not a preset. {did_you_mean(name, files)}")
    return files[name]


def every() -> list[tuple[PresetSettings, ExperimentSettings]]:
    """What each preset says of itself, and what it runs."""
    return [preset_of(path) for path in _files()]


def row(preset: PresetSettings) -> dict[str, Any]:
    """A preset on one line of 80 columns; its file says where what it needs has to be."""
    needs = ", ".join(need.partition(" as ")[0] for need in preset.needs)
    return {"preset": preset.name, "needs": shorten(needs, 51, placeholder=" ...")}


def _files() -> list[Path]:
    files = sorted(PRESETS.glob("*.yaml"))
    if not files:
        raise UserError(f"{PRESETS}: no presets here. Work in the project's folder, which holds them.")
    return files
