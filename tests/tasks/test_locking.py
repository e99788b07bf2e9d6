"""Two at once: one waits, and says so."""

import threading
from pathlib import Path

from tasks.locking import locked


def test_the_second_waits_for_the_first(tmp_path: Path) -> None:
    order: list[str] = []
    path = tmp_path / "locks" / "one"
    waiting = threading.Event()

    def second() -> None:
        with locked(path, waiting.set):
            order.append("second")

    with locked(path, lambda: order.append("first waited")):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_what_fails_under_the_lock_lets_it_go(tmp_path: Path) -> None:
    taken: list[bool] = []
    try:
        with locked(tmp_path / "lock"):
            raise ValueError
    except ValueError:
        pass
    with locked(tmp_path / "lock", lambda: taken.append(True)):
        assert taken == []
