"""The share of gradients that a method lets through, and the losses of old tasks, every `monitors.every` rounds.

An oracle of the simulation: it reads the train rows of all clients, of earlier tasks too. W is the global model before
a round. P g is the part of a change g that the method lets through: nothing of frozen weights, all of weights that are
neither frozen nor protected; where each client has spans of its own (gpm), the part that none of them removes, so that
rho and beta are upper estimates. As in FedProTIP's section 5 and Figure 2:

    rho            ||P grad L_t(W)||^2 / ||grad L_t(W)||^2 of the task t that is being learned (Assumption 4)
    beta           ||P grad L_tau(W)|| / ||grad L_tau(W)|| of each task tau before it (Assumption 5)
    loss           L_tau right after task t; loss_increase: its difference from L_tau right after tau
    theorem_bound  the bound of loss_increase by Theorem 2 (eq. 13), for plain SGD, with estimated constants:
    second_moment  G^2, the largest client's mean of ||mini-batch gradient of L_tau||^2 (Assumption 3)
    smoothness     L, ||grad L_tau(W') - grad L_tau(W)|| / ||W' - W||, W' the global model after the round
    local_steps    S, of the client that takes most

Measured at a few models only, the largest second_moment and smoothness are lower estimates of G^2 and L: the bound is
indicative. L_tau is the clients' loss as the method defined it while it learned tau, over the classes of then, with the
weights of the average; in evaluation mode, not augmented. Where a method starts each task anew (joint, single-task),
it is the loss of the last model.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fclmodels.backbones.model.heads import shrink_heads
from fclmodels.backbones.model.network import Network, NetworkCache
from fclmodels.backbones.model.prompt_adapters import shrink_prompts
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.journal import Log
from fclmodels.federation.monitors.rows import Monitor
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining

if TYPE_CHECKING:
    from fclmodels.federation.engine.rounds import Position
    from fclmodels.federation.method import Method


class Oracle(Monitor):
    """Gradients before rounds, and losses after a task."""

    def __init__(self, method: "Method", task: int, log: Log) -> None:
        refuse_personal(method, "gradients", "loss")
        super().__init__(task, log)
        self.method = method

    def look(self, before: "Position", after: "Position") -> None:
        """Note the gradients before a round, and how much they change during it."""
        round, start, end = before.round, before.server, after.server
        if round % self.method.run.params.monitors.every:
            return
        for about in range(self.task + 1):
            gradient, second_moment = measure_slope(self.method, start, about)
            share = compute_admissible_share(self.method, start, gradient)
            if about == self.task:
                self.note("rho", share, round)
            else:
                self.note("beta", share**0.5, round, about)
            self.note("second_moment", second_moment, round, about)
            turned = compute_distance(gradient, measure_slope(self.method, end, about)[0], gradient)
            moved = compute_distance(start.weights, end.weights, gradient)
            self.note("smoothness", turned / moved if moved else math.nan, round, about)

    def on_task_learned(self, server: Server) -> None:
        """Note the loss on all tasks so far."""
        for about in range(self.task + 1):
            self.note("loss", compute_loss(self.method, server, about), about=about)
        self.note("local_steps", self.method.count_local_steps(self.task))


def refuse_personal(method: "Method", monitor: str, quantity: str) -> None:
    """Raise UserError where there is no global model whose quantity a monitor could read."""
    if method.is_personal and not method.has_global_model:
        raise UserError(
            f"monitors.{monitor}: {method.name} leaves a part of the model with each client (batch_norm: local), "
            f"so there is no global {quantity} to look at. Set monitors.{monitor} to false, or batch_norm to average."
        )


def compute_admissible_share(method: "Method", server: Server, gradient: dict[str, Tensor]) -> float:
    """Return ||P g||^2 / ||g||^2, with g in the precision of the weights."""
    trained = method.select_trainable(method.networks.load(server.spec, server.weights), server.task)
    g = {name: value.to(server.weights[name].dtype) for name, value in gradient.items()}
    admissible = method.admit_changes(server, {name: value for name, value in g.items() if name in trained})
    total = compute_squared_norm(g.values())
    return compute_squared_norm(admissible.values()) / total if total else math.nan


def measure_slope(method: "Method", server: Server, task: int) -> tuple[dict[str, Tensor], float]:
    """Return grad L_tau, summed in double precision, and the largest client's mean of ||g||^2 over mini-batches.

    Gradients are by name and in the shapes of the server's weights; later tasks' own heads have no entry.
    """
    clients = list_trainings(method, server, task)
    parameters = {name: p for name, p in clients[0][1].network.named_parameters() if name in server.weights}
    total = {name: torch.zeros_like(server.weights[name], dtype=torch.float64) for name in parameters}
    second_moment = 0.0
    for share, training in clients:
        squares = []
        for samples, gradients in iterate_mini_batches(method, training, parameters):
            for name, g in gradients.items():
                total[name][tuple(map(slice, g.shape))].add_(g, alpha=share * samples / len(training.client.rows))
            squares.append(compute_squared_norm(gradients.values()))
        second_moment = max(second_moment, sum(squares) / len(squares))
    return total, second_moment


def measure_largest_gradient(method: "Method", server: Server, task: int) -> float:
    """Return the largest ||g|| over all clients' mini-batches, for the parameters that local training moves."""
    return max(
        compute_squared_norm(gradients.values()) ** 0.5
        for _, training in list_trainings(method, server, task)
        for _, gradients in iterate_mini_batches(method, training, training.parameters)
    )


