"""Run folders side by side: the table of methods, the frames behind its plots, and one HTML page.

Nothing here trains or tracks; what goes in is `runs/<method>-<seed>/`, what comes out is a Polars frame or a page.
"""

from fclmodels.report.html import page, write_page
from fclmodels.report.presets import published, shrunk
from fclmodels.report.runs import Run, grouped, read_run, read_runs
from fclmodels.report.tables import accuracy_cells, accuracy_curves, bytes_by_task, compare, comparison
from fclmodels.report.traffic import traffic

__all__ = [
    "Run",
    "accuracy_cells",
    "accuracy_curves",
    "bytes_by_task",
    "compare",
    "comparison",
    "grouped",
    "page",
    "published",
    "read_run",
    "read_runs",
    "shrunk",
    "traffic",
    "write_page",
]
