"""One network a process: built once for each shape of the head, then only filled with other weights."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fclmodels.backbones.model.network import FROZEN, Network, build_skeleton
from fclmodels.backbones.model.spec import ModelSpec


class NetworkCache:
    """A network that is filled with weights in place of being built anew."""

    def __init__(self, device: torch.device, prepare: Callable[[nn.Module], None]) -> None:
        self.device = device
        self.prepare = prepare
        self._spec: ModelSpec | None = None
        self._network: Network | None = None
        self._state: dict[str, Tensor] = {}

    def load(self, spec: ModelSpec, weights: Mapping[str, Tensor]) -> Network:
        """Return the network with these weights; the next call changes it. `prepare` fills a frozen backbone."""
        network = self.of(spec)
        with torch.no_grad():
            torch._foreach_copy_(list(self._state.values()), [weights[name] for name in self._state])
        return network

    def of(self, spec: ModelSpec) -> Network:
        """Return the network with arbitrary weights, for its names and shapes."""
        if self._network is None or self._spec != spec:
            with torch.inference_mode(False):  # so that it can be trained, even if a predictor is the first to need it
                self._network = build_skeleton(spec)
                self.prepare(self._network)
                self._network.to(self.device)
            tensors = self._network.state_dict().items()
            self._spec, self._state = spec, {name: t for name, t in tensors if not name.startswith(FROZEN)}
        return self._network
