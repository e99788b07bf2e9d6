"""A content-addressed store: an object's name is the digest of its content, so it never changes.

Trees are stored as safetensors, tables as Parquet. Content is checked against its name when it is read.
"""

import hashlib
import io
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import polars as pl

from fclmodels.errors import UserError
from fclmodels.storage import trees
from fclmodels.storage.files import replace_file
from fclmodels.storage.sealed_json import read_sealed, write_sealed
from fclmodels.storage.trees import Tree
from fclmodels.storage.untrusted import parse_table

DIGEST = re.compile("[0-9a-f]{64}")
_REMEDY = "Delete it and run the same command again: it is made anew."


class Store:
    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def put(self, tree: Tree) -> str:
        """Store a tree; return its digest."""
        digest = trees.digest(tree)
        if not self.find_path(digest).exists():
            trees.save(tree, self.find_path(digest))
        return digest

    def get(self, digest: str) -> Tree:
        """Return the tree with this digest; UserError where it is missing or has changed."""
        tree = trees.load(self._find_existing(digest))
        if trees.digest(tree) != digest:
            raise UserError(f"{self.find_path(digest)} does not match its digest (changed or cut short). {_REMEDY}")
        return tree

    def verify(self, digest: str) -> Path:
        """Return the file of a tree; UserError where it is missing or has changed."""
        self.get(digest)
        return self.find_path(digest)

    def adopt(self, file: Path) -> str:
        """Store a copy of a file that holds a tree; return its digest."""
        digest = trees.digest(trees.load(file))
        if not self.has(digest):
            with replace_file(self.find_path(digest)) as temporary:
                shutil.copyfile(file, temporary)
        return digest

    def put_table(self, table: pl.DataFrame) -> str:
        buffer = io.BytesIO()
        table.write_parquet(buffer, compression="zstd")
        digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
        if not self.has(digest):
            with replace_file(self.find_path(digest)) as temporary:
                temporary.write_bytes(buffer.getbuffer())
        return digest

    def get_table(self, digest: str) -> pl.DataFrame:
        content = self._find_existing(digest).read_bytes()
        if hashlib.sha256(content).hexdigest() != digest:
            raise UserError(f"{self.find_path(digest)} does not match its digest (changed or cut short). {_REMEDY}")
        try:
            return parse_table(content)
        except ValueError as problem:
            raise UserError(f"{self.find_path(digest)} cannot be read ({problem}). {_REMEDY}") from problem

    def record(self, key: str, outcome: dict[str, Tree]) -> None:
        """Store the outcome of the step with this key: JSON that names objects by digest."""
        write_sealed(self.root / "done" / f"{key}.json", outcome)

    def recall(self, key: str) -> dict[str, Tree] | None:
        """Return the outcome of the step; None where it was not recorded or an object of it is missing."""
        path = self.root / "done" / f"{key}.json"
        if not path.exists():
            return None
        try:
            outcome = read_sealed(path)
            return outcome if all(self.has(digest) for digest in outcome["objects"].values()) else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as problem:
            raise UserError(f"{path} cannot be read ({problem}). {_REMEDY}") from problem

    def forget(self, digests: Iterable[str]) -> list[str]:
        """Delete these objects and all records that name a missing object; return the keys of those records."""
        for digest in digests:
            self.find_path(digest).unlink(missing_ok=True)
        broken = [file for file in (self.root / "done").glob("*.json") if self.recall(file.stem) is None]
        for file in broken:
            file.unlink(missing_ok=True)
        return [file.stem for file in broken]

    def drop_abandoned(self, days: float) -> None:
        """Delete the objects of at least this age that no record names."""
        records = [self.recall(file.stem) or {"objects": {}} for file in (self.root / "done").glob("*.json")]
        named = {digest for outcome in records for digest in outcome["objects"].values()}
        for file in self.root.glob("[0-9a-f][0-9a-f]/*"):
            if file.name not in named and time.time() - file.stat().st_mtime > days * 86400:
                file.unlink(missing_ok=True)

    def has(self, digest: str) -> bool:
        return self.find_path(digest).exists()

    def find_path(self, digest: str) -> Path:
        if not DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!a} is no digest")
        return self.root / digest[:2] / digest

    def _find_existing(self, digest: str) -> Path:
        if not self.has(digest):
            raise UserError(f"{self.find_path(digest)} is missing. {_REMEDY}")
        return self.find_path(digest)
