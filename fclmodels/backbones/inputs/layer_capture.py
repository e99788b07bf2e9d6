"""Capture of layers' inputs as columns, streamed into the statistics from which subspaces are computed.

A convolution's input is unfolded with the layer's own kernel, stride, padding and dilation. Kernel taps that only ever
meet the padding are dropped: a weight there has no effect. The patches of a whole data set never exist at once.

A grouped convolution is as many layers as it has groups, "name[0]" to "name[G - 1]": group g's filters see the channels
of group g alone. With G groups the layer is y = diag(W_1, .., W_G) x of patches x = (x_1, .., x_G), so the gradient of
W_g is delta_g X_g^T, and a step of W_g leaves its output as it is on all inputs X_g if and only if it is 0 on span(X_g)
[d, n], d = k k C_in / G. Each group has columns, a basis and a rank of its own; what one group protects, none of the
others has to. Of a depthwise convolution d is k k. All groups' columns together are as many numbers as those of a dense
convolution of the same input, C_in k k n, and their Gram matrices and bases a G-th of its squares.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fclmodels.backbones.inputs.layer_inputs import LayerInputs
from fclmodels.backbones.inputs.layer_names import name_group
from fclmodels.backbones.model.network import Network
from fclmodels.errors import UserError

# Samples that pass the network at once, and numbers that are unfolded at once.
BATCH = 128
CHUNK = 2**20


@dataclass(frozen=True)
class Layer:
    """A linear or convolutional layer, or one group of it: a matrix [out, d], its input as columns [d, n]."""

    module_name: str
    module: nn.Linear | nn.Conv2d
    taps: tuple[slice, slice] | None  # rows and columns of the kernel that ever meet data; None for a linear layer
    map: tuple[int, int] = (1, 1)  # rows and columns of the output
    group: int = 0

    @property
    def name(self) -> str:
        return self.module_name if self.groups == 1 else name_group(self.module_name, self.group)

    @property
    def weight(self) -> str:
        return f"{self.module_name}.weight"

    @property
    def groups(self) -> int:
        """G, how many groups its convolution has."""
        return self.module.groups if isinstance(self.module, nn.Conv2d) else 1

    @property
    def width(self) -> int:
        """d, the dimension of its input space."""
        return self.select_taps(self.module.weight)[0].numel()

    @property
    def outputs(self) -> int:
        """Number of the module's outputs that are this layer's."""
        return len(self.module.weight) // self.groups

    @property
    def columns_per_sample(self) -> int:
        return self.map[0] * self.map[1]

    def count_columns(self, x: Tensor) -> int:
        """Return n of an input batch."""
        return x.numel() // x.shape[-1] if self.taps is None else len(x) * self.columns_per_sample

    def select_taps(self, weight: Tensor) -> Tensor:
        """Return a view of the part of a tensor of the module's weight, all groups, that ever meets data."""
        return weight if self.taps is None else weight[:, :, self.taps[0], self.taps[1]]

    def select_live(self, weight: Tensor) -> Tensor:
        """Return a view of this layer's part of that."""
        return self.select_taps(weight)[self.group * self.outputs : (self.group + 1) * self.outputs]

    def to_matrix(self, weight: Tensor) -> Tensor:
        """Return that part as [out, d]; a copy where taps are dropped."""
        return self.select_live(weight).flatten(1)

    def unfold(self, x: Tensor) -> Tensor:
        """Return all columns [d, n] of the module's input: n = B * positions, in this order."""
        if self.taps is None:
            return x.flatten(0, -2).T
        windows = self._view_windows(x)  # [B, channels, rows, columns of the map, taps, taps]
        return windows.permute(1, 4, 5, 0, 2, 3).reshape(self.width, -1)

    def unfold_at(self, x: Tensor, places: Tensor) -> Tensor:
        """Return the columns [d, m] at places [m] among all of the batch."""
        if self.taps is None:
            return x.flatten(0, -2)[places].T
        # With channels last a kernel's rows are adjacent in memory, so that few patches are read faster.
        windows = self._view_windows(x if self.groups > 1 else x.contiguous(memory_format=torch.channels_last))
        rows, columns = self.map
        b, row, column = places // (columns * rows), places // columns % rows, places % columns
        return windows[b, :, row, column].flatten(1).T

    def _view_windows(self, x: Tensor) -> Tensor:
        """Return a view of the padded input of this layer: the inputs of each tap, at each position."""
        conv = self.module
        assert isinstance(conv, nn.Conv2d)
        assert self.taps is not None
        assert not isinstance(conv.padding, str)
        (down, across), (pad_y, pad_x), (sy, sx), (dy, dx) = self.taps, conv.padding, conv.stride, conv.dilation
        channels = x.shape[1] // conv.groups
        x = x[:, self.group * channels : (self.group + 1) * channels]
        x = F.pad(x, (pad_x, pad_x, pad_y, pad_y)) if pad_y or pad_x else x
        sample, channel, row, column = x.stride()
        return x.as_strided(
            (len(x), channels, *self.map, down.stop - down.start, across.stop - across.start),
            (sample, channel, sy * row, sx * column, dy * row, dx * column),
            x.storage_offset() + down.start * dy * row + across.start * dx * column,
        )


