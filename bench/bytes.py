"""Bytes of bases, sketches and prompts by arithmetic, beside FedProTIP's Tables 9 and 19, FOT's 5 and PIP's 7.

    python bench/bytes.py

A basis of a layer is d x r numbers of 4 bytes, a sketch d x s, where d is the width of the layer's input. All that is
needed are the layers of the papers' networks; nothing is trained. "MB" are MiB (2**20 bytes), but PIP's are 10**6.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from fclmodels.backbones.inputs.layer_capture import find_layers
from fclmodels.backbones.model.network import Network, build_network
from fclmodels.backbones.model.prompt_adapters import adapt
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.backbones.vit import Vit

MIB, MB = 2**20, 10**6
SHAPE = (3, 32, 32)
FROZEN = ("conv1", "layer1", "layer2")  # after the first task, in FedProTIP's ResNet-18
SAMPLED = 512  # m_s, columns that are sampled of a layer's input
MAPPING = 2048 * 512 + 512  # a linear layer of FedProTIP's released network that only another method uses


class Line(NamedTuple):
    what: str
    formula: str
    numbers: float  # of 4 bytes
    paper: float | None
    unit: int = MIB

    @property
    def size(self) -> float:
        return 4 * self.numbers / self.unit


def network(**settings: object) -> Network:
    """Build a network with one head of ten classes."""
    return build_network(ModelSpec(settings, SHAPE, "growing", (tuple(range(10)),)), torch.Generator())


def widths(of: Network, frozen: Iterable[str] = ()) -> list[int]:
    """Return d of each layer of the backbone that is not frozen."""
    blocks = tuple(f"backbone.{block}." for block in frozen)
    return [
        layer.width
        for name, layer in find_layers(of, SHAPE).items()
        if name.startswith("backbone.") and not f"{name}.".startswith(blocks)
    ]


def parameters(of: nn.Module) -> int:
    return sum(parameter.numel() for parameter in of.parameters())


def fedprotip() -> Iterator[Line]:
    """Count a ResNet-18 with a 3x3 stem, its last map averaged over 2x2 fields: 2048 features."""
    resnet = network(backbone="resnet18", stem="cifar", grid=2)
    features = [resnet.backbone.features]
    every, free = widths(resnet), widths(resnet, FROZEN)
    yield Line("Table 9, Model, task 1", "parameters", parameters(resnet), 46.686)
    yield Line("", "and a Linear(2048, 512)", parameters(resnet) + MAPPING, 46.686)
    yield Line("Table 9, Model, each further task", "2048 x 10 + 10", 2048 * 10 + 10, 0.078)
    yield Line("Table 9, Act: FOT's sketches", "sum d x 5d, layers 3 and 4", sum(5 * d * d for d in free), 48)
    yield Line("", "sum d x 512, layers 3 and 4", sum(d * SAMPLED for d in free), 48)
    for s, paper in ((None, 366.9), (128, 16.1), (64, 8.1)):
        sketch = sum(d * (s or d) for d in every + features)
        yield Line(f"Table 19, s = {s or 'd'}", f"sum d x {s or 'd'}, all layers and features", sketch, paper)
    yield Line("the same, s = 128", "sum d x 128, layers 3 and 4 and features", 128 * sum(free + features), None)
    most = sum(d * min(d, SAMPLED) for d in free + features)
    yield Line("Table 9, Base: the most it can be", "sum d x min(d, 512), layers 3 and 4 and features", most, None)


def fot() -> Iterator[Line]:
    """Count the networks of FOT F.3 with a head without biases for each task, as released.

    AlexNet: ten heads 2048 x 10. ResNet, on 84 pixels: 2 x 2 fields of its last map of 6 x 6 are averaged, 9 x 256
    features, and there are twenty heads 2304 x 5.
    """
    alexnet = network(backbone="alexnet")
    resnet = network(backbone="resnet18", stem="cifar", stem_stride=2, width=32, norm="batch-no-stats", grid=1)
    for name, of, heads, formula, model, sketch in (
        ("AlexNet", alexnet, 10 * 10 * 2048, "10 x 10 x 2048", 1.42, 0.24),
        ("ResNet-18, width 32", resnet, 20 * 5 * 2304, "20 x 5 x 2304", 2.56, 0.64),
    ):
        count = parameters(of.backbone) + heads
        yield Line(f"FOT Table 5, {name}, model", f"parameters, heads {formula}", count, model)
        yield Line(f"FOT Table 5, {name}, A", "sum d x 5d", sum(5 * d * d for d in widths(of)), sketch)


def pip() -> Iterator[Line]:
    """Count what a client sends and receives in a round, on ViT-B/16 with ten tasks of ten classes."""
    with torch.device("meta"):
        vit = Vit(Vit.Settings(backbone="vit", patch=16, width=768, depth=12, attention_heads=12, mlp_width=3072))
        prompts = {
            kind: sum(
                p.numel() for p in adapt(vit.build((3, 224, 224)), {"kind": kind, "pool": 10}, 10).prompts.parameters()
            )
            for kind in ("l2p", "dualp")
        }
    head, means = 100 * 769, 10 * 768
    terms = {"l2p": "10 x 5 x 768, keys 10 x 768", "dualp": "(2 + 3 x 10) x 2 x 5 x 768, keys 10 x 768"}
    for kind, name, fed, own in (("l2p", "L2P", 0.49, 0.52), ("dualp", "DualP", 1.32, 1.35)):
        count = prompts[kind] + head
        yield Line(f"PIP Table 7, Fed-{name}", f"{terms[kind]}, head 100 x 769", count, fed, MB)
        yield Line(f"PIP Table 7, PIP-{name}", "and means, 10 x 768", count + means, own, MB)
        yield Line("down, here", "and variances and labels", count + 2 * means + 10, None, MB)
        yield Line("up, here", "and counts, sums, squares of 8 bytes", count + 2 * (2 * means + 10), None, MB)


def main() -> None:
    print("| what | formula | counted | paper, MB | equal |\n|---|---|---|---|---|")
    for line in (*fedprotip(), *fot(), *pip()):
        digits = len(f"{line.paper:g}".partition(".")[2]) if line.paper is not None else 0
        equal = "" if line.paper is None else "yes" if round(line.size, digits) == line.paper else "no"
        size = f"{line.size:.3f} {'MiB' if line.unit == MIB else 'MB'}"
        print(f"| {line.what} | {line.formula} | {size} | {'' if line.paper is None else line.paper} | {equal} |")


if __name__ == "__main__":
    main()
