"""Where clients run. This one runs them here, one after another; `processes.py` has the other."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from fclmodels import state
from fclmodels.federation import attacks, inspection, private, secure
from fclmodels.federation.client import Client
from fclmodels.federation.evaluation import evaluate_on_client
from fclmodels.federation.messages import Block, Payload, Reply

if TYPE_CHECKING:
    from fclmodels.methods.base import Method

TRAIN = "train"
EVALUATIONS = {"evaluate": "test", "judge": "val"}  # questions about accuracy, and the rows that they read


@dataclass(frozen=True)
class Job:
    """One exchange: train for a round, or a question of finish_task; the payload is the same for all clients.

    What clients remember is written to files in the folder `scratch`, which must outlive an interruption. asked: how
    many clients are. summed: parts that are needed as sums only may come back as sums over some of the clients.
    """

    question: str
    task: int
    round: int
    payload: Payload
    scratch: Path
    asked: int = 1
    summed: bool = False

    def to(self, device: torch.device) -> "Job":
        return replace(self, payload={name: part.to(device) for name, part in self.payload.items()})


@dataclass(frozen=True)
class Answer:
    """`memory` is the file of what the client remembers from now on, or None where that is nothing.

    Where the executor sums, it has looked at the reply, of whose parts in a block only the outline is left; the block
    comes with one answer of its clients.
    """

    client: int
    reply: Reply
    memory: Path | None
    seconds: float
    look: inspection.Look | None = None
    block: Block | None = None


class Executor(Protocol):
    method: "Method"

    def run(self, job: Job, clients: Sequence[int], memories: Mapping[int, Path]) -> Iterator[Answer]:
        """Clients begin in this order and answer in any; an answer's tensors are valid until the next one is taken."""
        ...

    def close(self) -> None: ...


class Serial:
    def __init__(self, method: "Method", threads: int) -> None:
        self.method = method
        self.threads = threads

    def run(self, job: Job, clients: Sequence[int], memories: Mapping[int, Path]) -> Iterator[Answer]:
        job = job.to(self.method.run.device)
        for client in clients:
            with torch_threads(self.threads):
                answer = perform(self.method, job, client, memories.get(client))
            yield answer

    def close(self) -> None:
        """Nothing was started."""


def largest_first(method: "Method", task: int, clients: Sequence[int]) -> tuple[int, ...]:
    """In the order of their number of rows, so that no worker begins with much when the others are at the end."""
    return tuple(sorted(clients, key=lambda client: (-len(method.rows(task, client)), client)))


def perform(method: "Method", job: Job, index: int, memory_file: Path | None) -> Answer:
    """One client's part of a job, in this process: the same code wherever it runs."""
    started = time.perf_counter()
    try:
        reply, memory_file = _done(method, job, index, memory_file)
    except (MemoryError, RuntimeError) as problem:
        if job.question != TRAIN or not out_of_memory(problem):
            raise
        reply = Reply({}, out_of_memory=True)
    return Answer(index, reply, memory_file, time.perf_counter() - started)


def _done(method: "Method", job: Job, index: int, memory_file: Path | None) -> tuple[Reply, Path | None]:
    """What the client answers, and the file of what it remembers then.

    The job's payload is on the device already; the server keeps its state, and gets replies, on the CPU.
    """
    device, federation = method.run.device, method.run.params.federation
    if job.question in secure.STEPS:
        return secure.answered(job, index, federation.secagg), memory_file
    memory = state.load(memory_file, device) if memory_file else {}
    rows = method.rows(job.task, index)
    client = Client(index, job.task, job.round, method.run, rows, memory)
    bad = index in attacks.bad_clients(method, job.task) and job.question not in EVALUATIONS
    if bad:
        client = attacks.poisoned(client)
    if job.question == TRAIN:
        reply, remembered = method.train(client, job.payload)
    elif job.question in EVALUATIONS:
        reply = evaluate_on_client(method, client, job.payload, EVALUATIONS[job.question])
        remembered = memory
    else:
        reply, remembered = method.answer(client, job.question, job.payload)
    if remembered is not memory:
        memory_file = None
        if remembered:
            memory_file = job.scratch / f"{index}-{job.task}-{job.round}-{job.question}.safetensors"
            state.save(remembered, memory_file)
    reply = replace(reply, parts={name: part.to("cpu") for name, part in reply.parts.items()})
    if federation.privacy.on and job.question not in EVALUATIONS:
        reply = private.protected(reply, method, client, job.asked)
    if bad:
        reply = attacks.altered(reply, client)
    if secure.SHARERS in job.payload:
        reply = _hidden(reply, method, job, index, bad)
    return reply, memory_file


def _hidden(reply: Reply, method: "Method", job: Job, index: int, bad: bool) -> Reply:
    """The masked reply, or none where it fails the client's own check, which a bad client would not run."""
    federation = method.run.params.federation
    checked = federation.inspection.check and not bad
    if checked and inspection.look(reply, job.payload, method.largest_weight(job.task)).fault:
        return Reply({}, base_round=reply.base_round, withheld=True)
    return secure.masked(reply, job, index, federation.secagg)


def out_of_memory(problem: Exception) -> bool:
    """Whether there was no memory to be had; on the CPU torch has no type for it."""
    return isinstance(problem, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(problem)


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
