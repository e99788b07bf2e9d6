"""One self-contained HTML page from run folders: no network, the same bytes from the same runs.

Its one script sorts tables (sort.js), named to the browser by its digest; without it the page says the same.
"""

import os
from base64 import b64encode
from collections.abc import Sequence
from functools import cache, partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import polars as pl

from fclmodels.metrics import accuracy_curve
from fclmodels.report import labels
from fclmodels.report.charts.contact_sheets import draw_sheets
from fclmodels.report.charts.line_charts import LineChart, Series, draw_line_chart
from fclmodels.report.comparison import compare_groups, compute_mean_and_std, list_readings, summarise_groups
from fclmodels.report.formatting import format_bytes, format_duration, format_number, format_percent, format_points
from fclmodels.report.paired_differences import pair_groups
from fclmodels.report.paper_figures import collect_figures
from fclmodels.report.read_runs import Group, describe_batch_size, group_runs, read_runs
from fclmodels.report.sections import costs, facts
from fclmodels.report.sections.knowledge import draw_prototypes
from fclmodels.report.sections.matrices import build_accuracy_matrix, build_confusion_matrices, build_task_table
from fclmodels.report.sections.monitors import build_monitors, draw_used_shares
from fclmodels.report.sections.sweeps import draw_sweeps
from fclmodels.storage.files import replace_file

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
DENSE = 12  # matrices of more tasks show colours only


def write_page(folders: Sequence[Path | str], path: Path) -> None:
    """Write the page to a file; an old one stays complete until the new one is."""
    text = render_page(folders, path.parent)
    with replace_file(path) as temporary:
        temporary.write_text(text, "utf-8")


def render_page(folders: Sequence[Path | str], place: Path | None = None) -> str:
    """Return the HTML text that compares the runs in these folders, with links to them from the place of the page."""
    templates, groups = _open_templates(), group_runs(read_runs(folders))
    script = templates.get_template("sort.js").render()
    return templates.get_template("page.html.j2").render(
        _collect_content(groups),
        digest=b64encode(sha256(script.encode()).digest()).decode(),
        made_by=partial(locate_runs, groups),
        links={run.folder: _link(run.folder, place) for group in groups for run in group.runs},
    )


@cache
def _open_templates() -> "Environment":
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "percent": format_percent,
        "points": format_points,
        "number": format_number,
        "size": format_bytes,
        "duration": format_duration,
    }
    return environment


def locate_runs(groups: Sequence[Group], folders: Sequence[Path]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return, for the runs in these folders: the index of their group, and each one's number on the page and seed."""
    numbers = count()
    numbered = [(index, [(next(numbers), run) for run in group.runs]) for index, group in enumerate(groups)]
    located = [(index, [(n, run.result.seed) for n, run in of if run.folder in folders]) for index, of in numbered]
    return [(index, of) for index, of in located if of]


def _link(folder: Path, place: Path | None) -> str | None:
    return quote(f"{Path(os.path.relpath(folder, place)).as_posix()}/") if place is not None else None


def _collect_content(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the templates' variables."""
    runs = [run for group in groups for run in group.runs]
    readings, batch_size = list_readings(groups), describe_batch_size(groups)
    frame = compare_groups(groups)
    task_tables = [build_task_table(groups, reading) for reading in readings]
    pairs = [(labels.title_reading(reading, batch_size), pair_groups(groups, reading)) for reading in readings]
    common, differing = facts.compare_settings(groups)
    same_facts, own_facts = facts.compare_provenance(runs)
    return {
        "words": labels,
        "heading": ", ".join(dict.fromkeys(run.result.method for run in runs)),
        "groups": groups,
        "runs": runs,
        "facts": facts.describe_runs(runs, common),
        "notes": facts.list_notes(groups),
        "overview": summarise_groups(groups),
        "tables": [_build_table(frame, groups, reading) for reading in readings],
        "by_task": [table for table in task_tables if len(table["rows"]) > 1],
        "pairs": [(title, of_reading) for title, of_reading in pairs if of_reading],
        "curves": [_draw_accuracy(groups, reading) for reading in readings],
        "sweeps": draw_sweeps(groups),
        "matrices": [[build_accuracy_matrix(group, reading) for reading in list_readings([group])] for group in groups],
        "confusions": build_confusion_matrices(groups),
        "monitors": build_monitors(groups),
        "used": draw_used_shares(groups),
        "prototypes": draw_prototypes(groups),
        "sheets": draw_sheets(groups),
        "dense": DENSE,
        "costs": costs.summarise_costs(groups),
        "against_accuracy": costs.draw_accuracy_against_costs(groups),
        "stages": costs.summarise_stages(groups),
        "faults": [(index, counts) for index, group in enumerate(groups) if (counts := costs.count_faults(group))],
        "losses": costs.draw_losses(groups),
        "ledgers": [facts.list_parts(group) for group in groups],
        "privacy": [(index, text) for index, group in enumerate(groups) if (text := facts.describe_privacy(group))],
        "common": common,
        "differing": differing,
        "same_facts": same_facts,
        "own_facts": own_facts,
    }


def _build_table(frame: pl.DataFrame, groups: Sequence[Group], reading: str) -> dict[str, Any]:
    """Return a reading's rows of the tables of accuracy and forgetting."""
    rows = frame.filter(pl.col("reading") == reading).to_dicts()
    by_label = {group.label: (index, group) for index, group in enumerate(groups)}
    for row in rows:
        row["index"], group = by_label[row["method"]]
        row["reference"] = group.is_reference
    best = {name: _find_best(rows, name) for name in labels.ACCURACY if name != "forward"}
    title = labels.title_reading(reading, describe_batch_size(groups))
    papers = [figure for figure in collect_figures(groups).get(reading, []) if figure.has_metrics]
    meaning = labels.label_reading(reading).meaning
    return {"title": title, "meaning": meaning, "rows": rows, "papers": papers, "best": best}


def _find_best(rows: Sequence[dict[str, Any]], name: str) -> str | None:
    """Return the highest mean of the federated methods as it is printed, None where all have the same."""
    values = {format_percent(row[name]): row[name] for row in rows if row[name] is not None and not row["reference"]}
    return max(values, key=values.__getitem__) if len(values) > 1 else None


def _draw_accuracy(groups: Sequence[Group], reading: str) -> LineChart:
    """Draw mean accuracy over the tasks learned so far, a line a group."""
    series = []
    for index, group in enumerate(groups):
        runs = [run for run in group.runs if reading in run.matrices]
        if runs:
            curves = zip(*[100 * accuracy_curve(run.matrices[reading]) for run in runs], strict=True)
            values = [compute_mean_and_std([None if np.isnan(y) else float(y) for y in column]) for column in curves]
            learned, (means, stds) = range(1, len(values) + 1), zip(*values, strict=True)
            series.append(Series(index, group.label, learned, means, stds, [run.folder for run in runs]))
    title = labels.title_reading(reading, describe_batch_size(groups))
    return draw_line_chart(title, series, "tasks learned", "accuracy on tasks learned, %", [0, 20, 40, 60, 80, 100])
