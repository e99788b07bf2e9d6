"""Comparison of runs: a report page, metrics and plots for DVC, and a run in MLflow."""

from collections.abc import Sequence
from pathlib import Path

from prefect import flow

from fclmodels.errors import UserError
from fclmodels.settings.load import load_params
from fclmodels.settings.schema import TrackingSettings
from flows.cli.terminal import tell
from tasks.mlflow.comparison import track_comparison
from tasks.reporting import write_report


@flow(name="compare")
def compare(
    runs: Sequence[Path],
    out: Path = Path("report"),
    params: Path = Path("params.yaml"),
    overrides: Sequence[str] = (),
) -> Path:
    """Write the report on these runs, log it to MLflow beside those that are tracked there, and return its page."""
    page = write_report(runs, out)
    tracking = load_params(params, overrides).tracking if params.is_file() else TrackingSettings()
    try:
        track_comparison(tracking.uri, runs, page)
    except UserError as problem:
        tell(f"{problem} The report is written, but not tracked.")
    return page
