"""AC-GAN: its losses by hand and in NumPy, its generator's sizes, and what its passes leave as it is."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.ac_gan import AcGan, ClassGenerator, add_critic_losses, build_judge, diverge
from fclmodels.methods.parts.consolidation import ClientGenerator, draw_balanced

REAL, FALSE = torch.tensor([[0.8], [0.6]]), torch.tensor([[0.3], [0.1]])
P_REAL, P_FALSE = torch.tensor([[0.7, 0.3], [0.4, 0.6]]), torch.tensor([[0.5, 0.5], [0.2, 0.8]])


def nll(p: Tensor) -> Tensor:
    """Of labels 0 and 1."""
    return -p.log().diagonal().mean()


def test_losses_by_hand() -> None:
    critic = add_critic_losses(REAL.logit(), nll(P_REAL), FALSE.logit(), nll(P_FALSE))
    assert critic.item() == pytest.approx(1.489898, abs=1e-6)
    generator = binary_cross_entropy_with_logits(FALSE.logit(), torch.ones(2, 1)) + nll(P_FALSE)
    assert generator.item() == pytest.approx(2.211424, abs=1e-6)
    g = torch.tensor([[0.6, 0.4], [0.5, 0.5]])
    assert diverge(g.log(), P_REAL.log()).item() == pytest.approx(0.021497, abs=1e-6)


@pytest.mark.parametrize(
    ("side", "start"), [(8, 1), (16, 2), (28, 4), (30, 4), (32, 4), (64, 8), (84, 6), (128, 8), (224, 7)]
)
def test_the_generator_has_images_of_every_size(side: int, start: int) -> None:
    generator = ClassGenerator(3, 1, 4, (2, side, side))
    assert generator.start[1:] == (start, start)
    images = generator(torch.tensor([3]))
    assert images.shape == (1, 2, side, side)
    assert (images >= 0).all()
    assert (images <= 1).all()


def test_the_generators_numbers_are_the_releases() -> None:
    """Of the release's for EMNIST, whose noise has the classes' entries; 32 pixels, c 64, 100 and 10."""
    c, start, z = 64, 16, 110
    convolutions = sum(16 * a * b + b for a, b in ((8 * c, 4 * c), (4 * c, 2 * c), (2 * c, c))) + 9 * c + 1
    norms = 2 * (8 + 4 + 2 + 1) * c
    count = sum(p.numel() for p in ClassGenerator(100, c, 10, (1, 32, 32)).parameters())
    assert count == z * 8 * c * start + 8 * c * start + convolutions + norms


@pytest.fixture
def gan(method_of: Callable) -> Callable[..., AcGan]:
    def make(*overrides: str) -> AcGan:
        method = method_of(FedAvg, *overrides)
        server = method.start_task(method.start_task(method.create_server(), 0), 1)
        network = method.networks.load(server.spec, server.weights)
        network.train()
        judge = build_judge({"features": network.backbone.features})
        generator = ClassGenerator(4, 1, 4, (1, 6, 6))
        return AcGan(network, judge, generator, method.run.batches.normalise_pixels)

    return make


def test_draws_and_synthetic_samples_leave_running_statistics(gan: Callable) -> None:
    pair, columns = gan("model.backbone=resnet18"), torch.tensor([0, 1, 3])
    before = pair.network.backbone.bn1.running_mean.clone()
    inputs, of = pair.draw(columns, 5)
    features = pair.network.backbone(inputs.detach())
    moved = pair.network.backbone.bn1.running_mean.clone()
    assert not torch.equal(moved, before)
    pair.measure_critic(features, torch.zeros(()), columns)
    pair.measure_samples(inputs.detach(), of, columns)
    pair.measure_generator(columns, 5)
    pair.measure_consistency(pair.generator, features, of, columns)
    assert torch.equal(pair.network.backbone.bn1.running_mean, moved)


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_the_critics_loss_against_numpy(head: str, gan: Callable) -> None:
    """Of samples of both tasks; with heads of their own each is compared with its own task's classes."""
    pair, columns, of = gan(f"model.head={head}"), torch.tensor([0, 1, 2, 3]), torch.tensor([0, 3, 2])
    inputs = torch.randn(3, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    loss = pair.measure_samples(inputs, of, columns).item()
    torch.manual_seed(1)
    false, of_false = pair.draw(columns, 3)

    def terms(x: Tensor, labels: Tensor, real: int) -> float:
        h = pair.network.backbone(x).detach()
        d = 1 / (1 + np.exp(-pair.judge(h).detach().double().numpy()[:, 0]))
        logits = np.concatenate([head(h).detach().double().numpy() for head in pair.network.heads], 1)
        total = 0.0
        for row, label, judged in zip(logits, labels.tolist(), d, strict=True):
            mine = row if head == "growing" else row[2 * (label // 2) : 2 * (label // 2) + 2]
            total += np.log(np.exp(mine).sum()) - row[label] - np.log(judged if real else 1 - judged)
        return total / len(labels)

    assert loss == pytest.approx(terms(inputs, of, 1) + terms(false, of_false, 0), rel=1e-5)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(2, 4))
def test_divergence_is_no_less_than_nothing(seed: int, rows: int, columns: int) -> None:
    torch.manual_seed(seed)
    p, q = torch.randn(2, rows, columns).double().log_softmax(-1)
    of_numpy = np.mean(np.sum(np.exp(p.numpy()) * (p - q).numpy(), 1))
    assert diverge(p, q).item() == pytest.approx(of_numpy, abs=1e-12)
    assert diverge(p, q) >= 0


class Marked(nn.Module):
    """A generator whose pixels say who drew them, and of which column."""

    def __init__(self, client: int) -> None:
        super().__init__()
        self.client = client

    def forward(self, columns: Tensor) -> Tensor:
        return 10.0 * self.client + columns.float()


def test_consolidation_draws_from_every_client_its_own_classes_alike() -> None:
    torch.manual_seed(0)
    sources = [
        ClientGenerator({"client": torch.tensor(c)}, torch.tensor(row)) for c, row in enumerate(((1, 0, 0), (1, 0, 1)))
    ]
    ((pixels, of),) = draw_balanced(sources, lambda state: Marked(int(state["client"])), 4000, torch.device("cpu"))
    assert torch.equal(pixels % 10, of.float())
    assert set(pixels.tolist()) == {0.0, 10.0, 12.0}
    assert (of == 0).double().mean() == pytest.approx(0.5, abs=0.03)
    assert (pixels == 10).sum() / (of == 0).sum() == pytest.approx(1 / 3, abs=0.03)
    assert draw_balanced([ClientGenerator({}, torch.zeros(3))], Marked, 4, torch.device("cpu")) == []
