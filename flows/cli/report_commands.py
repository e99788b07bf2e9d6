"""Commands that compare runs: compare, report, ledger."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fclmodels.errors import UserError
from flows.cli import terminal
from flows.cli.options import PARAMS, Json, ParamsFile, Quiet, Set

Runs = Annotated[
    list[Path] | None,
    typer.Argument(help="run folders [default: those of `experiment` in the settings that are there]"),
]
FromMlflow = Annotated[
    bool,
    typer.Option("--from-mlflow", help="RUNS are experiments, ids or filters of runs in tracking.uri [default: all]"),
]


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
    """Compare methods: mean and standard deviation over seeds. Without --on or --out it writes nothing."""
    failures: list[str] = []
    if on is None:
        runs = _find_runs(runs, from_mlflow, params, overrides)
    elif runs or from_mlflow:
        raise UserError("--on runs the experiments of the settings: leave RUNS and --from-mlflow out.")
    else:
        from flows.compare_on_ray import run_experiments

        runs, failures = run_experiments(params, overrides)
        if not runs:
            raise typer.Exit(1)
    if json:
        from fclmodels.report.comparison import compare_folders

        terminal.print_json(compare_folders(runs).to_dicts())
    else:
        from flows.cli.run_tables import print_comparison

        print_comparison(runs)
    if out is not None:
        write_report(runs, out=out, params=params, overrides=overrides)
    if failures:
        terminal.tell(f"{len(failures)} of {len(runs) + len(failures)} experiments failed and are not included:")
        terminal.tell("\n".join(failures))
        raise typer.Exit(1)


def write_report(
    runs: Runs = None,
    from_mlflow: FromMlflow = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="where the report goes")] = Path("report"),
    params: ParamsFile = PARAMS,
    overrides: Set = [],  # noqa: B006
    quiet: Quiet = False,
) -> None:
    """Write the report: one page, metrics and plots for DVC. MLflow gets it too, in a run that is the runs' parent."""
    from flows.prefect.launch import run_flow

    runs = _find_runs(runs, from_mlflow, params, overrides)
    page = run_flow("flows.compare", "compare", runs=runs, out=out, params=params, overrides=overrides)
    terminal.tell(str(page), quiet)


def show_ledger(runs: Annotated[list[Path], typer.Argument(help="run folders")], json: Json = False) -> None:
    """Show what a client sends, receives and stores in each task, by kind, several runs side by side."""
    from fclmodels.report.traffic import measure_traffic

    table = measure_traffic(runs)
    if json:
        terminal.print_json(table.to_dicts())
    else:
        from flows.cli.run_tables import print_traffic

        print_traffic(table)


def _find_runs(runs: list[Path] | None, from_mlflow: bool, params: Path, overrides: list[str]) -> list[Path]:
    """Return these run folders, by default those that are there of the settings' experiment; or those of MLflow."""
    from fclmodels.settings.load import load_params

    if from_mlflow:
        from flows.mlflow_download import download_runs

        return download_runs(load_params(params, overrides).tracking.uri, [str(name) for name in runs or ()])
    if runs:
        return runs
    experiment = load_params(params, overrides).experiment
    planned = [Path("runs") / f"{method}-{seed}" for method in experiment.methods for seed in experiment.seeds]
    present = [folder for folder in planned if folder.is_dir()]
    if not present:
        return planned  # whose first is refused, by its name
    missing = [str(folder) for folder in planned if folder not in present]
    terminal.tell(f"not run yet, so left out: {', '.join(missing)}", quiet=not missing)
    return present
