"""Checkpoints to the round: server state, clients' memories and the length of the logs, committed together.

`commit.json` is replaced in one step and names all the rest, so a kill at any moment leaves the last commit whole.
"""

import contextlib
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from fclmodels import state
from fclmodels.errors import UserError
from fclmodels.federation.log import Log
from fclmodels.federation.server import Server

NAMED = {"round", "server", "digest", "memories", "logs"}
LOGS = ("rounds", "ledger", "monitors")


@dataclass(frozen=True)
class Position:
    """Where a task's training stands: before round `round`. `memories` are the files of what clients remember."""

    server: Server
    memories: dict[int, Path]
    round: int


class Checkpoints:
    """One task's checkpoints in a folder of their own, locked while they are in use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._committed_at = time.monotonic()
        self.memories = folder / "memories"
        self.memories.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            lock = opened.enter_context(open(folder / "lock", "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{folder} is in use by another run of the same experiment. Wait for it, or stop it."
                ) from None
            self._commit = self._read()
            lengths = self._commit["logs"] if self._commit else dict.fromkeys(LOGS, 0)
            self.rounds, self.ledger, self.monitors = (
                opened.enter_context(contextlib.closing(Log(folder / f"{name}.jsonl", lengths[name]))) for name in LOGS
            )
            self._opened = opened.pop_all()

    def latest(self) -> Position | None:
        """The last position that was committed."""
        if self._commit is None:
            return None
        tree = state.load(self.folder / self._commit["server"])
        if state.digest(tree) != self._commit["digest"]:
            raise UserError(
                f"{self.folder / self._commit['server']} does not match its digest (changed or cut short). "
                f"Delete {self.folder} to train this task from its start."
            )
        memories = {int(client): self.folder / file for client, file in self._commit["memories"].items()}
        return Position(Server.from_tree(tree), memories, self._commit["round"])

    def commit(self, position: Position) -> None:
        tree = position.server.to_tree()
        name = f"server-{position.round}.safetensors"
        state.save(tree, self.folder / name)
        self._commit = {
            "round": position.round,
            "server": name,
            "digest": state.digest(tree),
            "memories": {str(client): os.path.relpath(file, self.folder) for client, file in position.memories.items()},
            "logs": {name: getattr(self, name).flush() for name in LOGS},
        }
        state.write_json(self.folder / "commit.json", self._commit)
        self._committed_at = time.monotonic()
        self._drop_what_is_not_named()

    @property
    def age(self) -> float:
        """Seconds since the last commit, or since these were opened."""
        return time.monotonic() - self._committed_at

    def close(self) -> None:
        self._opened.close()

    def _read(self) -> dict | None:
        path = self.folder / "commit.json"
        try:
            commit = json.loads(path.read_text())
            if commit.keys() != NAMED:
                raise ValueError(f"it must hold {', '.join(sorted(NAMED))}")
            return commit
        except FileNotFoundError:
            return None
        except (ValueError, AttributeError) as problem:
            raise UserError(
                f"{path} cannot be read ({problem}). Delete {self.folder} to train this task from its start."
            ) from problem

    def _drop_what_is_not_named(self) -> None:
        assert self._commit is not None
        named = {os.path.abspath(self.folder / file) for file in self._commit["memories"].values()}
        for file in self.memories.iterdir():
            if os.path.abspath(file) not in named:
                file.unlink(missing_ok=True)
        for file in self.folder.glob("server-*.safetensors"):
            if file.name != self._commit["server"]:
                file.unlink()
