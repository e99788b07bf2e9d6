"""Files that tell when they were changed: JSON that carries its own digest, and run folders.

A run's result.json is such JSON, and has the digests of the folder's other files.
"""

import fnmatch
import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fclmodels.errors import UserError
from fclmodels.foreign import checked, read_json


def seal(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def written(content: Any) -> str:
    """JSON as this project's files have it."""
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def read_sealed(path: Path) -> dict[str, Any]:
    """What state.write_sealed wrote; ValueError where a single byte is another: the last digit of a number may be one
    that reads as the same number, which the seal does not see.
    """
    content = read_json(path)
    told = content.pop("seal", None) if isinstance(content, dict) else None
    if told is None or told != seal(content) or path.read_bytes() != written({**content, "seal": told}).encode():
        raise ValueError("changed or cut short")
    return content


def digest_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digests_of(folder: Path) -> dict[str, str]:
    """Of all files below a folder, by their paths from it on."""
    return {str(file.relative_to(folder)): digest_of_file(file) for file in sorted(folder.rglob("*")) if file.is_file()}


class _Files(BaseModel):
    files: dict[str, str]


def read_result(path: Path) -> Any:
    """A run's result.json, as it was written."""
    try:
        content = read_json(path)
        if not (isinstance(content, dict) and {"seal", "files"} & content.keys()):
            return content
        checked(_Files, content := read_sealed(path))
        return content
    except (OSError, ValueError) as problem:
        raise UserError(f"{path}: not JSON, changed or cut short ({problem}). {remake(path.parent)}") from problem


def refuse_changed(folder: Path, pattern: str) -> None:
    """Where those files of a run folder that are to be read are not as its result.json says."""
    result = folder / "result.json"
    content = read_result(result) if result.is_file() else {}
    files = content.get("files", {}) if isinstance(content, dict) else {}
    for name in fnmatch.filter(files, pattern):
        file = folder / name
        if not file.is_file() or digest_of_file(file) != files[name]:
            raise UserError(f"{file} does not match its digest (changed or cut short). {remake(folder)}")


def remake(folder: Path) -> str:
    return f"Delete {folder} and make it again with fcl run, or leave it out."
