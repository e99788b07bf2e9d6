"""Re-Fed: surrogate and scores against worked numbers and autograd sample by sample; what stays; limit cases."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.replay_memory import unpack_samples
from fclmodels.methods.parts.surrogate import Surrogate
from fclmodels.methods.re_fed import ReFed
from fclmodels.methods.re_fed_plus import ReFedPlus

WHOLE = ("federation.batch_size=64", "optimizer.lr=0.1")


def test_the_worked_surrogate_and_its_scores(method_of: Callable, scalar_surrogate: tuple[Surrogate, Batch]) -> None:
    surrogate, samples = scalar_surrogate
    scores = method_of(ReFed).score(surrogate, samples)
    assert_allclose(scores, [1.186667, 1.746667, 1.813333], atol=1e-6)
    assert_allclose(surrogate.network.weight.item(), 0.244, atol=1e-6)


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_scores_are_norms_of_gradients_of_each_sample_alone(
    head: str, method_of: Callable, client_of: Callable, federate: Callable
) -> None:
    """In two passes over all rows; the second at v <- w - eta mean g, where the pull is still 0."""
    method = method_of(ReFed, *WHOLE, f"model.head={head}", passes=2)
    server, client = federate(method), client_of(method, 1, 1, round=-1)
    rows = method.run.batches.read_raw(client.rows)
    scores = method.score(Surrogate(method, client, method.make_payload(server), method.settings), rows)

    network = method.networks.load(server.spec, server.weights).eval().requires_grad_(True)
    batch = method.run.batches.prepare_inputs(rows)
    parameters = list(method.select_trainable(network, 1).values())
    expected = np.zeros(len(rows.labels))
    for number in (1, 2):
        losses = [
            method.compute_cross_entropy(network, network.backbone(batch.inputs[i : i + 1]), batch.labels[i : i + 1], 1)
            for i in range(len(batch.labels))
        ]
        gradients = [torch.autograd.grad(loss, parameters, allow_unused=True) for loss in losses]
        flat = [torch.cat([g.flatten() for g in of if g is not None]) for of in gradients]
        expected += torch.stack(flat).norm(dim=1).numpy() / number
        with torch.no_grad():
            for place, parameter in enumerate(parameters):
                if gradients[0][place] is not None:
                    parameter -= 0.1 * torch.stack([of[place] for of in gradients]).mean(0)
    assert_allclose(scores, expected, rtol=1e-4)


def test_scores_of_the_last_layer_are_its_formula(method_of: Callable, client_of: Callable, federate: Callable) -> None:
    """||p - e_y|| sqrt(||f||^2 + 1), for p = 1/3 each and f = [3, 4] 4.163332."""
    assert_allclose(np.linalg.norm([1 / 3 - 1, 1 / 3, 1 / 3]) * np.sqrt(26), 4.163332, atol=1e-6)
    method = method_of(ReFedPlus, *WHOLE, passes=1)
    server, client = federate(method), client_of(method, 1, 1, round=-1)
    rows = method.run.batches.read_raw(client.rows)
    scores = method.score(Surrogate(method, client, method.make_payload(server), method.settings), rows)
    network = method.networks.load(server.spec, server.weights).eval()
    with torch.no_grad():
        f = network.backbone(method.run.batches.prepare_inputs(rows).inputs).double()
        p = network.heads[0](f.float()).double().softmax(1).numpy()
    p[np.arange(len(p)), rows.labels.numpy()] -= 1
    assert_allclose(scores, np.linalg.norm(p, axis=1) * np.sqrt(f.square().sum(1).numpy() + 1), rtol=1e-5)


def test_the_hardest_stay_of_old_and_new_alike(
    method_of: Callable, client_of: Callable, federate: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = method_of(ReFed, memory=3)
    server = federate(method)
    first = method.store_hardest(client_of(method, 1, 0, round=-1), method.make_payload(federate(method, 1))).memory
    old = unpack_samples(first)
    assert old is not None
    assert len(old.labels) == 3
    monkeypatch.setattr(method, "score", lambda _, samples: -torch.arange(len(samples.labels)).float())
    both = unpack_samples(
        method.store_hardest(client_of(method, 1, 1, round=-1, memory=first), method.make_payload(server)).memory
    )
    assert both is not None
    assert torch.equal(both.inputs, old.inputs)


def test_with_room_for_all_everything_is_replayed(method_of: Callable, client_of: Callable, federate: Callable) -> None:
    method = method_of(ReFed)
    server, memory = federate(method, 1), {}
    memory = method.store_hardest(client_of(method, 1, 0, round=-1), method.make_payload(server)).memory
    later = method.start_task(server, 1)
    training = method.prepare_training(client_of(method, 1, 1, memory=memory), method.make_payload(later))
    seen = sorted(
        (int(b.tasks[i]), b.inputs[i].sum().item())
        for b in next(iter(method.yield_epochs(training)))
        for i in range(len(b.labels))
    )
    rows = [next(method.run.batches.iterate_ordered(method.select_rows(task, 1), 1000)) for task in (0, 1)]
    assert_allclose(seen, sorted((t, x.sum().item()) for t, b in enumerate(rows) for x in b.inputs), rtol=1e-5)


@pytest.mark.parametrize("kind", [ReFed, ReFedPlus])
def test_the_first_task_is_fedavg_to_the_bit(kind: Any, method_of: Callable, federate: Callable) -> None:
    ours, plain = federate(method_of(kind), 1).weights, federate(method_of(FedAvg), 1).weights
    assert all(torch.equal(ours[name], plain[name]) for name in plain)


def test_a_pull_that_throws_the_surrogate_away_is_refused(method_of: Callable) -> None:
    with pytest.raises(UserError, match=r"larger lambda, or a smaller surrogate_lr"):
        method_of(ReFed, "optimizer.lr=1", **{"lambda": 0.01})
