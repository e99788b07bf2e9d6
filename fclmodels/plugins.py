"""Methods, backbones, sources, streams and partitions are found by their name, one file each.

A plugin is a class with a `name` of its own. It lives in the package of its kind, by custom in the
file of that name, so that finding one imports no other.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from fclmodels.errors import UserError, did_you_mean, unprintable

PACKAGES = {
    "method": "fclmodels.methods",
    "backbone": "fclmodels.backbones",
    "source": "fclmodels.data.sources",
    "stream": "fclmodels.data.streams",
    "partition": "fclmodels.data.partitions",
}


def find(kind: str, name: str) -> Any:
    """The class of this kind with this name; the error names the nearest one."""
    modules = _modules(PACKAGES[kind])
    own_file = name.replace("-", "_")
    for module in [own_file] * (own_file in modules) + modules:
        for plugin in _plugins_in(importlib.import_module(f"{PACKAGES[kind]}.{module}")):
            if plugin.name == name:
                return plugin
    told = ascii(name) if unprintable(name) else name
    raise UserError(f"{told} is not a {kind}. {did_you_mean(name, all_of(kind))}")


def all_of(kind: str) -> dict[str, Any]:
    """Every plugin of a kind by name. Imports them all, so only listings and errors ask for it."""
    package = PACKAGES[kind]
    found = [p for m in _modules(package) for p in _plugins_in(importlib.import_module(f"{package}.{m}"))]
    return {plugin.name: plugin for plugin in sorted(found, key=lambda plugin: plugin.name)}


def _modules(package: str) -> list[str]:
    return [m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__)]


def _plugins_in(module: ModuleType) -> Iterator[Any]:
    for value in vars(module).values():
        if inspect.isclass(value) and value.__module__ == module.__name__ and isinstance(vars(value).get("name"), str):
            yield value
