"""FedSSI: synaptic intelligence along the path of a personalised surrogate (Li et al., ICML 2025), in our reading.

A client's loss gains alpha sum_j Omega_j (w_j - w*_j)^2, with w* the global model after the last task that it had. When
a task has ended, it copies w* to a surrogate v and trains that on the task's rows (surrogate.py); of its steps
dv = v_after - v_before and the gradients g of cross entropy alone,

    c_j = sum over steps of -g_j dv_j,    Omega_j += max(c_j, 0) / ((v_end - v_0)_j^2 + xi).

So importance is measured between local and global, not along the client's own training (Zenke et al. 2017), and
heterogeneous clients do not hold on to what is theirs alone. Nothing further travels and no sample is stored.

Omega has no bound, and an explicit step of the penalty diverges where lr alpha Omega exceeds 1. So it is taken after
the optimiser's step, and implicitly (ours): w <- w* + (w - w*) / (1 + 2 lr alpha Omega).

The paper was not at hand and there is no code. Known are the loss, the surrogate and its lambda; ours are xi, alpha,
lambda's and s's defaults, max(c, 0), that Omega sums over tasks, and v's start. With alpha 0 and in the first task this
is FedAvg. memory: `importance` Omega and `centre` w*, which do not leave the client.
"""

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange
from fclmodels.federation.messages import Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.springs import extend_rows
from fclmodels.methods.parts.surrogate import Surrogate, SurrogateSettings, choose_rate

Tensors = dict[str, Tensor]


class FedSsi(FedAvg):
    """Clients hold weights that mattered along the way of a model between their own and the server's; our reading."""

    name = "fedssi"
    paper = "Rehearsal-Free Continual Federated Learning with Synergistic Synaptic Intelligence"

    class Settings(SurrogateSettings, FedAvg.Settings):
        alpha: NonNegativeFloat = Field(
            0.1,
            le=1e9,
            description="weight of the penalty Omega (w - w*)^2",
        )
        damping: PositiveFloat = Field(
            1e-3, le=1e6, description="xi, added to squared distances of the surrogate's way"
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        choose_rate(run, settings)
        self.measure = self.declare(Exchange("remember", self.make_payload, self.add_importance))

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask(self.measure, server)
        return server

    def add_importance(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with the importance of the task that has ended; the answer itself is empty."""
        surrogate = Surrogate(self, client, payload, self.settings)
        arriving = self.run.batches.read_raw(client.rows)
        path, way = follow_path(surrogate, arriving)
        if not all(total.isfinite().all() for total in (*path.values(), *way.values())):
            raise UserError(
                f"methods.fedssi: client {client.index}'s surrogate diverged after task {client.task}. "
                f"Lower methods.fedssi.surrogate_lr, now {surrogate.lr:g}."
            )
        measured = divide_path(path, way, self.settings.damping)
        later, old = self.select_trainable(surrogate.network, client.task + 1), client.memory.get("importance", {})
        importance = {name: new for name, new in measured.items() if name in later}
        for name in importance.keys() & old.keys():
            importance[name] += extend_rows(old[name], len(importance[name]))
        return Answer(
            {}, {**client.memory, "importance": importance, "centre": {n: surrogate.origin[n] for n in importance}}
        )

    @torch.no_grad()
    def finish_step(self, training: LocalTraining) -> None:
        """Take the penalty's implicit step: w - w* shrinks by 1 / (1 + 2 lr alpha Omega)."""
        memory = training.client.memory
        for name, omega in memory.get("importance", {}).items() if self.settings.alpha else ():
            if name in training.parameters:
                w, centre = training.parameters[name][: len(omega)], memory["centre"][name]
                w.copy_(centre + (w - centre) / (1 + 2 * training.lr * self.settings.alpha * omega))


def follow_path(surrogate: Surrogate, samples: Batch) -> tuple[Tensors, Tensors]:
    """Return c, the sum of -g dv over all steps of the surrogate on raw samples, and v_end - v_0."""
    path = {name: torch.zeros_like(v) for name, v in surrogate.parameters.items()}
    for _, _, batch in surrogate.iterate(samples):
        gradients, moves = surrogate.step(batch)
        for name, total in path.items():
            total.addcmul_(gradients[name], moves[name], value=-1)
    return path, {name: v.detach() - surrogate.origin[name] for name, v in surrogate.parameters.items()}


def divide_path(path: Tensors, way: Tensors, damping: float) -> Tensors:
    """Return max(c, 0) / ((v_end - v_0)^2 + xi)."""
    return {name: c.clamp(min=0) / (way[name].square() + damping) for name, c in path.items()}
