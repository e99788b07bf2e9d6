"""BiC+FL: distillation, and a correction of the new classes' logits from a balanced set (Wu et al. 2019).

A client sets apart a balanced validation set: a share of its exemplars, and as many of each new class. On the rest of
the union it descends  lambda L_d + (1 - lambda) H,  lambda = n / (n + m) for n old and m new columns, L_d the cross
entropy of softmax(z / T) with softmax(z* / T) over the old columns, z* the last task's model's with its own correction.

After the last round the network is fixed, and each client fits  z_new <- scale z_new + shift  from (1, 0) on to the
cross entropy of its validation set. The server averages these two numbers, weighed by the sizes of the sets: that
clients fit is our choice, as is Adam on all of a set at once (published code has Adam, SGD and L-BFGS). A client
without exemplars has no set, and nothing is corrected where tasks share all classes. Only the newest task's logits are
corrected, as in the paper.

knowledge: `anchor` with the corrected head; `correction` {scale, shift} of the last task's logits.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Rows
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.method import Obstacle
from fclmodels.federation.prediction import FittedHead
from fclmodels.federation.protection.reply_checks import LEAST_WEIGHT
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.coreset_memory import EMBED
from fclmodels.methods.parts.exemplar_memory import find_class, iterate_joined_epochs, list_classes
from fclmodels.methods.parts.joined_heads import find_columns, join_heads, list_old_groups, list_task_columns
from fclmodels.methods.parts.rehearsal import LastModel, Rehearsed
from fclmodels.methods.parts.replay_memory import unpack_samples
from fclmodels.numerics.exemplar_losses import fit_correction, soft_cross_entropy

Correction = dict[str, Tensor]


class Bic(Rehearsed):
    """Clients fit two numbers that take back what the new classes' logits are too large."""

    name = "bic"
    paper = "Large Scale Incremental Learning"

    class Settings(Rehearsed.Settings):
        temperature: PositiveFloat = Field(2.0, le=1e6, description="T, of the distillation")
        held_out: float = Field(
            0.1, gt=0, lt=1, description="share of a class's exemplars in the validation set, at least one of them"
        )
        fit_steps: PositiveInt = Field(250, le=100_000, description="steps of Adam that fit the correction")
        fit_lr: PositiveFloat = Field(0.01, le=1e3, description="learning rate of these steps")

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.fit = self.declare(Exchange("fit", self.make_fit_payload, self.answer_fit, self.make_fit_form))

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        return Obstacle("weighs corrections by validation sets, which not every client has", "Use ss-il or icarl")

    # On the server.

    def enter_task(self, server: Server, last: Server) -> Server:
        correction = last.knowledge.get("correction")
        if correction is None:
            return server
        return replace(server, knowledge={"anchor": correct_heads(last.weights, last.spec, correction)})

    def end_rounds(self, server: Server, cohort: Cohort) -> Server:
        if server.task == 0:
            return server
        replies = cohort.ask(self.fit, server)
        total, moved = replies.sum("weight")["weight"], replies.sum("correction")
        correction = {name: start + moved[name] / total for name, start in make_neutral().items()}
        return replace(server, knowledge={**server.knowledge, "correction": correction})

    def choose_head(self, server: Server) -> FittedHead | None:
        """Return the heads with the last task's correction; None where there is none."""
        if "correction" not in server.knowledge:
            return None
        weights = correct_heads(server.weights, server.spec, server.knowledge["correction"])
        heads = range(len(server.spec.head_labels))
        weight, bias = (torch.cat([weights[f"heads.{head}.{part}"] for head in heads]) for part in ("weight", "bias"))
        return FittedHead(weight, bias)

    # On a client.

    def join_epochs(self, training: LocalTraining) -> Iterator[Iterator[Batch]]:
        rows, stored, _ = self.hold_out(training.client)
        return iterate_joined_epochs(replace(training.client, rows=rows), stored)

    def hold_out(self, client: Client) -> tuple[Rows, Batch | None, Batch | None]:
        """Return the rows and raw exemplars to train on, and the raw validation set, the same in each round."""
        stored = unpack_samples(client.memory)
        columns = list_task_columns(self.run.make_spec(client.task + 1), self.run.device)
        if stored is None or not list_old_groups(columns):
            return client.rows, stored, None
        classes, random = list_classes(stored), self.run.make_generator("held out", client.task, client.index)
        share = max(1, round(self.settings.held_out * len(stored.labels) / len(classes)))
        old = choose([find_class(stored, *one) for one in classes], share, random)
        labels = torch.from_numpy(client.rows.labels)
        new = choose([(labels == label).nonzero().flatten() for label in labels.unique()], share, random)
        if not len(old) or not len(new):
            return client.rows, stored, None
        held_out = Batch.concatenate([stored.take(old), self.run.batches.read_raw(client.rows.take(new.numpy()))])
        return client.rows.take(leave(new, len(labels)).numpy()), stored.take(leave(old, len(stored.labels))), held_out

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        teacher, (logits, labels) = training.find_added(LastModel), self.score(training, batch)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        if teacher is None or not len(teacher.old):
            return loss
        answers = teacher.answer(batch.inputs)[1][:, teacher.old]
        lam = len(teacher.old) / logits.shape[1]
        distance = soft_cross_entropy(logits[:, teacher.old], answers, self.settings.temperature)
        return lam * distance + (1 - lam) * loss

    def make_fit_payload(self, server: Server) -> Payload:
        return {**self.make_payload(server), "neutral": Part("weights", make_neutral())}

    def make_fit_form(self, task: int, round: int) -> Form:
        return {
            "correction": Part(
                "update",
                make_outline("update", {"scale": (), "shift": ()}, torch.float64).tensors,
                over="weight",
                of="neutral",
            ),
            "weight": make_outline("count", {"weight": ()}, torch.float64),
        }

    @torch.no_grad()
    def answer_fit(self, client: Client, payload: Payload) -> Answer:
        """Return how far a client's correction is from (1, 0), times its weight."""
        network, (_, _, held_out) = self.load_final(client, payload), self.hold_out(client)
        weight, correction = LEAST_WEIGHT, make_neutral()
        if held_out is not None:
            inputs = self.run.batches.prepare_inputs(held_out).inputs
            logits = torch.cat([join_heads(network, network.backbone(part)) for part in inputs.split(EMBED)])
            labels = find_columns(network.spec, held_out.labels, held_out.tasks)
            new = list_task_columns(network.spec, logits.device)[-1]
            with torch.enable_grad():
                fitted = fit_correction(logits, labels, new, self.settings.fit_steps, self.settings.fit_lr)
            correction = dict(zip(correction, fitted, strict=True))
            weight = float(len(labels)) if self.run.params.federation.weighting == "samples" else 1.0
        moved = {name: (correction[name].cpu() - start) * weight for name, start in make_neutral().items()}
        return Answer(
            {"correction": moved, "weight": {"weight": torch.tensor(weight, dtype=torch.float64)}}, client.memory
        )


