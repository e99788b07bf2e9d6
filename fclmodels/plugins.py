"""Methods, backbones, sources, streams and partitions by name, from three places.

A plugin is a class with a `name` of its own. It lies in fclmodels' package of its kind, in the folder of its kind in
the project (the current folder), such as `plugins/methods/`, or in an installed package that names it as an entry point
of a group such as `fclflow.methods`. To find one, only the files that write its name are imported.
"""

import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from fclmodels.errors import UserError, is_unprintable, suggest_name

PACKAGES = {
    "method": "fclmodels.methods",
    "backbone": "fclmodels.backbones",
    "source": "fclmodels.data.sources",
    "stream": "fclmodels.data.streams",
    "partition": "fclmodels.data.partitions",
}
OURS = "fclflow"  # origin of the plugins above, and of the groups of entry points
PROJECT = "plugins"  # folder of a project's own plugins, and the package as which it is imported
NAME = re.compile(r"""^    name(?:: [^=\n]+)? = ["'](.+)["']""", re.MULTILINE)


@dataclass(frozen=True)
class Module:
    """A module that may hold plugins."""

    name: str
    file: str  # for people
    origin: str  # for people: fclflow, a file of the project, or an installed package
    names: frozenset[str]  # of plugins, as far as they can be read without an import
    attribute: str | None = None  # of an entry point: the class, the only one that counts

    def load_plugins(self) -> list[Any]:
        """Import the module and return its plugins; UserError where a module that is not ours cannot be imported."""
        try:
            if self.name.startswith(f"{PROJECT}."):
                _open_project()
            module = importlib.import_module(self.name)
            if self.attribute:
                return [functools.reduce(getattr, self.attribute.split("."), module)]
        except Exception as problem:
            if self.origin == OURS or isinstance(problem, UserError):
                raise
            raise UserError(_describe_failure(self.file, problem)) from problem
        return [value for value in vars(module).values() if _is_plugin(value) and value.__module__ == self.name]


class Plugin(NamedTuple):
    """A plugin and where it is from."""

    plugin: Any  # the class
    module: Module


class Listing(NamedTuple):
    """All plugins of a kind by name, in the names' order, and a line for each file or name that is wrong."""

    plugins: dict[str, Plugin]
    problems: list[str]


def find(kind: str, name: str) -> Any:
    """Return the class of this kind with this name; UserError that names the nearest one where there is none."""
    modules = list(_list_modules(kind))
    plugins, problems = _load(module for module in modules if name in module.names)
    if problems:
        raise UserError(problems[0])
    if not any(plugin.plugin.name == name for plugin in plugins):
        plugins, problems = _load(modules)
    matching = [plugin for plugin in plugins if plugin.plugin.name == name]
    if not matching:
        label = ascii(name) if is_unprintable(name) else name
        hint = suggest_name(name, {plugin.plugin.name for plugin in plugins})
        raise UserError(" ".join([f"{label} is not a {kind}. {hint}", *problems]))
    if len(matching) > 1:
        raise UserError(_describe_twins(matching))
    return matching[0].plugin


def load_all(kind: str) -> dict[str, Any]:
    """Return every plugin of a kind by name. Imports them all, so only listings and errors ask for it."""
    return {name: plugin.plugin for name, plugin in list_plugins(kind).plugins.items()}


def list_plugins(kind: str) -> Listing:
    """Return every plugin of a kind with its origin. Imports them all."""
    plugins, problems = _load(_list_modules(kind))
    by_name: dict[str, list[Plugin]] = {}
    for plugin in plugins:
        by_name.setdefault(plugin.plugin.name, []).append(plugin)
    problems += [_describe_twins(twins) for twins in by_name.values() if len(twins) > 1]
    return Listing({name: by_name[name][0] for name in sorted(by_name)}, problems)


def read_names(kind: str) -> list[str]:
    """Return the names of plugins as their files write them: to import them takes seconds."""
    return sorted({name for module in _list_modules(kind) for name in module.names})


