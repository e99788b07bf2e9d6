"""SPECIAL-C: its local steps by hand and as proximal mappings, and that it is FedAvg at c = 0."""

from collections.abc import Callable

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.anchor import AnchoredParameters, flatten_rows
from fclmodels.methods.special_c import SpecialC
from fclmodels.storage import trees

OPTIMISERS = {
    "sgd": ("optimizer.lr=0.1",),
    "momentum": ("optimizer.momentum=0.9", "optimizer.weight_decay=0.05"),
    "adamw": ("optimizer.kind=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.5"),
}
EVERY_OPTIMISER = pytest.mark.parametrize("optimiser", OPTIMISERS.values(), ids=OPTIMISERS)


class ByStep(SpecialC):
    """SPECIAL-C in terms of the whole step: w + s becomes (w + s + c W*) / (1 + c)."""

    def step(self, training: LocalTraining, steps: dict[str, Tensor]) -> dict[str, Tensor]:
        anchored, c = training.find_added(AnchoredParameters), self.settings.c
        assert anchored is not None
        for name, anchor in anchored.anchor.items():
            proposed = anchored.parameters[name]  # they are where the optimiser wants them to be
            flatten_rows(steps[name], anchor).add_((proposed + c * anchor) / (1 + c) - proposed)
        return steps

    def finish_step(self, training: LocalTraining) -> None:
        """Do nothing: the step was anchored."""


@EVERY_OPTIMISER
def test_it_is_what_the_step_hook_would_do(optimiser: tuple[str, ...], method_of: Callable, federate: Callable) -> None:
    ours, by_step = (federate(method_of(kind, *optimiser, c=0.2)).weights for kind in (SpecialC, ByStep))
    plain = federate(method_of(FedAvg, *optimiser)).weights
    for name in ours:
        torch.testing.assert_close(ours[name], by_step[name], rtol=0, atol=1e-5)
        assert not torch.allclose(ours[name], plain[name], atol=1e-4)


@EVERY_OPTIMISER
def test_c_zero_is_fedavg_to_the_bit(optimiser: tuple[str, ...], method_of: Callable, federate: Callable) -> None:
    zero, fedavg = (federate(method_of(kind, *optimiser)).weights for kind in (FedAvg, SpecialC))
    assert trees.digest(fedavg) != trees.digest(zero)
    zero_c = federate(method_of(SpecialC, *optimiser, c=0.0)).weights
    assert trees.digest(zero_c) == trees.digest(zero)


def test_one_local_step_by_hand(method_of: Callable, client_of: Callable, federate: Callable) -> None:
    """w' = (w - eta g + c W*) / (1 + c), g from autograd, all of a client's samples in one batch."""
    method = method_of(SpecialC, "federation.batch_size=64", "optimizer.lr=0.1", c=0.25)
    server = method.start_task(federate(method, 1), 1)
    anchor = server.knowledge["anchor"]
    shift = torch.Generator().manual_seed(0)
    weights = {name: w + 0.1 * torch.randn(w.shape, generator=shift) for name, w in server.weights.items()}
    payload = method.make_payload(server)
    payload["weights"].tensors.update(weights)
    client = client_of(method, 2, 1)

    network = method.networks.load(server.spec, weights)
    parameters = dict(network.named_parameters())
    training = LocalTraining(method, client, network, weights)
    gradients = torch.autograd.grad(
        method.compute_loss(training, next(next(client.yield_epochs()))), list(parameters.values())
    )
    expected = {name: weights[name] - 0.1 * g for name, g in zip(parameters, gradients, strict=True)}
    for name, old in anchor.items():
        expected[name][: len(old)] = (expected[name][: len(old)] + 0.25 * old) / 1.25

    for name, update in method.train(client, payload).tensors["update"].items():
        torch.testing.assert_close(weights[name] + update / client.weight, expected[name], rtol=0, atol=1e-6)


