"""FedProTIP: replay-free gradient projection with task identity prediction (section 4, Algorithm 1).

Training is local projected descent (projected.py). After a task each client sends core bases of what the protected
layers see of its images on the global model (eq. 6 to 8), and the server appends their union to what it knows (eq. 9).
The features have bases of their own, by which tasks are predicted (tip.py).
"""

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from fclmodels.backbones.layer_inputs import LayerInputs
from fclmodels.federation.client import Client
from fclmodels.federation.cohort import Cohort
from fclmodels.federation.messages import Part, Payload, Reply, outline
from fclmodels.federation.replies import Replies
from fclmodels.federation.server import Server
from fclmodels.methods.base import Memory
from fclmodels.methods.subspaces import Bases
from fclmodels.methods.tip import REFERENCES, Tip
from fclmodels.numerics.sketch import gaussian_sketch
from fclmodels.numerics.subspace import residual_mass, total_energy, union

# TIP's basis among those of the layers, and the layer whose input it is of.
FEATURES, LAST = "features", "heads.0"


class FedProTIP(Tip):
    """Projects every local step, and predicts a sample's task by the subspaces that its features lie in."""

    name = "fedprotip"
    paper = "FedProTIP: Task-Agnostic Federated Continual Learning via Replay-Free Gradient Projection"

    class Settings(Tip.Settings):
        threshold: float = Field(0.7, gt=0, le=1, description="share that the core bases of the first task keep")
        patches: PositiveInt = Field(512, description="m_s, random columns of each layer's input that a client takes")
        rank_rule: Literal["residual-mass", "total-energy"] = Field(
            "residual-mass",
            description="of layers: share of the residual's singular values (eq. 8); total-energy: of all (release)",
        )
        union: Literal["union", "sequential"] = Field(
            "union", description="all clients' bases; sequential: each client adds to the earlier ones' (release)"
        )
        exchange: Literal["bases", "sketch"] = Field(
            "bases", description="a client's bases, or a Gaussian sketch of them that is only summed (eq. 40)"
        )
        sketch_width: PositiveInt | None = Field(None, description="columns of a sketch; null: the layer's d")
        projection: Literal["local", "global"] = Field(
            "local", description="of every local step; global: only of the aggregated update (section 6.3)"
        )

        @model_validator(mode="after")
        def _exchange_fits_the_rest(self) -> "FedProTIP.Settings":
            if self.sketch_width is not None and self.exchange == "bases":
                raise ValueError("sketch_width needs exchange: sketch.")
            if (self.union, self.exchange) == ("sequential", "sketch"):
                raise ValueError("union: sequential asks clients one by one, and sketches are only summed.")
            return self

    settings: Settings

    @property
    def needs_each(self) -> str | None:
        if self.settings.exchange == "bases":
            return "methods.fedprotip.exchange: bases sends each client's own. Use exchange: sketch."
        return super().needs_each

    @property
    def without_bound(self) -> str | None:
        return "sends bases, spectra and references, and noise would fill all their directions. Use methods.fot."

    # Training.

    def payload(self, server: Server) -> Payload:
        local = self.settings.projection == "local"
        return {**super().payload(server), **(self.guard_parts(server) if local else {})}

    def spans(self, client: Client, payload: Payload) -> dict[str, Bases]:
        return {part: payload[part].tensors if part in payload else {} for part in ("bases", "complements")}

    def admitted(self, server: Server, update: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.admissible(server, update) if self.settings.projection == "global" else update

    # After a task, on the server.

    def sends(self, task: int, round: int) -> dict[str, dict[str, Part]]:
        network = self.networks.of(self.run.spec(task + 1))
        dtype, s = next(network.parameters()).dtype, self.settings.sketch_width
        layers = {name: layer.width for name, layer in self.layers(network).items()}
        features = {FEATURES: network.backbone.features} if self.settings.tip else {}
        widths = layers | features
        parts = {
            "spectra": outline("statistics", {name: (d,) for name, d in widths.items()}, dtype),
            "columns": outline("count", dict.fromkeys(widths, (2,)), torch.int64),
        }
        if self.settings.exchange == "sketch":
            parts["directions"] = outline("sketch", {name: (d, s or d) for name, d in widths.items()}, dtype)
        else:
            parts["directions"] = outline("basis", {name: (d, 0) for name, d in layers.items()}, dtype)
            parts["features"] = outline("directions", {name: (d, 0) for name, d in features.items()}, dtype)
        return {**super().sends(task, round), "bases": parts}

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        bases = dict(server.knowledge["bases"])
        if self.settings.tip:
            bases[FEATURES] = self.known_features(server)
        features: list[Tensor] = []
        columns: dict[str, Tensor] = {}
        squares: dict[str, Tensor] = {}
        turns = self._turns(cohort.clients)
        for clients in turns:
            replies = cohort.ask("bases", {**super().payload(server), "bases": Part("basis", bases)}, clients)
            if not replies.clients and (columns or clients != turns[-1]):
                continue  # was refused, and others are heard
            for found in self._found(replies):
                features += [found.pop(FEATURES)] if self.settings.tip else []
                bases = union(bases, found)
            columns, squares = added(columns, replies.sum("columns")), added(squares, replies.sum("spectra"))
        facts = {
            "columns": {name: counts.tolist() for name, counts in columns.items()},
            "spectra": {name: of_layer.sqrt() for name, of_layer in squares.items()},
        }
        server = self.with_bases(server, {name: bases[name] for name in server.knowledge["bases"]}, **facts)
        return self.with_task(server, cohort, features) if self.settings.tip else server

    def _turns(self, clients: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Who is asked at once: all, or in the release's variant each on what the bases have become by then."""
        return [(client,) for client in clients] if self.settings.union == "sequential" else [clients]

    def _found(self, replies: Replies) -> Iterator[Bases]:
        if self.settings.exchange == "sketch":
            yield dict(replies.sum("directions"))
        else:
            features = dict(replies.each("features")) if self.settings.tip else {}
            for client, directions in replies.each("directions"):
                yield {**directions, **features.get(client, {})}

    # After a task, on a client.

    def answer(self, client: Client, question: str, payload: Payload) -> tuple[Reply, Memory]:
        if question == REFERENCES:
            of_task = payload["features"].tensors
            return self.references(client, [of_task[str(task)] for task in range(len(of_task))])
        network = self.networks.load(self.run.spec(client.task + 1), payload["weights"].tensors)
        bases, layers = payload["bases"].tensors, self._all_layers(network)
        layer_of = {name: LAST if name == FEATURES else name for name in bases}
        # Eq. 8 is about the singular values of the m_s columns, which a Gram matrix would square.
        inputs = self.observe(
            client, network, {name: layers[name] for name in layer_of.values()}, self.settings.patches
        )
        memory = self.remembering(client, inputs[LAST]) if self.settings.tip else client.memory
        return Reply(self.core_bases(client, {name: inputs[layer_of[name]] for name in bases}, bases)), memory

    def core_bases(self, client: Client, inputs: dict[str, LayerInputs], bases: Bases) -> dict[str, Part]:
        """Of each input: the leading directions U outside its basis (eq. 6 to 8), or a sketch U diag(sigma) G (eq. 40).

        Of the features U diag(sigma), which tells energies too. sigma is scaled to all columns that there are, so that
        clients with more data count more.

        Besides, the squared singular values, filled up to d, and how many columns were taken of how many.
        """
        sketch, random = self.settings.exchange == "sketch", client.generator("sketch")
        directions, squares, columns = {}, {}, {}
        for name, seen in inputs.items():
            U, sigma = seen.principal(bases[name])
            U = U[:, : self._rank(name, seen, bases[name], sigma, client.task)]
            width = self.settings.sketch_width or seen.width
            scaled = U * sigma[: U.shape[1]] * (seen.total / seen.seen) ** 0.5
            # Vectors of small singular values, from a Gram matrix, are orthogonal to some 1e-3 only.
            found = scaled if name == FEATURES else torch.linalg.qr(U).Q
            directions[name] = gaussian_sketch(scaled, width, random) if sketch else found.contiguous()
            squares[name] = torch.nn.functional.pad(sigma.square(), (0, seen.width - len(sigma)))
            columns[name] = torch.tensor([seen.seen, seen.total])
        parts = {"spectra": Part("statistics", squares), "columns": Part("count", columns)}
        if sketch:
            return {"directions": Part("sketch", directions), **parts}
        if FEATURES in directions:
            parts["features"] = Part("directions", {FEATURES: directions.pop(FEATURES)}, "each")
        return {"directions": Part("basis", directions, "each"), **parts}

    def _rank(self, name: str, seen: LayerInputs, basis: Tensor, sigma: Tensor, task: int) -> int:
        if name == FEATURES:  # measured by energy, a task whose features are much like earlier ones' had no direction
            return residual_mass(sigma, self.settings.tip_threshold)
        threshold = self.threshold(task)
        if self.settings.rank_rule == "residual-mass":
            return residual_mass(sigma, threshold)
        energy = seen.energy()
        return total_energy(sigma, seen.energy(basis) / energy if energy else 0.0, threshold)


def added(sums: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: sums[name] + tensor if sums else tensor for name, tensor in more.items()}
