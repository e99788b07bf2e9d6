"""FOT: Federated Orthogonal Training (Bakman et al. 2024, Algorithms 1 and 2).

Clients train as in FedAvg. FedProject: the server removes from their mean update what acts on the principal subspace
of earlier tasks' layer inputs (eq. 5 to 7). GPSE: after each task every client sends one Gaussian sketch of each
layer's input outside the known subspace (eq. 8, 9); of the sum the leading directions join the subspace (eq. 12).
Appendix H: under federation.privacy sketches are clipped and get Gaussian noise, whose energy the server takes off.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn

from fclmodels.backbones.capture import Layer
from fclmodels.backbones.layer_inputs import ROUNDING_OF_GRAM
from fclmodels.backbones.network import Network
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.cohort import Cohort
from fclmodels.federation.executor import TRAIN
from fclmodels.federation.messages import Kind, Part, Payload, Reply, outline
from fclmodels.federation.replies import Replies
from fclmodels.federation.run import Run
from fclmodels.federation.server import Server
from fclmodels.methods.base import Memory
from fclmodels.methods.subspaces import Bases, Subspaces
from fclmodels.numerics.privacy import clipped, without_noise
from fclmodels.numerics.subspace import principal, release_rank, total_energy
from fclmodels.settings import Settings as BaseSettings

RANK_RULES = {"total-energy": total_energy, "release": release_rank}
# What a client tells of its layers' inputs, as sums over clients.
PARTS: dict[str, Kind] = {"sketch": "sketch", "energy": "energy", "columns": "count"}


class Fot(Subspaces):
    """Keeps the server's updates orthogonal to what earlier tasks' layers saw; clients sketch it once a task."""

    name = "fot"
    paper = "Federated Orthogonal Training: Mitigating Global Catastrophic Forgetting in Continual Federated Learning"

    class Settings(Subspaces.Settings):
        rank_rule: Literal["total-energy", "release"] = Field(
            "total-energy", description="energy with the share already covered; release: the released code's norm ratio"
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

    settings: Settings

    def __init__(self, settings: BaseSettings, run: Run) -> None:
        super().__init__(settings, run)
        if self.settings.gpse == "local" and run.params.federation.faults.late:
            raise UserError(
                "methods.fot.gpse: local takes sketches from the last round's replies, and late ones of earlier rounds "
                "have none. Use gpse: global, or federation.faults.late: 0."
            )

    @property
    def without_bound(self) -> str | None:
        if (self.settings.gpse, self.settings.rank_rule) != ("global", "total-energy"):
            return "covers sketches by noise under gpse: global and rank_rule: total-energy. Set these."
        return super().without_bound

    def sends(self, task: int, round: int) -> dict[str, dict[str, Part]]:
        layers, sent = self.layers(self.networks.of(self.run.spec(task + 1))), super().sends(task, round)
        shapes = {name: (layer.width, self.sketch_width(layer)) for name, layer in layers.items()}
        told = {
            "sketch": outline("sketch", shapes),
            "energy": outline("energy", dict.fromkeys(layers, (4,)), torch.float64),
            "columns": outline("count", dict.fromkeys(layers, (2,)), torch.int64),
        }
        if self.private:
            told = {"sketch": told["sketch"], "share": outline("count", dict.fromkeys(layers, ()), torch.float64)}
        if self.settings.gpse == "global":
            return {**sent, "gpse": told}
        return {TRAIN: {**sent[TRAIN], **(told if round == self.run.rounds(task) - 1 else {})}}

    def admitted(self, server: Server, update: dict[str, Tensor]) -> dict[str, Tensor]:
        """FedProject, eq. 6."""
        return self.admissible(server, update)

    def payload(self, server: Server) -> Payload:
        with_bases = self.settings.gpse == "local"
        return {**super().payload(server), **(known(server) if with_bases else {})}

    def further_parts(self, client: Client, payload: Payload, network: Network) -> dict[str, Part]:
        """The release's GPSE: sketches of the last round's clients, on the models that they have just trained."""
        if self.settings.gpse == "local" and client.round == self.run.rounds(client.task) - 1:
            return self.sketched(client, network, payload["bases"].tensors)
        return {}

    def aggregate(self, server: Server, replies: Replies) -> Server:
        server = super().aggregate(server, replies)
        return told(server, replies) if "sketch" in replies.parts else server

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        """GPSE and ExpandOrthogonalSet (Algorithm 2)."""
        if self.settings.gpse == "global":
            server = told(server, cohort.ask("gpse", {**super().payload(server), **known(server)}))
        sums = server.knowledge["told"]
        directions, spectra = {}, {}
        for name, sketch in sums["sketch"].items():
            U, sigma = principal(sketch)
            if self.private:
                joined = sums["clients"] * self.run.params.federation.privacy.sample_rate
                sigma, share = denoised(sigma, sketch, sums["share"][name], joined, sums["noise"])
            else:
                sigma, share = self.measured(sigma, sketch, sums["energy"][name])
            spectra[name] = sigma
            directions[name] = U[:, : RANK_RULES[self.settings.rank_rule](sigma, share, self.threshold(server.task))]
        columns = {name: counts.tolist() for name, counts in sums.get("columns", {}).items()}
        kept = {name: value for name, value in server.knowledge.items() if name != "told"}
        return self.extended(replace(server, knowledge=kept), directions, spectra=spectra, columns=columns)

    def answer(self, client: Client, question: str, payload: Payload) -> tuple[Reply, Memory]:
        """RandomizedActivationCollection (Algorithm 2), on the global model."""
        weights = self.whole(client, payload)
        network = self.networks.load(self.run.spec(client.task + 1), weights)
        parts = self.sketched(client, network, payload["bases"].tensors)
        if self.private:
            parts = self.bounded(parts)
        return Reply(parts), client.memory

    def sketched(self, client: Client, network: Network, bases: Bases) -> dict[str, Part]:
        """Of each layer: the sketch [d, s] of X* (eq. 9), its energies, and how many columns were taken of how many.

        energy: ||X||^2, ||X*||^2, n ||X*|| / ||X|| and n, the number of samples.
        """
        random, samples = client.generator("sketch"), len(client.rows)
        layers = self.layers(network)
        sketches, energies, columns = {}, {}, {}
        for name, seen in self.observe(client, network, layers).items():
            all_of_it, outside = seen.energy(), seen.energy(bases[name])
            ratio = (outside / all_of_it) ** 0.5 if all_of_it else 0.0
            sketches[name] = seen.sketch(bases[name], self.sketch_width(layers[name]), random)
            energies[name] = torch.tensor([all_of_it, outside, samples * ratio, samples], dtype=torch.float64)
            columns[name] = torch.tensor([seen.seen, seen.total])
        tensors = dict(zip(PARTS, (sketches, energies, columns), strict=True))
        return {part: Part(kind, tensors[part]) for part, kind in PARTS.items()}

    def sketch_width(self, layer: Layer) -> int:
        """s, the sampling dimension."""
        conv = isinstance(layer.module, nn.Conv2d)
        return max(1, round(layer.width * (self.settings.sketch_conv if conv else self.settings.sketch_linear)))

    def measured(self, sigma: Tensor, sketch: Tensor, energy: Tensor) -> tuple[Tensor, float]:
        """A sketch's singular values, 0 for what is rounding, and the share of the layer's input outside its basis.

        The share is that of the energy, or in the release the clients' mean of that of the norm.
        """
        least = ROUNDING_OF_GRAM * (sketch.shape[1] * energy[0]).sqrt()
        release = self.settings.rank_rule == "release"
        return sigma.where(sigma > least, 0.0), float(energy[2] / energy[3] if release else share_outside(energy))

    @property
    def private(self) -> bool:
        return self.run.params.federation.privacy.on

    def bounded(self, parts: dict[str, Part]) -> dict[str, Part]:
        """Appendix H, eq. 14: of each layer the clipped sketch, and ||X*||^2 / ||X||^2, which is at most 1."""
        clip, layers = self.settings.sketch_clip, len(parts["sketch"].tensors) ** 0.5
        sketches = {name: clipped(A, clip) for name, A in parts["sketch"].tensors.items()}
        shares = {name: share_outside(energy) for name, energy in parts["energy"].tensors.items()}
        return {
            "sketch": Part("sketch", sketches, bound=clip * layers),
            "share": Part("count", shares, bound=layers),
        }


def denoised(sigma: Tensor, sketch: Tensor, shares: Tensor, joined: float, noise: float) -> tuple[Tensor, float]:
    """A sketch's singular values less the noise's energy, and the mean share over the clients expected to join."""
    return without_noise(sigma, sketch.shape, noise), min(max(float(shares) / joined, 0.0), 1.0)


def share_outside(energy: Tensor) -> Tensor:
    """||X*||^2 / ||X||^2; 0 where a layer sees zeros only."""
    return energy[1] / energy[0] if energy[0] else energy[0]


def known(server: Server) -> Payload:
    return {"bases": Part("basis", server.knowledge["bases"], once=True)}


def told(server: Server, replies: Replies) -> Server:
    """The server with the sums of what clients told, and under noise how much of it the sketches have."""
    sums: dict[str, Any] = {part: replies.sum(part) for part in (*PARTS, "share") if part in replies.parts}
    if noise := replies.noise("sketch"):
        sums |= {"noise": noise, "clients": len(replies.clients)}
    return replace(server, knowledge={**server.knowledge, "told": sums})
