"""Rehearsal: one class-balanced memory of exemplars joins each local epoch, and the last task's model is a teacher.

A task's clients choose exemplars when it has ended, by the final global model's features (exemplar_memory.py), and
train on the shuffled union of new rows and exemplars from then on. How the published methods were federated, nothing
says: that each client has a memory of its own, and that FedAvg's weights stay the numbers of new rows, is our choice.

Where `answers_by_means`, the nearest mean of exemplars answers: of features of length 1 on the final model (Rebuffi et
al. 2017, Algorithm 1). After a task all clients of the run, also those without data of it, send the sum of these
features and their number by class; the server scales each class's sum to length 1. That all of them speak is ours.

All heads' logits stand side by side, so that tasks with heads of their own have the columns of a head that grows. The
present task's columns are new, all others old: where tasks share all classes none is old, and nothing is distilled.

knowledge: `anchor`; `means` {weight [C, F], bias [C]} as a head, until the next task starts.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from fclmodels.backbones.layers.norms import SharedPolicy
from fclmodels.backbones.model.network import Network, NetworkCache
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form, Memory
from fclmodels.federation.messages import Payload, make_outline
from fclmodels.federation.prediction import FittedHead
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.anchor import anchor_payload, anchor_to
from fclmodels.methods.parts.coreset_memory import embed
from fclmodels.methods.parts.exemplar_memory import ExemplarMemory, ExemplarSettings, iterate_joined_epochs
from fclmodels.methods.parts.joined_heads import count_columns, find_columns, join_heads, list_task_columns
from fclmodels.methods.parts.replay_memory import unpack_samples
from fclmodels.methods.parts.stored_means import fit_directions, outline_sums, sum_features
from fclmodels.numerics.exemplar_losses import distil_targets
from fclmodels.numerics.prototypes import moments

MEANS = "means"


class LastModel:
    """The last task's final model in evaluation mode, in one training."""

    def __init__(self, network: Network, new: Tensor) -> None:
        self.network = network.eval()
        columns = count_columns(network.spec)
        self.old = torch.tensor([c for c in range(columns) if c not in new.tolist()], dtype=torch.int64).to(new.device)

    @torch.no_grad()
    def answer(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [B, F] and all logits [B, columns of its tasks]."""
        features = self.network.backbone(inputs)
        return features, join_heads(self.network, features)


class Rehearsed(FedAvg):
    """FedAvg whose clients rehearse exemplars of earlier classes beside the last task's model.

    Below its hooks stand those that methods have of their own: `enter_task`, `add_payload`, `end_rounds`, `leave_task`,
    `choose_head`, `note`, `equip`, `join_epochs`.
    """

    class Settings(FedAvg.Settings, ExemplarSettings):
        batch_norm: SharedPolicy = Field(
            "average", description="running statistics: average over clients; batch: none; frozen after task 1"
        )

        exemplars: PositiveInt = Field(
            2000, le=1_000_000, description="samples that each client keeps, of all classes or of each (see budget)"
        )

    settings: Settings
    trains_earlier_heads = True
    # Whether the nearest mean of exemplars answers in the head's place.
    answers_by_means: ClassVar[bool] = False

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        if run.make_spec(1).head == "growing" and not self.loss_is_over_seen(run.make_spec(1)):
            raise UserError(f"methods.{self.name}: its loss is over all classes so far. Use model.loss_over: seen.")
        self.memory = ExemplarMemory(settings)
        self.teachers = NetworkCache(run.device, self.prepare_network)
        self.select = self.declare(Exchange("select", self.make_payload, self.select_exemplars, self.make_select_form))

    # On the server.

    def start_task(self, server: Server, task: int) -> Server:
        started = anchor_to(super().start_task(server, task), server)
        knowledge = {name: value for name, value in started.knowledge.items() if name != MEANS}
        return self.enter_task(replace(started, knowledge=knowledge), server)

    def enter_task(self, server: Server, last: Server) -> Server:
        """Return the server that starts a task after the last one's."""
        return server

    def make_payload(self, server: Server) -> Payload:
        return {**super().make_payload(server), **anchor_payload(server), **self.add_payload(server)}

    def add_payload(self, server: Server) -> Payload:
        """Return what clients download besides the model and the last task's."""
        return {}

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        ended = self.end_rounds(server, cohort)
        if self.answers_by_means:
            replies = cohort.ask(self.select, ended, clients=cohort.everyone)
            means = fit_directions(replies.sum(MEANS), replies.compute_noise(MEANS))
            ended = replace(ended, knowledge={**ended.knowledge, MEANS: means})
        else:
            cohort.ask(self.select, ended)
        return self.leave_task(ended, cohort)

    def end_rounds(self, server: Server, cohort: Cohort) -> Server:
        """Return the server after the last round, before clients choose exemplars."""
        return server

    def leave_task(self, server: Server, cohort: Cohort) -> Server:
        """Return the server after clients have chosen exemplars."""
        return server

    def find_head(self, server: Server) -> FittedHead | None:
        """Return the head that answers in the network's place; None while a task is learned."""
        return self.choose_head(server)

    def choose_head(self, server: Server) -> FittedHead | None:
        """Return the means of exemplars, where these answer."""
        return FittedHead(**server.knowledge[MEANS]) if MEANS in server.knowledge else None

    # On a client.

    def make_select_form(self, task: int, round: int) -> Form:
        """Return the outlines of what a client tells when it has chosen its exemplars."""
        network = self.networks.build(self.run.make_spec(task + 1))
        return {MEANS: outline_sums(network, self.memory.limit(network.spec))} if self.answers_by_means else {}

    @torch.no_grad()
    def select_exemplars(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with exemplars of the task that has ended, and where means answer their sums by class."""
        network = self.load_final(client, payload)
        memory = self.note(client, network, self.memory.add_task(client, network))
        if not self.answers_by_means:
            return Answer({}, memory)
        return Answer({MEANS: sum_features(client, network, memory)}, memory)

    def note(self, client: Client, network: Network, memory: Memory) -> Memory:
        """Return the memory with what a client notes besides when a task has ended."""
        return memory

    def load_final(self, client: Client, payload: Payload) -> Network:
        """Return the global model that a client was sent, in evaluation mode."""
        return self.networks.load(self.run.make_spec(client.task + 1), self.join_own_weights(client, payload)).eval()

    def make_moments_form(self, task: int, round: int) -> Form:
        """Return the outlines of a client's moments of its classes' features."""
        network = self.networks.build(self.run.make_spec(task + 1))
        columns, features = count_columns(network.spec), network.backbone.features
        shapes = {"weight": (columns,), "sum": (columns, features), "square": (columns, features)}
        return {"moments": make_outline("prototype", shapes, torch.float64)}

    @torch.no_grad()
    def sum_moments(self, client: Client, payload: Payload) -> Answer:
        """Return the moments of a client's classes on the model that it was sent."""
        network, samples = self.load_final(client, payload), self.run.batches.read_raw(client.rows)
        labels = find_columns(network.spec, samples.labels, samples.tasks).cpu()
        features = self.scale_features(embed(client, network, samples))
        return Answer({"moments": moments(features, labels, count_columns(network.spec))}, client.memory)

    def scale_features(self, features: Tensor) -> Tensor:
        """Return features [n, F] as moments are taken of them."""
        return features

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        if "anchor" in payload:
            last = self.teachers.load(self.run.make_spec(training.client.task), payload["anchor"].tensors)
            training.add(LastModel(last, list_task_columns(training.network.spec, self.run.device)[-1]))
        self.equip(training, payload)

    def equip(self, training: LocalTraining, payload: Payload) -> None:
        """Give a client's training what it needs besides the teacher."""

    def yield_epochs(self, training: LocalTraining) -> Iterator[Iterator[Batch]]:
        return self.join_epochs(training)

    def join_epochs(self, training: LocalTraining) -> Iterator[Iterator[Batch]]:
        """Return the round's local epochs over rows and exemplars."""
        return iterate_joined_epochs(training.client, unpack_samples(training.client.memory))

    def score(self, training: LocalTraining, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return all heads' logits [B, columns] of a batch, and its labels [B] as columns."""
        network = training.network
        labels = find_columns(network.spec, batch.labels, batch.tasks)
        return join_heads(network, training.compute_features(batch)), labels

    def select_trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        return self.select_parameters(super().select_trainable(network, task))

    def select_parameters(self, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return those of the network's parameters that train."""
        return parameters


def find_targets(teacher: LastModel | None, logits: Tensor, labels: Tensor, inputs: Tensor) -> Tensor:
    """Return targets [B, columns] of binary losses: labels, and in old columns the teacher's probabilities."""
    if teacher is None:
        return distil_targets(labels, logits.shape[1], labels[:0], None)
    return distil_targets(labels, logits.shape[1], teacher.old, teacher.answer(inputs)[1][:, teacher.old])
