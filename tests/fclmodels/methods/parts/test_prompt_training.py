"""Methods on a frozen backbone, such as Fed-L2P and Fed-DualP: what is trained, what travels, what a client counts."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fclmodels.backbones.model.network import FROZEN, build_network
from fclmodels.errors import UserError
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import TRAIN
from fclmodels.methods.fed_dualp import FedDualP
from fclmodels.methods.fed_l2p import FedL2P
from fclmodels.methods.linear_probe import LinearProbe
from fclmodels.methods.lora import Lora
from fclmodels.methods.nearest_prototype import NearestPrototype, set_heads
from fclmodels.methods.parts.frozen_backbone import FrozenBackbone
from fclmodels.methods.pip_dualp import PipDualP
from fclmodels.methods.pip_l2p import PipL2P
from fclmodels.storage import trees
from fclmodels.storage.sealed_json import write_json

VIT = tuple(
    f"model.{setting}"
    for setting in ("backbone=vit", "patch=3", "width=8", "depth=2", "attention_heads=2", "mlp_width=8")
)
DUALP = {"g_layers": (0,), "e_layers": (1,), "length": 2}
L2P = {"pool": 4, "top_k": 2, "length": 2}
ALL = [
    (FedDualP, DUALP),
    (FedL2P, L2P),
    (PipDualP, DUALP),
    (PipL2P, L2P),
    (LinearProbe, {}),
    (NearestPrototype, {}),
    (Lora, {"rank": 2}),
]
NAMES = [kind.name for kind, _ in ALL]


@pytest.fixture
def frozen_of(method_of: Callable) -> Callable[..., Any]:
    """A method on a tiny transformer."""
    return lambda kind, *overrides, **settings: method_of(kind, *VIT, *overrides, **settings)


@pytest.mark.parametrize(("kind", "settings"), ALL, ids=NAMES)
def test_the_backbone_never_changes_and_never_travels(
    kind: Any, settings: dict[str, Any], frozen_of: Callable, federate: Callable, client_of: Callable
) -> None:
    """What the server sends and clients answer has not a byte of it; a published model has all of it."""
    method = frozen_of(kind, **settings)
    drawn = build_network(method.run.make_spec(1), method.run.make_generator("init")).state_dict()
    before = {name: t.clone() for name, t in drawn.items() if name.startswith(FROZEN)}
    server = federate(method)
    model = method.list_all_weights(server)
    assert before
    assert trees.digest({name: t for name, t in model.items() if name.startswith(FROZEN)}) == trees.digest(before)
    assert not any(name.startswith(FROZEN) for name in server.weights)
    payload = method.make_payload(server)
    reply, _ = method.exchanges[TRAIN].reply(client_of(method, 0, task=1), payload)
    parts = [*payload.values(), *reply.parts.values()]
    assert not any(name.startswith(FROZEN) for part in parts for name in part.tensors)
    assert trees.digest(dict(method.network.frozen.state_dict())) == trees.digest(
        {name.removeprefix(FROZEN): t for name, t in before.items()}
    )


@pytest.mark.parametrize(("kind", "settings"), ALL, ids=NAMES)
def test_each_learns_what_is_easy(kind: Any, settings: dict[str, Any], frozen_of: Callable, federate: Callable) -> None:
    """Two classes that differ in all pixels, on random features: above chance in the task that is known."""
    method = frozen_of(kind, "federation.rounds=6", "optimizer.kind=adam", "optimizer.lr=0.02", **settings)
    server = federate(method, 1)
    rows = method.run.splits.select_test_rows(0)
    (batch,) = method.run.batches.iterate_ordered(rows, len(rows))
    with torch.no_grad():
        answers = method.make_predictor(server)(batch.inputs).logits.argmax(1)
    assert float((answers == batch.labels).float().mean()) > 0.8


def test_a_pool_grows_by_a_prompt_a_task(frozen_of: Callable, federate: Callable) -> None:
    method = frozen_of(FedDualP, **DUALP)
    one, two = federate(method, 1), federate(method, 2)

    def experts(server: Any) -> int:
        return sum(t.numel() for n, t in server.weights.items() if n.startswith("backbone.prompts."))

    general = 2 * 2 * 8
    assert experts(one) == general + 2 * 2 * 8 + 8
    assert experts(two) == general + 2 * (2 * 2 * 8 + 8)


def test_with_participation_a_client_counts_more_each_time(frozen_of: Callable, client_of: Callable) -> None:
    """rho starts anew with each task (eq. 12 and 13)."""
    method = frozen_of(FedDualP, omega="participation", **DUALP)
    payload, memory, weights = method.make_payload(method.start_task(method.create_server(), 0)), {}, []
    for round in range(3):
        answer = method.train(client_of(method, 0, round=round, memory=memory), payload)
        weights.append(float(answer.tensors["weight"]["weight"]))
        memory = answer.memory
    assert weights == [8, 16, 24]
    later = client_of(method, 0, task=1, memory=memory)
    assert method.prompts.weigh(later) == 8


def test_participation_may_be_counted_over_all_tasks(frozen_of: Callable, client_of: Callable) -> None:
    """rho of eq. 12 and 13: the total until the task."""
    method = frozen_of(FedDualP, "federation.rounds=3", omega="all-participation", **DUALP)
    memory: dict[str, Any] = {}
    weights = []
    for task, round in ((0, 0), (0, 2), (1, 1), (1, 2), (0, 0)):
        client = client_of(method, 0, task=task, round=round, memory=memory)
        weights.append(method.prompts.weigh(client))
        memory = method.prompts.make_memory(client)
    assert weights == [8, 16, 24, 32, 40]
    assert [method.prompts.bound_weight(task) for task in range(2)] == [3, 6]


def test_heads_may_be_averaged_in_a_tasks_last_round_alone(
    frozen_of: Callable, client_of: Callable, tmp_path: Any
) -> None:
    """Before, a client goes on with its own; its first round in a task starts from the server's."""
    method = frozen_of(FedDualP, "federation.rounds=2", head="task-end", **DUALP)
    server = method.start_task(method.create_server(), 0)
    name, memories = "heads.0.weight", {}
    for round in range(2):
        replies = Replies([0, 1], tmp_path / str(round))
        for index in range(2):
            client = client_of(method, index, round=round, memory=memories.get(index))
            training = method.prepare_training(client, method.make_payload(server))
            expected = server.weights[name] if round == 0 else memories[index]["personal"][name]
            assert torch.equal(training.network.get_parameter(name), expected)
            reply, memories[index] = method.exchanges[TRAIN].reply(client, method.make_payload(server))
            assert (name in reply.parts["update"].tensors) == (round == 1)
            replies.add(index, reply)
        server = method.aggregate(server, replies)
    mean = (memories[0]["personal"][name] + memories[1]["personal"][name]) / 2
    torch.testing.assert_close(server.weights[name], mean)
    grown = method.start_task(server, 1)
    training = method.prepare_training(client_of(method, 0, task=1, memory=memories[0]), method.make_payload(grown))
    assert torch.equal(training.network.get_parameter(name), grown.weights[name])
    assert not method.is_personal


