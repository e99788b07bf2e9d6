"""FedAvg: clients train locally, the server averages what they changed (McMahan et al. 2017, Algorithm 1).

W <- W + eta_g * sum_k n_k (w_k - W) / sum_k n_k. It does nothing against forgetting: other methods change parts of it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fclmodels.backbones.layers.norms import Policy, list_statistics
from fclmodels.backbones.model.network import FROZEN, Network, compute_task_cross_entropy
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import TRAIN, Answer, Exchange, Form, Memory
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.method import Method
from fclmodels.federation.prediction import Predictor, predict_by_heads
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.trained_network import TrainedNetwork
from fclmodels.settings.base import Settings as BaseSettings


class FedAvg(Method):
    """Averages what clients learned; does nothing against forgetting."""

    name = "fedavg"
    paper = "Communication-Efficient Learning of Deep Networks from Decentralized Data"

    class Settings(BaseSettings):
        batch_norm: Policy = Field(
            "average",
            description="running statistics: average over clients; local: each client's own; batch: none; "
            "frozen after task 1",
        )

    # Whether earlier tasks' own heads train too: of methods whose samples or images of these tasks go through them.
    trains_earlier_heads: ClassVar[bool] = False
    uses_frozen_activations: ClassVar[bool] = True

    def __init__(self, settings: BaseSettings, run: Run, network: TrainedNetwork | None = None) -> None:
        if network is None:
            assert isinstance(settings, FedAvg.Settings)
            network = TrainedNetwork(run, settings.batch_norm)
        self.network = network
        super().__init__(settings, run)
        self.declare(Exchange(TRAIN, self.make_payload, self.train, self.make_update_form))

    # On the server.

    def create_server(self) -> Server:
        spec = self.run.make_spec(1)
        if self.run.params.model.keep_frozen:
            from fclmodels.federation.training.frozen_activations import refuse_what_cannot_be_kept

            refuse_what_cannot_be_kept(self, self.networks.load(spec, self.network.make_initial_weights(spec)))
        return Server(spec, self.network.make_initial_weights(spec), networks=self.auxiliaries.create_initial())

    def start_task(self, server: Server, task: int) -> Server:
        spec = self.run.make_spec(task + 1)
        return replace(server, spec=spec, weights=self.network.grow(server.weights, server.spec, spec), task=task)

    def make_payload(self, server: Server) -> Payload:
        undownloaded = self.network.list_undownloaded_names(server.spec)
        weights = {name: tensor for name, tensor in server.weights.items() if name not in undownloaded}
        return {"weights": Part("weights", weights), **self.auxiliaries.make_payload(server.networks)}

    def aggregate(self, server: Server, replies: Replies) -> Server:
        total = replies.sum("weight")["weight"].item()
        # Running statistics are averaged as they are: a step beyond their mean could make a variance negative.
        shares = {"update": self.find_server_lr(server.task) / total, "statistics": 1 / total}
        sums = {"update": self.project(server, self.combine(replies))}
        if "statistics" in replies.parts:
            sums["statistics"] = replies.sum("statistics")
        moved = {
            name: server.weights[name].add(change, alpha=shares[part])
            for part, changes in sums.items()
            for name, change in changes.items()
        }
        networks = server.networks
        if averaged := self.auxiliaries.list_by_place("averaged"):
            updates = {a.update_part: replies.sum(a.update_part) for a in averaged}
            networks = self.auxiliaries.average(networks, updates, shares["update"])
        return replace(server, weights={**server.weights, **moved}, networks=networks)

    def combine(self, replies: Replies) -> dict[str, Tensor]:
        """Return one update from the clients' weighted updates; FedAvg sums them."""
        return replies.sum("update")

    def project(self, server: Server, update: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the part of the clients' summed update that the server applies."""
        return update

    def make_predictor(self, server: Server) -> Predictor:
        if own := self.make_own_model(server):
            return own.load_into(self.build_own_model(own.spec).to(self.run.device))
        network = self.networks.load(server.spec, server.weights)
        return predict_by_heads(network, self.make_router(server), self.find_head(server))

    def list_all_weights(self, server: Server) -> dict[str, Tensor]:
        return self.network.list_all_weights(server.weights)

    # What travels in a round of training.

    def make_update_form(self, task: int, round: int) -> Form:
        """Return the outlines of a client's update, its weight, and changes of running statistics where they travel."""
        network = self.networks.build(self.run.make_spec(task + 1))
        personal = self.network.list_personal_names(network)
        unsent = self.network.list_unsent_names(network, task, round)
        update = {name: p.to("meta") for name, p in self.select_trainable(network, task).items() if name not in unsent}
        parts = {
            "update": Part("update", update, over="weight"),
            "weight": make_outline("count", {"weight": ()}, torch.float64),
        }
        averaged = [n for n in list_statistics(network) - personal if not n.startswith(FROZEN)]
        if averaged:
            statistics = {name: network.get_buffer(name).to("meta") for name in averaged}
            parts["statistics"] = Part("statistics", statistics, over="weight")
        return {**parts, **self.auxiliaries.make_form()}

    def train(self, client: Client, payload: Payload) -> Answer:
        """Return the client's update and running statistics' change, both times its weight, and its memory."""
        training = self.prepare_training(client, payload)
        return self.report(training, payload, training.run())

    def report(self, training: LocalTraining, payload: Payload, loss: float) -> Answer:
        """Return the answer of a client that has just trained, with this mean loss."""
        client, network, start = training.client, training.network, training.start
        update, weight = training.update(), self.compute_client_weight(training)
        averaged = list_statistics(network) - self.network.list_personal_names(network)
        changes = {name: network.get_buffer(name) - start[name] for name in averaged if name in start}
        torch._foreach_mul_([*update.values(), *changes.values()], weight)
        tensors = {
            "update": update,
            "weight": {"weight": torch.tensor(weight, dtype=torch.float64)},
            **({"statistics": changes} if changes else {}),
            **self.auxiliaries.collect_updates(training.networks, payload, weight),
            **self.make_further_parts(training, payload),
        }
        return Answer(tensors, self.remember(training), loss, len(client.rows))

    def make_further_parts(self, training: LocalTraining, payload: Payload) -> Mapping[str, Mapping[str, Tensor]]:
        """Return further parts of the answer of a client that has just trained, which a method's form declares."""
        return {}

    # On a client.

    def compute_client_weight(self, training: LocalTraining) -> float:
        """Return the weight in the average of a client that has just trained."""
        return training.client.weight

    def remember(self, training: LocalTraining) -> Memory:
        """Return the memory of a client that has just trained, with the tensors that stay with it."""
        network, memory = training.network, training.client.memory
        state = network.state_dict()
        personal = {name: state[name].clone() for name in sorted(self.network.list_personal_names(network))}
        further = {
            **({"personal": personal} if personal else {}),
            **self.auxiliaries.make_memory(training.networks),
            **(training.collect_optimiser_memory() if self.keeps_optimisers else {}),
        }
        return {**memory, **further} if further else memory

    def join_own_weights(self, client: Client, payload: Payload) -> dict[str, Tensor]:
        """Return the weights that a client was sent, with those that stay with it.

        Of a head that has grown since the client trained it, the new rows are the server's.
        """
        weights = {**payload["weights"].tensors, **self.network.draw_undownloaded(self.run.make_spec(client.task + 1))}
        own: dict[str, Tensor] = client.memory.get("personal", {})
        return {**weights, **{name: join_new_rows(tensor, weights[name]) for name, tensor in own.items()}}

    def prepare_training(self, client: Client, payload: Payload) -> LocalTraining:
        """Return the local training of a client from what it has downloaded, ready to run."""
        start = self.join_own_weights(client, payload)
        network = self.networks.load(self.run.make_spec(client.task + 1), start)
        self.set_modes(network, client.task)
        training = LocalTraining(self, client, network, start)
        training.networks = self.auxiliaries.start(client, payload)
        self.start_training(training, payload)
        return training

    @property
    def is_personal(self) -> bool:
        return self.network.is_personal

    def make_client_predictor(self, client: Client, payload: Payload) -> Predictor:
        weights = self.join_own_weights(client, payload)
        return predict_by_heads(self.networks.load(self.run.make_spec(client.task + 1), weights))

    def prepare_network(self, network: nn.Module) -> None:
        self.network.prepare(network)

    def freezes(self, task: int) -> bool:
        """Return whether what settings freeze, after the first task or from the start, is frozen in this one."""
        return task >= self.run.params.model.freeze_after

    def set_modes(self, network: Network, task: int) -> None:
        self.network.set_modes(network, task, self.freezes(task))

    def select_trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        parameters = self.network.select_trainable(network, task, self.freezes(task))
        heads = dict(network.heads.named_parameters("heads")) if self.trains_earlier_heads else {}
        return {**parameters, **heads}

    # The loss.

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        features = training.compute_features(batch)
        return self.compute_cross_entropy(training.network, features, batch.labels, training.client.task)

    def compute_cross_entropy(self, network: Network, features: Tensor, labels: Tensor, task: int) -> Tensor:
        """Return the cross entropy over all classes so far, or the task's (own head, or `model.loss_over: task`)."""
        if self.loss_is_over_seen(network.spec):
            return cross_entropy(network.compute_logits(features), labels)
        return compute_task_cross_entropy(network, features, labels, task)

    def loss_is_over_seen(self, spec: ModelSpec) -> bool:
        return spec.head == "growing" and self.run.params.model.loss_over == "seen"

    def compute_cross_entropy_by_task(
        self, network: Network, features: Tensor, labels: Tensor, tasks: Tensor
    ) -> Tensor:
        """Return the mean loss over samples of several tasks, each in its own task."""
        present = tasks.unique().tolist()
        members = [tasks == task for task in present]
        losses = [
            self.compute_cross_entropy(network, features[mine], labels[mine], task) * mine.sum()
            for task, mine in zip(present, members, strict=True)
        ]
        return sum(losses) / len(labels)


def join_new_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """Return these first rows of some weights with the rest of them."""
    return rows if rows.shape == weights.shape else torch.cat([rows.to(weights), weights[len(rows) :]])
