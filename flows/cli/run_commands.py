"""Commands that start a flow on data or experiments: prepare, pretrain, partition, run, stream, preset."""

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from fclmodels.errors import UserError
from flows.cli import terminal
from flows.cli.options import PARAMS, Json, ParamsFile, Quiet, Set, complete_methods, complete_presets
from flows.cli.report_commands import compare

PRETRAIN_PARAMS, PRETRAINED = Path("pretrain/params.yaml"), Path("data/pretrained/letters")


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
    meta = run_settings_flow("prepare", "prepare", params, overrides, out=out)
    if json:
        terminal.print_json(meta)
    else:
        shape = " x ".join(map(str, meta["shape"]))
        terminal.tell(
            f"{out}: {meta['samples']} samples of {shape}, {len(meta['classes'])} classes from {meta['source']}", quiet
        )


def pretrain(
    out: Annotated[Path, typer.Option(metavar="DIR", help="where the weights and their card go")] = PRETRAINED,
    params: ParamsFile = PRETRAIN_PARAMS,
    overrides: Set = [],  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a backbone on other data than the stream's, for `model.weights` to start from."""
    from fclmodels.settings.pretrain import load_pretrain_params

    load_pretrain_params(params, overrides)
    from flows.prefect.launch import run_flow

    card = run_flow("flows.pretrain", "pretrain", params=params, overrides=overrides, out=out, quiet=quiet)
    if json:
        terminal.print_json(card)
    else:
        accuracy = terminal.format_percent(card["accuracy"])
        right = f"{accuracy} % of {card['samples']['held_out']} held-out samples right"
        terminal.tell(f"{out}: {card['name']}, version {card['version']}, {right} ({card['seconds']:.1f} s)", quiet)


def partition(
    seed: Annotated[int, typer.Option("--seed", "-s", min=0, help="seed of the runs that these splits are for")] = 0,
    prepared: Annotated[Path, typer.Option(metavar="DIR", help="the prepared data")] = Path("data/prepared"),
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="where the splits go [default: data/splits/SEED]")
    ] = None,
    params: ParamsFile = PARAMS,
    overrides: Set = [],  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Assign the prepared samples to tasks, clients and splits."""
    out = out or Path("data/splits") / str(seed)
    statistics = run_settings_flow("prepare", "partition", params, overrides, seed=seed, prepared=prepared, out=out)
    if json:
        terminal.print_json(statistics)
    else:
        samples = ", ".join(f"{count} {split}" for split, count in statistics["samples"].items())
        terminal.tell(f"{out}: {statistics['tasks']} tasks, {statistics['clients']} clients, samples: {samples}", quiet)


def embed_labels(
    encoder: Annotated[Path, typer.Argument(metavar="DIR", help="a text encoder's folder, such as CLIP's")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="where the embeddings go")] = Path(
        "data/label-embeddings.safetensors"
    ),
    splits: Annotated[Path, typer.Option(metavar="DIR", help="the splits whose classes they are of")] = Path(
        "data/splits/0"
    ),
    prompt: Annotated[str, typer.Option(help="{} stands for a class's name")] = "A photo of a {}",
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the embeddings of the classes' names, by a text encoder: methods.lander.embeddings."""
    from fclmodels.data import label_embeddings
    from fclmodels.data.splits.split_reader import Splits

    if prompt.count("{}") != 1:
        raise UserError(f"--prompt {prompt!r} must have {{}} once, where the class's name goes.")
    names = Splits.open(splits).classes
    embeddings = label_embeddings.embed_labels(encoder, names, prompt)
    label_embeddings.write_embeddings(out, names, embeddings, prompt, encoder.name)
    size = {"file": str(out), "classes": len(names), "numbers": embeddings.shape[1]}
    if json:
        terminal.print_json(size)
    else:
        terminal.tell(f"{out}: {len(names)} classes, {embeddings.shape[1]} numbers each", quiet)


