"""What runs cost, for the page: traffic, time, clients that failed, and accuracy against each of the two."""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fclmodels.report import words
from fclmodels.report.numbers import duration, number, percent, size
from fclmodels.report.planes import Plane, Spot, against_cost
from fclmodels.report.runs import Group, Run, batch_size
from fclmodels.report.tables import COSTS, readings, spread


def costs(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Costs of a run with their spread, and each as a share of the largest in its column pair, for the bars."""
    rows: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        values = {name: spread([run.costs[name] for run in group.runs]) for name in COSTS}
        rounds = spread([run.rounds.height for run in group.runs])[0]
        rows.append({"index": index, "group": group, "rounds": rounds, **values})
    most_bytes = max((row[name][0] or 0 for row in rows for name in ("bytes_up", "bytes_down")), default=0)
    most_seconds = max((row["seconds"][0] or 0 for row in rows), default=0)
    for row in rows:
        largest = {"bytes_up": most_bytes, "bytes_down": most_bytes, "seconds": most_seconds}
        row["share"] = {name: (row[name][0] or 0) / top if top else 0 for name, top in largest.items()}
    return rows


def stages(groups: Sequence[Group]) -> list[tuple[str, list[float | None]]]:
    """Mean seconds of each timed stage, and of a round, a column for each group."""

    def of(run: Run, name: str) -> float | None:
        value = run.result.timings.get(name)
        return float(value) if isinstance(value, int | float) else None

    names = dict.fromkeys(name for group in groups for run in group.runs for name in run.result.timings)
    rows = [(name, [spread([of(run, name) for run in group.runs])[0] for group in groups]) for name in names]
    rows.append(("a round", [spread([run.costs["seconds_per_round"] for run in group.runs])[0] for group in groups]))
    return [row for row in rows if any(value is not None for value in row[1])]


def faults(group: Group) -> dict[str, tuple[float | None, float | None]]:
    """What became of the clients that were sampled: counts of a run with their spread, none where none can fail."""
    counts = [run.result.faults for run in group.runs if run.result.faults]
    return {name: spread([of.get(name) for of in counts]) for name in words.FAULTS} if counts else {}


Text = Callable[[float], str]
WAYS: tuple[tuple[str, Callable[[Run], float], Text, Text], ...] = (  # what it tells of a spot, and at a tick
    ("bytes of a run, up and down", lambda run: run.result.bytes_up + run.result.bytes_down, size, size),
    ("seconds of a run", lambda run: run.result.seconds, duration, number),
)


def against_accuracy(groups: Sequence[Group]) -> list[Plane]:
    """ACC against bytes and against seconds, in each reading that two methods have.

    What costs nothing has no place on a logarithmic axis.
    """
    planes = []
    for reading in readings(groups):
        for label, cost, told, tick in WAYS:
            drawn = {index: of for index, group in enumerate(groups) if (of := _found(group, reading, cost))}
            spots = [_spot(index, groups[index].label, list(of.values()), told) for index, of in drawn.items()]
            folders = [folder for of in drawn.values() for folder in of]
            title = words.title(reading, batch_size(groups))
            planes += [against_cost(title, spots, label, tick, folders)] if len(spots) > 1 else []
    return planes


def _found(group: Group, reading: str, cost: Callable[[Run], float]) -> dict[Path, tuple[float, float]]:
    """Cost and ACC in percent of each run that has both."""
    accs = {run.folder: run.result.metrics.get(reading, {}).get("acc") for run in group.runs}
    return {
        run.folder: (cost(run), 100 * acc)
        for run in group.runs
        if (acc := accs[run.folder]) is not None and cost(run) > 0
    }


def _spot(index: int, label: str, seeds: Sequence[tuple[float, float]], told: Text) -> Spot:
    """The mean over seeds, and each seed near it."""
    cost, acc = (fmean(values) for values in zip(*seeds, strict=True))
    text = f"{label}: ACC {percent(acc / 100)} %, {told(cost)}"
    return Spot(index, text, cost, acc, near=seeds if len(seeds) > 1 else ())
