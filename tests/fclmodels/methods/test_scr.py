"""SCR+FL: its loss against the release and NumPy, a client's step, and the means that answer."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch.nn.functional import normalize

from fclmodels.data.splits.split_reader import Splits
from fclmodels.federation.server import Server
from fclmodels.methods import scr
from fclmodels.methods.parts.replay_memory import unpack_samples
from fclmodels.methods.scr import Scr, contrast

# Of SupConLoss in the release's utils/loss.py (6175ca0), in float64, for two views of four samples.
VIEWS = (
    ((0.3, -1.2, 0.5), (1.1, 0.4, -0.2), (-0.6, 0.9, 0.8), (0.2, 0.2, -1.0)),
    ((0.1, -0.9, 0.9), (1.3, -0.4, 0.2), (-0.9, 0.1, 0.8), (0.5, 0.7, -0.3)),
)
LABELS = (2, 0, 2, 1)
RELEASE = {0.07: 4.9261423706096314, 0.1: 3.5114552375648005, 1.0: 1.5675968004418057}
ONE_STEP = ("federation.batch_size=64", "optimizer.lr=0.1")
UNEVEN = {(0, 0): 6, (0, 1): 8, (0, 2): 7, (1, 1): 5, (1, 2): 6, (2, 2): 4}  # client 0 has the first task alone


def contrast_in_numpy(z: np.ndarray, labels: np.ndarray, temperature: float) -> float:
    """Eq. 2 of Khosla et al., anchor by anchor."""
    losses = []
    for i in range(len(z)):
        others = [a for a in range(len(z)) if a != i]
        total = np.exp(z[others] @ z[i] / temperature).sum()
        alike = [a for a in others if labels[a] == labels[i]]
        losses.append(-np.mean([np.log(np.exp(z[i] @ z[p] / temperature) / total) for p in alike]))
    return float(np.mean(losses))


@pytest.mark.parametrize("temperature", RELEASE)
def test_the_loss_is_the_releases(temperature: float) -> None:
    views = normalize(torch.tensor(VIEWS, dtype=torch.float32), dim=-1).double().flatten(0, 1)
    loss = contrast(views, torch.tensor(LABELS).repeat(2), temperature)
    assert loss.item() == pytest.approx(RELEASE[temperature], rel=1e-6)


def test_the_loss_by_hand() -> None:
    """First views (1, 0) and (1, 1), second ones (0, 1) and (-1, 1), of labels 0 and 1; tau 0.1."""
    views = normalize(torch.tensor([[1.0, 0], [1, 1], [0, 1], [-1, 1]], dtype=torch.float64))
    assert contrast(views, torch.tensor([0, 1, 0, 1]), 0.1).item() == pytest.approx(7.418279, abs=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.floats(0.2, 2))
def test_the_loss_against_numpy(seed: int, samples: int, temperature: float) -> None:
    random = np.random.default_rng(seed)
    z, labels = random.normal(size=(2 * samples, 3)), np.tile(random.integers(3, size=samples), 2)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    loss = contrast(torch.from_numpy(z), torch.from_numpy(labels), temperature).item()
    assert loss == pytest.approx(contrast_in_numpy(z, labels, temperature), abs=1e-9)


@pytest.fixture
def uneven(splits_of: Callable[..., Splits]) -> Splits:
    return splits_of(tasks=3, clients=3, train=UNEVEN)


@pytest.mark.parametrize("replayed", [100, 4])
def test_a_clients_loss_is_of_both_views_of_new_and_stored_samples(
    replayed: int, method_of: Callable, client_of: Callable, federate: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second view is mirrored here; the projection is two matrices of NumPy."""
    monkeypatch.setattr(scr, "draw_strong_view", lambda images, _: images.flip(-1))
    method = method_of(Scr, *ONE_STEP, replayed=replayed)
    server = method.start_task(federate(method, 1), 1)
    stored = method.store_samples(client_of(method, 2), {}).memory
    client = client_of(method, 2, 1, memory=stored)
    answer = method.train(client, method.make_payload(server))

    (new,) = method.run.batches.iterate_ordered(client.rows, 64)
    old = method.run.batches.prepare_inputs(unpack_samples(stored))
    random = client.make_generator("replay")
    method.run.batches.make_device_generator(random)
    drawn = torch.randperm(len(old.labels), generator=random)[:replayed]
    network = method.networks.load(server.spec, server.weights)
    inputs = torch.cat([new.inputs, old.inputs[drawn]])
    z, W = [], {name: w.double().numpy() for name, w in server.networks["projection"].items()}
    for view in (inputs, inputs.flip(-1)):
        f = network.backbone(view).detach().double().numpy()
        h = np.maximum(f @ W["0.weight"].T + W["0.bias"], 0) @ W["2.weight"].T + W["2.bias"]
        z.append(h / np.linalg.norm(h, axis=1, keepdims=True))
    labels = torch.cat([new.labels, old.labels[drawn]]).repeat(2).numpy()
    assert answer.loss == pytest.approx(contrast_in_numpy(np.concatenate(z), labels, 0.1), rel=1e-5)
    assert not any(name.startswith("heads.") for name in answer.tensors["update"])
    assert answer.tensors["projection-update"]["0.weight"].any()
    assert all(update.any() for update in answer.tensors["update"].values())


