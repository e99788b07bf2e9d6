"""A FedAvg round of this project against a bare PyTorch loop on the same samples, interleaved in one run.

    python bench/local_loop.py [mlp alexnet resnet18] [--repeats 15]

Both sides run with tuned malloc and the same number of threads: serial against serial, two worker processes
against two worker processes. Prints the median seconds of a round, and the median of the paired ratios.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import torch
import torch.multiprocessing as mp

from fclmodels import params, plugins
from fclmodels.backbones.network import Network, skeleton
from fclmodels.backbones.spec import ModelSpec
from fclmodels.data.splits import Splits, content_digest
from fclmodels.federation import malloc
from fclmodels.federation.checkpoints import Checkpoints, Position
from fclmodels.federation.executor import Serial
from fclmodels.federation.processes import Processes
from fclmodels.federation.rounds import one_round, open_ledger
from fclmodels.federation.run import Run
from fclmodels.listener import Listener
from fclmodels.state import write_json


@dataclass(frozen=True)
class Work:
    clients: int
    samples: int
    batch: int
    shape: tuple[int, int, int]
    model: dict[str, str | int]
    classes: int = 10


WORKS = {
    "mlp": Work(64, 480, 64, (1, 28, 28), {"backbone": "mlp"}),
    "alexnet": Work(10, 100, 16, (3, 32, 32), {"backbone": "alexnet"}),
    "resnet18": Work(5, 500, 64, (3, 32, 32), {"backbone": "resnet18", "stem": "imagenet"}),
}
LR = 0.01


def make_splits(work: Work, folder: Path) -> Splits:
    """Random images, one task, every sample a train row."""
    random = np.random.default_rng(0)
    count = work.clients * work.samples
    (folder / "prepared").mkdir()
    np.save(folder / "prepared" / "images.npy", random.integers(0, 256, (count, *work.shape), dtype=np.uint8))
    write_json(folder / "prepared" / "meta.json", {"digest": "random"})
    table = pl.DataFrame(
        {
            "sample": np.arange(count),
            "label": random.integers(0, work.classes, count),
            "domain": np.zeros(count, int),
            "task": np.zeros(count, int),
            "client": np.repeat(np.arange(work.clients), work.samples),
            "split": ["train"] * count,
        }
    )
    (folder / "splits").mkdir()
    table.write_parquet(folder / "splits" / "manifest.parquet")
    task = {"name": "random", "classes": list(range(work.classes)), "permutation": None, "classes_by_client": None}
    facts = {
        "format": 1, "kind": "class-incremental", "tasks": [task], "classes": [str(c) for c in range(work.classes)],
        "clients": work.clients, "shape": work.shape, "mean": [0.5] * work.shape[0], "std": [0.5] * work.shape[0],
        "head": "growing", "prepared": "../prepared", "prepared_digest": "random",
    }  # fmt: skip
    facts["digest"] = content_digest(table, facts)
    write_json(folder / "splits" / "stream.json", facts)
    return Splits.open(folder / "splits")


# The bare loop: tensors in memory, one model, no round log, no messages, no checkpoint.


def bare_clients(
    network: Network, data: list[tuple[torch.Tensor, torch.Tensor]], start: dict, batch: int, total: dict
) -> None:
    """Train each client from `start` and add its weights, times its samples, to `total`."""
    for inputs, labels in data:
        network.load_state_dict(start)
        network.train()
        optimiser = torch.optim.SGD(network.parameters(), lr=LR)
        for rows in torch.randperm(len(labels)).split(batch):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(network(inputs[rows]), labels[rows]).backward()
            optimiser.step()
        with torch.no_grad():
            for name, value in network.state_dict().items():
                if value.is_floating_point():
                    total[name].add_(value, alpha=len(labels))


def client_data(splits: Splits, clients: range) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = []
    for client in clients:
        rows = splits.rows(0, "train", client)
        inputs = splits.images[torch.from_numpy(rows.samples)].float().div_(127.5).sub_(1)
        data.append((inputs, torch.from_numpy(rows.labels)))
    return data


def zeros_like(weights: dict) -> dict:
    return {name: torch.zeros_like(value) for name, value in weights.items() if value.is_floating_point()}


def bare_serial(work: Work, splits: Splits, spec: ModelSpec) -> Iterator[None]:
    network = skeleton(spec)
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    data = client_data(splits, range(work.clients))
    while True:
        total = zeros_like(weights)
        bare_clients(network, data, weights, work.batch, total)
        weights |= {name: value / (work.clients * work.samples) for name, value in total.items()}
        yield


def bare_worker(
    folder: str, spec: ModelSpec, clients: range, batch: int, weights: dict, total: dict, todo, done
) -> None:
    malloc.tune()
    torch.set_num_threads(1)
    network, data = skeleton(spec), client_data(Splits.open(Path(folder)), clients)
    while todo.get():
        for value in total.values():
            value.zero_()
        bare_clients(network, data, weights, batch, total)
        done.put(True)


def bare_processes(work: Work, splits: Splits, spec: ModelSpec) -> Iterator[None]:
    """Two persistent workers, weights and sums in shared memory, clients dealt once."""
    context = mp.get_context("spawn")
    weights = {name: value.share_memory_() for name, value in skeleton(spec).state_dict().items()}
    totals = [{name: value.share_memory_() for name, value in zeros_like(weights).items()} for _ in range(2)]
    todo, done = [context.SimpleQueue() for _ in range(2)], context.SimpleQueue()
    halves = [range(0, work.clients, 2), range(1, work.clients, 2)]
    workers = [
        context.Process(
            target=bare_worker,
            args=(str(splits.folder), spec, halves[i], work.batch, weights, totals[i], todo[i], done),
            daemon=True,
        )
        for i in range(2)
    ]
    for worker in workers:
        worker.start()
    try:
        while True:
            for queue in todo:
                queue.put(True)
            done.get(), done.get()
            for name in totals[0]:
                weights[name].copy_((totals[0][name] + totals[1][name]) / (work.clients * work.samples))
            yield
    finally:
        for queue in todo:
            queue.put(False)


# This project: the round loop as it is, with messages, ledger, log and checkpoints as often as by default.


def our_rounds(run: Run, executor_of: Callable, folder: Path) -> Iterator[None]:
    method = plugins.find("method", "fedavg")(params.method_settings(run.params, "fedavg"), run)
    executor = executor_of(method)
    checkpoints = Checkpoints(folder)
    position = Position(method.start_task(method.setup(), 0), {}, 0)
    ledger = open_ledger(method, checkpoints)
    try:
        while True:
            position = one_round(method, position, 0, executor, checkpoints, ledger, Listener())
            if checkpoints.age >= run.params.federation.checkpoint_seconds:
                checkpoints.commit(position)
            yield
    finally:
        executor.close()
        checkpoints.close()


def processes(run: Run, folder: Path) -> Callable:
    write_json(folder / "params.json", params.effective(run.params, "fedavg"))
    return lambda method: Processes(method, folder / "params.json", workers=2, threads=1)


def measure(name: str, repeats: int) -> dict[str, float | str]:
    work = WORKS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        splits = make_splits(work, folder)
        settings = {
            "model": work.model,
            "federation": {"batch_size": work.batch, "executor": "serial"},
            "optimizer": {"lr": LR},
        }
        write_json(folder / "params.yaml", settings)
        run = Run.on(params.load(folder / "params.yaml"), splits, seed=0)
        sides = {
            "bare serial": bare_serial(work, splits, run.spec(1)),
            "ours serial": our_rounds(run, lambda method: Serial(method, 1), folder / "serial"),
            "bare processes": bare_processes(work, splits, run.spec(1)),
            "ours processes": our_rounds(run, processes(run, folder), folder / "processes"),
        }
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for loop in sides.values():
            next(loop)
        for _ in range(repeats):
            for side, loop in sides.items():
                started = time.perf_counter()
                next(loop)
                seconds[side].append(time.perf_counter() - started)
        for loop in sides.values():
            loop.close()
    result: dict[str, float | str] = {"work": name}
    for kind in ("serial", "processes"):
        pairs = zip(seconds[f"ours {kind}"], seconds[f"bare {kind}"], strict=True)
        result[f"{kind}_bare_s"] = round(statistics.median(seconds[f"bare {kind}"]), 3)
        result[f"{kind}_ratio"] = round(statistics.median(ours / bare for ours, bare in pairs), 3)
    return result


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("works", nargs="*", default=list(WORKS), help=f"of {', '.join(WORKS)}")
    arguments.add_argument("--repeats", type=int, default=15, help="rounds of each side, in turn")
    chosen = arguments.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, tuned malloc: {malloc.tune()}", flush=True)
    torch.set_num_threads(1)
    for name in chosen.works:
        # A process of its own each, so that no workload inherits another's memory.
        if len(chosen.works) > 1:
            subprocess.run([sys.executable, __file__, name, "--repeats", str(chosen.repeats)], check=True)
        else:
            print(json.dumps(measure(name, chosen.repeats)))


if __name__ == "__main__":
    main()
