"""Reads params.yaml: what it says, what an override changes, and every mistake with its place.

Words and numbers are told apart as in YAML 1.2, so that DVC, which reads and rewrites the same file,
sees the same values: `no` is a word and 1e-3 is a number.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, create_model
from pydantic_core import ErrorDetails
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from fclmodels.errors import Place, UserError, shown, unprintable
from fclmodels.plugins import all_of, find
from fclmodels.settings import BLOCKS, CHOICES, Params, Settings, describe, explain, suggestion

__all__ = ["effective", "explain", "flat", "load", "method_settings"]

Keys = tuple[str, ...]
Scalar = str | int | float | bool | None

MAX_BYTES, MAX_VALUES, MAX_DEPTH = 200_000, 10_000, 20  # no settings file comes near
BASES = {"0o": 8, "0x": 16}
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

_ALONE: dict[str, Any] = {
    name: (field.annotation, field) for name, field in Params.model_fields.items() if name not in (*BLOCKS, "methods")
}
_Alone = create_model("_Alone", __base__=Settings, **_ALONE)  # the settings outside of all blocks


def load(path: str | Path, overrides: Sequence[str] = ()) -> Params:
    """The settings of a file after overrides `a.b=value`; one error lists all that is wrong, in file order."""
    written = _Written(str(path))
    written.read_file(Path(path))
    for number, text in enumerate(overrides):
        written.override(number, text)
    check = _Check(written)
    alone = {key: value for key, value in check.block(()).items() if key not in (*BLOCKS, "methods")}
    given = check.settings((), _Alone, alone)
    blocks = {n: check.choice(n) if n in CHOICES else check.settings((n,), cls) for n, cls in BLOCKS.items()}
    methods = check.methods()
    check.done()
    params = Params(methods=methods, **blocks, **dict(given))
    check.together(params)
    check.done()
    return params


def method_settings(params: Params, name: str) -> Any:
    """The settings of one method: what `methods.<name>` says, or its defaults where that is absent."""
    return find("method", name).Settings.model_validate_json(json.dumps(params.methods.get(name, {})), strict=True)


def effective(params: Params, method: str) -> dict[str, Any]:
    """All settings that one method's run depends on, as JSON values; written to a file, `load` reads them back.

    Left out: which methods and seeds run besides, and where runs are tracked (an address may hold a password).
    """
    shared = params.model_dump(mode="json", serialize_as_any=True, exclude={"methods", "experiment", "tracking"})
    return shared | {"methods": {method: method_settings(params, method).model_dump(mode="json")}}


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Nested settings under dotted keys; a list becomes its JSON text."""
    leaves: dict[str, Scalar] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = json.dumps(value) if isinstance(value, list) else value
    return leaves


