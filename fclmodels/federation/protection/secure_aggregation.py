"""Secure aggregation in the engine: secagg_protocol.py's messages as exchanges, and replies as vectors of its ring.

An exchange becomes four: keys, shares, the exchange itself with masked replies, shares that unmask. `MaskStage` is the
client's half, which runs wherever clients run; a client's secrets lie in a file of their own until the last of the
four. `Session` is the server's half: it sees masked replies and their sum, and only the shape of a single client's
reply. Training losses and numbers of samples, for the log, are masked too.

Keys come from the operating system, so that messages differ in every run; the sums are the same to the bit.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.faults import Turnout, compute_secagg_threshold, draw_step_of_leaving
from fclmodels.federation.engine.replies import Replies, Tensors
from fclmodels.federation.messages import Part, Payload, Reply
from fclmodels.federation.method import Obstacle
from fclmodels.federation.protection import inspection, secagg_protocol
from fclmodels.federation.protection.disclosures import find_part_without_sum
from fclmodels.federation.protection.secagg_protocol import Secrets
from fclmodels.numerics.fixed_point import decode, encode
from fclmodels.settings.federation import SecAggSettings
from fclmodels.storage import trees

if TYPE_CHECKING:
    from fclmodels.federation.engine.ledger import Ledger
    from fclmodels.federation.executors.base import Executor, Job
    from fclmodels.federation.method import Method

KEYS, SHARES, REVEALED = STEPS = ("secagg-keys", "secagg-shares", "secagg-revealed")  # questions, and parts of replies
SHARERS, SURVIVORS = "secagg-sharers", "secagg-survivors"
LOG = "secagg-log"  # the part with loss and number of samples, for the log

Messages = dict[int, bytes]  # all of one length, by client: its sender, its receiver, or the client that it is about


def refuse_unfit_method(method: "Method") -> None:
    """Raise UserError, before a run, where a method or a setting needs more than sums."""
    if obstacle := find_obstacle_to_secure_sums(method):
        raise UserError(f"federation.secagg: {obstacle} Or set federation.secagg.on: false.")
    for task in method.run.splits.tasks:
        if method.count_sampled_clients(task.index) < 2:
            raise UserError(
                f"federation.secagg: a round of {task.name} has one client, whose reply is no secret in a sum. "
                "Sample at least 2, of data that more clients have."
            )


def find_obstacle_to_secure_sums(method: "Method") -> Obstacle | None:
    """Return why sums are not enough, and a remedy; None where they are."""
    name = method.name
    if method.is_centralised:
        return Obstacle(
            f"methods.{name} brings all samples to one place, and no replies are summed", "Use another method"
        )
    if method.is_personal:
        why = f"methods.{name} keeps parts of the model with its clients, which are evaluated one by one"
        return Obstacle(why, "Share them")
    if (rule := method.run.params.federation.aggregation) != "mean":
        return Obstacle(f"federation.aggregation: {rule} compares single replies", "Use mean")
    if obstacle := method.obstacle_to_sums:
        return obstacle
    if single := find_part_without_sum(method):
        part, kind = single[0], single[1].kind
        return Obstacle(f"methods.{name} sends {part} ({kind}), which the server needs by itself", "Use another method")
    return None


# Messages as tensors.


def pack_messages(texts: Messages) -> Tensors:
    """Return messages as tensors."""
    return {
        "clients": torch.tensor(list(texts), dtype=torch.int32),
        "bytes": torch.frombuffer(bytearray(b"".join(texts.values())), dtype=torch.uint8).view(len(texts), -1),
    }


def unpack_messages(tensors: Tensors) -> Messages:
    """Return messages from such tensors."""
    rows = (row.tobytes() for row in tensors["bytes"].cpu().numpy())
    return dict(zip(tensors["clients"].tolist(), rows, strict=True))


def make_protocol_part(tensors: Tensors) -> Part:
    """Return a part of the protocol's own."""
    return Part("protocol", tensors, "each")


def name_clients(clients: Iterable[int]) -> Part:
    """Return a part that lists clients."""
    return make_protocol_part({"clients": torch.tensor(sorted(clients), dtype=torch.int32)})


# Replies as vectors of the ring. A tensor's name there ends with its original type, which is public.


def encode_reply(reply: Reply, settings: SecAggSettings, clients: int) -> dict[str, Tensors]:
    """Return a reply's parts, encoded, and one more for the log; nothing for an empty reply."""
    parts = {name: part.tensors for name, part in reply.parts.items()}
    if reply.samples:
        sums = {"loss": reply.loss * reply.samples, "samples": float(reply.samples)}
        parts[LOG] = {name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}
    codes: dict[str, Tensors] = {}
    for part, tensors in sorted(parts.items()):
        codes[part] = {}
        for name, X in sorted(tensors.items()):
            try:
                code = encode(X, settings.limit, clients)
            except OverflowError as problem:
                raise UserError(
                    f"secure aggregation: {part} {name}: {problem}. Raise federation.secagg.limit, at the cost of "
                    "precision, or have clients send less (federation.weighting: uniform, a lower optimizer.lr)."
                ) from problem
            codes[part][f"{name}:{str(X.dtype).removeprefix('torch.')}"] = code
    return codes


