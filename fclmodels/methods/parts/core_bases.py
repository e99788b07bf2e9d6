"""A client's core bases of its layers' inputs, and the exchange that brings them (FedProTIP eq. 6 to 8 and 40).

Beside the layers' bases there is one of the features, where tasks are predicted (task_identity.py).
"""

from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor
from torch.nn.functional import pad

from fclmodels.backbones.inputs.layer_inputs import LayerInputs
from fclmodels.backbones.model.network import NetworkCache
from fclmodels.federation.client import Client
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.parts.adaptive_threshold import AdaptiveSettings, count_right, outline_counts
from fclmodels.methods.parts.protected_subspace import Bases, ProtectedSubspace, measure_energy
from fclmodels.methods.parts.task_identity import TaskIdentity, TipSettings
from fclmodels.numerics.sketch import gaussian_sketch
from fclmodels.numerics.subspace import limit_columns, rank_by_energy, rank_by_mass

# TIP's basis among those of the layers, and the layer whose input it is of.
FEATURES, LAST = "features", "heads.0"


class CoreBasesSettings(TipSettings, AdaptiveSettings):
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


class CoreBases:
    """The exchange by which clients send core bases of their layers' inputs."""

    def __init__(
        self,
        settings: CoreBasesSettings,
        run: Run,
        networks: NetworkCache,
        subspace: ProtectedSubspace,
        identity: TaskIdentity | None,
    ) -> None:
        self.settings = settings
        self.run = run
        self.networks = networks
        self.subspace = subspace
        self.identity = identity
        self.are_summed = settings.union == "weighted-sum"
        self.adapts = settings.threshold_by == "knowledge"
        self.exchange = Exchange("bases", self.make_payload, self.answer, self.make_form)

    def make_payload(self, server: Server, bases: Bases) -> Payload:
        payload = {"weights": Part("weights", server.weights), "bases": Part("basis", bases)}
        if "before" in server.knowledge:
            payload["before"] = Part("weights", server.knowledge["before"])
        return payload

    def make_form(self, task: int, round: int) -> Form:
        network = self.networks.build(self.run.make_spec(task + 1))
        dtype = next(network.parameters()).dtype
        layers = {name: layer.width for name, layer in self.subspace.list_layers(network).items()}
        features = {FEATURES: network.backbone.features} if self.identity else {}
        widths = layers | features
        numbers = {
            "spectra": make_outline("statistics", {name: (d,) for name, d in widths.items()}, dtype),
            "columns": make_outline("count", dict.fromkeys(widths, (2,)), torch.int64),
        }
        if self.are_summed:
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
        if self.are_summed:
            return {"directions": make_outline("directions", no_columns, dtype, "each"), **numbers}
        of_features = {name: no_columns.pop(name) for name in features}
        bases = make_outline("basis", no_columns, dtype, "each")
        if not self.identity:
            return {"directions": bases, **numbers}
        return {"directions": bases, **numbers, "features": make_outline("directions", of_features, dtype, "each")}

    def answer(self, client: Client, payload: Payload) -> Answer:
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
            leading = scaled if name == FEATURES or self.are_summed else torch.linalg.qr(U).Q
            width = self.limit_sketch_width(X.width)
            directions[name] = gaussian_sketch(scaled, width, random) if sketch else leading.contiguous()
            squares[name] = pad(sigma.square(), (0, X.width - len(sigma)))
            columns[name] = torch.tensor([X.count, X.total])
            if self.are_summed and name != FEATURES:
                energies[name] = measure_energy(X, bases[name], len(client.rows))
        tensors = {"directions": directions, "spectra": squares, "columns": columns}
        if self.are_summed:
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

    def yield_directions(self, replies: Replies) -> Iterator[Bases]:
        """Yield directions by layer, of each client or of all together."""
        if self.settings.exchange == "sketch":
            yield dict(replies.sum("directions"))
        else:
            features = dict(replies.yield_each("features")) if "features" in replies.parts else {}
            for client, directions in replies.yield_each("directions"):
                yield {**directions, **features.get(client, {})}
