"""Secure aggregation in the engine: secagg.py's messages as exchanges, and replies as vectors of its ring.

An exchange becomes four: keys, shares, the exchange itself with masked replies, shares that unmask. `answered` and
`masked` are the client's half, which runs wherever clients run; what a client must remember from one to the next lies
in a file of its own, gone with the last. `Session` is the server's half: it sees masked replies and their sum, and of
a single client only the shape of its reply. Training losses and numbers of samples, for the log, are masked too.

Keys come from the operating system, so that messages differ in every run; the sums are the same to the bit.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fclmodels import state
from fclmodels.errors import UserError
from fclmodels.federation import secagg
from fclmodels.federation.faults import Turnout, leaves_before
from fclmodels.federation.messages import Part, Payload, Reply
from fclmodels.federation.replies import Replies, Tensors
from fclmodels.federation.secagg import Secrets, threshold_of
from fclmodels.numerics.fixed_point import decoded, encoded
from fclmodels.settings import SecAggSettings

if TYPE_CHECKING:
    from fclmodels.federation.executor import Executor, Job
    from fclmodels.federation.ledger import Ledger
    from fclmodels.methods.base import Method

KEYS, SHARES, REVEALED = STEPS = ("secagg-keys", "secagg-shares", "secagg-revealed")  # questions, and their parts
SHARERS, SURVIVORS = "secagg-sharers", "secagg-survivors"
LOG = "secagg-log"  # the part with what is for the log only

Messages = dict[int, bytes]  # all of one length, by the client that each is from, for or about


def refuse_what_needs_more(method: "Method") -> None:
    """Before a run: a method, or a setting, that sums are not enough for."""
    federation = method.run.params.federation
    if not federation.secagg.on:
        return
    if why := needs_more(method):
        raise UserError(f"federation.secagg: {why} Or set federation.secagg.on: false.")
    for task in method.run.splits.tasks:
        if method.sampled(task.index) < 2:
            raise UserError(
                f"federation.secagg: a round of {task.name} has one client, whose reply is no secret in a sum. "
                "Sample at least 2, of data that more clients have."
            )


def needs_more(method: "Method") -> str | None:
    """Why sums are not enough, and what would be right."""
    name = method.name
    if method.pooled_bytes is not None:
        return f"methods.{name} brings all samples to one place, and no replies are summed. Use another method."
    if method.personal:
        return f"methods.{name} keeps parts of the model with its clients, which are evaluated one by one. Share them."
    if (rule := method.run.params.federation.aggregation) != "mean":
        return f"federation.aggregation: {rule} compares single replies. Use mean."
    return method.needs_each


# Messages as tensors.


def table(said: Messages) -> Tensors:
    return {
        "clients": torch.tensor(list(said), dtype=torch.int32),
        "bytes": torch.frombuffer(bytearray(b"".join(said.values())), dtype=torch.uint8).view(len(said), -1),
    }


def messages(said: Tensors) -> Messages:
    rows = (row.tobytes() for row in said["bytes"].cpu().numpy())
    return dict(zip(said["clients"].tolist(), rows, strict=True))


def protocol(tensors: Tensors) -> Part:
    return Part("protocol", tensors, "each")


def named(clients: Iterable[int]) -> Part:
    return protocol({"clients": torch.tensor(sorted(clients), dtype=torch.int32)})


# Replies as vectors of the ring. A tensor's name there ends with the type that it had: what is public of a reply.


def in_the_ring(reply: Reply, settings: SecAggSettings, clients: int) -> dict[str, Tensors]:
    """A reply's parts, encoded, and one more for the log. Memory-only answers have none."""
    parts = {name: part.tensors for name, part in reply.parts.items()}
    if reply.samples:
        told = {"loss": reply.loss * reply.samples, "samples": float(reply.samples)}
        parts[LOG] = {name: torch.tensor(value, dtype=torch.float64) for name, value in told.items()}
    found: dict[str, Tensors] = {}
    for part, tensors in sorted(parts.items()):
        found[part] = {}
        for name, X in sorted(tensors.items()):
            try:
                code = encoded(X, settings.limit, clients)
            except OverflowError as problem:
                raise UserError(
                    f"secure aggregation: {part} {name}: {problem}. Raise federation.secagg.limit, at the cost of "
                    "precision, or have clients send less (federation.weighting: uniform, a lower optimizer.lr)."
                ) from problem
            found[part][f"{name}:{str(X.dtype).removeprefix('torch.')}"] = code
    return found


