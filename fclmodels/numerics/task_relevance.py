"""Task identity prediction (TIP) of FedProTIP, section 4.4: a sample's task by the subspaces that its features lie in.

A feature vector a has a relevance to each learned task t, the length of its projection on that task's core bases U_t
of the last layer's input (eq. 10). Each client knows what relevances its own samples of a task had, the reference of
that task. The task whose reference has the highest cosine (eq. 11) gets the client's vote, and the majority decides.
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

    def __post_init__(self) -> None:
        tasks, clients = len(self.bases), len(self.references)
        shapes = (self.references.shape, self.has_reference.shape)
        fits = shapes == ((clients, tasks, tasks), (clients, tasks)) and clients > 0
        if not fits or len({len(basis) for basis in self.bases}) != 1 or any(basis.ndim != 2 for basis in self.bases):
            raise ValueError("bases, references and has_reference are not of the same tasks, clients and features")
        kinds = {*(basis.is_floating_point() for basis in self.bases), self.references.is_floating_point()}
        if kinds != {True} or self.has_reference.dtype != torch.bool:
            raise ValueError("bases and references are no numbers")

    @property
    def sizes(self) -> tuple[int, int]:
        """Tasks T and features F."""
        return len(self.bases), len(self.bases[0])

    def sample_scores(self, features: Tensor) -> Tensor:
        """Return scores [B, T] from features [B, F]; a sample's highest is that of its predicted task."""
        return scores(relevance(features, self.bases), self.references, self.has_reference)

    def batch_scores(self, features: Tensor) -> Tensor:
        """Return scores [T] of the batch [B, F] together; the highest is that of its predicted task."""
        return scores(batch_relevance(relevance(features, self.bases)), self.references, self.has_reference)

    def to_tree(self) -> dict[str, Any]:
        return {"bases": list(self.bases), "references": self.references, "known": self.has_reference}

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> "Router":
        return cls(tuple(tree["bases"]), tree["references"], tree["known"])


def relevance(features: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """Return ||U_t^T a|| = ||U_t U_t^T a|| (eq. 10) for each sample a of features [B, F] and each task: [B, T]."""
    lengths = [torch.linalg.vector_norm(features @ basis.to(features), dim=1) for basis in bases]
    return torch.stack(lengths, dim=1)


def batch_relevance(relevance: Tensor) -> Tensor:
    """Return the Frobenius norms [T] of a batch's projections, from the relevances [B, T] of its samples."""
    return torch.linalg.vector_norm(relevance, dim=0)


def scores(relevance: Tensor, references: Tensor, has_reference: Tensor) -> Tensor:
    """Return votes for each task [..., T], plus less than one vote for its mean cosine, which breaks ties.

    relevance [..., T], references and has_reference as in `Router`. A relevance or a reference of zeros only has the
    cosine 0 with everything.
    """
    of_sample, of_clients = _normalise(relevance), _normalise(references.to(relevance.device))
    has_reference = has_reference.to(relevance.device)
    cosines = torch.einsum("...t,kst->...ks", of_sample, of_clients)
    choices = cosines.masked_fill(~has_reference, -torch.inf).argmax(-1)
    votes = torch.nn.functional.one_hot(choices, has_reference.shape[1]) * has_reference.any(1)[:, None]
    mean = (cosines * has_reference).sum(-2) / has_reference.sum(0).clamp(min=1)
    return votes.sum(-2) + (1 + mean) / 4


def _normalise(vectors: Tensor) -> Tensor:
    """Scale vectors along the last dimension to length 1, in double precision: a vote must not absorb a cosine."""
    vectors = vectors.double()
    return torch.nn.functional.normalize(vectors, dim=-1, eps=torch.finfo(vectors.dtype).tiny)
