"""A content-addressed store: an object's name is the digest of what is in it, so it never changes.

Trees are kept as safetensors, tables as Parquet. What is read is checked against its name.
"""

import hashlib
import io
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import polars as pl

from fclmodels import state
from fclmodels.errors import UserError
from fclmodels.foreign import table_of
from fclmodels.sealed import read_sealed
from fclmodels.state import Tree

DIGEST = re.compile("[0-9a-f]{64}")
_REMEDY = "Delete it and run the same command again: it is made anew."


class Store:
    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def put(self, tree: Tree) -> str:
        digest = state.digest(tree)
        if not self.path(digest).exists():
            state.save(tree, self.path(digest))
        return digest

    def get(self, digest: str) -> Tree:
        tree = state.load(self._existing(digest))
        if state.digest(tree) != digest:
            raise UserError(f"{self.path(digest)} does not match its digest (changed or cut short). {_REMEDY}")
        return tree

    def checked(self, digest: str) -> Path:
        """The file of a tree that still is what its name says."""
        self.get(digest)
        return self.path(digest)

    def adopt(self, file: Path) -> str:
        """Take in a tree that stands in a file already."""
        digest = state.digest(state.load(file))
        if not self.has(digest):
            with state.replacing(self.path(digest)) as temporary:
                shutil.copyfile(file, temporary)
        return digest

    def put_table(self, table: pl.DataFrame) -> str:
        buffer = io.BytesIO()
        table.write_parquet(buffer, compression="zstd")
        digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
        if not self.has(digest):
            with state.replacing(self.path(digest)) as temporary:
                temporary.write_bytes(buffer.getbuffer())
        return digest

    def get_table(self, digest: str) -> pl.DataFrame:
        content = self._existing(digest).read_bytes()
        if hashlib.sha256(content).hexdigest() != digest:
            raise UserError(f"{self.path(digest)} does not match its digest (changed or cut short). {_REMEDY}")
        try:
            return table_of(content)
        except ValueError as problem:
            raise UserError(f"{self.path(digest)} cannot be read ({problem}). {_REMEDY}") from problem

    def record(self, key: str, outcome: dict[str, Tree]) -> None:
        """Remember what came of the step with this key: JSON that names objects by digest."""
        state.write_sealed(self.root / "done" / f"{key}.json", outcome)

    def recall(self, key: str) -> dict[str, Tree] | None:
        """What came of the step, or None where it was not done or an object that it made is gone."""
        path = self.root / "done" / f"{key}.json"
        if not path.exists():
            return None
        try:
            outcome = read_sealed(path)
            return outcome if all(self.has(digest) for digest in outcome["objects"].values()) else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as problem:
            raise UserError(f"{path} cannot be read ({problem}). {_REMEDY}") from problem

    def forget(self, digests: Iterable[str]) -> list[str]:
        """Drop these objects, and the records that name an object which is not there; the keys of those records."""
        for digest in digests:
            self.path(digest).unlink(missing_ok=True)
        lost = [file for file in (self.root / "done").glob("*.json") if self.recall(file.stem) is None]
        for file in lost:
            file.unlink(missing_ok=True)
        return [file.stem for file in lost]

    def drop_abandoned(self, days: float) -> None:
        """Drop the objects that no record names and that have lain there for so long."""
        records = [self.recall(file.stem) or {"objects": {}} for file in (self.root / "done").glob("*.json")]
        named = {digest for outcome in records for digest in outcome["objects"].values()}
        for file in self.root.glob("[0-9a-f][0-9a-f]/*"):
            if file.name not in named and time.time() - file.stat().st_mtime > days * 86400:
                file.unlink(missing_ok=True)

    def has(self, digest: str) -> bool:
        return self.path(digest).exists()

    def path(self, digest: str) -> Path:
        if not DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!a} is no digest")
        return self.root / digest[:2] / digest

    def _existing(self, digest: str) -> Path:
        if not self.has(digest):
            raise UserError(f"{self.path(digest)} is missing. {_REMEDY}")
        return self.path(digest)
