"""An append-only log of JSON lines. A checkpoint notes its length and digest; resuming there cuts off later lines."""

import hashlib
import json
from pathlib import Path
from typing import Any

from fclmodels.errors import UserError


class Log:
    """The log in one file."""

    def __init__(self, path: Path, length: int = 0, digest: str = "") -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._digest = hashlib.sha256(path.read_bytes()[:length] if path.exists() else b"")
        if length and self._digest.hexdigest() != digest:
            raise UserError(
                f"{path} does not match its digest (changed or cut short). "
                f"Delete {path.parent} to train this task from its start."
            )
        self._file = open(path, "ab")  # noqa: SIM115 -- open as long as the log is
        self._file.truncate(length)
        self._file.seek(length)

    def append(self, row: dict[str, Any]) -> None:
        line = json.dumps(row).encode() + b"\n"
        self._digest.update(line)
        self._file.write(line)

    def flush(self) -> int:
        """Write all rows to the file; return its length in bytes."""
        self._file.flush()
        return self._file.tell()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def read_rows(self) -> list[dict[str, Any]]:
        self.flush()
        try:
            return [json.loads(line) for line in self.path.read_bytes().splitlines()]
        except ValueError as problem:
            raise UserError(
                f"{self.path} cannot be read ({problem}). Delete {self.path.parent} to train this task from its start."
            ) from problem

    def close(self) -> None:
        self._file.close()
