"""Local projected descent: no step of any client acts on what earlier tasks' layers saw (FedProTIP eq. 4 and 5; GPM).

With SGD a step is a sum of gradients and of weight decay, so projecting these projects the step: an optimiser is new
in each round, with empty momentum, and only W - C decays, where C = W Phi Phi^T is the same throughout a task. What
Adam proposes is no such sum: there the whole step is projected.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fclmodels.backbones.batch_norm import SharedPolicy
from fclmodels.backbones.network import Network
from fclmodels.backbones.projection import Projection
from fclmodels.backbones.spec import local_labels
from fclmodels.federation.client import Client
from fclmodels.federation.local import LocalTraining
from fclmodels.federation.messages import Payload
from fclmodels.federation.run import Run
from fclmodels.federation.server import Server
from fclmodels.methods.subspaces import Bases, Subspaces
from fclmodels.settings import Settings as BaseSettings


class Projected(Subspaces):
    class Settings(Subspaces.Settings):
        batch_norm: SharedPolicy = Field(
            "frozen", description="running statistics: average over clients; batch: none; frozen after task 1"
        )
        vectors: Literal["frozen", "trained"] = Field(
            "frozen", description="the backbone's biases and norms after task 1, which no projection protects"
        )

    settings: Settings

    def __init__(self, settings: BaseSettings, run: Run) -> None:
        super().__init__(settings, run)
        if run.params.optimizer.kind != "sgd":
            self.step = projected_step

    def spans(self, client: Client, payload: Payload) -> dict[str, Bases]:
        """What the client's steps are kept clear of: `bases` of some layers, `complements` of others."""
        raise NotImplementedError

    def training(
        self, client: Client, payload: Payload, network: Network, start: dict[str, Tensor]
    ) -> "ProjectedTraining":
        projection = Projection(self.layers(network), **self.spans(client, payload))
        return ProjectedTraining(self, client, network, start, projection)

    def gradient(self, training: LocalTraining) -> None:
        if self.step is None:
            assert isinstance(training, ProjectedTraining)
            training.project_gradients()

    def trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        parameters = super().trainable(network, task)
        if not self.vectors_are_frozen(task):
            return parameters
        return {name: p for name, p in parameters.items() if p.ndim > 1 or name.startswith("heads.")}

    def vectors_are_frozen(self, task: int) -> bool:
        return self.freezes(task) and self.settings.vectors == "frozen"

    def cross_entropy(self, network: Network, features: Tensor, labels: Tensor, task: int) -> Tensor:
        """Over the task's classes only, whatever `model.loss_over` says: the other rows of the head are frozen."""
        return cross_entropy(network.logits(features, task), local_labels(network.spec, task, labels))

    def admissible(self, server: Server, changes: dict[str, Tensor]) -> dict[str, Tensor]:
        """Nothing of frozen rows either. Where each client has spans of its own, what none of them is kept clear of."""
        rows = self.frozen_rows(self.networks.load(server.spec, server.weights), server.task)
        held = {name: changes[name].index_fill(0, rows[name].cpu(), 0) for name in rows if name in changes}
        return super().admissible(server, {**changes, **held})

    def frozen_rows(self, network: Network, task: int) -> dict[str, Tensor]:
        """Of a head that tasks share, the rows that stay as they are: those of classes that this task does not have.

        Where its weight is protected, the biases of classes that come again are frozen like the backbone's.
        """
        spec = network.spec
        if spec.head == "per-task":
            return {}
        absent = set(range(spec.seen)) - set(spec.tasks[task])
        rows = {"heads.0.weight": absent, "heads.0.bias": absent}
        if self.vectors_are_frozen(task) and "heads.0" in self.layers(network):
            rows["heads.0.bias"] = absent.union(*spec.tasks[:task])
        return {name: torch.tensor(sorted(labels), device=self.run.device) for name, labels in rows.items() if labels}


class ProjectedTraining(LocalTraining):
    """A client's training whose steps leave the protected spans and the frozen rows of the head alone."""

    method: Projected

    def __init__(
        self, method: Projected, client: Client, network: Network, start: dict[str, Tensor], projection: Projection
    ) -> None:
        super().__init__(method, client, network, start)
        self.projection = projection
        self.frozen_rows = method.frozen_rows(network, client.task)
        self.decay = client.run.params.optimizer.weight_decay
        self.kept = self._kept() if self.decay else {}

    def run(self) -> float:
        if self.method.step is not None:
            return super().run()
        with self.projection.within(self.network, self.client.run.params.federation.batch_size):
            return super().run()

    def project_gradients(self) -> None:
        """Project, and take out of the optimiser's decay what must not decay."""
        gradients = self.gradients
        self.projection.gradients(gradients)
        self.hold_rows(gradients)
        decaying = [name for name in self.kept if name in gradients]
        if decaying:
            kept = [self.kept[name] for name in decaying]
            torch._foreach_sub_([gradients[name] for name in decaying], kept, alpha=self.decay)

    def hold_rows(self, changes: dict[str, Tensor]) -> None:
        for name, rows in self.frozen_rows.items():
            if name in changes:
                changes[name].index_fill_(0, rows, 0)

    def _kept(self) -> dict[str, Tensor]:
        """The part of each weight that stays as it is: C = W Phi Phi^T, and all of a frozen row."""
        kept = self.projection.protected_part(self.start)
        for name, rows in self.frozen_rows.items():
            kept.setdefault(name, torch.zeros_like(self.start[name]))[rows] = self.start[name][rows]
        return kept


def projected_step(training: LocalTraining, steps: dict[str, Tensor]) -> dict[str, Tensor]:
    """The optimiser's whole step without what acts on the spans."""
    assert isinstance(training, ProjectedTraining)
    steps = training.projection.steps(steps)
    training.hold_rows(steps)
    return steps