def iterate_mini_batches(
    method: "Method", training: LocalTraining, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the number of samples and the gradient of the loss, by name, of each of a client's mini-batches."""
    for batch in iterate_batches(training.client):
        loss = method.compute_loss(training, batch)
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        named = zip(parameters, gradients, strict=True)
        yield len(batch.labels), {name: g.cpu() for name, g in named if g is not None}


def compute_loss(method: "Method", server: Server, task: int) -> float:
    """Return L_tau."""
    with torch.no_grad():
        return sum(
            share * float(method.compute_loss(training, batch)) * len(batch.labels) / len(training.client.rows)
            for share, training in list_trainings(method, server, task)
            for batch in iterate_batches(training.client)
        )


def list_trainings(method: "Method", server: Server, task: int) -> list[tuple[float, LocalTraining]]:
    """Return, for each client of a task, its weight p_k and a training on the model shrunk to the tasks up to it."""
    run = method.run
    spec = run.make_spec(task + 1)
    weights = shrink_heads(server.weights, spec)
    if spec.adapter is not None:
        weights = shrink_prompts(weights, spec.adapter, task + 1)
    network = NetworkCache(run.device, method.prepare_network).load(spec, weights).eval()
    clients = [
        Client(k, task, 0, run, run.splits.select_rows(task, "train", k), {}) for k in run.splits.list_clients(task)
    ]
    total = sum(client.weight for client in clients)
    return [(client.weight / total, _make_training(method, server, client, network)) for client in clients]


def _make_training(method: "Method", server: Server, client: Client, network: Network) -> LocalTraining:
    """Return a training with the networks that the method has beside the model, as the server has them."""
    training = LocalTraining(method, client, network, {})
    training.networks = method.auxiliaries.start(client, method.auxiliaries.make_payload(server.networks))
    for module, _ in training.networks.values():
        module.eval()
    return training


def iterate_batches(client: Client) -> Iterator[Batch]:
    """Return batches of a client's train rows, not augmented, in a random order that is always the same."""
    order = torch.randperm(len(client.rows), generator=client.make_generator("monitors"))
    return client.run.batches.iterate_ordered(client.rows.take(order.numpy()), client.run.params.federation.batch_size)


def compute_squared_norm(tensors: Iterable[Tensor]) -> float:
    """Return the squared norm of all tensors together, in double precision."""
    return float(sum(tensor.double().square().sum() for tensor in tensors))


def compute_distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Iterable[str]) -> float:
    """Return the Euclidean distance over the tensors of these names."""
    return math.sqrt(compute_squared_norm(one[name].double() - other[name].double() for name in names))
