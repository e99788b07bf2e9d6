"""Commands that compare methods fairly: study, tune."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fclmodels.errors import UserError
from flows.cli import terminal
from flows.cli.options import PARAMS, Json, ParamsFile, Quiet, Set, complete_methods, complete_presets

Workers = Annotated[
    int | None, typer.Option("--workers", "-w", min=1, help="runs side by side [default: one for each core]")
]


def run_study(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the study: its rows, grids and seeds")],
    scale: Annotated[
        float | None, typer.Option(min=0, max=1, help="share of the rounds of all runs [default: the file's]")
    ] = None,
    rows: Annotated[
        list[str], typer.Option("--row", metavar="LABEL", help="only this row; may be repeated [default: all]")
    ] = [],  # noqa: B006
    workers: Workers = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="where it goes [default: studies/FILE's name]")
    ] = None,
    overrides: Set = [],  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare methods, each with the settings that val rows choose, over draws of stream and partition.

    Settings are chosen with seeds of their own and never by test rows. A study that was stopped goes on from there.
    Exits with 1 where a row has no run that came to its end.
    """
    from fclmodels.study.page import PAGE, describe_figures, list_cells, list_notes
    from fclmodels.study.plan import check_plan, load_study
    from fclmodels.study.results import to_json

    study = load_study(file, overrides, scale).select_rows(rows)
    check_plan(study)
    out = out or Path("studies") / file.stem
    from fclmodels.federation.executors.auto_choice import count_cores
    from flows.prefect.launch import run_flow

    shared = {"plan": study, "workers": workers or count_cores(), "quiet": quiet}
    table = run_flow("flows.study.flow", "study", name=file.stem, out=out, **shared)
    if json:
        terminal.print_json([to_json(row) for row in table])
    else:
        header, *cells = list_cells(study, table)
        shown = len(study.metrics) + 6  # columns; the page has the rest
        terminal.print_table([dict(list(zip(header, row, strict=True))[:shown]) for row in cells])
    for note in (describe_figures(study, table), *list_notes(study, table)):
        terminal.tell(note, quiet)
    terminal.tell(str(out / PAGE), quiet)
    if not all(row.draws for row in table):
        raise typer.Exit(1)


def tune(
    method: Annotated[str, typer.Argument(help="see: fcl list methods", autocompletion=complete_methods)],
    grids: Annotated[
        list[str], typer.Option("--grid", metavar="KEY=A,B", help="a setting and its values; may be repeated")
    ] = [],  # noqa: B006
    ranges: Annotated[
        list[str],
        typer.Option("--search", metavar="KEY=LOW:HIGH", help="a setting and its range, LOW:HIGH:log by logarithm"),
    ] = [],  # noqa: B006
    budget: Annotated[int | None, typer.Option(min=1, help="the choices that a search tries")] = None,
    seeds: Annotated[str, typer.Option("--seed", "-s", metavar="100,101", help="seeds that choose")] = "100,101,102",
    by: Annotated[str, typer.Option(help="the reading of accuracy that chooses")] = "task_agnostic",
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="write the chosen settings there too")] = None,
    workers: Workers = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="the settings of presets/NAME.yaml", autocompletion=complete_presets),
    ] = None,
    params: ParamsFile = PARAMS,
    overrides: Set = [],  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose settings of a method on val rows, by a grid or a search, and print them as lines of params.yaml.

    No test row is read.
    """
    import yaml

    from fclmodels import plugins
    from fclmodels.study.plan import check_plan, make_tuning
    from fclmodels.study.trial import choose
    from flows.cli.run_commands import parse_seeds

    plugins.find("method", method)
    if preset is not None:
        from flows.cli.preset_list import find_preset

        params = find_preset(preset)
    study = make_tuning(method, params, overrides, grids, ranges, budget, parse_seeds(seeds), by)
    check_plan(study)
    if write is not None and write.exists():
        raise UserError(f"{write} is there already. Name another file, and put the lines where they belong.")
    if write is not None and not write.parent.is_dir():
        raise UserError(f"{write.parent} is no folder. Make it, or name a file elsewhere.")
    from fclmodels.federation.executors.auto_choice import count_cores
    from flows.prefect.launch import run_flow

    name = f"tune {method}"
    trials = run_flow("flows.study.flow", "tune", name=name, plan=study, workers=workers or count_cores(), quiet=quiet)
    best = choose(method, trials)
    text = yaml.safe_dump(nest_settings(best.point), sort_keys=False)
    if json:
        terminal.print_json({"chosen": best._asdict(), "trials": [trial._asdict() for trial in trials]})
    else:
        print(text, end="")
    terminal.tell(f"{terminal.format_percent(best.value)} % on val rows, the best of {len(trials)} choices", quiet)
    if write is not None:
        write.write_text(text, "utf-8")


def nest_settings(point: Sequence[str]) -> dict[str, Any]:
    """Return settings `a.b=value` as the blocks of params.yaml."""
    import yaml

    blocks: dict[str, Any] = {}
    for text in point:
        path, _, value = text.partition("=")
        *above, name = path.split(".")
        block = blocks
        for key in above:
            block = block.setdefault(key, {})
        block[name] = yaml.safe_load(value)
    return blocks
