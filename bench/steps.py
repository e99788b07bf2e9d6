"""Candidates for a faster training step, each against the step that clients take: SGD, fused, contiguous, float32.

    python bench/steps.py [w1 w2 w3] [--seeds 3]

trains each way on the embedded digits, enlarged to the network's images, and prints accuracies on held-out ones.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from measuring import Bench, Row, take_turns
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from workloads import WORKS

from fclmodels.backbones.model.network import build_network
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.federation.executors import glibc_malloc

LR = 0.01
EPOCHS = 5
Step = Callable[[Tensor, Tensor], None]


def plain(network: nn.Module, fused: bool = True, context: Callable[[], AbstractContextManager] = nullcontext) -> Step:
    optimiser = torch.optim.SGD(network.parameters(), LR, fused=fused)

    def step(inputs: Tensor, labels: Tensor) -> None:
        optimiser.zero_grad()
        with context():
            loss = cross_entropy(network(inputs), labels)
        loss.backward()
        optimiser.step()

    return step


def channels_last(network: nn.Module) -> Step:
    step = plain(network.to(memory_format=torch.channels_last))
    return lambda inputs, labels: step(inputs.contiguous(memory_format=torch.channels_last), labels)


def compiled(network: nn.Module) -> Step:
    """Run forward and backward by inductor, which compiles at the first call."""
    return plain(torch.compile(network))  # type: ignore[arg-type]


def bfloat16(network: nn.Module) -> Step:
    """Multiply in bfloat16, with weights and their sums in float32."""
    return plain(network, context=partial(torch.autocast, "cpu", torch.bfloat16))


def in_the_backward(network: nn.Module) -> Step:
    """Update each weight as soon as its gradient is there and still in the cache, and drop the gradient."""

    def move(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-LR)
        parameter.grad = None

    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(move)

    return lambda inputs, labels: cross_entropy(network(inputs), labels).backward()


def reuse_gradients(network: nn.Module) -> Step:
    optimiser = torch.optim.SGD(network.parameters(), LR, fused=True)

    def step(inputs: Tensor, labels: Tensor) -> None:
        optimiser.zero_grad(set_to_none=False)
        cross_entropy(network(inputs), labels).backward()
        optimiser.step()

    return step


WAYS: dict[str, Callable[[nn.Module], Step]] = {
    "plain": plain,
    "not-fused": partial(plain, fused=False),
    "channels-last": channels_last,
    "compiled": compiled,
    "bfloat16": bfloat16,
    "in-the-backward": in_the_backward,
    "kept-gradients": reuse_gradients,
}


def build_workload(name: str, seed: int = 0) -> nn.Module:
    work = WORKS[name]
    spec = ModelSpec(work.model, work.shape, "growing", (tuple(range(10)),))
    return build_network(spec, torch.Generator().manual_seed(seed)).train()


def measure_ways(name: str, turns: int) -> Iterator[Row]:
    work = WORKS[name]
    inputs, labels = torch.randn(work.batch, *work.shape), torch.randint(10, (work.batch,))
    sides = {way: partial(make(build_workload(name)), inputs, labels) for way, make in WAYS.items()}
    for side in sides.values():  # compiling and choosing kernels takes some steps
        for _ in range(3):
            side()
    seconds = take_turns(sides, turns)
    for way in list(WAYS)[1:]:
        yield Row(f"{name}-{way}", "a step, the step that clients take", seconds[way], seconds["plain"])


BENCHES = [Bench(f"{name}-ways", partial(measure_ways, name), 31) for name in ("w1", "w2", "w3")]


def measure_accuracy(name: str, way: str, seed: int) -> float:
    work, (pixels, digits) = WORKS[name], load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    inputs = interpolate(images, work.shape[1:]).expand(-1, *work.shape).contiguous()
    labels, order = torch.tensor(digits), torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train, test = order[len(order) // 5 :], order[: len(order) // 5]
    torch.manual_seed(seed)
    network = build_workload(name, seed)
    step = WAYS[way](network)
    for _ in range(EPOCHS):
        for rows in train[torch.randperm(len(train))].split(work.batch):
            step(inputs[rows], labels[rows])
    network.eval()
    with torch.inference_mode():
        return float((network(inputs[test]).argmax(1) == labels[test]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", default=["w1", "w2", "w3"])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    glibc_malloc.tune()
    torch.set_num_threads(1)
    for name in options.works:
        for way in WAYS:
            accuracies = [100 * measure_accuracy(name, way, seed) for seed in range(options.seeds)]
            print(
                f"{name} {way}: {statistics.mean(accuracies):.2f} ({', '.join(f'{one:.2f}' for one in accuracies)})",
                flush=True,
            )


if __name__ == "__main__":
    main()
