"""LODE+FL: its two losses by hand and in NumPy, single steps of clients, and what it is at its limits."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy.special import log_softmax, logsumexp

from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Rows, Splits
from fclmodels.errors import UserError
from fclmodels.methods.er import Er
from fclmodels.methods.lode import Lode, decouple
from fclmodels.methods.parts.replay_memory import pack_samples
from fclmodels.storage import trees

# What inter_cls and intra_cls of the release's lode_er.py (10c72cd) return for these, with old classes 0 and 1.
LOGITS = ((0.4, -0.2, 1.0, 0.3), (1.5, 0.2, -0.7, 0.9), (-0.3, 2.0, 0.1, -1.1))
LABELS = (2, 3, 2)
INTER = (0.4497776524669197, 1.0747308654659653, 1.8951329841574711)
INTRA = (0.40318604888545784, 0.18390074088833888, 0.26328246733803107)
ONE_STEP = ("federation.batch_size=64", "optimizer.lr=0.1")


def test_both_losses_are_the_releases() -> None:
    logits, new = torch.tensor(LOGITS, dtype=torch.float64), torch.tensor([2, 3])
    for row, label, inter, intra in zip(logits, LABELS, INTER, INTRA, strict=True):
        assert_allclose(torch.stack(decouple(row[None], torch.tensor([label]), new)), [inter, intra], rtol=1e-12)
    both = decouple(logits, torch.tensor(LABELS), new)
    assert_allclose(torch.stack(both), [np.mean(INTER), np.mean(INTRA)], rtol=1e-12)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 5), st.integers(1, 6))
def test_they_add_up_to_the_cross_entropy(seed: int, old: int, new: int, count: int) -> None:
    """Wherever the new columns are; without old classes inter is 0."""
    random = np.random.default_rng(seed)
    logits, columns = random.normal(size=(count, old + new)) * 5, random.permutation(old + new)[:new]
    labels = random.choice(columns, count)
    inter, intra = decouple(*(torch.from_numpy(array) for array in (logits, labels, columns)))
    assert_allclose(inter + intra, -log_softmax(logits, 1)[np.arange(count), labels].mean(), atol=1e-12)
    assert inter >= 0
    assert intra >= 0
    alone, _ = decouple(torch.from_numpy(logits), torch.from_numpy(labels), torch.arange(old + new))
    assert alone == 0


@pytest.fixture
def third_task(method_of: Callable, client_of: Callable, splits_of: Callable[..., Splits]) -> Callable:
    """A method at the start of its third task, and client 0 with (or without) five stored samples."""

    def make(kind: type, stored: bool = True, **settings: float) -> tuple:
        method = method_of(kind, *ONE_STEP, splits=splits_of(tasks=3), **settings)
        server = method.create_server()
        for task in range(3):
            server = method.start_task(server, task)
        rows = [method.select_rows(task, 0).take(np.arange(size)) for task, size in enumerate((3, 2))]
        raw = method.run.batches.read_raw(Rows.concatenate(rows))
        client = client_of(method, 0, 2, memory=pack_samples(raw) if stored else None)
        return method, server, client, method.run.batches.augment_raw(raw, torch.Generator())

    return make


@pytest.mark.parametrize("stored", [True, False])
def test_a_clients_loss_against_numpy(stored: bool, third_task: Callable) -> None:
    """(rho / 2 inter + intra + H) / 2 of all eight new samples and five old ones; nothing is halved without these."""
    method, server, client, old = third_task(Lode, stored, rho=0.3)
    (new,) = method.run.batches.iterate_ordered(client.rows, 64)
    loss = method.train(client, method.make_payload(server)).loss
    network = method.networks.load(server.spec, server.weights)

    def logits_of(batch: Batch) -> np.ndarray:
        return network(batch.inputs).detach().double().numpy()

    z, y = logits_of(new), new.labels.numpy()
    assert set(y) == {4, 5}
    inner = logsumexp(z[:, 4:6], axis=1)
    expected = (0.3 / 2 * (logsumexp(z, axis=1) - inner) + inner - z[np.arange(8), y]).mean()
    if stored:
        expected = (expected - log_softmax(logits_of(old), 1)[np.arange(5), old.labels.numpy()].mean()) / 2
    assert loss == pytest.approx(expected, rel=1e-5)


def test_with_rho_of_all_earlier_tasks_it_is_er_up_to_rounding(third_task: Callable) -> None:
    updates = []
    for kind, settings in ((Er, {}), (Lode, {"rho": 2.0}), (Lode, {"rho": 0.05})):
        method, server, client, _ = third_task(kind, **settings)
        updates.append(method.train(client, method.make_payload(server)).tensors["update"])
    er, lode, other = updates
    assert max(float((er[name] - other[name]).abs().max()) for name in er) > 1e-3
    for name in er:
        torch.testing.assert_close(lode[name], er[name], rtol=1e-4, atol=1e-6)


def test_new_classes_alone_push_old_logits_down_only_through_rho(third_task: Callable) -> None:
    """With rho = 0 a new sample's gradient has no old row; ER's has."""
    method, server, client, _ = third_task(Lode, False, rho=0.0)
    update = method.train(client, method.make_payload(server)).tensors["update"]
    assert not update["heads.0.weight"][:4].any()
    assert update["heads.0.weight"][4:].any()


def test_the_first_task_is_ers_to_the_bit(method_of: Callable, federate: Callable) -> None:
    mine, er = (federate(method_of(kind), 1) for kind in (Lode, Er))
    assert trees.digest(mine.to_tree()) == trees.digest(er.to_tree())


@pytest.mark.parametrize("setting", ["model.head=per-task", "model.loss_over=task"])
def test_a_loss_that_is_not_over_all_classes_is_refused(setting: str, method_of: Callable) -> None:
    with pytest.raises(UserError, match=r"methods\.lode.*Use model\.head: growing and model\.loss_over: seen"):
        method_of(Lode, setting)
