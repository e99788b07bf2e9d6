"""How MLflow's pages name and describe a run.

They sort charts by name, put what stands before the last slash over them, and open a comparison with the first
metric that was logged and the first three params by name among those that differ. So a metric's name begins with what
it measures and ends with its reading, accuracy first; method and seed come before the method's own settings, which
have the same names for all methods, and what changes no result comes last.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from fclmodels.params import flat
from fclmodels.report import words
from fclmodels.report.numbers import percent

METRICS = {  # of metrics.summary; there is no place in a chart to explain a short name
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
DESCRIBED = ("acc", "learning_acc", "fgt", "worst_acc")
NO_MATTER = ("executor", "workers", "threads", "checkpoint_seconds")  # of federation, for the result


def metrics_of(summary: dict[str, dict[str, float | None]]) -> dict[str, float]:
    """Metrics by name, those of accuracy first; a metric that has no value is left out."""
    named = {
        f"{METRICS[name]}/{_of_reading(reading)}": value
        for reading, values in summary.items()
        for name, value in values.items()
        if value is not None
    }
    return dict(sorted(named.items()))


def params_of(settings: dict[str, Any], method: str, seed: int) -> dict[str, str]:
    """Flat params, those of the method as `settings.`, what changes no result as `system.`; without what is not set."""
    settings = dict(settings)
    federation = dict(settings.pop("federation", {}))
    system = {name: federation.pop(name) for name in NO_MATTER if name in federation}
    system |= {name: settings.pop(name) for name in ("device",) if name in settings}
    own = settings.pop("methods", {}).get(method, {})
    named = {"method": method, "seed": seed, **settings, "federation": federation, "settings": own, "system": system}
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in flat(named).items()
        if value is not None
    }


def description(result: dict[str, Any], run: str) -> str:
    """A run's figures by reading, what must stand beside them, its accuracy matrix, what makes it again: Markdown."""
    rows = [
        (words.reading(reading).title, *(in_percent(values.get(name)) for name in DESCRIBED))
        for reading, values in result["metrics"].items()
    ]
    header = ("in %", *(words.METRICS[name].title for name in DESCRIBED))
    matrix = f"![accuracy matrix](get-artifact?path=accuracy.png&run_uuid={run})"
    return "\n\n".join([table(header, rows), *words.notes(result), matrix, f"`{result['command']}`"])


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown. MLflow's pages leave no room between columns."""
    lines = ([f"{cell}&emsp;" for cell in line] for line in (header, *rows))
    first, *others = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([first, "|---" * len(header) + "|", *others])


def _of_reading(reading: str) -> str:
    """With what is special of it at its end, so that the usual readings come first."""
    for special in words.BY_BATCH:
        if reading.startswith(special):
            return f"{reading.removeprefix(special)}_{special.rstrip('_')}"
    return reading


def in_percent(share: float | None, spread: float | None = None) -> str:
    """With its standard deviation where there is one."""
    return "–" if share is None else " ± ".join(percent(value) for value in (share, spread) if value is not None)
