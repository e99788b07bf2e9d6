"""The command `fcl`. Nothing heavy is imported before a command needs it."""

import gc
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import flows.asking  # noqa: F401  has commands of its own
from fclmodels.errors import UserError
from flows import terminal
from flows.ending import end_well
from flows.options import METHODS, PARAMS, Json, ParamsFile, Quiet, Set, app, be_verbose, presets

Runs = Annotated[list[Path] | None, typer.Argument(help="run folders [default: those of `experiment` in the settings]")]
FromMlflow = Annotated[
    bool,
    typer.Option("--from-mlflow", help="RUNS are experiments, ids or filters of runs in tracking.uri [default: all]"),
]
PRETRAIN_PARAMS, PRETRAINED = Path("pretrain/params.yaml"), Path("data/pretrained/letters")


@app.callback(invoke_without_command=True)
def fcl(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version and stop")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="show Prefect's and MLflow's logs too")] = False,
) -> None:
    be_verbose(verbose)
    if version:
        from importlib.metadata import version as version_of

        print(f"fclflow {version_of('fclflow')}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def prepare(
    out: Annotated[Path, typer.Option(metavar="DIR", help="where the prepared data go")] = Path("data/prepared"),
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="the same as --set data.skip_bad=true")] = False,
    params: ParamsFile = PARAMS,
    overrides: Set = [],  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Decode the data set once into arrays and a table."""
    overrides = [*overrides, *["data.skip_bad=true"] * skip_bad]
    meta = _start("prepare", "prepare", params, overrides, out=out)
    if json:
        terminal.show_json(meta)
    else:
        shape = " x ".join(map(str, meta["shape"]))
        terminal.tell(
            f"{out}: {meta['samples']} samples of {shape}, {len(meta['classes'])} classes from {meta['source']}", quiet
        )


@app.command()
def pretrain(
    out: Annotated[Path, typer.Option(metavar="DIR", help="where the weights and their card go")] = PRETRAINED,
    params: ParamsFile = PRETRAIN_PARAMS,
    overrides: Set = [],  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a backbone on other data than the stream's, for `model.weights` to start from."""
    from fclmodels.pretrain import load

    load(params, overrides)
    from flows.launch import start

    card = start("flows.pretrain", "pretrain", params=params, overrides=overrides, out=out, quiet=quiet)
    if json:
        terminal.show_json(card)
    else:
        right = f"{terminal.percent(card['accuracy'])} % of {card['samples']['held_out']} held-out samples right"
        terminal.tell(f"{out}: {card['name']}, version {card['version']}, {right} ({card['seconds']:.1f} s)", quiet)


