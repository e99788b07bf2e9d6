"""PIP's prototypes: what clients send, what the server makes of it, and what joins a batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fclmodels.data.splits.split_reader import Rows
from fclmodels.errors import UserError
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import TRAIN
from fclmodels.federation.protection import reply_checks
from fclmodels.methods.fed_dualp import FedDualP
from fclmodels.methods.fed_l2p import FedL2P
from fclmodels.methods.parts.prototype_injection import InjectedPrototypes
from fclmodels.methods.pip_dualp import PipDualP
from fclmodels.methods.pip_l2p import PipL2P

VIT = tuple(
    f"model.{setting}"
    for setting in ("backbone=vit", "patch=3", "width=8", "depth=2", "attention_heads=2", "mlp_width=8")
)
DUALP = {"g_layers": (0,), "e_layers": (1,), "length": 2}


@pytest.fixture
def pip_of(method_of: Callable) -> Callable[..., Any]:
    return lambda *overrides, kind=PipDualP, **settings: method_of(kind, *VIT, *overrides, **DUALP, **settings)


class Stopper(Listener):
    """Interrupts the run in its second task."""

    def on_round_done(self, row: dict[str, Any]) -> None:
        if (row["task"], row["round"]) == (1, 0):
            raise KeyboardInterrupt


def only(rows: Rows, label: int) -> Rows:
    return rows.take(np.flatnonzero(rows.labels == label))


def asked(method: Any, server: Any, clients: list[Any], spool: Any) -> Replies:
    replies = Replies([client.index for client in clients], spool)
    for client in clients:
        replies.add(client.index, method.exchanges[TRAIN].reply(client, method.make_payload(server))[0])
    return replies


def test_the_server_knows_the_moments_of_all_clients_samples(
    pip_of: Callable, client_of: Callable, tmp_path: Any
) -> None:
    """Without local steps all clients see the same features: mean and variance are those of the pooled ones (eq. 7 to
    15, with counts)."""
    method = pip_of("optimizer.lr=1e-30")
    server = method.start_task(method.create_server(), 0)
    after = method.aggregate(server, asked(method, server, [client_of(method, c) for c in range(4)], tmp_path))
    rows = method.run.splits.select_rows(0, "train")
    network = method.networks.load(server.spec, server.weights).eval()
    (batch,) = method.run.batches.iterate_ordered(rows, 1000)
    with torch.no_grad():
        X = network.backbone.extract(batch.inputs, 0).features.double().numpy()
    known = after.knowledge["prototypes"]
    for row, label in enumerate(known["labels"].tolist()):
        mine = X[batch.labels.numpy() == label]
        np.testing.assert_allclose(known["mu"][row], mine.mean(0), atol=1e-6)
        np.testing.assert_allclose(known["sigma2"][row], mine.var(0), atol=1e-6)


def test_by_omega_every_client_that_has_a_class_counts_alike(
    pip_of: Callable, client_of: Callable, tmp_path: Any
) -> None:
    """Eq. 14 as printed: means of means, weighted by participation times samples of the task."""
    method = pip_of("optimizer.lr=1e-30", pooled="omega", omega="participation")
    server = method.start_task(method.create_server(), 0)
    few = client_of(method, 0)
    few = replace(few, rows=Rows.concatenate([only(few.rows, 0).take(np.array([0])), only(few.rows, 1)]))
    clients = [few, client_of(method, 1, memory={"taken": {"task": 0, "rounds": 2, "before": 0}})]
    after = method.aggregate(server, asked(method, server, clients, tmp_path))
    network = method.networks.load(server.spec, server.weights).eval()
    means = []
    for client in clients:
        (batch,) = method.run.batches.iterate_ordered(only(client.rows, 0), 1000)
        with torch.no_grad():
            means.append(network.backbone.extract(batch.inputs, 0).features.double().mean(0))
    expected = (5 * 1 * means[0] + 8 * 3 * means[1]) / (5 * 1 + 8 * 3)
    assert len(few.rows) == 5
    np.testing.assert_allclose(after.knowledge["prototypes"]["mu"][0], expected, atol=1e-6)


def test_a_batch_is_joined_by_the_classes_that_the_client_lacks(
    pip_of: Callable, client_of: Callable, tmp_path: Any
) -> None:
    """About as many vectors of each as one of its own has samples; all of the task's with inject: all."""
    for inject, lacking in (("missing", [1]), ("all", [0, 1])):
        method = pip_of(inject=inject)
        server = method.start_task(method.create_server(), 0)
        server = method.aggregate(
            server, asked(method, server, [client_of(method, c) for c in range(4)], tmp_path / inject)
        )
        client = client_of(method, 0, round=1)
        client = replace(client, rows=only(client.rows, 0))
        training = method.prepare_training(client, method.make_payload(server))
        vectors, labels, tasks = training.find_added(InjectedPrototypes).draw(4)
        assert labels.tolist() == [label for label in lacking for _ in range(4)]
        assert tasks.tolist() == [0] * len(labels)
        assert vectors.shape == (4 * len(lacking), 8)
        others = [
            method.prepare_training(replace(client, **change), method.make_payload(server))
            for change in ({"round": 2}, {"index": 1})
        ]
        assert not any(torch.equal(other.find_added(InjectedPrototypes).draw(4)[0], vectors) for other in others)


