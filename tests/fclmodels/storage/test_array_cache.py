"""Files written through maps: a disk without room is an error that names the file, and nothing half-made stays."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.messages import Part, Reply
from fclmodels.storage.array_cache import create_array
from fclmodels.storage.files import reserve


def test_a_new_array_is_of_zeros_and_has_its_room(tmp_path: Path) -> None:
    array = create_array(tmp_path / "a.npy", np.float32, (1000, 30))
    assert not array.any()
    array[7] = 1
    array.flush()
    assert np.load(tmp_path / "a.npy").sum() == 30
    assert os.stat(tmp_path / "a.npy").st_blocks * 512 >= 120_000


def test_a_file_that_is_long_enough_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"words")
    with open(file, "r+b") as opened:
        reserve(opened.fileno(), 3)
        assert file.read_bytes() == b"words"
        reserve(opened.fileno(), 7)
    assert file.read_bytes() == b"words\0\0"


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room, raising=False)


@pytest.mark.usefixtures("full")
def test_a_full_disk_is_told_with_the_file_that_has_no_room(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left on device.*a\.npy"):
        create_array(tmp_path / "a.npy", np.float32, (1000,))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("full")
def test_replies_without_room_are_told_with_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fclmodels.federation.engine.replies.IN_MEMORY", 0)
    replies = Replies([0], tmp_path)
    with pytest.raises(OSError, match=r"No space left on device"):
        replies.add(0, Reply({"basis": Part("basis", {"b": torch.ones(100)}, "each")}))
