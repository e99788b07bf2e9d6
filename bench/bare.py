"""A bare PyTorch loop of FedAvg, the practical limit: tuned malloc, tensors in memory, one model a process, two
persistent one-thread workers with weights and sums in shared memory; no messages, no log, no checkpoint.

    python bench/bare.py FOLDER ROUNDS

runs rounds on a workload's folder (workloads.write_work_folder), to measure its memory.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import cross_entropy
from work_folder import WorkFolder

from fclmodels.backbones.model.network import Network
from fclmodels.federation.executors import glibc_malloc

WORKERS = 2
Weights = dict[str, Tensor]


def train(work: WorkFolder, network: Network, data: Sequence[tuple], start: Weights, total: Weights, past: int) -> None:
    """Train each client from `start` and add its weights, times its samples, to `total`.

    past: number of the client's samples of which each step also draws a batch, whose gradient is added.
    """
    batch = work.facts["batch"]
    for inputs, labels in data:
        network.load_state_dict(start)
        network.train()
        optimiser = work.optimiser(network)
        for rows in torch.randperm(len(labels)).split(batch):
            optimiser.zero_grad()
            for of_pass in (rows, torch.randperm(past)[:batch])[: 1 + bool(past)]:
                cross_entropy(network(inputs[of_pass]), labels[of_pass]).backward()
            optimiser.step()
        with torch.no_grad():
            for name, value in network.state_dict().items():
                if value.is_floating_point():
                    total[name].add_(value, alpha=len(labels))


def zeros_like(weights: Weights) -> Weights:
    return {name: torch.zeros_like(value) for name, value in weights.items() if value.is_floating_point()}


def threads(folder: Path, count: int) -> Iterator[None]:
    """Run rounds in one process with so many threads."""
    work = WorkFolder(folder)
    network = work.network()
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    data = [work.data(client) for client in range(work.facts["clients"])]
    while True:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        total = zeros_like(weights)
        train(work, network, data, weights, total, 0)
        weights |= {name: value / work.facts["total"] for name, value in total.items()}
        torch.set_num_threads(before)
        yield


def worker(folder: Path, mine: range, past: int, weights: Weights, total: Weights, todo: Any, finished: Any) -> None:
    glibc_malloc.tune()
    torch.set_num_threads(1)
    work = WorkFolder(folder)
    network, data = work.network(), [work.data(client) for client in mine]
    while todo.get():
        for value in total.values():
            value.zero_()
        train(work, network, data, weights, total, past)
        finished.put(True)


def processes(folder: Path, past: int = 0) -> Iterator[None]:
    """Run rounds in two workers, with clients dealt once."""
    work, context = WorkFolder(folder), mp.get_context("spawn")
    weights = {name: value.share_memory_() for name, value in work.network().state_dict().items()}
    totals = [{name: value.share_memory_() for name, value in zeros_like(weights).items()} for _ in range(WORKERS)]
    todo, finished = [context.SimpleQueue() for _ in totals], context.SimpleQueue()
    dealt = [range(first, work.facts["clients"], WORKERS) for first in range(WORKERS)]
    workers = [
        context.Process(target=worker, args=(folder, *of_one, finished), daemon=True)
        for of_one in zip(dealt, [past] * WORKERS, [weights] * WORKERS, totals, todo, strict=True)
    ]
    for process in workers:
        process.start()
    try:
        while True:
            for queue in todo:
                queue.put(True)
            for _ in todo:
                finished.get()
            for name, weight in totals[0].items():
                weights[name].copy_(weight.add(totals[1][name]).div_(work.facts["total"]))
            yield
    finally:
        for queue in todo:
            queue.put(False)
        for process in workers:
            process.join()


if __name__ == "__main__":
    glibc_malloc.tune()
    torch.set_num_threads(1)
    for _, _ in zip(range(int(sys.argv[2])), processes(Path(sys.argv[1])), strict=False):
        pass
