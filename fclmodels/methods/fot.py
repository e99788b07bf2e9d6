"""FOT: Federated Orthogonal Training (Bakman et al. 2024, Algorithms 1 and 2).

Clients train as in FedAvg. FedProject: the server removes from their mean update the part that acts on the principal
subspace of earlier tasks' layer inputs (eq. 5 to 7; protected_subspace.py). GPSE: after each task every client sends
one Gaussian sketch of each layer's input outside that subspace (eq. 8, 9); leading directions of the sum join it (eq.
12). Appendix H: under federation.privacy sketches are clipped and get noise; the server may subtract its energy.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn

from fclmodels.backbones.inputs.layer_capture import Layer
from fclmodels.backbones.inputs.layer_inputs import ROUNDING_OF_GRAM
from fclmodels.backbones.model.network import Network
from fclmodels.errors import UserError
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
from fclmodels.methods.parts.protected_subspace import Bases, ProtectedSubspace, measure_energy
from fclmodels.numerics.gaussian_mechanism import clip_norm, remove_noise
from fclmodels.numerics.subspace import (
    limit_columns,
    principal,
    rank_as_printed,
    rank_as_released,
    rank_by_energy,
)

RANK_RULES = {"total-energy": rank_by_energy, "paper": rank_as_printed, "release": rank_as_released}
ALL_COLUMNS = {"samples": None, "patches": None}
PROFILES = {
    "paper": {**FIXED, **ALL_COLUMNS, "rank_rule": "paper", "sketch_conv": 5.0, "sketch_linear": 5.0},
    "release": {
        **FIXED,
        **ALL_COLUMNS,
        "rank_rule": "release",
        "gpse": "local",
        "sketch_conv": 1.0,  # of AlexNet; of its ResNets 5
        "sketch_linear": 5.0,  # but for permuted MNIST, 1
    },
}
Tensors = dict[str, Tensor]


class Fot(FedAvg):
    """Keeps the server's updates orthogonal to earlier tasks' layer inputs, which clients sketch once a task."""

    name = "fot"
    paper = "Federated Orthogonal Training: Mitigating Global Catastrophic Forgetting in Continual Federated Learning"

    class Settings(AdaptiveSettings, FedAvg.Settings):
        profiles = PROFILES
        rank_rule: Literal["total-energy", "paper", "release"] = Field(
            "total-energy",
            description="energy with what is covered already (GPM's); paper: eq. 12, norms in place of energies, with "
            "1 - its second term (as printed it keeps nothing); release: energy against a ratio of norms, at least one",
        )
        sketch_conv: PositiveFloat = Field(2.0, description="width of a convolution's sketch, in times its d")
        sketch_linear: PositiveFloat = Field(2.0, description="width of a linear layer's sketch, in times its d")
        gpse: Literal["global", "local"] = Field(
            "global",
            description="all clients on the final global model; local: the last round's clients on their own (release)",
        )
        sketch_clip: PositiveFloat = Field(
            1.0, description="under federation.privacy: largest Frobenius norm of a client's sketch of a layer"
        )
        sketch_denoise: bool = Field(
            True, description="under federation.privacy: subtract the noise's energy (ours); false: appendix H as it is"
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        if settings.gpse == "local" and run.params.federation.faults.late:
            raise UserError(
                "methods.fot.gpse: local takes sketches from the last round's replies, and late ones of earlier rounds "
                "have none. Use gpse: global, or federation.faults.late: 0."
            )
        self.subspace = ProtectedSubspace(settings, run, self.name)
        self.is_private = run.params.federation.privacy.on
        # Under noise nothing is counted: it would be one more release for each client.
        self.adapts = settings.threshold_by == "knowledge" and not self.is_private
        self.gpse = Exchange("gpse", self.make_gpse_payload, self.answer_gpse, self.make_sketch_form)
        if settings.gpse == "global":
            self.declare(self.gpse)

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        if self.settings.gpse != "global":
            return Obstacle("covers sketches by noise under gpse: global", "Set this")
        return None

    def list_remarks(self, knowledge: Any) -> list[str]:
        return self.subspace.list_remarks(knowledge)

    def create_server(self) -> Server:
        server = super().create_server()
        return replace(server, knowledge=self.subspace.begin(self.networks.load(server.spec, server.weights)))

    def start_task(self, server: Server, task: int) -> Server:
        return self.subspace.start_task(super().start_task(server, task))

    # FedProject, eq. 6.

    def project(self, server: Server, update: Tensors) -> Tensors:
        return self.admit_changes(server, update)

    def admit_changes(self, server: Server, changes: Tensors) -> Tensors:
        return self.subspace.project(server, self.networks.load(server.spec, server.weights), changes)

    # GPSE and ExpandOrthogonalSet (Algorithm 2).

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        if self.settings.gpse == "global":
            server = store_sums(server, cohort.ask(self.gpse, server))
        sums = server.knowledge["told"]
        threshold = self.subspace.find_threshold(server.task)
        if self.adapts:
            threshold *= compute_known_share(sums["right"], len(server.spec.tasks[server.task]))
        directions, spectra = {}, {}
        for name, sketch in sums["sketch"].items():
            U, sigma = principal(sketch)
            read = self.read_noisy if self.is_private else self.measure
            sigma, share = read(name, sigma, sums)
            spectra[name] = sigma
            rank = RANK_RULES[self.settings.rank_rule](sigma, share, threshold)
            directions[name] = U[:, : self.subspace.limit_rank(rank, server.knowledge["bases"][name])]
        columns = {name: counts.tolist() for name, counts in sums.get("columns", {}).items()}
        knowledge = {name: value for name, value in server.knowledge.items() if name != "told"}
        server = replace(server, knowledge=knowledge)
        return self.subspace.extend(server, directions, threshold, spectra=spectra, columns=columns)

    def make_gpse_payload(self, server: Server) -> Payload:
        return {"weights": Part("weights", server.weights), **bases_payload(server)}

    def make_sketch_form(self, task: int, round: int) -> Form:
        """Return the outlines of a client's sketches; under noise of the clipped ones, with a share of each layer."""
        layers = self.subspace.list_layers(self.networks.build(self.run.make_spec(task + 1)))
        shapes = {name: (layer.width, self.limit_sketch_width(layer)) for name, layer in layers.items()}
        if self.is_private:
            root = len(layers) ** 0.5
            return {
                "sketch": make_outline("sketch", shapes, bound=self.settings.sketch_clip * root),
                "share": make_outline("count", dict.fromkeys(layers, ()), torch.float64, bound=root),
            }
        counts = {"right": outline_counts()} if self.adapts else {}
        return {
            "sketch": make_outline("sketch", shapes),
            "energy": make_outline("energy", dict.fromkeys(layers, (4,)), torch.float64),
            "columns": make_outline("count", dict.fromkeys(layers, (2,)), torch.int64),
            **counts,
        }

    def answer_gpse(self, client: Client, payload: Payload) -> Answer:
        """Return the client's sketches (RandomizedActivationCollection, Algorithm 2) on the global model."""
        network = self.networks.load(self.run.make_spec(client.task + 1), self.join_own_weights(client, payload))
        sketches = self.draw_sketches(client, network, payload["bases"].tensors)
        return Answer(self.clip(sketches) if self.is_private else sketches, client.memory)

    def draw_sketches(self, client: Client, network: Network, bases: Bases) -> dict[str, Tensors]:
        """Return of each layer the sketch [d, s] of X* (eq. 9), its energies, and the numbers of columns used and all.

        Also how many labels the model knows, where the threshold depends on that.
        """
        random = client.make_generator("sketch")
        layers = self.subspace.list_layers(network)
        sketches, energies, columns = {}, {}, {}
        for name, X in self.subspace.observe(client, network, layers).items():
            sketches[name] = X.draw_sketch(bases[name], self.limit_sketch_width(layers[name]), random)
            energies[name] = measure_energy(X, bases[name], len(client.rows))
            columns[name] = torch.tensor([X.count, X.total])
        counts = {"right": count_right(self.run, client, network)} if self.adapts else {}
        return {"sketch": sketches, "energy": energies, "columns": columns, **counts}

    def limit_sketch_width(self, layer: Layer) -> int:
        """Return s, the sampling dimension; of a wide layer no more than it has room for."""
        conv = isinstance(layer.module, nn.Conv2d)
        times = self.settings.sketch_conv if conv else self.settings.sketch_linear
        return limit_columns(max(1, round(layer.width * times)), layer.width)

    def measure(self, name: str, sigma: Tensor, sums: dict[str, Any]) -> tuple[Tensor, float]:
        """Return a sketch's singular values, 0 where they are rounding, and the share of the input outside its basis.

        The share is that of the energy, or by the paper and its release the clients' mean of that of the norm.
        """
        energy = sums["energy"][name]
        least = ROUNDING_OF_GRAM * (sums["sketch"][name].shape[1] * energy[0]).sqrt()
        norms = self.settings.rank_rule != "total-energy"
        return sigma.where(sigma > least, 0.0), float(energy[2] / energy[3] if norms else share_outside(energy))

    # Appendix H.

    def clip(self, sketches: Mapping[str, Tensors]) -> dict[str, Tensors]:
        """Return of each layer the clipped sketch (eq. 14), and ||X*||^2 / ||X||^2, which is at most 1."""
        return {
            "sketch": {name: clip_norm(A, self.settings.sketch_clip) for name, A in sketches["sketch"].items()},
            "share": {name: share_outside(energy) for name, energy in sketches["energy"].items()},
        }

    def read_noisy(self, name: str, sigma: Tensor, sums: dict[str, Any]) -> tuple[Tensor, float]:
        """Return singular values, less the noise's energy where that is set, and the mean share as in `measure`.

        The mean is over clients expected to join.
        """
        expected = sums["clients"] * self.run.params.federation.privacy.sample_rate
        share = min(max(float(sums["share"][name]) / expected, 0.0), 1.0)
        if self.settings.rank_rule != "total-energy":
            share **= 0.5
        if not self.settings.sketch_denoise:
            return sigma, share
        return remove_noise(sigma, sums["sketch"][name].shape, sums["noise"]), share

    # The release's GPSE: sketches of the last round's clients, on the models that they have just trained.

    def make_payload(self, server: Server) -> Payload:
        local = self.settings.gpse == "local"
        return {**super().make_payload(server), **(bases_payload(server) if local else {})}

    def make_update_form(self, task: int, round: int) -> Form:
        sketches = self.make_sketch_form(task, round) if self._read_sketches(task, round) else {}
        return {**super().make_update_form(task, round), **sketches}

    def make_further_parts(self, training: LocalTraining, payload: Payload) -> dict[str, Tensors]:
        client = training.client
        if not self._read_sketches(client.task, client.round):
            return {}
        return self.draw_sketches(client, training.network, payload["bases"].tensors)

    def aggregate(self, server: Server, replies: Replies) -> Server:
        server = super().aggregate(server, replies)
        return store_sums(server, replies) if "sketch" in replies.parts else server

    def _read_sketches(self, task: int, round: int) -> bool:
        return self.settings.gpse == "local" and round == self.run.count_rounds(task) - 1


def share_outside(energy: Tensor) -> Tensor:
    """Return ||X*||^2 / ||X||^2; 0 where a layer sees zeros only."""
    return energy[1] / energy[0] if energy[0] else energy[0]


def bases_payload(server: Server) -> Payload:
    return {"bases": Part("basis", server.knowledge["bases"], once=True)}


def store_sums(server: Server, replies: Replies) -> Server:
    """Return the server with the sums of clients' sketches, and under noise the sketches' standard deviation of it."""
    parts = ("sketch", "energy", "columns", "right", "share")
    sums: dict[str, Any] = {part: replies.sum(part) for part in parts if part in replies.parts}
    if noise := replies.compute_noise("sketch"):
        sums |= {"noise": noise, "clients": len(replies.clients)}
    return replace(server, knowledge={**server.knowledge, "told": sums})
