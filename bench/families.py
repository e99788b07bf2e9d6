"""Prompts, adapters, prototypes and closed forms on one frozen backbone, at equal bytes and at equal seconds.

    fcl pretrain --out data/pretrained/letters
    python bench/families.py --raw data/raw [--streams digits,mnist] [--seeds 5] [--out tries/families]

Three real streams of ten classes at 8 pixels: the embedded digits, and drawn shares of MNIST and Fashion-MNIST, five
tasks of two classes over ten clients. All methods have the vit that `fcl pretrain` makes of drawn letters. The learning
rate of each is the better of two by ACC on val rows with seed 100, at three rounds a task; then each runs with three
and ten rounds a task and other seeds (one round where more change nothing). A table has ACC, bytes both ways and
processor seconds, evaluation left out; two more have the best within a budget. What --out has is not run again.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fclmodels.data.prepare import prepare
from fclmodels.data.splits.make_splits import write_splits
from fclmodels.data.splits.split_reader import Rows, Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.plugins import find
from fclmodels.settings.load import load_params
from fclmodels.settings.schema import Params

STREAMS = {
    "digits": [],
    "mnist": ["data.source=mnist", "data.size=8", "partition.train_share=0.015", "partition.test_share=0.05"],
    "fashion-mnist": [
        *("data.source=fashion-mnist", "data.size=8", "partition.train_share=0.015", "partition.test_share=0.05"),
    ],
}
SHARED = ["stream.tasks=5", "partition.eta=0.5", "federation.executor=serial", "federation.threads=1", "device=cpu"]
MEGABYTES, SECONDS = (0.3, 1, 5, 20, 50), (0.5, 1, 2, 5, 10)
RATES = (0.01, 0.03)
ROUNDS = (3, 10)
TUNE_SEEDS = (100,)
ONCE = ("nearest-prototype", "ridge")  # more rounds change nothing
FAMILIES = {  # label: family, method, settings
    "nearest prototype": ("prototypes", "nearest-prototype", []),
    "CCVR, frozen": ("prototypes", "ccvr", ["methods.ccvr.frozen=true"]),
    "linear probe": ("prototypes", "linear-probe", []),
    "ridge, M = 0": ("closed forms", "ridge", ["methods.ridge.random_features=0"]),
    "ridge, M = 128": ("closed forms", "ridge", ["methods.ridge.random_features=128"]),
    "ridge, M = 640": ("closed forms", "ridge", []),
    "STSA": ("closed forms", "stsa", []),
    "LoRA": ("adapters", "lora", []),
    "O-LoRA": ("adapters", "o-lora", []),
    "InfLoRA": ("adapters", "inflora", []),
    "LoRM": ("adapters", "lorm", []),
    "PILoRA": ("adapters", "pilora", []),
    "CODA-Prompt": ("prompts", "coda-prompt", []),
    "Fed-CPrompt": ("prompts", "fed-cprompt", []),
    "Fed-DualP": ("prompts", "fed-dualp", []),
    "PIP-DualP": ("prompts", "pip-dualp", []),
}


class OnVal(Splits):
    """Splits whose evaluation reads val rows."""

    def select_test_rows(self, task: int, client: int | None = None) -> Rows:
        return self.select_rows(task, "val", client)


class Row(NamedTuple):
    stream: str
    label: str
    lr: float
    rounds: int
    spread: float
    acc: float
    bytes: float
    seconds: float


def make_splits(stream: str, raw: Path, folder: Path) -> Path:
    """Return the folder of a stream's splits, a tenth of each client's samples val rows; written once."""
    if not (folder / "splits" / "stream.json").exists():
        params = read_params(STREAMS[stream], f"data.root={raw}", "partition.val=0.1")
        prepare(find("source", params.data.source)(params.data), folder / "prepared")
        chosen = find("stream", params.stream.kind)(params.stream)
        partition = find("partition", params.partition.kind)(params.partition)
        write_splits(folder / "prepared", chosen, partition, folder / "splits")
    return folder / "splits"


def read_params(settings: list[str], *further: str) -> Params:
    return load_params("presets/pip-digits.yaml", [*SHARED, *settings, *further])


def run(label: str, splits: Splits, folder: Path, lr: float, rounds: int, seed: int) -> dict[str, float]:
    """Return ACC of a run, its bytes both ways and its processor seconds, evaluation left out."""
    kind = "val" if isinstance(splits, OnVal) else "test"
    file = folder / "runs" / f"{label.replace(' ', '-')}-{lr}-{rounds}-{seed}-{kind}.json"
    if not file.exists():
        _, method, settings = FAMILIES[label]
        params = read_params(settings, f"optimizer.lr={lr}", f"federation.rounds={rounds}")
        with Experiment(params, method, seed, splits, folder / "home") as experiment, Stopwatch(experiment) as watch:
            started = time.process_time()
            result = experiment.run(file.with_suffix(""))
            seconds = time.process_time() - started - watch.seconds
        row = {
            "acc": 100 * result["metrics"]["task_agnostic"]["acc"],
            "bytes": result["bytes_up"] + result["bytes_down"],
            "seconds": seconds,
        }
        file.write_text(json.dumps(row))
    return dict(json.loads(file.read_text()))


class Stopwatch:
    """Processor seconds of an experiment's evaluations."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.seconds = experiment, 0.0

    def __enter__(self) -> "Stopwatch":
        evaluate = self.experiment._evaluate

        def timed(step: Any) -> Any:
            started = time.process_time()
            outcome = evaluate(step)
            self.seconds += time.process_time() - started
            return outcome

        self.experiment._evaluate = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        pass


