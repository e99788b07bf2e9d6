"""The ledger: the bytes of every part that travels, both ways, and of each client's memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from fclmodels.federation.engine.cohort import BEFORE_ROUNDS
from fclmodels.federation.executors.base import Job
from fclmodels.federation.messages import Part, Payload, Reply
from fclmodels.tables import LEDGER

if TYPE_CHECKING:
    from fclmodels.federation.engine.journal import Log
    from fclmodels.federation.method import Method


class Ledger:
    """One step's rows in an append-only log, and their sums. Columns: tables.LEDGER.

    owners: the clients that have downloaded a part which travels once a task in an earlier step, by part.
    """

    def __init__(self, log: "Log", owners: Mapping[str, Sequence[int]] | None = None) -> None:
        self.log = log
        self.bytes_up = 0
        self.bytes_down = 0
        # After an interruption, the log says who has downloaded which part.
        down = [row for row in log.read_rows() if row["direction"] == "down"]
        self._owned = {(row["part"], client) for row in down for client in row["client"]}
        self._owned |= {(part, client) for part, clients in (owners or {}).items() for client in clients}

    def list_holders(self, payload: Payload) -> dict[str, list[int]]:
        """Return the clients that have each part which travels once a task, by part."""
        return {
            name: sorted(client for part, client in self._owned if part == name)
            for name, part in payload.items()
            if part.once
        }

    def note_payload(self, job: Job, clients: Sequence[int]) -> None:
        """Note the payload that each of the clients downloads, without the parts that travel once and that it has."""
        own = {client: payload for client in clients if (payload := job.own_payloads.get(client))}
        for name, part in job.payload.items():
            self._note_download(job, name, part, [client for client in clients if name not in own.get(client, ())])
        for client, payload in own.items():
            for name, part in payload.items():
                self._note_download(job, name, part, [client])

    def _note_download(self, job: Job, name: str, part: Part, clients: Sequence[int]) -> None:
        without = [client for client in clients if not (part.once and (name, client) in self._owned)]
        if without:
            self._owned |= {(name, client) for client in without} if part.once else set()
            self.bytes_down += part.bytes * len(without)
            self._write(job.task, job.round, without, "down", name, part.kind, "-", part.bytes)

    def note_reply(self, job: Job, client: int, reply: Reply, base_round: int | None = None) -> None:
        """Note one client's reply; `base_round` where it is late."""
        for name, part in reply.parts.items():
            self.bytes_up += part.bytes
            self._write(job.task, job.round, [client], "up", name, part.kind, part.least, part.bytes, late=base_round)

    def note_memory(self, job: Job, client: int, memory: Path | None) -> None:
        """Note the size of a client's memory after an exchange."""
        if memory is not None:
            self._write(job.task, job.round, [client], "kept", "memory", "memory", "-", memory.stat().st_size)

    def note_refusal(self, job: Job, client: int, part: str) -> None:
        """Note a reply that is not used because of a defect in one of its parts."""
        self._write(job.task, job.round, [client], "refused", part, "-", "-", 0)

    def note_loss(self, job: Job, client: int, why: str) -> None:
        """Note a client whose reply and new memory are lost."""
        self._write(job.task, job.round, [client], "lost", why, "-", "-", 0)

    def note_pooled_samples(self, task: int, sizes: dict[int, int]) -> None:
        """Note raw samples that leave their clients before a task's first round."""
        for client, size in sizes.items():
            self.bytes_up += size
            self._write(task, 0, [client], "up", "samples", "samples", "each", size)

    def _write(self, task: int, round: int, clients: list[int], *entries: str | int, late: int | None = None) -> None:
        self.log.append(dict(zip(LEDGER, (task, round, clients, *entries, late), strict=True)))


class CentralLedger(Ledger):
    """The ledger of training in one place, where nothing travels but the samples that are brought there."""

    def note_payload(self, job: Job, clients: Sequence[int]) -> None:
        pass

    def note_reply(self, job: Job, client: int, reply: Reply, base_round: int | None = None) -> None:
        pass


def open_ledger(method: "Method", log: "Log") -> Ledger:
    """Return the ledger of a method's training."""
    return CentralLedger(log) if method.is_centralised else Ledger(log)


def make_ledger_table(log: "Log") -> pl.DataFrame:
    """Return a row for each (exchange, client, direction, part), in the same order whoever answers first.

    Exchanges stand in their order in time, so that the last row of a client's memory is of what it keeps in the end.
    """
    table = pl.DataFrame(log.read_rows(), schema={**LEDGER, "client": pl.List(pl.Int32)})
    round = pl.col("round")
    phase = pl.when(round <= -BEFORE_ROUNDS).then(0).when(round >= 0).then(1).otherwise(2)
    return table.explode("client").sort("task", phase, round.abs(), "client", "direction", "part", maintain_order=True)
