"""The splits as the federation reads them, against the manifest filtered by hand; and what is no splits folder."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from fclmodels.data.splits.split_reader import Rows, Splits, name_command
from fclmodels.errors import UserError

UNEVEN = {(0, 0): 1, (0, 1): 5, (0, 3): 2, (1, 0): 3, (1, 2): 4}  # client 2 misses task 0; 1 and 3 miss task 1


@pytest.fixture
def splits(own_splits: Callable[..., Splits]) -> Splits:
    return own_splits(train=UNEVEN, val=2)


def as_tuples(rows: Rows) -> list[tuple[int, int, int, int]]:
    return list(zip(*(c.tolist() for c in (rows.samples, rows.labels, rows.tasks, rows.clients)), strict=True))


def by_hand(splits: Splits, task: int, split: str, client: int | None) -> list[tuple[int, int, int, int]]:
    manifest = pl.read_parquet(splits.folder / "manifest.parquet").filter(
        pl.col("task") == task, pl.col("split") == split
    )
    if client is not None:
        manifest = manifest.filter(pl.col("client") == client)
    return manifest.sort("client", "sample").select("sample", "label", "task", "client").rows()


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_rows_are_those_of_the_manifest(splits: Splits, split: str) -> None:
    for task in range(3):
        for client in (None, 0, 1, 2, 3, 9, -1):
            assert as_tuples(splits.select_rows(task, split, client)) == by_hand(splits, task, split, client)


def test_the_manifest_may_be_in_any_order(splits: Splits) -> None:
    path = splits.folder / "manifest.parquet"
    pl.read_parquet(path).sample(fraction=1, shuffle=True, seed=3).write_parquet(path)
    again = Splits.open(splits.folder)
    assert all(
        as_tuples(again.select_rows(t, "train", c)) == as_tuples(splits.select_rows(t, "train", c))
        for t in (0, 1)
        for c in (None, 0, 2)
    )


def test_who_takes_part(splits: Splits) -> None:
    assert splits.list_clients(0) == (0, 1, 3)
    assert splits.list_clients(1) == (0, 2)
    assert splits.list_clients(0, "test") == (0, 1, 2, 3)
    assert splits.list_clients(7) == ()


def test_shared_test_rows_belong_to_nobody(own_splits: Callable[..., Splits]) -> None:
    splits = own_splits(shared_test=True)
    assert splits.list_clients(0, "test") == ()
    everyone = as_tuples(splits.select_rows(0, "test"))
    assert (
        everyone
        == as_tuples(splits.select_rows(0, "test", -1))
        == as_tuples(splits.select_test_rows(0))
        == as_tuples(splits.select_test_rows(0, 2))
    )
    assert len(everyone) == 16


def test_a_task_pool_gives_shared_rows_to_those_who_know_their_class(
    own_splits: Callable[..., Splits], reopened: Callable
) -> None:
    splits = own_splits(classes=3, shared_test=True)
    facts = json.loads((splits.folder / "stream.json").read_text())
    facts["tasks"][0]["classes_by_client"] = {"0": [0, 2], "2": [1]}
    (splits.folder / "stream.json").write_text(json.dumps(facts))
    splits = reopened(splits)
    assert splits.tasks[0].list_classes(0) == (0, 2)
    assert splits.tasks[0].list_classes(None) == (0, 1, 2)
    shared = as_tuples(splits.select_rows(0, "test", -1))
    expected = {
        client: [(s, y, t, client) for s, y, t, _ in shared if y in own_classes]
        for client, own_classes in ((0, (0, 2)), (2, (1,)))
    }
    for client, rows in expected.items():
        assert as_tuples(splits.select_test_rows(0, client)) == rows
    assert as_tuples(splits.select_test_rows(0)) == expected[0] + expected[2]


def test_images_are_mapped_and_never_written_back(splits: Splits) -> None:
    path = splits.folder / "../prepared/images.npy"
    before = path.read_bytes()
    assert torch.equal(splits.images, torch.from_numpy(np.load(path)))
    assert splits.images.dtype == torch.uint8
    splits.images[0] += 1
    assert path.read_bytes() == before


def test_folders_may_move_together(splits: Splits, tmp_path: Path) -> None:
    shutil.move(splits.folder.parent, tmp_path / "elsewhere")
    moved = Splits.open(tmp_path / "elsewhere" / splits.folder.name)
    assert torch.equal(moved.images, splits.images)


def test_facts_are_those_of_the_stream(splits: Splits) -> None:
    assert (splits.clients, splits.shape, splits.head, splits.mean, splits.std) == (
        4,
        (1, 6, 6),
        "growing",
        (0.5,),
        (0.25,),
    )
    assert [(task.index, task.name, task.classes) for task in splits.tasks] == [
        (0, "task 0", (0, 1)),
        (1, "task 1", (2, 3)),
    ]
    assert splits.classes == ("class 0", "class 1", "class 2", "class 3")


def with_fact(name: str, value: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        facts = json.loads((folder / "stream.json").read_text())
        (folder / "stream.json").write_text(json.dumps(facts | {name: value}))

    return change


SPOIL: dict[str, Callable[[Path], object]] = {
    "no folder": lambda folder: shutil.rmtree(folder),
    "no stream.json": lambda folder: (folder / "stream.json").unlink(),
    "no manifest": lambda folder: (folder / "manifest.parquet").unlink(),
    "no images": lambda folder: (folder / "../prepared/images.npy").unlink(),
    "no meta.json": lambda folder: (folder / "../prepared/meta.json").unlink(),
    "stream.json cut short": lambda folder: os.truncate(folder / "stream.json", 50),
    "stream.json of another kind": lambda folder: (folder / "stream.json").write_text("[1]"),
    "stream.json without facts": lambda folder: (folder / "stream.json").write_text('{"format": 1}'),
    "manifest cut short": lambda folder: os.truncate(folder / "manifest.parquet", 60),
    "manifest of another kind": lambda folder: pl.DataFrame({"a": [1]}).write_parquet(folder / "manifest.parquet"),
    "images cut short": lambda folder: os.truncate(folder / "../prepared/images.npy", 300),
    "images of another kind": lambda folder: (folder / "../prepared/images.npy").write_text("images"),
    "pickled images": lambda folder: np.save(folder / "../prepared/images.npy", np.array([{}], dtype=object)),
    "fewer images than samples": lambda folder: np.save(
        folder / "../prepared/images.npy", np.zeros((3, 1, 6, 6), np.uint8)
    ),
    "images of another shape": lambda folder: np.save(
        folder / "../prepared/images.npy", np.zeros((99, 1, 5, 5), np.uint8)
    ),
    "images of another type": lambda folder: np.save(
        folder / "../prepared/images.npy", np.zeros((99, 1, 6, 6), np.float32)
    ),
    "meta.json of another kind": lambda folder: (folder / "../prepared/meta.json").write_text("{}"),
    "other prepared data": lambda folder: (folder / "../prepared/meta.json").write_text('{"digest": "other"}'),
    "another format": with_fact("format", 2),
}


@pytest.mark.parametrize("spoil", SPOIL.values(), ids=SPOIL)
def test_what_is_no_splits_folder_is_one_line_that_names_the_place(
    splits: Splits, spoil: Callable[[Path], object]
) -> None:
    spoil(splits.folder)
    with pytest.raises(UserError) as error:
        Splits.open(splits.folder)
    message = str(error.value)
    assert "\n" not in message
    assert str(splits.folder) in message or "prepared" in message
    assert "fcl " in message


def test_a_manifest_that_was_edited_is_refused(own_splits: Callable[..., Splits]) -> None:
    """A cached result of the old manifest would otherwise stand for the new one."""
    splits = own_splits()
    path = splits.folder / "manifest.parquet"
    pl.read_parquet(path).with_columns(client=pl.lit(0, pl.Int32)).write_parquet(path)
    with pytest.raises(UserError, match=r"do not match their digest.*fcl partition"):
        Splits.open(splits.folder)


def test_the_command_that_makes_splits_names_their_seed() -> None:
    assert name_command(Path("data/splits/3")) == "fcl partition --seed 3"
    assert name_command(Path("mine")) == "fcl partition"