def is_of_project(plugin: Any) -> bool:
    """Return whether a plugin lies in the project's folder, which other machines may not have."""
    return str(plugin.__module__).startswith(f"{PROJECT}.")


def _list_modules(kind: str) -> Iterator[Module]:
    package = PACKAGES[kind]
    for folder in importlib.import_module(package).__path__:
        yield from _list_files(Path(folder), package, os.stat(folder).st_mtime_ns)
    own_folder = Path(PROJECT, f"{kind}s").absolute()
    if own_folder.is_dir():
        yield from _list_files(own_folder, f"{PROJECT}.{kind}s", os.stat(own_folder).st_mtime_ns)
    yield from _list_entry_points(f"{OURS}.{kind}s", tuple(sys.path))


@functools.cache
def _list_files(folder: Path, package: str, modified: int) -> tuple[Module, ...]:
    """Return the modules of a package's folder, as it was when it was last modified."""
    modules = []
    for file in sorted(folder.glob("[!_]*.py")):
        place = f"{package.replace('.', '/')}/{file.name}"
        names = re.findall(
            r"""^    name(?:: [^=\n]+)? = ["'](.+)["']""", file.read_text("utf-8", "replace"), re.MULTILINE
        )
        origin = place if package.startswith(f"{PROJECT}.") else OURS
        modules.append(Module(f"{package}.{file.stem}", place, origin, frozenset(names)))
    return tuple(modules)


@functools.cache
def _list_entry_points(group: str, path: tuple[str, ...]) -> tuple[Module, ...]:
    """Return the modules that packages on the path name in this group."""
    modules = []
    for entry in entry_points(group=group):
        origin = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.module
        modules.append(Module(entry.module, f"{entry.value} of {origin}", origin, frozenset([entry.name]), entry.attr))
    return tuple(modules)


def _load(modules: Iterable[Module]) -> tuple[list[Plugin], list[str]]:
    """Return the plugins of modules, each once, and a line for each module that cannot be imported."""
    plugins: dict[Any, Plugin] = {}
    problems: list[str] = []
    for module in modules:
        try:
            for plugin in module.load_plugins():
                plugins.setdefault(plugin, Plugin(plugin, module))
        except UserError as problem:
            problems.append(str(problem))
    return list(plugins.values()), list(dict.fromkeys(problems))


def _is_plugin(value: Any) -> bool:
    return inspect.isclass(value) and isinstance(vars(value).get("name"), str)


def _open_project() -> None:
    """Make the project's folder importable as a package, which no other of the same name can stand for."""
    folder = os.path.realpath(PROJECT)
    package = sys.modules.get(PROJECT)
    if package is None:
        spec = ModuleSpec(PROJECT, None, is_package=True)
        spec.submodule_search_locations = [folder]
        sys.modules[PROJECT] = importlib.util.module_from_spec(spec)
        return
    others = [path for path in getattr(package, "__path__", [str(package)]) if os.path.realpath(path) != folder]
    if others:
        raise UserError(
            f"{folder} cannot be imported: this process has a package {PROJECT} from {others[0]} already. "
            "Uninstall that one, or start another process for this project."
        )


def _describe_failure(file: str, problem: Exception) -> str:
    """Return a line with the file, the place in it where there is one, and the exception."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(problem.__traceback__)]
    text = str(problem)
    if isinstance(problem, SyntaxError):
        frames.append((problem.filename or "", problem.lineno))
        text = problem.msg
    lines = [line for name, line in frames if Path(name).match(file)]
    place = f"{file}:{lines[-1]}" if lines else file
    return f"{place} cannot be imported: {type(problem).__name__}: {' '.join(text.split())}"


def _describe_twins(twins: Sequence[Plugin]) -> str:
    files = " and ".join(twin.module.file for twin in twins)
    return f"{twins[0].plugin.name} is the name of several plugins: {files}. Give each a name of its own."