def run(
    methods: Annotated[
        str,
        typer.Option("--method", "-m", metavar="A,B", help="see: fcl list methods", autocompletion=complete_methods),
    ],
    seeds: Annotated[
        str, typer.Option("--seed", "-s", metavar="0,1", help="seeds of everything random in a run")
    ] = "0",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="the run folder [default: runs/METHOD-SEED]")] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="the settings of presets/NAME.yaml", autocompletion=complete_presets),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="run even what does not fit into memory or disk")] = False,
    params: ParamsFile = PARAMS,
    overrides: Set = [],  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train and evaluate a method with a seed over all tasks; several are run one after another, then compared.

    Steps that are cached are not repeated, and a run that was stopped resumes from its last checkpoint. Before a large
    run, a short trial shows what it will cost; what does not fit into memory or on the disk is refused.
    """
    from fclmodels import plugins
    from fclmodels.federation.executors.processes import share_workers

    pairs = list(product(methods.split(","), parse_seeds(seeds)))
    for method, _ in pairs:
        plugins.find("method", method)
    if out is not None and len(pairs) > 1:
        raise UserError(f"--out {out} is the folder of one run. Leave it out: several go to runs/METHOD-SEED.")
    if preset is not None:
        from flows.cli.preset_list import find_preset

        params = find_preset(preset)
    folders = {pair: out or Path("runs") / f"{pair[0]}-{pair[1]}" for pair in pairs}
    results = []
    with share_workers():
        for (method, seed), folder in folders.items():
            arguments = {"method": method, "seed": seed, "out": folder, "quiet": quiet, "force": force}
            results.append(run_settings_flow("experiment", "experiment", params, overrides, **arguments))
            seconds, sent = results[-1]["seconds"], terminal.format_bytes(results[-1]["bytes_up"])
            terminal.tell(f"{folder}: {seconds:.1f} s of training and evaluation, {sent} up", quiet or json)
    if json:
        terminal.print_json(results if len(pairs) > 1 else results[0])
        return
    from flows.cli.run_tables import print_comparison, print_run

    if len(pairs) > 1:
        print_comparison(list(folders.values()))
    else:
        print_run(results[0])


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of a list such as "0,1"."""
    seeds = text.split(",")
    if not all(seed.isdecimal() and seed.isascii() for seed in seeds):
        raise typer.BadParameter(f"{text!r} is no list of numbers such as 0,1", param_hint="'--seed'")
    return [int(seed) for seed in seeds]


def stream(
    serve: Annotated[
        bool, typer.Option("--serve/--once", help="look for arrivals on a schedule until Ctrl-C, or once")
    ] = False,
    cron: Annotated[
        str, typer.Option(help="schedule of --serve, in UTC: minute, hour, day, month, weekday")
    ] = "0 2 * * *",
    params: ParamsFile = PARAMS,
    overrides: Set = [],  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Learn what has arrived in `arrivals.incoming`, task by task, and register each model.

    Steps that are cached are not repeated. An arrival that cannot be learned is set aside with the reason.
    """
    if serve:
        run_settings_flow("stream", "serve", params, overrides, cron=cron, quiet=quiet)
        return
    rows = run_settings_flow("stream", "stream", params, overrides, quiet=quiet)
    if json:
        terminal.print_json(rows)
    elif rows:
        from flows.stream import format_rows

        terminal.print_table(format_rows(rows))
    else:
        terminal.tell("nothing new has arrived", quiet)


def run_preset(
    name: Annotated[
        str,
        typer.Argument(help="a file of presets/, without .yaml: fcl presets", autocompletion=complete_presets),
    ],
    scale: Annotated[float, typer.Option(help="share of the rounds, the same as --set federation.rounds_scale=")] = 1.0,
    methods: Annotated[str | None, typer.Option(metavar="A,B", help="only these [default: the preset's]")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="0,1", help="only these [default: the preset's]")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="where the folder of that name goes")] = Path("tries"),
    overrides: Set = [],  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a paper's setting, from data to report, and show it beside the paper's figures."""
    from flows.cli.preset_list import find_preset

    lists = [f"experiment.{key}=[{text}]" for key, text in (("methods", methods), ("seeds", seeds)) if text is not None]
    overrides = [f"federation.rounds_scale={scale}", *lists, *overrides]
    runs = run_settings_flow("preset", "preset", find_preset(name), overrides, name=name, out=out / name, quiet=quiet)
    compare(runs, json=json)
    terminal.tell(str(out / name / "report" / "index.html"), quiet)


def run_settings_flow(module: str, flow: str, params: Path, overrides: list[str], **arguments: Any) -> Any:
    """Run a flow on these settings and return its result; a mistake in them is reported before anything starts."""
    from fclmodels.settings.load import load_params

    load_params(params, overrides, arguments.get("method"))
    from flows.prefect.launch import run_flow

    return run_flow(f"flows.{module}", flow, params=params, overrides=overrides, **arguments)
