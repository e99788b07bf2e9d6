"""FedProTIP: replay-free gradient projection with task identity prediction (section 4, Algorithm 1).

FedAvg with three parts. Training is local projected descent (local_projection.py). After a task each client sends core
bases of the protected layers' inputs (protected_subspace.py) for its images on the global model (eq. 6 to 8), and the
server appends them to its own bases: their union (eq. 9), which many clients fill with what each alone has, or by
default the leading directions of their weighted sum, sum_k U_k diag(sigma_k^2) U_k^T, up to one threshold on the energy
of all clients' inputs. The features have bases of their own, by which tasks are predicted (task_identity.py).
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fclmodels.backbones.model.network import Network, compute_task_cross_entropy
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.messages import Payload
from fclmodels.federation.method import Obstacle
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.adaptive_threshold import (
    FIXED,
    compute_known_share,
)
from fclmodels.methods.parts.core_bases import FEATURES, CoreBases, CoreBasesSettings
from fclmodels.methods.parts.local_projection import LocalProjection, ProjectionSettings
from fclmodels.methods.parts.protected_subspace import Bases, ProtectedSubspace
from fclmodels.methods.parts.task_identity import TaskIdentity, copy_earlier_rows, give_own_heads
from fclmodels.numerics.subspace import (
    find_smallest_rank,
    principal,
    rank_by_mass,
    union,
)
from fclmodels.numerics.task_relevance import Router

PLAIN_TIP = {"tip_later": "features", "tip_reject": "never", "head_start": "drawn"}
PROFILES = {
    "paper": {**FIXED, "rank_rule": "residual-mass", "union": "union", "tip_rank": None, **PLAIN_TIP},
    "release": {
        **FIXED,
        "threshold": 0.775,
        "rank_rule": "total-energy",
        "union": "sequential",
        "samples": 1280,
        "batch_norm": "average",
        "decay": "all",
        **PLAIN_TIP,
        "tip_rule": "release",
        "tip_rank": 20,
        "tip_threshold": 1.0,
    },
}


class FedProTIP(FedAvg):
    """Projects every local step, and predicts a sample's task by the subspaces that its features lie in."""

    name = "fedprotip"
    paper = "FedProTIP: Task-Agnostic Federated Continual Learning via Replay-Free Gradient Projection"

    class Settings(CoreBasesSettings, ProjectionSettings, FedAvg.Settings):
        profiles = PROFILES
        threshold: float = Field(0.7, gt=0, le=1, description="share that the core bases of the first task keep")
        projection: Literal["local", "global"] = Field(
            "local", description="of every local step; global: only of the aggregated update (section 6.3)"
        )

        @model_validator(mode="after")
        def _exchange_fits_the_rest(self) -> "FedProTIP.Settings":
            if self.sketch_width is not None and self.exchange == "bases":
                raise ValueError("sketch_width needs exchange: sketch.")
            if (self.union, self.exchange) == ("sequential", "sketch"):
                raise ValueError("union: sequential asks clients one by one, and sketches are only summed.")
            if self.union != "weighted-sum" and self.threshold_by == "knowledge":
                raise ValueError(f"union: {self.union} needs threshold_by: fixed, for each client finds a rank alone.")
            return self

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        run = give_own_heads(run, settings)
        super().__init__(settings, run)
        self.subspace = ProtectedSubspace(settings, run, self.name)
        self.projection = LocalProjection(settings, run, self.subspace)
        self.identity = TaskIdentity(settings, run, self.name) if settings.tip else None
        self.core_bases = CoreBases(settings, run, self.networks, self.subspace, self.identity)
        self.declare(self.core_bases.exchange)
        if self.identity:
            self.declare(self.identity.references)
            if self.identity.calibrates:
                self.declare(self.identity.margin.exchange)
        self.projection.bend(self)

    @property
    def obstacle_to_sums(self) -> Obstacle | None:
        if self.settings.exchange == "bases":
            return Obstacle("methods.fedprotip.exchange: bases sends each client's own", "Use exchange: sketch")
        return self.identity.obstacle_to_sums if self.identity else None

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        return Obstacle(
            "sends bases, spectra and references, and noise would fill all their directions", "Use methods.fot"
        )

    def list_remarks(self, knowledge: Any) -> list[str]:
        of_tasks = self.identity.list_remarks(knowledge) if self.identity else []
        return [*self.subspace.list_remarks(knowledge), *of_tasks]

    # Training: projected on the clients, or with `projection: global` on the server.

    def create_server(self) -> Server:
        server = super().create_server()
        knowledge = self.subspace.begin(self.networks.load(server.spec, server.weights))
        return replace(server, knowledge=knowledge)

    def start_task(self, server: Server, task: int) -> Server:
        server = super().start_task(server, task)
        if self.settings.head_start == "earlier":
            server = replace(server, weights=copy_earlier_rows(server.spec, server.weights))
        if self.identity:
            server = self.identity.start_task(server)
        return self.subspace.start_task(server)

    def make_payload(self, server: Server) -> Payload:
        local = self.settings.projection == "local"
        return {**super().make_payload(server), **(self.subspace.make_payload(server) if local else {})}

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        spans = {name: payload[name].tensors if name in payload else {} for name in ("bases", "complements")}
        self.projection.start(training, spans)

    def select_trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        return self.projection.select_trainable(super().select_trainable(network, task), task)

    def compute_cross_entropy(self, network: Network, features: Tensor, labels: Tensor, task: int) -> Tensor:
        """Return it over the task's classes only, whatever `model.loss_over` says: the head's other rows are frozen."""
        return compute_task_cross_entropy(network, features, labels, task)

    def project(self, server: Server, update: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.admit_changes(server, update) if self.settings.projection == "global" else update

    def admit_changes(self, server: Server, changes: dict[str, Tensor]) -> dict[str, Tensor]:
        network = self.networks.load(server.spec, server.weights)
        changes = self.projection.remove_frozen_rows(network, server.task, changes)
        return self.subspace.project(server, network, changes)

    def make_router(self, server: Server) -> Router | None:
        return self.identity.make_router(server) if self.identity else None

    # After a task, on the server.

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        """Return the server whose bases have grown by the clients' core bases, and that predicts the task."""
        bases = dict(server.knowledge["bases"])
        if self.identity:
            bases[FEATURES] = self.identity.join_feature_bases(server)
        features: list[Tensor] = []
        threshold = self.subspace.find_threshold(server.task)
        sums: dict[str, dict[str, Tensor]] = {}
        turns = self._list_turns(cohort.clients)
        for clients in turns:
            replies = cohort.ask(self.core_bases.exchange, server, bases, clients=clients)
            if not replies.clients and (sums or clients != turns[-1]):
                continue  # this client's reply was refused; others are used
            parts = [part for part in ("columns", "spectra", "energy", "right", "drift") if part in replies.parts]
            sums = {part: add_by_name(sums.get(part, {}), replies.sum(part)) for part in parts}
            received = list(self.core_bases.yield_directions(replies))
            if self.identity:
                features += [directions.pop(FEATURES) for directions in received]
            if self.core_bases.are_summed:
                if self.core_bases.adapts:
                    threshold *= compute_known_share(sums["right"], len(server.spec.tasks[server.task]))
                received = [self.join(received, sums["energy"], threshold)]
            for directions in received:
                bases = self.add_within_budget(server, bases, directions)
        facts = {
            "columns": {name: counts.tolist() for name, counts in sums["columns"].items()},
            "spectra": {name: squares.sqrt() for name, squares in sums["spectra"].items()},
        }
        layers = {name: bases[name] for name in server.knowledge["bases"]}
        server = self.subspace.replace_bases(server, layers, threshold, **facts)
        if not self.identity:
            return server
        return self.identity.learn_task(self.identity.note_drift(server, sums.get("drift", {})), cohort, features)

    def join(self, received: list[Bases], energies: dict[str, Tensor], threshold: float) -> Bases:
        """Return of each layer the leading directions [d, r] of the sum over clients of U diag(sigma^2) U^T.

        received: U diag(sigma) of each client, or one sketch of them all. By energy they cover the threshold's share of
        all clients' inputs together with what the basis covers already; by mass (eq. 8) that share of the sum.
        """
        joined = {}
        for name, energy in energies.items():
            U, sigma = principal(torch.cat([directions[name] for directions in received], dim=1))
            if self.settings.exchange == "sketch":
                sigma = sigma / self.core_bases.limit_sketch_width(len(U)) ** 0.5
            if self.settings.rank_rule == "residual-mass":
                rank = rank_by_mass(sigma, threshold)
            else:
                covered = float(energy[0] - energy[1])
                rank = find_smallest_rank(sigma.double().square().cumsum(0), threshold * float(energy[0]) - covered)
            joined[name] = U[:, :rank]
        return joined

    def add_within_budget(self, server: Server, bases: Bases, directions: Bases) -> Bases:
        """Return the bases with these directions, and with no more of a task's than its budget."""
        grown = union(bases, directions)
        for name, basis in server.knowledge["bases"].items():
            most = self.subspace.limit_rank(grown[name].shape[1] - basis.shape[1], basis)
            grown[name] = grown[name][:, : basis.shape[1] + most].contiguous()
        return grown

    def _list_turns(self, clients: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the clients that are asked at once: all, or in the release's variant one by one, on growing bases."""
        return [(client,) for client in clients] if self.settings.union == "sequential" else [clients]


def add_by_name(sums: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: sums[name] + tensor if sums else tensor for name, tensor in more.items()}
