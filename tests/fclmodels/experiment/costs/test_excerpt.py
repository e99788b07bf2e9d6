"""An excerpt is splits of their own: fewer tasks, clients and rows, of the same samples."""

import json
from collections.abc import Callable
from pathlib import Path

from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.costs.excerpt import choose_typical_clients, write_excerpt

SIZES = {(task, client): 2 + 3 * client for task in range(3) for client in range(6) if (task, client) != (0, 5)}


def test_clients_from_the_smallest_to_the_largest(splits_of: Callable[..., Splits]) -> None:
    splits = splits_of(tasks=3, clients=6, train=SIZES)
    assert choose_typical_clients(splits, 3, 3) == [0, 2, 4]  # the last has no rows of the first task
    assert choose_typical_clients(splits, 1, 9) == [0, 1, 2, 3, 4]


def test_it_holds_the_same_samples_of_fewer_tasks_clients_and_rows(
    splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    splits = splits_of(tasks=3, clients=6, train=SIZES, test=5, shared_test=True)
    excerpt = write_excerpt(splits, tmp_path / "excerpt", 2, [1, 4], most_rows=6)
    assert (len(excerpt.tasks), excerpt.clients, excerpt.list_clients(1)) == (2, 2, (0, 1))
    for task in range(2):
        assert len(excerpt.select_rows(task, "test", -1)) == 6
        for client, former in enumerate([1, 4]):
            rows, before = (of.select_rows(task, "train", who) for of, who in ((excerpt, client), (splits, former)))
            assert len(rows) == min(6, len(before))
            assert set(rows.samples) <= set(before.samples)
    assert excerpt.images[0].equal(splits.images[0])


def test_a_pool_without_limits_keeps_the_classes_of_its_clients(
    splits_of: Callable[..., Splits], tmp_path: Path, reopened: Callable[[Splits], Splits]
) -> None:
    splits = splits_of(tasks=2, clients=3, train=7)
    file = splits.folder / "stream.json"
    whole = file.read_text()
    facts = json.loads(whole)
    for task in facts["tasks"]:
        task["classes_by_client"] = {str(client): task["classes"][:1] for client in range(3)}
    file.write_text(json.dumps(facts))
    try:
        excerpt = write_excerpt(reopened(splits), tmp_path / "excerpt", 1, [2], most_rows=5)
    finally:
        file.write_text(whole)
    assert excerpt.tasks[0].classes_by_client == {0: (0,)}
