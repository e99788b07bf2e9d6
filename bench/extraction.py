"""What finding the subspaces costs, in one run, all sides in turn.

    python bench/extraction.py [svd] [epochs] [memory] [--repeats 5]

svd: a streamed Gram matrix and its eigenvectors against all columns and their SVD, d = 576, n = 490,000.
epochs: what a client does at a task's end against one local epoch, as the methods do by default, and for FOT with all
patches of all images; a basis of 20 % is there already.
memory: the peak of anonymous memory over 500 to 50,000 samples.
Seconds are the CPU's in one thread, so that other work on the machine tells little.
"""

import argparse
import json
import multiprocessing as mp
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fclmodels.backbones.capture import BATCH, Layer, layers_of, observe
from fclmodels.backbones.layer_inputs import LayerInputs
from fclmodels.backbones.network import Network, skeleton
from fclmodels.backbones.spec import ModelSpec
from fclmodels.federation import malloc
from fclmodels.methods.fedprotip import FedProTIP
from fclmodels.methods.fot import Fot
from fclmodels.methods.gpm import Gpm

# Samples, batch and shape of a client's images, as in bench/local_loop.py.
WORKS = {
    "mlp": (480, 64, (1, 28, 28), {"backbone": "mlp"}),
    "alexnet": (100, 16, (3, 32, 32), {"backbone": "alexnet"}),
    "resnet18": (500, 64, (3, 32, 32), {"backbone": "resnet18", "stem": "imagenet"}),
}
SAMPLES = (500, 5_000, 50_000)
SHARE = 0.2


class Peak:
    """The most anonymous memory in MB that this process has had since it was entered, above what it had then."""

    def __enter__(self) -> "Peak":
        self.start = self.most = anonymous()
        self._done = threading.Event()
        self._watching = threading.Thread(target=self._watch)
        self._watching.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.most = max(self.most, anonymous())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watching.join()
        self.above = round(max(self.most, anonymous()) - self.start)


def anonymous() -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024


def alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own, so that none finds another's memory."""
    with mp.get_context("spawn").Pool(1, malloc.tune) as pool:
        return pool.apply(work, arguments)


class OneLayer(nn.Module):
    """A convolution as a network."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(64, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x)


def by_gram(images: Tensor) -> Tensor:
    network = OneLayer()
    inputs = observe(network, layers_of(network, (64, 16, 16)), images.split(BATCH), len(images), None, random())
    return inputs["backbone"].principal(torch.zeros(576, 0))[1]


def by_svd(images: Tensor) -> Tensor:
    columns = nn.Unfold(3)(images).transpose(0, 1).flatten(1)
    return torch.linalg.svd(columns, full_matrices=False).S


def measure_svd(side: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = torch.randn(2_500, 64, 16, 16).relu_()
    with Peak() as peak:
        started = time.thread_time()
        sigma = side(images)
        seconds = time.thread_time() - started
    return {"s": seconds, "mb": peak.above, "largest": float(sigma[0])}


def compare_svd(repeats: int) -> None:
    runs = [{side.__name__: alone(measure_svd, side) for side in (by_gram, by_svd)} for _ in range(repeats)]
    result: dict[str, Any] = {"part": "svd"}
    for side in ("by_gram", "by_svd"):
        for key in ("s", "mb", "largest"):
            result[f"{side}_{key}"] = round(statistics.median(run[side][key] for run in runs), 2)
    result["times_faster"] = round(statistics.median(run["by_svd"]["s"] / run["by_gram"]["s"] for run in runs), 1)
    print(json.dumps(result), flush=True)


def local_epoch(network: Network, inputs: Tensor, labels: Tensor, batch: int) -> None:
    network.train()
    optimiser = torch.optim.SGD(network.parameters(), 0.01, fused=True)
    for rows in torch.randperm(len(labels)).split(batch):
        optimiser.zero_grad()
        cross_entropy(network(inputs[rows]), labels[rows]).backward()
        optimiser.step()


def sketches(layer: Layer, seen: LayerInputs, basis: Tensor) -> None:
    """What FOT's client tells of a layer."""
    settings = Fot.Settings()
    times = settings.sketch_conv if isinstance(layer.module, nn.Conv2d) else settings.sketch_linear
    seen.energy()
    seen.energy(basis)
    seen.sketch(basis, round(times * layer.width), random())


