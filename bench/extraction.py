"""Cost of finding subspaces for a client at a task's end. Seconds are CPU seconds of one thread, so that other work on
the machine matters little.

epochs: against one local epoch, as the methods do by default, and for FOT with all columns of all images; a basis of
20 % is there already. svd: a streamed Gram matrix and its eigenvectors against all columns and their SVD, d = 576,
n = 490,000. memory: the peak of anonymous memory with 5,000 samples against that with 500.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from measuring import Bench, Peak, Row, measure_anonymous, run_alone, take_turns
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from workloads import WORKS, draw_basis

from fclmodels.backbones.inputs.layer_capture import BATCH, Layer, find_layers, observe_inputs
from fclmodels.backbones.inputs.layer_inputs import LayerInputs
from fclmodels.backbones.model.network import Network, build_skeleton
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.methods.fedprotip import FedProTIP
from fclmodels.methods.fot import Fot
from fclmodels.methods.gpm import Gpm

LIMIT, LIMIT_OF_ALL = 1.0, 3.0
FEW, MANY = 500, 5_000


class OneLayer(nn.Module):
    """A convolution as a network."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(64, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x)


def by_gram(images: Tensor) -> Tensor:
    network = OneLayer()
    inputs = observe_inputs(
        network, find_layers(network, (64, 16, 16)), images.split(BATCH), len(images), None, random()
    )
    return inputs["backbone"].decompose_principal(torch.zeros(576, 0))[1]


def by_svd(images: Tensor) -> Tensor:
    columns = nn.Unfold(3)(images).transpose(0, 1).flatten(1)
    return torch.linalg.svd(columns, full_matrices=False).S


def measured_svd(side: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Return seconds and MB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = torch.randn(2_500, 64, 16, 16).relu_()
    with Peak(measure_anonymous) as peak:
        started = time.thread_time()
        side(images)
        seconds = time.thread_time() - started
    return seconds, peak.above


def svd(turns: int) -> Iterator[Row]:
    sides = [[run_alone(measured_svd, side) for side in (by_gram, by_svd)] for _ in range(turns)]
    for place, unit in enumerate(("s", "MB")):
        ours, others = ([turn[side][place] for turn in sides] for side in (0, 1))
        yield Row(f"svd-{unit}", "a streamed Gram matrix, SVD of all columns", ours, others, unit)


def local_epoch(network: Network, inputs: Tensor, labels: Tensor, batch: int) -> None:
    network.train()
    optimiser = torch.optim.SGD(network.parameters(), 0.01, fused=True)
    for rows in torch.randperm(len(labels)).split(batch):
        optimiser.zero_grad()
        cross_entropy(network(inputs[rows]), labels[rows]).backward()
        optimiser.step()


def sketches(layer: Layer, inputs_by_layer: LayerInputs, basis: Tensor) -> None:
    """Compute what FOT's client sends of a layer."""
    settings = Fot.Settings()
    times = settings.sketch_conv if isinstance(layer.module, nn.Conv2d) else settings.sketch_linear
    inputs_by_layer.measure_energy()
    inputs_by_layer.measure_energy(basis)
    inputs_by_layer.draw_sketch(basis, round(times * layer.width), random())


def directions(layer: Layer, inputs_by_layer: LayerInputs, basis: Tensor) -> None:
    """Compute what FedProTIP's client sends of a layer, and GPM's remembers."""
    inputs_by_layer.measure_energy()
    inputs_by_layer.measure_energy(basis)
    inputs_by_layer.decompose_principal(basis)


def epochs(name: str, turns: int) -> Iterator[Row]:
    torch.manual_seed(0)
    work = WORKS[name]
    network, layers = network_and_layers(name)
    samples, inputs = work.samples, torch.randn(work.samples, *work.shape)
    labels = torch.randint(10, (samples,))
    bases = {key: draw_basis(layer.width) for key, layer in layers.items()}

    def extract(
        extract_layer: Callable[[Layer, LayerInputs, Tensor], None],
        images: int,
        patches: int | None,
        kept_columns: int = 0,
    ) -> None:
        inputs_by_layer = observe_inputs(
            network, layers, inputs[:images].split(BATCH), images, patches, random(), kept_columns
        )
        for key, layer in layers.items():
            extract_layer(layer, inputs_by_layer[key], bases[key])

    fot, gpm, fedprotip = Fot.Settings(), Gpm.Settings(), FedProTIP.Settings()
    sides: dict[str, Callable[[], None]] = {
        "epoch": partial(local_epoch, network, inputs, labels, work.batch),
        "fot": partial(extract, sketches, min(samples, fot.samples or samples), fot.patches),
        "fot-all": partial(extract, sketches, samples, None),
        "gpm": partial(extract, directions, min(samples, gpm.samples or samples), gpm.patches),
        "fedprotip": partial(
            extract, directions, min(samples, fedprotip.samples or samples), fedprotip.patches, fedprotip.patches
        ),
    }
    seconds = take_turns(sides, turns, time.thread_time)
    limits = {"fot": LIMIT, "fot-all": LIMIT_OF_ALL}
    for side in list(sides)[1:]:
        what = "a client's extraction at a task's end, a local epoch"
        yield Row(f"{name}-extract-{side}", what, seconds[side], seconds["epoch"], "CPU s", limits.get(side))


def network_and_layers(name: str) -> tuple[Network, dict[str, Layer]]:
    work = WORKS[name]
    network = build_skeleton(ModelSpec(work.model, work.shape, "growing", (tuple(range(10)),)))
    return network, {k: layer for k, layer in find_layers(network, work.shape).items() if k.startswith("backbone.")}


def measured_memory(samples: int) -> int:
    torch.set_num_threads(1)
    network, layers = network_and_layers("w2")

    def images() -> Iterator[Tensor]:
        for start in range(0, samples, BATCH):
            yield torch.randn(min(BATCH, samples - start), *WORKS["w2"].shape)

    with Peak(measure_anonymous) as peak:
        inputs_by_layer = observe_inputs(network, layers, images(), samples, Fot.Settings().patches, random())
        for key, layer in layers.items():
            sketches(layer, inputs_by_layer[key], draw_basis(layer.width))
    return peak.above


def memory(turns: int) -> Iterator[Row]:
    peaks = {samples: [run_alone(measured_memory, samples) for _ in range(turns)] for samples in (MANY, FEW)}
    yield Row("w2-extract-memory", f"FOT's, {MANY} samples, {FEW}", peaks[MANY], peaks[FEW], "MB")


def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


BENCHES = [
    *(Bench(f"{name}-extract", partial(epochs, name), 7) for name in ("w1", "w2", "w3")),
    Bench("svd", svd, 1),
    Bench("w2-extract-memory", memory, 3),
]
