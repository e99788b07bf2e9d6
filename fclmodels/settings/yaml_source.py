"""YAML text of a settings file and of overrides as plain values, with the line of each.

Words and numbers are those of YAML 1.2, so that DVC, which reads and rewrites the same file, sees the same values:
`no` is a word and 1e-3 is a number.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from fclmodels.errors import Place, UserError, format_value, hide_passwords, is_unprintable

Keys = tuple[str, ...]

MAX_BYTES, MAX_VALUES, MAX_DEPTH = 200_000, 10_000, 20  # no settings file comes near
BASES = {"0o": 8, "0x": 16}
SECRETS = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
TAG = "tag:yaml.org,2002:"
SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {  # YAML 1.2's core schema
    "null": (r"~|null|Null|NULL|", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (r"[-+]?[0-9]{1,99}|0o[0-7]{1,99}|0x[0-9a-fA-F]{1,99}", lambda text: int(text, BASES.get(text[:2], 10))),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        lambda text: float(re.sub(r"\.(?=[iInN])", "", text)),
    ),
    "str": (r"(?s:.*)", str),
}


class YamlSource:
    """Plain values of a settings file and of the overrides after it, and the place of each."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.values: dict[str, Any] = {}
        self.places: dict[Keys, Place] = {(): Place(False, 0, file)}

    def find_place(self, keys: Keys) -> Place:
        """Return the place of a setting or, where it is absent, of the block that it would stand in."""
        return next(self.places[keys[:n]] for n in range(len(keys), -1, -1) if keys[:n] in self.places)

    def find_places(self, keys: Keys) -> Place:
        """Return the place of a block, its text extended by the overrides of settings in the block."""
        place = self.find_place(keys)
        inside = sorted(p for k, p in self.places.items() if p.is_override and k[: len(keys)] == keys)
        return replace(place, text=", ".join(dict.fromkeys([place.text, *(p.text for p in inside)])))

    def read_file(self, path: Path) -> None:
        """Read the values of a file; UserError where it is missing, too large or not YAML."""
        try:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
            text = content[:MAX_BYTES].decode()
        except FileNotFoundError:
            raise UserError(f"{self.file}: no such file. Work in the folder that holds it.") from None
        except OSError as error:
            raise UserError(f"{self.file}: cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise UserError(f"{self.file}:{line}: not UTF-8 text. Save the file as UTF-8.") from None
        if len(content) > MAX_BYTES:
            raise UserError(f"{self.file}: larger than {MAX_BYTES:,} bytes, too large for settings.")
        values = self.parse(text, (), lambda line: Place(False, line, f"{self.file}:{line}"))
        if not isinstance(values, dict | None):
            raise UserError(
                f"{self.file}:1: {format_value(values)} is not a block of settings. Write a name, a colon, a value."
            )
        self.values = values or {}

    def override(self, number: int, text: str) -> None:
        """Set one `a.b=value`, whose value is read as YAML, over the values so far."""
        place = Place(True, number, f"--set {hide_passwords(text)}")
        if hide_passwords(text) != text:  # it would stand in the list of processes, and in Prefect's pages
            raise UserError(
                f"{place.text}: a password does not belong here. Write it into {self.file}, or set {SECRETS}."
            )
        path, _, value = text.partition("=")
        keys = tuple(path.strip().split("."))
        if is_unprintable(text) or not all(keys) or len(keys) > MAX_DEPTH or not value.strip():
            raise UserError(
                f"--set {ascii(text)[1:-1]}: write a setting and its value, as in --set federation.rounds=3."
            )
        block = self.make_block(keys, place)
        block[keys[-1]] = self.parse(value, keys, lambda line: place)

    def apply_block(self, keys: Keys) -> None:
        """Let the block at `keys`, where there is one, override top-level settings."""
        block: Any = self.values
        for key in keys:
            block = block.get(key) if isinstance(block, dict) else None
        for path, value in _list_leaves(block) if isinstance(block, dict) else ():
            place = self.find_place(keys + path)
            self.make_block(path, place)[path[-1]] = value
            self.places[path] = place

    def make_block(self, keys: Keys, place: Place) -> dict[str, Any]:
        """Return the block for a setting, made where it is missing, and forget the place of the setting's old value."""
        block = self.values
        for depth, key in enumerate(keys[:-1], start=1):
            if block.get(key) is None:
                block[key] = {}
                self.places[keys[:depth]] = place
            block = block[key]
            if not isinstance(block, dict):
                raise UserError(f"{place.text}: {'.'.join(keys[:depth])} is not a block of settings.")
        self.places = {k: p for k, p in self.places.items() if k[: len(keys)] != keys}
        return block

    def parse(self, text: str, keys: Keys, place_of: Callable[[int], Place]) -> Any:
        """Return the plain values of a YAML text, and store their places under `keys`."""
        try:
            node = compose(text)
        except ReaderError as error:
            place = place_of(text.count("\n", 0, error.position) + 1)
            raise UserError(f"{place.text}: character {error.character:#x} does not belong in a text.") from None
        except yaml.MarkedYAMLError as error:
            line, column = (mark.line + 1, mark.column + 1) if (mark := error.problem_mark) else (1, 1)
            problem = ", ".join(filter(None, [error.context, error.problem]))
            if "'\\t'" in problem:
                problem = "a tab; YAML is indented by spaces"
            raise UserError(f"{place_of(line).text}: not YAML at column {column}: {problem}.") from None
        return None if node is None else self.convert_node(node, keys, place_of, node.start_mark.line + 1)

    def convert_node(self, node: yaml.Node, keys: Keys, place_of: Callable[[int], Place], line: int) -> Any:
        """Return a node of YAML's graph as a plain value."""
        place = self.places.setdefault(keys, place_of(line))
        if len(self.places) > MAX_VALUES or len(keys) > MAX_DEPTH:  # aliases can make both of a short text
            raise UserError(
                f"{place.text}: more than {MAX_VALUES:,} values or {MAX_DEPTH} levels, too many for settings."
            )
        kind = node.tag.removeprefix(TAG)
        if isinstance(node, yaml.ScalarNode) and kind in SCALARS and re.fullmatch(SCALARS[kind][0], node.value):
            if is_unprintable(node.value):
                raise UserError(f"{place.text}: {node.value!a} holds a character that cannot be printed.")
            return SCALARS[kind][1](node.value)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [
                self.convert_node(item, (*keys, str(number)), place_of, item.start_mark.line + 1)
                for number, item in enumerate(node.value)
            ]
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self.convert_mapping(node, keys, place_of)
        raise UserError(f"{place.text}: a value that is tagged {node.tag!a} cannot be read.")

    def convert_mapping(self, node: yaml.MappingNode, keys: Keys, place_of: Callable[[int], Place]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in node.value:
            line, name = key.start_mark.line + 1, key.value
            if not isinstance(name, str) or is_unprintable(name):
                raise UserError(f"{place_of(line).text}: the name before a colon must be printable text.")
            if name in values:
                path, first = (*keys, name), self.places[(*keys, name)]
                raise UserError(f"{place_of(line).text}: {'.'.join(path)} is set twice, first at {first.text}.")
            values[name] = self.convert_node(value, (*keys, name), place_of, line)
        return values


@lru_cache(8)
def compose(text: str) -> yaml.Node | None:
    """Return the graph of nodes of a YAML text, which nobody changes; a file is read again and again in a process."""
    return _Composer(text).get_single_node()


def _list_leaves(block: dict[str, Any], above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    for key, value in block.items():
        if isinstance(value, dict):
            yield from _list_leaves(value, (*above, key))
        else:
            yield (*above, key), value


class _Composer(Reader, Scanner, Parser, Composer, BaseResolver):
    """PyYAML up to its graph of nodes, without the part that makes objects of tags."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)
        self.depth = 0

    def get_single_node(self) -> yaml.Node | None:
        try:
            return super().get_single_node()
        except (ValueError, OverflowError):  # of an escape such as \UFFFFFFFF, or of a %YAML version
            raise yaml.MarkedYAMLError(problem="a number out of range", problem_mark=self.get_mark()) from None

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth == MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_DEPTH} levels", problem_mark=self.get_mark())
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _kind, (_form, _) in SCALARS.items():
    if _kind != "str":
        _Composer.add_implicit_resolver(TAG + _kind, re.compile(rf"(?:{_form})\Z"), None)