def test_the_mapping_is_the_proximal_one(
    method_of: Callable, client_of: Callable, federate: Callable, training_on: Callable
) -> None:
    """prox(v) = argmin_w 1/2 ||w - v||^2 + c/2 ||w - W*||^2, solved numerically."""
    method = method_of(SpecialC, c=0.7)
    server = method.start_task(federate(method, 1), 1)
    network = method.networks.load(server.spec, {name: w + 0.3 for name, w in server.weights.items()})
    training = training_on(method, client_of(method, 0, 1), method.make_payload(server), network, server.weights)
    v = training.parameters["backbone.fc2.bias"].detach().double().numpy().copy()
    anchor = server.knowledge["anchor"]["backbone.fc2.bias"].double().numpy()
    best = minimize(lambda w: ((w - v) ** 2).sum() / 2 + 0.7 * ((w - anchor) ** 2).sum() / 2, v, tol=1e-9).x
    method.finish_step(training)
    torch.testing.assert_close(
        training.parameters["backbone.fc2.bias"].detach().double(), torch.from_numpy(best), rtol=0, atol=1e-5
    )


def test_advice_tells_c_in_units_of_lambda(method_of: Callable, splits_of: Callable) -> None:
    """(1 + c)^S - 1 over the S = 2 epochs of 3 steps of a client with 24 samples."""
    splits = splits_of(tasks=2, train={(t, k): 24 for t in range(2) for k in range(2)})
    (line,) = method_of(
        SpecialC, "federation.local_epochs=2", "federation.batch_size=8", splits=splits, c=0.1
    ).list_advice()
    assert "over the 6 local steps" in line
    assert f"lambda of {1.1**6 - 1:.2g}:" in line
    assert "further than 10 steps" in line
    assert method_of(SpecialC, c=0.0).list_advice() == []


@pytest.mark.parametrize("decay", [{}, {"lr_decay": 0.5}, {"lr_decay": 0.5, "lr_decay_epochs": 1}])
def test_by_default_a_round_is_proximal_gradient_steps_of_specials_objective(
    decay: dict[str, float], method_of: Callable, client_of: Callable, federate: Callable
) -> None:
    """c = eta lambda, eta that of each epoch: w <- argmin_v g v + 1/(2 eta) |v - w|^2 + lambda/2 |v - W*|^2."""
    overrides = [f"optimizer.{name}={value}" for name, value in {"lr": 0.1, **decay}.items()]
    method = method_of(SpecialC, "federation.batch_size=64", "federation.local_epochs=2", *overrides)
    assert method.settings.lam == 0.25
    server = method.start_task(federate(method, 1), 1)
    anchor, client = server.knowledge["anchor"], client_of(method, 2, 1, round=1)
    weights = {name: w + 0.1 for name, w in server.weights.items()}
    payload = method.make_payload(server)
    payload["weights"].tensors.update(weights)
    network = method.networks.load(server.spec, weights)
    parameters = dict(network.named_parameters())
    training = LocalTraining(method, client, network, weights)
    for epoch, (batch,) in enumerate(map(list, client.yield_epochs())):
        eta = 0.1 * {0: 1.0, 1: 0.5, 2: 0.5 ** (2 + epoch)}[len(decay)]
        gradients = torch.autograd.grad(method.compute_loss(training, batch), list(parameters.values()))
        with torch.no_grad():
            for (name, p), g in zip(parameters.items(), gradients, strict=True):
                p -= eta * g
                if name in anchor:
                    old = flatten_rows(p, anchor[name])
                    old.copy_((old / eta + 0.25 * anchor[name]) / (1 / eta + 0.25))
    expected = {name: p.detach().clone() for name, p in parameters.items()}
    for name, update in method.train(client, payload).tensors["update"].items():
        torch.testing.assert_close(weights[name] + update / client.weight, expected[name], rtol=0, atol=2e-6)


def test_c_takes_the_place_of_eta_lambda(method_of: Callable) -> None:
    method = method_of(SpecialC, "optimizer.lr=0.1", **{"lambda": 0.5})
    assert (method.weigh_anchor(0.1), method.weigh_anchor(0.01)) == pytest.approx((0.05, 0.005))
    assert method_of(SpecialC, c=0.3, **{"lambda": 0.5}).weigh_anchor(0.1) == 0.3
