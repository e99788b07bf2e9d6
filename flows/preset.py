"""A preset of a paper: its data, then each of its methods with each of its seeds, and what came of it."""

from collections.abc import Sequence
from pathlib import Path

from prefect import flow

from fclmodels.backbones.published import file_of
from fclmodels.errors import UserError
from fclmodels.params import load
from flows.compare import compare
from flows.environment import HOME
from flows.experiment import experiment
from tasks.data import splits_for


@flow(name="preset", flow_run_name="{name}")
def preset(name: str, params: Path, out: Path, overrides: Sequence[str] = (), quiet: bool = False) -> list[Path]:
    """The run folders under out, each with its data prepared and split where that is not done; beside them a report."""
    settings = load(params, overrides)
    weights = settings.model.weights
    needs = f" It needs {'; '.join(settings.preset.needs)}." if settings.preset.needs else ""
    if weights is not None and not file_of(weights, settings.model.backbone).is_file():
        raise UserError(f"{name}: there is no file {weights} (model.weights).{needs}")
    try:
        splits_for(settings, HOME, lambda text: None)  # its words come again with the first run
    except UserError as error:
        raise UserError(f"{name}: {error}{needs}") from None
    runs = []
    for method in settings.experiment.methods:
        for seed in settings.experiment.seeds:
            runs.append(out / f"{method}-{seed}")
            experiment(method, seed, runs[-1], params, overrides, quiet)
    compare(runs, out / "report", params, overrides)
    return runs
