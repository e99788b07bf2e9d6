"""Digests of the code that a result depends on: a module and all that it imports inside the project.

An edited algorithm changes the key of its results; an edit elsewhere does not, nor one of a comment or a docstring.
Followed are imports inside fclmodels, the folder `plugins/` of the project, and the package of each module that is
asked for. In fclmodels these are imports at the top of a module: what it imports inside of a function (an option that
settings switch on), or by name (a plugin), whoever switches it on adds (experiment/step_keys.py). Elsewhere nobody
does so.
"""

import ast
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

WITHOUT_EFFECT = {"fclmodels.settings.preset"}  # papers' figures, which no run computes with
ROOTS = {"fclmodels", "plugins"}  # this package, and the plugins in a project's folder


def digest_sources(*modules: str) -> str:
    """Return the SHA-256 of the code of these modules and of what they import inside the project."""
    state = hashlib.sha256()
    for name in sorted(list_closure(modules)):
        state.update(f"{name} {_digest_code(name)}\n".encode())
    return state.hexdigest()


def list_closure(modules: Iterable[str]) -> set[str]:
    """Return the names of the modules and of all they import inside the project, but for empty ones."""
    reached: set[str] = set()
    waiting = list(modules)
    roots = frozenset(ROOTS | {name.partition(".")[0] for name in waiting})
    while waiting:
        name = waiting.pop()
        if name not in reached | WITHOUT_EFFECT:
            reached.add(name)
            waiting += _list_imports(name, roots)
    return {name for name in reached if _read_source(name).strip()}


@functools.cache
def _digest_code(name: str) -> str:
    """Return the SHA-256 of a module's syntax tree without docstrings: comments and lines' places are not in it."""
    if _find_path(name).suffix != ".py":
        return hashlib.sha256(_read_source(name)).hexdigest()
    tree = ast.parse(_read_source(name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not _is_text(statement)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


@functools.cache
def _list_imports(name: str, roots: frozenset[str]) -> tuple[str, ...]:
    """Return the modules that a module imports from packages of these names."""
    if _find_path(name).suffix != ".py":
        return ()
    package = name if _find_path(name).name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(_read_source(name))
    names: list[str] = []
    for node in _yield_top_statements(tree.body) if name.partition(".")[0] == "fclmodels" else ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (
                importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                if node.level
                else node.module
            )
            names += [base or "", *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(n for n in names if n.partition(".")[0] in roots and _exists(n))


def _yield_top_statements(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when a module is imported, but for those that are for type checkers alone."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.If) and "TYPE_CHECKING" not in ast.dump(statement.test):
            yield from _yield_top_statements([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try | ast.With):
            yield from _yield_top_statements(statement.body)


@functools.cache
def _find_path(name: str) -> Path:
    spec = _find_spec(name)
    assert spec, name
    assert spec.origin, name
    return Path(spec.origin)


def _exists(name: str) -> bool:
    spec = _find_spec(name)
    return spec is not None and spec.origin is not None


def _find_spec(name: str) -> ModuleSpec | None:
    """Return where a module is; unlike importlib.util.find_spec it imports no parent on the way."""
    parent = name.rpartition(".")[0]
    if name in sys.modules or not parent:
        return importlib.util.find_spec(name)
    package = _find_spec(parent)
    locations = package.submodule_search_locations if package else None
    return PathFinder.find_spec(name, locations) if locations else None


def _read_source(name: str) -> bytes:
    return _find_path(name).read_bytes()
