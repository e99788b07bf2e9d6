"""One client's part of a job: the method's own answer to a question, and the stages that settings add to it.

A stage is a bad client's attack, noise, or a mask. Its module is imported, and enters cache keys, only
where the settings switch it on.
"""

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from fclmodels.federation.client import Client
from fclmodels.federation.exchange import EVALUATIONS, TRAIN, Memory
from fclmodels.federation.executors.base import ClientResult, Job, set_torch_threads
from fclmodels.federation.messages import Reply
from fclmodels.settings.federation import FederationSettings
from fclmodels.storage import trees

if TYPE_CHECKING:
    from fclmodels.federation.method import Method

PROTECTION = "fclmodels.federation.protection"


class Stage(Protocol):
    """An addition to a client's work. Its module has `stage(method)`, which makes it, and `refuse_unfit_method`."""

    def prepare(self, client: Client) -> Client:
        """Return the client that trains and answers."""
        ...

    def change(self, reply: Reply, client: Client, job: Job) -> Reply:
        """Return the reply that the client sends."""
        ...


def list_stage_modules(federation: FederationSettings) -> list[str]:
    """Return the modules of the stages that these settings switch on, in the order in which they change a reply."""
    switches = {
        "fclmodels.federation.training.redrawn_classes": federation.redraw_classes,
        f"{PROTECTION}.privacy": federation.privacy.on,
        f"{PROTECTION}.attacks": federation.attack.kind != "none",
        f"{PROTECTION}.secure_aggregation": federation.secagg.on,
    }
    return [module for module, on in switches.items() if on]


def refuse_unfit_method(method: "Method") -> None:
    """Raise UserError, before a run, where a stage that the settings switch on is not for this method."""
    for module in list_stage_modules(method.run.params.federation):
        importlib.import_module(module).refuse_unfit_method(method)


def work(method: "Method", job: Job, index: int, memory_file: Path | None) -> ClientResult:
    """Return the result of a client's part of a job, in this process: the same code wherever it runs."""
    started = time.perf_counter()
    try:
        reply, memory_file = _answer(method, job, index, memory_file)
    except (MemoryError, RuntimeError) as problem:
        if job.question != TRAIN or not is_out_of_memory(problem):
            raise
        reply = Reply({}, out_of_memory=True)
    return ClientResult(index, reply, memory_file, time.perf_counter() - started)


def is_out_of_memory(problem: Exception) -> bool:
    """Return whether an allocation has failed; on the CPU torch has no type of error for it."""
    return isinstance(problem, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(problem)


class Serial:
    """The executor that runs clients in this process, one after another."""

    def __init__(self, method: "Method", threads: int) -> None:
        self.method = method
        self.threads = threads

    def run(self, job: Job, clients: Sequence[int], memories: Mapping[int, Path]) -> Iterator[ClientResult]:
        job = job.to(self.method.run.device)
        for client in clients:
            with set_torch_threads(self.threads):
                result = work(self.method, job, client, memories.get(client))
            yield result

    def read_peak_memory(self) -> None:
        """Return None: no worker's process is this one's child."""

    def close(self) -> None:
        """Do nothing: nothing was started."""


def _answer(method: "Method", job: Job, index: int, memory_file: Path | None) -> tuple[Reply, Path | None]:
    """Return the client's reply, and the file of its memory from now on.

    The job's payload is on the device already; the server keeps its state, and gets replies, on the CPU.
    """
    if protocol := _find_protocol_answer(method, job.question):
        return protocol(job, index), memory_file
    memory = trees.load(memory_file, method.run.device) if memory_file else {}
    client = Client(index, job.task, job.round, method.run, method.select_rows(job.task, index), memory)
    payload = job.join_payload(index)
    if job.question in EVALUATIONS:
        from fclmodels.federation.evaluation import evaluate_on_client

        reply = evaluate_on_client(method, client, payload, EVALUATIONS[job.question])
        return _move_to_cpu(reply), memory_file
    stages = [
        importlib.import_module(module).stage(method) for module in list_stage_modules(method.run.params.federation)
    ]
    for stage in stages:
        client = stage.prepare(client)
    exchange = method.exchanges[job.question]
    answer = exchange.answer(client, payload)
    if answer.memory is not memory:
        memory_file = _write(answer.memory, job, index)
    reply = _move_to_cpu(exchange.fill(client, answer))
    for stage in stages:
        reply = stage.change(reply, client, job)
    return reply, memory_file


def _find_protocol_answer(method: "Method", question: str) -> Callable[[Job, int], Reply] | None:
    """Return the function that answers a question of secure aggregation's own; None for other questions."""
    if not question.startswith("secagg-"):
        return None
    stage = importlib.import_module(f"{PROTECTION}.secure_aggregation").stage(method)
    answer: Callable[[Job, int], Reply] = stage.answer
    return answer


def _write(memory: Memory, job: Job, index: int) -> Path | None:
    """Write a client's memory; return its file, None for an empty memory."""
    if not memory:
        return None
    file = job.scratch / f"{index}-{job.task}-{job.round}-{job.question}.safetensors"
    trees.save(memory, file)
    return file


def _move_to_cpu(reply: Reply) -> Reply:
    return replace(reply, parts={name: part.to("cpu") for name, part in reply.parts.items()})
