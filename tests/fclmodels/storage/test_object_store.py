"""The store: what is read is what was put, or an error that says what to delete."""

import json
import os
import time
from pathlib import Path

import polars as pl
import pytest
import torch

from fclmodels.errors import UserError
from fclmodels.storage import trees
from fclmodels.storage.object_store import Store
from fclmodels.storage.sealed_json import read_sealed

TREE = {"weights": {"a": torch.arange(6.0).view(2, 3)}, "task": 1}
TABLE = pl.DataFrame({"task": [0, 1], "loss": [0.5, None], "part": ["a", "b"]})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_an_object_is_named_by_its_content(store: Store) -> None:
    digest = store.put(TREE)
    assert digest == trees.digest(TREE)
    assert torch.equal(store.get(digest)["weights"]["a"], TREE["weights"]["a"])
    assert store.put({"task": 1, "weights": {"a": TREE["weights"]["a"].clone()}}) == digest
    assert store.put(TREE | {"task": 2}) != digest


def test_what_is_there_is_not_written_again(store: Store) -> None:
    digests = [store.put(TREE), store.put_table(TABLE)]
    before = [store.find_path(digest).stat().st_ino for digest in digests]
    assert [store.put(TREE), store.put_table(TABLE)] == digests
    assert [store.find_path(digest).stat().st_ino for digest in digests] == before


def test_a_file_is_adopted_under_the_name_that_its_tree_would_get(store: Store, tmp_path: Path) -> None:
    trees.save(TREE, tmp_path / "memory.safetensors")
    digest = store.adopt(tmp_path / "memory.safetensors")
    assert digest == trees.digest(TREE)
    (tmp_path / "memory.safetensors").unlink()
    assert store.get(digest)["task"] == 1
    assert store.adopt(store.find_path(digest)) == digest


def test_a_table_comes_back_whole(store: Store) -> None:
    digest = store.put_table(TABLE)
    back = store.get_table(digest)
    assert back.equals(TABLE)
    assert back.schema == TABLE.schema
    assert store.put_table(TABLE.with_columns(task=pl.col("task") + 1)) != digest


def test_nothing_changed_is_ever_read_as_if_it_were_not(store: Store) -> None:
    tree, table = store.put(TREE), store.put_table(TABLE)
    for digest, read in ((tree, store.get), (table, store.get_table)):
        file = store.find_path(digest)
        content = file.read_bytes()
        for place in range(0, len(content), 3):
            flip(file, place)
            with pytest.raises(UserError, match=digest):
                read(digest)
            file.write_bytes(content)
        file.write_bytes(content[:-1])
        with pytest.raises(UserError, match=digest):
            read(digest)
        file.unlink()
        with pytest.raises(UserError, match=f"{digest} is missing"):
            read(digest)


def test_an_outcome_is_recalled_while_all_that_it_names_is_there(store: Store) -> None:
    assert store.recall("key") is None
    outcome = {"objects": {"state": store.put(TREE), "rounds": store.put_table(TABLE)}, "seconds": 0.5}
    store.record("key", outcome)
    assert store.recall("key") == outcome
    assert store.recall("other") is None
    store.find_path(outcome["objects"]["rounds"]).unlink()
    assert store.recall("key") is None


@pytest.mark.parametrize(
    "content", ["", '{"objects": {', "[]", '{"seconds": 1}', "\0\0", '{"objects": {}, "seconds": 1.5}']
)
def test_a_spoilt_record_is_an_error_that_names_it(store: Store, content: str) -> None:
    store.record("key", {"objects": {}, "seconds": 0.5})
    file = store.root / "done" / "key.json"
    file.write_text(content)
    with pytest.raises(UserError, match=str(file)):
        store.recall("key")


def test_what_is_forgotten_is_gone_with_the_records_that_name_it(store: Store) -> None:
    tree, table = store.put(TREE), store.put_table(TABLE)
    store.record("state", {"objects": {"state": tree, "rounds": table}})
    store.record("table", {"objects": {"rounds": table}})
    assert store.forget([tree, "0" * 64]) == ["state"]
    assert not store.has(tree)
    assert store.recall("state") is None
    assert store.recall("table") == {"objects": {"rounds": table}}


def test_a_digit_that_changes_no_number_is_a_change(store: Store) -> None:
    """7.3776874061001925 and 7.3776874061001924 are the same double."""
    store.record("key", {"objects": {}, "seconds": 7.3776874061001925})
    file = store.root / "done" / "key.json"
    assert store.recall("key") == {"objects": {}, "seconds": 7.3776874061001925}
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"7.3776874061001925", b"7.3776874061001924"))
    assert json.loads(file.read_bytes()) == json.loads(whole)
    with pytest.raises(UserError, match=r"key\.json cannot be read"):
        store.recall("key")


def test_what_no_record_names_goes_after_its_days(store: Store) -> None:
    named, other, new = store.put(TREE), store.put({"old": 1}), store.put({"new": 1})
    store.record("key", {"objects": {"state": named}})
    before = time.time() - 5 * 86400
    for digest in (named, other):
        os.utime(store.find_path(digest), (before, before))
    store.drop_abandoned(days=6)
    assert all(map(store.has, (named, other, new)))
    store.drop_abandoned(days=4)
    assert [store.has(digest) for digest in (named, other, new)] == [True, False, True]


def test_nothing_but_whole_objects_is_left_behind(store: Store, tmp_path: Path) -> None:
    trees.save(TREE, tmp_path / "memory")
    digests = {store.put(TREE), store.adopt(tmp_path / "memory"), store.put_table(TABLE)}
    store.record("key", {"objects": {}})
    with pytest.raises(TypeError):
        store.put({"a": {1, 2}})
    files = {file.name for _, _, files in os.walk(store.root) for file in map(Path, files)}
    assert files == digests | {"key.json"}
    assert read_sealed(store.root / "done" / "key.json") == {"objects": {}}
