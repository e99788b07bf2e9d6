"""Many experiments side by side, the report, and the comparison's run in MLflow."""

from collections.abc import Sequence
from pathlib import Path

from prefect import flow

from fclmodels.errors import UserError
from fclmodels.params import load
from fclmodels.settings import TrackingSettings
from flows.terminal import tell
from tasks.comparison import track_comparison
from tasks.reporting import write_report


@flow(name="compare")
def compare(
    runs: Sequence[Path],
    out: Path = Path("report"),
    params: Path = Path("params.yaml"),
    overrides: Sequence[str] = (),
) -> Path:
    """One page about these runs, with the metrics and plots that DVC shows; MLflow has it with the runs it knows."""
    page = write_report(runs, out)
    tracking = load(params, overrides).tracking if params.is_file() else TrackingSettings()
    try:
        track_comparison(tracking.uri, runs, page)
    except UserError as problem:
        tell(f"{problem} The report is written, and not tracked.")
    return page
