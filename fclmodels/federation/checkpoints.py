"""Checkpoints to the round: server state, clients' memories, late replies and the length of the logs, all at once.

`commit.json` is replaced in one step and names all the rest with its digest, so a kill at any moment leaves the last
commit whole, and what was changed or cut short since is found out before it is used.
"""

import contextlib
import fcntl
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from fclmodels import state
from fclmodels.errors import UserError
from fclmodels.federation.faults import Late
from fclmodels.federation.log import Log
from fclmodels.federation.server import Server

NAMED = {"round", "server", "memories", "late", "logs", "digests"}
LOGS = ("rounds", "ledger", "monitors")


@dataclass(frozen=True)
class Position:
    """Where a task's training stands: before round `round`.

    memories: the files of what clients remember. late: the replies on their way, by client.
    """

    server: Server
    memories: dict[int, Path]
    round: int
    late: dict[int, Late] = field(default_factory=dict)


class Checkpoints:
    """One task's checkpoints in a folder of their own, locked while they are in use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._committed_at = time.monotonic()
        self._digests: dict[str, str] = {}  # of files that have been committed, by the path that a commit names
        self.memories, self.late = folder / "memories", folder / "late"
        for kept in (self.memories, self.late):
            kept.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            lock = opened.enter_context(open(folder / "lock", "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{folder} is in use by another run of the same experiment. Wait for it, or stop it."
                ) from None
            self._commit = self._read()
            noted = self._commit["logs"] if self._commit else dict.fromkeys(LOGS, (0, ""))
            self.rounds, self.ledger, self.monitors = (
                opened.enter_context(contextlib.closing(Log(folder / f"{name}.jsonl", *noted[name]))) for name in LOGS
            )
            self._opened = opened.pop_all()

    def latest(self) -> Position | None:
        """The last position that was committed."""
        if self._commit is None:
            return None
        for file, digest in self._commit["digests"].items():
            if not (self.folder / file).exists() or state.digest_of_file(self.folder / file) != digest:
                raise UserError(
                    f"{self.folder / file} does not match its digest (changed or cut short). "
                    f"Delete {self.folder} to train this task from its start."
                )
        self._digests = self._commit["digests"]
        tree = state.load(self.folder / self._commit["server"])
        memories = {int(client): self.folder / file for client, file in self._commit["memories"].items()}
        late = {int(client): Late(self.folder / file, *when) for client, (file, *when) in self._commit["late"].items()}
        return Position(Server.from_tree(tree), memories, self._commit["round"], late)

    def commit(self, position: Position) -> None:
        name = f"server-{position.round}.safetensors"
        state.save(position.server.to_tree(), self.folder / name)
        files = [self.folder / name, *position.memories.values(), *(on.file for on in position.late.values())]
        self._digests = {
            file: self._digests.get(file) or state.digest_of_file(self.folder / file)
            for file in map(self._relative, files)
        }
        logs: dict[str, Log] = {log: getattr(self, log) for log in LOGS}
        self._commit = {
            "round": position.round,
            "server": name,
            "memories": {str(client): self._relative(file) for client, file in position.memories.items()},
            "late": {str(c): [self._relative(on.file), on.base_round, on.due] for c, on in position.late.items()},
            "logs": {kind: [log.flush(), log.digest] for kind, log in logs.items()},
            "digests": self._digests,
        }
        state.write_sealed(self.folder / "commit.json", self._commit)
        self._committed_at = time.monotonic()
        self._drop_what_is_not_named()

    @property
    def age(self) -> float:
        """Seconds since the last commit, or since these were opened."""
        return time.monotonic() - self._committed_at

    def close(self) -> None:
        self._opened.close()

    @staticmethod
    def drop_abandoned(home: Path, days: float) -> None:
        """Those that nobody has opened for so long: of a task that was never learned as it was begun."""
        for lock in home.glob("*/lock"):
            if time.time() - lock.stat().st_mtime > days * 86400:
                shutil.rmtree(lock.parent, ignore_errors=True)

    def _relative(self, file: Path) -> str:
        return os.path.relpath(file, self.folder)

    def _read(self) -> dict | None:
        path = self.folder / "commit.json"
        try:
            commit = state.read_sealed(path)
            if commit.keys() != NAMED:
                raise ValueError(f"it must hold {', '.join(sorted(NAMED))}")
            return commit
        except FileNotFoundError:
            return None
        except ValueError as problem:
            raise UserError(
                f"{path} cannot be read ({problem}). Delete {self.folder} to train this task from its start."
            ) from problem

    def _drop_what_is_not_named(self) -> None:
        assert self._commit is not None
        files = [*self._commit["memories"].values(), *(file for file, *_ in self._commit["late"].values())]
        named = {os.path.abspath(self.folder / file) for file in files}
        for file in (*self.memories.iterdir(), *self.late.iterdir()):
            if os.path.abspath(file) not in named:
                file.unlink(missing_ok=True)
        for file in self.folder.glob("server-*.safetensors"):
            if file.name != self._commit["server"]:
                file.unlink()