def measure(stream: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each method and number of rounds of a stream."""
    folder = options.out / stream
    splits = make_splits(stream, options.raw, folder)
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    for label in options.rows.split(";"):
        rate, rounds = RATES[0], (1,)
        if FAMILIES[label][1] not in ONCE:
            on_val = OnVal.open(splits)
            tuned = {lr: mean_of([run(label, on_val, folder, lr, 3, s) for s in TUNE_SEEDS])["acc"] for lr in RATES}
            rate, rounds = max(tuned, key=tuned.__getitem__), options.rounds
        for count in rounds:
            runs = [run(label, Splits.open(splits), folder, rate, count, seed) for seed in range(options.seeds)]
            spread = float(np.std([one["acc"] for one in runs], ddof=1)) if options.seeds > 1 else 0.0
            row = Row(stream, label, rate, count, spread, **mean_of(runs))
            print(row, flush=True)
            yield row


def mean_of(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([one[name] for one in runs])) for name in runs[0]}


def write_tables(rows: list[Row]) -> Iterator[str]:
    """Yield the tables as Markdown: all rows, and the best of each method within budgets."""
    for stream in dict.fromkeys(row.stream for row in rows):
        mine = [row for row in rows if row.stream == stream]
        yield f"\n### {stream}\n"
        yield "| family | method | rate | rounds | ACC | MB | seconds |"
        yield "|---|---|---|---|---|---|---|"
        for row in mine:
            family = FAMILIES[row.label][0]
            rate = "" if FAMILIES[row.label][1] in ONCE else f"{row.lr:g}"
            yield (
                f"| {family} | {row.label} | {rate} | {row.rounds} | {row.acc:.1f} ± {row.spread:.1f} "
                f"| {row.bytes / 1e6:.2f} | {row.seconds:.1f} |"
            )
        for unit, budgets, of in (
            ("MB", MEGABYTES, lambda row: row.bytes / 1e6),
            ("seconds", SECONDS, lambda row: row.seconds),
        ):
            yield f"\nBest ACC within so many {unit}:\n"
            yield "| family | method | " + " | ".join(f"{budget:g} {unit}" for budget in budgets) + " |"
            yield "|---|---|" + "---|" * len(budgets)
            for label in dict.fromkeys(row.label for row in mine):
                within = [[r.acc for r in mine if r.label == label and of(r) <= budget] for budget in budgets]
                cells = [f"{max(accs):.1f}" if accs else "" for accs in within]
                yield f"| {FAMILIES[label][0]} | {label} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raw", type=Path, default=Path("data/raw"))
    parser.add_argument("--streams", default=",".join(STREAMS))
    parser.add_argument("--rows", default=";".join(FAMILIES))
    parser.add_argument("--rounds", type=int, nargs="+", default=ROUNDS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("tries/families"))
    options = parser.parse_args()
    rows = [row for stream in options.streams.split(",") for row in measure(stream, options)]
    print("\n".join(write_tables(rows)))


if __name__ == "__main__":
    main()
