"""Commands of `fcl` that ask or write a file, and start no flow."""

from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from fclmodels.errors import UserError, did_you_mean
from flows import terminal
from flows.options import METHODS, PARAMS, ROOT, Json, ParamsFile, Quiet, Set, app, presets

KINDS = {
    "methods": "method",
    "sources": "source",
    "streams": "stream",
    "partitions": "partition",
    "backbones": "backbone",
}


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="a run folder, or models:/NAME@ALIAS of the tracking store")],
    files: Annotated[list[Path], typer.Argument(help="image files")],
    task: Annotated[int | None, typer.Option(min=1, help="the task of all files, from 1 [default: not known]")] = None,
    params: ParamsFile = PARAMS,
    overrides: Set = [],  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Ask a trained model: class, probability, predicted task, and relevance to each task where it predicts tasks."""
    from fclmodels.params import load
    from flows.predict import answers, open_model

    asked = open_model(model, lambda: load(params, overrides).tracking.uri)
    rows = answers(asked, files, task)
    if json:
        terminal.show_json(rows)
    else:
        shown = {"probability": lambda p: f"{p:.3f}", "relevance": lambda r: r and " ".join(f"{of:.2f}" for of in r)}
        rows = [{name: shown.get(name, lambda v: v)(value) for name, value in row.items()} for row in rows]
        terminal.show(rows, as_json=False)
    for note in asked.notes:
        terminal.tell(note, quiet)


@app.command()
def ledger(runs: Annotated[list[Path], typer.Argument(help="run folders")], json: Json = False) -> None:
    """What a client sends, receives and keeps in each task, kind by kind, several runs side by side."""
    from fclmodels.report import traffic

    table = traffic(runs)
    if json:
        terminal.show_json(table.to_dicts())
    else:
        from flows.side_by_side import show_traffic

        show_traffic(table)


@app.command("params")
def explain(
    name: Annotated[str | None, typer.Argument(help="a block, a setting or a plugin [default: all]")] = None,
    json: Json = False,
) -> None:
    """Explain the settings: type, default, meaning."""
    from fclmodels import plugins
    from fclmodels.errors import shown
    from fclmodels.params import explain as settings

    rows: list[dict[str, Any]] = [
        {"setting": s.path, "of": ", ".join(s.kinds), "type": s.type, "default": s.default, "meaning": s.description}
        for s in settings(name)
    ]
    if json:
        terminal.show_json(rows)
        return
    of_one = any(name in plugins.all_of(kind) for kind in KINDS.values())
    for row in rows:
        if of_one:
            del row["of"]
        if not isinstance(row["default"], str):
            row["default"] = shown(row["default"])
    terminal.show(rows, as_json=False)


@app.command("list")
def list_plugins(
    kind: Annotated[str, typer.Argument(metavar="|".join(KINDS), help="what to list")],
    json: Json = False,
) -> None:
    """List methods, sources, streams, partitions or backbones."""
    from fclmodels import plugins

    if kind not in KINDS:
        raise UserError(f"{kind} cannot be listed. {did_you_mean(kind, KINDS)}")
    found = plugins.all_of(KINDS[kind])
    rows = [{"name": name, "what": (plugin.__doc__ or "").partition("\n")[0]} for name, plugin in found.items()]
    terminal.show(rows, json)


@app.command()
def doctor(params: ParamsFile = PARAMS, overrides: Set = [], json: Json = False) -> None:  # noqa: B006
    """Look at versions, threads, device, disk and servers."""
    from fclmodels.params import load
    from flows.doctor import findings

    rows = list(findings(load(params, overrides).tracking.uri))
    terminal.show(rows, json)
    if any(row["state"] == "PROBLEM" for row in rows):
        raise typer.Exit(1)


@app.command("presets")
def list_presets(
    name: Annotated[
        str | None, typer.Argument(help="one of them, with all of its paper's figures", autocompletion=presets)
    ] = None,
    json: Json = False,
) -> None:
    """List the presets with their papers' figures; `fcl preset NAME` runs one."""
    from fclmodels.plugins import all_of
    from flows.preset_list import PRESETS, every, figures, row

    blocks = [(p, e) for p, e in every() if name in (None, p.name)]
    if not blocks:
        raise UserError(f"{name} is not a preset. {did_you_mean(str(name), [str(p.name) for p, _ in every()])}")
    if json:
        terminal.show_json([p.model_dump(mode="json") | e.model_dump(mode="json") for p, e in blocks])
    elif name is not None:
        rows = figures(blocks[0][0])
        terminal.show(rows, as_json=False, title=f"{name}: {blocks[0][0].paper}, in %")
        if others := sorted({row["method"] for row in rows} - set(all_of("method"))):
            terminal.tell(f"methods of the paper that fclflow does not have: {', '.join(others)}")
    else:
        for paper, of_paper in groupby(blocks, key=lambda block: block[0].paper):
            terminal.show([row(*block) for block in of_paper], as_json=False, title=paper)
        terminal.tell(f"all figures: fcl presets NAME; all of it: {PRESETS}/NAME.yaml")


@app.command("explain")
def explain_method(
    method: Annotated[str, typer.Argument(help="see: fcl list methods", autocompletion=METHODS)],
    json: Json = False,
) -> None:
    """Say what a method does, what leaves a client, and what that costs, from its own words and a short trial."""
    from fclmodels.trial import about, lines

    found = about([method])[0]
    if json:
        terminal.show_json(found)
    else:
        print("\n".join(lines(found)))


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="your images: [train|test]/[domain]/class/*")],
    params: Annotated[Path, typer.Option("--params", metavar="FILE", help="the settings file to write")] = PARAMS,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Look at a folder of images and write a commented params.yaml for it."""
    from flows.init import look, write

    found = look(folder)
    write(found, params)
    if json:
        terminal.show_json(found.facts())
    else:
        terminal.show([{"what": name, "found": value} for name, value in found.facts().items()], as_json=False)
        terminal.tell(f"{params}: written; look at it, then: fcl run --method er", quiet)


@app.command()
def status(params: ParamsFile = PARAMS, overrides: Set = [], json: Json = False) -> None:  # noqa: B006
    """Show which data and runs of `experiment` are done, running, stale, and how many of their steps are cached.

    And of the stream of `arrivals`: what it is at, its champion, and what has arrived, waits or is set aside.
    """
    from fclmodels.params import load
    from flows import environment

    environment.settle()
    from flows.status import states

    terminal.show(list(states(load(params, overrides), params, overrides)), json)


@app.command("new-method")
def new_method(
    name: Annotated[str, typer.Argument(help="its name in lower case, words joined by -")],
    quiet: Quiet = False,
) -> None:
    """Write the file of a new method, its test, and its block in params.yaml."""
    from flows.new_method import write

    for file in write(name):
        terminal.tell(f"written: {file}", quiet)
    terminal.tell(f"next: pytest tests/fclmodels/test_contract.py -k {name}; fcl run --method {name}", quiet)


@app.command()
def bench(
    names: Annotated[list[str] | None, typer.Argument(help="benchmarks, or kinds of them [default: all]")] = None,
    json: Json = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="other frameworks too, which are installed below .fcl")
    ] = False,
    turns: Annotated[int | None, typer.Option(min=1, help="of each side [default: each benchmark's own]")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="go on with this file of results [default: a new one]")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="only tell the names")] = False,
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
    given = [flag for flag, on in flags.items() if on]
    given += [word for option, value in values.items() if value is not None for word in (option, str(value))]
    ended = subprocess.run([sys.executable, str(suite), *given, *(names or [])], check=False)
    raise typer.Exit(ended.returncode)
