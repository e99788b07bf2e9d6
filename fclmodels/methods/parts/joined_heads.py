"""Columns of all heads' logits side by side: tasks with heads of their own have those of a head that grows."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from fclmodels.backbones.model.network import Network
from fclmodels.backbones.model.spec import ModelSpec, get_task_columns, to_local_labels
from fclmodels.federation.prediction import Columns


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


def log_softmax_in_heads(network: Network, features: Tensor, columns: Tensor) -> Tensor:
    """Return log probabilities [n, columns] of each row among the columns of its column's head, 0 in other heads."""
    owners = Columns.of(network.spec, features.device).owners
    others = owners != owners[columns][:, None]
    return join_heads(network, features).masked_fill(others, -torch.inf).log_softmax(1).masked_fill(others, 0.0)


def compute_cross_entropy_in_heads(network: Network, features: Tensor, columns: Tensor) -> Tensor:
    """Return the cross entropy [n] of each row with its column, among the columns of the same head."""
    return nll_loss(log_softmax_in_heads(network, features, columns), columns, reduction="none")


def list_old_groups(columns: Sequence[Tensor]) -> list[Tensor]:
    """Return the columns of each task but the last, without those that the last one has too."""
    *old, new = columns
    return [group[~torch.isin(group, new)] for group in old if not torch.isin(group, new).all()]