def test_heads_that_are_averaged_at_a_tasks_end_cannot_come_late(frozen_of: Callable) -> None:
    with pytest.raises(UserError, match=r"fed-dualp\.head: task-end .* a late answer of an earlier one has none"):
        frozen_of(FedDualP, "federation.faults.late=0.5", head="task-end", **DUALP)


def test_an_expert_may_start_anew_in_each_round(frozen_of: Callable, client_of: Callable, tmp_path: Any) -> None:
    """As in the release: from the previous task's; the server has the mean of what the round's clients made of it."""
    method = frozen_of(FedDualP, pool=4, start="each-round", **DUALP)
    server, name = method.start_task(method.start_task(method.create_server(), 0), 1), "backbone.prompts.experts"
    for round in range(2):
        client = client_of(method, 0, task=1, round=round)
        training = method.prepare_training(client, method.make_payload(server))
        experts = training.network.get_parameter(name)
        assert torch.equal(experts[:, :, 1], server.weights[name][:, :, 0])
        training.run()
        replies = Replies([0], tmp_path / str(round))
        replies.add(0, method.exchanges[TRAIN].reply(client, method.make_payload(server))[0])
        server = method.aggregate(server, replies)
        torch.testing.assert_close(server.weights[name], training.network.get_parameter(name))