class _Check:
    """Makes settings of what is written, and gathers all that is wrong with it."""

    def __init__(self, written: "_Written") -> None:
        self.written = written
        self.problems: list[tuple[Place, str]] = []

    def refuse(self, keys: Keys, message: str) -> None:
        self.problems.append((self.written.place(keys), message))

    def done(self) -> None:
        if self.problems:
            in_order = sorted(self.problems, key=lambda problem: problem[0])
            raise UserError("\n".join(f"{place.text}: {message}" for place, message in in_order))

    def block(self, keys: Keys) -> dict[str, Any]:
        """What is written in a block; one with nothing below its name says nothing."""
        block: Any = self.written.values
        for key in keys:
            block = {} if block.get(key) is None else block[key]
        if isinstance(block, dict):
            return block
        self.refuse(keys, f"{'.'.join(keys)} is {shown(block)}; it must be a block of settings.")
        return {}

    def settings(self, keys: Keys, cls: type[Settings], given: dict[str, Any] | None = None) -> Any:
        """A block as settings of this class. As strict as JSON: "3" is no number, and true is not 1."""
        given = self.block(keys) if given is None else given
        try:
            return cls.model_validate_json(json.dumps(given), strict=True)
        except ValidationError as error:
            for key, details in groupby(error.errors(include_url=False), key=lambda detail: detail["loc"][:1]):
                path = (*keys, *map(str, key))
                self.refuse(path, self.message(path, given.get(path[-1]) if path else None, cls, list(details)))
            return None

    def message(self, keys: Keys, value: Any, cls: type[Settings], details: list[ErrorDetails]) -> str:
        """What is wrong with one setting; `details` are pydantic's, several where it may be of several types."""
        path, first = ".".join(keys), details[0]
        whole, kind = len(first["loc"]) == 1, first["type"]
        if not first["loc"]:
            return f"{path}: {first['ctx']['error']}"
        if whole and kind == "extra_forbidden":
            return f"{path} is not a setting. {suggestion(keys, self.known)}"
        if kind == "value_error":
            return f"{path} is {shown(value)}: {first['ctx']['error']}"
        right = next(row.allowed for row in describe(cls) if row.path == keys[-1])
        if whole and kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
            right = first["msg"].removeprefix("Input should be ")
        return f"{path} is {shown(value)}; it must be {right}."

    @cached_property
    def known(self) -> list[str]:
        """The paths of all blocks and settings there are. Imports every plugin, so only errors ask for it."""
        return [*Params.model_fields, *(row.path for row in explain())]

    def choice(self, block: str) -> Any:
        """A block as settings of the plugin that it names; what only other plugins know stays unread."""
        kind, key = CHOICES[block]
        given, cls = self.block((block,)), BLOCKS[block]
        name = given.get(key, cls.model_fields[key].default)
        if isinstance(name, str):
            cls = self.plugin(kind, name, (block, key)) or cls
        dormant = given.keys() - cls.model_fields.keys()
        if dormant:
            dormant &= {field for plugin in all_of(kind).values() for field in plugin.Settings.model_fields}
        for other in dormant:
            if cls is not BLOCKS[block] and self.written.place((block, other)).override:
                self.refuse((block, other), f"{block}.{other} has no effect where {block}.{key} is {name}.")
        return self.settings((block,), cls, {k: v for k, v in given.items() if k not in dormant})

    def methods(self) -> dict[str, dict[str, Any]]:
        """What is written for each method, checked but without the defaults."""
        given = self.block(("methods",))
        for name in given:
            if cls := self.plugin("method", name, ("methods", name)):
                self.settings(("methods", name), cls)
        return {name: block or {} for name, block in given.items()}

    def plugin(self, kind: str, name: str, keys: Keys) -> type[Settings] | None:
        try:
            return find(kind, name).Settings
        except UserError as error:
            self.refuse(keys, f"{'.'.join(keys)}: {error}")
            return None

    def together(self, params: Params) -> None:
        """What concerns several settings, each right by itself."""
        clients, chosen = params.partition.clients, params.federation.clients_per_round
        if chosen is not None and chosen > clients:
            both = ("federation", "clients_per_round"), ("partition", "clients")
            keys = max(both, key=lambda keys: self.written.place(keys).override)
            self.refuse(keys, f"federation.clients_per_round is {chosen}, but partition.clients is only {clients}.")
        for key in ("methods", "seeds"):
            values = getattr(params.experiment, key)
            for number, value in enumerate(values):
                if value in values[:number]:
                    self.refuse(("experiment", key, str(number)), f"experiment.{key} holds {value} twice.")
        for name in params.experiment.methods:
            self.plugin("method", name, ("experiment", "methods"))


