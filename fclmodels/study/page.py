"""The results of a study as one page of HTML, as Markdown and as JSON: the same bytes from the same results."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fclmodels.report import labels
from fclmodels.report.formatting import format_bytes, format_duration, format_number, format_percent
from fclmodels.report.page import TEMPLATES
from fclmodels.storage.files import replace_file
from fclmodels.storage.sealed_json import write_json
from fclmodels.study.plan import Study, load_rows
from fclmodels.study.results import LEVEL, DrawMean, Standing, to_json

PAGE, TEXT, NUMBERS = "index.html", "results.md", "results.json"
NONE = "–"


def write_results(study: Study, name: str, table: Sequence[Standing], folder: Path) -> Path:
    """Write the three files; return the page."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {PAGE: render_page(study, name, table), TEXT: format_markdown(study, name, table)}
    for file, text in texts.items():
        with replace_file(folder / file) as temporary:
            temporary.write_text(text, "utf-8")
    write_json(folder / NUMBERS, {"study": study.model_dump(mode="json"), "rows": [to_json(row) for row in table]})
    return folder / PAGE


def format_markdown(study: Study, name: str, table: Sequence[Standing]) -> str:
    """Return the page as Markdown."""
    header, *rows = list_cells(study, table)
    texts = [describe_figures(study, table), *list_notes(study, table)]
    lines = [f"# {name}", "", *(f"{text}\n" for text in texts), *_list_markdown(header, rows)]
    for title, of_metric in list_further_tables(study, table):
        lines += ["", f"## {title}", "", *_list_markdown(of_metric[0], of_metric[1:])]
    return "\n".join(lines) + "\n"


def render_page(study: Study, name: str, table: Sequence[Standing]) -> str:
    """Return the page as HTML, without network and scripts."""
    import jinja2

    places = jinja2.FileSystemLoader([Path(__file__).parent / "templates", TEMPLATES])
    environment = jinja2.Environment(
        loader=places, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("study.html.j2").render(
        name=name,
        caption=describe_figures(study, table),
        notes=list_notes(study, table),
        results=list_cells(study, table),
        further=list_further_tables(study, table),
        facts=list_facts(study),
        shared=study.set,
    )


def describe_figures(study: Study, table: Sequence[Standing]) -> str:
    """Return what the figures of the table are."""
    reading = labels.label_reading(study.reading).title
    draws = " or ".join(map(str, sorted({row.draws for row in table if row.draws}))) or "no"
    draws += " draw" if draws == "1" else " draws"
    return (
        f"{reading}, in %. Means over {draws} ± half of the {100 * LEVEL:.0f} % interval "
        f"(Student's t). The difference is paired by draw, from {study.compared_with}. Rank: the mean over the draws "
        "that all rows have, 1 is the best. Tuning: seconds of all choices that were tried, on val rows."
    )


def list_notes(study: Study, table: Sequence[Standing]) -> list[str]:
    """Return what a reader must know before believing the figures."""
    notes = []
    settings = load_rows(study).values()
    scales = sorted({params.federation.rounds_scale for params in settings})
    if scales[0] < 1:
        shares = " to ".join(f"{scale:.3g}" for scale in sorted({scales[0], scales[-1]}))
        notes.append(f"Not at full scale: {shares} of the rounds (scale). A paper's figures are at 1.")
    for block, text in (("partition", "partition of the samples"), ("stream", "order of the stream")):
        if any(getattr(params, block).seed is not None for params in settings):
            notes.append(f"One {text} for all seeds ({block}.seed): intervals do not cover another one.")
    few = [row.label for row in table if row.draws < 3]
    if few:
        notes.append(
            f"Fewer than three draws: no claim rests on {'this' if len(few) == len(table) else ', '.join(few)}."
        )
    notes += [
        f"{row.label}: {row.early} of {row.early + row.draws} runs ended early: {row.problem}"
        for row in table
        if row.early
    ]
    return notes


def list_facts(study: Study) -> list[tuple[str, str]]:
    """Return the study's plan for the end of the page."""
    budget = "the size of its grid" if study.budget is None else str(study.budget)
    return [
        ("settings", study.params),
        ("seeds judged", ", ".join(map(str, study.seeds))),
        ("seeds that choose, on val rows", ", ".join(map(str, study.tuning_seeds))),
        ("most choices a row may try", budget),
    ]


def list_cells(study: Study, table: Sequence[Standing]) -> list[list[str]]:
    """Return the table's header and its rows, as text."""
    titles = [_title_metric(name) for name in study.metrics]
    best = any(row.costs["rounds_to_best"] is not None for row in table)
    header = ["row", *titles, f"{titles[0]} − {study.compared_with}", "rank", "tried", "tuning", "a run", "a round"]
    header += ["rounds to best"] * best + ["up", "down", "stored"]
    return [header, *(list(_list_row(study, row, best)) for row in table)]


def list_further_tables(study: Study, table: Sequence[Standing]) -> list[tuple[str, list[list[str]]]]:
    """Return title, header and rows: of the settings, and of each metric that is shown after each task."""
    chosen = [[row.label, row.method, shlex.join(row.settings)] for row in table]
    tables = [("Settings", [["row", "method", "chosen on val rows, and the row's own"], *chosen])]
    for name in study.after_each:
        tasks = max((len(row.after_each[name]) for row in table), default=0)
        rows = [[row.label, *(format_estimate(e) for e in row.after_each[name])] for row in table]
        tables.append((f"{_title_metric(name)} after each task", [["row", *map(str, range(1, tasks + 1))], *rows]))
    return tables


def format_estimate(estimate: DrawMean | None, signed: bool = False) -> str:
    """Return mean ± half interval in percent."""
    if estimate is None:
        return NONE
    sign = "+" if signed and round(100 * estimate.mean, 1) > 0 else ""
    half = "" if estimate.half is None else f" ± {format_percent(estimate.half)}"
    return f"{sign}{format_percent(estimate.mean)}{half}"


def _list_row(study: Study, row: Standing, best: bool) -> Iterator[str]:
    costs = row.costs
    yield row.label + (f" ({row.draws} of {row.draws + row.early})" if row.early else "")
    for name in study.metrics:
        yield format_estimate(row.metrics[name])
    common = row.difference.draws if row.difference else row.draws
    yield format_estimate(row.difference, signed=True) + (f" (of {common})" if common < row.draws else "")
    yield NONE if row.rank is None else f"{row.rank:.1f}"
    yield str(row.tried) if row.tried else NONE
    yield format_duration(row.tuning_seconds) if row.tried else NONE
    for name in ("seconds", "seconds_per_round"):
        yield _format_cost(costs[name], format_duration)
    if best:
        yield _format_cost(costs["rounds_to_best"], format_number)
    for name in ("bytes_up", "bytes_down", "bytes_kept"):
        yield _format_cost(costs[name], format_bytes)


def _format_cost(value: float | None, show: Callable[[float], str]) -> str:
    return NONE if value is None else show(value)


def _title_metric(metric: str) -> str:
    """Return a metric's title, with its reading where it names one."""
    reading, _, name = metric.rpartition(".")
    title = labels.METRICS[name].title if name in labels.METRICS else name
    return f"{title}, {labels.label_reading(reading).title.lower()}" if reading else title


def _list_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for line in (header, ["---"] * len(header), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
