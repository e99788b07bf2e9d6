"""Heads in closed form: the same as from all samples in one place, whatever the split; ridge and STSA."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import layer_norm

from fclmodels.backbones.model.network import build_network
from fclmodels.errors import UserError
from fclmodels.experiment.exported_model import ExportedModel
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.protection.privacy import refuse_unfit_method
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.closed_form_head import PRODUCTS_BOUND
from fclmodels.methods.parts.estimated_products import GROUPS
from fclmodels.methods.ridge import Ridge
from fclmodels.methods.stsa import Stsa
from fclmodels.numerics.fitted_heads import choose_ridge, fit_ridge, project_positive, sum_products, weigh_groups
from fclmodels.storage import trees
from fclmodels.testing.tiny_splits import VIT

FIXED: dict[str, Any] = {"lambda": 0.1, "random_features": 20}
WORKED = torch.tensor([[1.0, 2], [0, 1], [2, 0], [1, 1], [3, 1]]), torch.tensor([0, 1, 0, 0, 1])


def test_the_head_of_worked_numbers() -> None:
    """Of STSA's numbers without a mapping, linear and by cosine, and of a mapping to three random features."""
    A, y = WORKED
    sums = sum_products(A, y, 2)
    assert sums["gram"].tolist() == [[15, 6], [6, 7]]
    assert sums["cross"].tolist() == [[4, 3], [3, 2]]
    W = fit_ridge(**sums, ridge=0.1).weight
    np.testing.assert_allclose(W.T, [[0.146047, 0.130600], [0.299115, 0.171324]], atol=1e-6)
    x = torch.tensor([2.0, 1])
    np.testing.assert_allclose(W @ x, [0.591209, 0.432524], atol=1e-6)
    np.testing.assert_allclose(W @ x / (W.norm(dim=1) * x.norm()), [0.794304, 0.897898], atol=1e-6)
    phi = (A @ torch.tensor([[1, -1, 0.5], [0, 2, -1]])).relu()
    assert phi.tolist() == [[1, 3, 0], [0, 2, 0], [2, 0, 1], [1, 1, 0], [3, 0, 0.5]]
    right = [[0.055744, 0.232322], [0.267874, 0.075937], [0.596218, -0.231946]]
    np.testing.assert_allclose(fit_ridge(**sum_products(phi, y, 2), ridge=0.1).weight.T, right, atol=1e-6)


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_any_split_and_order_of_tasks_give_one_head(seed: int, clients: int, tasks: int) -> None:
    random = np.random.default_rng(seed)
    A, y = torch.tensor(random.normal(size=(60, 7))), torch.tensor(random.integers(0, 5, 60))
    place = random.integers(0, clients * tasks, 60)
    parts = [sum_products(A[place == p], y[place == p], 5) for p in random.permutation(clients * tasks)]
    total = {name: sum(part[name] for part in parts) for name in ("gram", "cross")}
    X, Y = A.numpy(), np.eye(5)[y]
    pooled = np.linalg.solve(X.T @ X + 0.01 * np.eye(7), X.T @ Y)
    np.testing.assert_allclose(fit_ridge(**total, ridge=0.01).weight.T, pooled, atol=1e-6)


def test_lambda_is_the_one_with_the_least_error_on_held_out_samples() -> None:
    random = np.random.default_rng(0)
    for noise in (0.01, 3.0):
        X, V = random.normal(size=(40, 8)), random.normal(size=(30, 8))
        truth = random.normal(size=(8, 2))
        y, v = ((Z @ truth + noise * random.normal(size=(len(Z), 2))).argmax(1) for Z in (X, V))
        errors = {}
        for ridge in 10.0 ** np.arange(-8, 9):
            W = np.linalg.solve(X.T @ X + ridge * np.eye(8), X.T @ np.eye(2)[y])
            errors[ridge] = ((V @ W - np.eye(2)[v]) ** 2).sum()
        fitted, held_out = (sum_products(torch.tensor(Z), torch.tensor(of), 2) for Z, of in ((X, y), (V, v)))
        assert choose_ridge(**fitted, held_out=held_out) == min(errors, key=errors.__getitem__)
    nothing = {name: torch.zeros_like(t) for name, t in held_out.items()}
    assert choose_ridge(**fitted, held_out=nothing) is None
    assert choose_ridge(**nothing, held_out=held_out) is None