class _Written:
    """What a file and the overrides after it say: plain values, and the place of each."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.values: dict[str, Any] = {}
        self.places: dict[Keys, Place] = {(): Place(False, 0, file)}

    def place(self, keys: Keys) -> Place:
        """The place of a setting, or that of what it would stand in."""
        return next(self.places[keys[:n]] for n in range(len(keys), -1, -1) if keys[:n] in self.places)

    def read_file(self, path: Path) -> None:
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
            raise UserError(f"{self.file}:1: {shown(values)} is no block of settings. Write a name, a colon, a value.")
        self.values = values or {}

    def override(self, number: int, text: str) -> None:
        """One `a.b=value` over what is written so far; the value is read as YAML."""
        place = Place(True, number, f"--set {text}")
        path, _, value = text.partition("=")
        keys = tuple(path.strip().split("."))
        if unprintable(text) or not all(keys) or len(keys) > MAX_DEPTH or not value.strip():
            raise UserError(
                f"--set {ascii(text)[1:-1]}: write a setting and its value, as in --set federation.rounds=3."
            )
        block = self.values
        for depth, key in enumerate(keys[:-1], start=1):
            if block.get(key) is None:
                block[key] = {}
                self.places[keys[:depth]] = place
            block = block[key]
            if not isinstance(block, dict):
                raise UserError(f"{place.text}: {'.'.join(keys[:depth])} is not a block of settings.")
        self.places = {k: p for k, p in self.places.items() if k[: len(keys)] != keys}
        block[keys[-1]] = self.parse(value, keys, lambda line: place)

    def parse(self, text: str, keys: Keys, place_of: Callable[[int], Place]) -> Any:
        """The plain values of a YAML text; their places are kept under `keys`."""
        try:
            node = _Composer(text).get_single_node()
        except ReaderError as error:
            place = place_of(text.count("\n", 0, error.position) + 1)
            raise UserError(f"{place.text}: character {error.character:#x} does not belong in a text.") from None
        except yaml.MarkedYAMLError as error:
            line, column = (mark.line + 1, mark.column + 1) if (mark := error.problem_mark) else (1, 1)
            problem = ", ".join(filter(None, [error.context, error.problem]))
            if "'\\t'" in problem:
                problem = "a tab; YAML is indented by spaces"
            raise UserError(f"{place_of(line).text}: not YAML at column {column}: {problem}.") from None
        return None if node is None else self.plain(node, keys, place_of, node.start_mark.line + 1)

    def plain(self, node: yaml.Node, keys: Keys, place_of: Callable[[int], Place], line: int) -> Any:
        place = self.places.setdefault(keys, place_of(line))
        if len(self.places) > MAX_VALUES or len(keys) > MAX_DEPTH:  # aliases can make both of a short text
            raise UserError(
                f"{place.text}: more than {MAX_VALUES:,} values or {MAX_DEPTH} levels, too many for settings."
            )
        kind = node.tag.removeprefix(TAG)
        if isinstance(node, yaml.ScalarNode) and kind in SCALARS and re.fullmatch(SCALARS[kind][0], node.value):
            if unprintable(node.value):
                raise UserError(f"{place.text}: {node.value!a} holds a character that cannot be printed.")
            return SCALARS[kind][1](node.value)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [
                self.plain(item, (*keys, str(number)), place_of, item.start_mark.line + 1)
                for number, item in enumerate(node.value)
            ]
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self.mapping(node, keys, place_of)
        raise UserError(f"{place.text}: a value that is tagged {node.tag!a} cannot be read.")

    def mapping(self, node: yaml.MappingNode, keys: Keys, place_of: Callable[[int], Place]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in node.value:
            line, name = key.start_mark.line + 1, key.value
            if not isinstance(name, str) or unprintable(name):
                raise UserError(f"{place_of(line).text}: the name before a colon must be printable text.")
            if name in values:
                path, first = (*keys, name), self.places[(*keys, name)]
                raise UserError(f"{place_of(line).text}: {'.'.join(path)} is set twice, first at {first.text}.")
            values[name] = self.plain(value, (*keys, name), place_of, line)
        return values


class _Composer(Reader, Scanner, Parser, Composer, BaseResolver):
    """PyYAML up to its graph of nodes: the part that makes objects of tags is not there."""

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
