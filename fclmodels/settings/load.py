"""Settings of a run, checked against the plugins that they name; every mistake is reported with its place."""

import json
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import ValidationError, create_model
from pydantic_core import ErrorDetails

from fclmodels.errors import Place, UserError, format_value
from fclmodels.plugins import find, load_all
from fclmodels.settings.base import Settings, list_blocks
from fclmodels.settings.describe import describe, explain, suggest_path
from fclmodels.settings.preset import PresetSettings, list_changes
from fclmodels.settings.schema import BLOCKS, CHOICES, ExperimentSettings, Params
from fclmodels.settings.yaml_source import Keys, YamlSource

ONLY = "only"  # in a method's block: settings of other blocks that hold for this method alone
Scalar = str | int | float | bool | None

_OUTSIDE: dict[str, Any] = {
    name: (field.annotation, field) for name, field in Params.model_fields.items() if name not in (*BLOCKS, "methods")
}
_Outside = create_model("_Outside", __base__=Settings, **_OUTSIDE)  # the settings outside of all blocks


def load_params(
    path: str | Path, overrides: Sequence[str] = (), method: str | None = None, seed: int | None = None
) -> Params:
    """Read the settings of a file after overrides `a.b=value`; one error lists all mistakes, in file order.

    For a method, settings under `methods.<method>.only` and `preset.only.<method>` override the rest of the file, and
    `overrides` override them. For a run's seed, the seeds of stream and partition that are null become it.
    """
    source = YamlSource(str(path))
    source.read_file(Path(path))
    if method is not None:
        source.apply_block(("methods", method, ONLY))
        source.apply_block(("preset", "only", method))
    for number, text in enumerate(overrides):
        source.override(number, text)
    check = SettingsCheck(source)
    outside = {key: value for key, value in check.read_block(()).items() if key not in (*BLOCKS, "methods")}
    settings = check.build_settings((), _Outside, outside)
    blocks = {
        name: check.build_plugin_settings(name) if name in CHOICES else check.build_settings((name,), cls)
        for name, cls in BLOCKS.items()
    }
    methods = check.check_methods()
    check.raise_problems()
    params = Params(methods=methods, **blocks, **dict(settings))
    check.check_combinations(params)
    check.raise_problems()
    return params if seed is None else follow_seed(params, seed)


def follow_seed(params: Params, seed: int) -> Params:
    """Return the settings in which stream and partition have a run's seed, unless they have one of their own."""
    blocks = {name: getattr(params, name) for name in ("stream", "partition")}
    own = {name: block.model_copy(update={"seed": seed}) for name, block in blocks.items() if block.seed is None}
    return params.model_copy(update=own)


def load_preset(path: Path) -> tuple[PresetSettings, ExperimentSettings]:
    """Read the blocks `preset` and `experiment` of a preset's file; the others may need plugins or files not there."""
    source = YamlSource(str(path))
    source.read_file(path)
    check = SettingsCheck(source)
    preset = check.build_settings(("preset",), PresetSettings)
    experiment = check.build_settings(("experiment",), ExperimentSettings)
    check.raise_problems()
    return preset, experiment


def note_changes(params: Params, method: str, published: Path) -> Params:
    """Return the settings with all in which a method's run differs from the preset of that file, in `preset.changes`.

    A file that a run has written has those of that run.
    """
    original = load_params(published, (), method)
    flat = (flatten_settings(collect_settings(settings, method)) for settings in (params, original))
    changes = original.preset.changes | list_changes(*flat)
    return params.model_copy(update={"preset": params.preset.model_copy(update={"changes": changes})})


def load_method_settings(params: Params, name: str) -> Any:
    """Return the settings of one method: those of `methods.<name>`, else its defaults."""
    return find("method", name).Settings.model_validate_json(json.dumps(params.methods.get(name, {})), strict=True)


def collect_settings(params: Params, method: str) -> dict[str, Any]:
    """Return all settings that one method's run depends on, as JSON values; `load_params` reads them from a file.

    Excluded are other methods and seeds, arrivals, the preset, and where runs are tracked (an address may hold a
    password).
    """
    excluded = {"methods", "experiment", "arrivals", "preset", "tracking"}
    shared = params.model_dump(mode="json", serialize_as_any=True, exclude=excluded)
    return shared | {"methods": {method: load_method_settings(params, method).model_dump(mode="json")}}


