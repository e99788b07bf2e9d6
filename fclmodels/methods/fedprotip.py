"""FedProTIP: replay-free gradient projection with task identity prediction (section 4, Algorithm 1).

FedAvg with three parts. Training is local projected descent (local_projection.py). After a task each client sends core
bases of the protected layers' inputs (protected_subspace.py) for its images on the global model (eq. 6 to 8), and the
server appends them to its own bases: their union (eq. 9), which many clients fill with what each alone has, or by
default the leading directions of their weighted sum, sum_k U_k diag(sigma_k^2) U_k^T, up to one threshold on the energy
of all clients' inputs. The features have bases of their own, by which tasks are predicted (task_identity.py).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from fclmodels.backbones.inputs.layer_inputs import LayerInputs
from fclmodels.backbones.model.network import Network
from fclmodels.backbones.model.spec import to_local_labels
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.method import Obstacle
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.adaptive_threshold import (
    FIXED,
    AdaptiveSettings,
    compute_known_share,
    count_right,
    outline_counts,
)
from fclmodels.methods.parts.local_projection import LocalProjection, ProjectionSettings
from fclmodels.methods.parts.protected_subspace import Bases, ProtectedSubspace, measure_energy
from fclmodels.methods.parts.task_identity import TaskIdentity, TipSettings, copy_earlier_rows, give_own_heads
from fclmodels.numerics.sketch import gaussian_sketch
from fclmodels.numerics.subspace import (
    find_smallest_rank,
    limit_columns,
    principal,
    rank_by_energy,
    rank_by_mass,
    union,
)
from fclmodels.numerics.task_relevance import Router

# TIP's basis among those of the layers, and the layer whose input it is of.
FEATURES, LAST = "features", "heads.0"
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

    class Settings(TipSettings, ProjectionSettings, AdaptiveSettings, FedAvg.Settings):
        profiles = PROFILES
        threshold: float = Field(0.7, gt=0, le=1, description="share that the core bases of the first task keep")
        patches: PositiveInt = Field(512, description="m_s, random columns of each layer's input that a client takes")
        rank_rule: Literal["total-energy", "residual-mass"] = Field(
            "total-energy",
            description="of layers: share of the input's energy, with what is covered already (release; Table 9's "
            "bytes); residual-mass: share of the residual's singular values (eq. 8 as printed)",
        )
        union: Literal["weighted-sum", "union", "sequential"] = Field(
            "weighted-sum",
            description="leading directions of the clients' weighted sum, by one threshold (ours); union: all clients' "
            "bases (eq. 9); sequential: each client adds to the earlier ones', and the very first takes a column less "
            "than its threshold needs, but one (release)",
        )
        exchange: Literal["bases", "sketch"] = Field(
            "bases", description="a client's bases, or a Gaussian sketch of them that is only summed (eq. 40)"
        )
        sketch_width: PositiveInt | None = Field(
            None, description="columns of a sketch; null: the layer's d, fewer if wide"
        )
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
        self.sums_bases = settings.union == "weighted-sum"
        self.adapts = settings.threshold_by == "knowledge"
        self.core_bases = self.declare(
            Exchange("bases", self.make_bases_payload, self.answer_core_bases, self.make_core_bases_form)
        )
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
        return [
            *self.subspace.list_remarks(knowledge),
            *(self.identity.list_remarks(knowledge) if self.identity else []),
        ]

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
        return cross_entropy(network.compute_logits(features, task), to_local_labels(network.spec, task, labels))

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
            replies = cohort.ask(self.core_bases, server, bases, clients=clients)
            if not replies.clients and (sums or clients != turns[-1]):
                continue  # this client's reply was refused; others are used
            parts = [part for part in ("columns", "spectra", "energy", "right", "drift") if part in replies.parts]
            sums = {part: add_by_name(sums.get(part, {}), replies.sum(part)) for part in parts}
            received = list(self._yield_directions(replies))
            if self.identity:
                features += [directions.pop(FEATURES) for directions in received]
            if self.sums_bases:
                if self.adapts:
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
                sigma = sigma / self.limit_sketch_width(len(U)) ** 0.5
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

    def _yield_directions(self, replies: Replies) -> Iterator[Bases]:
        """Yield directions by layer, of each client or of all together."""
        if self.settings.exchange == "sketch":
            yield dict(replies.sum("directions"))
        else:
            features = dict(replies.yield_each("features")) if "features" in replies.parts else {}
            for client, directions in replies.yield_each("directions"):
                yield {**directions, **features.get(client, {})}

    # The exchange of core bases.

    def make_bases_payload(self, server: Server, bases: Bases) -> Payload:
        payload = {"weights": Part("weights", server.weights), "bases": Part("basis", bases)}
        if "before" in server.knowledge:
            payload["before"] = Part("weights", server.knowledge["before"])
        return payload

    def make_core_bases_form(self, task: int, round: int) -> Form:
        network = self.networks.of(self.run.make_spec(task + 1))
        dtype = next(network.parameters()).dtype
        layers = {name: layer.width for name, layer in self.subspace.list_layers(network).items()}
        features = {FEATURES: network.backbone.features} if self.identity else {}
        widths = layers | features
        numbers = {
            "spectra": make_outline("statistics", {name: (d,) for name, d in widths.items()}, dtype),
            "columns": make_outline("count", dict.fromkeys(widths, (2,)), torch.int64),
        }
        if self.sums_bases:
            numbers["energy"] = make_outline("energy", dict.fromkeys(layers, (4,)), torch.float64)
        if self.adapts:
            numbers["right"] = outline_counts()
        if self.identity and self.identity.measures_drift(task):
            numbers["drift"] = make_outline("statistics", {"moved": (), "size": ()}, torch.float64)
        if self.settings.exchange == "sketch":
            sketch = make_outline(
                "sketch", {name: (d, self.limit_sketch_width(d)) for name, d in widths.items()}, dtype
            )
            return {"directions": sketch, **numbers}
        # How many columns a client's directions have is its own.
        no_columns = {name: (d, 0) for name, d in widths.items()}
        if self.sums_bases:
            return {"directions": make_outline("directions", no_columns, dtype, "each"), **numbers}
        of_features = {name: no_columns.pop(name) for name in features}
        bases = make_outline("basis", no_columns, dtype, "each")
        if not self.identity:
            return {"directions": bases, **numbers}
        return {"directions": bases, **numbers, "features": make_outline("directions", of_features, dtype, "each")}

    def answer_core_bases(self, client: Client, payload: Payload) -> Answer:
        """Return core bases of the client's layer inputs outside of the bases that it was sent."""
        network = self.networks.load(self.run.make_spec(client.task + 1), payload["weights"].tensors)
        bases, layers = payload["bases"].tensors, self.subspace.list_all_layers(network)
        layer_of = {name: LAST if name == FEATURES else name for name in bases}
        # Eq. 8 needs the singular values of the m_s columns, which a Gram matrix would square.
        observed = {name: layers[name] for name in layer_of.values()}
        inputs = self.subspace.observe(client, network, observed, self.settings.patches)
        tensors = self.extract(client, {name: inputs[layer_of[name]] for name in bases}, bases)
        if self.adapts:
            tensors["right"] = count_right(self.run, client, network)
        if not self.identity:
            return Answer(tensors, client.memory)
        memory, drift = self.identity.remember(client, partial(self.networks.load, network.spec), payload)
        return Answer({**tensors, **({"drift": drift} if drift else {})}, memory)

    def extract(self, client: Client, inputs: dict[str, LayerInputs], bases: Bases) -> dict[str, dict[str, Tensor]]:
        """Return of each input the leading directions U outside its basis (eq. 6 to 8), or a sketch U diag(sigma) G.

        For the features, and for a weighted sum, U diag(sigma), which has the energies too. sigma is scaled from the
        columns used to all, so that clients with more data count more (eq. 40 for the sketch). Further parts: squared
        singular values, padded to d, the numbers of columns used and of all, and of a weighted sum the energies.
        """
        sketch, random = self.settings.exchange == "sketch", client.make_generator("sketch")
        directions, squares, columns, energies = {}, {}, {}, {}
        for name, X in inputs.items():
            U, sigma = X.decompose_principal(bases[name])
            U = U[:, : self._find_rank(name, X, bases[name], sigma, client.task)]
            scaled = U * sigma[: U.shape[1]] * (X.total / X.count) ** 0.5
            # Vectors of small singular values, from a Gram matrix, are orthogonal to some 1e-3 only.
            leading = scaled if name == FEATURES or self.sums_bases else torch.linalg.qr(U).Q
            width = self.limit_sketch_width(X.width)
            directions[name] = gaussian_sketch(scaled, width, random) if sketch else leading.contiguous()
            squares[name] = pad(sigma.square(), (0, X.width - len(sigma)))
            columns[name] = torch.tensor([X.count, X.total])
            if self.sums_bases and name != FEATURES:
                energies[name] = measure_energy(X, bases[name], len(client.rows))
        tensors = {"directions": directions, "spectra": squares, "columns": columns}
        if self.sums_bases:
            return {**tensors, "energy": energies}
        if FEATURES in directions and not sketch:
            tensors["features"] = {FEATURES: directions.pop(FEATURES)}
        return tensors

    def limit_sketch_width(self, d: int) -> int:
        """Return the columns of a layer's sketch; of a wide layer no more than it has room for."""
        return limit_columns(self.settings.sketch_width or d, d)

    def _find_rank(self, name: str, X: LayerInputs, basis: Tensor, sigma: Tensor, task: int) -> int:
        if name == FEATURES:  # by energy, a task whose features are much like earlier ones' would have no direction
            return rank_by_mass(sigma, self.settings.tip_threshold)
        threshold = self.subspace.find_threshold(task)
        if self.settings.rank_rule == "residual-mass":
            return rank_by_mass(sigma, threshold)
        energy = X.measure_energy()
        rank = rank_by_energy(sigma, X.measure_energy(basis) / energy if energy else 0.0, threshold)
        is_very_first = self.settings.union == "sequential" and not basis.shape[1]
        return max(rank - 1, 1) if is_very_first else rank


def add_by_name(sums: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: sums[name] + tensor if sums else tensor for name, tensor in more.items()}
