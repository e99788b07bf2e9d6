"""Settings of a run: what is written, checked against the plugins that it names; every mistake with its place."""

import json
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import ValidationError, create_model
from pydantic_core import ErrorDetails

from fclmodels.errors import Place, UserError, shown
from fclmodels.explain import describe, explain, suggestion
from fclmodels.plugins import all_of, find
from fclmodels.settings import BLOCKS, CHOICES, ExperimentSettings, Params, PresetSettings, Settings, blocks_of
from fclmodels.written import Keys, Written

__all__ = ["effective", "explain", "flat", "load", "method_settings", "preset_of"]

Scalar = str | int | float | bool | None

_ALONE: dict[str, Any] = {
    name: (field.annotation, field) for name, field in Params.model_fields.items() if name not in (*BLOCKS, "methods")
}
_Alone = create_model("_Alone", __base__=Settings, **_ALONE)  # the settings outside of all blocks


def load(path: str | Path, overrides: Sequence[str] = (), method: str | None = None) -> Params:
    """The settings of a file after overrides `a.b=value`; one error lists all that is wrong, in file order.

    For a method, what a preset says under `only` for it stands over the rest of the file, and below the overrides.
    """
    written = Written(str(path))
    written.read_file(Path(path))
    if method is not None:
        written.lift(("preset", "only", method))
    for number, text in enumerate(overrides):
        written.override(number, text)
    check = Check(written)
    alone = {key: value for key, value in check.block(()).items() if key not in (*BLOCKS, "methods")}
    given = check.settings((), _Alone, alone)
    blocks = {n: check.choice(n) if n in CHOICES else check.settings((n,), cls) for n, cls in BLOCKS.items()}
    methods = check.methods()
    check.done()
    params = Params(methods=methods, **blocks, **dict(given))
    check.together(params)
    check.done()
    return params


def preset_of(path: Path) -> tuple[PresetSettings, ExperimentSettings]:
    """What a preset's file says of itself, and what it runs; the rest may need what is not there."""
    written = Written(str(path))
    written.read_file(path)
    check = Check(written)
    blocks = check.settings(("preset",), PresetSettings), check.settings(("experiment",), ExperimentSettings)
    check.done()
    return blocks


def method_settings(params: Params, name: str) -> Any:
    """The settings of one method: what `methods.<name>` says, or its defaults where that is absent."""
    return find("method", name).Settings.model_validate_json(json.dumps(params.methods.get(name, {})), strict=True)


def effective(params: Params, method: str) -> dict[str, Any]:
    """All settings that one method's run depends on, as JSON values; written to a file, `load` reads them back.

    Left out: which methods and seeds run besides, what arrives, whose preset it is, and where runs are tracked (an
    address may hold a password).
    """
    left_out = {"methods", "experiment", "arrivals", "preset", "tracking"}
    shared = params.model_dump(mode="json", serialize_as_any=True, exclude=left_out)
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


class Check:
    """Makes settings of what is written, and gathers all that is wrong with it."""

    def __init__(self, written: Written) -> None:
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
        inner = {name: self.settings((*keys, name), block) for name, block in blocks_of(cls).items() if name in given}
        given = {name: value for name, value in given.items() if name not in inner}
        try:
            return cls.model_validate_json(json.dumps(given), strict=True).model_copy(update=inner)
        except ValidationError as error:
            for key, details in groupby(error.errors(include_url=False), key=lambda detail: detail["loc"][:1]):
                path = (*keys, *map(str, key))
                place = self.written.place(path) if key else self.written.whole(keys)
                told = self.message(path, given.get(path[-1]) if path else None, cls, list(details))
                self.problems.append((place, told))
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
        limits = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
        if whole and kind in limits and not right.endswith(", or null"):
            right = first["msg"].removeprefix("Input should be ")
        return f"{path} is {shown(value)}; it must be {right}."

    @cached_property
    def known(self) -> list[str]:
        """The paths of all blocks and settings there are. Imports every plugin, so only errors ask for it."""
        inner = (f"{block}.{name}" for block, cls in BLOCKS.items() for name in blocks_of(cls))
        return [*Params.model_fields, *inner, *(row.path for row in explain())]

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
        least, most = params.federation.faults.least, min(clients, chosen or clients)
        if least > most:
            self.refuse(
                ("federation", "faults", "least"),
                f"federation.faults.least is {least}, but no more than {most} clients are sampled in a round.",
            )
        if params.federation.secagg.on and params.federation.faults.late:
            self.refuse(
                ("federation", "faults", "late"),
                "federation.faults.late has no place under federation.secagg.on: a late reply is masked for a round "
                "that is over. Set it to 0, or take federation.faults.missing.",
            )
        for key in ("methods", "seeds"):
            values = getattr(params.experiment, key)
            for number, value in enumerate(values):
                if value in values[:number]:
                    self.refuse(("experiment", key, str(number)), f"experiment.{key} holds {value} twice.")
        for name in params.experiment.methods:
            self.plugin("method", name, ("experiment", "methods"))
        self.plugin("method", params.arrivals.method, ("arrivals", "method"))
