"""Simulated faults (`federation.faults`): clients that do not answer a round of training, or answer it late.

A missing client downloads the payload and does nothing else. A client that crashes has trained: its reply and its new
memory are lost. A client that is out of memory cannot train. The ledger has a row for each of these two.

A late client trains in its base round, from that round's model, and updates its memory at once. Its reply is stored
until the round in which it is due, and never used if the task ends before. Until then the client is not sampled again.
With `late_weight: age` the reply counts (1 + age)^-1/2 of one in time, age in rounds: the polynomial staleness of
asynchronous federated optimisation (Xie et al. 2019, a = 1/2).

A sample of clients of which fewer than `least` answer is called off before anyone uploads or remembers anything, as in
secure aggregation (Bonawitz et al. 2017), and clients are sampled anew for the same round.

Under secure aggregation as many must answer as are needed to unmask their sum. A missing client leaves before a random
step of the protocol, a lost one after the first two steps.

Where this machine has no memory to train a client (Python's MemoryError, torch's allocation error), that client is lost
too, whatever the rates: the run goes on, but may not be repeatable. Where fewer than `least` remain, the run ends.

All other faults are random numbers of `draw_delay` and `draw_cause`, by a key, so that they depend neither on the
executor nor on an interruption: add other faults there. Exchanges outside of rounds are answered by all clients, in
time. Training in one place has no faults.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from fclmodels.errors import UserError
from fclmodels.federation.messages import Reply, convert_parts_to_tree, convert_tree_to_parts
from fclmodels.federation.run_context import Run
from fclmodels.storage import trees

if TYPE_CHECKING:
    from fclmodels.federation.method import Method

MOST_DRAWS = 100  # of clients for one round

Cause = Literal["crash", "out of memory"]


@dataclass(frozen=True)
class Late:
    """A late reply, in a file."""

    file: Path
    base_round: int  # the round in which its client has trained
    due: int  # the round in which it arrives

    def reply(self) -> Reply:
        """Return the reply from its file."""
        tree = trees.load(self.file)
        return Reply(convert_tree_to_parts(tree["parts"]), **tree["facts"])


@dataclass(frozen=True)
class Turnout:
    """The clients that a round samples, their faults, and the late replies that arrive in the round."""

    delays: dict[int, int | None]  # rounds by which each sampled client is late; 0: in time, None: it never answers
    arriving: dict[int, Late] = field(default_factory=dict)  # late replies that are due, by client
    weights: dict[int, float] = field(default_factory=dict)  # what each of these counts; without one it is dropped
    called_off: tuple[tuple[int, ...], ...] = ()  # clients of earlier draws for the round, in which too few answered
    lost: dict[int, Cause] = field(default_factory=dict)  # clients whose reply gets lost, and why

    @property
    def downloaders(self) -> set[int]:
        """The clients that download a round's payload, also those of draws that are called off."""
        return {*self.delays}.union(*self.called_off)

    @property
    def training(self) -> list[int]:
        """The clients that train; some of their replies are lost."""
        able = (client for client, delay in self.delays.items() if delay is not None)
        return [client for client in able if self.lost.get(client) != "out of memory"]

    @property
    def in_time(self) -> list[int]:
        """The clients whose replies arrive in this round."""
        return [client for client, delay in self.delays.items() if delay == 0 and client not in self.lost]

    @property
    def answers(self) -> int:
        """The number of replies that the server aggregates."""
        return len(self.in_time) + len(self.weights)

    def count_clients(self) -> dict[str, int]:
        """Return counts for the log.

        clients: all that were sampled. missing: sampled clients that never answer. late: replies to earlier rounds that
        arrive in this one, also those that are dropped.
        """
        called_off = sum(map(len, self.called_off))
        return {
            "clients": len(self.delays) + called_off,
            "answers": self.answers,
            "late": len(self.arriving),
            "missing": list(self.delays.values()).count(None) + called_off,
        }


def draw_turnout(
    method: "Method", task: int, round: int, late: Mapping[int, Late], sample: Callable[[int], tuple[int, ...]]
) -> Turnout:
    """Return the turnout of a round.

    late: replies that have not arrived yet. sample: a function from n to the clients of the round's nth draw.
    """
    faults = method.run.params.federation.faults
    if not faults.on or method.is_centralised:
        return Turnout(dict.fromkeys(sample(0), 0))
    arriving = {client: late[client] for client in sorted(late) if late[client].due == round}
    weighted = arriving if faults.late_weight == "age" else {}
    weights = {client: weigh_late(round - reply.base_round) for client, reply in weighted.items()}
    called_off: tuple[tuple[int, ...], ...] = ()
    for draw in range(MOST_DRAWS):
        delays = {client: draw_delay(method.run, task, round, client, draw) for client in sample(draw)}
        losses = {
            client: draw_cause(method.run, task, round, client, draw) for client, d in delays.items() if d is not None
        }
        lost = {client: why for client, why in losses.items() if why}
        turnout = Turnout(delays, arriving, weights, called_off, lost)
        least = count_needed_answers(method.run, len(delays))
        if turnout.answers >= least:
            return turnout
        called_off = (*called_off, tuple(delays))
    settings = "federation.faults.least" + ", or federation.secagg.threshold" * method.run.params.federation.secagg.on
    raise UserError(
        f"task {task}, round {round}: in {MOST_DRAWS} draws of up to {max(map(len, called_off))} clients never "
        f"{least} answered. Lower the rates of federation.faults or {settings}."
    )


def count_needed_answers(run: Run, sampled: int) -> int:
    """Return how many of the sampled clients must answer: `least`, and under secure aggregation its threshold."""
    federation = run.params.federation
    unmasking = compute_secagg_threshold(sampled, federation.secagg.threshold) if federation.secagg.on else 1
    return max(federation.faults.least, unmasking)


def compute_secagg_threshold(clients: int, share: float) -> int:
    """Return how many of these clients are needed to unmask; at least two: the sum of one is no secret."""
    return max(2, math.ceil(share * clients))


def draw_delay(run: Run, task: int, round: int, client: int, draw: int) -> int | None:
    """Return by how many rounds a client of a round's nth draw answers late; None where it never answers."""
    faults = run.params.federation.faults
    random = run.make_generator("faults", task, round, client, draw)
    missing, late = torch.rand(2, generator=random, dtype=torch.float64).tolist()
    if missing < faults.missing:
        return None
    return int(torch.randint(1, faults.late_rounds + 1, (), generator=random)) if late < faults.late else 0


def draw_cause(run: Run, task: int, round: int, client: int, draw: int) -> Cause | None:
    """Return why the reply of a client that takes part is lost; None where it is not."""
    faults = run.params.federation.faults
    crash, memory = torch.rand(2, generator=run.make_generator("lost", task, round, client, draw)).tolist()
    return "out of memory" if memory < faults.out_of_memory else "crash" if crash < faults.crash else None


def draw_step_of_leaving(run: Run, task: int, round: int, client: int) -> int:
    """Return the step of secure aggregation before which a missing client leaves: 0 keys, 1 shares, 2 reply."""
    return int(torch.randint(3, (), generator=run.make_generator("leaves", task, round, client)))


def weigh_late(age: int) -> float:
    """Return what a reply counts that is so many rounds late."""
    return float((1 + age) ** -0.5)


def keep(reply: Reply, file: Path) -> None:
    """Write a late reply to a file."""
    trees.save({"parts": convert_parts_to_tree(reply.parts), "facts": reply.facts}, file)
