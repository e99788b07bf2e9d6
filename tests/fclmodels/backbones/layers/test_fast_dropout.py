"""Dropout by 16 bits a number: shares, scale, gradient, independence, and what it draws from."""

import pytest
import torch

from fclmodels.backbones.layers.fast_dropout import LEVELS, Dropout


def dropped(p: float, *shape: int, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return Dropout(p).train()(torch.ones(*shape))


@pytest.mark.parametrize("p", [0.001, 0.2, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p_and_the_mean_stays(p: float) -> None:
    outputs = dropped(p, 1000, 1001)  # no multiple of the four numbers of a draw
    count = outputs.numel()
    assert (outputs == 0).sum().item() == pytest.approx(p * count, abs=5 * (p * (1 - p) * count) ** 0.5)
    exactly = round(p * LEVELS) / LEVELS
    assert outputs.unique().tolist() == pytest.approx([0, 1 / (1 - exactly)], rel=1e-6)


def test_each_number_is_drawn_by_itself() -> None:
    """No lane of a draw is dropped more often than another, and none tells of its neighbours."""
    zeros = (dropped(0.3, 2**20) == 0).float()
    lanes = zeros.view(-1, 4)
    assert lanes.mean(0).tolist() == pytest.approx([0.3] * 4, abs=5 * (0.21 / 2**18) ** 0.5)
    for step in (1, 2, 3, 4, 8):
        both = (zeros[:-step] * zeros[step:]).mean().item()
        assert both == pytest.approx(0.09, abs=5 * (0.09 / 2**20) ** 0.5)


def test_the_gradient_goes_where_numbers_were_kept() -> None:
    x = torch.randn(40, 30, requires_grad=True)
    layer = Dropout(0.25).train()
    y = layer(x)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (y / x).detach())
    assert 0 < (x.grad == 0).sum() < x.numel()


def test_masks_follow_the_global_generator() -> None:
    assert torch.equal(dropped(0.5, 99), dropped(0.5, 99))
    assert not torch.equal(dropped(0.5, 99), dropped(0.5, 99, seed=1))


@pytest.mark.parametrize("layer", [Dropout(0.5).eval(), Dropout(0).train()])
def test_it_is_off_in_evaluation_and_without_a_share(layer: Dropout) -> None:
    x, state = torch.randn(5, 6), torch.get_rng_state()
    assert layer(x) is x
    assert torch.equal(torch.get_rng_state(), state)
