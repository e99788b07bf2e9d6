"""Predictions of a model: logits by column, and which class and task each column stands for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fclmodels.backbones.model.network import Network
from fclmodels.backbones.model.spec import ModelSpec

if TYPE_CHECKING:
    from fclmodels.numerics.task_relevance import Router


@dataclass(frozen=True)
class Columns:
    """The class and the task of each of C logits."""

    labels: Tensor  # [C]
    owners: Tensor  # [C], the task whose own head the logit belongs to; -1 in a shared head

    def mask_task(self, task: int, classes: tuple[int, ...]) -> Tensor:
        """Return a mask [C] of the columns that may answer when the task is known."""
        in_task = torch.isin(self.labels, torch.tensor(classes, dtype=torch.long, device=self.labels.device))
        return in_task & ((self.owners == task) | (self.owners == -1))

    def mask_tasks(self, tasks: Iterable[tuple[int, ...]]) -> Tensor:
        """Return masks [tasks, C] of the columns that answer when a task is predicted, by the first tasks' classes."""
        return torch.stack([self.mask_task(task, classes) for task, classes in enumerate(tasks)])

    @classmethod
    def of(cls, spec: ModelSpec, device: torch.device) -> "Columns":
        """Return the columns of a model's heads."""
        rows = [(label, head) for head, labels in enumerate(spec.head_labels) for label in labels]
        labels, heads = torch.tensor(rows, device=device).unbind(1)
        return cls(labels, torch.full_like(heads, -1) if spec.head == "growing" else heads)

    @classmethod
    def order_by_task(cls, spec: ModelSpec, device: torch.device) -> "Columns":
        """Return the columns of logits that stand task by task, whether or not tasks share a head."""
        rows = [(label, task) for task, classes in enumerate(spec.tasks) for label in classes]
        labels, owners = torch.tensor(rows, device=device).unbind(1)
        return cls(labels, owners)


@dataclass(frozen=True)
class Prediction:
    """The logits of a batch, and scores of tasks where the method predicts tasks itself."""

    logits: Tensor  # [B, C]
    task_scores: Tensor | None = None  # [B, tasks learned], of each sample
    batch_scores: Tensor | None = None  # [tasks learned], of the batch as a whole
    not_routed: Tensor | None = None  # bool [B], samples that all tasks' columns answer, whatever their scores


Predictor = Callable[[Tensor], Prediction]


@dataclass(frozen=True)
class FittedHead:
    """A head that is fitted to features in closed form: logits = W g(a) + b, with g(a) = relu(P^T a) or a itself."""

    weight: Tensor  # W [C, M], a row for each column of the predictor
    bias: Tensor  # b [C]
    projection: Tensor | None = None  # P [F, M], random features

    def __post_init__(self) -> None:
        tensors = [tensor for tensor in (self.weight, self.bias, self.projection) if tensor is not None]
        width = self.weight.shape[-1] if self.projection is None else self.projection.shape[-1]
        fits = [tensor.ndim for tensor in tensors] == [2, 1, 2][: len(tensors)]
        if not fits or self.weight.shape != (len(self.bias), width):
            raise ValueError("weight, bias and projection of a fitted head do not fit each other")
        if not all(tensor.is_floating_point() for tensor in tensors):
            raise ValueError("a fitted head has numbers that are no floating point numbers")

    def compute_logits(self, features: Tensor) -> Tensor:
        """Return logits [B, C] of features [B, F]."""
        if self.projection is not None:
            features = torch.relu(features @ self.projection.to(features))
        return features @ self.weight.to(features).T + self.bias.to(features)

    @property
    def sizes(self) -> tuple[int, int]:
        """Columns C and features F."""
        return len(self.weight), self.weight.shape[1] if self.projection is None else len(self.projection)

    def to_tree(self) -> dict[str, Tensor]:
        tensors = {"weight": self.weight, "bias": self.bias, "projection": self.projection}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@dataclass(frozen=True)
class OwnModel:
    """A model of a method's own, from inputs to logits, which answers in place of backbone and heads."""

    spec: dict[str, Any]  # values of JSON, from which the method's `build_own_model` makes it
    weights: dict[str, Tensor]  # loaded into it

    def load_into(self, module: nn.Module) -> Predictor:
        """Return the predictor of a module that was built from the spec."""
        module.load_state_dict(self.weights)
        module.eval()
        return lambda inputs: Prediction(module(inputs))


def predict_by_heads(
    network: Network, router: "Router | None" = None, fitted_head: FittedHead | None = None
) -> Predictor:
    """Return a predictor from inputs [B, C, H, W]: the logits of all heads or of a fitted one, and scores of tasks."""
    network.eval()

    def predict(inputs: Tensor) -> Prediction:
        features = network.backbone(inputs)
        if fitted_head is not None:
            logits = fitted_head.compute_logits(features)
        else:
            logits = torch.cat([head(features) for head in network.heads], dim=1)
        if router is None:
            return Prediction(logits)
        not_routed = router.find_unsure(features)
        return Prediction(logits, router.score_samples(features), router.score_batch(features), not_routed)

    return predict
