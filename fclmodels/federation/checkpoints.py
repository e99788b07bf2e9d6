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

from pydantic import BaseModel, ConfigDict, NonNegativeInt, field_validator

from fclmodels import state
from fclmodels.backbones.network import FROZEN, misfit
from fclmodels.backbones.norms import BUFFERS
from fclmodels.backbones.spec import ModelSpec
from fclmodels.errors import UserError, unprintable
from fclmodels.federation.faults import Late
from fclmodels.federation.log import Log
from fclmodels.federation.server import Server
from fclmodels.foreign import checked
from fclmodels.sealed import digest_of_file, read_sealed

LOGS = ("rounds", "ledger", "monitors")


class Commit(BaseModel):
    """What commit.json says: files by their paths from its folder on, logs by length and digest."""

    model_config = ConfigDict(extra="forbid")

    round: NonNegativeInt
    server: str
    memories: dict[str, str]
    late: dict[str, tuple[str, int, int]]
    logs: dict[str, tuple[NonNegativeInt, str]]
    digests: dict[str, str]

    @field_validator("logs")
    @classmethod
    def _all_of_them(cls, logs: dict[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
        if logs.keys() != set(LOGS):
            raise ValueError(f"it must name {', '.join(LOGS)}")
        return logs


@dataclass(frozen=True)
class Position:
    """Where a task's training stands: before round `round`.

    memories: the files of what clients remember. late: the replies on their way, by client. usual_length: of an update,
    the largest of the rounds' medians so far.
    """

    server: Server
    memories: dict[int, Path]
    round: int
    late: dict[int, Late] = field(default_factory=dict)
    usual_length: float = 0.0


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
            noted = self._commit.logs if self._commit else dict.fromkeys(LOGS, (0, ""))
            self.rounds, self.ledger, self.monitors = (
                opened.enter_context(contextlib.closing(Log(folder / f"{name}.jsonl", *noted[name]))) for name in LOGS
            )
            self._opened = opened.pop_all()

    def latest(self) -> Position | None:
        """The last position that was committed."""
        if self._commit is None:
            return None
        commit = self._commit
        for name, digest in commit.digests.items():
            file = self._file(name)
            if not file.is_file() or digest_of_file(file) != digest:
                raise UserError(f"{file} does not match its digest (changed or cut short). {self._remedy}")
        self._digests = commit.digests
        tree = state.load(self._file(commit.server))
        try:
            memories = {int(client): self._file(name) for client, name in commit.memories.items()}
            late = {int(client): Late(self._file(name), *when) for client, (name, *when) in commit.late.items()}
            usual_length = max((row.get("median") or 0.0 for row in self.rounds.rows()), default=0.0)
            return Position(Server.from_tree(tree), memories, commit.round, late, usual_length)
        except (ValueError, LookupError, TypeError, AttributeError) as problem:
            raise UserError(f"{self.folder} holds no state of a run ({problem}). {self._remedy}") from problem

    def of_model(self, spec: ModelSpec) -> Position | None:
        """The last position that was committed; UserError where it is of another model."""
        position = self.latest()
        if position is None:
            return None
        server = position.server
        if server.spec != spec or misfit(spec, server.weights, _may_lack):
            raise UserError(f"{self.folder} holds the state of another model. {self._remedy}")
        return position

    def commit(self, position: Position) -> None:
        name = f"server-{position.round}.safetensors"
        state.save(position.server.to_tree(), self.folder / name)
        files = [self.folder / name, *position.memories.values(), *(on.file for on in position.late.values())]
        self._digests = {
            file: self._digests.get(file) or digest_of_file(self.folder / file) for file in map(self._relative, files)
        }
        logs: dict[str, Log] = {log: getattr(self, log) for log in LOGS}
        self._commit = Commit(
            round=position.round,
            server=name,
            memories={str(client): self._relative(file) for client, file in position.memories.items()},
            late={str(c): (self._relative(on.file), on.base_round, on.due) for c, on in position.late.items()},
            logs={kind: (log.flush(), log.digest) for kind, log in logs.items()},
            digests=self._digests,
        )
        state.write_sealed(self.folder / "commit.json", self._commit.model_dump(mode="json"))
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

    def _file(self, name: str) -> Path:
        """What commit.json names: here, or among the memories of earlier tasks, but nothing outside of the home."""
        path = Path(os.path.normpath(self.folder / name))
        if unprintable(name) or not path.is_relative_to(os.path.normpath(self.folder.parents[1])):
            raise UserError(f"{self.folder / 'commit.json'}: {name!a} names no file of this run. {self._remedy}")
        return path

    def _read(self) -> Commit | None:
        path = self.folder / "commit.json"
        try:
            return checked(Commit, read_sealed(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as problem:
            raise UserError(f"{path} cannot be read ({problem}). {self._remedy}") from problem

    @property
    def _remedy(self) -> str:
        return f"Delete {self.folder} to train this task from its start."

    def _drop_what_is_not_named(self) -> None:
        assert self._commit is not None
        files = [*self._commit.memories.values(), *(file for file, *_ in self._commit.late.values())]
        named = {os.path.abspath(self.folder / file) for file in files}
        for file in (*self.memories.iterdir(), *self.late.iterdir()):
            if os.path.abspath(file) not in named:
                file.unlink(missing_ok=True)
        for file in self.folder.glob("server-*.safetensors"):
            if file.name != self._commit.server:
                file.unlink()


def _may_lack(name: str) -> bool:
    """What of a network a server's weights can be without: what never travels, and statistics that nobody keeps."""
    return name.startswith(FROZEN) or name.endswith(BUFFERS)
