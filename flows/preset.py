"""A preset of a paper: its data, a run of each of its methods with each of its seeds, and a report."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from prefect import flow

from fclmodels.backbones.weights.published_weights import find_weights_file
from fclmodels.errors import UserError
from fclmodels.federation.executors.processes import share_workers
from fclmodels.settings.load import follow_seed, load_params
from flows.compare import compare
from flows.experiment import experiment
from flows.prefect.environment import HOME
from tasks.data import ensure_splits


@flow(name="preset", flow_run_name="{name}")
def preset(name: str, params: Path, out: Path, overrides: Sequence[str] = (), quiet: bool = False) -> list[Path]:
    """Run the preset's experiments, write a report beside their folders in `out`, and return these folders."""
    settings = load_params(params, overrides)
    weights = settings.model.weights
    needs = f" It needs {'; '.join(settings.preset.needs)}." if settings.preset.needs else ""
    if weights is not None and not find_weights_file(weights, settings.model.backbone).is_file():
        raise UserError(f"{name}: there is no file {weights} (model.weights).{needs}")
    try:
        ensure_splits(
            follow_seed(settings, settings.experiment.seeds[0]), HOME, lambda text: None
        )  # the first run prints its messages again
    except UserError as error:
        raise UserError(f"{name}: {error}{needs}") from None
    runs = []
    with share_workers():
        for method, seed in product(settings.experiment.methods, settings.experiment.seeds):
            runs.append(out / f"{method}-{seed}")
            experiment(method, seed, runs[-1], params, overrides, quiet)
    compare(runs, out / "report", params, overrides)
    return runs
