"""Clients that do not answer a round of training, or answer it late: what a simulation makes of `federation.faults`.

A client that is missing downloads, and that is all. One that crashes trains first: what it would have sent and what it
would remember is lost. One that is out of memory cannot train. Of these two the ledger has a row.

A client that is late trains in its base round, from that round's model, and remembers that at once. Its reply is kept
until the round in which it is due, and not heard if the task ends before. Until then the client is not sampled again.
By `late_weight: age` the reply counts (1 + age)^-1/2 of one in time, age in rounds: the polynomial staleness of
asynchronous federated optimisation (Xie et al. 2019, a = 1/2).

A draw of clients in which fewer than `least` answer is called off before anyone uploads or remembers anything, as in
secure aggregation (Bonawitz et al. 2017), and clients are drawn anew for the same round.

Under secure aggregation as many must answer as unmask their sum; a missing client leaves before a step of the protocol
that is drawn too, a lost one after the first two.

Where this machine has no memory to train a client (Python's MemoryError, torch's allocation error), that client is lost
likewise, with or without rates: the run goes on, but nobody can say whether it would go so again. Where fewer than
`least` are left then, the run ends.

Every other fate is drawn in `delay` and `loss`, by a key, so that it depends neither on the executor nor on an
interruption: another way to fail belongs there. The questions at the end of a task are answered by all, in time.
Training in one place has no one to wait for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from fclmodels import state
from fclmodels.errors import UserError
from fclmodels.federation.messages import Reply, parts_from_tree, parts_to_tree
from fclmodels.federation.run import Run
from fclmodels.federation.secagg import threshold_of

if TYPE_CHECKING:
    from fclmodels.methods.base import Method

MOST_DRAWS = 100  # of clients for one round

Loss = Literal["crash", "out of memory"]


@dataclass(frozen=True)
class Late:
    """A reply on its way, in a file: the round in which its client trained, and the one in which it arrives."""

    file: Path
    base_round: int
    due: int

    def reply(self) -> Reply:
        tree = state.load(self.file)
        return Reply(parts_from_tree(tree["parts"]), **tree["facts"])


@dataclass(frozen=True)
class Turnout:
    """What becomes of the clients that a round samples, and who of earlier rounds is heard in it.

    delays: of each client sampled, by how many rounds it is late; 0: in time, None: it never answers.
    lost: those of the others that are lost on the way, and why.
    arriving: late replies that are due. weights: what each of these counts; those without one are dropped.
    called_off: the clients of earlier draws for the round, in which too few answered.
    """

    delays: dict[int, int | None]
    arriving: dict[int, Late] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)
    called_off: tuple[tuple[int, ...], ...] = ()
    lost: dict[int, Loss] = field(default_factory=dict)

    @property
    def training(self) -> list[int]:
        """Those that do, some of them in vain."""
        able = (client for client, delay in self.delays.items() if delay is not None)
        return [client for client in able if self.lost.get(client) != "out of memory"]

    @property
    def in_time(self) -> list[int]:
        return [client for client, delay in self.delays.items() if delay == 0 and client not in self.lost]

    @property
    def answers(self) -> int:
        """How many replies the server aggregates."""
        return len(self.in_time) + len(self.weights)

    def counts(self) -> dict[str, int]:
        """For the log. clients: all that were sampled; missing: those of them that the round gets no answer from and
        no later one will; late: answers to earlier rounds that arrive in this one, also those that are dropped."""
        called_off = sum(map(len, self.called_off))
        return {
            "clients": len(self.delays) + called_off,
            "answers": self.answers,
            "late": len(self.arriving),
            "missing": list(self.delays.values()).count(None) + called_off,
        }


def turnout(
    method: "Method", task: int, round: int, late: Mapping[int, Late], sample: Callable[[int], tuple[int, ...]]
) -> Turnout:
    """The fates of a round's clients. late: the replies on their way. sample: the clients of the round's nth draw."""
    faults = method.run.params.federation.faults
    if not faults.on or method.pooled_bytes is not None:
        return Turnout(dict.fromkeys(sample(0), 0))
    arriving = {client: late[client] for client in sorted(late) if late[client].due == round}
    counted = arriving if faults.late_weight == "age" else {}
    weights = {client: weight(round - reply.base_round) for client, reply in counted.items()}
    called_off: tuple[tuple[int, ...], ...] = ()
    for draw in range(MOST_DRAWS):
        delays = {client: delay(method.run, task, round, client, draw) for client in sample(draw)}
        found = {client: loss(method.run, task, round, client, draw) for client, d in delays.items() if d is not None}
        lost = {client: why for client, why in found.items() if why}
        turnout = Turnout(delays, arriving, weights, called_off, lost)
        least = answers_needed(method.run, len(delays))
        if turnout.answers >= least:
            return turnout
        called_off = (*called_off, tuple(delays))
    settings = "federation.faults.least" + ", or federation.secagg.threshold" * method.run.params.federation.secagg.on
    raise UserError(
        f"task {task}, round {round}: in {MOST_DRAWS} draws of up to {max(map(len, called_off))} clients never "
        f"{least} answered. Lower the rates of federation.faults or {settings}."
    )


def answers_needed(run: Run, sampled: int) -> int:
    """Of so many clients sampled: `least`, and under secure aggregation its threshold."""
    federation = run.params.federation
    unmasking = threshold_of(sampled, federation.secagg.threshold) if federation.secagg.on else 1
    return max(federation.faults.least, unmasking)


def delay(run: Run, task: int, round: int, client: int, draw: int) -> int | None:
    """The fate of a client in a round's nth draw: by how many rounds its answer is late, None where there is none."""
    faults = run.params.federation.faults
    random = run.generator("faults", task, round, client, draw)
    missing, late = torch.rand(2, generator=random, dtype=torch.float64).tolist()
    if missing < faults.missing:
        return None
    return int(torch.randint(1, faults.late_rounds + 1, (), generator=random)) if late < faults.late else 0


def loss(run: Run, task: int, round: int, client: int, draw: int) -> Loss | None:
    """Whether, and how, a client that is there is lost on the way."""
    faults = run.params.federation.faults
    crash, memory = torch.rand(2, generator=run.generator("lost", task, round, client, draw)).tolist()
    return "out of memory" if memory < faults.out_of_memory else "crash" if crash < faults.crash else None


def leaves_before(run: Run, task: int, round: int, client: int) -> int:
    """The step of secure aggregation that a missing client does not take any more: 0 keys, 1 shares, 2 reply."""
    return int(torch.randint(3, (), generator=run.generator("leaves", task, round, client)))


def weight(age: int) -> float:
    return float((1 + age) ** -0.5)


def keep(reply: Reply, file: Path) -> None:
    state.save({"parts": parts_to_tree(reply.parts), "facts": reply.facts}, file)
