"""Run folders as experiments leave them, with plausible figures and no training, and their pages taken apart."""

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fclmodels import metrics
from fclmodels.federation.monitors.rows import make_table
from fclmodels.report.read_runs import TABLES, Result, RunFolder
from fclmodels.tables import ACCURACY, LEDGER

CLIENTS, SAMPLES = 4, 50


# final accuracy lost a task later, gained in learning, and what each method sends up beside its update
METHODS = {
    "fedavg": (0.16, 0.93, []),
    "fedprox": (0.12, 0.91, []),
    "fot": (0.02, 0.84, [("sketch", "sketch", "sum", -1, 40_000)]),
    "fedprotip": (0.03, 0.86, [("basis", "basis", "each", -1, 60_000), ("reference", "reference", "each", -1, 900)]),
    "joint": (0.0, 0.95, []),
}


BASE = {"task_aware": 0.0, "task_agnostic": 0.25, "task_predicted": 0.15}


SETTINGS = {
    "data": {"source": "digits", "size": None, "mean": [0.5], "std": [0.5]},
    "stream": {"kind": "class-incremental", "seed": 0, "tasks": 5},
    "partition": {"kind": "dirichlet", "clients": CLIENTS, "alpha": 0.5, "val": 0.1, "seed": 0},
    "model": {"backbone": "cnn", "head": "growing", "freeze": []},
    "federation": {"rounds": 6, "local_epochs": 1, "batch_size": 32, "executor": "auto", "workers": 2, "threads": 1},
    "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.0, "weight_decay": 0.0},
    "device": "cpu",
}


def write_run(folder, method="fedavg", seed=0, tasks=5, rounds=6, settings=None, splits="9f" * 32, **result):
    """A run folder as an experiment leaves it, with plausible figures and no training."""
    random = np.random.default_rng([seed, *method.encode()])
    folder.mkdir(parents=True)
    accuracy = _accuracy(random, method, tasks)
    accuracy.write_parquet(folder / "accuracy.parquet")
    ledger = _ledger(method, tasks, rounds)
    ledger.write_parquet(folder / "ledger.parquet")
    _rounds(random, tasks, rounds).write_parquet(folder / "rounds.parquet")
    content = {
        "format": 1,
        "method": method,
        "seed": seed,
        "label": f"{method}-{seed}",
        "metrics": metrics.compute_metrics(accuracy),
        "settings": SETTINGS | {"methods": {method: {"mu": 0.01} if method == "fedprox" else {}}} | (settings or {}),
        "digests": {"splits": splits, "prepared": "ab" * 32, "code": f"{METHODS[method][0]}".encode().hex() * 4}
        | {"model": random.bytes(32).hex()},
        "versions": {"fclflow": "0.1.0", "python": "3.11.7", "torch": "2.9.1", "polars": "2.1.0"},
        "seconds": float(np.round(random.normal(41, 2), 2)),
        "timings": {"training": 33.1, "evaluation": 4.2, "knowledge": 0.4},
        "bytes_up": ledger.filter(pl.col("direction") == "up")["bytes"].sum(),
        "bytes_down": ledger.filter(pl.col("direction") == "down")["bytes"].sum(),
        "bytes_kept": 0,
        "command": f"fcl run --method {method} --seed {seed} --out {folder}",
    }
    (folder / "result.json").write_text(json.dumps(content | result))
    return folder


def _accuracy(random, method, tasks):
    fall, learned, _ = METHODS[method]
    rows = []
    for reading, penalty in BASE.items():
        if reading == "task_predicted" and method == "joint":
            continue
        for after in range(tasks if method == "joint" else 0, tasks + 1):
            for task in range(after if reading == "task_aware" else tasks):
                age = after - task - 1
                level = learned * 0.95**task - fall * age * (1 + penalty) - penalty * min(after, 3) / 3
                level = level if age >= 0 else 0.0
                shares = np.clip(random.normal(level, 0.04 if age >= 0 else 0, CLIENTS), 0, 1)
                counts = np.round(shares * SAMPLES).astype(int).tolist()
                rows += [(reading, after, task, client, count, SAMPLES) for client, count in enumerate(counts)]
                rows.append((reading, after, task, None, sum(counts), SAMPLES * CLIENTS))
    return pl.DataFrame(
        rows,
        orient="row",
        schema=ACCURACY,
    )


