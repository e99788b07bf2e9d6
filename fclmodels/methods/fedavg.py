"""FedAvg: clients train locally, the server averages what they changed (McMahan et al. 2017, Algorithm 1).

W <- W + eta_g * sum_k n_k (w_k - W) / sum_k n_k. It does nothing against forgetting: it is what the others bend.
"""

from dataclasses import replace

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fclmodels.backbones.batch_norm import Policy, drop_statistics, fix_statistics
from fclmodels.backbones.heads import grow
from fclmodels.backbones.network import FROZEN, Network, build, frozen_names
from fclmodels.backbones.norms import statistics_names
from fclmodels.backbones.spec import ModelSpec, local_labels
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.executor import TRAIN
from fclmodels.federation.kept import refuse_what_cannot_be_kept
from fclmodels.federation.local import LocalTraining
from fclmodels.federation.messages import Part, Payload, Reply, outline
from fclmodels.federation.prediction import Prediction
from fclmodels.federation.replies import Replies
from fclmodels.federation.server import Server
from fclmodels.methods.base import Memory, Method, Predictor
from fclmodels.settings import Settings as BaseSettings


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

    settings: Settings

    def setup(self) -> Server:
        spec = self.run.spec(1)
        if self.run.params.model.keep_frozen:
            refuse_what_cannot_be_kept(self, self.networks.load(spec, self.built(spec)))
        return Server(spec, self.built(spec))

    def built(self, spec: ModelSpec) -> dict[str, Tensor]:
        """Initial weights, drawn by the run's seed or read from `model.weights`."""
        network = build(spec, self.run.generator("init"))
        self.prepare(network)
        return dict(network.state_dict())

    def start_task(self, server: Server, task: int) -> Server:
        spec = self.run.spec(task + 1)
        weights = grow(server.weights, server.spec, spec, self.run.generator("init"))
        return replace(server, spec=spec, weights=weights, task=task)

    def sends(self, task: int, round: int) -> dict[str, dict[str, Part]]:
        weight = outline("count", {"weight": ()}, torch.float64)
        parts = {"update": Part("update", self.updated(task), over="weight"), "weight": weight}
        network = self.networks.of(self.run.spec(task + 1))
        measured = {n: network.get_buffer(n).to("meta") for n in statistics_names(network) if not n.startswith(FROZEN)}
        if measured and self.settings.batch_norm != "local":
            parts["statistics"] = Part("statistics", measured, over="weight")
        return {TRAIN: parts}

    def payload(self, server: Server) -> Payload:
        return {"weights": Part("weights", server.weights)}

    def aggregate(self, server: Server, replies: Replies) -> Server:
        total = replies.sum("weight")["weight"].item()
        # Running statistics are averaged as they are: a step beyond their mean could make a variance negative.
        shares = {"update": self.server_lr(server.task) / total, "statistics": 1 / total}
        sums = {"update": self.admitted(server, self.gathered(replies))}
        if "statistics" in replies.parts:
            sums["statistics"] = replies.sum("statistics")
        moved = {
            name: server.weights[name].add(change, alpha=shares[part])
            for part, changes in sums.items()
            for name, change in changes.items()
        }
        return replace(server, weights={**server.weights, **moved})

    def gathered(self, replies: Replies) -> dict[str, Tensor]:
        """What the clients' weighted updates come to; FedAvg sums them."""
        return replies.sum("update")

    def admitted(self, server: Server, update: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the server lets through of the clients' summed update."""
        return update

    def predictor(self, server: Server) -> Predictor:
        return self.predict_with(self.networks.load(server.spec, server.weights))

    def train(self, client: Client, payload: Payload) -> tuple[Reply, Memory]:
        training = self.prepared(client, payload)
        loss, network, start = training.run(), training.network, training.start
        update, weight, own = training.update(), self.client_weight(client), self.own(client, network)
        measured = statistics_names(network) - own.get("statistics", {}).keys()
        changes = {name: network.get_buffer(name) - start[name] for name in measured if name in start}
        torch._foreach_mul_([*update.values(), *changes.values()], weight)
        parts = {
            "update": Part("update", update, over="weight"),
            "weight": Part("count", {"weight": torch.tensor(weight, dtype=torch.float64)}),
        }
        if changes:
            parts["statistics"] = Part("statistics", changes, over="weight")
        parts |= self.further_parts(client, payload, network)
        memory = {**client.memory, **own} if own else client.memory
        return Reply(parts, loss, len(client.rows), client.round), memory

    def client_weight(self, client: Client) -> float:
        """What a client counts in the average."""
        return client.weight

    def own(self, client: Client, network: Network) -> Memory:
        """What stays with a client that has just trained this network: running statistics, where they are local."""
        names = statistics_names(network) if self.settings.batch_norm == "local" else set()
        return {"statistics": {name: network.get_buffer(name).clone() for name in names}} if names else {}

    def whole(self, client: Client, payload: Payload) -> dict[str, Tensor]:
        """The weights that it was sent with those that stay with it."""
        return {**payload["weights"].tensors, **client.memory.get("statistics", {})}

    def prepared(self, client: Client, payload: Payload) -> LocalTraining:
        """The local training of a client from what it has downloaded, ready to run."""
        start = self.whole(client, payload)
        network = self.networks.load(self.run.spec(client.task + 1), start)
        self.set_modes(network, client.task)
        return self.training(client, payload, network, start)

    def training(self, client: Client, payload: Payload, network: Network, start: dict[str, Tensor]) -> LocalTraining:
        """The local training of a client that has downloaded this payload."""
        return LocalTraining(self, client, network, start)

    def further_parts(self, client: Client, payload: Payload, network: Network) -> dict[str, Part]:
        """What a method adds to the reply of a client that has just trained this network."""
        return {}

    @property
    def personal(self) -> bool:
        return self.settings.batch_norm == "local"

    def client_predictor(self, client: Client, payload: Payload) -> Predictor:
        """The global model with what is the client's own."""
        return self.predict_with(self.networks.load(self.run.spec(client.task + 1), self.whole(client, payload)))

    def predict_with(self, network: Network) -> Predictor:
        network.eval()

        def predict(inputs: Tensor) -> Prediction:
            features = network.backbone(inputs)
            return Prediction(torch.cat([head(features) for head in network.heads], dim=1))

        return predict

    def freezes(self, task: int) -> bool:
        """Whether what settings freeze after the first task is frozen in this one."""
        return task > 0

    def set_modes(self, network: Network, task: int) -> None:
        """Training mode, but for what is frozen."""
        network.train()
        if self.freezes(task):
            for block in self.run.params.model.freeze:
                network.backbone.get_submodule(block).eval()
            if self.settings.batch_norm == "frozen":
                fix_statistics(network)

    def trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        """All but the frozen blocks and other tasks' own heads."""
        frozen = frozen_names(network.spec, network) if self.freezes(task) else set()
        prefixes = ("backbone.", f"heads.{task}." if network.spec.head == "per-task" else "heads.")
        return {n: p for n, p in network.named_parameters() if n.startswith(prefixes) and n not in frozen}

    def loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        return self.cross_entropy(training.network, training.features(batch), batch.labels, training.client.task)

    @property
    def loss_is_of_features(self) -> bool:
        """Whether a step looks at no sample but through the features of its batch."""
        return type(self).loss is FedAvg.loss

    def cross_entropy(self, network: Network, features: Tensor, labels: Tensor, task: int) -> Tensor:
        """Over all classes seen, or over the task's (its own head, or `model.loss_over: task`)."""
        if self.loss_is_over_seen(network.spec):
            return cross_entropy(network.logits(features), labels)
        return cross_entropy(network.logits(features, task), local_labels(network.spec, task, labels))

    def loss_is_over_seen(self, spec: ModelSpec) -> bool:
        return spec.head == "growing" and self.run.params.model.loss_over == "seen"

    def cross_entropy_by_task(self, network: Network, features: Tensor, labels: Tensor, tasks: Tensor) -> Tensor:
        """Mean over samples of several tasks of each one's loss in its own task."""
        present = tasks.unique().tolist()
        members = [tasks == task for task in present]
        losses = [
            self.cross_entropy(network, features[mine], labels[mine], task) * mine.sum()
            for task, mine in zip(present, members, strict=True)
        ]
        return sum(losses) / len(labels)

    def prepare(self, network: nn.Module) -> None:
        if self.settings.batch_norm == "batch":
            drop_statistics(network)
