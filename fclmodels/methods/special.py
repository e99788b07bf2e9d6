"""SPECIAL: a server-side anchor to the last task's model (Eq. 5 and 6, Algorithm 1).

From the second task on the server solves argmin_w 1/2 ||w - W~||^2 + lambda/2 ||w - W*||^2 after each round, where W~
is what FedAvg makes of the round and W* the model that the task before ended with: w = (W~ + lambda W*) / (1 + lambda).
Under `lambda: auto` clients tell the loss on their val rows of the model that they were sent; what the server makes of
that is in radius.py.

knowledge: besides the anchor, under `lambda: auto`, `search` (radius.py), the last round's `share` of the anchor, and
how many `rounds` of the task are over.
"""

import math
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator

from fclmodels.backbones.spec import ModelSpec
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.executor import TRAIN
from fclmodels.federation.messages import Part, Payload, Reply, outline
from fclmodels.federation.replies import Replies
from fclmodels.federation.run import Run
from fclmodels.federation.server import Server
from fclmodels.methods.anchored import AnchoredOnServer, distance
from fclmodels.methods.base import Memory
from fclmodels.methods.radius import Search, share_within
from fclmodels.settings import Settings as BaseSettings

ENOUGH = 0.98  # of the drift that a constant update has in the end


class Special(AnchoredOnServer):
    """FedAvg whose server pulls the model of every round back towards the last task's."""

    name = "special"
    paper = (
        "Server-Proximal Aggregation for Federated Domain-Incremental Learning under Partial Participation: "
        "Task-Uniform Convergence and Backward Transfer"
    )

    class Settings(AnchoredOnServer.Settings):
        lam: Annotated[float, Field(ge=0, le=1e6)] | Literal["auto"] = Field(
            0.25,
            alias="lambda",
            description="weight of the last task's model after each round; auto: tuned on val rows",
        )
        tolerance: float = Field(
            0.05,
            gt=0,
            lt=1,
            description="under lambda: auto, share of what the model knows of val labels that the anchor may cost",
        )

        @model_validator(mode="after")
        def _tolerance_has_an_effect(self) -> "Special.Settings":
            if self.lam != "auto" and self.tolerance != type(self).model_fields["tolerance"].default:
                raise ValueError("tolerance needs lambda: auto.")
            return self

    settings: Settings

    def __init__(self, settings: BaseSettings, run: Run) -> None:
        super().__init__(settings, run)
        for task in run.splits.tasks[1:]:
            if self.settings.lam == "auto" and not run.splits.clients_with(task.index, "val"):
                raise UserError(
                    f"methods.special.lambda: auto reads val rows, of which {task.name} has none. "
                    "Set partition.val above 0, or lambda to a number."
                )

    # On the server.

    def start_task(self, server: Server, task: int) -> Server:
        started = super().start_task(server, task)
        return knowing(started, search=asdict(Search()), share=0.0, rounds=0) if self.tunes(task) else started

    def aggregate(self, server: Server, replies: Replies) -> Server:
        averaged = super().aggregate(server, replies)
        if self.tunes(server.task):
            averaged = self.tuned(averaged, replies, distance(server.weights, server.knowledge["anchor"]))
        return self.blended(averaged, self.share(averaged))

    def sends(self, task: int, round: int) -> dict[str, dict[str, Part]]:
        sent = super().sends(task, round)
        val = {"val": outline("loss", {"loss": (), "samples": ()}, torch.float64)} if self.tunes(task) else {}
        return {TRAIN: {**sent[TRAIN], **val}}

    def tunes(self, task: int) -> bool:
        return self.settings.lam == "auto" and task > 0

    def tuned(self, averaged: Server, replies: Replies, drift: float) -> Server:
        """With what the round's val losses tell; `drift` is that of the model that they are of.

        A round whose clients have no val rows, or answer for an older model, leaves D as it was.
        """
        told, rounds = replies.sum("val"), self.run.rounds(averaged.task)
        averaged = knowing(averaged, rounds=averaged.knowledge["rounds"] + 1)
        noise, guessing = replies.noise("val"), self.guessing(averaged.spec, averaged.task)
        if not told["samples"] > 3 * noise:
            return averaged
        loss = float(told["loss"] / told["samples"]) * (2 * guessing if noise else 1)
        before = Search(**averaged.knowledge["search"])
        search = before.after(loss, guessing, self.settings.tolerance, rounds)
        radius = search.radius(drift, last=averaged.knowledge["rounds"] == rounds)
        share = share_within(radius, distance(averaged.weights, averaged.knowledge["anchor"]))
        return knowing(averaged, search=asdict(search), share=share)

    def guessing(self, spec: ModelSpec, task: int) -> float:
        """ln C, the loss of guessing among the classes that the loss is over."""
        return math.log(spec.seen if self.loss_is_over_seen(spec) else len(spec.tasks[task]))

    def share(self, server: Server) -> float:
        """lambda / (1 + lambda) of the last round."""
        lam = self.settings.lam
        return server.knowledge.get("share", 0.0) if lam == "auto" else lam / (1 + lam)

    def anchor_weight(self, server: Server) -> float:
        lam = self.settings.lam
        return lam if lam != "auto" and "anchor" in server.knowledge else 0.0

    # On a client.

    def train(self, client: Client, payload: Payload) -> tuple[Reply, Memory]:
        reply, memory = super().train(client, payload)
        if self.tunes(client.task):
            reply = replace(reply, parts={**reply.parts, "val": self.val_loss(client, payload)})
        return reply, memory

    @torch.no_grad()
    def val_loss(self, client: Client, payload: Payload) -> Part:
        """The loss of the model that it was sent, summed over its val rows, and their number.

        Under noise their mean, at most twice what guessing costs, in units of that, and 1 where there are rows.
        """
        weights = self.whole(client, payload)
        network = self.networks.load(self.run.spec(client.task + 1), weights).eval()
        total = torch.zeros((), dtype=torch.float64)
        for batch in self.run.batches.ordered(client.val, self.run.params.federation.batch_size):
            loss = self.cross_entropy(network, network.backbone(batch.inputs), batch.labels, client.task)
            total += loss.cpu() * len(batch.labels)
        samples = torch.tensor(len(client.val), dtype=torch.float64)
        if self.run.params.federation.privacy.on:
            most = 2 * self.guessing(network.spec, client.task)
            total, samples = (total / samples.clamp(min=1) / most).clamp(max=1), samples.clamp(max=1)
        return Part("loss", {"loss": total, "samples": samples}, bound=math.sqrt(2))

    # Before a run.

    def advice(self) -> list[str]:
        lam, tasks = self.settings.lam, range(1, len(self.run.splits.tasks))
        if not lam or not tasks:
            return []
        if lam == "auto":
            return ["lambda auto: no anchor until a tenth of a task's rounds lowers its val loss no more; else FedAvg"]
        new_rows = self.run.spec(len(self.run.splits.tasks)).seen > self.run.spec(1).seen
        useful, rounds = useful_rounds(lam), [self.run.rounds(task) for task in tasks]
        lines = [
            f"lambda {lam:g}: after the first task a constant update of each round moves the model {1 / lam:.3g} times "
            f"as far as one of them in the end, and {ENOUGH:.0%} of that by round {useful}"
        ]
        if wasted := sum(count > useful for count in rounds):
            go = "goes" if wasted == 1 else "go"
            left = "new classes' rows of the head, which have no anchor," if new_rows else "little"
            lines.append(
                f"federation.rounds: {wasted} of {len(tasks)} later tasks {go} on beyond that, up to round "
                f"{max(rounds)}, with {left} left to move. Take fewer rounds, or a lambda of "
                f"{rounded_down(fitting(max(rounds))):g}"
            )
        return lines


def knowing(server: Server, **facts: Any) -> Server:
    return replace(server, knowledge={**server.knowledge, **facts})


def drift(lam: float, rounds: int) -> float:
    """How far a constant update of each round moves the model, in lengths of one: (1 - (1 + lambda)^-rounds) / lambda.

    Of a deviation from W* a round keeps 1/(1 + lambda), the contraction. Without an anchor it is the number of rounds.
    """
    return -math.expm1(-rounds * math.log1p(lam)) / lam if lam else rounds


def useful_rounds(lam: float) -> int:
    """The first number of rounds in which a constant update has moved the model almost as far as it ever will."""
    return math.ceil(min(math.log(1 / (1 - ENOUGH)) / math.log1p(lam), 1e9))


def fitting(rounds: int) -> float:
    """The lambda for which so many rounds are just useful."""
    return math.expm1(math.log(1 / (1 - ENOUGH)) / rounds)


def rounded_down(x: float) -> float:
    """To two digits."""
    unit = 10.0 ** (math.floor(math.log10(x)) - 1)
    return math.floor(x / unit) * unit