def make_neutral() -> Correction:
    """Return the correction that changes nothing."""
    return {"scale": torch.tensor(1.0, dtype=torch.float64), "shift": torch.tensor(0.0, dtype=torch.float64)}


def correct_heads(weights: dict[str, Tensor], spec: ModelSpec, correction: Correction) -> dict[str, Tensor]:
    """Return weights whose last task's logits are corrected: its head's, or its rows of the only one."""
    scale, shift = (correction[name].float() for name in ("scale", "shift"))
    head = len(spec.head_labels) - 1
    rows = torch.tensor(spec.tasks[-1]) if spec.head == "growing" else torch.arange(len(spec.tasks[-1]))
    weight, bias = (weights[f"heads.{head}.{part}"] for part in ("weight", "bias"))
    return {
        **weights,
        f"heads.{head}.weight": weight.index_copy(0, rows, scale * weight[rows]),
        f"heads.{head}.bias": bias.index_copy(0, rows, scale * bias[rows] + shift),
    }


def choose(groups: list[Tensor], count: int, random: torch.Generator) -> Tensor:
    """Return so many places of each group, drawn without replacement; one stays behind where there are as many."""
    drawn = [group[torch.randperm(len(group), generator=random)[: min(count, len(group) - 1)]] for group in groups]
    return torch.cat(drawn)


def leave(places: Tensor, count: int) -> Tensor:
    """Return all of so many places but these."""
    return torch.ones(count, dtype=torch.bool).index_fill(0, places, False).nonzero().flatten()
