"""Conflicts between gradients (STAMP, Definition 1) every `monitors.every` rounds: between clients, and between tasks.

An oracle as in gradients.py: it reads the train rows of all clients, whoever takes part in the round, and of earlier
tasks too. g_u^tau is the gradient of L_u^tau(W), the loss of client u on all its rows of its task tau, at the global
model W before a round, over the parameters that local training moves while task t is learned. L_u^tau is as there: over
the classes of when tau was learned, in evaluation mode, not augmented. Parameters that it does not reach, such as later
rows of a head, count as zeros; frozen ones do not count. For the clients that have task t:

    cosine_clients    mean of cos(g_u^t, g_v^t) over all pairs of clients (Figures 6, 21 and 23)
    negative_clients  share of these pairs that are in conflict: a negative cosine (Figures 22 and 24, of one client's)
    divergence        mean over clients of ||g_u^t - g|| / ||g||, g the mean of all g_u^t: gradient divergence
    cosine_tasks      mean over clients of each one's mean cos(g_u^t, g_u^tau) over its earlier tasks tau (Figure 5)
    negative_tasks    mean over clients of each one's share of negative ones among these

Figure 5 does not say which tasks' angles it shows; section 5.2 speaks of alignment "with previously learned tasks", so
pairs of two earlier tasks are left out. A gradient that is 0 has no direction and makes no pair. The paper has no
formula of its gradient divergence; here it is in lengths of the mean, the direction of a server that averages.

Each measurement takes one pass over each client's rows of each task up to t. In memory are the current gradients of all
clients and one more in float32: 4 (n + 1) P bytes for n clients and P parameters, 4.5 GB for 100 clients of 11 million.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fclmodels.federation.engine.journal import Log
from fclmodels.federation.monitors.oracles.gradients import iterate_mini_batches, list_trainings, refuse_personal
from fclmodels.federation.monitors.rows import Monitor
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.numerics.alignment import Named, gram, iterate_columns

if TYPE_CHECKING:
    from fclmodels.federation.engine.rounds import Position
    from fclmodels.federation.method import Method


class Conflicts(Monitor):
    """Cosines between gradients of clients and of tasks."""

    def __init__(self, method: "Method", task: int, log: Log) -> None:
        refuse_personal(method, "conflicts", "gradient")
        super().__init__(task, log)
        self.method = method

    def look(self, before: "Position", after: "Position") -> None:
        """Note the conflicts between gradients before a round."""
        round, server = before.round, before.server
        if round % self.method.run.params.monitors.every:
            return
        network = self.method.networks.load(server.spec, server.weights)
        moving = self.method.select_trainable(network, server.task).keys()
        current = {
            training.client.index: compute_gradient(self.method, server, training, moving)
            for _, training in list_trainings(self.method, server, self.task)
        }
        G = compute_inner_products(list(current.values()))
        between = compute_cosines(G)
        self.note("cosine_clients", float(between.mean()), round)
        self.note("negative_clients", compute_negative_share(between), round)
        if len(G) > 1:
            self.note("divergence", compute_divergence(G), round)
        of_clients = [values for values in self.compare_with_earlier(server, current, moving).values() if len(values)]
        if of_clients:
            self.note("cosine_tasks", sum(float(values.mean()) for values in of_clients) / len(of_clients), round)
            self.note(
                "negative_tasks", sum(compute_negative_share(values) for values in of_clients) / len(of_clients), round
            )

    def compare_with_earlier(
        self, server: Server, current: Mapping[int, Named], moving: Collection[str]
    ) -> dict[int, Tensor]:
        """Return, by client, the cosines between its current gradient and those of its earlier tasks."""
        by_client: dict[int, list[Tensor]] = {client: [] for client in current}
        for about in range(self.task):
            for _, training in list_trainings(self.method, server, about):
                if (client := training.client.index) in current:
                    earlier = compute_gradient(self.method, server, training, moving)
                    by_client[client].append(compute_cosines(compute_inner_products([current[client], earlier])))
        return {client: torch.cat(values) for client, values in by_client.items() if values}


def compute_gradient(
    method: "Method", server: Server, training: LocalTraining, moving: Collection[str]
) -> dict[str, Tensor]:
    """Return the gradient of a client's loss on its rows of a task, for all that moves, in the server's shapes."""
    parameters = {name: p for name, p in training.network.named_parameters() if name in moving}
    total = {name: torch.zeros_like(server.weights[name], dtype=torch.float32) for name in moving}
    if not parameters:  # nothing that moves now was there when the task was learned
        return total
    for samples, gradients in iterate_mini_batches(method, training, parameters):
        for name, g in gradients.items():
            total[name][tuple(map(slice, g.shape))].add_(g, alpha=samples / len(training.client.rows))
    return total


def compute_inner_products(vectors: Sequence[Named]) -> Tensor:
    """Return the Gram matrix G [n, n] of vectors.

    The products too are in double precision: where gradients all but cancel, their mean is the difference of large
    numbers, and the square of a small gradient is below the range of single precision.
    """
    return gram(chunk.double() for chunk in iterate_columns(vectors, list(vectors[0])))


def compute_cosines(G: Tensor) -> Tensor:
    """Return the cosine of each pair of vectors by their Gram matrix, without pairs with a vector that is 0."""
    norms = G.diagonal().clamp(min=0).sqrt()
    one, other = torch.triu_indices(len(G), len(G), offset=1)
    values = G[one, other] / norms[one] / norms[other]
    return values[(norms[one] > 0) & (norms[other] > 0)]


def compute_negative_share(cosines: Tensor) -> float:
    """Return the share of negative cosines; NaN where there are no cosines."""
    return float(cosines.lt(0).double().mean())


def compute_divergence(G: Tensor) -> float:
    """Return the mean of ||g_u - g|| / ||g||, g the mean of the vectors with this Gram matrix."""
    square = G.mean()
    distances = (G.diagonal() - 2 * G.mean(dim=1) + square).clamp(min=0).sqrt()
    return float((distances / square.clamp(min=0).sqrt()).mean())
