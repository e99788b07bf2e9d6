"""What is let through of gradients, and the losses of old tasks, every `monitors.every` rounds.

An oracle of the simulation: it reads the train rows of all clients at once, and those of tasks long past. W is the
global model before a round. P is what the method lets through of a change: nothing of what is frozen, all of what is
neither frozen nor protected; where each client has spans of its own (gpm), what none of them takes out, so that rho and
beta are upper estimates. As in FedProTIP's section 5 and Figure 2:

    rho            ||P grad L_t(W)||^2 / ||grad L_t(W)||^2 of the task t that is being learned (Assumption 4)
    beta           ||P grad L_tau(W)|| / ||grad L_tau(W)|| of each task tau before it (Assumption 5)
    loss           L_tau right after task t; loss_increase: the same less what it was right after tau
    theorem_bound  what Theorem 2 (eq. 13) allows loss_increase to be, for plain SGD, with estimated constants:
    second_moment  G^2, the largest client's mean of ||mini-batch gradient of L_tau||^2 (Assumption 3)
    smoothness     L, ||grad L_tau(W') - grad L_tau(W)|| / ||W' - W||, W' the global model after the round
    local_steps    S, of the client that takes most

Seen at a few models only, the largest second_moment and smoothness are lower estimates of G^2 and L: the bound is
indicative. L_tau is the clients' loss as the method had it while it learned tau, over the classes known then, with the
weights of the average; in evaluation mode, not augmented. Where a method starts each task anew (joint, single-task),
it is the loss of the last model.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fclmodels.backbones.adapters import shrink_prompts
from fclmodels.backbones.heads import shrink
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.local import LocalTraining
from fclmodels.federation.log import Log
from fclmodels.federation.monitors.rows import Monitor
from fclmodels.federation.networks import Networks
from fclmodels.federation.server import Server

if TYPE_CHECKING:
    from fclmodels.methods.base import Method


class Oracle(Monitor):
    def __init__(self, method: "Method", task: int, log: Log) -> None:
        refuse_personal(method, "gradients", "loss")
        super().__init__(task, log)
        self.method = method

    def look(self, before: Server, after: Server, round: int) -> None:
        """At the gradients before a round, and how they have changed by its end."""
        if round % self.method.run.params.monitors.every:
            return
        for about in range(self.task + 1):
            gradient, second_moment = slope(self.method, before, about)
            share = admissible_share(self.method, before, gradient)
            if about == self.task:
                self.note("rho", share, round)
            else:
                self.note("beta", share**0.5, round, about)
            self.note("second_moment", second_moment, round, about)
            turned = distance(gradient, slope(self.method, after, about)[0], gradient)
            moved = distance(before.weights, after.weights, gradient)
            self.note("smoothness", turned / moved if moved else math.nan, round, about)

    def task_learned(self, server: Server) -> None:
        """At the loss on all tasks so far."""
        for about in range(self.task + 1):
            self.note("loss", loss(self.method, server, about), about=about)
        self.note("local_steps", self.method.local_steps(self.task))


def refuse_personal(method: "Method", monitor: str, what: str) -> None:
    if method.personal:
        raise UserError(
            f"monitors.{monitor}: {method.name} leaves a part of the model with each client (batch_norm: local), "
            f"so there is no global {what} to look at. Set monitors.{monitor} to false, or batch_norm to average."
        )


def admissible_share(method: "Method", server: Server, gradient: dict[str, Tensor]) -> float:
    """||P g||^2 / ||g||^2, with g in the precision of the weights."""
    trained = method.trainable(method.networks.load(server.spec, server.weights), server.task)
    g = {name: value.to(server.weights[name].dtype) for name, value in gradient.items()}
    left = method.admissible(server, {name: value for name, value in g.items() if name in trained})
    whole = squared_norm(g.values())
    return squared_norm(left.values()) / whole if whole else math.nan


def slope(method: "Method", server: Server, task: int) -> tuple[dict[str, Tensor], float]:
    """grad L_tau, summed in double precision, and the largest client's mean of ||g||^2 over mini-batches.

    By name and in the shapes of the server's weights; heads that L_tau does not know have no entry.
    """
    clients = clients_of(method, server, task)
    parameters = {name: p for name, p in clients[0][1].network.named_parameters() if name in server.weights}
    total = {name: torch.zeros_like(server.weights[name], dtype=torch.float64) for name in parameters}
    second_moment = 0.0
    for share, training in clients:
        squares = []
        for samples, gradients in mini_batches(method, training, parameters):
            for name, g in gradients.items():
                total[name][tuple(map(slice, g.shape))].add_(g, alpha=share * samples / len(training.client.rows))
            squares.append(squared_norm(gradients.values()))
        second_moment = max(second_moment, sum(squares) / len(squares))
    return total, second_moment


def largest_gradient(method: "Method", server: Server, task: int) -> float:
    """The largest ||g|| over all clients' mini-batches, of what local training moves."""
    return max(
        squared_norm(gradients.values()) ** 0.5
        for _, training in clients_of(method, server, task)
        for _, gradients in mini_batches(method, training, training.parameters)
    )


def mini_batches(
    method: "Method", training: LocalTraining, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Of each of a client's mini-batches: how many samples it has, and the gradient of its loss, by name."""
    for batch in batches_of(training.client):
        found = torch.autograd.grad(method.loss(training, batch), list(parameters.values()), allow_unused=True)
        yield len(batch.labels), {name: g.cpu() for name, g in zip(parameters, found, strict=True) if g is not None}


def loss(method: "Method", server: Server, task: int) -> float:
    """L_tau."""
    with torch.no_grad():
        return sum(
            share * float(method.loss(training, batch)) * len(batch.labels) / len(training.client.rows)
            for share, training in clients_of(method, server, task)
            for batch in batches_of(training.client)
        )


def clients_of(method: "Method", server: Server, task: int) -> list[tuple[float, LocalTraining]]:
    """Each client that has a task: its weight p_k, and the global model cut down to the tasks up to that one."""
    run = method.run
    spec = run.spec(task + 1)
    weights = shrink(server.weights, spec)
    if spec.adapter is not None:
        weights = shrink_prompts(weights, spec.adapter, task + 1)
    network = Networks(run.device, method.prepare).load(spec, weights).eval()
    clients = [Client(k, task, 0, run, run.splits.rows(task, "train", k), {}) for k in run.splits.clients_with(task)]
    total = sum(client.weight for client in clients)
    return [(client.weight / total, LocalTraining(method, client, network, {})) for client in clients]


def batches_of(client: Client) -> Iterator[Batch]:
    """Its train rows, not augmented, in a random order that is always the same."""
    order = torch.randperm(len(client.rows), generator=client.generator("monitors"))
    return client.run.batches.ordered(client.rows.take(order.numpy()), client.run.params.federation.batch_size)


def squared_norm(tensors: Iterable[Tensor]) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors))


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Iterable[str]) -> float:
    """Euclidean, over the tensors of these names."""
    return math.sqrt(squared_norm(one[name].double() - other[name].double() for name in names))
