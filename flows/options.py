"""The app `fcl`, and what its commands share. Nothing heavy is imported before a command needs it."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

EPILOG = (
    "Exit codes: 0 done, 1 something failed, 2 a mistake in what was given, 130 stopped with Ctrl-C. "
    "Tables and JSON go to standard output, all else to standard error; colours only to a terminal."
)

app = typer.Typer(
    name="fcl",
    help="Federated continual learning as a workflow: data, experiments, comparison.",
    epilog=EPILOG,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

ROOT = Path(__file__).parents[1]
PARAMS = Path("params.yaml")
VERBOSE = {"PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO", "MLFLOW_LOGGING_LEVEL": "INFO"}


def names(folder: str) -> Callable[[str], list[str]]:
    """For the shell's completion: the names of a package's plugins, which are read; to import them takes seconds."""

    def beginning_with(start: str) -> list[str]:
        texts = [file.read_text() for file in sorted((ROOT / folder).glob("*.py"))]
        found = [name for text in texts for name in re.findall(r'^    name = "(.+)"$', text, re.MULTILINE)]
        return [name for name in found if name.startswith(start)]

    return beginning_with


def presets(start: str) -> list[str]:
    return sorted(file.stem for file in Path("presets").glob("*.yaml") if file.stem.startswith(start))


def be_verbose(asked: bool) -> None:
    """The workflow's own logs on the terminal; they read these when they are imported."""
    if asked:
        os.environ |= VERBOSE


METHODS = names("fclmodels/methods")
ParamsFile = Annotated[Path, typer.Option("--params", metavar="FILE", help="the settings file")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="a setting to override; may be repeated")]
Json = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print no progress")]
