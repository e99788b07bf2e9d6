"""The four workloads that rounds are measured on, and our rounds.

These are the round loop as it is, with messages, ledger, log and checkpoints as often as by default. Their
yardsticks have the same samples, tuned malloc and the same number of threads.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import torch
from safetensors.torch import save_file
from work_folder import DATA, FACTS

from fclmodels import plugins
from fclmodels.data.splits.split_reader import SCHEMA, Splits, digest_splits
from fclmodels.experiment.step_keys import SERVER_THREADS
from fclmodels.federation.engine.checkpoints import Checkpoints, Position
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.ledger import open_ledger
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.engine.rounds import run_round
from fclmodels.federation.executors.auto_choice import Choice
from fclmodels.federation.executors.base import Executor, set_torch_threads
from fclmodels.federation.executors.client_work import Serial
from fclmodels.federation.executors.processes import Processes
from fclmodels.federation.method import Method
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.settings import load
from fclmodels.storage.sealed_json import write_json


@dataclass(frozen=True)
class Work:
    """Clients with so many samples of each of two tasks; the second one's classes are new, or its pixels permuted."""

    clients: int
    samples: int
    batch: int
    shape: tuple[int, int, int]
    model: dict[str, str | int]
    optimizer: dict[str, str | float]
    permuted: bool = False
    classes: int = 10
    tasks: int = 2


SGD: dict[str, str | float] = {"kind": "sgd", "lr": 0.01}
VIT: dict[str, str | int] = {
    "backbone": "vit", "patch": 4, "width": 192, "depth": 6, "attention_heads": 3, "mlp_width": 768,
}  # fmt: skip
RGB = (3, 32, 32)
WORKS = {
    "w1": Work(64, 480, 64, (1, 28, 28), {"backbone": "mlp"}, SGD, permuted=True),
    "w2": Work(10, 100, 16, RGB, {"backbone": "alexnet"}, SGD),
    "w3": Work(5, 500, 64, RGB, {"backbone": "resnet18", "stem": "imagenet"}, SGD),
    "w4": Work(10, 100, 20, RGB, VIT, {"kind": "adam", "lr": 1e-3}),
}
# STAMP's S-CIFAR100 in twos halfway, with 25 past tasks, on two clients and a ResNet-18 of a quarter of the width.
C2 = Work(2, 1000, 128, RGB, {"backbone": "resnet18", "stem": "cifar", "width": 16}, SGD, classes=2, tasks=26)
SHARE = 0.2  # of each layer's input that bases of the first task fill
TEST = 5  # one test sample for so many train samples, as CIFAR-100 has


def make_splits(work: Work, folder: Path) -> Splits:
    """Return splits of random images."""
    random = np.random.default_rng(0)
    count = work.clients * work.samples
    tests = count // TEST
    (folder / "prepared").mkdir()
    images = random.integers(0, 256, (count + tests, *work.shape), dtype=np.uint8)
    np.save(folder / "prepared" / "images.npy", images)
    write_json(folder / "prepared" / "meta.json", {"digest": "random"})
    labels = random.integers(0, work.classes, count + tests)
    of_task = [labels + task * work.classes * (not work.permuted) for task in range(work.tasks)]
    table = pl.concat(
        pl.DataFrame(
            {
                "sample": np.arange(count + tests),
                "label": of_task[task],
                "domain": np.zeros(count + tests, int),
                "task": np.full(count + tests, task),
                "client": [*np.repeat(np.arange(work.clients), work.samples).tolist(), *[-1] * tests],
                "split": ["train"] * count + ["test"] * tests,
            },
            SCHEMA,
        )
        for task in range(work.tasks)
    )
    (folder / "splits").mkdir()
    table.write_parquet(folder / "splits" / "manifest.parquet")
    names = [str(c) for c in range(work.classes * (1 if work.permuted else work.tasks))]
    tasks = [
        {"name": f"task {task}", "classes": np.unique(of_task[task]).tolist(), "classes_by_client": None,
         "permutation": task if work.permuted else None}
        for task in range(work.tasks)
    ]  # fmt: skip
    facts = {
        "format": 1, "kind": "class-incremental", "tasks": tasks, "classes": names, "clients": work.clients,
        "domains": ["all"], "head": "growing",
        "shape": work.shape, "mean": [0.5] * work.shape[0], "std": [0.5] * work.shape[0],
        "prepared": "../prepared", "prepared_digest": "random",
    }  # fmt: skip
    facts["digest"] = digest_splits(table, facts)
    write_json(folder / "splits" / "stream.json", facts)
    return Splits.open(folder / "splits")


