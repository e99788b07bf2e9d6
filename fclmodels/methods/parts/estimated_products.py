"""Sums of products that the server estimates from class sums of small random groups (STSA-E), as fewer bytes travel.

A client splits its rows at random into groups and sends of each the counts n_kc [C] and sums s_kc [C, M] of classes:
groups x C x (M + 1) numbers in place of M (M + C). The server's estimate of A^T A is unbiased over random groups of
samples drawn alike (numerics/fitted_heads.py, weigh_groups), and exact where each group has one sample of a class.
It needs the groups one by one, and so no secure aggregation covers them. Eigenvalues below 0 are set to 0.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fclmodels.backbones.model.network import Network
from fclmodels.data.splits.split_reader import Rows
from fclmodels.federation.client import Client
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Form
from fclmodels.federation.messages import make_outline
from fclmodels.methods.parts.closed_form_head import ClosedFormHead
from fclmodels.numerics.fitted_heads import project_positive, weigh_groups

GROUPS = 5  # of a client's rows, as in STSA's release


class EstimatedProducts(ClosedFormHead):
    """The head in closed form whose sums of products are estimated."""

    def make_form(self, task: int, round: int) -> Form:
        """Return the outlines of counts [groups x columns] and sums [groups x columns, M] of a client's groups."""
        parts = {}
        for name, exact in super().make_form(task, round).items():
            M, columns = exact.tensors["cross"].shape
            shapes = {"weight": (GROUPS * columns,), "sum": (GROUPS * columns, M)}
            parts[name] = make_outline("class-statistics", shapes, torch.float64, least="each")
        return parts

    def sum_rows(
        self, client: Client, rows: Rows, network: Network, projection: Tensor | None, like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return counts and sums of classes in random groups of some rows."""
        total = {name: torch.zeros(outline.shape, dtype=outline.dtype) for name, outline in like.items()}
        columns = len(total["weight"]) // GROUPS
        group = torch.randint(GROUPS, (len(rows),), generator=client.make_generator("groups"))
        done = 0
        for phi, of_column in self.iterate_features(rows, network, client.task, projection):
            places = group[done : done + len(phi)] * columns + of_column.cpu()
            total["weight"].index_add_(0, places, torch.ones(len(phi), dtype=torch.float64))
            total["sum"].index_add_(0, places, phi.double().cpu())
            done += len(phi)
        return total

    def read_products(self, replies: Replies, part: str) -> dict[str, Tensor]:
        """Return the estimated gram [M, M] and cross [M, columns] of all clients' groups."""
        counts, groups, sums = [], [], []
        for _, of_client in replies.yield_each(part):
            weight = of_client["weight"].view(GROUPS, -1)
            counts.append(weight.sum(0))
            groups.append((weight > 0).double().sum(0))
            sums.append(of_client["sum"].unflatten(0, weight.shape).sum(0))
        N, K, S = (torch.stack(of_clients).sum(0) for of_clients in (counts, groups, sums))
        a, b = weigh_groups(N, K)
        gram = (S * b[:, None]).T @ S
        for _, of_client in replies.yield_each(part):
            share = a.repeat(GROUPS) / of_client["weight"].clamp(min=1)
            gram += (of_client["sum"] * share[:, None]).T @ of_client["sum"]
        return {"gram": project_positive(gram), "cross": S.T.contiguous()}
