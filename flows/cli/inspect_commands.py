"""Commands that start no flow: they show something, ask a model, or write a file to begin with."""

from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from fclmodels.errors import UserError, suggest_name
from flows.cli import terminal
from flows.cli.options import PARAMS, ROOT, Json, ParamsFile, Quiet, Set, complete_methods, complete_presets

NO_WEIGHTS = (
    "Pretrained weights: none at hand. model.weights: torchvision fetches ImageNet's, `fcl pretrain` makes small ones."
)
KINDS = {
    "methods": "method",
    "sources": "source",
    "streams": "stream",
    "partitions": "partition",
    "backbones": "backbone",
}


def predict(
    model: Annotated[str, typer.Argument(help="a run folder, its model, or models:/NAME@ALIAS of the tracking store")],
    files: Annotated[list[Path], typer.Argument(help="image files")],
    task: Annotated[int | None, typer.Option(min=1, help="the task of all files, from 1 [default: unknown]")] = None,
    params: ParamsFile = PARAMS,
    overrides: Set = [],  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Classify images: class, probability, predicted task, and relevance to each task if the model predicts tasks."""
    from fclmodels.settings.load import load_params
    from flows.cli.predict import open_model, predict_files

    classifier = open_model(model, lambda: load_params(params, overrides).tracking.uri)
    rows = predict_files(classifier, files, task)
    if json:
        terminal.print_json(rows)
    else:
        formats = {"probability": lambda p: f"{p:.3f}", "relevance": lambda r: r and " ".join(f"{of:.2f}" for of in r)}
        rows = [{name: formats.get(name, lambda v: v)(value) for name, value in row.items()} for row in rows]
        terminal.print_table(rows)
    for note in classifier.notes:
        terminal.tell(note, quiet)


def explain_settings(
    name: Annotated[str | None, typer.Argument(help="a block, a setting or a plugin [default: all]")] = None,
    json: Json = False,
) -> None:
    """Explain the settings: type, default, meaning."""
    from fclmodels import plugins
    from fclmodels.errors import format_value
    from fclmodels.settings.describe import explain

    for kind in KINDS.values():
        for problem in plugins.list_plugins(kind).problems:
            terminal.tell(problem)
    rows: list[dict[str, Any]] = [
        {"setting": s.path, "of": ", ".join(s.kinds), "type": s.type, "default": s.default, "meaning": s.description}
        for s in explain(name)
    ]
    if json:
        terminal.print_json(rows)
        return
    is_plugin = any(name in plugins.load_all(kind) for kind in KINDS.values())
    for row in rows:
        if is_plugin:
            del row["of"]
        if not isinstance(row["default"], str):
            row["default"] = format_value(row["default"])
    terminal.print_table(rows)


def list_plugins(
    kind: Annotated[str, typer.Argument(metavar="|".join(KINDS), help="what to list")],
    json: Json = False,
) -> None:
    """List methods, sources, streams, partitions or backbones."""
    from fclmodels import plugins

    if kind not in KINDS:
        raise UserError(f"{kind} cannot be listed. {suggest_name(kind, KINDS)}")
    listing = plugins.list_plugins(KINDS[kind])
    rows = [
        {"name": name, "from": module.origin, "what": (plugin.__doc__ or "").partition("\n")[0]}
        for name, (plugin, module) in listing.plugins.items()
    ]
    if not json and all(row["from"] == plugins.OURS for row in rows):
        rows = [{"name": row["name"], "what": row["what"]} for row in rows]
    terminal.print_rows(rows, json)
    for problem in listing.problems:
        terminal.tell(problem)


def run_doctor(params: ParamsFile = PARAMS, overrides: Set = [], json: Json = False) -> None:  # noqa: B006
    """Check versions, threads, device, disk and servers."""
    from fclmodels.settings.load import load_params
    from flows.cli.doctor import check_installation

    rows = list(check_installation(load_params(params, overrides).tracking.uri))
    terminal.print_rows(rows, json)
    if any(row["state"] == "PROBLEM" for row in rows):
        raise typer.Exit(1)


def list_presets(
    name: Annotated[
        str | None,
        typer.Argument(help="one of them, with all of its paper's figures", autocompletion=complete_presets),
    ] = None,
    json: Json = False,
) -> None:
    """List the presets with their papers' figures; `fcl preset NAME` runs one."""
    from fclmodels.plugins import load_all
    from flows.cli.preset_list import PRESETS, list_accuracies, list_others, load_presets, summarise_preset

    presets = load_presets()
    blocks = [(p, e) for p, e in presets if name in (None, p.name)]
    if not blocks:
        raise UserError(f"{name} is not a preset. {suggest_name(str(name), [str(p.name) for p, _ in presets])}")
    if json:
        terminal.print_json([p.model_dump(mode="json") | e.model_dump(mode="json") for p, e in blocks])
    elif name is not None:
        preset = blocks[0][0]
        terminal.print_table(list_accuracies(preset), title=f"{name}: {preset.paper}, in %")
        if others := list_others(preset):
            terminal.print_table(others, title="its other figures")
        methods = {method for table in preset.figures for method in table.rows}
        if missing := sorted(methods - set(load_all("method"))):
            terminal.tell(f"methods of the paper that fclflow does not have: {', '.join(missing)}")
    else:
        for paper, of_paper in groupby(blocks, key=lambda block: block[0].paper):
            terminal.print_table([summarise_preset(*block) for block in of_paper], title=paper)
        terminal.tell(f"all figures: fcl presets NAME; all of it: {PRESETS}/NAME.yaml")


def explain_method(
    method: Annotated[str, typer.Argument(help="see: fcl list methods", autocompletion=complete_methods)],
    here: Annotated[bool, typer.Option("--here", help="what a run costs with your settings, here")] = False,
    params: ParamsFile = PARAMS,
    overrides: Set = [],  # noqa: B006
    json: Json = False,
) -> None:
    """Explain a method: what it does, what leaves a client and at what cost, from its docstring and a short trial."""
    if here:
        _print_costs_here(method, params, overrides, json)
        return
    from fclmodels.experiment.method_card import describe_methods, format_card

    card = describe_methods([method])[0]
    if json:
        terminal.print_json(card)
    else:
        print("\n".join(format_card(card)))


def _print_costs_here(method: str, params: Path, overrides: list[str], json: bool) -> None:
    """Print what a run of a method costs with these settings on this machine."""
    from fclmodels.experiment.costs.estimate import Estimate, tabulate
    from flows.cli.run_commands import run_settings_flow

    costs = run_settings_flow("experiment", "estimate", params, overrides, method=method)
    if json:
        terminal.print_json(costs)
    else:
        terminal.print_table(tabulate(Estimate(**costs)))


def init(
    folder: Annotated[Path, typer.Argument(help="your images: [train|test]/[domain]/class/*")],
    params: Annotated[Path, typer.Option("--params", metavar="FILE", help="the settings file to write")] = PARAMS,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Look at a folder of images and write a commented params.yaml for it."""
    from flows.cli.init_choices import choose_settings, find_offer
    from flows.cli.init_folder import inspect_folder
    from flows.cli.init_machine import look_at_machine
    from flows.cli.init_project import write_params

    summary, machine = inspect_folder(folder), look_at_machine()
    choices, offer = choose_settings(summary, machine), find_offer(summary)
    write_params(summary, machine, choices, offer, params)
    rows = {**summary.describe(), "machine": str(machine), "weights": offer.name if offer else "none at hand"}
    if json:
        terminal.print_json({**rows, "chosen": {choice.setting: choice.value for choice in choices.values()}})
        return
    terminal.print_table([{"what": name, "found": value} for name, value in rows.items()])
    terminal.print_table(
        [{"setting": one.setting, "chosen": one.value, "because": one.why} for one in choices.values()]
    )
    terminal.tell(f"{params}: written. Check it, then: fcl run --method er", quiet)
    terminal.tell(f"From pretrained weights: {offer.command}" if offer else NO_WEIGHTS, quiet)


def show_status(params: ParamsFile = PARAMS, overrides: Set = [], json: Json = False) -> None:  # noqa: B006
    """Show which data and runs of `experiment` are done, running or stale, and how many of their steps are cached.

    Also show the stream of `arrivals`: its state, its champion, and arrivals that wait or are set aside.
    """
    from fclmodels.settings.load import load_params
    from flows.prefect import environment

    environment.set_defaults()
    from flows.cli.status import list_states

    terminal.print_rows(list(list_states(load_params(params, overrides), params, overrides)), json)


def write_method(
    name: Annotated[str, typer.Argument(help="its name in lower case, words joined by -")],
    quiet: Quiet = False,
) -> None:
    """Write the file of a new method, its test, and its block in params.yaml."""
    from flows.cli.new_method import is_clone, write_files

    method, test, params = write_files(name)
    for file in (method, test, params):
        terminal.tell(f"written: {file}", quiet)
    contract = f" && pytest tests/fclmodels/methods/test_contract.py -k {name}" if is_clone(Path()) else ""
    terminal.tell(f"next: pytest {test}{contract}; fcl run --method {name}", quiet)


def run_benchmarks(
    names: Annotated[list[str] | None, typer.Argument(help="benchmarks, or kinds of them [default: all]")] = None,
    json: Json = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="other frameworks too, which are installed below .fcl")
    ] = False,
    turns: Annotated[int | None, typer.Option(min=1, help="turns of each side [default: each benchmark's own]")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="continue this file of results [default: a new one]")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="only list the names")] = False,
) -> None:
    """Measure how fast this project is: ratios to bare PyTorch and other yardsticks, in turns."""
    import subprocess
    import sys

    suite = ROOT / "bench" / "suite.py"
    if not suite.exists():
        raise UserError(
            f"{suite} is missing: the benchmarks come with a checkout of the project, not with its package."
        )
    flags = {"--json": json, "--peers": peers, "--list": list_only}
    values = {"--turns": turns, "--out": out}
    options = [flag for flag, on in flags.items() if on]
    options += [word for option, value in values.items() if value is not None for word in (option, str(value))]
    ended = subprocess.run([sys.executable, str(suite), *options, *(names or [])], check=False)
    raise typer.Exit(ended.returncode)


def open_ui(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="port of MLflow's pages; 0: the last one, or a free one")
    ] = 0,
    params: ParamsFile = PARAMS,
    overrides: Set = [],  # noqa: B006
) -> None:
    """Open MLflow's and Prefect's pages on 127.0.0.1 until Ctrl-C."""
    from fclmodels.settings.load import load_params
    from flows.cli.ui import serve_pages

    serve_pages(load_params(params, overrides).tracking.uri, port)
