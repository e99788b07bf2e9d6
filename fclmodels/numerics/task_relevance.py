"""Task identity prediction (TIP) of FedProTIP, section 4.4: a sample's task by the subspaces that its features lie in.

A feature vector a has a relevance to each learned task t, the length of its projection on that task's core bases U_t
of the last layer's input (eq. 10). Each client knows what relevances its own samples of a task had, the reference of
that task. The task whose reference has the highest cosine (eq. 11) gets the client's vote, and the majority decides.

By the release's rule the first task's bases count nothing, a reference is the mean of its batches' unit vectors, whose
product with the unit vector of what is routed is the mean cosine, and of two tasks the one with the nearer length wins.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Router:
    """The bases and references that predict tasks from features. A mean over clients counts as one client's."""

    bases: tuple[Tensor, ...]  # for each of T tasks U_t [F, r_t], orthonormal, also to other tasks'; r_t may be 0
    references: Tensor  # [K, T, T], entry (k, tau, t) is the relevance to task t of client k's samples of task tau
    has_reference: Tensor  # bool [K, T], true where client k has a reference of task tau
    rule: str = "paper"  # or release
    least_margin: float | None = None  # a sample whose margin is below is not routed; None: all are

    def __post_init__(self) -> None:
        tasks, clients = len(self.bases), len(self.references)
        shapes = (self.references.shape, self.has_reference.shape)
        fits = shapes == ((clients, tasks, tasks), (clients, tasks)) and clients > 0
        if not fits or len({len(basis) for basis in self.bases}) != 1 or any(basis.ndim != 2 for basis in self.bases):
            raise ValueError("bases, references and has_reference are not of the same tasks, clients and features")
        if self.rule not in ("paper", "release"):
            raise ValueError("rule is neither paper nor release")
        kinds = {*(basis.is_floating_point() for basis in self.bases), self.references.is_floating_point()}
        if kinds != {True} or self.has_reference.dtype != torch.bool:
            raise ValueError("bases and references are no numbers")

    @property
    def sizes(self) -> tuple[int, int]:
        """Tasks T and features F."""
        return len(self.bases), len(self.bases[0])

    def score_samples(self, features: Tensor) -> Tensor:
        """Return scores [B, T] from features [B, F]; a sample's highest is that of its predicted task."""
        return rate(self._compare(relevance(features, self.bases)), self.has_reference)

    def score_batch(self, features: Tensor) -> Tensor:
        """Return scores [T] of the batch [B, F] together; the highest is that of its predicted task."""
        lengths = relevance(features, self.bases)
        return rate(self._compare(batch_relevance(lengths) / len(features) ** 0.5), self.has_reference)

    def measure_margins(self, features: Tensor) -> Tensor:
        """Return by how much each sample's mean cosine for its predicted task is above the next best [B].

        At most 0 where votes and means differ; infinite where there is one task.
        """
        cosines = self._compare(relevance(features, self.bases))
        predicted = rate(cosines, self.has_reference).argmax(-1, keepdim=True)
        mean = average(cosines, self.has_reference)
        others = mean.scatter(-1, predicted, -torch.inf)
        return (mean.gather(-1, predicted) - others.max(-1, keepdim=True).values).squeeze(-1)

    def find_unsure(self, features: Tensor) -> Tensor:
        """Return which samples have too small a margin to be routed: bool [B]."""
        if self.least_margin is None:
            return torch.zeros(len(features), dtype=torch.bool, device=features.device)
        return self.measure_margins(features) < self.least_margin

    def to_tree(self) -> dict[str, Any]:
        return {
            "bases": list(self.bases),
            "references": self.references,
            "known": self.has_reference,
            "rule": self.rule,
            "least_margin": self.least_margin,
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> "Router":
        return cls(
            tuple(tree["bases"]),
            tree["references"],
            tree["known"],
            tree.get("rule", "paper"),
            tree.get("least_margin"),
        )

    def _compare(self, lengths: Tensor) -> Tensor:
        """Return how alike relevances [..., T] are to each reference [..., K, T]: cosines, or by the release's rule."""
        lengths, references = lengths.double(), self.references.to(lengths.device).double()
        if self.rule == "paper":
            return compare(lengths, references)
        if len(self.bases) <= 2:
            return -(lengths[..., None, None, -1] - references[..., -1]).abs()
        later = torch.cat([torch.zeros_like(lengths[..., :1]), lengths[..., 1:]], dim=-1)
        return torch.einsum("...t,kst->...ks", _normalise(later), references)


def relevance(features: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """Return ||U_t^T a|| = ||U_t U_t^T a|| (eq. 10) for each sample a of features [B, F] and each task: [B, T]."""
    lengths = [torch.linalg.vector_norm(features @ basis.to(features), dim=1) for basis in bases]
    return torch.stack(lengths, dim=1)


def batch_relevance(relevance: Tensor) -> Tensor:
    """Return the Frobenius norms [T] of a batch's projections, from the relevances [B, T] of its samples."""
    return torch.linalg.vector_norm(relevance, dim=0)


def compare(relevance: Tensor, references: Tensor) -> Tensor:
    """Return the cosines [..., K, T] of relevances [..., T] with references [K, T, T]."""
    references = references.to(relevance.device)
    return torch.einsum("...t,kst->...ks", _normalise(relevance), _normalise(references))


def rate(cosines: Tensor, has_reference: Tensor) -> Tensor:
    """Return votes for each task [..., T], plus less than one vote for its mean cosine [..., K, T], which breaks ties.

    A relevance or a reference of zeros only has the cosine 0 with everything.
    """
    has_reference = has_reference.to(cosines.device)
    choices = cosines.masked_fill(~has_reference, -torch.inf).argmax(-1)
    votes = torch.nn.functional.one_hot(choices, has_reference.shape[1]) * has_reference.any(1)[:, None]
    return votes.sum(-2) + torch.sigmoid(average(cosines, has_reference)) / 2


def average(cosines: Tensor, has_reference: Tensor) -> Tensor:
    """Return the mean over clients with a reference of each task [..., T] of cosines [..., K, T]."""
    has_reference = has_reference.to(cosines.device)
    return (cosines * has_reference).sum(-2) / has_reference.sum(0).clamp(min=1)


def _normalise(vectors: Tensor) -> Tensor:
    """Scale vectors along the last dimension to length 1, in double precision: a vote must not absorb a cosine."""
    vectors = vectors.double()
    return torch.nn.functional.normalize(vectors, dim=-1, eps=torch.finfo(vectors.dtype).tiny)
