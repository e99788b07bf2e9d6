"""The network of a method that trains its backbone: how it is built and grows, and what of it a task trains."""

from torch import Tensor, nn

from fclmodels.backbones.layers.norms import drop_statistics, fix_statistics, list_statistics
from fclmodels.backbones.model.heads import grow_heads
from fclmodels.backbones.model.network import Network, build_network, list_frozen
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.federation.run_context import Run

Weights = dict[str, Tensor]


class TrainedNetwork:
    """Backbone and heads train. Where statistics of batch normalisation are local, they stay with the client."""

    def __init__(self, run: Run, batch_norm: str) -> None:
        self.run = run
        self.batch_norm = batch_norm
        self._drawn: tuple[ModelSpec, Weights] | None = None

    @property
    def is_personal(self) -> bool:
        """Return whether a part of the network stays with each client."""
        return self.batch_norm == "local"

    def list_personal_names(self, network: Network) -> set[str]:
        """Return the names of the tensors that stay with each client."""
        return list_statistics(network) if self.batch_norm == "local" else set()

    def list_unsent_names(self, network: Network, task: int, round: int) -> set[str]:
        """Return the personal names that a client does not send after a round."""
        return self.list_personal_names(network)

    def list_undownloaded_names(self, spec: ModelSpec) -> set[str]:
        """Return the personal names that no client downloads either: their first values come from the run's seed."""
        return set()

    def draw_undownloaded(self, spec: ModelSpec) -> Weights:
        """Return the first values of the tensors that no client downloads."""
        if not (names := self.list_undownloaded_names(spec)):
            return {}
        if self._drawn is None or self._drawn[0] != spec:
            weights = self.make_initial_weights(spec)
            self._drawn = spec, {name: weights[name].to(self.run.device) for name in names}
        return self._drawn[1]

    def prepare(self, network: nn.Module) -> None:
        """Change a network once, after it is built."""
        if self.batch_norm == "batch":
            drop_statistics(network)

    def make_initial_weights(self, spec: ModelSpec) -> Weights:
        """Return weights by the run's seed, or read from `model.weights`."""
        network = build_network(spec, self.run.make_generator("init"))
        self.prepare(network)
        return dict(network.state_dict())

    def grow(self, weights: Weights, before: ModelSpec, after: ModelSpec) -> Weights:
        """Return the weights with the rows and heads that the last task of `after` adds."""
        return grow_heads(weights, before, after, self.run.make_generator("init"))

    def list_all_weights(self, weights: Weights) -> Weights:
        """Return every tensor of the network, also those that never travel."""
        return weights

    def set_modes(self, network: Network, task: int, freeze: bool) -> None:
        """Set training mode, but for blocks that are frozen where `freeze` is true, and for fixed statistics."""
        network.train()
        for block in self.run.params.model.freeze if freeze else ():
            network.backbone.get_submodule(block).eval()
        if self.batch_norm == "frozen" and task > 0:
            fix_statistics(network)

    def select_trainable(self, network: Network, task: int, freeze: bool) -> dict[str, nn.Parameter]:
        """Return all parameters but those of frozen blocks and of other tasks' own heads."""
        frozen = list_frozen(network.spec, network) if freeze else set()
        prefixes = ("backbone.", f"heads.{task}." if network.spec.head == "per-task" else "heads.")
        return {n: p for n, p in network.named_parameters() if n.startswith(prefixes) and n not in frozen}


class SharedNetwork(TrainedNetwork):
    """Backbone and heads train and travel; clients answer by something of their own beside them."""

    @property
    def is_personal(self) -> bool:
        return True
