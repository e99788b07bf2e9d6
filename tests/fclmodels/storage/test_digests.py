"""Digests: their bytes are those that old files carry."""

import hashlib
from pathlib import Path

from fclmodels.storage.digests import begin_digest, digest_file, digest_folder, digest_json


def test_json_has_sorted_keys_and_json_dumps_separators() -> None:
    assert digest_json({"b": [1, 2.5], "a": None}) == hashlib.sha256(b'{"a": null, "b": [1, 2.5]}').hexdigest()


def test_a_digest_goes_on_with_bytes() -> None:
    state = begin_digest([1])
    state.update(b"more")
    assert state.hexdigest() == hashlib.sha256(b"[1]more").hexdigest()


def test_files_are_named_by_their_paths_below_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"x")
    assert digest_folder(tmp_path) == {"a/b": digest_file(tmp_path / "a" / "b")}
    assert digest_file(tmp_path / "a" / "b") == hashlib.sha256(b"x").hexdigest()