def _ledger(method, tasks, rounds):
    weights = 102_400
    parts = [] if method == "joint" else [("weights", "weights", "down", "-", 0, weights)]
    parts += (
        []
        if method == "joint"
        else [("update", "update", "up", "sum", 0, weights), ("count", "count", "up", "sum", 0, 8)]
    )
    parts += [(part, kind, "up", least, end, size) for part, kind, least, end, size in METHODS[method][2]]
    rows = [
        (task, turn, client, direction, part, kind, least, size)
        for part, kind, direction, least, end, size in parts
        for task in range(tasks)
        for turn in (range(rounds) if end == 0 else [-1])
        for client in range(CLIENTS)
    ]
    return pl.DataFrame(
        rows,
        orient="row",
        schema={name: kind for name, kind in LEDGER.items() if name != "base_round"},
    )


def _rounds(random, tasks, rounds):
    step = np.arange(tasks * rounds)
    return pl.DataFrame(
        {
            "task": step // rounds,
            "round": step % rounds,
            "step": step,
            "clients": np.full(len(step), CLIENTS),
            "loss": 1.8 * np.exp(-(step % rounds) / 2) + 0.2 + random.uniform(0, 0.1, len(step)),
            "server_lr": np.ones(len(step)),
            "bytes_up": np.full(len(step), CLIENTS * 102_408),
            "bytes_down": np.full(len(step), CLIENTS * 102_400),
            "seconds": random.uniform(0.4, 0.6, len(step)),
        }
    )


def write_confusion(folder, counts, reading="task_predicted", after=None, times=1):
    """How many samples of each task (rows) were taken for which, after as many tasks as there are unless told."""
    rows = [(reading, after or len(counts), task, predicted, int(n)) for (task, predicted), n in np.ndenumerate(counts)]
    columns = ["reading", "after", "task", "predicted", "count"]
    pl.DataFrame(rows * times, columns, orient="row").write_parquet(folder / "confusion.parquet")


def write_monitored_run(folder, method, seed, rows, **settings):
    folder = write_run(folder, method, seed, tasks=3, settings=settings)
    make_table(rows).write_parquet(folder / "monitors.parquet")
    return folder


def read_results(folders):
    return [json.loads((folder / "result.json").read_text()) for folder in folders]


def change_result(name, change):
    def damage(folder):
        path = folder / "result.json"
        path.write_text(
            json.dumps(
                change(json.loads(path.read_text())) if name is None else {**json.loads(path.read_text()), name: change}
            )
        )

    return damage


def cut_short(name):
    def damage(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return damage


def change_table(name, change):
    def damage(folder):
        change(pl.read_parquet(folder / name)).write_parquet(folder / name)

    return damage


class HtmlTables(HTMLParser):
    """The page's tables as rows of cell texts, and whether every element that was opened is closed in its place."""

    VOID = ("meta", "br")

    def __init__(self, text):
        super().__init__()
        self.tables, self.open, self.tags = [], [], set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += " ".join(data.split())

    def headed(self, column):
        return [rows for rows in self.tables if column in rows[0]]


class HtmlLinks(HTMLParser):
    """What can be linked to, what is linked, and the texts of a page's figures with their links."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.figures = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids |= {attributes.get("id")}
        if tag in ("figure", "table") and (tag == "figure" or "matrix" in attributes.get("class", "")):
            self.figures.append([])
        if tag == "a":
            self.links.append(attributes["href"])
        if tag == "a" and "class" not in attributes and self.figures:
            self.figures[-1].append(attributes["href"])


def build_run(
    method: str,
    settings: dict[str, Any],
    seed: int = 0,
    rows: Sequence[dict[str, Any]] = (),
    rounds: int = 4,
    **of: Any,
) -> RunFolder:
    """A run of tasks that have this many rounds each; `of`: metrics of the task-agnostic reading."""
    content = {"format": 1, "method": method, "seed": seed, "metrics": {"task_agnostic": of}, "settings": settings}
    content |= {"digests": {}, "versions": {}, "seconds": 0, "bytes_up": 0, "bytes_down": 0}
    tables = {name: pl.DataFrame(schema=schema) for name, schema in TABLES.items()}
    facts = [
        {"task": task, "round": round, "step": task * rounds + round, "loss": 0.0, "seconds": 1.0}
        for task in range(3)
        for round in range(rounds)
    ]
    tables |= {"monitors": make_table(rows), "rounds": pl.DataFrame(facts, schema=TABLES["rounds"])}
    return RunFolder(Path(f"{method}-{seed}"), Result.model_validate(content), **tables)