def find_layers(network: Network, shape: tuple[int, ...]) -> dict[str, Layer]:
    """Return the linear and convolutional layers of a network for inputs of this shape, by name, in order of use.

    Of a grouped convolution these are its groups.
    """
    layers: dict[str, Layer] = {}
    parameter = next(network.parameters())

    def note(name: str, module: nn.Module, x: Tensor) -> None:
        layer = _describe_layer(name, module, x)
        of_module = [replace(layer, group=group) for group in range(layer.groups)]
        layers.update({of_group.name: of_group for of_group in of_module})

    with torch.no_grad(), watch_layers(network, note), _set_evaluation_mode(network):
        network(torch.zeros(1, *shape, dtype=parameter.dtype, device=parameter.device))
    return layers


@contextmanager
def watch_layers(network: nn.Module, on_input: Callable[[str, nn.Module, Tensor], None]) -> Iterator[None]:
    """Call, while open, `on_input` with each linear and convolutional layer's name, module and input."""
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs, name=name: on_input(name, module, inputs[0]))
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def observe_inputs(
    network: Network,
    layers: dict[str, Layer],
    batches: Iterable[Tensor],
    samples: int,
    columns: int | None,
    generator: torch.Generator,
    column_limit: int = 0,
) -> dict[str, LayerInputs]:
    """Return the layers' inputs over `samples` samples, in one pass in evaluation mode.

    columns: at most so many random ones a layer; None: all. column_limit: up to so many columns of a layer are stored
    as columns even where their Gram matrix is smaller.
    """
    random = np.random.default_rng(generator.initial_seed())
    observers = {name: _Observer(layer, samples, columns, random, column_limit) for name, layer in layers.items()}
    by_module: dict[str, list[_Observer]] = {}
    for observer in observers.values():
        by_module.setdefault(observer.layer.module_name, []).append(observer)

    def note(name: str, module: nn.Module, x: Tensor) -> None:
        for observer in by_module.get(name, ()):
            observer.add(x)

    run = network if any(name.startswith("heads.") for name in layers) else network.backbone
    with torch.no_grad(), watch_layers(network, note), _set_evaluation_mode(network):
        for batch in batches:
            run(batch)
    return {name: observer.finish() for name, observer in observers.items()}


class _Observer:
    """Collects all columns of a layer's input as batches pass, or those at random places."""

    def __init__(
        self, layer: Layer, samples: int, columns: int | None, random: np.random.Generator, column_limit: int
    ) -> None:
        self.layer = layer
        total = samples * layer.columns_per_sample
        self.places: np.ndarray | None = None
        if columns is not None and columns < total:
            self.places = np.sort(random.choice(total, columns, replace=False, shuffle=False))
        self.inputs = LayerInputs(layer.width, total if self.places is None else len(self.places), total, column_limit)
        self.passed = 0

    def add(self, x: Tensor) -> None:
        first, self.passed = self.passed, self.passed + self.layer.count_columns(x)
        if self.places is None:
            for part in x.split(max(1, CHUNK // (self.layer.width * self.layer.columns_per_sample))):
                self.inputs.add(self.layer.unfold(part))
            return
        places = self.places[slice(*self.places.searchsorted([first, self.passed]))] - first
        if len(places):
            self.inputs.add(self.layer.unfold_at(x, torch.from_numpy(places).to(x.device)))

    def finish(self) -> LayerInputs:
        if self.passed != self.inputs.total:
            raise UserError(
                f"{self.layer.name} saw {self.passed} columns of {self.inputs.total}. Its inputs can only be captured "
                "if it runs once for each sample: give every place in the network a layer of its own."
            )
        return self.inputs.finish()


@contextmanager
def _set_evaluation_mode(network: nn.Module) -> Iterator[None]:
    training = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


def _describe_layer(name: str, module: nn.Module, x: Tensor) -> Layer:
    if isinstance(module, nn.Linear):
        return Layer(name, module, None, (x.numel() // x.shape[-1], 1))
    assert isinstance(module, nn.Conv2d)
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        kind = module.padding if isinstance(module.padding, str) else module.padding_mode
        raise UserError(f"{name}: padding {kind!r} is not unfolded. Pad by zeros, and by a number of them.")
    sides = (x.shape[-2:], module.kernel_size, module.stride, module.padding, module.dilation)
    (rows, down), (columns, across) = (_find_live_taps(*side) for side in zip(*sides, strict=True))
    return Layer(name, module, (down, across), (rows, columns))


def _find_live_taps(size: int, kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, slice]:
    """Return, along one axis, the number of the kernel's positions and its taps that ever meet data."""
    positions = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    places = np.arange(positions)[:, None] * stride + np.arange(kernel) * dilation - padding
    live = np.flatnonzero(((places >= 0) & (places < size)).any(axis=0))
    # A kernel that meets only padding keeps all taps: its columns are 0.
    return positions, slice(int(live[0]), int(live[-1]) + 1) if len(live) else slice(0, kernel)
