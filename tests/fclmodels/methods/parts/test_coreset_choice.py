"""Rules of choice beside herding, on a client's own samples: each by a computation of another kind."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fclmodels.backbones.inputs.batch_statistics import Captured, capture_statistics
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.methods.coreset_er import CoresetEr
from fclmodels.methods.parts.coreset_choice import reducible_loss
from fclmodels.methods.parts.coreset_choice.bilevel_weights import (
    BcsrSettings,
    choose_by_weights,
    draw_places,
    learn_weights,
)
from fclmodels.methods.parts.coreset_choice.candidates import Candidates, measure_losses
from fclmodels.methods.parts.coreset_choice.gradient_similarity import OcsSettings, choose_by_gradients
from fclmodels.methods.parts.coreset_choice.recovered_images import (
    Sre2lSettings,
    find_rate,
    recover_images,
    weigh_statistics,
)
from fclmodels.methods.parts.coreset_choice.reducible_loss import CsrelSettings, choose_by_reducible_loss
from fclmodels.methods.stamp import Stamp
from fclmodels.numerics.coreset_choice import project_onto_simplex
from fclmodels.testing.tiny_splits import VIT

MakeCandidates = Callable[..., Candidates]
RESNET = ("model.backbone=resnet18", "model.width=4")


@pytest.fixture
def candidates_of(method_of: Callable, client_of: Callable) -> MakeCandidates:
    """The samples of client 1 in a task, those of earlier tasks stored."""

    def make(*settings: str, task: int = 0, room: int = 3) -> Candidates:
        method = method_of(CoresetEr, *settings)
        server = method.create_server()
        for index in range(task + 1):
            server = method.start_task(server, index)
        client: Client = client_of(method, 1, task)
        network = method.networks.load(method.run.make_spec(task + 1), server.weights).eval()
        new = method.run.batches.read_raw(client.rows)
        old = Batch.concatenate([
            method.run.batches.read_raw(client_of(method, 1, earlier).rows) for earlier in range(task)
        ] or [new.take(torch.arange(0))])  # fmt: skip
        stays = {
            label: old.labels.eq(label).nonzero().flatten() for label in (*old.labels.tolist(), *new.labels.tolist())
        }
        return Candidates(client, network, new, old, stays, dict.fromkeys(new.labels.unique().tolist(), room), {})

    return make


def prepare(candidates: Candidates, raw: Batch | None = None) -> Batch:
    """New samples, or others, as the network takes them."""
    return candidates.client.run.batches.prepare_inputs(candidates.new if raw is None else raw)


def make_gradients(candidates: Candidates, batch: Batch) -> np.ndarray:
    """Each sample's gradient [n, P] by torch.func on the parameters as a dictionary."""
    network = candidates.network
    weights = {name: p.detach() for name, p in network.named_parameters()}

    def loss(weights: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(network, weights, (x[None],))
        return cross_entropy(logits, y[None])

    flows = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, batch.inputs, batch.labels)
    return torch.cat([flow.flatten(1) for flow in flows.values()], 1).double().numpy()


@pytest.mark.parametrize("task", [0, 1])
def test_ocs_takes_the_best_of_each_class_by_all_pairs_of_gradients(task: int, candidates_of: MakeCandidates) -> None:
    candidates = candidates_of(task=task, room=2)
    g = make_gradients(candidates, prepare(candidates))
    unit = g / np.linalg.norm(g, axis=1, keepdims=True)
    pairs = unit @ unit.T
    mean = g.mean(0) / np.linalg.norm(g.mean(0))
    scores = unit @ mean - (pairs.sum(1) - np.diag(pairs)) / (len(g) - 1)
    if task:
        stored = make_gradients(candidates, prepare(candidates, candidates.old)).mean(0)
        scores += 2.0 * unit @ stored / np.linalg.norm(stored)
    chosen = choose_by_gradients(candidates, OcsSettings(tau=2.0))
    for label, places in chosen.items():
        own = candidates.find_places(label).numpy()
        assert places.tolist() == own[np.argsort(-scores[own], kind="stable")[:2]].tolist()


