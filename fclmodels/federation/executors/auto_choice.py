"""The choice of executor and threads: as set, or by a short measurement whose result is stored.

The number of threads enters every cache key, so the choice for some settings on this machine is never made twice.
"""

import heapq
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.exchange import TRAIN
from fclmodels.federation.executors.base import set_torch_threads
from fclmodels.storage.sealed_json import read_sealed, write_sealed

if TYPE_CHECKING:
    from fclmodels.federation.method import Method

MEASURED_BATCHES = 4
# Rough costs that the measurement does not include.
WORKER_START = 3.0  # seconds
CONTENTION = 1.1  # factor of a batch's time where several workers run


@dataclass(frozen=True)
class Choice:
    """An executor and its size."""

    executor: str
    workers: int | None  # None: as many as a cluster has room for
    threads: int  # of each worker

    def __post_init__(self) -> None:
        room = self.executor == "ray" and self.workers is None
        counts = [self.threads, *([] if room else [self.workers])]
        if self.executor not in ("serial", "processes", "ray") or not all(type(n) is int and n > 0 for n in counts):
            raise ValueError("it is no choice")

    @property
    def at_once(self) -> int:
        """The number of cores that train clients, here or, where `workers` is set, on a cluster."""
        return self.threads * (1 if self.executor == "serial" else self.workers or 1)


def choose(method: "Method", folder: Path, key: str) -> Choice:
    """Return the choice by settings where they decide, else the stored one under this key, else by a measurement."""
    federation = method.run.params.federation
    if federation.executor == "ray":  # a measurement here says nothing of a cluster
        return Choice("ray", federation.workers, 1 if federation.threads == "auto" else federation.threads)
    workers = federation.workers or count_cores()
    if federation.executor != "auto" and federation.threads != "auto":
        return Choice(federation.executor, workers, federation.threads)
    options = f"{federation.executor}-{federation.workers}-{federation.threads}-{count_cores()}"
    path = folder / f"{key}-{options}.json"
    if path.exists():
        try:
            return Choice(**read_sealed(path))
        except (ValueError, TypeError) as problem:
            raise UserError(f"{path} cannot be read ({problem}). Delete it to have it measured again.") from problem
    choice = min(list_candidates(method, workers), key=lambda candidate: predict_seconds(method, candidate))
    write_sealed(path, asdict(choice))
    return choice


def list_candidates(method: "Method", workers: int) -> list[Choice]:
    """Return the choices that the settings leave open; on a GPU clients run one after another."""
    federation = method.run.params.federation
    kinds = ["serial", "processes"] if federation.executor == "auto" else [federation.executor]
    if method.run.device.type != "cpu" and federation.executor == "auto":
        kinds = ["serial"]
    if federation.threads != "auto":
        return [Choice(kind, workers, federation.threads) for kind in kinds]
    threads = {"serial": {1, count_cores()}, "processes": {1}}
    return [Choice(kind, workers, count) for kind in kinds for count in sorted(threads[kind])]


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def predict_seconds(method: "Method", choice: Choice) -> float:
    """Return the seconds of a run with this choice, predicted from a few batches of the first task."""
    run = method.run
    federation = run.params.federation
    clients = method.list_participants(0)
    sizes = sorted((len(method.select_rows(0, client)) for client in clients), reverse=True)
    sample = np.linspace(0, len(sizes) - 1, min(federation.clients_per_round or len(sizes), len(sizes)))
    batches = [-(-sizes[int(client)] // federation.batch_size) * federation.local_epochs for client in sample]
    rounds = sum(run.count_rounds(task) for task in range(len(run.splits.tasks)))
    a_batch = rounds * measure_seconds_a_batch(method, clients[0], choice.threads)
    if choice.executor == "serial":
        return sum(batches) * a_batch
    return WORKER_START + count_most_batches(batches, choice.workers or 1) * a_batch * CONTENTION


def count_most_batches(batches: Sequence[int], workers: int) -> int:
    """Return the batches of the worker with most of them, where each takes the next client after finishing one."""
    loads = [0] * workers
    for of_client in batches:
        heapq.heapreplace(loads, loads[0] + of_client)
    return max(loads)


def measure_seconds_a_batch(method: "Method", index: int, threads: int) -> float:
    """Return the seconds of a batch in the second of two short trainings of a client; the first one warms up."""
    run = method.run
    federation = run.params.federation.model_copy(update={"local_epochs": 1})
    short = replace(run, params=run.params.model_copy(update={"federation": federation}))
    rows = method.select_rows(0, index)
    rows = rows.take(np.arange(min(len(rows), MEASURED_BATCHES * federation.batch_size)))
    training = method.exchanges[TRAIN]
    server = method.start_task(method.create_server(), 0)
    payload = {**training.payload(server), **method.make_own_payload(server, index)}
    payload = {name: part.to(run.device) for name, part in payload.items()}
    with set_torch_threads(threads):
        for _ in range(2):
            started = time.perf_counter()
            training.answer(Client(index, 0, 0, short, rows, {}), payload)
    return (time.perf_counter() - started) / -(-len(rows) // federation.batch_size)
