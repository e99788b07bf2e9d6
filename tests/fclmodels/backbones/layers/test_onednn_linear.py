"""The fully connected layer by oneDNN: the products and gradients that NumPy finds in double precision, the same bits
each time, and torch's own layer wherever it does not pay."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn

from fclmodels.backbones.layers import onednn_linear
from fclmodels.backbones.layers.onednn_linear import Linear

ROWS, INPUTS, OUTPUTS = 64, 400, 350

pytestmark = pytest.mark.skipif(not onednn_linear.ONEDNN, reason="this torch has no oneDNN")


def layer_and_batch(bias: bool = True, rows: int = ROWS) -> tuple[Linear, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    layer = Linear(INPUTS, OUTPUTS, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=random)
    x, delta = torch.randn(rows, INPUTS, generator=random), torch.randn(rows, OUTPUTS, generator=random)
    return layer, x.requires_grad_(), delta


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the products that are oneDNN's."""
    shapes: list[tuple[int, ...]] = []

    def product(A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        shapes.append((*A.shape, B.shape[1]))
        return A @ B

    monkeypatch.setattr(onednn_linear, "product", product)
    return shapes


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_double_precision(bias: bool) -> None:
    layer, x, delta = layer_and_batch(bias)
    y = layer(x)
    y.backward(delta)
    X, W, D = (t.detach().double().numpy() for t in (x, layer.weight, delta))
    b = layer.bias.detach().double().numpy() if bias else np.zeros(OUTPUTS)
    close = {"rtol": 1e-5, "atol": 2e-4}  # sums of 400 products of size 1
    assert_allclose(y.detach().numpy(), X @ W.T + b, **close)
    assert x.grad is not None
    assert_allclose(x.grad.numpy(), D @ W, **close)
    assert layer.weight.grad is not None
    assert_allclose(layer.weight.grad.numpy(), D.T @ X, **close)
    if bias:
        assert_allclose(layer.bias.grad.numpy(), D.sum(0), **close)


def test_only_what_is_asked_for_is_formed(calls: list[tuple[int, ...]]) -> None:
    layer, x, delta = layer_and_batch()
    layer.weight.requires_grad_(False)
    layer(x).backward(delta)
    assert calls == [(ROWS, INPUTS, OUTPUTS), (ROWS, OUTPUTS, INPUTS)]
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    calls.clear()
    layer.weight.requires_grad_(True)
    layer(x.detach()).backward(delta)
    assert calls == [(ROWS, INPUTS, OUTPUTS), (OUTPUTS, ROWS, INPUTS)]
    calls.clear()
    with torch.inference_mode():
        layer(x)
    assert calls == [(ROWS, INPUTS, OUTPUTS)]


def test_the_same_bits_at_any_address_and_in_any_layout() -> None:
    layer, x, _ = layer_and_batch()
    with torch.inference_mode():
        expected = layer(x)
        for offset in (1, 3, 7):
            elsewhere = torch.empty(x.numel() + offset)[offset:].view_as(x).copy_(x)
            assert torch.equal(layer(elsewhere), expected)
        assert torch.equal(layer(x.T.contiguous().T), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda layer, x: (layer, x[: ROWS - 1]),
        lambda layer, x: (layer, x[:16]),
        lambda layer, x: (layer, x[None]),
        lambda layer, x: (layer.double(), x.double()),
    ],
    ids=["rows that are no multiple", "few rows", "three dimensions", "double"],
)
def test_torchs_own_layer_stands_in_where_it_does_not_pay(make: Callable, calls: list[tuple[int, ...]]) -> None:
    layer, x, _ = layer_and_batch()
    layer, x = make(layer, x)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert not calls


def test_lower_precision_is_left_to_torch(calls: list[tuple[int, ...]]) -> None:
    layer, x, _ = layer_and_batch()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert not calls


def test_its_state_is_that_of_torchs_layer() -> None:
    layer, x, _ = layer_and_batch()
    plain = nn.Linear(INPUTS, OUTPUTS)
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(plain(x), layer(x), rtol=1e-5, atol=2e-4)
