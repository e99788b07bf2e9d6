"""SPECIAL: a server-side anchor to the last task's model (Eq. 5 and 6, Algorithm 1).

From the second task on the server solves argmin_w 1/2 ||w - W~||^2 + lambda/2 ||w - W*||^2 after each round, where W~
is what FedAvg makes of the round and W* the model that the task before ended with: w = (W~ + lambda W*) / (1 + lambda).
Under `lambda: auto`, the default, clients send the loss on their val rows, or on their train rows where the task has no
val rows, of the model that they have downloaded, from which anchor_radius.py derives lambda: 0 until the task is
learned, then as much as costs it little.

knowledge: besides the anchor, under `lambda: auto`, `search` (anchor_radius.py), the last round's `share` of the
anchor, how many `rounds` of the task are over, and `val`, the sums of `loss` and `samples` smoothed over rounds.
"""

import math
from dataclasses import asdict, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.federation.client import Client
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Answer, Form
from fclmodels.federation.messages import Payload, make_outline
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.anchor import AnchorSettings, anchor_to, blend_with_anchor, measure_distance
from fclmodels.methods.parts.anchor_radius import Search, share_within

ENOUGH = 0.98  # of the drift that a constant update has in the end


class Special(FedAvg):
    """FedAvg whose server pulls the model of every round back towards the last task's."""

    name = "special"
    paper = (
        "Server-Proximal Aggregation for Federated Domain-Incremental Learning under Partial Participation: "
        "Task-Uniform Convergence and Backward Transfer"
    )

    class Settings(AnchorSettings):
        lam: Annotated[float, Field(ge=0, le=1e6)] | Literal["auto"] = Field(
            "auto",
            alias="lambda",
            description="weight of the last task's model after each round, the paper's; auto, ours: tuned on val rows, "
            "or on train rows where there are none",
        )
        tolerance: float = Field(
            0.05,
            gt=0,
            lt=1,
            description="under lambda: auto, share of what the model knows of their labels that the anchor may cost",
        )

        @model_validator(mode="after")
        def _tolerance_has_an_effect(self) -> "Special.Settings":
            if self.lam != "auto" and self.tolerance != type(self).model_fields["tolerance"].default:
                raise ValueError("tolerance needs lambda: auto.")
            return self

    settings: Settings

    # On the server.

    def start_task(self, server: Server, task: int) -> Server:
        started = anchor_to(super().start_task(server, task), server, self.settings.new_rows)
        if not self.tunes(task):
            return started
        return set_knowledge(started, search=asdict(Search()), share=0.0, rounds=0, val={})

    def aggregate(self, server: Server, replies: Replies) -> Server:
        averaged = super().aggregate(server, replies)
        if self.tunes(server.task):
            averaged = self.tune(averaged, replies, measure_distance(server.weights, server.knowledge["anchor"]))
        return blend_with_anchor(averaged, self.share(averaged), self.settings.batch_norm == "blend")

    def make_update_form(self, task: int, round: int) -> Form:
        form = super().make_update_form(task, round)
        if not self.tunes(task):
            return form
        val = make_outline("loss", {"loss": (), "samples": ()}, torch.float64, bound=math.sqrt(2))
        return {**form, "val": val}

    def tunes(self, task: int) -> bool:
        return self.settings.lam == "auto" and task > 0

    def tune(self, averaged: Server, replies: Replies, drift: float) -> Server:
        """Return the server whose share of the anchor follows from the round's val losses.

        drift: of the model that the losses are of. A round whose clients have no val rows, or answer for an older
        model, leaves D as it was. Where a round samples the share q of the clients, sums of losses and of rows are
        smoothed over rounds, q of each the round's, and a tenth of the task's rounds is counted in rounds of all.
        """
        val, rounds = replies.sum("val"), self.run.count_rounds(averaged.task)
        averaged = set_knowledge(averaged, rounds=averaged.knowledge["rounds"] + 1)
        noise, guessing = replies.compute_noise("val"), self.compute_guessing_loss(averaged.spec, averaged.task)
        if not val["samples"] > 3 * noise:
            return averaged
        sampled = self.count_sampled_clients(averaged.task) / len(self.list_participants(averaged.task))
        before = averaged.knowledge["val"]
        means = {name: (1 - sampled) * before.get(name, 0.0) + sampled * float(total) for name, total in val.items()}
        loss = means["loss"] / means["samples"] * (2 * guessing if noise else 1)
        search = Search(**averaged.knowledge["search"])
        search = search.add_round(loss, guessing, self.settings.tolerance, rounds / sampled)
        radius = search.compute_radius(drift, last=averaged.knowledge["rounds"] == rounds)
        share = share_within(radius, measure_distance(averaged.weights, averaged.knowledge["anchor"]))
        return set_knowledge(averaged, search=asdict(search), share=share, val=means)

    def compute_guessing_loss(self, spec: ModelSpec, task: int) -> float:
        """Return ln C, the loss of guessing among the classes that the loss is over."""
        return math.log(spec.label_count if self.loss_is_over_seen(spec) else len(spec.tasks[task]))

    def share(self, server: Server) -> float:
        """Return lambda / (1 + lambda) of the last round."""
        lam = self.settings.lam
        return server.knowledge.get("share", 0.0) if lam == "auto" else lam / (1 + lam)

    def find_anchor_weight(self, server: Server) -> float:
        lam = self.settings.lam
        return lam if lam != "auto" and "anchor" in server.knowledge else 0.0

    # On a client.

    def train(self, client: Client, payload: Payload) -> Answer:
        answer = super().train(client, payload)
        if not self.tunes(client.task):
            return answer
        return answer._replace(tensors={**answer.tensors, "val": self.measure_val_loss(client, payload)})

    @torch.no_grad()
    def measure_val_loss(self, client: Client, payload: Payload) -> dict[str, Tensor]:
        """Return the loss of the model that a client was sent, summed over its rows for that, and their number.

        Under noise their mean, at most twice what guessing costs, in units of that, and 1 where there are rows.
        """
        weights = self.join_own_weights(client, payload)
        network = self.networks.load(self.run.make_spec(client.task + 1), weights).eval()
        total = torch.zeros((), dtype=torch.float64)
        rows = client.val if self.run.splits.list_clients(client.task, "val") else client.rows
        for batch in self.run.batches.iterate_ordered(rows, self.run.params.federation.batch_size):
            loss = self.compute_cross_entropy(network, network.backbone(batch.inputs), batch.labels, client.task)
            total += loss.cpu() * len(batch.labels)
        samples = torch.tensor(len(rows), dtype=torch.float64)
        if self.run.params.federation.privacy.on:
            most = 2 * self.compute_guessing_loss(network.spec, client.task)
            total, samples = (total / samples.clamp(min=1) / most).clamp(max=1), samples.clamp(max=1)
        return {"loss": total, "samples": samples}

    # Before a run.

    def list_advice(self) -> list[str]:
        lam, tasks = self.settings.lam, range(1, len(self.run.splits.tasks))
        if not lam or not tasks:
            return []
        if lam == "auto":
            return ["lambda auto: no anchor until a tenth of a task's rounds lowers its loss no more; else FedAvg"]
        new_rows = self.run.make_spec(len(self.run.splits.tasks)).label_count > self.run.make_spec(1).label_count
        useful, rounds = count_useful_rounds(lam), [self.run.count_rounds(task) for task in tasks]
        lines = [
            f"lambda {lam:g}: after the first task a constant update of each round moves the model {1 / lam:.3g} times "
            f"as far as one of them in the end, and {ENOUGH:.0%} of that by round {useful}"
        ]
        if wasted := sum(count > useful for count in rounds):
            go = "goes" if wasted == 1 else "go"
            movable = "new classes' rows of the head, which have no anchor," if new_rows else "little"
            lines.append(
                f"federation.rounds: {wasted} of {len(tasks)} later tasks {go} on beyond that, up to round "
                f"{max(rounds)}, with {movable} left to move. Take fewer rounds, or a lambda of "
                f"{round_down(solve_lambda(max(rounds))):g}"
            )
        return lines


def set_knowledge(server: Server, **facts: Any) -> Server:
    return replace(server, knowledge={**server.knowledge, **facts})


def compute_drift(lam: float, rounds: int) -> float:
    """Return how far a constant update of each round moves the model, in lengths: (1 - (1 + lambda)^-rounds) / lambda.

    Of a deviation from W* a round keeps 1/(1 + lambda), the contraction. Without an anchor it is the number of rounds.
    """
    return -math.expm1(-rounds * math.log1p(lam)) / lam if lam else rounds


def count_useful_rounds(lam: float) -> int:
    """Return the least rounds in which a constant update has moved the model almost as far as it ever will."""
    return math.ceil(min(math.log(1 / (1 - ENOUGH)) / math.log1p(lam), 1e9))


def solve_lambda(rounds: int) -> float:
    """Return the lambda for which so many rounds are just useful."""
    return math.expm1(math.log(1 / (1 - ENOUGH)) / rounds)


def round_down(x: float) -> float:
    """Round down to two digits."""
    unit = 10.0 ** (math.floor(math.log10(x)) - 1)
    return math.floor(x / unit) * unit
