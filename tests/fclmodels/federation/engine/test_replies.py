"""Replies: the same sum to the bit whoever answers first, few partial sums, few bytes in memory."""

import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fclmodels.federation.engine import replies as holding
from fclmodels.federation.engine.replies import Replies, TreeSum
from fclmodels.federation.messages import Part, Reply


def values(n: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(seed)
    spread = [
        {"w": torch.randn(3, 2, generator=random) * 10.0 ** (i % 7 - 3), "b": torch.randn(2, generator=random)}
        for i in range(n)
    ]
    return [value | {"n": torch.tensor(float(i), dtype=torch.float64)} for i, value in enumerate(spread)]


def summed(
    terms: list[dict[str, torch.Tensor]], order: list[int], spool: Path | None = None
) -> dict[str, torch.Tensor]:
    total = TreeSum(len(terms), spool)
    for index in order:
        total.add(index, terms[index])
    return total.compute_sum()


@given(n=st.integers(1, 40), seed=st.integers(0, 99), data=st.data())
def test_the_sum_has_the_same_bits_in_any_order_of_arrival(n: int, seed: int, data: st.DataObject) -> None:
    terms = values(n, seed)
    expected = summed(terms, list(range(n)))
    order = data.draw(st.permutations(range(n)))
    got = summed(terms, order)
    with tempfile.TemporaryDirectory() as spool:
        of_files = summed(terms, order, Path(spool))
    for other in (got, of_files):
        assert all(torch.equal(other[name], expected[name]) for name in expected)
    for name in expected:
        exact = np.sum([term[name].double().numpy() for term in terms], axis=0)
        np.testing.assert_allclose(got[name].numpy(), exact, rtol=1e-5, atol=1e-3 if name == "w" else 1e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 20, 1000])
def test_few_partial_sums_wait_at_any_time(n: int) -> None:
    """In the order of the tree, or nearly so as when several workers race."""
    orders = [list(range(n)), sorted(range(n), key=lambda i: i + 5 * (i % 3))]
    for order in orders:
        total, most = TreeSum(n), 0
        for index in order:
            total.add(index, {"w": torch.ones(1)})
            most = max(most, len(total._waiting))
        assert most <= math.log2(n) + 6
        assert total.compute_sum()["w"].item() == n


@pytest.mark.parametrize("n", [16, 17, 100, 1000])
def test_what_waits_in_memory_does_not_grow_with_the_clients(n: int, tmp_path: Path) -> None:
    total, most = TreeSum(n, tmp_path), 0
    for index in range(n):
        total.add(index, {"w": torch.ones(1)})
        of_many = {f"{level}-{place}" for level, place in total._waiting if 4 <= level < math.log2(n)}
        assert of_many <= {file.name for file in tmp_path.iterdir()}
        most = max(most, len(total._waiting) - len(of_many))
    assert most <= 4
    assert total.compute_sum()["w"].item() == n


def test_a_sum_keeps_its_own_copy_of_what_it_was_given() -> None:
    """Replies are views of shared memory that the next answer overwrites."""
    shared = torch.zeros(2)
    total = TreeSum(3)
    for index in (2, 0, 1):
        shared.fill_(index + 1)
        total.add(index, {"w": shared})
    shared.fill_(99)
    assert total.compute_sum()["w"].tolist() == [6, 6]
    assert shared.tolist() == [99, 99]


def reply(client: int, least: str = "each") -> Reply:
    part = Part("basis", {"b": torch.tensor([float(client), 1.0])}, least)
    return Reply(
        {"basis": part, "count": Part("count", {"n": torch.tensor(1.0)})}, loss=0.1 * client + 1 / 3, samples=client + 1
    )


CLIENTS = [7, 3, 11, 5, 2]


def test_single_replies_can_be_read_again_and_again_in_the_order_of_ids(tmp_path: Path) -> None:
    replies = Replies(CLIENTS, tmp_path)
    for client in CLIENTS:
        replies.add(client, reply(client))
    for _ in range(2):
        each = list(replies.yield_each("basis"))
        assert [client for client, _ in each] == sorted(CLIENTS)
        assert [tensors["b"].tolist() for _, tensors in each] == [[client, 1.0] for client in sorted(CLIENTS)]
    assert replies.sum("basis")["b"].tolist() == [sum(CLIENTS), len(CLIENTS)]
    assert replies.sum("count")["n"].item() == len(CLIENTS)


def test_a_part_has_the_same_sum_whether_it_is_spooled_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terms = values(7)
    sums = []
    for room in (0, 100, 10**6):
        monkeypatch.setattr(holding, "IN_MEMORY", room)
        replies = Replies(range(7), tmp_path / str(room))
        for client in (4, 0, 6, 2, 1, 5, 3):
            replies.add(client, Reply({"update": Part("update", terms[client])}))
        sums.append(replies.sum("update"))
    assert all(torch.equal(sums[0][name], other[name]) for other in sums for name in terms[0])


def test_only_what_memory_has_no_room_for_goes_to_disk_under_names_of_the_servers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "IN_MEMORY", 20)
    replies = Replies([0, 1], tmp_path / "spool")
    for client in (0, 1):
        part = Part("basis", {"b": torch.full((4,), float(client))}, "each")
        replies.add(client, Reply({"../../basis": part}))
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["0"]
    assert [tensors["b"].tolist() for _, tensors in replies.yield_each("../../basis")] == [[0.0] * 4, [1.0] * 4]


def test_what_is_dropped_is_as_if_it_had_not_come(tmp_path: Path) -> None:
    both = [Replies(clients, tmp_path / str(len(clients))) for clients in (CLIENTS, [7, 3, 11, 2])]
    for client in CLIENTS:
        both[0].add(client, reply(client))
        if client != 5:
            both[1].add(client, reply(client))
    both[0].drop(5)
    assert all(
        torch.equal(both[0].sum(part)[n], t) for part in ("basis", "count") for n, t in both[1].sum(part).items()
    )
    assert both[0].loss == both[1].loss
    assert [client for client, _ in both[0].yield_each("basis")] == [2, 3, 7, 11]


@given(order=st.permutations(CLIENTS))
def test_the_logged_loss_does_not_depend_on_who_answers_first(
    order: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    replies = Replies(CLIENTS, tmp_path_factory.getbasetemp() / "spool")
    for client in order:
        replies.add(client, reply(client, "sum"))
    in_order = [reply(client) for client in sorted(CLIENTS)]
    samples = sum(r.samples for r in in_order)
    assert replies.loss == sum(r.loss * r.samples for r in in_order) / samples


def test_the_noise_of_a_sum_is_that_of_independent_terms(tmp_path: Path) -> None:
    """Of a reply that counts half, half."""
    replies = Replies((3, 5), tmp_path)
    for client, weight, noise in ((3, 1.0, 3.0), (5, 0.5, 8.0)):
        part = Part("update", {"w": torch.ones(2)}, noise=noise)
        replies.add(client, Reply({"update": part}), weight)
    assert replies.compute_noise("update") == 5.0
    assert replies.loss is None