@app.command()
def partition(
    prepared: Annotated[Path, typer.Option(metavar="DIR", help="the prepared data")] = Path("data/prepared"),
    out: Annotated[Path, typer.Option(metavar="DIR", help="where the splits go")] = Path("data/splits"),
    params: ParamsFile = PARAMS,
    overrides: Set = [],  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Give the prepared samples to tasks, clients and splits."""
    statistics = _start("prepare", "partition", params, overrides, prepared=prepared, out=out)
    if json:
        terminal.show_json(statistics)
    else:
        samples = ", ".join(f"{count} {split}" for split, count in statistics["samples"].items())
        terminal.tell(f"{out}: {statistics['tasks']} tasks, {statistics['clients']} clients, samples: {samples}", quiet)


@app.command()
def run(
    method: Annotated[str, typer.Option("--method", "-m", help="see: fcl list methods", autocompletion=METHODS)],
    seed: Annotated[int, typer.Option("--seed", "-s", min=0, help="seed of everything random in the run")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="the run folder [default: runs/METHOD-SEED]")] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="the settings of presets/NAME.yaml", autocompletion=presets)
    ] = None,
    params: ParamsFile = PARAMS,
    overrides: Set = [],  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train and evaluate one method with one seed over all tasks.

    What was done before is not done again: a run that was stopped goes on from its last checkpoint.
    """
    from fclmodels import plugins

    plugins.find("method", method)
    if preset is not None:
        from flows.preset_list import file_of

        params = file_of(preset)
    out = out or Path("runs") / f"{method}-{seed}"
    result = _start("experiment", "experiment", params, overrides, method=method, seed=seed, out=out, quiet=quiet)
    if json:
        terminal.show_json(result)
    else:
        from flows.side_by_side import show_run

        show_run(result)
        terminal.tell(
            f"{out}: {result['seconds']:.1f} s of training and evaluation, {terminal.size(result['bytes_up'])} up",
            quiet,
        )


@app.command()
def stream(
    serve: Annotated[
        bool, typer.Option("--serve/--once", help="look by the clock until Ctrl-C, or once and now")
    ] = False,
    cron: Annotated[
        str, typer.Option(help="when --serve looks, in UTC: minute, hour, day, month, weekday")
    ] = "0 2 * * *",
    params: ParamsFile = PARAMS,
    overrides: Set = [],  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Learn what has arrived in `arrivals.incoming`, task by task, and register each model.

    What was done before is not done again, and what cannot be learned is set aside with the reason.
    """
    if serve:
        _start("stream", "serve", params, overrides, cron=cron, quiet=quiet)
        return
    rows = _start("stream", "stream", params, overrides, quiet=quiet)
    if json:
        terminal.show_json(rows)
    elif rows:
        from flows.stream import for_people

        terminal.show(for_people(rows), as_json=False)
    else:
        terminal.tell("nothing new has arrived", quiet)


@app.command()
def compare(
    runs: Runs = None,
    from_mlflow: FromMlflow = False,
    on: Annotated[
        Literal["ray"] | None,
        typer.Option(help="first run the settings' experiments, on the cluster of RAY_ADDRESS or on this machine"),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="write the report there too: see fcl report")] = None,
    params: ParamsFile = PARAMS,
    overrides: Set = [],  # noqa: B006
    json: Json = False,
) -> None:
    """Methods side by side: mean and standard deviation over seeds. Without --on or --out it writes nothing."""
    failed: list[str] = []
    if on is None:
        runs = _runs(runs, from_mlflow, params, overrides)
    elif runs or from_mlflow:
        raise UserError("--on runs the experiments of the settings: leave RUNS and --from-mlflow out.")
    else:
        from flows.on_ray import run_all

        runs, failed = run_all(params, overrides)
        if not runs:
            raise typer.Exit(1)
    if json:
        from fclmodels.report import comparison

        terminal.show_json(comparison(runs).to_dicts())
    else:
        from flows.side_by_side import show_comparison

        show_comparison(runs)
    if out is not None:
        report(runs, out=out, params=params, overrides=overrides)
    if failed:
        terminal.tell(f"{len(failed)} of {len(runs) + len(failed)} experiments failed and are not in this:")
        terminal.tell("\n".join(failed))
        raise typer.Exit(1)


@app.command()
def preset(
    name: Annotated[str, typer.Argument(help="a file of presets/, without .yaml: fcl presets", autocompletion=presets)],
    scale: Annotated[float, typer.Option(help="share of the rounds, the same as --set federation.rounds_scale=")] = 1.0,
    methods: Annotated[str | None, typer.Option(metavar="A,B", help="only these [default: the preset's]")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="0,1", help="only these [default: the preset's]")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="where the folder of that name goes")] = Path("tries"),
    overrides: Set = [],  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a paper's setting, data to report, and show it beside the paper's figures."""
    from flows.preset_list import file_of

    lists = [f"experiment.{key}=[{text}]" for key, text in (("methods", methods), ("seeds", seeds)) if text is not None]
    overrides = [f"federation.rounds_scale={scale}", *lists, *overrides]
    runs = _start("preset", "preset", file_of(name), overrides, name=name, out=out / name, quiet=quiet)
    compare(runs, json=json)
    terminal.tell(str(out / name / "report" / "index.html"), quiet)


@app.command()
def report(
    runs: Runs = None,
    from_mlflow: FromMlflow = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="where the report goes")] = Path("report"),
    params: ParamsFile = PARAMS,
    overrides: Set = [],  # noqa: B006
    quiet: Quiet = False,
) -> None:
    """Write the report: one page, and the metrics and plots that DVC shows. MLflow holds it with the runs' parent."""
    from flows.launch import start

    runs = _runs(runs, from_mlflow, params, overrides)
    page = start("flows.compare", "compare", runs=runs, out=out, params=params, overrides=overrides)
    terminal.tell(str(page), quiet)


@app.command()
def ui(
    port: Annotated[int, typer.Option(min=0, max=65535, help="port of MLflow's pages; 0: a free one")] = 0,
    params: ParamsFile = PARAMS,
    overrides: Set = [],  # noqa: B006
) -> None:
    """Open MLflow's and Prefect's pages on 127.0.0.1 until Ctrl-C."""
    from fclmodels.params import load
    from flows.pages import serve

    serve(load(params, overrides).tracking.uri, port)


def _start(module: str, flow: str, params: Path, overrides: list[str], **arguments: Any) -> Any:
    """A flow on these settings, which are read here once so that a mistake in them is told at once."""
    from fclmodels.params import load

    load(params, overrides, arguments.get("method"))
    from flows.launch import start

    return start(f"flows.{module}", flow, params=params, overrides=overrides, **arguments)


def _runs(given: list[Path] | None, from_mlflow: bool, params: Path, overrides: list[str]) -> list[Path]:
    """Run folders: those given, those of the settings' experiment, or what MLflow holds of runs."""
    from fclmodels.params import load

    if from_mlflow:
        from flows.from_mlflow import run_folders

        return run_folders(load(params, overrides).tracking.uri, [str(name) for name in given or ()])
    if given:
        return given
    experiment = load(params, overrides).experiment
    return [Path("runs") / f"{method}-{seed}" for method in experiment.methods for seed in experiment.seeds]


def main() -> None:
    gc.disable()  # importing makes many objects and no garbage; a flow turns it on again before it works
    sys.exit(end_well(app, sys.argv[1:]))


if __name__ == "__main__":
    main()
