"""Squares of single samples' gradients: layer by layer from one pass, against autograd sample by sample."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fclmodels.backbones.inputs import sample_gradients
from fclmodels.backbones.inputs.sample_gradients import sum_squared_gradients, sum_squared_products
from fclmodels.backbones.layers.norms import drop_statistics, use_statistics_of
from fclmodels.backbones.model.network import Network, build_network
from fclmodels.backbones.model.spec import ModelSpec

BACKBONES = {
    "mlp": ({"backbone": "mlp", "hidden": 7}, (1, 6, 6)),
    "cnn": ({"backbone": "cnn", "width": 3, "features": 5}, (1, 8, 8)),
    "resnet18": ({"backbone": "resnet18", "width": 2, "stem": "cifar"}, (3, 8, 8)),
    "resnet18 imagenet": ({"backbone": "resnet18", "width": 2}, (3, 40, 40)),
    "resnet18 group": ({"backbone": "resnet18", "width": 4, "norm": "group", "stem": "cifar"}, (1, 16, 16)),
}


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network_of(settings: dict, shape: tuple[int, ...]) -> Network:
    net = build_network(ModelSpec(settings, shape, "growing", ((0, 1, 2),)), torch.Generator().manual_seed(0)).double()
    net.train()(normal(16, *shape, seed=9) + 1)  # statistics that are not those of the start
    return net.eval()


def one_by_one(net: nn.Module, score: Callable[[int], Tensor], samples: int) -> dict[str, Tensor]:
    parameters = dict(net.named_parameters())
    squares = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for i in range(samples):
        gradients = torch.autograd.grad(score(i), list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, gradients, strict=True):
            squares[name] += 0 if gradient is None else gradient**2
    return squares


def assert_same(mine: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, square in mine.items():
        torch.testing.assert_close(square, expected[name], rtol=1e-9, atol=1e-14, msg=name)


@pytest.mark.parametrize("chunk", [1, 400, 2**24])
@pytest.mark.parametrize("name", BACKBONES)
def test_every_backbone(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_gradients, "CHUNK", chunk)
    net = network_of(*BACKBONES[name])
    x, weights = normal(5, *net.spec.shape, seed=1), normal(5, 3, seed=2)
    expected = one_by_one(net, lambda i: (net(x[i : i + 1]).log_softmax(1) * weights[i]).sum(), 5)
    mine = sum_squared_gradients(net, expected.keys(), 5, lambda: (net(x).log_softmax(1) * weights).sum(1))
    assert mine.keys() == expected.keys()
    assert all(square.sum() > 0 for square in mine.values())
    assert_same(mine, expected)


class Odd(nn.Module):
    """Layers of other kinds: words and positions embedded, norms and products of sequences, grouped convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 4), nn.Embedding(6, 4)
        self.norm, self.mix = nn.LayerNorm(4), nn.Linear(4, 6)
        self.token = nn.Parameter(torch.ones(4))
        self.grouped = nn.Conv1d(6, 4, 3, groups=2)
        self.strided = nn.Conv2d(4, 3, 2, stride=2, dilation=1, padding=1)
        self.pairs = nn.Conv2d(3, 3, 1, groups=3, bias=False)
        self.unused = nn.Linear(2, 2)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(6)[None])
        x = self.relu(self.mix(self.relu(self.norm(x)))).mT
        x = self.relu(self.grouped(x)).view(len(words), 4, 2, 2)
        return self.pairs(self.strided(x)).flatten(1) * self.token.sum()


def test_other_kinds_of_layers_and_a_parameter_beside_layers() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Odd()).double().eval()
    words, weights = torch.randint(11, (4, 6)), normal(12, seed=3)
    expected = one_by_one(net, lambda i: (net(words[i : i + 1]) @ weights).sum(), 4)
    mine = sum_squared_gradients(net, expected.keys(), 4, lambda: net(words) @ weights)
    assert_same(mine, expected)
    assert not mine["0.unused.weight"].any()
    assert all(square.any() for name, square in mine.items() if "unused" not in name)


def test_a_transformer_encoder(encoder: Path) -> None:
    """Words, positions that all samples share, norms and products of sequences, padding."""
    settings = {"backbone": "transformer", "folder": str(encoder), "weights": None}
    net = build_network(ModelSpec(settings, (2, 8), "growing", ((0, 1, 2),)), torch.Generator()).double().eval()
    texts = torch.randint(1, 20, (4, 2, 8), generator=torch.Generator().manual_seed(1))
    texts[:, 1] = (torch.arange(8) < torch.tensor([8, 3, 5, 1])[:, None]).long()
    weights = normal(4, 3, seed=2)
    expected = one_by_one(net, lambda i: (net(texts[i : i + 1]).log_softmax(1) * weights[i]).sum(), 4)
    mine = sum_squared_gradients(net, expected.keys(), 4, lambda: (net(texts).log_softmax(1) * weights).sum(1))
    assert any(mine[name].any() for name in mine if "position_embeddings" in name)
    assert_same(mine, expected)


def test_only_what_is_asked_for_and_in_any_state_of_requires_grad() -> None:
    net = network_of(*BACKBONES["cnn"])
    x = normal(3, *net.spec.shape)
    expected = one_by_one(net, lambda i: net(x[i : i + 1]).sum(), 3)
    net.requires_grad_(False)
    mine = sum_squared_gradients(net, ["backbone.conv2.weight", "heads.0.bias"], 3, lambda: net(x).sum(1))
    assert list(mine) == ["backbone.conv2.weight", "heads.0.bias"]
    assert_same(mine, expected)


def test_a_layer_that_works_twice_is_refused() -> None:
    net = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="twice"):
        sum_squared_gradients(
            nn.Sequential(net, net), ["0.weight"], 2, lambda: nn.Sequential(net, net)(torch.ones(2, 3))
        )


@pytest.mark.parametrize("positions", [1, 4])
def test_products_are_squared_after_the_sum_over_positions(positions: int) -> None:
    D, X = normal(3, 2, positions), normal(3, 5, positions, seed=1)
    expected = sum((d @ x.T) ** 2 for d, x in zip(D, X, strict=True))
    torch.testing.assert_close(sum_squared_products(D, X), expected)


def test_statistics_of_a_batch_are_constants_while_they_are_lent() -> None:
    net = network_of(*BACKBONES["resnet18"])
    drop_statistics(net)
    x = 3 * normal(6, 3, 8, 8) + 1
    alone, together = net(x[:1]), net(x)
    with use_statistics_of(net, x):
        torch.testing.assert_close(net(x), together)
        torch.testing.assert_close(net(x[:1]), together[:1])
    torch.testing.assert_close(net(x[:1]), alone)
    assert (alone - together[:1]).abs().max() > 0.01
    assert not list(net.buffers())


def test_with_lent_statistics_samples_do_not_meet() -> None:
    net = network_of(*BACKBONES["resnet18"])
    drop_statistics(net)
    x = normal(5, 3, 8, 8)
    with use_statistics_of(net, x):
        expected = one_by_one(net, lambda i: net(x[i : i + 1]).log_softmax(1)[0, 1], 5)
        assert_same(sum_squared_gradients(net, expected.keys(), 5, lambda: net(x).log_softmax(1)[:, 1]), expected)


def test_layers_that_keep_statistics_go_on_with_their_own() -> None:
    net = network_of(*BACKBONES["resnet18"])
    x = normal(5, 3, 8, 8)
    before, state = net(x), {name: b.clone() for name, b in net.named_buffers()}
    with use_statistics_of(net, x):
        assert torch.equal(net(x), before)
    assert all(torch.equal(b, state[name]) for name, b in net.named_buffers())