def test_csrel_takes_what_the_chosen_ones_do_not_teach(
    candidates_of: MakeCandidates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of two classes a round, by current less reference loss; each round trains a fresh network on all so far."""
    candidates = candidates_of(room=2)
    labels = candidates.new.labels.tolist()
    current, reference = torch.rand(len(labels)) + 1, torch.rand(len(labels))
    trained = []
    train = reducible_loss.train_on_chosen

    def note(candidates: Candidates, settings: CsrelSettings, chosen: list[int], round: int) -> Any:
        trained.append(len(chosen))
        return train(candidates, settings, chosen, round)

    monkeypatch.setattr(reducible_loss, "train_reference", lambda *_: reference)
    monkeypatch.setattr(reducible_loss, "train_on_chosen", note)
    monkeypatch.setattr(reducible_loss, "measure_in_parts", lambda *_: current)
    chosen = choose_by_reducible_loss(candidates, CsrelSettings(rounds=2))
    gains = (current - reference).numpy()
    for label, places in chosen.items():
        own = np.flatnonzero(np.array(labels) == label)
        assert places.tolist() == own[np.argsort(-gains[own])][:2].tolist()
    assert trained == [0, 2]


def test_csrel_begins_each_round_anew_and_leaves_the_model(candidates_of: MakeCandidates) -> None:
    candidates = candidates_of()
    before = {name: tensor.clone() for name, tensor in candidates.network.state_dict().items()}
    settings = CsrelSettings(updates=1, lr=1e-9)
    first, again = (reducible_loss.train_on_chosen(candidates, settings, [0, 1], 1) for _ in range(2))
    other = reducible_loss.train_on_chosen(candidates, settings, [0, 1], 2)
    name = "backbone.fc1.weight"
    assert torch.equal(first.state_dict()[name], again.state_dict()[name])
    assert not torch.allclose(first.state_dict()[name], other.state_dict()[name], atol=1e-3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in candidates.network.state_dict().items())
    losses = train_twice(candidates)
    assert losses[1] < losses[0]


def train_twice(candidates: Candidates) -> list[float]:
    """The mean loss of a reference of one epoch, and of one of twenty."""
    settings = (CsrelSettings(reference_epochs=epochs, reference_lr=0.1, batch=2) for epochs in (1, 20))
    return [float(reducible_loss.train_reference(candidates, of).mean()) for of in settings]


def test_bcsr_weighs_samples_by_how_their_gradient_lowers_the_loss_of_all(candidates_of: MakeCandidates) -> None:
    """Where the model's steps are tiny the inverse Hessian is 4 I: the weight's gradient is -4/n g_i g, g the mean."""
    candidates = candidates_of()
    settings = BcsrSettings(steps=1, beta=0, inner_lr=1e-6, outer_lr=0.5)
    p, losses = learn_weights(candidates, prepare(candidates), 2, settings, torch.Generator())
    assert torch.allclose(losses.float(), measure_losses(candidates.network, prepare(candidates)), atol=1e-5)
    g = make_gradients(candidates, prepare(candidates))
    moved = torch.tensor(1 / len(g) + 0.5 * 4 / len(g) * g @ g.mean(0))
    assert torch.allclose(p, project_onto_simplex(moved), atol=1e-4)
    assert p.max() > 1.05 * p.min()


def test_beta_draws_the_weights_to_as_few_as_are_stored(candidates_of: MakeCandidates) -> None:
    candidates = candidates_of()
    few, many = (
        learn_weights(
            candidates, prepare(candidates), 2, BcsrSettings(beta=beta, outer_lr=0.1), torch.Generator().manual_seed(0)
        )[0].topk(2).values.sum()
        for beta in (5.0, 0.0)
    )  # fmt: skip
    assert few > many + 0.2


def test_where_too_few_have_a_weight_the_largest_losses_fill_up() -> None:
    weights, losses = torch.tensor([0.0, 0.5, 0.0, 0.0]), torch.tensor([1.0, 0.0, 3.0, 2.0])
    places = draw_places(torch.arange(4), 3, weights, losses, torch.Generator())
    assert places.tolist() == [1, 2, 3]
    assert draw_places(torch.arange(4), 1, torch.zeros(4), losses, torch.Generator()).tolist() == [2]


def test_losses_are_over_all_classes_or_in_each_samples_own_head(candidates_of: MakeCandidates) -> None:
    for head in ("growing", "per-task"):
        candidates = candidates_of(f"model.head={head}", task=1)
        batch = candidates.client.run.batches.prepare_inputs(Batch.concatenate([candidates.old, candidates.new]))
        features = candidates.network.backbone(batch.inputs)
        for place, loss in enumerate(measure_losses(candidates.network, batch)):
            task, label = int(batch.tasks[place]), int(batch.labels[place])
            if head == "growing":
                logits = candidates.network.compute_logits(features[place])
            else:
                logits, label = candidates.network.compute_logits(features[place], task), label - 2 * task
            assert torch.isclose(loss, logits.logsumexp(0) - logits[label])


@pytest.mark.parametrize("method", [Stamp, CoresetEr])
def test_a_rules_settings_need_the_rule(method: type, method_of: Callable) -> None:
    with pytest.raises((UserError, ValueError), match=r"ocs needs selection: ocs"):
        method_of(method, ocs={"tau": 1.0})


def test_sre2l_recovers_images_that_the_model_takes_for_their_classes(candidates_of: MakeCandidates) -> None:
    """Their batch's statistics come nearer to the running ones than noise's, and the rate falls along a cosine."""
    assert find_rate(Sre2lSettings(), 250) == pytest.approx(0.213388, abs=1e-6)
    running = [(torch.zeros(2), torch.ones(2)), (torch.tensor([0.0, 1]), torch.tensor([1.0, 4]))]
    batch = [(torch.zeros(2), torch.ones(2)), (torch.tensor([0.3, 1.4]), torch.tensor([1.0, 3]))]
    assert float(weigh_statistics(Captured(batch, running))) == pytest.approx(1.5)
    assert float(weigh_statistics(Captured(batch[1:], running[1:]))) == pytest.approx(15.0)
    candidates = candidates_of(*RESNET, room=4)
    candidates.network.train()
    for _ in range(50):  # running statistics become those of the samples
        candidates.network.backbone(prepare(candidates).inputs)
    candidates.network.eval()
    noise, made, by_class = (
        recover_images(candidates, Sre2lSettings(steps=steps, statistics=weight))
        for steps, weight in ((1, 0.01), (60, 0.01), (60, 0.0))
    )
    assert judge(candidates, made)[1] < 0.8 * judge(candidates, noise)[1]
    assert judge(candidates, by_class)[0] < 0.8 * judge(candidates, noise)[0]
    for label, images in made.items():
        assert images.inputs.dtype == torch.uint8
        assert images.labels.tolist() == [label] * 4


def judge(candidates: Candidates, made: dict[int, Batch]) -> tuple[float, float]:
    """The loss of recovered images, and how far their statistics are from the running ones."""
    batch = candidates.client.run.batches.prepare_inputs(Batch.concatenate(list(made.values())))
    with torch.no_grad(), capture_statistics(candidates.network) as captured:
        loss = measure_losses(candidates.network, batch).mean()
    return float(loss), float(weigh_statistics(captured))


def test_sre2l_needs_running_statistics(method_of: Callable) -> None:
    for settings in ((), (*RESNET, "model.norm=group")):
        with pytest.raises(UserError, match=r"methods\.coreset-er\.selection: sre2l recovers .* this network has none"):
            method_of(CoresetEr, *settings, selection="sre2l")
    with pytest.raises(UserError, match="has none"):
        method_of(CoresetEr, *RESNET, selection="sre2l", batch_norm="batch")


def test_bcsr_learns_weights_on_a_transformer(candidates_of: MakeCandidates) -> None:
    candidates = candidates_of(*VIT)
    places = choose_by_weights(candidates, BcsrSettings(steps=2))
    assert [len(of_class) for of_class in places.values()] == [3, 3]


def test_csrel_has_no_more_rounds_than_are_set(candidates_of: MakeCandidates, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []
    monkeypatch.setattr(
        reducible_loss, "train_on_chosen", lambda candidates, *_: rounds.append(1) or candidates.network
    )
    choose_by_reducible_loss(candidates_of(room=4), CsrelSettings(rounds=3, reference_epochs=1))
    assert len(rounds) == 3
