"""An approximation of RGO+FL, FOT's rival (Liu and Liu, ICLR 2022; FOT, F.2): gradients through inverse curvature.

RGO changes gradients g to P g, with P positive and of trace d, so that the quadratic bound of earlier tasks' losses
rises least: P = d H^-1 / tr H^-1, H the mean of their Hessians. There is no release, and the paper's Hessian of a layer
and its feature encoding (FEL) could not be read. So this is not RGO. What is ours in it:

- H is a I + the mean over tasks of the second moment x x^T of a layer's input, over samples and positions: the side of
  the input in a Kronecker-factored curvature. P acts on that side of each weight's gradient; biases and norms have
  none. Without earlier tasks H = a I, and it is FedAvg.
- FEL is left out, as is weight decay: that is added to P g.
- A client that stores nothing has P = I. FOT lets 40 % of clients, drawn anew for each task, store a matrix (F.4).

memory: `curvature` {layer: F [d, r]} with F F^T the sum of the tasks' moments, of their r <= `rank` leading directions:
d r numbers a layer in place of d x d; `tasks`, how many it is of. Nothing of it leaves the client.
"""

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from fclmodels.backbones.inputs.layer_capture import BATCH, Layer, find_layers, observe_inputs
from fclmodels.backbones.model.network import Network
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange
from fclmodels.federation.messages import Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.numerics.subspace import principal

ROUNDING = 1e-6  # of the longest direction: what is shorter is rounding


class RgoApprox(FedAvg):
    """Clients pass gradients through the inverse second moment of what each layer saw in earlier tasks (not RGO's)."""

    name = "rgo-approx"
    paper = "Continual Learning with Recursive Gradient Optimization"

    class Settings(FedAvg.Settings):
        damping: PositiveFloat = Field(
            1.0, le=1e6, description="a, the curvature of what no earlier task has seen (ours)"
        )
        share: float = Field(
            0.4, gt=0, le=1, description="share of a task's clients that store its curvature (FOT, F.4)"
        )
        rank: PositiveInt = Field(
            256, le=100_000, description="directions of a layer that a client stores, at most (ours)"
        )
        samples: PositiveInt | None = Field(128, description="images a client measures curvature by; null: all (ours)")
        patches: PositiveInt | None = Field(
            None, description="random columns of each layer's input that a client takes; null: all (ours)"
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        if find_kind(run.splits.shape) is TEXTS:
            raise UserError("methods.rgo-approx reads layers' inputs from images, these samples are texts. Use ewc.")
        super().__init__(settings, run)
        self.measure = self.declare(Exchange("curvature", self.make_payload, self.add_curvature))

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        count = max(1, round(self.settings.share * len(cohort.clients)))
        random = self.run.make_generator("curvature", server.task)
        order = torch.randperm(len(cohort.clients), generator=random).tolist()
        cohort.ask(self.measure, server, clients=sorted(cohort.clients[place] for place in order[:count]))
        return server

    def add_curvature(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with the task's second moments; the answer itself is empty."""
        network = self.networks.load(self.run.make_spec(client.task + 1), self.join_own_weights(client, payload))
        random, settings = client.make_generator("observe"), self.settings
        rows = client.rows.draw_some(settings.samples, random)
        batches = (batch.inputs for batch in self.run.batches.iterate_ordered(rows, BATCH))
        layers, factors = self.find_layers(network), dict(client.memory.get("curvature", {}))
        for name, X in observe_inputs(network, layers, batches, len(rows), settings.patches, random).items():
            width = layers[name].width
            nothing = layers[name].module.weight.detach().new_zeros(width, 0)
            U, sigma = X.decompose_principal(nothing)
            new = U * (sigma / X.count**0.5)
            factors[name] = add_factors(factors.get(name, nothing), new, settings.rank)
        tasks = client.memory.get("tasks", 0) + 1
        return Answer({}, {**client.memory, "curvature": factors, "tasks": tasks})

    def find_layers(self, network: Network) -> dict[str, Layer]:
        """Return the layers whose gradients change: all but frozen ones and heads of one task's own."""
        later = self.select_trainable(network, len(network.spec.tasks))
        layers = find_layers(network, self.run.splits.shape)
        return {name: layer for name, layer in layers.items() if layer.weight in later}

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        memory = training.client.memory
        if "curvature" in memory:
            layers = find_layers(training.network, self.run.splits.shape)
            tasks, damping = memory["tasks"], self.settings.damping
            stored = memory["curvature"].items()
            training.add(Curvatures((layers[name], Curvature(factor, tasks, damping)) for name, factor in stored))

    @torch.no_grad()
    def change_gradients(self, training: LocalTraining) -> None:
        """Replace the gradient G [out, d] of a layer's weight by G P."""
        gradients = training.gradients
        for layer, curvature in training.find_added(Curvatures) or ():
            if (gradient := gradients.get(layer.weight)) is not None:
                live = layer.select_live(gradient)
                live.copy_(curvature.precondition(live.flatten(1)).view_as(live))


class Curvature:
    """P of a layer, from a factor F of T tasks' moments: H = a I + F F^T / T."""

    def __init__(self, factor: Tensor, tasks: int, damping: float) -> None:
        lengths = factor.norm(dim=0)
        self.directions = factor / lengths
        moments = lengths.square() / tasks
        width, rank = factor.shape
        trace = (width - rank) / damping + (1 / (damping + moments)).sum()
        self.scale = width / (damping * trace)
        self.shrink = moments / (damping + moments)

    def precondition(self, rows: Tensor) -> Tensor:
        """Return rows [m, d] times P = d H^-1 / tr H^-1."""
        return self.scale * (rows - (rows @ self.directions * self.shrink) @ self.directions.T)


class Curvatures(list[tuple[Layer, Curvature]]):
    """The layers of one training with their P."""


def add_factors(old: Tensor, new: Tensor, rank: int) -> Tensor:
    """Return F [d, r] with orthogonal columns, the leading ones of F F^T = A A^T + B B^T, from A and B."""
    U, sigma = principal(torch.cat([old, new], dim=1))
    count = min(rank, int((sigma > ROUNDING * sigma.max()).sum())) if len(sigma) else 0
    return (U * sigma)[:, :count]
