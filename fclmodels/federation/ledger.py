"""Counts the real bytes of every part, both ways, and what each client keeps."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from fclmodels.federation.executor import Job
from fclmodels.federation.log import Log
from fclmodels.federation.messages import Payload, Reply

SCHEMA = {
    "task": pl.Int16,
    "round": pl.Int32,
    "client": pl.Int32,
    "direction": pl.String,
    "part": pl.String,
    "kind": pl.String,
    "least": pl.String,
    "bytes": pl.Int64,
    "base_round": pl.Int32,
}


class Ledger:
    """One step's rows in an append-only log, and what they add up to.

    round -1, -2, ... are the exchanges at the end of a task. base_round: of a late reply, the round that it answers.
    held: who has which part already that is downloaded once a task, from the steps before.
    """

    def __init__(self, log: Log, held: Mapping[str, Sequence[int]] | None = None) -> None:
        self.log = log
        self.bytes_up = 0
        self.bytes_down = 0
        # Who has which part already: after an interruption, what the log says.
        down = [row for row in log.rows() if row["direction"] == "down"]
        self._has = {(row["part"], client) for row in down for client in row["client"]}
        self._has |= {(part, client) for part, clients in (held or {}).items() for client in clients}

    def held(self, payload: Payload) -> dict[str, list[int]]:
        """The clients that have each part which they download once a task."""
        return {
            name: sorted(client for part, client in self._has if part == name)
            for name, part in payload.items()
            if part.once
        }

    def sent(self, job: Job, clients: Sequence[int]) -> None:
        """The payload that each of the clients downloads, but for what it was to download once and has."""
        for name, part in job.payload.items():
            without = [client for client in clients if not (part.once and (name, client) in self._has)]
            if without:
                self._has |= {(name, client) for client in without} if part.once else set()
                self.bytes_down += part.bytes * len(without)
                self._write(job.task, job.round, without, "down", name, part.kind, "-", part.bytes)

    def received(self, job: Job, client: int, reply: Reply, base_round: int | None = None) -> None:
        """One client's reply; `base_round` where it is late."""
        for name, part in reply.parts.items():
            self.bytes_up += part.bytes
            self._write(job.task, job.round, [client], "up", name, part.kind, part.least, part.bytes, late=base_round)

    def kept(self, job: Job, client: int, memory: Path | None) -> None:
        """The memory that a client keeps after an exchange."""
        if memory is not None:
            self._write(job.task, job.round, [client], "kept", "memory", "memory", "-", memory.stat().st_size)

    def refused(self, job: Job, client: int, part: str) -> None:
        """A reply that came up and was not used, for what was wrong with one of its parts."""
        self._write(job.task, job.round, [client], "refused", part, "-", "-", 0)

    def lost(self, job: Job, client: int, why: str) -> None:
        """A client whose answer never came, and what it would remember with it."""
        self._write(job.task, job.round, [client], "lost", why, "-", "-", 0)

    def pooled(self, task: int, sizes: dict[int, int]) -> None:
        """Raw samples that left their clients before a task's first round."""
        for client, size in sizes.items():
            self.bytes_up += size
            self._write(task, 0, [client], "up", "samples", "samples", "each", size)

    def _write(self, task: int, round: int, clients: list[int], *what: str | int, late: int | None = None) -> None:
        self.log.append(dict(zip(SCHEMA, (task, round, clients, *what, late), strict=True)))


class CentralLedger(Ledger):
    """Of training in one place: the samples that were brought there are all that travels."""

    def sent(self, job: Job, clients: Sequence[int]) -> None:
        pass

    def received(self, job: Job, client: int, reply: Reply, base_round: int | None = None) -> None:
        pass


def ledger_table(log: Log) -> pl.DataFrame:
    """One row for each (exchange, client, direction, part), in an order that does not depend on who answered first."""
    table = pl.DataFrame(log.rows(), schema={**SCHEMA, "client": pl.List(pl.Int32)})
    return table.explode("client").sort(
        "task", pl.col("round").abs(), "client", "direction", "part", maintain_order=True
    )
