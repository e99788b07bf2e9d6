"""Our step of SGD against torch's class, to the bit, and what a process need not import for it."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fclmodels.federation.training.optimisers import Sgd, make_optimiser, read_optimiser_state, restore_optimiser
from fclmodels.settings.schema import OptimizerSettings

SHAPES = ((7, 5), (7,), (3, 7), (1,))


def draw_parameters() -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=random)) for shape in SHAPES]


def walk(optimiser: torch.optim.Optimizer | Sgd, parameters: list[nn.Parameter], steps: range) -> None:
    """Take steps by drawn gradients; steps 3 and 6 leave the second parameter out; the rate falls after the fourth."""
    for number in steps:
        optimiser.zero_grad()
        assert all(parameter.grad is None for parameter in parameters)
        random = torch.Generator().manual_seed(number)
        for place, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=random)
            if number not in (3, 6) or place != 1:
                parameter.grad = gradient
        optimiser.param_groups[0]["lr"] = 0.1 if number < 4 else 0.01
        optimiser.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_steps_are_torchs_to_the_bit_also_after_its_state_was_restored(momentum: float, decay: float) -> None:
    settings = OptimizerSettings(lr=0.1, momentum=momentum, weight_decay=decay)
    ours, theirs = draw_parameters(), draw_parameters()
    one = make_optimiser(settings, ours, 0)
    other = torch.optim.SGD(theirs, 0.1, momentum, weight_decay=decay, fused=True)
    assert isinstance(one, Sgd)
    walk(one, ours, range(5))
    again = make_optimiser(settings, ours, 0)
    restore_optimiser(again, read_optimiser_state(one))
    walk(again, ours, range(5, 8))  # type: ignore[arg-type]
    walk(other, theirs, range(8))
    for mine, torchs in zip(ours, theirs, strict=True):
        assert torch.equal(mine, torchs)
    assert bool(read_optimiser_state(again)) == bool(momentum)


def test_a_parameter_may_move_later_than_others() -> None:
    """Which torch's fused step refuses; its plain one does the same up to rounding."""
    ours, theirs = draw_parameters(), draw_parameters()
    one, other = Sgd(ours, 0.1, 0.9, 0.05), torch.optim.SGD(theirs, 0.1, 0.9, weight_decay=0.05, foreach=False)
    for steps in (range(3, 5), range(6, 8)):
        walk(one, ours, steps)
        walk(other, theirs, steps)
    for mine, torchs in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, torchs)


def list_imports(code: str) -> Iterator[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    yield from done.stdout.split()


def test_training_with_sgd_does_not_import_torchs_compiler() -> None:
    """It takes a second of the processor in each process."""
    code = """
import sys, torch
from fclmodels.federation.training.optimisers import make_optimiser
from fclmodels.settings.schema import OptimizerSettings
from fclmodels.backbones.model.network import build_network
from fclmodels.backbones.model.spec import ModelSpec
network = build_network(ModelSpec({"backbone": "cnn"}, (1, 8, 8), "growing", ((0, 1),)), torch.Generator())
optimiser = make_optimiser(OptimizerSettings(), list(network.parameters()), 0)
network.compute_logits(network.backbone(torch.zeros(2, 1, 8, 8)), 0).sum().backward()
optimiser.step()
optimiser.zero_grad()
print(*sys.modules)
"""
    assert not {"torch._dynamo", "sympy"} & set(list_imports(code))
