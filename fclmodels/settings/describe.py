"""Descriptions of settings for people, and the likely setting behind a misspelt name."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from fclmodels.errors import UserError
from fclmodels.plugins import load_all
from fclmodels.settings.base import Settings, list_blocks
from fclmodels.settings.schema import BLOCKS, CHOICES, Params


@dataclass(frozen=True)
class Setting:
    """Description of one setting."""

    path: str
    kinds: tuple[str, ...]  # the plugins that have it; empty: all of them, or it is in no plugin's block
    type: str  # or the values that it may have
    default: Any
    allowed: str  # the end of the sentence "it must be ..."
    description: str


def explain(name: str | None = None) -> list[Setting]:
    """Return all settings, or those of a plugin, of a block, or with this path or last name."""
    every = [row for block in Params.model_fields for row in _describe_block(block)]
    if name is None:
        return every
    if name in load_all("method"):
        return [row for row in every if row.path.startswith(f"methods.{name}.")]
    for block, (kind, _) in CHOICES.items():
        if name in load_all(kind):
            return [r for r in every if r.path.startswith(f"{block}.") and (not r.kinds or name in r.kinds)]
    matching = [row for row in every if f".{name}." in f".{row.path}."]
    if not matching:
        names = {part for row in every for part in (row.path, *row.path.split("."), *row.kinds)}
        near = get_close_matches(name, names, n=1)
        hint = f"Did you mean {near[0]}?" if near else "fcl params shows them all."
        raise UserError(f"{name} is neither a setting nor a plugin. {hint}")
    return matching


def suggest_path(keys: Sequence[str], valid_paths: Iterable[str]) -> str:
    """Return the end of an error line: the nearest path of the same block, else those of about this name elsewhere."""
    *block, name = keys
    leaves = {path: path.rpartition(".")[2] for path in valid_paths}
    beside = {leaf: path for path, leaf in leaves.items() if path == ".".join([*block, leaf])}
    near = [beside[leaf] for leaf in get_close_matches(name, beside, n=1)]
    if not near and name in ("kind", "name", "type") and ".".join(block) in CHOICES:
        near = [beside[CHOICES[block[0]][1]]]
    if not near:
        alike = get_close_matches(name, set(leaves.values()), n=3, cutoff=0.8)
        near = [path for path, leaf in leaves.items() if leaf in alike][:3]
    return f"Did you mean {' or '.join(near)}?" if near else f"Valid: {', '.join(beside) or 'none here'}."


def describe(cls: type[Settings], prefix: str = "", kinds: tuple[str, ...] = ()) -> list[Setting]:
    """Return every setting of a class and of the blocks in it, as its JSON schema has them."""
    inner, rows = list_blocks(cls), []
    for key, s in _read_schema(cls).items():
        if key in inner:
            rows += describe(inner[key], f"{prefix}{key}.", kinds)
        else:
            rows.append(
                Setting(
                    prefix + key, kinds, _name_type(s), s.get("default"), _describe_allowed(s), s.get("description", "")
                )
            )
    return rows


@cache
def _read_schema(cls: type[Settings]) -> dict[str, Any]:
    """Return the JSON schema of each setting of a class. Do not change it."""
    return cls.model_json_schema()["properties"]


def _describe_block(block: str) -> list[Setting]:
    if block == "methods":
        return [r for name, m in load_all("method").items() for r in describe(m.Settings, f"methods.{name}.", (name,))]
    if block not in BLOCKS:
        return [row for row in describe(Params) if row.path == block]
    if block not in CHOICES:
        return describe(BLOCKS[block], f"{block}.")
    kind, key = CHOICES[block]
    plugins = load_all(kind)
    rows: dict[str, Setting] = {}
    for name, plugin in plugins.items():
        for row in describe(plugin.Settings, f"{block}."):
            shared = rows.get(repr(row), row)
            rows[repr(row)] = replace(shared, kinds=(*shared.kinds, name))
    every = [replace(row, kinds=()) if len(row.kinds) == len(plugins) else row for row in rows.values()]
    return [replace(row, allowed=", ".join(plugins)) if row.path == f"{block}.{key}" else row for row in every]


TYPES = {  # of JSON schema: short name, noun
    "integer": ("int", "a whole number"),
    "number": ("float", "a number"),
    "boolean": ("bool", "true or false"),
    "string": ("str", "text"),
    "null": ("null", "null"),
    "object": ("dict", "a mapping"),
}
LIMITS = {
    "exclusiveMinimum": "greater than",
    "minimum": "at least",
    "exclusiveMaximum": "less than",
    "maximum": "at most",
}


def _name_type(schema: dict[str, Any]) -> str:
    match schema:
        case {"anyOf": branches}:
            return " | ".join(dict.fromkeys(map(_name_type, branches)))
        case {"type": "array"}:
            return f"list[{' | '.join(dict.fromkeys(map(_name_type, _list_items(schema))))}]"
        case {"enum": values}:
            return " | ".join(map(str, values))
        case {"const": value}:
            return str(value)
        case {"format": "path"}:
            return "path"
        case {"type": kind}:
            return TYPES[kind][0]
    return "any"


def _describe_allowed(schema: dict[str, Any]) -> str:
    match schema:
        case {"anyOf": branches}:
            return ", or ".join(map(_describe_allowed, branches))
        case {"enum": values}:
            return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"
        case {"const": value}:
            return str(value)
        case {"pattern": pattern}:
            return f"text of the form {pattern.strip('^$')}"
        case {"type": "array"}:
            fewest = f" of at least {schema['minItems']}" if "minItems" in schema else ""
            length = f" of {schema['minItems']}" if "prefixItems" in schema else fewest
            return (
                f"a list{length}, each item {' or '.join(dict.fromkeys(map(_describe_allowed, _list_items(schema))))}"
            )
        case {"format": "path"}:
            return "a path"
        case {"type": kind}:
            limits = [f"{words} {schema[limit]:g}" for limit, words in LIMITS.items() if limit in schema]
            return " ".join([TYPES[kind][1], " and ".join(limits)]).strip()
    return "any value"


def _list_items(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return schema.get("prefixItems", [schema.get("items", {})])
