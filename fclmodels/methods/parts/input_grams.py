"""Sums of x x^T over the inputs x of some layers, at all tokens or patches of a client's samples, or of their squares.

[d, d] numbers in double precision for a layer of width d, or d for the diagonal alone. Padding of texts counts as
tokens do.
"""

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from fclmodels.backbones.inputs.layer_capture import Layer, watch_layers
from fclmodels.backbones.inputs.layer_names import find_module_name
from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.messages import Part, make_outline

Grams = dict[str, Tensor]


def outline_grams(widths: dict[str, int]) -> Part:
    """Return the outline of such sums, by layer."""
    return make_outline("input-statistics", {name: (d, d) for name, d in widths.items()}, torch.float64)


@torch.no_grad()
def sum_inputs(
    network: Network,
    batches: Iterable[Batch],
    widths: Mapping[str, int],
    prefix: str = "",
    diagonal: Collection[str] = (),
    convolutions: Mapping[str, Layer] = {},
) -> Grams:
    """Return the sums of layers that are called prefix + name in the network, in evaluation mode.

    diagonal: the layers of which only squares are summed; convolutions: those whose inputs are unfolded.
    """
    grams = {name: torch.zeros((d,) if name in diagonal else (d, d), dtype=torch.float64) for name, d in widths.items()}
    layers: dict[str, list[str]] = {}
    for name in widths:
        layers.setdefault(find_module_name(name), []).append(name)

    def add(name: str, module: nn.Module, x: Tensor) -> None:
        for layer in layers.get(name.removeprefix(prefix), ()):
            X = (convolutions[layer].unfold(x).T if layer in convolutions else x.flatten(0, -2)).double()
            new = X.square().sum(0) if layer in diagonal else X.T @ X
            grams[layer] += new.cpu()

    network.eval()
    with watch_layers(network, add):
        for batch in batches:
            network.compute_logits(network.backbone(batch.inputs))
    return grams