def pool_features(method: Any, compute: Callable[[Tensor], Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels of all clients' samples of all tasks."""
    with torch.no_grad():
        batches = [
            batch
            for task in range(len(method.run.splits.tasks))
            for batch in method.run.batches.iterate_ordered(method.run.splits.select_rows(task, "train"), 1000)
        ]
        features = torch.cat([compute(batch.inputs) for batch in batches])
    return features.double().numpy(), torch.cat([batch.labels for batch in batches]).numpy()


def solve_pooled(phi: np.ndarray, labels: np.ndarray, ridge: float) -> np.ndarray:
    Y = np.eye(labels.max() + 1)[labels]
    return np.linalg.solve(phi.T @ phi + ridge * np.eye(phi.shape[1]), phi.T @ Y).T


BACKBONES = {"vit": VIT, "mlp": (), "cnn": ("model.backbone=cnn",)}


@pytest.mark.parametrize("backbone", BACKBONES)
def test_ridge_is_the_head_of_all_samples_in_one_place(
    backbone: str, method_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    """NumPy's solution on the frozen backbone's features, of clients of other sizes, of which one lacks a task."""
    shape = {"shape": (1, 8, 8)} if backbone == "cnn" else {}
    train = {(t, c): 3 + 2 * t + c for t, c in product(range(2), range(3)) if (t, c) != (1, 0)}
    method = method_of(Ridge, *BACKBONES[backbone], splits=splits_of(clients=3, train=train, **shape), **FIXED)
    server = federate(method)
    features, labels = pool_features(method, method.network.frozen)
    P = server.knowledge["head"]["projection"].double().numpy()
    np.testing.assert_allclose(
        server.knowledge["head"]["weight"], solve_pooled(np.maximum(features @ P, 0), labels, 0.1), atol=2e-3
    )
    plain = federate(
        method_of(Ridge, *BACKBONES[backbone], splits=method.run.splits, random_features=0, **{"lambda": 1})
    )
    np.testing.assert_allclose(plain.knowledge["head"]["weight"], solve_pooled(features, labels, 1.0), atol=1e-4)


@pytest.mark.parametrize("clients", [1, 3, 6])
def test_any_split_over_clients_gives_one_lambda_and_one_head(
    clients: int, method_of: Callable, client_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    """At the defaults: the samples that are set apart are the same whoever has them."""
    method = method_of(Ridge, *VIT, splits=splits_of(noise=200, train=12))
    server, rows = method.start_task(method.create_server(), 0), method.run.splits.select_rows(0, "train")
    heads = []
    for number in (1, clients):
        owners = np.random.default_rng(number).integers(0, number, len(rows))
        replies = Replies(list(range(number)), tmp_path / f"spool{number}")
        for index in range(number):
            client = replace(client_of(method, index), rows=rows.take(np.flatnonzero(owners == index)))
            replies.add(index, method.exchanges["products"].reply(client, {})[0])
        apart = replies.sum("held_out_products")["cross"].sum(), replies.sum("products")["cross"].sum()
        assert 0 < apart[0] < apart[1]
        heads.append(method.head.fit(server, replies).knowledge)
    assert heads[0]["products"]["lambda"] == heads[1]["products"]["lambda"]
    torch.testing.assert_close(heads[0]["head"]["weight"], heads[1]["head"]["weight"], atol=1e-5, rtol=1e-3)


def test_rounds_and_partial_participation_change_nothing(method_of: Callable, federate: Callable) -> None:
    heads = [
        federate(method_of(Ridge, *some, *VIT)).knowledge["head"]
        for some in ((), ("federation.rounds=1",), ("federation.clients_per_round=1",))
    ]
    assert len({trees.digest(head) for head in heads}) == 1


def test_heads_of_tasks_have_columns_of_their_own(method_of: Callable, federate: Callable, splits_of: Callable) -> None:
    """The same labels in both tasks: each task's samples fill its own columns."""
    method = method_of(Ridge, *VIT, splits=splits_of(head="per-task", same_classes=True), **FIXED)
    server = federate(method)
    assert server.knowledge["head"]["weight"].shape == (4, 20)
    features, labels = pool_features(method, method.network.frozen)
    phi = np.maximum(features @ server.knowledge["head"]["projection"].double().numpy(), 0)
    first = len(method.run.splits.select_rows(0, "train"))
    columns = labels + 2 * (np.arange(len(labels)) >= first)
    np.testing.assert_allclose(server.knowledge["head"]["weight"], solve_pooled(phi, columns, 0.1), atol=1e-3)


# What protects clients.


def test_under_masks_it_is_the_same_head(experiment_of: Callable, tmp_path: Path) -> None:
    overrides = (*VIT, "methods.ridge={lambda: 0.1, random_features: 20}")
    heads = []
    for some in ((), ("federation.secagg.on=true",)):
        experiment_of(*overrides, *some, method="ridge").run(tmp_path / f"run{len(some)}")
        heads.append(trees.load(tmp_path / f"run{len(some)}" / "model" / "fitted_head.safetensors"))
    torch.testing.assert_close(heads[0]["weight"], heads[1]["weight"], atol=1e-4, rtol=1e-4)


@given(st.integers(0, 10_000), st.floats(0.01, 100))
@settings(max_examples=10, deadline=None)
def test_no_samples_share_is_longer_than_the_bound(seed: int, scale: float) -> None:
    """Of phi clipped at B: phi phi^T / B^2 and phi y^T / B together."""
    phi = scale * torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)).relu().double()
    clipped = phi.renorm(2, 0, 10.0)
    for row in clipped:
        sums = sum_products(row[None], torch.tensor([1]), 3)
        assert np.hypot(float((sums["gram"] / 100).norm()), float((sums["cross"] / 10).norm())) <= PRODUCTS_BOUND + 1e-9


def test_noise_covers_the_sums_and_one_release_a_task_is_counted(
    method_of: Callable, client_of: Callable, experiment_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    private = ("federation.weighting=uniform", "federation.privacy.noise_multiplier=0.01")
    method = method_of(Ridge, *VIT, *private, "federation.privacy.features=0.5", random_features=6)
    server = method.start_task(method.create_server(), 0)
    answer = method.head.answer(client_of(method, 0), {})
    for part, outline in method.head.make_form(0, -1).items():
        length = np.hypot(*(float(answer.tensors[part][name].norm()) for name in ("gram", "cross")))
        assert 0.5 < length <= outline.bound
    assert server.knowledge == {}
    result = experiment_of(*VIT, *private, method="ridge", splits=splits_of(noise=10)).run(tmp_path / "run")
    assert result["privacy"]["releases"] == 2
    assert result["metrics"]["task_aware"]["acc"] > 0.6


def test_a_distorted_gram_is_made_positive() -> None:
    random = torch.Generator().manual_seed(0)
    A = torch.randn(9, 4, generator=random).double()
    torch.testing.assert_close(project_positive(A.T @ A), A.T @ A)
    noisy = torch.randn(4, 4, generator=random).double()
    values = torch.linalg.eigvalsh(project_positive(noisy))
    np.testing.assert_allclose(values, np.linalg.eigvalsh((noisy + noisy.T) / 2).clip(0), atol=1e-12)


# STSA.


def test_the_first_task_is_fedavg_and_then_nothing_moves(method_of: Callable, federate: Callable) -> None:
    """To the bit on a trained backbone; the heads that grow later are drawn, and answer nothing."""
    one = federate(method_of(FedAvg), 1)
    stsa = method_of(Stsa)
    assert trees.digest(federate(stsa, 1).weights) == trees.digest(one.weights)
    end = federate(stsa, 2).weights
    assert all(torch.equal(end[name], tensor) for name, tensor in one.weights.items() if name.startswith("backbone"))


@pytest.mark.parametrize("overrides", [(), VIT], ids=["backbone", "adapter"])
def test_its_head_is_that_of_all_samples_on_the_first_tasks_features(
    overrides: tuple[str, ...], method_of: Callable, federate: Callable
) -> None:
    method = method_of(Stsa, *overrides, **FIXED)
    server = federate(method)
    network = method.networks.load(server.spec, server.weights).eval()
    features, labels = pool_features(method, network.backbone)
    phi = np.maximum(features @ server.knowledge["head"]["projection"].double().numpy(), 0)
    np.testing.assert_allclose(server.knowledge["head"]["weight"], solve_pooled(phi, labels, 0.1), atol=2e-3)
    names = method.make_update_form(0, 0)["update"].tensors
    assert any(name.startswith("backbone.prompts.") for name in names) == bool(overrides)
    assert set(method.make_update_form(1, 0)) == {"weight"}
    assert method.make_payload(server) == {}


def test_groups_of_worked_numbers() -> None:
    """Rows (1,0), (0,1), (2,1), (1,3) of one class in pairs, and one by one; a group without the class changes none."""
    rows = torch.tensor([[1.0, 0], [0, 1], [2, 1], [1, 3]]).double()
    for sums, groups, right in (
        (torch.stack([rows[:2].sum(0), rows[2:].sum(0)]), 2, [[7, 9.5], [9.5, 13]]),
        (rows, 4, [[6, 5], [5, 11]]),
    ):
        a, b = weigh_groups(torch.tensor([4.0]).double(), torch.tensor([float(groups)]).double())
        S = rows.sum(0)
        gram = a * (sums.T @ sums) / (4 / groups) + b * torch.outer(S, S)
        np.testing.assert_allclose(gram, right, atol=1e-12)
    a, b = weigh_groups(torch.tensor([1.0, 3, 0]), torch.tensor([1.0, 1, 0]))
    assert (a.tolist(), b.tolist()) == ([0, 0, 0], [1, pytest.approx(1 / 3), 0])


def test_the_estimate_is_unbiased_over_samples() -> None:
    random = np.random.default_rng(0)
    root = np.array([[1.0, 0], [0.8, 0.5]])
    total = np.zeros((2, 2))
    for _ in range(4000):
        X = np.array([0.5, -1]) + random.normal(size=(12, 2)) @ root.T
        group = random.integers(0, 5, 12)
        n = np.bincount(group, minlength=5)
        s = np.stack([X[group == g].sum(0) for g in range(5)])
        a, b = (float(t) for t in weigh_groups(torch.tensor([12.0]), torch.tensor([float((n > 0).sum())])))
        total += a * (s.T / np.maximum(n, 1)) @ s + b * np.outer(X.sum(0), X.sum(0))
    truth = 12 * (root @ root.T + np.outer([0.5, -1], [0.5, -1]))
    np.testing.assert_allclose(total / 4000, truth, rtol=0.05)


def test_estimated_products_are_exact_where_groups_hold_one_sample_of_a_class(
    method_of: Callable, client_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    """Two samples of each class a client, by a draw of groups that keeps them apart; counts and sums always are."""
    method = method_of(Stsa, *VIT, splits=splits_of(train=2), statistics="estimated", **FIXED)
    exact = method_of(Stsa, *VIT, splits=method.run.splits, **FIXED)
    server = method.start_task(method.create_server(), 0)
    payload = {"weights": FedAvg.make_payload(method, server)["weights"]}
    replies = {}
    for kind in (method, exact):
        replies[kind] = Replies([0, 1], tmp_path / kind.settings.statistics)
        for client in (0, 1):
            replies[kind].add(client, kind.exchanges["products"].reply(client_of(kind, client), payload)[0])
    (name,) = method.head.list_parts()
    estimated, right = method.head.read_products(replies[method], name), exact.head.read_products(replies[exact], name)
    torch.testing.assert_close(estimated["cross"], right["cross"])
    torch.testing.assert_close(estimated["gram"], right["gram"])
    assert len(method.head.make_form(0, -1)[name].tensors["weight"]) == GROUPS * 2


def test_the_releases_values_are_a_profile(method_of: Callable, federate: Callable) -> None:
    method = method_of(Stsa, *VIT, profile="release", random_features=30)
    server = federate(method, 1)
    assert (method.settings.ridge, method.settings.random_features, method.settings.cosine) == (1e6, 30, True)
    head = method.find_head(server)
    torch.testing.assert_close(head.weight.norm(dim=1), torch.ones(2))
    with pytest.raises(UserError, match=r"on a whole backbone its head is linear\. Set methods\.stsa\.cosine: false"):
        method_of(Stsa, profile="release")
    assert method_of(Stsa, profile="release", cosine=False).settings.ridge == 1e6
    with pytest.raises(UserError, match=r"stsa estimates products from single groups.*statistics: exact"):
        refuse_unfit_method(method_of(Stsa, "federation.privacy.noise_multiplier=1", statistics="estimated"))


def test_a_served_model_answers_by_the_fitted_head(experiment_of: Callable, tmp_path: Path) -> None:
    experiment = experiment_of(*VIT, method="stsa")
    experiment.run(tmp_path / "run")
    model = ExportedModel(tmp_path / "run" / "model")
    splits = experiment.method.run.splits
    rows = splits.select_test_rows(0)
    names = [splits.classes[label] for label in rows.labels]
    answers = model.answer(experiment.method.run.batches.read_raw(rows).inputs.numpy(), 1)
    correct = sum(answer["class"] == name for answer, name in zip(answers, names, strict=True))
    table = pl.read_parquet(tmp_path / "run" / "accuracy.parquet")
    row = table.filter(pl.col("reading") == "task_aware", pl.col("after") == 2, pl.col("task") == 0)
    assert correct == row.filter(pl.col("client").is_null())["correct"].sum()


def test_a_bottleneck_adds_to_its_perceptron(method_of: Callable) -> None:
    """0.1 (U relu(D h + d) + u) beside it, h before the norm; nothing at first."""
    method = method_of(Stsa, *VIT, bottleneck=3)
    spec = method.run.make_spec(1)
    network = build_network(spec, method.run.make_generator("init"))
    backbone: Any = network.backbone
    x = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(backbone(x), backbone.frozen(x))
        for parameter in backbone.prompts.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
        tokens = backbone.frozen.embed(x)
        for index, layer in enumerate(backbone.frozen.layers):
            plain = type("Nothing", (), dict.fromkeys(("tokens", "prefix", "keys_values", "lora", "bottleneck")))
            h = tokens + layer.self_attention(layer.ln_1(tokens), plain, slice(0, None))
            p = backbone.prompts
            inner = np.maximum(h.numpy() @ p.down[index].numpy().T + p.down_bias[index].numpy(), 0)
            added = 0.1 * (inner @ p.up[index].numpy().T + p.up_bias[index].numpy())
            tokens = h + layer.mlp(layer.ln_2(h)) + torch.tensor(added)
        norm = backbone.frozen.norm
        right = layer_norm(tokens[:, 0], norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        torch.testing.assert_close(backbone(x), right, atol=1e-5, rtol=1e-4)