def test_means_are_of_all_stored_samples_on_the_last_model(
    method_of: Callable, federate: Callable, uneven: Splits
) -> None:
    """Client 0, whose samples of classes 0 and 1 are from the first task, sends them on the third task's model too."""
    method = method_of(Scr, splits=uneven, memory=1000)
    server = federate(method)
    network = method.networks.load(server.spec, server.weights).eval()
    total = np.zeros((6, network.backbone.features))
    for task, client in UNEVEN:
        for batch in method.run.batches.iterate_ordered(method.select_rows(task, client), 64):
            f = network.backbone(batch.inputs).detach().double().numpy()
            np.add.at(total, batch.labels.numpy(), f / np.linalg.norm(f, axis=1, keepdims=True))
    assert_allclose(
        server.knowledge["means"]["weight"], total / np.linalg.norm(total, axis=1, keepdims=True), atol=1e-5
    )

    inputs = torch.cat([b.inputs for b in method.run.batches.iterate_ordered(method.select_rows(1, 1), 64)])
    f = network.backbone(inputs).detach().double().numpy()
    f, mu = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (f, total))
    nearest = ((f[:, None] - mu) ** 2).sum(-1).argmin(1)
    assert_allclose(method.make_predictor(server)(inputs).logits.argmax(1), nearest)


def test_a_class_that_nobody_stores_is_never_the_answer(
    method_of: Callable, federate: Callable, splits_of: Callable[..., Splits]
) -> None:
    """One stored sample for each of two clients, so that at most two of four classes have a mean."""
    method = method_of(Scr, splits=splits_of(clients=2), memory=1)
    server = federate(method)
    present = set(server.knowledge["means"]["bias"].eq(0).nonzero().flatten().tolist())
    (batch,) = method.run.batches.iterate_ordered(method.run.splits.select_rows(0, "train"), 64)
    with torch.no_grad():
        logits = method.make_predictor(server)(batch.inputs).logits
    assert set(logits.argmax(1).tolist()) <= present != set(range(4))
    started = method.make_predictor(method.start_task(federate(method, 1), 1))(batch.inputs).logits
    assert started[:, 2:].max() < -1e8  # new classes have no mean during their task


def test_columns_follow_the_heads(method_of: Callable, federate: Callable, splits_of: Callable[..., Splits]) -> None:
    """The same classes in each task and a head for each: a task's columns have the means of its own samples."""
    method = method_of(Scr, splits=splits_of(same_classes=True, head="per-task"))
    head = method.find_head(federate(method))
    assert head.sizes[0] == 4
    assert (head.weight[:2] - head.weight[2:]).norm(dim=1).min() > 1e-3


def test_a_clients_sums_stay_within_their_bound(
    method_of: Callable, client_of: Callable, federate: Callable, uneven: Splits
) -> None:
    """Noise covers them: three tasks add four samples each where each task has a memory of its own."""
    method = method_of(Scr, splits=uneven, memory=4, memory_of="each-task")
    server, memory = federate(method), {}
    for task in range(3):
        memory = method.store_samples(client_of(method, 2, task, memory=memory), {}).memory
    form = method.make_means_form(2, -1)["means"]
    answer = method.add_up_features(client_of(method, 2, 2, memory=memory), method.make_means_payload(server))
    length = sum(tensor.square().sum() for tensor in answer.tensors["means"].values()) ** 0.5
    assert form.bound == pytest.approx(12 * 2**0.5)
    assert 5 < length < form.bound


def test_it_learns_and_keeps_old_tasks(method_of: Callable, federate: Callable) -> None:
    """Over two seeds: three in four samples of both tasks right, without the task."""
    right: list[float] = []
    for seed in range(2):
        method = method_of(Scr, "federation.rounds=6", seed=seed)
        server: Server = federate(method)
        for task in range(2):
            (batch,) = method.run.batches.iterate_ordered(method.run.splits.select_test_rows(task), 64)
            answer = method.make_predictor(server)(batch.inputs).logits.argmax(1)
            right.append((answer == batch.labels).double().mean().item())
    assert np.mean(right) > 0.75
