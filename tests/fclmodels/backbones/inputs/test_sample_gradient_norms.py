"""Norms of single samples' gradients: from one pass of the batch, against autograd sample by sample."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fclmodels.backbones.inputs import sample_gradients
from fclmodels.backbones.inputs.sample_gradients import compute_square_products, sample_gradient_norms
from fclmodels.backbones.model.network import Network, build_network
from fclmodels.backbones.model.spec import ModelSpec

BACKBONES = {
    "mlp": ({"backbone": "mlp", "hidden": 7, "dropout": [0, 0]}, (1, 6, 6)),
    "cnn": ({"backbone": "cnn", "width": 3, "features": 5}, (1, 8, 8)),
    "resnet18": ({"backbone": "resnet18", "width": 4, "norm": "group", "stem": "cifar"}, (1, 16, 16)),
    "vit": ({"backbone": "vit", "patch": 4, "width": 8, "depth": 2, "attention_heads": 2, "mlp_width": 9}, (1, 8, 8)),
}


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network_of(settings: dict, shape: tuple[int, ...]) -> Network:
    spec = ModelSpec(settings, shape, "growing", ((0, 1, 2),))
    return build_network(spec, torch.Generator().manual_seed(0)).double().eval()


def one_by_one(net: nn.Module, names: list[str], score: Callable[[int], Tensor], samples: int) -> Tensor:
    """Autograd's norm over these parameters for each sample."""
    parameters = [net.get_parameter(name) for name in names]
    norms = []
    for i in range(samples):
        gradients = torch.autograd.grad(score(i), parameters, allow_unused=True)
        norms.append(sum(g.square().sum() for g in gradients if g is not None).sqrt())
    return torch.stack(norms)


@pytest.mark.parametrize("chunk", [1, 400, 2**24])
@pytest.mark.parametrize("name", BACKBONES)
def test_every_backbone(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_gradients, "CHUNK", chunk)
    net = network_of(*BACKBONES[name])
    x, labels = normal(5, *net.spec.shape, seed=1), torch.tensor([0, 1, 2, 1, 0])
    names = [
        name
        for name, parameter in net.named_parameters()
        if "class_token" not in name and "positions" not in name and parameter.numel()
    ]
    expected = one_by_one(net, names, lambda i: nn.functional.cross_entropy(net(x[i : i + 1]), labels[i : i + 1]), 5)
    losses = lambda: nn.functional.cross_entropy(net(x), labels, reduction="none")  # noqa: E731
    torch.testing.assert_close(sample_gradient_norms(net, names, 5, losses), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "names", [["heads.0.weight"], ["heads.0.bias"], ["backbone.fc1.weight", "backbone.conv1.bias"]]
)
def test_only_the_parameters_of_these_names_count(names: list[str]) -> None:
    net = network_of(*BACKBONES["cnn"])
    x = normal(4, 1, 8, 8)
    expected = one_by_one(net, names, lambda i: net(x[i : i + 1])[0, 1], 4)
    net.requires_grad_(False)
    torch.testing.assert_close(sample_gradient_norms(net, names, 4, lambda: net(x)[:, 1]), expected)


def test_of_a_linear_layer_with_one_position_it_is_the_product_of_two_lengths() -> None:
    net, x = nn.Linear(4, 3, bias=False).double(), normal(6, 4)
    flow = normal(6, 3, seed=1)
    norms = sample_gradient_norms(net, ["weight"], 6, lambda: (net(x) * flow).sum(1))
    torch.testing.assert_close(norms, flow.norm(dim=1) * x.norm(dim=1))


def test_parameters_without_effect_have_no_length() -> None:
    net, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), torch.ones(2, 4)
    assert sample_gradient_norms(net, ["1.weight"], 2, lambda: net[0](x).sum(1)).tolist() == [0, 0]


@pytest.mark.parametrize("positions", [1, 4])
def test_products_are_summed_over_positions_before_they_are_squared(positions: int) -> None:
    D, X = normal(3, 2, positions), normal(3, 5, positions, seed=1)
    expected = torch.stack([(d @ x.T).square().sum() for d, x in zip(D, X, strict=True)])
    torch.testing.assert_close(compute_square_products(D, X), expected)
