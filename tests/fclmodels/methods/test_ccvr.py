"""CCVR: pooled moments are those of all samples, the server's steps are SGD on draws, and heads alone move."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from fclmodels.errors import UserError
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.methods.ccvr import Ccvr, fit_classes
from fclmodels.methods.fedavg import FedAvg
from fclmodels.numerics.fitted_heads import sum_classes
from fclmodels.numerics.prototypes import moments
from fclmodels.storage import trees
from fclmodels.testing.tiny_splits import VIT

CLIENTS = torch.tensor([[1.0, 0], [3, 2]]), torch.tensor([[0.0, 1], [1, 1], [2, 4]])


@pytest.mark.parametrize("sums", [sum_classes, moments])
def test_the_pooled_gaussian_of_worked_numbers(sums: Callable) -> None:
    """Of two clients' samples; a class without samples has neither mean nor covariance."""
    parts = [sums(rows, torch.zeros(len(rows), dtype=torch.int64), 2) for rows in CLIENTS]
    of = fit_classes({name: parts[0][name] + parts[1][name] for name in parts[0]})
    np.testing.assert_allclose(of.means, [[1.4, 1.6], [0, 0]])
    covariance = np.array([[1.3, 0.95], [0.95, 2.3]]) * (1 if sums is sum_classes else np.eye(2))
    np.testing.assert_allclose(of.covariances, [covariance, np.zeros((2, 2))], atol=1e-12)
    np.testing.assert_allclose(np.cov(torch.cat(CLIENTS).T) * (1 if sums is sum_classes else np.eye(2)), covariance)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_after_a_task_the_heads_alone_have_changed(
    head: str, covariance: str, method_of: Callable, federate: Callable, splits_of: Callable, monkeypatch: Any
) -> None:
    """Until then it is FedAvg to the bit."""
    splits = splits_of(head=head)
    plain = federate(method_of(FedAvg, splits=splits), 1)
    method = method_of(Ccvr, splits=splits, covariance=covariance, lr=0.5)
    works: list[Any] = []
    monkeypatch.setattr(Cohort, "train", lambda cohort, work, steps: works.append((work, steps)))
    untrained = federate(method, 1)
    assert trees.digest(untrained.weights) == trees.digest(plain.weights)
    ((work, steps),) = works
    assert steps == 5 * 2 * 256 // 256
    before = {name: tensor.clone() for name, tensor in plain.weights.items()}
    losses = [work.step(number) for number in range(steps)]
    assert losses[-1] < losses[0]
    network = method.networks.build(untrained.spec).state_dict()
    changed = {name for name, tensor in network.items() if not torch.equal(tensor, before[name])}
    assert changed == {"heads.0.weight", "heads.0.bias"}


def test_the_servers_steps_are_sgd_by_hand(method_of: Callable, federate: Callable, monkeypatch: Any) -> None:
    """Two classes, one pass of two steps of half of the draws, with momentum and half a cosine."""
    method = method_of(Ccvr, draws=4, passes=1, draw_batch=4)
    works: list[Any] = []
    monkeypatch.setattr(Cohort, "train", lambda cohort, work, steps: works.append(work))
    server = federate(method, 1)
    drawn = method.draw(server)
    W, b = (server.weights[f"heads.0.{part}"].clone().requires_grad_() for part in ("weight", "bias"))
    velocity = [torch.zeros_like(W), torch.zeros_like(b)]
    for number, lr in enumerate((0.01, 0.005)):
        places = method.choose_batch(0, number, 8)
        loss = cross_entropy(linear(drawn.features[places], W, b), drawn.labels[places])
        assert works[0].step(number) == pytest.approx(float(loss.detach()), rel=1e-5)
        for place, (tensor, gradient) in enumerate(zip((W, b), torch.autograd.grad(loss, (W, b)), strict=True)):
            velocity[place] = 0.9 * velocity[place] + gradient
            with torch.no_grad():
                tensor -= lr * velocity[place]
    heads = method.networks.build(server.spec).heads.state_dict()
    torch.testing.assert_close(heads["0.weight"], W.detach())
    torch.testing.assert_close(heads["0.bias"], b.detach())


def test_all_tasks_classes_are_drawn_and_answered(
    method_of: Callable, federate: Callable, experiment_of: Callable, tmp_path: Path
) -> None:
    """On a frozen backbone a calibrated head knows the first task's classes as well as the last one's."""
    settings = ("optimizer.lr=0.05", "federation.rounds=4")
    experiment = experiment_of(*VIT, *settings, "methods.ccvr={frozen: true, lr: 0.1, passes: 20}", method="ccvr")
    result = experiment.run(tmp_path / "run")
    probe = experiment_of(*VIT, *settings, method="linear-probe").run(tmp_path / "probe")
    assert result["metrics"]["task_agnostic"]["acc"] > probe["metrics"]["task_agnostic"]["acc"] + 0.2
    method = experiment.method
    server = method.start_task(method.create_server(), 0)
    assert not any(name.startswith("backbone") for name in server.weights)


def test_noise_is_refused_by_name(experiment_of: Callable) -> None:
    private = ("federation.weighting=uniform", "federation.privacy.noise_multiplier=1")
    with pytest.raises(UserError, match=r"ccvr draws from covariances .* Use fedproto or ridge"):
        experiment_of(*private, method="ccvr")
