"""What gradient subspaces cost: a projected training step against a plain one.

    python bench/subspace.py step [alexnet] [resnet18] [--repeats 25]

Prints milliseconds of an SGD step and the medians of the paired ratios, for random bases that fill 20 and 60 % of what
each layer's input can span, in all layers below the head. `dense` is the plain way at 20 %, (G Phi) Phi^T on every
gradient with all taps of the kernels. All sides take turns in one process with one torch thread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fclmodels.backbones.capture import Layer, layers_of
from fclmodels.backbones.network import Network, build
from fclmodels.backbones.projection import Projection, split_by_width
from fclmodels.backbones.spec import ModelSpec
from fclmodels.federation import malloc

SHAPE = (3, 32, 32)
BATCHES = {"alexnet": 16, "resnet18": 64}
SHARES = (0.2, 0.6)
WARM_UP = 3


def random_basis(d: int, share: float) -> Tensor:
    return torch.linalg.qr(torch.randn(d, int(share * d))).Q.contiguous()


def training_step(network: Network, batch_size: int) -> Callable[[Callable[[dict[str, Tensor]], None]], None]:
    """A function that takes one SGD step and shows the gradients before it."""
    inputs, labels = torch.randn(batch_size, *SHAPE), torch.randint(10, (batch_size,))
    optimiser = torch.optim.SGD(network.parameters(), 0.01, fused=True)

    def step(change: Callable[[dict[str, Tensor]], None]) -> None:
        optimiser.zero_grad()
        cross_entropy(network(inputs), labels).backward()
        change({name: p.grad for name, p in network.named_parameters() if p.grad is not None})
        optimiser.step()

    return step


def dense(layers: dict[str, Layer]) -> Callable[[dict[str, Tensor]], None]:
    """G - (G Phi) Phi^T on the whole gradients of all layers."""
    widths = {layer.weight: layer.module.weight[0].numel() for layer in layers.values()}
    bases = {name: random_basis(width, SHARES[0]) for name, width in widths.items()}

    def change(gradients: dict[str, Tensor]) -> None:
        for name, Phi in bases.items():
            G = gradients[name].flatten(1)
            G.sub_((G @ Phi) @ Phi.T)

    return change


def measure_step(name: str, repeats: int) -> dict[str, float | str]:
    torch.manual_seed(0)
    batch_size = BATCHES[name]
    network = build(ModelSpec({"backbone": name}, SHAPE, "growing", (tuple(range(10)),)), torch.Generator())
    network.train()
    layers = {key: layer for key, layer in layers_of(network, SHAPE).items() if key.startswith("backbone.")}
    step = training_step(network, batch_size)

    def projected(share: float) -> Callable[[], None]:
        bases = {key: random_basis(layer.width, share) for key, layer in layers.items()}
        projection = Projection(layers, *split_by_width(bases))

        def run() -> None:
            with projection.within(network, batch_size):
                step(projection.gradients)

        return run

    all_taps = dense(layers)
    sides: dict[str, Callable[[], None]] = {
        "plain": lambda: step(lambda gradients: None),
        **{f"projected_{share}": projected(share) for share in SHARES},
        "dense": lambda: step(all_taps),
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(WARM_UP + repeats):
        # Back and forth, so that no side always finds the cache as the same other one left it.
        for side in list(sides)[:: -1 if turn % 2 else 1]:
            started = time.perf_counter()
            sides[side]()
            seconds[side].append(time.perf_counter() - started)
    plain = seconds["plain"][WARM_UP:]
    result: dict[str, float | str] = {"network": name, "plain_ms": round(1e3 * statistics.median(plain), 1)}
    for side in list(sides)[1:]:
        taken = seconds[side][WARM_UP:]
        result[f"{side}_ms"] = round(1e3 * statistics.median(taken), 1)
        result[f"{side}_ratio"] = round(statistics.median(a / b for a, b in zip(taken, plain, strict=True)), 3)
    return result


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = arguments.add_subparsers(dest="part", required=True)
    part = parts.add_parser("step", help="a projected step against a plain one")
    part.add_argument("networks", nargs="*", default=list(BATCHES), help=f"of {', '.join(BATCHES)}")
    part.add_argument("--repeats", type=int, default=25, help="steps of each side, in turn")
    chosen = arguments.parse_args()
    if len(chosen.networks) > 1:
        # A process of its own each, so that no network inherits another's memory.
        for name in chosen.networks:
            command = [sys.executable, __file__, chosen.part, name, "--repeats", str(chosen.repeats)]
            subprocess.run(command, check=True)
    else:
        tuned = malloc.tune()
        torch.set_num_threads(1)
        print(f"torch {torch.__version__}, {os.cpu_count()} cores, 1 thread, tuned malloc: {tuned}", flush=True)
        print(json.dumps(measure_step(chosen.networks[0], chosen.repeats)))


if __name__ == "__main__":
    main()
