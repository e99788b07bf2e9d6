"""JSON files; sealed ones carry their own digest, so that a change is noticed.

A run's result.json is sealed, and has the digests of the folder's other files.
"""

import fnmatch
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fclmodels.errors import UserError
from fclmodels.storage.digests import digest_file, digest_json
from fclmodels.storage.files import replace_file
from fclmodels.storage.untrusted import read_json, validate


def write_json(path: Path, content: Any) -> None:
    with replace_file(path) as temporary:
        temporary.write_text(_format(content))


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write JSON that carries its own digest."""
    content = json.loads(json.dumps(content))
    write_json(path, {**content, "seal": digest_json(content)})


def _format(content: Any) -> str:
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def read_sealed(path: Path) -> dict[str, Any]:
    """Read what `write_sealed` wrote; ValueError where a single byte differs.

    The bytes are compared too: another last digit may read as the same number, which the seal does not see.
    """
    content = read_json(path)
    seal = content.pop("seal", None) if isinstance(content, dict) else None
    if seal is None or seal != digest_json(content) or path.read_bytes() != _format({**content, "seal": seal}).encode():
        raise ValueError("changed or cut short")
    return content


class _Files(BaseModel):
    files: dict[str, str]


def read_result(path: Path) -> Any:
    """Read a run's result.json; UserError where it has changed."""
    try:
        content = read_json(path)
        if not (isinstance(content, dict) and {"seal", "files"} & content.keys()):
            return content
        validate(_Files, content := read_sealed(path))
        return content
    except (OSError, ValueError) as problem:
        raise UserError(
            f"{path}: not JSON, changed or cut short ({problem}). {describe_remedy(path.parent)}"
        ) from problem


def refuse_changed(folder: Path, pattern: str) -> None:
    """Raise UserError where a file of the run folder that matches the pattern is not as its result.json says."""
    result = folder / "result.json"
    content = read_result(result) if result.is_file() else {}
    files = content.get("files", {}) if isinstance(content, dict) else {}
    for name in fnmatch.filter(files, pattern):
        file = folder / name
        if not file.is_file() or digest_file(file) != files[name]:
            raise UserError(f"{file} does not match its digest (changed or cut short). {describe_remedy(folder)}")


def describe_remedy(folder: Path) -> str:
    return f"Delete {folder} and make it again with fcl run, or leave it out."