def test_own_heads_stay_with_their_clients(frozen_of: Callable, client_of: Callable) -> None:
    """They are never sent, they go on from where they were, and new classes' rows are the server's."""
    method = frozen_of(FedDualP, head="own", **DUALP)
    server = method.start_task(method.create_server(), 0)
    reply, memory = method.exchanges[TRAIN].reply(client_of(method, 0), method.make_payload(server))
    assert not any(name.startswith("heads.") for name in reply.parts["update"].tensors)
    own = memory["personal"]["heads.0.weight"]
    assert not torch.equal(own, server.weights["heads.0.weight"])
    grown = method.start_task(server, 1)
    whole = method.join_own_weights(client_of(method, 0, task=1, memory=memory), method.make_payload(grown))
    assert torch.equal(whole["heads.0.weight"][:2], own)
    assert torch.equal(whole["heads.0.weight"][2:], grown.weights["heads.0.weight"][2:])


def test_queries_that_are_kept_change_nothing(
    experiment_of: Callable, remains: Callable, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that looks them up and one that asks the backbone in each step agree but for rounding."""
    own = ("methods.fed-dualp.g_layers=[0]", "methods.fed-dualp.e_layers=[1]", "methods.fed-dualp.length=2")
    kept = experiment_of(*VIT, *own, method="fed-dualp")
    kept.run(tmp_path / "kept")
    (file,) = (kept.home / "queries").glob("*.npy")
    images = kept.splits.images
    (batch,) = kept.method.run.batches.iterate_ordered(kept.splits.select_test_rows(0), 1000)
    with torch.no_grad():
        asked = kept.method.network.frozen(batch.inputs)
    np.testing.assert_allclose(np.load(file)[batch.samples], asked, atol=1e-6)
    assert len(np.load(file)) == len(images)
    monkeypatch.setattr(FrozenBackbone, "queries", None)  # as if there were nowhere to keep them
    anew = experiment_of(*VIT, *own, method="fed-dualp")
    anew.run(tmp_path / "anew")
    mine, theirs = (trees.load(tmp_path / name / "model" / "weights.safetensors") for name in ("kept", "anew"))
    assert all(torch.allclose(mine[name], theirs[name], atol=1e-5) for name in mine)


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("fed-dualp", ("methods.fed-dualp.g_layers=[]", "methods.fed-dualp.e_layers=[1]")),
        ("lora", ("methods.lora.layers=[1]",)),
    ],
)
def test_layers_below_the_first_with_something_attached_are_kept_and_change_nothing(
    method: str, own: tuple[str, ...], experiment_of: Callable, remains: Callable, tmp_path: Any
) -> None:
    """A run that looks up what enters layer 1 and one that passes layer 0 in each step agree but for rounding."""
    kept = experiment_of(*VIT, *own, method=method, home=tmp_path / "first")
    kept.run(tmp_path / "kept")
    assert kept.method.network.below.shape == (len(kept.splits.images), 1 + 4, 8)
    assert len(list((tmp_path / "first" / "queries").glob("*.npy"))) == (2 if method == "fed-dualp" else 1)
    anew = experiment_of(*VIT, *own, method=method, home=tmp_path / "second")
    anew.method.network.below = None
    anew.run(tmp_path / "anew")
    mine, theirs = (trees.load(tmp_path / name / "model" / "weights.safetensors") for name in ("kept", "anew"))
    assert all(torch.allclose(mine[name], theirs[name], atol=1e-5) for name in mine)


def test_nothing_is_kept_where_tasks_are_normalised_each_by_its_own_mean_and_std(
    experiment_of: Callable, splits_of: Callable
) -> None:
    splits = copy(splits_of())
    splits.tasks = tuple(replace(task, mean=(0.1 * task.index,), std=(0.2,)) for task in splits.tasks)
    network = experiment_of(*VIT, "methods.lora.layers=[1]", method="lora", splits=splits).method.network
    assert network.queries is None
    assert network.below is None


def test_tokens_that_take_too_much_room_are_not_kept(experiment_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    method = experiment_of(*VIT, "methods.lora.layers=[1]", method="lora").method
    monkeypatch.setattr(
        "fclmodels.methods.parts.frozen_backbone.MOST_CACHED", 4 * len(method.run.splits.images) * 5 * 8 - 1
    )
    assert method.network.below is None
    assert experiment_of(*VIT, method="lora").method.network.below is None  # nothing lies below layer 0


def test_queries_of_another_network_are_not_taken(experiment_of: Callable, tmp_path: Any) -> None:
    """Same weights and data, but other heads of the attention: another file, beside the first."""
    files = tmp_path / "home" / "queries"
    for heads in (2, 4):
        own = (*VIT, f"model.attention_heads={heads}")
        run = experiment_of(*own, method="linear-probe", home=tmp_path / "home")
        method = run.method
        (batch,) = method.run.batches.iterate_ordered(method.run.splits.select_test_rows(0), 1000)
        with torch.no_grad():
            torch.testing.assert_close(
                method.network.queries[batch.samples], method.network.frozen(batch.inputs), atol=1e-6, rtol=0
            )
    assert len(list(files.glob("*.npy"))) == 2


def test_pixels_that_augmentation_changes_are_queried_anew_and_told(frozen_of: Callable) -> None:
    method = frozen_of(FedDualP, "augment.flip=true", **DUALP)
    assert method.network.queries is None
    assert any("augment changes pixels" in line for line in method.list_advice())
    assert not any("augment" in line for line in frozen_of(FedDualP, **DUALP).list_advice())


@pytest.mark.parametrize(
    ("settings", "domains", "told"), [((), False, True), (("model.loss_over=task",), False, False), ((), True, False)]
)
def test_a_loss_that_pushes_earlier_classes_down_is_told_of(
    settings: tuple[str, ...], domains: bool, told: bool, frozen_of: Callable, splits_of: Callable
) -> None:
    method = frozen_of(FedDualP, *settings, splits=splits_of(same_classes=domains), **DUALP)
    assert any("model.loss_over: task" in line for line in method.list_advice()) == told


def test_a_frozen_backbone_that_was_drawn_is_told_of(frozen_of: Callable) -> None:
    assert any("model.weights is not set" in line for line in frozen_of(LinearProbe).list_advice())


def test_a_backbone_that_has_seen_the_streams_classes_is_told_of(frozen_of: Callable, tmp_path: Any) -> None:
    method = frozen_of(LinearProbe)
    known = method.run.splits.classes[1]
    save_file(method.network.frozen.state_dict(), tmp_path / "weights.safetensors")
    for classes, told in ((["A", known], True), (["A", "B"], False)):
        write_json(tmp_path / "card.json", {"classes": classes})
        lines = frozen_of(LinearProbe, f"model.weights={tmp_path / 'weights.safetensors'}").list_advice()
        assert any(f"pretrained on classes of this stream: {known}" in line for line in lines) == told
    for spoilt in ("{", "[]", '{"classes": [3]}'):
        (tmp_path / "card.json").write_text(spoilt)
        with pytest.raises(UserError, match=r"card\.json cannot be read"):
            frozen_of(LinearProbe, f"model.weights={tmp_path / 'weights.safetensors'}").list_advice()


@pytest.mark.parametrize(("kind", "settings"), [(FedDualP, DUALP), (FedL2P, L2P), (Lora, {})])
def test_other_networks_are_refused(kind: Any, settings: dict[str, Any], method_of: Callable) -> None:
    with pytest.raises(UserError, match="vit"):
        method_of(kind, **settings).create_server()


def test_frozen_blocks_beside_a_frozen_backbone_are_refused(frozen_of: Callable) -> None:
    with pytest.raises(UserError, match=r"model\.freeze: methods\.linear-probe freezes the whole backbone"):
        frozen_of(LinearProbe, "model.freeze=[embed]")


def test_a_probe_is_softmax_regression_on_the_features(frozen_of: Callable, client_of: Callable) -> None:
    """One step of one client from the head's start, worked out by hand."""
    method = frozen_of(LinearProbe, "federation.batch_size=64", "optimizer.lr=0.5")
    server = method.start_task(method.create_server(), 0)
    update = method.train(client_of(method, 0), method.make_payload(server)).tensors["update"]
    (batch,) = method.run.batches.iterate_ordered(method.select_rows(0, 0), 64)
    with torch.no_grad():
        X = method.network.frozen(batch.inputs).double().numpy()
    W, b = (server.weights[f"heads.0.{part}"].double().numpy() for part in ("weight", "bias"))
    Z = X @ W.T + b
    P = np.exp(Z - Z.max(1, keepdims=True))
    P /= P.sum(1, keepdims=True)
    G = (P - np.eye(2)[batch.labels]) / len(X)
    n = len(X)
    np.testing.assert_allclose(update["heads.0.weight"] / n, -0.5 * G.T @ X, atol=1e-6)
    np.testing.assert_allclose(update["heads.0.bias"] / n, -0.5 * G.sum(0), atol=1e-6)


def test_the_nearest_prototype_is_the_nearest_class_mean(frozen_of: Callable, federate: Callable) -> None:
    """Means over all clients' samples, each told once, however many rounds there are."""
    method = frozen_of(NearestPrototype, "federation.rounds=3")
    server = federate(method)
    rows = [method.run.splits.select_rows(task, "train") for task in range(2)]
    X, y = [], []
    with torch.no_grad():
        for of_task in rows:
            for batch in method.run.batches.iterate_ordered(of_task, 1000):
                X.append(method.network.frozen(batch.inputs))
                y.append(batch.labels)
        X, y = torch.cat(X).double(), torch.cat(y)
        means = torch.stack([X[y == label].mean(0) for label in range(4)])
        (batch,) = method.run.batches.iterate_ordered(method.run.splits.select_test_rows(1), 1000)
        nearest = torch.cdist(method.network.frozen(batch.inputs).double(), means).argmin(1)
        answers = method.make_predictor(server)(batch.inputs).logits.argmax(1)
    assert torch.equal(answers, nearest)
    np.testing.assert_allclose(server.weights["heads.0.weight"], means, atol=1e-5)


def test_what_comes_late_or_never_leaves_the_means_as_they_are(frozen_of: Callable, splits_of: Callable) -> None:
    """A mean stays one where its sum and count are halved; a client that was not heard tells again."""
    method = frozen_of(NearestPrototype)
    server = method.start_task(method.create_server(), 0)
    total = {"weight": torch.tensor([1.0, 3, 0, 0]).double(), "sum": torch.ones(4, 8).double()}
    halved = {name: value / 4 for name, value in total.items()}
    whole, part = (set_heads(server, {"heads.0.weight": of}, server.knowledge["heard"]) for of in (total, halved))
    assert torch.equal(whole.weights["heads.0.weight"], part.weights["heads.0.weight"])
    assert whole.weights["heads.0.bias"].tolist() == [-4.0, pytest.approx(-4 / 9), -1e9, -1e9]


def test_a_client_tells_until_it_is_heard(frozen_of: Callable, client_of: Callable) -> None:
    method = frozen_of(NearestPrototype)
    server = method.start_task(method.create_server(), 0)
    for heard, samples in (([], 8), ([1, 3], 8), ([0, 1], 0)):
        knowledge = {**server.knowledge, "heard": torch.tensor(heard, dtype=torch.int64)}
        answer = method.train(client_of(method, 0), method.make_payload(replace(server, knowledge=knowledge)))
        assert answer.tensors["moments"]["weight"].sum() == samples


@pytest.mark.parametrize("domains", [False, True])
def test_own_heads_have_their_own_tasks_means(
    domains: bool, frozen_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    method = frozen_of(NearestPrototype, splits=splits_of(same_classes=domains, head="per-task"))
    server = federate(method)
    for task in range(2):
        (batch,) = method.run.batches.iterate_ordered(method.run.splits.select_rows(task, "train"), 1000)
        X, labels = method.network.frozen(batch.inputs), method.run.splits.tasks[task].classes
        means = torch.stack([X[batch.labels == label].mean(0) for label in labels])
        torch.testing.assert_close(server.weights[f"heads.{task}.weight"], means, atol=1e-5, rtol=0)


def test_a_class_nobody_has_told_of_is_not_answered(frozen_of: Callable) -> None:
    method = frozen_of(NearestPrototype)
    server = method.start_task(method.start_task(method.create_server(), 0), 1)
    assert (server.weights["heads.0.bias"] <= -1e9).all()


@pytest.mark.parametrize("method", ["fedavg", "fed-dualp"])
def test_a_run_can_start_from_the_model_that_another_has_left(
    method: str, experiment_of: Callable, tmp_path: Any
) -> None:
    """Its backbone, frozen or not; what was attached to it and its head are left out."""
    own = [f"methods.fed-dualp.{line}" for line in ("g_layers=[0]", "e_layers=[1]", "length=2")]
    first = experiment_of(*VIT, *own, method=method)
    first.run(tmp_path / "first")
    model = tmp_path / "first" / "model" / "weights.safetensors"
    again = experiment_of(*VIT, *own, f"model.weights={model}", "federation.rounds=1", method="fed-dualp")
    prefix = "backbone." if method == "fedavg" else FROZEN
    left = {n.removeprefix(prefix): t for n, t in trees.load(model).items() if n.startswith(prefix)}
    assert left
    assert all(torch.equal(left[name], tensor) for name, tensor in again.method.network.frozen.state_dict().items())