def test_the_first_round_and_clients_with_all_classes_are_those_of_fed_dualp(
    pip_of: Callable, client_of: Callable, tmp_path: Any
) -> None:
    """To the bit: nothing is known yet, or nothing lacks."""
    pip, fed = pip_of(inject="missing"), pip_of(kind=FedDualP)
    server = pip.start_task(pip.create_server(), 0)
    again = pip.aggregate(server, asked(pip, server, [client_of(pip, c) for c in range(4)], tmp_path))
    for state, round in ((server, 0), (again, 1)):
        mine = pip.train(client_of(pip, 0, round=round), pip.make_payload(state)).tensors["update"]
        theirs = fed.train(client_of(fed, 0, round=round), fed.make_payload(state)).tensors["update"]
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_own_prototypes_join_from_the_second_epoch_on_until_the_server_has_some(
    pip_of: Callable, client_of: Callable, tmp_path: Any
) -> None:
    """Algorithm 1, line 20: a client without prototypes has those of its own features after its first epoch."""
    method = pip_of("optimizer.lr=1e-30", "federation.local_epochs=3", "federation.batch_size=64", inject="all")
    server = method.start_task(method.create_server(), 0)
    training = method.prepare_training(client_of(method, 0), method.make_payload(server))
    (batch,) = method.run.batches.iterate_ordered(training.client.rows, 64)
    with torch.no_grad():
        X = training.network.backbone.extract(batch.inputs, 0).features.double().numpy()
    joined = []
    for epoch in method.yield_epochs(training):
        joined.append(training.find_added(InjectedPrototypes))
        list(epoch)
    assert joined[0] is None
    assert joined[1] is joined[2]
    assert joined[1].labels.tolist() == [0, 1]
    for row in range(2):
        mine = X[batch.labels.numpy() == row]
        np.testing.assert_allclose(joined[1].mu[row], mine.mean(0), atol=1e-6)
        np.testing.assert_allclose(joined[1].sigma2[row], mine.var(0), atol=1e-6)

    server = method.aggregate(server, asked(method, server, [client_of(method, 1)], tmp_path))
    training = method.prepare_training(client_of(method, 0, round=1), method.make_payload(server))
    sent = training.find_added(InjectedPrototypes)
    assert all(training.find_added(InjectedPrototypes) is sent for _ in method.yield_epochs(training))


@pytest.mark.parametrize("settings", [{"own": False, "inject": "all"}, {"inject": "missing"}])
def test_own_prototypes_join_only_where_they_are_asked_for(
    settings: dict[str, Any], pip_of: Callable, client_of: Callable
) -> None:
    method = pip_of("federation.local_epochs=2", **settings)
    training = method.prepare_training(
        client_of(method, 0), method.make_payload(method.start_task(method.create_server(), 0))
    )
    assert [training.find_added(InjectedPrototypes) for _ in method.yield_epochs(training)] == [None, None]


