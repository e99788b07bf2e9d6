"""Monitors: they look on while a method learns, and change nothing.

used_share: r / d of each protected layer after each task (FOT Table 3, Figure 7), and their mean (layer null).

All others are an oracle of the simulation: they read the train rows of all clients at once, and those of tasks long
past. W is the global model before a round. P is what the method lets through of a change: nothing of what is frozen,
all of what is neither frozen nor protected; where each client has spans of its own (gpm), what none of them takes out,
so that rho and beta are upper estimates. As in FedProTIP's section 5 and Figure 2:

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl
import torch
from torch import Tensor

from fclmodels.backbones.heads import shrink
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.local import LocalTraining
from fclmodels.federation.log import Log
from fclmodels.federation.networks import Networks
from fclmodels.federation.server import Server
from fclmodels.numerics.subspace import used_share

if TYPE_CHECKING:
    from fclmodels.methods.base import Method

SCHEMA = {
    "monitor": pl.String,
    "task": pl.Int16,  # being learned, or just learned where there is no round
    "round": pl.Int32,
    "about": pl.Int16,  # the task whose loss it is
    "layer": pl.String,
    "value": pl.Float64,
}


def table(rows: Sequence[dict[str, Any]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=SCHEMA)


def row(
    monitor: str, task: int, value: float, round: int | None = None, about: int | None = None, layer: str | None = None
) -> dict[str, Any]:
    return dict(zip(SCHEMA, (monitor, task, round, about, layer, value), strict=True))


def used_shares(bases: dict[str, Tensor], task: int) -> pl.DataFrame:
    """used_share of each layer, and the mean over layers; nothing where there are no bases."""
    shares: dict[str | None, float] = {layer: used_share(basis) for layer, basis in bases.items()}
    if shares:
        shares[None] = sum(shares.values()) / len(shares)
    return table([row("used_share", task, share, layer=layer) for layer, share in shares.items()])


class Oracle:
    """Looks at the training of one task; what it sees goes to a log."""

    def __init__(self, method: "Method", task: int, log: Log) -> None:
        if method.personal:
            raise UserError(
                f"monitors.gradients: {method.name} leaves a part of the model with each client (batch_norm: local), "
                "so there is no global loss to look at. Set monitors.gradients to false, or batch_norm to average."
            )
        self.method = method
        self.task = task
        self.log = log

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
        self.note("local_steps", local_steps(self.method, self.task))

    def table(self) -> pl.DataFrame:
        return table(self.log.rows())

    def note(self, monitor: str, value: float, round: int | None = None, about: int | None = None) -> None:
        if math.isfinite(value):  # a share of a gradient that is 0 is not defined: no row
            self.log.append(row(monitor, self.task, value, round, about))


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
    parameters = dict(clients[0][1].network.named_parameters())
    total = {name: torch.zeros_like(server.weights[name], dtype=torch.float64) for name in parameters}
    second_moment = 0.0
    for share, training in clients:
        squares = []
        for batch in batches_of(training.client):
            found = torch.autograd.grad(method.loss(training, batch), list(parameters.values()), allow_unused=True)
            gradients = {name: g.cpu() for name, g in zip(parameters, found, strict=True) if g is not None}
            for name, g in gradients.items():
                total[name][tuple(map(slice, g.shape))].add_(
                    g, alpha=share * len(batch.labels) / len(training.client.rows)
                )
            squares.append(squared_norm(gradients.values()))
        second_moment = max(second_moment, sum(squares) / len(squares))
    return total, second_moment


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
    network = Networks(run.device, method.prepare).load(spec, shrink(server.weights, spec)).eval()
    clients = [Client(k, task, 0, run, run.splits.rows(task, "train", k), {}) for k in run.splits.clients_with(task)]
    total = sum(client.weight for client in clients)
    return [(client.weight / total, LocalTraining(method, client, network, {})) for client in clients]


def batches_of(client: Client) -> Iterator[Batch]:
    """Its train rows, not augmented, in a random order that is always the same."""
    order = torch.randperm(len(client.rows), generator=client.generator("monitors"))
    return client.run.batches.ordered(client.rows.take(order.numpy()), client.run.params.federation.batch_size)


def local_steps(method: "Method", task: int) -> int:
    """S: the local steps of the client that takes most of them in a round."""
    federation = method.run.params.federation
    most = max(len(method.rows(task, client)) for client in method.participants(task))
    return federation.local_epochs * math.ceil(most / federation.batch_size)


def squared_norm(tensors: Iterable[Tensor]) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors))


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor], names: Iterable[str]) -> float:
    """Euclidean, over the tensors of these names."""
    return math.sqrt(squared_norm(one[name].double() - other[name].double() for name in names))


# From here on numbers only: what was seen, beside what Theorem 2 allows.


@dataclass(frozen=True)
class Stretch:
    """The training of one later task t: E_t, S_t, eta_t and beta_tau^(t-1)."""

    rounds: int
    steps: float
    lr: float
    beta: float


def forgetting_bound(second_moment: float, smoothness: float, later: Iterable[Stretch]) -> float:
    """Eq. 13: G^2 sum_t E_t (beta S_t eta_t + L/2 S_t^2 eta_t^2)."""
    return second_moment * sum(
        t.rounds * (t.beta * t.steps * t.lr + smoothness / 2 * (t.steps * t.lr) ** 2) for t in later
    )


def with_bounds(seen: pl.DataFrame, rounds: pl.DataFrame, lr: float) -> pl.DataFrame:
    """The table of the tasks so far, with loss_increase and theorem_bound of each old task after each later one.

    E_t and the server's eta_g are those of the rounds table, and eta_t = eta_g lr. Constants are the largest that were
    seen up to the later task, beta the largest in each task (where there is none, that gradient was 0 throughout).
    """
    losses, betas, steps, squares, slopes = (
        _largest(seen, monitor) for monitor in ("loss", "beta", "local_steps", "second_moment", "smoothness")
    )
    budgets = rounds.group_by("task").agg(pl.len(), pl.max("server_lr"))
    trained = {task: (count, lr * eta) for task, count, eta in budgets.iter_rows()}
    rows = []
    for (task, about), value in sorted(losses.items()):
        if about == task:
            continue
        later = [
            Stretch(trained[t][0], steps[t, None], trained[t][1], betas.get((t, about), 0.0))
            for t in range(about + 1, task + 1)
        ]
        G2, L = (max((v for (t, _), v in found.items() if t <= task), default=0.0) for found in (squares, slopes))
        rows.append(row("loss_increase", task, value - losses[about, about], about=about))
        rows.append(row("theorem_bound", task, forgetting_bound(G2, L, later), about=about))
    return pl.concat([seen, table(rows)])


def _largest(seen: pl.DataFrame, monitor: str) -> dict[tuple[int, Any], float]:
    """By task and by the task that it is about, over rounds."""
    found = seen.filter(pl.col("monitor") == monitor).group_by("task", "about").agg(pl.max("value"))
    return {(task, about): value for task, about, value in found.iter_rows()}
