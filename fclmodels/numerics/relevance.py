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
    """What it takes to predict tasks from features.

    bases: for each of T tasks U_t [F, r_t], orthonormal columns, also to those of other tasks; r_t may be 0.
    references [K, T, T]: entry (k, tau, t) is the relevance to task t of client k's samples of task tau.
    known [K, T]: whether client k has a reference of task tau. A mean over clients is the references of one client.
    """

    bases: tuple[Tensor, ...]
    references: Tensor
    known: Tensor

    def __post_init__(self) -> None:
        tasks, clients = len(self.bases), len(self.references)
        fits = self.references.shape == (clients, tasks, tasks) and self.known.shape == (clients, tasks) and clients > 0
        if not fits or len({len(basis) for basis in self.bases}) != 1 or any(basis.ndim != 2 for basis in self.bases):
            raise ValueError("bases, references and who knows them are not of the same tasks, clients and features")
        kinds = {*(basis.is_floating_point() for basis in self.bases), self.references.is_floating_point()}
        if kinds != {True} or self.known.dtype != torch.bool:
            raise ValueError("bases and references are no numbers")

    @property
    def sizes(self) -> tuple[int, int]:
        """Tasks T and features F."""
        return len(self.bases), len(self.bases[0])

    def sample_scores(self, features: Tensor) -> Tensor:
        """[B, T] from the features [B, F]; a sample's highest score is its predicted task."""
        return scores(relevance(features, self.bases), self.references, self.known)

    def batch_scores(self, features: Tensor) -> Tensor:
        """[T]: the highest score is the task predicted for the batch [B, F] as a whole."""
        return scores(batch_relevance(relevance(features, self.bases)), self.references, self.known)

    def to_tree(self) -> dict[str, Any]:
        return {"bases": list(self.bases), "references": self.references, "known": self.known}

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> "Router":
        return cls(tuple(tree["bases"]), tree["references"], tree["known"])


def relevance(features: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """||U_t^T a||, which is ||U_t U_t^T a|| (eq. 10), for each sample a of features [B, F] and each task: [B, T]."""
    lengths = [torch.linalg.vector_norm(features @ basis.to(features), dim=1) for basis in bases]
    return torch.stack(lengths, dim=1)


def batch_relevance(relevance: Tensor) -> Tensor:
    """The Frobenius norms [T] of a batch's projections, from the relevances [B, T] of its samples."""
    return torch.linalg.vector_norm(relevance, dim=0)


def scores(relevance: Tensor, references: Tensor, known: Tensor) -> Tensor:
    """Votes for each task [..., T], plus less than one vote for its mean cosine, which decides between equal votes.

    relevance [..., T], references and known as in `Router`. A relevance or a reference of nothing but zeros has the
    cosine 0 with everything.
    """
    of_sample, of_clients = _unit(relevance), _unit(references.to(relevance.device))
    known = known.to(relevance.device)
    cosines = torch.einsum("...t,kst->...ks", of_sample, of_clients)
    choices = cosines.masked_fill(~known, -torch.inf).argmax(-1)
    votes = torch.nn.functional.one_hot(choices, known.shape[1]) * known.any(1)[:, None]
    mean = (cosines * known).sum(-2) / known.sum(0).clamp(min=1)
    return votes.sum(-2) + (1 + mean) / 4


def _unit(vectors: Tensor) -> Tensor:
    """Vectors along the last dimension scaled to length 1, in double precision: votes must not swallow a cosine."""
    vectors = vectors.double()
    return torch.nn.functional.normalize(vectors, dim=-1, eps=torch.finfo(vectors.dtype).tiny)
