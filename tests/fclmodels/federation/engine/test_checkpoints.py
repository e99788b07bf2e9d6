"""Checkpoints: the last commit is whole whatever came after it, and nobody else writes beside it."""

import json
import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.errors import UserError
from fclmodels.federation.engine.checkpoints import Checkpoints, Position
from fclmodels.federation.engine.journal import Log
from fclmodels.federation.server import Server
from fclmodels.storage import trees

SPEC = ModelSpec({"backbone": "mlp"}, (1, 2, 2), "growing", ((0, 1), (2,)))


def server(value: float) -> Server:
    return Server(SPEC, {"w": torch.full((3,), value)}, task=1, knowledge={"bases": [torch.ones(2)], "n": 3})


@given(rows=st.lists(st.dictionaries(st.text(max_size=3), st.integers(), max_size=2), max_size=6), data=st.data())
def test_a_log_goes_on_from_the_length_that_was_noted(
    rows: list[dict[str, int]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    noted = data.draw(st.integers(0, len(rows)))
    log, length, digest = Log(path), 0, ""
    for number, row in enumerate(rows, start=1):
        log.append(row)
        length, digest = (log.flush(), log.digest) if number == noted else (length, digest)
    log.close()
    log = Log(path, length, digest)
    assert log.flush() == length
    assert log.read_rows() == rows[:noted]
    log.append({"z": 1})
    assert log.flush() == path.stat().st_size
    assert log.read_rows() == [*rows[:noted], {"z": 1}]
    log.close()


def commit(folder: Path, *rounds: int) -> None:
    checkpoints = Checkpoints(folder)
    for number in rounds:
        memory = checkpoints.memories / f"5-{number}"
        trees.save({"seen": torch.tensor(number)}, memory)
        checkpoints.rounds.append({"round": number})
        checkpoints.commit(Position(server(number), {5: memory}, number))
    checkpoints.close()


def test_the_last_commit_is_what_is_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load_latest() is None
    checkpoints.close()
    commit(tmp_path, 1, 2, 3)
    checkpoints = Checkpoints(tmp_path)
    position = checkpoints.load_latest()
    assert position is not None
    assert position.round == 3
    assert trees.digest(position.server.to_tree()) == trees.digest(server(3).to_tree())
    assert position.server.spec == SPEC
    assert {client: trees.load(file)["seen"].item() for client, file in position.memories.items()} == {5: 3}
    assert [row["round"] for row in checkpoints.rounds.read_rows()] == [1, 2, 3]
    checkpoints.close()


def test_what_no_commit_names_is_dropped_or_passed_over(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    first = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    commit(tmp_path, 2)
    trees.save(server(9).to_tree(), tmp_path / "server-3.safetensors")  # written, but the commit did not follow
    (tmp_path / "memories" / ".5-3.tmp").write_text("half")
    with open(tmp_path / "rounds.jsonl", "a") as file:
        file.write('{"round": 3}\n{"rou')
    checkpoints = Checkpoints(tmp_path)
    position = checkpoints.load_latest()
    assert position is not None
    assert position.round == 2
    assert [row["round"] for row in checkpoints.rounds.read_rows()] == [1, 2]
    checkpoints.commit(position)
    checkpoints.close()
    names = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert {name.replace("2", "1") for name in names} == first


def test_a_memory_of_the_last_commit_stays_until_the_next_one(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    checkpoints = Checkpoints(tmp_path)
    trees.save({"seen": torch.tensor(2)}, checkpoints.memories / "5-2")  # a round that is never committed
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path)
    position = checkpoints.load_latest()
    assert position is not None
    assert trees.load(position.memories[5])["seen"].item() == 1
    checkpoints.close()


def test_a_checkpoint_survives_a_move_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home given as a relative path belongs to the folder, not to where a command was started."""
    monkeypatch.chdir(tmp_path)
    commit(Path("home/task"), 1)
    os.rename(tmp_path / "home", tmp_path / "moved")
    monkeypatch.chdir("/")
    checkpoints = Checkpoints(tmp_path / "moved" / "task")
    position = checkpoints.load_latest()
    assert position is not None
    assert trees.load(position.memories[5])["seen"].item() == 1
    checkpoints.close()


SPOIL: dict[str, Callable[[Path], object]] = {
    "commit.json cut short": lambda folder: os.truncate(folder / "commit.json", 30),
    "commit.json empty": lambda folder: os.truncate(folder / "commit.json", 0),
    "commit.json of another kind": lambda folder: (folder / "commit.json").write_text("[]"),
    "commit.json without facts": lambda folder: (folder / "commit.json").write_text("{}"),
    "server cut short": lambda folder: os.truncate(folder / "server-1.safetensors", 100),
    "server changed": lambda folder: trees.save(server(2).to_tree(), folder / "server-1.safetensors"),
    "server missing": lambda folder: (folder / "server-1.safetensors").unlink(),
    "log missing": lambda folder: (folder / "rounds.jsonl").unlink(),
    "memory changed": lambda folder: trees.save({"seen": torch.tensor(7)}, folder / "memories" / "5-1"),
    "log changed": lambda folder: (folder / "rounds.jsonl").write_text('{"round": 7}\n'),
    "commit.json changed": lambda folder: (folder / "commit.json").write_text(
        (folder / "commit.json").read_text().replace('"round": 1', '"round": 0')
    ),
    "log cut short": lambda folder: os.truncate(folder / "rounds.jsonl", 3),
}


@pytest.mark.parametrize("spoil", SPOIL.values(), ids=SPOIL)
def test_a_spoilt_checkpoint_is_one_line_that_names_the_folder(spoil: Callable[[Path], object], tmp_path: Path) -> None:
    commit(tmp_path, 1)
    spoil(tmp_path)
    for _ in range(2):
        with pytest.raises(UserError, match=str(tmp_path)) as error, closing(Checkpoints(tmp_path)) as checkpoints:
            checkpoints.load_latest()
        assert "\n" not in str(error.value)


def test_abandoned_checkpoints_go_after_their_days(tmp_path: Path) -> None:
    commit(tmp_path / "old", 1)
    commit(tmp_path / "new", 1)
    before = time.time() - 5 * 86400
    os.utime(tmp_path / "old" / "lock", (before, before))
    Checkpoints.drop_abandoned(tmp_path, days=6)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["new", "old"]
    Checkpoints.drop_abandoned(tmp_path, days=4)
    assert [folder.name for folder in tmp_path.iterdir()] == ["new"]


def test_a_second_user_is_refused_in_one_line_while_the_first_is_at_work(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    first = Checkpoints(tmp_path)
    first.rounds.append({"round": 2})
    with pytest.raises(UserError, match="in use by another run") as error:
        Checkpoints(tmp_path)
    assert "\n" not in str(error.value)
    assert [row["round"] for row in first.rounds.read_rows()] == [1, 2]
    first.close()
    Checkpoints(tmp_path).close()
    assert json.loads((tmp_path / "commit.json").read_text())["round"] == 1