def decode_sum(parts: dict[str, Tensors], settings: SecAggSettings, clients: int) -> dict[str, Tensors]:
    """Return the parts of a sum over at most so many clients, with the names and types that the method knows."""
    decoded: dict[str, Tensors] = {}
    for part, tensors in parts.items():
        typed = ((*name.rpartition(":")[::2], total) for name, total in tensors.items())
        decoded[part] = {n: decode(total, getattr(torch, kind), settings.limit, clients) for n, kind, total in typed}
    return decoded


def join_numbers(parts: dict[str, Tensors]) -> np.ndarray:
    """Return all numbers of these parts as one vector of the ring."""
    return torch.cat([X.flatten() for tensors in parts.values() for X in tensors.values()]).numpy().view(np.uint64)


def split_numbers(vector: np.ndarray, like: dict[str, Tensors]) -> dict[str, Tensors]:
    """Return the parts that such a vector holds, with the names and shapes of `like`."""
    shapes = [X.shape for tensors in like.values() for X in tensors.values()]
    pieces = torch.from_numpy(vector.view(np.int64)).split([shape.numel() for shape in shapes])
    of_each = iter(piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
    return {part: {name: next(of_each) for name in tensors} for part, tensors in like.items()}


# On a client.


class MaskStage:
    """The stage of a client's work in which its reply is masked, and the protocol's own questions are answered."""

    def __init__(self, method: "Method") -> None:
        self.method = method
        self.federation = method.run.params.federation

    def prepare(self, client: Client) -> Client:
        return client

    def answer(self, job: "Job", index: int) -> Reply:
        """Return a client's message in a step of the protocol."""
        return answer_step(job, index, self.federation.secagg)

    def change(self, reply: Reply, client: Client, job: "Job") -> Reply:
        """Return the masked reply, or none where it fails the client's own check, which a bad client would not run."""
        checks = self.federation.inspection.check and not self._is_bad(client)
        most = self.method.bound_client_weight(job.task)
        if checks and inspection.inspect_reply(reply, job.join_payload(client.index), most).defect:
            return Reply({}, base_round=reply.base_round, withheld=True)
        return mask_reply(reply, job, client.index, self.federation.secagg)

    def _is_bad(self, client: Client) -> bool:
        if self.federation.attack.kind == "none":
            return False
        from fclmodels.federation.protection.attacks import draw_bad_clients

        return client.index in draw_bad_clients(self.method, client.task)


stage = MaskStage


def find_secrets_file(scratch: Path, me: int) -> Path:
    """Return the file of a client's secrets, from the first step of an exchange to the last."""
    return scratch / f"secagg-{me}.safetensors"


def answer_step(job: "Job", me: int, settings: SecAggSettings) -> Reply:
    """Return a client's reply in steps 0, 1 and 3 of the protocol: before and after the masked reply."""
    file = find_secrets_file(job.scratch, me)
    if job.question == KEYS:
        secrets = Secrets.new()
        trees.save({"secrets": pack_messages({me: secrets.to_bytes()})}, file)
        return Reply({KEYS: make_protocol_part(pack_messages({me: secrets.public}))})
    if job.question == SHARES:
        state = {**trees.load(file), "keys": job.payload[KEYS].tensors}
        trees.save(state, file)
        secrets, keys, threshold = load_secrets(state, me, settings)
        return Reply(
            {SHARES: make_protocol_part(pack_messages(secagg_protocol.share_secrets(secrets, me, keys, threshold)))}
        )
    secrets, keys, threshold = load_secrets(trees.load(file), me, settings)
    file.unlink()  # so that it answers only once: with both shares of a client the server could unmask that one alone
    received, survivors = (
        unpack_messages(job.payload[str(me)].tensors),
        job.payload[SURVIVORS].tensors["clients"].tolist(),
    )
    return Reply(
        {
            REVEALED: make_protocol_part(
                pack_messages(secagg_protocol.reveal_shares(secrets, me, keys, received, survivors, threshold))
            )
        }
    )


def mask_reply(reply: Reply, job: "Job", me: int, settings: SecAggSettings) -> Reply:
    """Return the reply with every number masked (step 2); raise UserError for parts of single replies, or too large."""
    for name, part in reply.parts.items():
        if part.least != "sum":
            raise UserError(f"secure aggregation: {name} is for single replies, and the server gets sums only.")
    secrets, keys, _ = load_secrets(trees.load(find_secrets_file(job.scratch, me)), me, settings)
    parts = encode_reply(reply, settings, len(keys))
    if not parts:
        return Reply({})
    vector = join_numbers(parts)
    secagg_protocol.mask_values(secrets, me, keys, job.payload[SHARERS].tensors["clients"].tolist(), vector)
    outlines = {**reply.parts, LOG: Part("count", {})}
    hidden = {name: replace(outlines[name], tensors=tensors) for name, tensors in split_numbers(vector, parts).items()}
    return Reply(hidden, base_round=reply.base_round)


def load_secrets(state: trees.Tree, me: int, settings: SecAggSettings) -> tuple[Secrets, Messages, int]:
    """Return a client's secrets, all public keys, and the threshold that follows from their number."""
    keys = unpack_messages(state["keys"])
    return (
        Secrets.of(unpack_messages(state["secrets"])[me]),
        keys,
        compute_secagg_threshold(len(keys), settings.threshold),
    )


# On the server.


class Session:
    """One exchange under secure aggregation, on the server. It learns who takes part, encrypted shares, and the sum."""

    def __init__(
        self, job: "Job", turnout: Turnout, settings: SecAggSettings, executor: "Executor", ledger: "Ledger"
    ) -> None:
        self.job, self.settings, self.executor, self.ledger = job, settings, executor, ledger
        leaving = {
            client: draw_step_of_leaving(executor.method.run, job.task, job.round, client)
            for client, delay in turnout.delays.items()
            if delay is None
        }
        present = [client for client in turnout.delays if leaving.get(client) != 0]
        self.keys: Messages = {}
        for tensors in self._ask(KEYS, {}, present).values():
            self.keys |= unpack_messages(tensors)
        self.threshold = compute_secagg_threshold(len(self.keys), settings.threshold)
        present = [client for client in present if leaving.get(client) != 1]
        sealed = self._ask(SHARES, {KEYS: make_protocol_part(pack_messages(self.keys))}, present)
        self.sealed = {
            sender: unpack_messages(tensors) for sender, tensors in sealed.items()
        }  # encrypted shares, by sender

    @property
    def payload(self) -> Payload:
        """The part that step 2 adds to the exchange's payload."""
        return {SHARERS: name_clients(self.sealed)}

    def compute_sums(self, replies: Replies) -> Replies:
        """Return the unmasked sums of masked replies (step 3)."""
        if not replies.clients or not replies.parts:
            return replies
        survivors = sorted(replies.clients)
        secagg_protocol.refuse_too_few(
            "have sent masked replies that pass the checks (training may diverge)", survivors, self.threshold
        )
        sealed_for = {
            client: make_protocol_part(
                pack_messages({sender: sealed[client] for sender, sealed in self.sealed.items()})
            )
            for client in survivors
        }
        answers = self._ask(REVEALED, {SURVIVORS: name_clients(survivors)}, survivors, sealed_for)
        shares = {client: unpack_messages(tensors) for client, tensors in answers.items()}
        masked = {name: replies.sum(name) for name in sorted(replies.parts)}
        total = join_numbers(masked)
        secagg_protocol.unmask_sum(total, self.keys, self.sealed.keys(), survivors, shares, self.threshold)
        sums = decode_sum(split_numbers(total, masked), self.settings, len(self.keys))
        return Sums(replies, sums)

    def _ask(
        self, step: str, common: Payload, clients: Sequence[int], single: Mapping[int, Part] | None = None
    ) -> dict[int, Tensors]:
        """Return each client's answer in a step.

        single: further parts by client, encrypted, so that the executor may send all of them to all clients.
        """
        single = single or {}
        payload = {**common, **{str(c): part for c, part in single.items()}}
        job = replace(self.job, question=step, payload=payload, own_payloads={})
        self.ledger.note_payload(replace(job, payload=common), clients)
        for client, part in single.items():
            self.ledger.note_payload(replace(job, payload={SHARES: part}), [client])
        answers = {}
        for result in self.executor.run(job, clients, {}):
            self.ledger.note_reply(job, result.client, result.reply)
            answers[result.client] = {name: X.clone() for name, X in result.reply.parts[step].tensors.items()}
        return answers


class Sums(Replies):
    """The replies of an exchange of which the server has the sums alone."""

    def __init__(self, masked: Replies, sums: dict[str, Tensors]) -> None:
        super().__init__(masked.clients, masked.spool)
        self.facts, self._outlines = masked.facts, masked._outlines
        self._log = sums.pop(LOG, None)
        self._totals = sums

    @property
    def parts(self) -> dict[str, Part]:
        return {name: part for name, part in super().parts.items() if name in self._totals}

    def sum(self, part: str) -> Tensors:
        return self._totals[part]

    def yield_each(self, part: str) -> Iterator[tuple[int, Tensors]]:
        raise UserError(f"secure aggregation: {part} is asked for of single clients, and the server has its sum only.")

    def sum_among(self, part: str, clients: Collection[int]) -> Tensors:
        raise UserError(f"secure aggregation: {part} is asked for of some clients, and the server has its sum only.")

    @property
    def loss(self) -> float | None:
        return float(self._log["loss"] / self._log["samples"]) if self._log else None
