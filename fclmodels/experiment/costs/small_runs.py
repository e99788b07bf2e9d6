"""Runs that need no trial: the shapes of their network alone show that they take little time and memory."""

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from fclmodels.experiment.experiment import Experiment

SMALL_MEMORY, SMALL_WORK = 2**28, 10**12  # bytes, and multiplications: less than a minute on one core
BYTES_OF_A_NUMBER = 4


def is_small(run: "Experiment") -> bool:
    """Return whether the shapes alone show that a run takes less than a minute and little memory.

    Counted are the weights, the activations of a batch, a square of the widest layer's inputs, and the multiplications
    of all rounds, of which the backward pass has two thirds.
    """
    method, federation = run.method, run.params.federation
    network = deepcopy(method.networks.build(method.run.make_spec(1))).eval()  # which the run itself goes on to use
    inputs = next(method.run.batches.iterate_ordered(run.splits.select_test_rows(0), 1)).inputs
    shapes = measure_shapes(network, inputs)
    weights = sum(tensor.numel() for tensor in network.state_dict().values())
    numbers = max(weights, federation.batch_size * shapes.activations, shapes.widest**2)
    samples = sum(
        method.run.count_rounds(task)
        * method.count_sampled_clients(task)
        / len(clients)
        * sum(len(method.select_rows(task, c)) for c in clients)
        for task in range(run.tasks)
        if (clients := method.list_participants(task))
    )
    work = 3 * shapes.multiplications * samples * federation.local_epochs
    return BYTES_OF_A_NUMBER * numbers < SMALL_MEMORY and work < SMALL_WORK


@dataclass
class Shapes:
    """Sums over the layers of a network, for one sample."""

    activations: int = 0  # numbers
    widest: int = 0  # the most inputs of a layer
    multiplications: int = 0


def measure_shapes(network: nn.Module, inputs: Tensor) -> Shapes:
    """Return the sums over convolutions and linear layers of one forward pass of inputs [1, ...]."""
    shapes = Shapes()

    def add(layer: nn.Module, _: object, output: Tensor) -> None:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        fan_in = weight.numel() // len(weight)
        shapes.activations += output.numel()
        shapes.widest = max(shapes.widest, fan_in)
        shapes.multiplications += output.numel() * fan_in

    layers = [module for module in network.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    handles = [layer.register_forward_hook(add) for layer in layers]
    with torch.inference_mode():
        network(inputs)
    for handle in handles:
        handle.remove()
    return shapes
