"""Names of runs, metrics and params, and descriptions of runs, as MLflow's pages show them best.

The pages sort charts by name, group them by the part before the last slash, and open a comparison with the metric that
was logged first and the first three params by name among those that differ. So a metric's name begins with what it
measures and ends with its reading, accuracy first; method and seed come before the method's own settings, whose prefix
is the same for all methods, and settings that change no result come last.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from fclmodels.report import labels
from fclmodels.report.formatting import format_percent
from fclmodels.settings.load import flatten_settings
from fclmodels.settings.preset import format_setting

METRICS = {  # by name in metrics.summary; a chart has no room to explain a short name
    "acc": "acc",
    "learning_acc": "acc_just_learned",
    "avg": "acc_avg",
    "client_acc": "acc_client_mean",
    "worst_client_acc": "acc_worst_client",
    "worst_acc": "acc_worst_task",
    "bwt": "backward_transfer",
    "ft": "forgetting_ft",
    "fgt": "forgetting_fgt",
    "af": "forgetting_af",
    "worst_drop": "forgetting_worst",
    "forward": "forward_transfer",
    "pd": "performance_drop",
    "tip_acc": "task_prediction",
}
READING = "task_agnostic"  # the one of figures without a reading
DESCRIBED = ("acc", "learning_acc", "fgt", "worst_acc")
SYSTEM_SETTINGS = ("executor", "workers", "threads", "checkpoint_seconds")  # of federation; they change no result


def name_run(method: str, seed: int, tasks: int | None) -> str:
    """Return the name of a run; tasks: of a stream that grows, which has a run for each number of tasks."""
    return f"{method} seed {seed}" + (f", {tasks} tasks" if tasks else "")


def name_metrics(summary: dict[str, dict[str, float | None]]) -> dict[str, float]:
    """Return the metrics that have values by their names in MLflow, those of accuracy first."""
    named = {
        f"{METRICS[name]}/{_name_reading(reading)}": value
        for reading, values in summary.items()
        for name, value in values.items()
        if value is not None
    }
    return dict(sorted(named.items()))


def flatten_params(settings: dict[str, Any], method: str, seed: int) -> dict[str, str]:
    """Return the settings that are not None under dotted names: the method's as `settings.`, machine's as `system.`

    The seeds of stream and partition are left out where they follow the run's: MLflow shows each that differs.
    """
    settings = dict(settings)
    federation = dict(settings.pop("federation", {}))
    system = {name: federation.pop(name) for name in SYSTEM_SETTINGS if name in federation}
    system |= {name: settings.pop(name) for name in ("device",) if name in settings}
    of_method = settings.pop("methods", {}).get(method, {})
    params = {"method": method, "seed": seed, **settings, "federation": federation}
    params |= {"settings": of_method, "system": system}
    return {
        name: format_setting(value)
        for name, value in flatten_settings(params).items()
        if value is not None and not (name in ("stream.seed", "partition.seed") and value == seed)
    }


def describe_run(result: dict[str, Any], run: str) -> str:
    """Return Markdown: figures by reading, notes on them, accuracy matrix, and the command that reproduces the run."""
    rows = [
        (labels.label_reading(reading).title, *(format_share(values.get(name)) for name in DESCRIBED))
        for reading, values in result["metrics"].items()
    ]
    header = ("in %", *(labels.METRICS[name].title for name in DESCRIBED))
    matrix = f"![accuracy matrix](get-artifact?path=accuracy.png&run_uuid={run})"
    return "\n\n".join([format_table(header, rows), *labels.list_notes(result), matrix, f"`{result['command']}`"])


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, with the room between columns that MLflow's pages leave out."""
    lines = ([f"{cell}&emsp;" for cell in line] for line in (header, *rows))
    first, *others = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([first, "|---" * len(header) + "|", *others])


def _name_reading(reading: str) -> str:
    """Return the reading with a special prefix moved to its end, so that the usual readings come first."""
    for special in labels.BY_BATCH:
        if reading.startswith(special):
            return f"{reading.removeprefix(special)}_{special.rstrip('_')}"
    return reading


def format_share(share: float | None, spread: float | None = None) -> str:
    """Return a share of 1 in percent, with its standard deviation if there is one."""
    return "–" if share is None else " ± ".join(format_percent(value) for value in (share, spread) if value is not None)