def flatten_settings(tree: dict[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Return nested settings under dotted keys; a list becomes its JSON text."""
    leaves: dict[str, Scalar] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= flatten_settings(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = json.dumps(value) if isinstance(value, list) else value
    return leaves


class SettingsCheck:
    """Builder of settings from their source, which collects all mistakes before it reports them."""

    def __init__(self, source: YamlSource) -> None:
        self.source = source
        self.problems: list[tuple[Place, str]] = []

    def refuse(self, keys: Keys, message: str) -> None:
        self.problems.append((self.source.find_place(keys), message))

    def raise_problems(self) -> None:
        """Raise one UserError with all mistakes so far, a line each."""
        if self.problems:
            in_order = sorted(self.problems, key=lambda problem: problem[0])
            raise UserError("\n".join(f"{place.text}: {message}" for place, message in in_order))

    def read_block(self, keys: Keys) -> dict[str, Any]:
        """Return the mapping at `keys`; empty if absent."""
        block: Any = self.source.values
        for key in keys:
            block = {} if block.get(key) is None else block[key]
        if isinstance(block, dict):
            return block
        self.refuse(keys, f"{'.'.join(keys)} is {format_value(block)}; it must be a block of settings.")
        return {}

    def build_settings(self, keys: Keys, cls: type[Settings], block: dict[str, Any] | None = None) -> Any:
        """Return a block as settings of this class; None if invalid. As strict as JSON: true is not 1, nor is "1"."""
        block = self.read_block(keys) if block is None else block
        inner = {
            name: self.build_settings((*keys, name), inner_cls)
            for name, inner_cls in list_blocks(cls).items()
            if name in block
        }
        values = {name: value for name, value in block.items() if name not in inner}
        try:
            return cls.model_validate_json(json.dumps(values), strict=True).model_copy(update=inner)
        except ValidationError as error:
            for key, details in groupby(error.errors(include_url=False), key=lambda detail: detail["loc"][:1]):
                path = (*keys, *map(str, key))
                place = self.source.find_place(path) if key else self.source.find_places(keys)
                message = self.explain_problem(path, values.get(path[-1]) if path else None, cls, list(details))
                self.problems.append((place, message))
            return None

    def explain_problem(self, keys: Keys, value: Any, cls: type[Settings], details: list[ErrorDetails]) -> str:
        """Return what is wrong with one setting; `details` are pydantic's, several where it may be of several types."""
        path, first = ".".join(keys), details[0]
        is_whole_value, kind = len(first["loc"]) == 1, first["type"]
        if not first["loc"]:
            return f"{path}: {first['ctx']['error']}" if path else str(first["ctx"]["error"])
        if is_whole_value and kind == "extra_forbidden":
            return f"{path} is not a setting. {suggest_path(keys, self.valid_paths)}"
        if kind == "value_error":
            return f"{path} is {format_value(value)}: {first['ctx']['error']}"
        right = next(row.allowed for row in describe(cls) if row.path == keys[-1])
        limits = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
        if is_whole_value and kind in limits and not right.endswith(", or null"):
            right = first["msg"].removeprefix("Input should be ")
        return f"{path} is {format_value(value)}; it must be {right}."

    @cached_property
    def valid_paths(self) -> list[str]:
        """Paths of all blocks and settings. Imports every plugin, so it is computed for errors only."""
        inner = (f"{block}.{name}" for block, cls in BLOCKS.items() for name in list_blocks(cls))
        return [*Params.model_fields, *inner, *(row.path for row in explain())]

    def build_plugin_settings(self, block: str) -> Any:
        """Return a block as settings of the plugin that it names, without settings that only other plugins have."""
        kind, key = CHOICES[block]
        values, cls = self.read_block((block,)), BLOCKS[block]
        name = values.get(key, cls.model_fields[key].default)
        if isinstance(name, str):
            cls = self.find_settings(kind, name, (block, key)) or cls
        dormant = values.keys() - cls.model_fields.keys()
        if dormant:
            dormant &= {field for plugin in load_all(kind).values() for field in plugin.Settings.model_fields}
        for other in dormant:
            if cls is not BLOCKS[block] and self.source.find_place((block, other)).is_override:
                self.refuse((block, other), f"{block}.{other} has no effect where {block}.{key} is {name}.")
        return self.build_settings((block,), cls, {k: v for k, v in values.items() if k not in dormant})

    def check_methods(self) -> dict[str, dict[str, Any]]:
        """Return the settings of each method as they are written, checked but without defaults."""
        checked: dict[str, dict[str, Any]] = {}
        for name in self.read_block(("methods",)):
            block = self.read_block(("methods", name))
            if ONLY in block:
                self.read_block(("methods", name, ONLY))
            checked[name] = {key: value for key, value in block.items() if key != ONLY}
            if cls := self.find_settings("method", name, ("methods", name)):
                self.build_settings(("methods", name), cls, checked[name])
        return checked

    def find_settings(self, kind: str, name: str, keys: Keys) -> type[Settings] | None:
        """Return the settings class of a plugin; None if there is no such plugin, which is a mistake at `keys`."""
        try:
            return find(kind, name).Settings
        except UserError as error:
            self.refuse(keys, f"{'.'.join(keys)}: {error}")
            return None

    def check_combinations(self, params: Params) -> None:
        """Refuse settings that are right by themselves and contradict each other."""
        clients, sampled = params.partition.clients, params.federation.clients_per_round
        if sampled is not None and sampled > clients:
            both = ("federation", "clients_per_round"), ("partition", "clients")
            keys = max(both, key=lambda keys: self.source.find_place(keys).is_override)
            self.refuse(keys, f"federation.clients_per_round is {sampled}, but partition.clients is only {clients}.")
        least, most = params.federation.faults.least, min(clients, sampled or clients)
        if least > most:
            self.refuse(
                ("federation", "faults", "least"),
                f"federation.faults.least is {least}, but no more than {most} clients are sampled in a round.",
            )
        if params.federation.secagg.on and params.federation.faults.late:
            self.refuse(
                ("federation", "faults", "late"),
                "federation.faults.late does not go with federation.secagg.on: a late reply is masked for a round "
                "that is over. Set it to 0, or use federation.faults.missing.",
            )
        for key in ("methods", "seeds"):
            values = getattr(params.experiment, key)
            for number, value in enumerate(values):
                if value in values[:number]:
                    self.refuse(("experiment", key, str(number)), f"experiment.{key} holds {value} twice.")
        for name in params.experiment.methods:
            self.find_settings("method", name, ("experiment", "methods"))
        self.find_settings("method", params.arrivals.method, ("arrivals", "method"))
