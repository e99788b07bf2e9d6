"""A preset of a paper: its data, then each of its methods with each of its seeds, and what came of it."""

from collections.abc import Sequence
from pathlib import Path

from prefect import flow

from fclmodels.errors import UserError
from fclmodels.params import load
from flows.compare import compare
from flows.experiment import experiment


@flow(name="preset", flow_run_name="{name}")
def preset(name: str, params: Path, out: Path, overrides: Sequence[str] = (), quiet: bool = False) -> list[Path]:
    """The run folders under out, each with its data prepared and split where that is not done; beside them a report."""
    settings = load(params, overrides)
    weights = settings.model.weights
    if weights is not None and not weights.is_file():
        needs = "; ".join(settings.preset.needs)
        raise UserError(f"{name}: there is no file {weights} (model.weights). It needs {needs}.")
    runs = []
    for method in settings.experiment.methods:
        for seed in settings.experiment.seeds:
            runs.append(out / f"{method}-{seed}")
            experiment(method, seed, runs[-1], params, overrides, quiet)
    compare(runs, out / "report")
    return runs
