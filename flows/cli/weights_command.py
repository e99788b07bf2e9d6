"""The command `fcl weights`; what its actions do stands in weights.py, which takes seconds to import."""

from pathlib import Path
from typing import Annotated

import typer

from fclmodels.errors import UserError, suggest_name
from flows.cli import terminal
from flows.cli.options import PARAMS, Json, ParamsFile, Quiet, Set

WEIGHT_ACTIONS = ("list", "check", "import", "estimate")


def manage_weights(
    action: Annotated[str, typer.Argument(metavar="|".join(WEIGHT_ACTIONS), help="the action")] = "list",
    source: Annotated[
        str | None, typer.Argument(help="a file or folder of weights, torchvision or timm; not for list")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="where new files go")] = Path("data/pretrained"),
    images: Annotated[Path | None, typer.Option(metavar="DIR", help="estimate: pictures, in any folders")] = None,
    splits: Annotated[Path | None, typer.Option(metavar="DIR", help="estimate: splits, of which train rows")] = None,
    task: Annotated[int, typer.Option(min=1, help="estimate: the task of these rows")] = 1,
    params: ParamsFile = PARAMS,
    overrides: Set = [],  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List pretrained weights, check whether a file fits your model's settings, import one, estimate its statistics."""
    from fclmodels.errors import format_value
    from fclmodels.settings.load import load_params
    from flows.cli import weights

    if action not in WEIGHT_ACTIONS:
        raise UserError(f"fcl weights {action}: there is no such action. {suggest_name(action, WEIGHT_ACTIONS)}")
    if action == "list":
        terminal.print_rows(weights.list_weights(), json)
        return
    if source is None:
        raise UserError(f"fcl weights {action}: name a file or folder of weights, torchvision or timm.")
    settings = load_params(params, overrides)
    if action == "check":
        row = weights.check(source, settings)
    elif action == "import":
        row = weights.import_source(source, out, settings)
    else:
        row = weights.estimate(source, weights.Images(images, splits, task), out, settings)
    if json:
        terminal.print_json(row)
    else:
        cells = {name: format_value(value) if isinstance(value, dict) else value for name, value in row.items()}
        terminal.print_table([{"what": name, "found": cell} for name, cell in cells.items()])
    if action != "check":
        chosen = " ".join(f"--set {key}={value}" for key, value in row["settings"].items())
        terminal.tell(f"next: fcl run {chosen}", quiet)
