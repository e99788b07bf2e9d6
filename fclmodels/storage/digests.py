"""SHA-256 of JSON values and of files, in hexadecimal. Keys and seals on disk hold these: their bytes cannot change."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hashlib import _Hash


def digest_json(content: Any) -> str:
    """Return the digest of a value as JSON with sorted keys."""
    return begin_digest(content).hexdigest()


def begin_digest(content: Any) -> "_Hash":
    """Return the hash of a value as JSON with sorted keys, to be updated with the bytes of arrays."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode())


def digest_file(path: Path) -> str:
    """Return the digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_folder(folder: Path) -> dict[str, str]:
    """Return the digests of all files below a folder, by their paths from it on."""
    return {str(file.relative_to(folder)): digest_file(file) for file in sorted(folder.rglob("*")) if file.is_file()}
