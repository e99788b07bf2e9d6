"""Digests of what a result depends on: files, and the source of a module and all it imports inside the project.

An edited algorithm changes the key of its results, an edit elsewhere does not. What is imported by name
at run time (plugins) is not followed: whoever chooses a plugin adds its module.
"""

import ast
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from fclmodels.errors import UserError

ROOT = "fclmodels"


def digest_of_file(setting: str, path: Path) -> str:
    """SHA-256 of a file that a setting names."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as problem:
        raise UserError(f"{setting}: {path} cannot be read: {problem.strerror}.") from problem


def source_closure(*modules: str) -> str:
    """SHA-256 over the sources of these modules and of what they import below fclmodels."""
    state = hashlib.sha256()
    for name in sorted(closure(modules)):
        state.update(f"{name}\n".encode() + _source(name))
    return state.hexdigest()


def closure(modules: Iterable[str]) -> set[str]:
    """Names of the modules and of all they import below fclmodels, directly or not."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _imports(name)
    return found


@functools.cache
def _imports(name: str) -> tuple[str, ...]:
    package = name if _path(name).name == "__init__.py" else name.rpartition(".")[0]
    names: list[str] = []
    for node in ast.walk(ast.parse(_source(name))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (
                importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                if node.level
                else node.module
            )
            names += [base or "", *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(n for n in names if n.split(".")[0] == ROOT and _exists(n))


@functools.cache
def _path(name: str) -> Path:
    spec = _spec(name)
    assert spec, name
    assert spec.origin, name
    return Path(spec.origin)


def _exists(name: str) -> bool:
    spec = _spec(name)
    return spec is not None and spec.origin is not None


def _spec(name: str) -> ModuleSpec | None:
    """Where a module is; unlike importlib.util.find_spec it imports no parent on the way."""
    parent = name.rpartition(".")[0]
    if name in sys.modules or not parent:
        return importlib.util.find_spec(name)
    package = _spec(parent)
    locations = package.submodule_search_locations if package else None
    return PathFinder.find_spec(name, locations) if locations else None


def _source(name: str) -> bytes:
    return _path(name).read_bytes()
