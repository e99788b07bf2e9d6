"""The interface of executors: a job, a client's result, and the executor's protocol."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from fclmodels.federation.messages import Block, Payload, Reply
from fclmodels.federation.protection.inspection import Finding

if TYPE_CHECKING:
    from fclmodels.federation.method import Method


@dataclass(frozen=True)
class Job:
    """One exchange as executors run it: train for a round, or answer a question."""

    question: str
    task: int
    round: int  # -1, -2, ... for the questions outside of rounds
    payload: Payload  # of all clients
    scratch: Path  # folder of the files of clients' memories, which must outlive an interruption
    client_count: int = 1  # the number of clients in the exchange
    summed: bool = False  # whether parts that are needed as sums only may come back as sums over some of the clients
    own_payloads: Mapping[int, Payload] = field(default_factory=dict)  # further parts of single clients

    def join_payload(self, client: int) -> Payload:
        """Return all that a client downloads."""
        return {**self.payload, **self.own_payloads.get(client, {})}

    def to(self, device: torch.device) -> "Job":
        """Return the job with its payloads on a device."""
        own = {client: _move(payload, device) for client, payload in self.own_payloads.items()}
        return replace(self, payload=_move(self.payload, device), own_payloads=own)


@dataclass(frozen=True)
class ClientResult:
    """The result of one client's part of a job."""

    client: int
    reply: Reply  # with outlines in place of the parts that are in a block
    memory: Path | None  # the file of the client's memory from now on; None where it is empty
    seconds: float
    finding: Finding | None = None  # of the reply, where the executor sums
    block: Block | None = None  # sums over several clients, which come with the result of one of them


class Executor(Protocol):
    """Runs the clients of a job."""

    method: "Method"

    def run(self, job: Job, clients: Sequence[int], memories: Mapping[int, Path]) -> Iterator[ClientResult]:
        """Yield the clients' results, in any order; a result's tensors are valid until the next one is requested.

        Clients begin in their order in `clients`.
        """
        ...

    def close(self) -> None:
        """End workers, and free what they use."""
        ...

    def read_peak_memory(self) -> int | None:
        """Return the most bytes that a worker's process has held; None where clients have no process here."""
        ...


def sort_largest_first(method: "Method", task: int, clients: Sequence[int]) -> tuple[int, ...]:
    """Return clients by their number of rows, so that no worker begins a long training when the others are ready."""
    return tuple(sorted(clients, key=lambda client: (-len(method.select_rows(task, client)), client)))


@contextlib.contextmanager
def set_torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch's threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _move(payload: Payload, device: torch.device) -> Payload:
    return {name: part.to(device) for name, part in payload.items()}