def directions(layer: Layer, seen: LayerInputs, basis: Tensor) -> None:
    """What FedProTIP's client tells of a layer, and GPM's keeps."""
    seen.energy()
    seen.energy(basis)
    seen.principal(basis)


def measure_epochs(name: str, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    samples, batch, shape, model = WORKS[name]
    network = skeleton(ModelSpec(model, shape, "growing", (tuple(range(10)),)))
    inputs, labels = torch.randn(samples, *shape), torch.randint(10, (samples,))
    layers = {key: layer for key, layer in layers_of(network, shape).items() if key.startswith("backbone.")}
    bases = {key: random_basis(layer.width) for key, layer in layers.items()}

    def extract(
        tell: Callable[[Layer, LayerInputs, Tensor], None], images: int, patches: int | None, kept: int = 0
    ) -> None:
        seen = observe(network, layers, inputs[:images].split(BATCH), images, patches, random(), kept)
        for key, layer in layers.items():
            tell(layer, seen[key], bases[key])

    fot, gpm, fedprotip = Fot.Settings(), Gpm.Settings(), FedProTIP.Settings()
    sides: dict[str, Callable[[], None]] = {
        "epoch": partial(local_epoch, network, inputs, labels, batch),
        "fot": partial(extract, sketches, min(samples, fot.samples or samples), fot.patches),
        "fot_all": partial(extract, sketches, samples, None),
        "gpm": partial(extract, directions, min(samples, gpm.samples or samples), gpm.patches),
        "fedprotip": partial(
            extract, directions, min(samples, fedprotip.samples or samples), fedprotip.patches, fedprotip.patches
        ),
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(1 + repeats):
        for side, work in sides.items():
            started = time.thread_time()
            work()
            seconds[side].append(time.thread_time() - started)
    # The first turn warms up.
    epoch = seconds.pop("epoch")[1:]
    result: dict[str, Any] = {"part": "epochs", "network": name, "epoch_ms": round(1e3 * statistics.median(epoch))}
    for side, taken in seconds.items():
        result[side] = round(statistics.median(a / b for a, b in zip(taken[1:], epoch, strict=True)), 2)
    return result


def compare_epochs(repeats: int) -> None:
    for name in WORKS:
        print(json.dumps(alone(measure_epochs, name, repeats)), flush=True)


def measure_memory(name: str, samples: int, patches: int | None) -> int:
    torch.set_num_threads(1)
    _, _, shape, model = WORKS[name]
    network = skeleton(ModelSpec(model, shape, "growing", (tuple(range(10)),)))
    layers = {key: layer for key, layer in layers_of(network, shape).items() if key.startswith("backbone.")}

    def images() -> Iterator[Tensor]:
        for start in range(0, samples, BATCH):
            yield torch.randn(min(BATCH, samples - start), *shape)

    with Peak() as peak:
        seen = observe(network, layers, images(), samples, patches, random())
        for key, layer in layers.items():
            sketches(layer, seen[key], random_basis(layer.width))
    return peak.above


def compare_memory(repeats: int) -> None:
    for kind, patches in (("default", Fot.Settings().patches), ("all", None)):
        result: dict[str, Any] = {"part": "memory", "network": "alexnet", "patches": kind}
        for samples in SAMPLES:
            result[f"mb_{samples}"] = alone(measure_memory, "alexnet", samples, patches)
        print(json.dumps(result), flush=True)


def random_basis(d: int) -> Tensor:
    return torch.linalg.qr(torch.randn(d, int(SHARE * d))).Q.contiguous()


def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


PARTS = {"svd": compare_svd, "epochs": compare_epochs, "memory": compare_memory}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; none: all")
    arguments.add_argument("--repeats", type=int, default=5, help="turns of each side")
    chosen = arguments.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, tuned malloc", flush=True)
    for part in chosen.parts or PARTS:
        PARTS[part](chosen.repeats)


if __name__ == "__main__":
    main()
