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
from fclmodels.report import costs, presets, sweeps, words
from fclmodels.report.charts import Chart, Series, line_chart, ticks_above
from fclmodels.report.knowledge import prototypes
from fclmodels.report.matrices import accuracy_matrix, by_task, confusions
from fclmodels.report.monitors import monitors, used
from fclmodels.report.numbers import duration, number, percent, points, size
from fclmodels.report.paired import pairs
from fclmodels.report.runs import Group, Run, batch_size, grouped, read_runs
from fclmodels.report.tables import compare, ledger, readings, spread

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent
LOSS_POINTS = 120  # a loss curve is averaged down to this many
DENSE = 12  # matrices of more tasks show colours only


def write_page(folders: Sequence[Path | str], path: Path) -> None:
    """The page as a file; an old one stays whole until the new one is."""
    text = page(folders, path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    half.write_text(text, "utf-8")
    os.replace(half, path)


def page(folders: Sequence[Path | str], place: Path | None = None) -> str:
    """The HTML text that compares the runs in these folders; it links to them from the place where it will lie."""
    templates, groups = _environment(), grouped(read_runs(folders))
    script = templates.get_template("sort.js").render()
    return templates.get_template("page.html.j2").render(
        _content(groups),
        digest=b64encode(sha256(script.encode()).digest()).decode(),
        made_by=partial(made_by, groups),
        links={run.folder: _link(run.folder, place) for group in groups for run in group.runs},
    )


@cache
def _environment() -> "Environment":
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {show.__name__: show for show in (percent, points, number, size, duration)}
    return environment


def made_by(groups: Sequence[Group], folders: Sequence[Path]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Of the runs in these folders: by the place of their group, each one's place on the page and its seed."""
    places = count()
    numbered = [(index, [(next(places), run) for run in group.runs]) for index, group in enumerate(groups)]
    found = [(index, [(n, run.result.seed) for n, run in of if run.folder in folders]) for index, of in numbered]
    return [(index, of) for index, of in found if of]


def _link(folder: Path, place: Path | None) -> str | None:
    return quote(f"{Path(os.path.relpath(folder, place)).as_posix()}/") if place is not None else None


def _content(groups: Sequence[Group]) -> dict[str, Any]:
    runs = [run for group in groups for run in group.runs]
    comparison = compare(groups)
    common, differing = _settings(groups)
    same_facts, own_facts = _provenance(runs)
    return {
        "words": words,
        "heading": ", ".join(dict.fromkeys(run.result.method for run in runs)),
        "groups": groups,
        "runs": runs,
        "facts": _facts(runs, common),
        "notes": _notes(groups),
        "tables": [_table(comparison, groups, reading) for reading in readings(groups)],
        "by_task": [m for reading in readings(groups) if len((m := by_task(groups, reading))["rows"]) > 1],
        "pairs": [(words.title(r, batch_size(groups)), of) for r in readings(groups) if (of := pairs(groups, r))],
        "curves": [_curve(groups, reading) for reading in readings(groups)],
        "sweeps": sweeps.charts(groups),
        "matrices": [[accuracy_matrix(group, reading) for reading in readings([group])] for group in groups],
        "confusions": confusions(groups),
        "monitors": monitors(groups),
        "used": used(groups),
        "prototypes": prototypes(groups),
        "dense": DENSE,
        "costs": costs.costs(groups),
        "against_accuracy": costs.against_accuracy(groups),
        "stages": costs.stages(groups),
        "faults": [(index, counts) for index, group in enumerate(groups) if (counts := costs.faults(group))],
        "losses": _losses(groups),
        "ledgers": [_ledger(group) for group in groups],
        "privacy": [(index, text) for index, group in enumerate(groups) if (text := _privacy(group))],
        "common": common,
        "differing": differing,
        "same_facts": same_facts,
        "own_facts": own_facts,
    }


def _facts(runs: Sequence[Run], common: dict[str, str]) -> list[str]:
    """One line that says what was compared on what, as far as all runs agree."""
    tasks = {run.tasks for run in runs}
    shown = {
        "data.source": "{}",
        "stream.kind": "{}",
        "partition.kind": "{} partition",
        "partition.clients": "{} clients",
    }
    facts = [f"{len(runs)} runs" if len(runs) > 1 else "1 run"]
    facts += [f"{n} tasks" if n > 1 else "1 task" for n in tasks if len(tasks) == 1]
    return facts + [form.format(common[name]) for name, form in shown.items() if name in common]


def _notes(groups: Sequence[Group]) -> list[str]:
    """What a reader must know before comparing."""
    runs = [run for group in groups for run in group.runs]
    notes = []
    splits = len({str(run.result.digests.get("splits")) for run in runs})
    if splits > 1:
        notes.append(f"Made on {splits} different data splits: compare methods only where each was run on all of them.")
    if len({frozenset(run.result.seed for run in group.runs) for group in groups}) > 1:
        notes.append("The methods were not run with the same seeds.")
    if any(len(group.runs) == 1 for group in groups):
        alone = [group.label for group in groups if len(group.runs) == 1]
        single = "each" if len(alone) == len(groups) > 1 else ", ".join(alone)
        notes.append(f"Only one seed of {single}: no standard deviation, and differences may be chance.")
    versions = [run.result.versions for run in runs]
    names = sorted({name for of in versions for name in of})
    changed = [name for name in names if len({str(of.get(name)) for of in versions}) > 1]
    if changed:
        notes.append(f"The runs were made with different versions of {', '.join(changed)}.")
    remarks = [f"{group.label}: {remark}." for group in groups for remark in group.runs[0].result.remarks]
    return [*notes, *presets.shrunk(groups), *remarks]


def _table(comparison: pl.DataFrame, groups: Sequence[Group], reading: str) -> dict[str, Any]:
    rows = comparison.filter(pl.col("reading") == reading).to_dicts()
    by_label = {group.label: (index, group) for index, group in enumerate(groups)}
    for row in rows:
        row["index"], group = by_label[row["method"]]
        row["reference"] = group.reference
    best = {name: _best(rows, name) for name in words.ACCURACY if name != "forward"}
    title, papers = words.title(reading, batch_size(groups)), presets.published(groups).get(reading, [])
    meaning = words.reading(reading).meaning
    return {"title": title, "meaning": meaning, "rows": rows, "papers": papers, "best": best}


def _best(rows: Sequence[dict[str, Any]], name: str) -> str | None:
    """The highest mean of the federated methods as it is printed, unless all have the same."""
    values = {percent(row[name]): row[name] for row in rows if row[name] is not None and not row["reference"]}
    return max(values, key=values.__getitem__) if len(values) > 1 else None


def _curve(groups: Sequence[Group], reading: str) -> Chart:
    series = []
    for index, group in enumerate(groups):
        runs = [run for run in group.runs if reading in run.matrices]
        if runs:
            curves = [100 * accuracy_curve(run.matrices[reading]) for run in runs]
            values = [
                spread([None if np.isnan(y) else float(y) for y in column]) for column in zip(*curves, strict=True)
            ]
            learned, (means, stds) = range(1, len(values) + 1), zip(*values, strict=True)
            series.append(Series(index, group.label, learned, means, stds, [run.folder for run in runs]))
    title = words.title(reading, batch_size(groups))
    return line_chart(title, series, "tasks learned", "accuracy on tasks learned, %", [0, 20, 40, 60, 80, 100])


def _losses(groups: Sequence[Group]) -> list[Chart]:
    """Training loss over all rounds, thinned to LOSS_POINTS; a chart a method, as their losses differ in kind."""
    lines = [_loss(index, group) for index, group in enumerate(groups)]
    known = [
        mean + (std or 0) for line in lines for mean, std in zip(line.mean, line.std, strict=True) if mean is not None
    ]
    y_ticks = ticks_above(max(known, default=0))
    charts = [
        line_chart(line.label, [line], "round, over all tasks", "mean loss of the clients", y_ticks) for line in lines
    ]
    return [chart for chart, line in zip(charts, lines, strict=True) if any(mean is not None for mean in line.mean)]


def _loss(index: int, group: Group) -> Series:
    rounds = pl.concat([run.rounds.with_columns(run=pl.lit(i)) for i, run in enumerate(group.runs)])
    width = max(1, -(-rounds.height // len(group.runs) // LOSS_POINTS))
    of_run = rounds.group_by(pl.col("step") // width, "run").agg(pl.mean("loss"), (pl.mean("step") + 1).alias("round"))
    points = of_run.group_by("step").agg(pl.mean("round"), pl.mean("loss"), pl.std("loss").alias("std"))
    points = points.sort("step").fill_nan(None)
    x, mean, std = (points[name].to_list() for name in ("round", "loss", "std"))
    return Series(index, group.label, x, mean, std, [run.folder for run in group.runs])


def _ledger(group: Group) -> list[dict[str, Any]]:
    parts = ledger(group).to_dicts()
    for part in parts:
        part["when"] = ", ".join(["each round"] * part["in_rounds"] + ["end of task"] * part["at_end"])
    return parts


def _privacy(group: Group) -> str | None:
    """What the method's noise is worth in the run where it is worth least."""
    known = [run.result.privacy for run in group.runs if run.result.privacy]
    return words.privacy(**max(known, key=lambda of: of.epsilon).model_dump()) if known else None


def _settings(groups: Sequence[Group]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Settings that all runs share, and those that differ: the latter with their values in each group."""
    runs = [run for group in groups for run in group.runs]
    names = sorted({name for run in runs for name in run.settings})
    common = {n: runs[0].settings.get(n, "") for n in names if len({run.settings.get(n) for run in runs}) == 1}
    differing = {
        name: [", ".join(dict.fromkeys(run.settings.get(name, "–") for run in group.runs)) for group in groups]
        for name in names
        if name not in common
    }
    return common, differing


def _provenance(runs: Sequence[Run]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Versions and digests that all runs share, and those that differ, run by run."""

    def facts(run: Run) -> dict[str, str]:
        digests = {f"{name} digest": str(digest)[:12] for name, digest in run.result.digests.items()}
        return digests | {name: str(version) for name, version in run.result.versions.items()}

    of = [facts(run) for run in runs]
    names = dict.fromkeys(name for one in of for name in one)
    values = {name: [one.get(name, "–") for one in of] for name in names}
    same = {name: column[0] for name, column in values.items() if len(set(column)) == 1}
    return same, {name: column for name, column in values.items() if name not in same}
