"""Options that several commands share, and completions for the shell."""

from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[2]
PARAMS = Path("params.yaml")


def complete_methods(start: str) -> list[str]:
    """Return the names of methods that begin so, the project's own too, for the shell."""
    from fclmodels.plugins import read_names

    return [name for name in read_names("method") if name.startswith(start)]


def complete_presets(start: str) -> list[str]:
    return sorted(file.stem for file in Path("presets").glob("*.yaml") if file.stem.startswith(start))


ParamsFile = Annotated[Path, typer.Option("--params", metavar="FILE", help="the settings file")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="a setting to override; may be repeated")]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print no progress")]
