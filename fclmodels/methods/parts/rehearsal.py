"""Rehearsal: one class-balanced memory of exemplars joins each local epoch, and the last task's model is a teacher.

A task's clients choose exemplars when it has ended, by the final global model's features (exemplar_memory.py), and
train on the shuffled union of new rows and exemplars from then on. How the published methods were federated, nothing
says: that each client has a memory of its own, and that FedAvg's weights stay the numbers of new rows, is our choice.

All heads' logits stand side by side, so that tasks with heads of their own have the columns of a head that grows. The
present task's columns are new, all others old: where tasks share all classes none is old, and nothing is distilled.
"""

from collections.abc import Iterator, Sequence

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from fclmodels.backbones.layers.norms import SharedPolicy
from fclmodels.backbones.model.network import Network
from fclmodels.backbones.model.spec import ModelSpec, get_task_columns, to_local_labels
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Payload, make_outline
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.federation.training.network_cache import NetworkCache
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.anchor import anchor_payload, anchor_to
from fclmodels.methods.parts.coreset_memory import embed
from fclmodels.methods.parts.exemplar_memory import ExemplarMemory, ExemplarSettings, iterate_joined_epochs
from fclmodels.methods.parts.replay_memory import unpack_samples
from fclmodels.numerics.prototypes import moments


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
    """FedAvg whose clients rehearse exemplars of earlier classes beside the last task's model."""

    class Settings(FedAvg.Settings, ExemplarSettings):
        batch_norm: SharedPolicy = Field(
            "average", description="running statistics: average over clients; batch: none; frozen after task 1"
        )

        exemplars: PositiveInt = Field(
            2000, le=1_000_000, description="samples that each client keeps, of all classes or of each (see budget)"
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        if run.spec(1).head == "growing" and not self.loss_is_over_seen(run.spec(1)):
            raise UserError(f"methods.{self.name}: its loss is over all classes so far. Use model.loss_over: seen.")
        self.memory = ExemplarMemory(settings)
        self.teachers = NetworkCache(run.device, self.prepare_network)
        self.select = self.declare(Exchange("select", self.payload, self.select_exemplars, self.select_form))

    def start_task(self, server: Server, task: int) -> Server:
        return anchor_to(super().start_task(server, task), server)

    def payload(self, server: Server) -> Payload:
        return {**super().payload(server), **anchor_payload(server)}

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask(self.select, server)
        return server

    # On a client.

    def select_form(self, task: int, round: int) -> Form:
        """Return the outlines of what a client tells when it has chosen its exemplars: nothing."""
        return {}

    def select_exemplars(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with exemplars of the task that has ended; the answer itself is empty."""
        return Answer({}, self.memory.add_task(client, self.load_final(client, payload)))

    def load_final(self, client: Client, payload: Payload) -> Network:
        """Return the global model that a client was sent, in evaluation mode."""
        return self.networks.load(self.run.spec(client.task + 1), self.client_weights(client, payload)).eval()

    def moments_form(self, task: int, round: int) -> Form:
        """Return the outlines of a client's moments of its classes' features."""
        network = self.networks.of(self.run.spec(task + 1))
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
            last = self.teachers.load(self.run.spec(training.client.task), payload["anchor"].tensors)
            training.add(LastModel(last, list_task_columns(training.network.spec, self.run.device)[-1]))

    def epochs(self, training: LocalTraining) -> Iterator[Iterator[Batch]]:
        return iterate_joined_epochs(training.client, unpack_samples(training.client.memory))

    def score(self, training: LocalTraining, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return all heads' logits [B, columns] of a batch, and its labels [B] as columns."""
        network = training.network
        labels = find_columns(network.spec, batch.labels, batch.tasks)
        return join_heads(network, training.features(batch)), labels

    def trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        """Return earlier tasks' own heads too: exemplars go through them."""
        return {**super().trainable(network, task), **dict(network.heads.named_parameters("heads"))}


def join_heads(network: Network, features: Tensor) -> Tensor:
    """Return the logits [B, columns] of all heads side by side, in the order of `Columns.of`."""
    return torch.cat([head(features) for head in network.heads], dim=1)


def count_columns(spec: ModelSpec) -> int:
    """Return the number of logits of all heads."""
    return sum(len(labels) for labels in spec.head_labels)


def list_task_columns(spec: ModelSpec, device: torch.device) -> list[Tensor]:
    """Return the columns of each task's classes."""
    if spec.head == "growing":
        return [get_task_columns(spec, task, device) for task in range(len(spec.tasks))]
    sizes = [len(classes) for classes in spec.tasks]
    return list(torch.arange(sum(sizes), device=device).split(sizes))


def find_columns(spec: ModelSpec, labels: Tensor, tasks: Tensor) -> Tensor:
    """Return the column [B] of each sample's class among all heads' logits."""
    if spec.head == "growing":
        return labels
    columns = labels
    for task, own in enumerate(list_task_columns(spec, labels.device)):
        columns = torch.where(tasks == task, own[0] + to_local_labels(spec, task, labels), columns)
    return columns


def list_old_groups(columns: Sequence[Tensor]) -> list[Tensor]:
    """Return the columns of each task but the last, without those that the last one has too."""
    *old, new = columns
    return [group[~torch.isin(group, new)] for group in old if not torch.isin(group, new).all()]
