"""Files: a folder is replaced whole or stays; of two that lock a file one waits, and says so."""

import threading
from pathlib import Path

import pytest

from fclmodels.storage.files import lock_file, replace_folder


def test_the_second_waits_for_the_first(tmp_path: Path) -> None:
    order: list[str] = []
    path = tmp_path / "locks" / "one"
    waiting = threading.Event()

    def second() -> None:
        with lock_file(path, waiting.set):
            order.append("second")

    with lock_file(path, lambda: order.append("first waited")):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_what_fails_under_the_lock_lets_it_go(tmp_path: Path) -> None:
    waits: list[bool] = []
    try:
        with lock_file(tmp_path / "lock"):
            raise ValueError
    except ValueError:
        pass
    with lock_file(tmp_path / "lock", lambda: waits.append(True)):
        assert waits == []


def test_a_folder_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name in ("old", "new"):
        with replace_folder(folder) as temporary:
            (temporary / name).touch()
    assert [file.name for file in folder.iterdir()] == ["new"]
    with pytest.raises(ZeroDivisionError), replace_folder(folder) as temporary:
        (temporary / "newer").write_text(str(1 / 0))
    assert [file.name for file in folder.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_a_kill_left_goes_and_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "disk" / ".folder.partial").mkdir(parents=True)
    (tmp_path / "disk" / ".folder.old").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "folder")
    with replace_folder(tmp_path / "link") as temporary:
        (temporary / "file").touch()
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["folder"]