@contextmanager
def open_run(work: Work, overrides: Sequence[str] = (), method: str = "fedavg") -> Iterator[Run]:
    """Yield a run in a folder of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        settings = {
            "partition": {"clients": work.clients},
            "model": work.model,
            "federation": {"batch_size": work.batch, "executor": "serial"},
            "optimizer": work.optimizer,
            "device": "cpu",
        }
        write_json(folder / "params.yaml", settings)
        read = load.load_params(folder / "params.yaml", overrides)
        yield Run.on(read, make_splits(work, folder), 0, folder)


def write_work_folder(work: Work, run: Run, task: int = 0, own_layers: bool = False) -> Path:
    """Write what a loop besides ours needs to train the same: each client's inputs and labels, and facts."""
    assert run.home is not None
    folder = run.home / f"work-{task}-{own_layers}"
    if not folder.exists():
        folder.mkdir()
        tensors = {}
        for client in range(work.clients):
            batch = run.batches.prepare_inputs(run.batches.read_raw(run.splits.select_rows(task, "train", client)))
            tensors |= {f"x-{client}": batch.inputs.contiguous(), f"y-{client}": batch.labels}
        save_file(tensors, folder / DATA)
        spec = run.make_spec(task + 1)
        facts = {
            "clients": work.clients, "total": work.clients * work.samples, "batch": work.batch,
            "optimizer": work.optimizer, "settings": spec.settings, "shape": spec.shape, "head": spec.head,
            "tasks": spec.tasks, "own layers": own_layers,
        }  # fmt: skip
        write_json(folder / FACTS, facts)
    return folder


def start_serial(method: Method) -> Executor:
    return Serial(method, 1)


def start_processes(method: Method) -> Executor:
    assert method.run.home is not None
    file = method.run.home / f"{method.name}.json"
    write_json(file, load.collect_settings(method.run.params, method.name))
    return Processes(method, file, workers=method.run.params.federation.workers or 2, threads=1)


def executor_for(choice: Choice) -> Callable[[Method], Executor]:
    return start_processes if choice.executor == "processes" else lambda method: Serial(method, choice.threads)


def build_method(run: Run, name: str) -> Method:
    return plugins.find("method", name)(load.load_method_settings(run.params, name), run)


def begin_task(method: Method, task: int, cohort: Callable[[int], Cohort]) -> tuple[Server, dict[int, Path]]:
    """Return a server at the beginning of the task, earlier tasks untrained, and clients' memories.

    Bases are random and fill SHARE of each layer's input: those of untrained networks would mean nothing.
    """
    server, memories = method.start_task(method.create_server(), 0), {}
    for earlier in range(task):
        cohort_of_task = cohort(earlier)
        server = method.finish_task(server, cohort_of_task)
        memories = cohort_of_task.memories
        if "bases" in server.knowledge:
            bases = {name: draw_basis(len(basis)) for name, basis in server.knowledge["bases"].items()}
            server.knowledge["bases"] = bases
        server = method.start_task(server, earlier + 1)
    return server, memories


def draw_basis(d: int, share: float = SHARE) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(d, int(share * d))).Q.contiguous()


def run_rounds(run: Run, name: str, executor_of: Callable[[Method], Executor], task: int) -> Iterator[None]:
    assert run.home is not None
    method = build_method(run, name)
    executor = executor_of(method)
    folder = run.home / f"{name}-{type(executor).__name__}"
    checkpoints = Checkpoints(folder)
    ledger = open_ledger(method, checkpoints.ledger)
    ask = partial(Cohort, executor, memories={}, ledger=ledger, checkpoints=checkpoints)
    with set_torch_threads(SERVER_THREADS):
        server, memories = begin_task(method, task, lambda earlier: ask(earlier, method.list_participants(earlier)))
    position = Position(server, memories, 0)
    since = 0.0  # seconds since the last checkpoint, without the turns of other sides
    try:
        while True:
            started = time.perf_counter()
            with set_torch_threads(SERVER_THREADS):
                position = run_round(method, position, task, executor, checkpoints, ledger, Listener())
                since += time.perf_counter() - started
                if since >= run.params.federation.checkpoint_seconds:
                    checkpoints.commit(position)
                    since = 0.0
            yield
    finally:
        executor.close()
        checkpoints.close()
