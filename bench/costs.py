"""What each method costs beside FedAvg, which takes turns with it on the demo's stream (params.yaml), on its network.

    python bench/suite.py costs --out tries/costs.parquet
    python bench/costs.py tries/costs.parquet

Seconds of a round after the first task, of the server's own training in a task (in FedAvg's rounds), bytes up and down
in all, what a client keeps (in models); and the most memory of a run on a larger network (measure_memory). A
transformer is drawn, not pretrained: costs do not depend on that.
"""

import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import polars as pl
from measuring import Bench, Row

from fclmodels import plugins
from fclmodels.data.splits.make_splits import make_splits
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.costs.trial import run_trial
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.executors.auto_choice import Choice
from fclmodels.settings.load import load_params
from fclmodels.settings.schema import Params
from fclmodels.testing.method_trial import find_needed_settings
from fclmodels.testing.tiny_splits import load_tiny_params, write_splits

PARAMS = Path(__file__).parents[1] / "params.yaml"
SETTINGS = ("federation.rounds=4", "federation.executor=serial", "federation.threads=1", "model.weights=null")
TURNS = 3
COLUMNS = {  # of the page, by the ends of the rows' names
    "": "a round",
    "-server": "server, a task",
    "-up": "up",
    "-down": "down",
    "-kept": "a client keeps",
    "-memory": "memory",
}


class Costs(NamedTuple):
    """The costs of one run."""

    round_seconds: float  # median of the rounds after the first task
    server_seconds: float  # of the server's own training, a task
    bytes_up: int
    bytes_down: int
    bytes_kept: float  # by a client


def measure_costs(name: str, turns: int) -> Iterator[Row]:
    params = load_params(PARAMS, SETTINGS, name, 0)
    with tempfile.TemporaryDirectory() as folder:
        splits = Splits.open(make_splits(params, Path(folder) / "splits"))
        sides: dict[str, list[Costs]] = {name: [], "fedavg": []}
        for turn in range(turns + 1):  # the first one warms up
            for side in list(sides)[:: -1 if turn % 2 else 1]:
                sides[side].append(run_once(params, side, splits, Path(folder) / f"{side}-{turn}"))
    ours, other = (side[1:] for side in (sides[name], sides["fedavg"]))
    rounds = [costs.round_seconds for costs in other]
    model = [
        costs.bytes_up / (4 * len(splits.tasks) * splits.clients) for costs in other
    ]  # sent by each client a round
    megabytes = partial(Row, unit="MB")
    yield Row(f"costs-{name}", "a round, FedAvg's", [costs.round_seconds for costs in ours], rounds)
    if any(costs.server_seconds for costs in ours):
        what = "the server's training in a task, a round of FedAvg"
        yield Row(f"costs-{name}-server", what, [costs.server_seconds for costs in ours], rounds)
    for way in ("up", "down"):
        values = ([getattr(costs, f"bytes_{way}") / 1e6 for costs in side] for side in (ours, other))
        yield megabytes(f"costs-{name}-{way}", f"bytes {way}, FedAvg's", *values)
    kept = [costs.bytes_kept / 1e6 for costs in ours]
    yield megabytes(f"costs-{name}-kept", "what a client keeps, a model", kept, [size / 1e6 for size in model])
    yield from measure_memory(name)


def run_once(params: Params, method: str, splits: Splits, folder: Path) -> Costs:
    """Return the costs of a run."""
    with Experiment(params, method, 0, splits, folder / "home") as experiment:
        result = experiment.run(folder / "run")
    rounds = pl.read_parquet(folder / "run" / "rounds.parquet").filter(pl.col("task") > 0)["seconds"]
    costs = folder / "run" / "costs.parquet"
    return Costs(
        statistics.median(rounds),
        pl.read_parquet(costs)["seconds"].sum() / (len(splits.tasks) - 1) if costs.exists() else 0.0,
        result["bytes_up"],
        result["bytes_down"],
        result["bytes_kept"] / splits.clients,
    )


def measure_memory(name: str) -> Iterator[Row]:
    """Measure the most memory of a short run in a process of its own, on a network of 12 MB or a small transformer."""
    method = plugins.find("method", name)
    needed = find_needed_settings(method)
    with tempfile.TemporaryDirectory() as folder:
        splits = write_splits(Path(folder), tasks=4, clients=3, train=16, shape=(3, 24, 24))
        params = load_tiny_params(*(needed or ("model.hidden=1024",)))
        peaks = [
            run_trial(params, splits, of, 0, Choice("serial", 1, 1), None).main_bytes / 1e6 for of in (name, "fedavg")
        ]
    yield Row(f"costs-{name}-memory", "the most memory, FedAvg's", peaks[:1], peaks[1:], unit="MB")


def write_page(table: pl.DataFrame) -> str:
    """Return the rows as a page: a line a method, by the seconds of its round."""
    ratios = dict(table.drop_nulls("ratio").select("row", "ratio").iter_rows())
    names = sorted((row for row in ratios if row.removeprefix("costs-") in METHODS), key=lambda row: ratios[row])
    facts = table.row(0, named=True)
    lines = [
        "# What each method costs",
        "",
        "Each method beside FedAvg on the demo's stream and on the method's own network, four rounds a task: medians",
        f"of {TURNS} turns in one process. `python bench/suite.py costs --out FILE; python bench/costs.py FILE` on",
        f"{facts['cpu']}, {facts['date'][:10]}, commit {facts['commit']}.",
        "",
        "Seconds of a round after the first task, bytes and memory are in FedAvg's; the server's training in a task",
        "is in FedAvg's rounds; what a client keeps is in models. Memory is that of a short run on a network of",
        "12 MB, or on a small transformer, above what its imports take.",
        "",
        f"| method | {' | '.join(COLUMNS.values())} |",
        f"|---|{'---|' * len(COLUMNS)}",
    ]
    for row in names:
        values = [ratios.get(row + end) for end in COLUMNS]
        shown = " | ".join(
            "" if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in values
        )
        lines.append(f"| `{row.removeprefix('costs-')}` | {shown} |")
    return "\n".join(lines) + "\n"


METHODS = sorted(set(plugins.load_all("method")) - {"fedavg", "joint"})
BENCHES = [Bench(f"costs-{name}", partial(measure_costs, name), TURNS) for name in METHODS]

if __name__ == "__main__":
    sys.stdout.write(write_page(pl.read_parquet(sys.argv[1])))
