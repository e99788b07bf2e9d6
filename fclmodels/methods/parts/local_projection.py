"""Local projected descent: no client's step acts on the layer inputs of earlier tasks (FedProTIP eq. 4 and 5; GPM).

With SGD a step is a sum of gradients and of weight decay, so projecting these projects the step: an optimiser is new
in each round, with empty momentum, and only W - C decays, where C = W Phi Phi^T is the same throughout a task; in the
release all of W does (`decay: all`). A step of Adam is no such sum: there the step itself is projected.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fclmodels.backbones.inputs.gradient_projection import Projection
from fclmodels.backbones.layers.norms import SharedPolicy
from fclmodels.backbones.model.network import Network
from fclmodels.errors import UserError
from fclmodels.federation.method import Method
from fclmodels.federation.run_context import Run
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.protected_subspace import Bases, ProtectedSubspace
from fclmodels.settings.base import Settings as BaseSettings


class ProjectionSettings(BaseSettings):
    batch_norm: SharedPolicy = Field(
        "frozen", description="running statistics: average over clients; batch: none; frozen after task 1"
    )
    vectors: Literal["frozen", "trained"] = Field(
        "frozen", description="the backbone's biases and norms after task 1, which no projection protects"
    )
    decay: Literal["outside", "all"] = Field(
        "outside",
        description="weight decay acts outside of the protected span alone (Lemma 2); all: on the span, and on frozen "
        "biases and norms, too (release)",
    )


class LocalProjection:
    """Keeps every local step clear of protected spans, of frozen rows of the head, and of biases and norms.

    A method that has it takes `project_gradients` or `project_optimiser_step` as its hook (`bend`).
    """

    def __init__(self, settings: ProjectionSettings, run: Run, subspace: ProtectedSubspace) -> None:
        self.settings = settings
        self.run = run
        self.subspace = subspace
        self.projects_whole_steps = run.params.optimizer.kind != "sgd"
        if self.decays_all and self.projects_whole_steps:
            raise UserError(
                f"methods.{subspace.method}.decay: all needs optimizer.kind: sgd. Steps of {run.params.optimizer.kind} "
                "are projected with their decay."
            )

    def bend(self, method: Method) -> None:
        """Put the projection into a method's hook: of gradients for SGD, else of whole steps."""
        if self.projects_whole_steps:
            method.step = project_optimiser_step
        else:
            method.change_gradients = project_gradients  # type: ignore[method-assign]

    @property
    def decays_all(self) -> bool:
        return self.settings.decay == "all"

    def freezes_vectors(self, task: int) -> bool:
        return task > 0 and self.settings.vectors == "frozen"

    def select_trainable(self, parameters: dict[str, nn.Parameter], task: int) -> dict[str, nn.Parameter]:
        """Return these parameters without those that no projection protects, unless they still decay."""
        if not self.freezes_vectors(task) or self.decays_all:
            return parameters
        return {name: p for name, p in parameters.items() if not is_vector(name, p)}

    def start(self, training: LocalTraining, spans: dict[str, Bases]) -> None:
        """Keep a training clear of these spans: `bases` of some layers, `complements` of others."""
        projection = Projection(self.subspace.list_layers(training.network), **spans)
        task = training.client.task
        vectors = [name for name, p in training.parameters.items() if is_vector(name, p)]
        still = vectors if self.freezes_vectors(task) else []
        rows = self.find_frozen_rows(training.network, task)
        training.add(ProjectedSteps(training, projection, rows, still, self.decays_all))
        if not self.projects_whole_steps:
            training.enclose(projection.project_in_backward(training.network, self.run.params.federation.batch_size))

    def remove_frozen_rows(self, network: Network, task: int, changes: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return changes of weights, by name, that are 0 in frozen rows."""
        rows = self.find_frozen_rows(network, task)
        return {n: c.index_fill(0, rows[n].cpu(), 0) if n in rows else c for n, c in changes.items()}

    def find_frozen_rows(self, network: Network, task: int) -> dict[str, Tensor]:
        """Return the rows of classes that this task does not have, in a head that tasks share, by parameter.

        Where its weight is protected, the biases of classes that come again are frozen like the backbone's.
        """
        spec = network.spec
        if spec.head == "per-task":
            return {}
        absent = set(range(spec.label_count)) - set(spec.tasks[task])
        rows = {"heads.0.weight": absent, "heads.0.bias": absent}
        if self.freezes_vectors(task) and "heads.0" in self.subspace.list_layers(network):
            rows["heads.0.bias"] = absent.union(*spec.tasks[:task])
        return {name: torch.tensor(sorted(labels), device=self.run.device) for name, labels in rows.items() if labels}


class ProjectedSteps:
    """The projection of one client's training, with the part of each weight that must not decay."""

    def __init__(
        self,
        training: LocalTraining,
        projection: Projection,
        frozen_rows: dict[str, Tensor],
        still: list[str],
        decays_all: bool,
    ) -> None:
        self.projection = projection
        self.frozen_rows = frozen_rows
        self.still = still  # biases and norms that no gradient moves; decay does
        self.decays_all = decays_all
        self.decay = training.client.run.params.optimizer.weight_decay
        self.fixed = self._compute_fixed_part(training.start) if self.decay else {}

    def hold_rows(self, changes: dict[str, Tensor]) -> None:
        """Set changes of frozen rows to 0, in place."""
        for name, rows in self.frozen_rows.items():
            if name in changes:
                changes[name].index_fill_(0, rows, 0)

    def _compute_fixed_part(self, start: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the part of each weight that does not decay: C = W Phi Phi^T, and all of a frozen row."""
        fixed = {} if self.decays_all else self.projection.compute_protected_part(start)
        for name, rows in self.frozen_rows.items():
            fixed.setdefault(name, torch.zeros_like(start[name]))[rows] = start[name][rows]
        return fixed


def is_vector(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a bias or a norm of the backbone."""
    return parameter.ndim == 1 and not name.startswith("heads.")


def project_gradients(training: LocalTraining) -> None:
    """Project gradients in place, and keep protected parts of weights from decaying: `change_gradients` for SGD."""
    projected, gradients = training.find_added(ProjectedSteps), training.gradients
    assert projected is not None
    projected.projection.project_gradients(gradients)
    projected.hold_rows(gradients)
    for name in projected.still:
        gradients[name].zero_()
    decaying = [name for name in projected.fixed if name in gradients]
    if decaying:
        fixed = [projected.fixed[name] for name in decaying]
        torch._foreach_sub_([gradients[name] for name in decaying], fixed, alpha=projected.decay)


def project_optimiser_step(training: LocalTraining, steps: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimiser's step without what acts on the spans: the hook `step` for other optimisers."""
    projected = training.find_added(ProjectedSteps)
    assert projected is not None
    steps = projected.projection.project_steps(steps)
    projected.hold_rows(steps)
    return steps