def test_m_vectors_join_beside_the_mean(pip_of: Callable, client_of: Callable, tmp_path: Any) -> None:
    """Eq. 11: {mu} and m vectors mu + beta sigma of each class."""
    method = pip_of(m=3, augmentation="paper", inject="all")
    server = method.start_task(method.create_server(), 0)
    server = method.aggregate(server, asked(method, server, [client_of(method, 0)], tmp_path))
    training = method.prepare_training(client_of(method, 1, round=1), method.make_payload(server))
    injected = training.find_added(InjectedPrototypes)
    vectors, labels, _ = injected.draw(64)
    assert labels.tolist() == [0] * 4 + [1] * 4
    beta = ((vectors - injected.mu.repeat_interleave(4, 0)) / injected.sigma2.sqrt().repeat_interleave(4, 0)).numpy()
    np.testing.assert_allclose(beta[[0, 4]], 0)
    np.testing.assert_allclose(beta, np.tile(beta[:, :1], 8), atol=1e-4)
    assert (beta[:, 0] < 1).all()


def test_moments_are_taken_of_batches_of_mixed_classes(
    pip_of: Callable, client_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch whose samples choose together would choose otherwise, were it of one class."""
    method = pip_of("federation.batch_size=4")
    client = client_of(method, 0)
    client = replace(client, rows=client.rows.take(np.argsort(client.rows.labels, kind="stable")))
    training = method.prepare_training(client, method.make_payload(method.start_task(method.create_server(), 0)))
    seen, compute = [], method.injection.backbone.compute_features
    monkeypatch.setattr(
        method.injection.backbone,
        "compute_features",
        lambda n, b, t: (seen.extend(b.labels.tolist()), compute(n, b, t))[1],
    )
    total = method.injection.compute_moments(training, 1.0)
    assert sorted(seen) == client.rows.labels.tolist()
    assert seen != sorted(seen)
    assert total["weight"].tolist() == np.bincount(client.rows.labels).tolist()


@pytest.mark.parametrize("kind", [PipDualP, PipL2P])
def test_a_profile_sets_what_is_not_set(kind: Any) -> None:
    paper, release = (kind.Settings(profile=name) for name in ("paper", "release"))
    assert (paper.omega, paper.inject, paper.augmentation) == ("all-participation", "all", "paper")
    assert (release.pool, release.omega, release.head, release.m) == (10, "participation", "task-end", 2)
    assert (release.augmentation, release.own, release.selection) == ("release", False, "batch")
    assert kind.Settings(profile="release", pool=7, head="shared").pool == 7
    assert kind.Settings(profile="release", head="shared").head == "shared"
    assert kind.Settings.model_validate_json(release.model_dump_json(), strict=True) == release


@pytest.mark.parametrize("profile", ["paper", "release"])
@pytest.mark.parametrize("kind", [PipDualP, PipL2P])
def test_a_profile_learns(kind: Any, profile: str, method_of: Callable, federate: Callable) -> None:
    settings = DUALP if kind is PipDualP else {"pool": 2, "top_k": 1, "length": 2}
    method = method_of(kind, *VIT, "federation.rounds=2", **settings, profile=profile)
    server = federate(method, 2)
    assert all(tensor.isfinite().all() for tensor in server.weights.values())
    assert any("profile: release goes with" in line for line in method.list_advice()) == (profile == "release")


@pytest.mark.parametrize(("pip", "fed"), [(PipDualP, FedDualP), (PipL2P, FedL2P)])
def test_what_both_have_is_set_alike(pip: Any, fed: Any) -> None:
    """PIP differs from its rival by the prototypes alone."""
    of_pip, of_fed = pip.Settings(), fed.Settings()
    assert all(getattr(of_pip, name) == getattr(of_fed, name) for name in fed.Settings.model_fields)


def test_vectors_reach_the_head_alone(pip_of: Callable, client_of: Callable, tmp_path: Any) -> None:
    """Of a client that lacks a class the prompts' gradients are those of its own samples, scaled by their share."""
    method = pip_of("federation.batch_size=64", inject="missing")
    server = method.start_task(method.create_server(), 0)
    server = method.aggregate(server, asked(method, server, [client_of(method, c) for c in range(4)], tmp_path))
    client = client_of(method, 0, round=1)
    client = replace(client, rows=only(client.rows, 0))
    training = method.prepare_training(client, method.make_payload(server))
    (batch,) = method.run.batches.iterate_ordered(client.rows, 64)
    backbone = training.network.backbone
    with_all = training.compute_gradients(method.compute_loss(training, batch))
    alone = training.compute_gradients(
        method.compute_cross_entropy(training.network, backbone.extract(batch.inputs, 0).features, batch.labels, 0) / 2
    )
    prompts = [n for n in alone if n.startswith("backbone.prompts.") and alone[n].any() and "key" not in n]
    assert prompts
    for name in prompts:
        torch.testing.assert_close(with_all[name], alone[name], atol=1e-6, rtol=1e-4)
    assert with_all["heads.0.weight"][1].any()


def test_what_nobody_holds_in_a_round_keeps_its_last_prototype_of_the_task(
    pip_of: Callable, client_of: Callable, tmp_path: Any
) -> None:
    """And a new task starts without any, unless earlier ones are kept."""
    for earlier in (False, True):
        method = pip_of(earlier=earlier)
        server = method.start_task(method.create_server(), 0)
        all_of_it = method.aggregate(
            server, asked(method, server, [client_of(method, c) for c in range(4)], tmp_path / f"a{earlier}")
        )
        client = client_of(method, 0, round=1)
        half = method.aggregate(
            all_of_it, asked(method, all_of_it, [replace(client, rows=only(client.rows, 1))], tmp_path / f"b{earlier}")
        )
        before, after = (of.knowledge["prototypes"] for of in (all_of_it, half))
        assert torch.equal(after["mu"][0], before["mu"][0])
        assert not torch.equal(after["mu"][1], before["mu"][1])
        assert after["known"].all()
        later = method.make_payload(method.start_task(half, 1))
        assert ("prototypes" in later) == earlier
        if earlier:
            assert later["prototypes"].tensors["labels"].tolist() == [0, 1]


def test_under_noise_a_client_tells_means_of_clipped_features(pip_of: Callable, client_of: Callable) -> None:
    settings = ("optimizer.lr=1e-30", "federation.weighting=uniform")
    noise = ("federation.privacy.noise_multiplier=1", "federation.privacy.features=0.1")
    moments = {}
    for method in (pip_of(*settings), pip_of(*settings, *noise)):
        server = method.start_task(method.create_server(), 0)
        reply, _ = method.exchanges[TRAIN].reply(client_of(method, 0), method.make_payload(server))
        moments[method.network.feature_clip] = reply.parts["moments"]
    plain, private = moments[None].tensors, moments[0.1]
    assert (plain["sum"].norm(dim=1) > 0.1 * plain["weight"]).all()
    torch.testing.assert_close(private.tensors["weight"], plain["weight"] / plain["weight"].sum())
    assert (private.tensors["sum"].norm(dim=1) <= private.tensors["weight"] * (1 + 1e-6)).all()
    assert reply_checks.measure_length(private.tensors) <= private.bound * (1 + 1e-6)


def test_with_hardly_any_noise_prototypes_are_those_without(pip_of: Callable, federate: Callable) -> None:
    """Of clients of one size, whose features are all shorter than the clip."""
    alone = ("federation.privacy.noise_multiplier=1e-9", "federation.privacy.covers=knowledge")
    plain, private = (
        federate(pip_of("federation.rounds=1", *noise), 1).knowledge["prototypes"]
        for noise in ((), (*alone, "federation.privacy.features=100.0"))
    )
    assert private["known"].all()
    torch.testing.assert_close(private["mu"], plain["mu"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(private["sigma2"], plain["sigma2"], rtol=1e-3, atol=1e-3)


def test_moments_are_of_the_prompts_that_were_just_trained(pip_of: Callable, client_of: Callable) -> None:
    """Algorithm 1, line 25, in the second task: those of its expert, and not of the one that the keys find."""
    method = pip_of("optimizer.lr=0.5", "federation.batch_size=64")
    server = method.start_task(method.start_task(method.create_server(), 0), 1)
    client = client_of(method, 0, task=1)
    tensors = method.train(client, method.make_payload(server)).tensors
    n = len(client.rows)
    moved = {name: server.weights[name] + step / n for name, step in tensors["update"].items()}
    (batch,) = method.run.batches.iterate_ordered(client.rows, 64)
    after, before = (
        method.networks.load(server.spec, {**server.weights, **w})
        .eval()
        .backbone.extract(batch.inputs, 1)
        .features.sum(0)
        for w in (moved, {})
    )
    found = tensors["moments"]["sum"].sum(0).float()
    torch.testing.assert_close(found, after, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, before, atol=1e-2)


def test_the_loss_is_eq_5_and_eq_9_by_hand(pip_of: Callable, client_of: Callable, tmp_path: Any) -> None:
    method = pip_of("federation.batch_size=64", matching=0.3)
    server = method.start_task(method.create_server(), 0)
    server = method.aggregate(server, asked(method, server, [client_of(method, c) for c in range(4)], tmp_path))
    client = client_of(method, 0, round=1)
    client = replace(client, rows=only(client.rows, 0))
    training, twin = (method.prepare_training(client, method.make_payload(server)) for _ in range(2))
    (batch,) = method.run.batches.iterate_ordered(client.rows, 64)
    vectors, theirs, _ = twin.find_added(InjectedPrototypes).draw(len(batch.labels))
    with torch.no_grad():
        loss = method.compute_loss(training, batch).item()
        query = method.network.frozen(batch.inputs).double().numpy()
        X = training.network.backbone.extract(batch.inputs, 0).features
    X, y = np.concatenate([X, vectors]).astype(float), np.concatenate([batch.labels, theirs])
    head = training.network.heads[0]
    Z = X @ head.weight.detach().double().numpy().T + head.bias.detach().double().numpy()
    entropy = np.log(np.exp(Z).sum(1)) - Z[np.arange(len(y)), y]
    key = training.network.backbone.prompts.keys[0].detach().double().numpy()
    cosine = query @ key / np.linalg.norm(query, axis=1) / np.linalg.norm(key)
    assert loss == pytest.approx(entropy.mean() + 0.3 * (1 - cosine).mean(), rel=1e-5)


@pytest.mark.parametrize("loss_over", ["seen", "task"])
def test_earlier_classes_are_learned_within_their_own_task(
    loss_over: str, pip_of: Callable, client_of: Callable, tmp_path: Any
) -> None:
    """Prototypes of the first task join the second's batches, each under the loss of its task."""
    method = pip_of(f"model.loss_over={loss_over}", earlier=True)
    server = method.start_task(method.create_server(), 0)
    server = method.aggregate(server, asked(method, server, [client_of(method, c) for c in range(4)], tmp_path))
    server = method.start_task(server, 1)
    client = client_of(method, 0, task=1)
    training = method.prepare_training(client, method.make_payload(server))
    vectors, labels, tasks = training.find_added(InjectedPrototypes).draw(4)
    assert (sorted(set(labels.tolist())), set(tasks.tolist())) == ([0, 1], {0})
    gradient = training.compute_gradients(
        method.compute_cross_entropy_by_task(training.network, vectors, labels, tasks)
    )["heads.0.weight"]
    assert gradient[:2].any()
    assert gradient[2:].any() == (loss_over == "seen")
    assert np.isfinite(method.train(client, method.make_payload(server)).loss)


def test_settings_that_would_do_nothing_are_refused(pip_of: Callable, splits_of: Callable) -> None:
    with pytest.raises(UserError, match=r"earlier does nothing under model\.head: per-task"):
        pip_of(earlier=True, splits=splits_of(head="per-task"))


INTERRUPTED = [
    {"head": "own", "omega": "participation"},
    *(pytest.param(s, marks=pytest.mark.slow) for s in ({}, {"earlier": True})),
]


@pytest.mark.parametrize("settings", INTERRUPTED)
def test_an_interrupted_run_goes_on_to_the_bit(
    settings: dict[str, Any], experiment_of: Callable, remains: Callable, tmp_path: Any, splits_of: Callable
) -> None:
    """In worker processes too, with few clients a round, and with a client that has one sample."""
    splits = splits_of(train={(t, c): 8 if c else 1 for t in range(2) for c in range(3)}, clients=3)
    own = [f"methods.pip-dualp.{name}={value}" for name, value in {**DUALP, **settings}.items()]
    own = [line.replace("(0,)", "[0]").replace("(1,)", "[1]") for line in own]
    few = (*VIT, *own, "federation.clients_per_round=2", "federation.checkpoint_seconds=0")
    experiment_of(*few, method="pip-dualp", splits=splits).run(tmp_path / "plain")

    home = tmp_path / "home"
    with pytest.raises(KeyboardInterrupt):
        experiment_of(*few, method="pip-dualp", splits=splits, home=home, listener=Stopper()).run(tmp_path / "again")
    workers = ("federation.executor=processes", "federation.workers=2")
    experiment_of(*few, *workers, method="pip-dualp", splits=splits, home=home).run(tmp_path / "again")
    assert remains(tmp_path / "again") == remains(tmp_path / "plain")
