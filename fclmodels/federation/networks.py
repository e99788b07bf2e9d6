"""One network a process: built once for each shape of the head, then only filled with other weights."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fclmodels.backbones.network import FROZEN, Network, skeleton
from fclmodels.backbones.spec import ModelSpec


class Networks:
    def __init__(self, device: torch.device, prepare: Callable[[nn.Module], None]) -> None:
        self.device = device
        self.prepare = prepare
        self._spec: ModelSpec | None = None
        self._network: Network | None = None
        self._state: dict[str, Tensor] = {}

    def load(self, spec: ModelSpec, weights: Mapping[str, Tensor]) -> Network:
        """The network with these weights; the next call changes the same one. `prepare` fills a frozen backbone."""
        network = self.of(spec)
        with torch.no_grad():
            torch._foreach_copy_(list(self._state.values()), [weights[name] for name in self._state])
        return network

    def of(self, spec: ModelSpec) -> Network:
        """The network, with whatever weights it has: for its form."""
        if self._network is None or self._spec != spec:
            self._network = skeleton(spec)
            self.prepare(self._network)
            self._network.to(self.device)
            tensors = self._network.state_dict().items()
            self._spec, self._state = spec, {name: t for name, t in tensors if not name.startswith(FROZEN)}
        return self._network
