"""Checkpoints after rounds: server state, clients' memories, late replies and the length of the logs, all at once.

`commit.json` is replaced in one step and names all other files with their digests: a kill at any moment leaves the last
commit complete, and a file that was changed or cut short since is refused before it is used.
"""

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt, field_validator

from fclmodels.backbones.layers.norms import BUFFERS
from fclmodels.backbones.model.network import FROZEN, find_misfit
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.errors import UserError, is_unprintable
from fclmodels.federation.engine.faults import Late
from fclmodels.federation.engine.journal import Log
from fclmodels.federation.engine.rounds import Position
from fclmodels.federation.server import Server
from fclmodels.storage import trees
from fclmodels.storage.digests import digest_file
from fclmodels.storage.sealed_json import read_sealed, write_sealed
from fclmodels.storage.untrusted import validate

LOGS = ("rounds", "ledger", "monitors", "costs")


class Commit(BaseModel):
    """The content of commit.json. Paths of files are relative to its folder."""

    model_config = ConfigDict(extra="forbid")

    round: NonNegativeInt  # the next one
    server: str  # file of the server's state
    memories: dict[str, str]  # files, by client
    late: dict[str, tuple[str, int, int]]  # by client: file, base round, and the round in which the reply is due
    logs: dict[str, tuple[NonNegativeInt, str]]  # by name: length in bytes, and digest
    digests: dict[str, str]  # of all these files but the logs

    @field_validator("logs")
    @classmethod
    def _require_all_logs(cls, logs: dict[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
        if logs.keys() != set(LOGS):
            raise ValueError(f"it must name {', '.join(LOGS)}")
        return logs


class Checkpoints:
    """One task's checkpoints in a folder of their own, locked while they are in use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._committed_at = time.monotonic()
        self._digests: dict[str, str] = {}  # of files that have been committed, by the path that a commit names
        self.memories, self.late = folder / "memories", folder / "late"
        for subfolder in (self.memories, self.late):
            subfolder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            lock = opened.enter_context(open(folder / "lock", "w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{folder} is in use by another run of the same experiment. Wait for it, or stop it."
                ) from None
            self._commit = self._read()
            ends = self._commit.logs if self._commit else dict.fromkeys(LOGS, (0, ""))
            self.rounds, self.ledger, self.monitors, self.costs = (
                opened.enter_context(contextlib.closing(Log(folder / f"{name}.jsonl", *ends[name]))) for name in LOGS
            )
            self._opened = opened.pop_all()

    def load_latest(self) -> Position | None:
        """Return the last position that was committed; UserError where a file of it is damaged."""
        if self._commit is None:
            return None
        commit = self._commit
        for name, digest in commit.digests.items():
            file = self._find_file(name)
            if not file.is_file() or digest_file(file) != digest:
                raise UserError(f"{file} does not match its digest (changed or cut short). {self._remedy}")
        self._digests = commit.digests
        tree = trees.load(self._find_file(commit.server))
        try:
            memories = {int(client): self._find_file(name) for client, name in commit.memories.items()}
            late = {int(client): Late(self._find_file(name), *when) for client, (name, *when) in commit.late.items()}
            usual_length = max((row.get("median") or 0.0 for row in self.rounds.read_rows()), default=0.0)
            return Position(Server.from_tree(tree), memories, commit.round, late, usual_length)
        except (ValueError, LookupError, TypeError, AttributeError) as problem:
            raise UserError(f"{self.folder} holds no state of a run ({problem}). {self._remedy}") from problem

    def load_for_model(self, spec: ModelSpec) -> Position | None:
        """Return the last position that was committed; UserError where it is of another model."""
        position = self.load_latest()
        if position is None:
            return None
        server = position.server
        if server.spec != spec or find_misfit(spec, server.weights, _may_lack):
            raise UserError(f"{self.folder} holds the state of another model. {self._remedy}")
        return position

    def commit(self, position: Position) -> None:
        """Write a position, then commit.json, which names its files; drop files that it does not name."""
        name = f"server-{position.round}.safetensors"
        trees.save(position.server.to_tree(), self.folder / name)
        files = [self.folder / name, *position.memories.values(), *(late.file for late in position.late.values())]
        self._digests = {
            file: self._digests.get(file) or digest_file(self.folder / file) for file in map(self._make_relative, files)
        }
        logs: dict[str, Log] = {log: getattr(self, log) for log in LOGS}
        self._commit = Commit(
            round=position.round,
            server=name,
            memories={str(client): self._make_relative(file) for client, file in position.memories.items()},
            late={str(c): (self._make_relative(r.file), r.base_round, r.due) for c, r in position.late.items()},
            logs={kind: (log.flush(), log.digest) for kind, log in logs.items()},
            digests=self._digests,
        )
        write_sealed(self.folder / "commit.json", self._commit.model_dump(mode="json"))
        self._committed_at = time.monotonic()
        self._drop_unnamed_files()

    @property
    def age(self) -> float:
        """The seconds since the last commit, or since these checkpoints were opened."""
        return time.monotonic() - self._committed_at

    def close(self) -> None:
        self._opened.close()

    @staticmethod
    def drop_abandoned(home: Path, days: float) -> None:
        """Delete checkpoints that nobody has opened for so many days: of training that was given up."""
        for lock in home.glob("*/lock"):
            if time.time() - lock.stat().st_mtime > days * 86400:
                shutil.rmtree(lock.parent, ignore_errors=True)

    def _make_relative(self, file: Path) -> str:
        return os.path.relpath(file, self.folder)

    def _find_file(self, name: str) -> Path:
        """Return the path of a file that commit.json names; UserError where it lies outside of all checkpoints."""
        path = Path(os.path.normpath(self.folder / name))
        if is_unprintable(name) or not path.is_relative_to(os.path.normpath(self.folder.parents[1])):
            raise UserError(f"{self.folder / 'commit.json'}: {name!a} names no file of this run. {self._remedy}")
        return path

    def _read(self) -> Commit | None:
        path = self.folder / "commit.json"
        try:
            return validate(Commit, read_sealed(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as problem:
            raise UserError(f"{path} cannot be read ({problem}). {self._remedy}") from problem

    @property
    def _remedy(self) -> str:
        return f"Delete {self.folder} to train this task from its start."

    def _drop_unnamed_files(self) -> None:
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
    """Return whether a server's weights may lack this tensor: one that never travels, or a statistic of no use."""
    return name.startswith(FROZEN) or name.endswith(BUFFERS)