def out_of_the_ring(parts: dict[str, Tensors], settings: SecAggSettings, clients: int) -> dict[str, Tensors]:
    """The parts of a sum over at most so many clients, as the method knows them."""
    found: dict[str, Tensors] = {}
    for part, tensors in parts.items():
        typed = ((*name.rpartition(":")[::2], total) for name, total in tensors.items())
        found[part] = {n: decoded(total, getattr(torch, kind), settings.limit, clients) for n, kind, total in typed}
    return found


def joined(parts: dict[str, Tensors]) -> np.ndarray:
    """All numbers of these parts as one vector of the ring."""
    return torch.cat([X.flatten() for tensors in parts.values() for X in tensors.values()]).numpy().view(np.uint64)


def taken_apart(vector: np.ndarray, like: dict[str, Tensors]) -> dict[str, Tensors]:
    """The inverse, for parts of these names and shapes."""
    shapes = [X.shape for tensors in like.values() for X in tensors.values()]
    pieces = torch.from_numpy(vector.view(np.int64)).split([shape.numel() for shape in shapes])
    of_each = iter(piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
    return {part: {name: next(of_each) for name in tensors} for part, tensors in like.items()}


# On a client.


def secrets_file(scratch: Path, me: int) -> Path:
    """What a client must remember from one step to the next."""
    return scratch / f"secagg-{me}.safetensors"


def answered(job: "Job", me: int, settings: SecAggSettings) -> Reply:
    """Its messages before and after the masked reply: steps 0, 1 and 3."""
    file = secrets_file(job.scratch, me)
    if job.question == KEYS:
        secrets = Secrets.new()
        state.save({"secrets": table({me: secrets.whole})}, file)
        return Reply({KEYS: protocol(table({me: secrets.public}))})
    if job.question == SHARES:
        told = job.payload[KEYS].tensors
        kept = {**state.load(file), "keys": told}
        state.save(kept, file)
        secrets, keys, threshold = remembered(kept, me, settings)
        return Reply({SHARES: protocol(table(secagg.shared(secrets, me, keys, threshold)))})
    secrets, keys, threshold = remembered(state.load(file), me, settings)
    file.unlink()  # so that it answers once: with both shares of a client the server could unmask that one alone
    received, survivors = messages(job.payload[str(me)].tensors), job.payload[SURVIVORS].tensors["clients"].tolist()
    return Reply({REVEALED: protocol(table(secagg.revealed(secrets, me, keys, received, survivors, threshold)))})


def masked(reply: Reply, job: "Job", me: int, settings: SecAggSettings) -> Reply:
    """Step 2: the reply with every number hidden. The client itself refuses what is for single replies or too large."""
    for name, part in reply.parts.items():
        if part.least == "each":
            raise UserError(f"secure aggregation: {name} is for single replies, and the server gets sums only.")
    kept = state.load(secrets_file(job.scratch, me))
    secrets, keys, _ = remembered(kept, me, settings)
    parts = in_the_ring(reply, settings, len(keys))
    if not parts:
        return Reply({})
    vector = joined(parts)
    secagg.masked(secrets, me, keys, job.payload[SHARERS].tensors["clients"].tolist(), vector)
    declared = {**reply.parts, LOG: Part("count", {})}
    hidden = {name: replace(declared[name], tensors=tensors) for name, tensors in taken_apart(vector, parts).items()}
    return Reply(hidden, base_round=reply.base_round)


def remembered(kept: state.Tree, me: int, settings: SecAggSettings) -> tuple[Secrets, Messages, int]:
    """A client's secrets, all public keys, and the threshold that follows from their number."""
    keys = messages(kept["keys"])
    return Secrets.of(messages(kept["secrets"])[me]), keys, threshold_of(len(keys), settings.threshold)


# On the server.


class Session:
    """One exchange under secure aggregation. What it learns: who is there, sealed shares, and the sum."""

    def __init__(
        self, job: "Job", turnout: Turnout, settings: SecAggSettings, executor: "Executor", ledger: "Ledger"
    ) -> None:
        self.job, self.settings, self.executor, self.ledger = job, settings, executor, ledger
        leaving = {
            client: leaves_before(executor.method.run, job.task, job.round, client)
            for client, delay in turnout.delays.items()
            if delay is None
        }
        asked = [client for client in turnout.delays if leaving.get(client) != 0]
        self.keys: Messages = {}
        for said in self._ask(KEYS, {}, asked).values():
            self.keys |= messages(said)
        self.threshold = threshold_of(len(self.keys), settings.threshold)
        asked = [client for client in asked if leaving.get(client) != 1]
        sealed = self._ask(SHARES, {KEYS: protocol(table(self.keys))}, asked)
        self.sealed = {sender: messages(said) for sender, said in sealed.items()}

    @property
    def payload(self) -> Payload:
        """What step 2 adds to the exchange's."""
        return {SHARERS: named(self.sealed)}

    def sums(self, replies: Replies) -> Replies:
        """Step 3, and the sums of replies that are masked."""
        if not replies.clients or not replies.parts:
            return replies
        survivors = sorted(replies.clients)
        secagg.refuse_too_few(
            "have sent masked replies that pass the checks (training may diverge)", survivors, self.threshold
        )
        sealed_for = {
            client: protocol(table({sender: sealed[client] for sender, sealed in self.sealed.items()}))
            for client in survivors
        }
        said = self._ask(REVEALED, {SURVIVORS: named(survivors)}, survivors, sealed_for)
        shares = {client: messages(of_client) for client, of_client in said.items()}
        masked = {name: replies.sum(name) for name in sorted(replies.parts)}
        total = joined(masked)
        secagg.unmasked(total, self.keys, self.sealed.keys(), survivors, shares, self.threshold)
        sums = out_of_the_ring(taken_apart(total, masked), self.settings, len(self.keys))
        return Sums(replies, sums)

    def _ask(
        self, step: str, common: Payload, clients: Sequence[int], single: Mapping[int, Part] | None = None
    ) -> dict[int, Tensors]:
        """What each client says in a step. single: what each one downloads besides, by client; sealed, so that the
        executor may show all of it to all."""
        single = single or {}
        job = replace(self.job, question=step, payload={**common, **{str(c): part for c, part in single.items()}})
        self.ledger.sent(replace(job, payload=common), clients)
        for client, part in single.items():
            self.ledger.sent(replace(job, payload={SHARES: part}), [client])
        said = {}
        for answer in self.executor.run(job, clients, {}):
            self.ledger.received(job, answer.client, answer.reply)
            said[answer.client] = {name: X.clone() for name, X in answer.reply.parts[step].tensors.items()}
        return said


class Sums(Replies):
    """Replies of which the server has the sums alone."""

    def __init__(self, masked: Replies, sums: dict[str, Tensors]) -> None:
        super().__init__(masked.clients, masked.spool)
        self.facts, self._declared = masked.facts, masked._declared
        self._log = sums.pop(LOG, None)
        self._known = sums

    @property
    def parts(self) -> dict[str, Part]:
        return {name: part for name, part in super().parts.items() if name in self._known}

    def sum(self, part: str) -> Tensors:
        return self._known[part]

    def each(self, part: str) -> Iterator[tuple[int, Tensors]]:
        raise UserError(f"secure aggregation: {part} is asked for of single clients, and the server has its sum only.")

    @property
    def loss(self) -> float | None:
        return float(self._log["loss"] / self._log["samples"]) if self._log else None
