"""Many experiments side by side, and the report."""

from collections.abc import Sequence
from pathlib import Path

from prefect import flow

from tasks.reporting import write_report


@flow(name="compare")
def compare(runs: Sequence[Path], out: Path = Path("report")) -> Path:
    """One page about these runs, with the metrics and plots that DVC shows."""
    return write_report(runs, out)
