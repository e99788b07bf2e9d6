"""What params.yaml may say: every setting, its default and what it means.

A block that has kinds (data, stream, partition, model) holds what all kinds share here; the chosen
plugin's own `Settings` class extends it. Reading the file is `params.py`'s work.
"""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from fclmodels.errors import UserError
from fclmodels.plugins import all_of


class Settings(BaseModel):
    """A block of settings: frozen, and a key that it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SourceSettings(Settings):
    source: str = Field("digits", description="where the samples come from: fcl list sources")
    root: Path = Field(Path("data/raw"), description="folder of the raw files (not read by embedded sources)")
    size: PositiveInt | None = Field(None, description="side in pixels that images are resized to; none: as they are")
    channels: Literal[1, 3] | None = Field(None, description="1 grey, 3 colour; none: as they are")
    skip_bad: bool = Field(False, description="leave out unreadable images and empty classes instead of refusing them")
    mean: tuple[float, ...] = Field(
        (0.5,), description="subtracted from pixels in 0..1, one for all channels or one each"
    )
    std: tuple[PositiveFloat, ...] = Field((0.5,), description="then divided by, one for all channels or one each")


class StreamSettings(Settings):
    kind: str = Field("class-incremental", description="how samples become tasks: fcl list streams")
    seed: NonNegativeInt = Field(0, description="seed of everything random in the stream")


class PartitionSettings(Settings):
    kind: str = Field("dirichlet", description="how a task's samples go to clients: fcl list partitions")
    clients: PositiveInt = Field(10, le=1_000_000, description="number of clients")
    val: float = Field(0.1, ge=0, lt=1, description="share of each client's train samples set apart for tuning")
    test: float = Field(
        0.2, gt=0, lt=1, description="share of samples held out for evaluation where the source has no official split"
    )
    task_share: float = Field(
        1.0, gt=0, le=1, description="share of the clients that have data of a task, drawn anew for each task"
    )
    seed: NonNegativeInt = Field(0, description="seed of the partition")


class BackboneSettings(Settings):
    backbone: str = Field("cnn", description="the network below the head: fcl list backbones")
    head: Literal["auto", "growing", "per-task"] = Field(
        "auto", description="one head that grows or one a task; auto: what the stream suggests"
    )
    loss_over: Literal["seen", "task"] = Field(
        "seen", description="classes in the training loss: all seen so far, or the current task's"
    )
    freeze: tuple[str, ...] = Field((), description="blocks of the backbone that are frozen after the first task")
    weights: Path | None = Field(None, description="state dict (.safetensors or .pth) that the backbone starts from")


class FederationSettings(Settings):
    rounds: PositiveInt | tuple[PositiveInt, ...] = Field(
        10, description="rounds a task, or a list with one number a task"
    )
    clients_per_round: PositiveInt | None = Field(
        None, description="clients sampled each round; none: all that have the task's data"
    )
    local_epochs: PositiveInt = Field(1, description="epochs over its samples that a client trains in a round")
    batch_size: PositiveInt = Field(32, le=1_000_000, description="samples a local step")
    weighting: Literal["samples", "uniform"] = Field("samples", description="weight of a client in the average")
    server_lr: PositiveFloat = Field(1.0, le=1000, description="share of the average update that the server applies")
    server_lr_schedule: Literal["constant", "1/t", "1/sqrt(t)"] = Field(
        "constant", description="how server_lr falls with the task number t"
    )
    executor: Literal["auto", "serial", "processes"] = Field(
        "auto", description="where clients run; auto measures before round 1 and keeps its choice"
    )
    workers: PositiveInt | None = Field(None, le=256, description="worker processes; none: one a core")
    threads: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = Field(
        1, description="torch threads of the serial executor or of each worker; enters every cache key"
    )
    checkpoint_seconds: NonNegativeFloat = Field(
        5.0, description="least time between checkpoints of a task's rounds; 0: after every round"
    )


class OptimizerSettings(Settings):
    kind: Literal["sgd", "adam", "adamw"] = Field("sgd", description="the clients' optimiser, new in each round")
    lr: PositiveFloat = Field(0.05, le=1e30, description="its learning rate")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd")
    weight_decay: NonNegativeFloat = Field(0.0, le=1e6, description="weight decay")


def _ascending(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise ValueError("the smaller share must come first.")
    return pair


AreaShare = Annotated[float, Field(gt=0, le=1)]
AreaRange = Annotated[tuple[AreaShare, AreaShare], AfterValidator(_ascending)]


class AugmentSettings(Settings):
    crop_padding: NonNegativeInt = Field(
        0, le=1024, description="pixels of zero padding before a random crop of the old size"
    )
    flip: bool = Field(False, description="mirror left and right with probability 1/2")
    brightness: float = Field(0.0, ge=0, le=1, description="brightness is multiplied by a factor in 1 +- this")
    resize_crop: AreaRange | None = Field(
        None, description="random crop with area shares in this range, resized to the old size"
    )


class EvaluationSettings(Settings):
    batch_size: PositiveInt = Field(256, le=1_000_000, description="samples an evaluation batch")


class ExperimentSettings(Settings):
    methods: tuple[str, ...] = Field(
        ("fedavg", "fedprox"), min_length=1, description="methods that dvc repro runs: fcl list methods"
    )
    seeds: tuple[NonNegativeInt, ...] = Field((0, 1), min_length=1, description="seeds of each method")


class TrackingSettings(Settings):
    uri: str = Field("sqlite:///mlflow.db", description="MLflow's store or server")
    experiment: str | None = Field(None, description="MLflow experiment; none: named after source and stream")


class Params(Settings):
    """The whole of params.yaml, with every default filled in."""

    data: SourceSettings
    stream: StreamSettings
    partition: PartitionSettings
    model: BackboneSettings
    federation: FederationSettings = FederationSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    augment: AugmentSettings = AugmentSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    device: Literal["auto", "cpu", "cuda"] | Annotated[str, Field(pattern="^cuda:[0-9]+$")] = Field(
        "auto", description="where the server and the clients compute; auto takes a GPU where there is one"
    )
    methods: dict[str, Any] = Field(default_factory=dict, description="settings of each method: fcl params METHOD")
    experiment: ExperimentSettings = ExperimentSettings()
    tracking: TrackingSettings = TrackingSettings()


CHOICES = {  # the blocks whose settings depend on a plugin: its kind, and the key that names it
    "data": ("source", "source"),
    "stream": ("stream", "kind"),
    "partition": ("partition", "kind"),
    "model": ("backbone", "backbone"),
}
BLOCKS: dict[str, type[Settings]] = {
    name: field.annotation
    for name, field in Params.model_fields.items()
    if inspect.isclass(field.annotation) and issubclass(field.annotation, Settings)
}


@dataclass(frozen=True)
class Setting:
    """One setting, explained."""

    path: str
    kinds: tuple[str, ...]  # the plugins that have it; empty: all of them, or no plugin's matter
    type: str
    default: Any
    allowed: str  # the end of the sentence "it must be ..."
    description: str


def explain(name: str | None = None) -> list[Setting]:
    """Every setting, or those of a plugin, a block, or a setting's whole path or last name."""
    every = [row for block in Params.model_fields for row in _of_block(block)]
    if name is None:
        return every
    if name in all_of("method"):
        return [row for row in every if row.path.startswith(f"methods.{name}.")]
    for block, (kind, _) in CHOICES.items():
        if name in all_of(kind):
            return [r for r in every if r.path.startswith(f"{block}.") and (not r.kinds or name in r.kinds)]
    found = [row for row in every if f".{name}." in f".{row.path}."]
    if not found:
        names = {part for row in every for part in (row.path, *row.path.split("."), *row.kinds)}
        near = get_close_matches(name, names, n=1)
        hint = f"Did you mean {near[0]}?" if near else "fcl params shows them all."
        raise UserError(f"{name} is neither a setting nor a plugin. {hint}")
    return found


def suggestion(keys: Sequence[str], known: Iterable[str]) -> str:
    """The end of an error line: the nearest path of the same block, else those of about this name elsewhere."""
    *block, name = keys
    leaves = {path: path.rpartition(".")[2] for path in known}
    beside = {leaf: path for path, leaf in leaves.items() if path == ".".join([*block, leaf])}
    near = [beside[leaf] for leaf in get_close_matches(name, beside, n=1)]
    if not near and name in ("kind", "name", "type") and ".".join(block) in CHOICES:
        near = [beside[CHOICES[block[0]][1]]]
    if not near:
        alike = get_close_matches(name, set(leaves.values()), n=3, cutoff=0.8)
        near = [path for path, leaf in leaves.items() if leaf in alike][:3]
    return f"Did you mean {' or '.join(near)}?" if near else f"Valid: {', '.join(beside) or 'none here'}."


def describe(cls: type[Settings], prefix: str = "", kinds: tuple[str, ...] = ()) -> list[Setting]:
    """Every setting of a class, as its JSON schema has them."""
    return [
        Setting(prefix + key, kinds, _type(s), s.get("default"), _allowed(s), s.get("description", ""))
        for key, s in cls.model_json_schema()["properties"].items()
    ]


def _of_block(block: str) -> list[Setting]:
    if block == "methods":
        return [r for name, m in all_of("method").items() for r in describe(m.Settings, f"methods.{name}.", (name,))]
    if block not in BLOCKS:
        return [row for row in describe(Params) if row.path == block]
    if block not in CHOICES:
        return describe(BLOCKS[block], f"{block}.")
    kind, key = CHOICES[block]
    plugins = all_of(kind)
    rows: dict[str, Setting] = {}
    for name, plugin in plugins.items():
        for row in describe(plugin.Settings, f"{block}."):
            same = rows.get(repr(row), row)
            rows[repr(row)] = replace(same, kinds=(*same.kinds, name))
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


def _type(schema: dict[str, Any]) -> str:
    match schema:
        case {"anyOf": branches}:
            return " | ".join(dict.fromkeys(map(_type, branches)))
        case {"type": "array"}:
            return f"list[{' | '.join(dict.fromkeys(map(_type, _items(schema))))}]"
        case {"format": "path"}:
            return "path"
        case {"type": kind}:
            return TYPES[kind][0]
    return "any"


def _allowed(schema: dict[str, Any]) -> str:
    match schema:
        case {"anyOf": branches}:
            return ", or ".join(map(_allowed, branches))
        case {"enum": values}:
            return f"{', '.join(map(str, values[:-1]))} or {values[-1]}"
        case {"const": value}:
            return str(value)
        case {"pattern": pattern}:
            return f"text of the form {pattern.strip('^$')}"
        case {"type": "array"}:
            fewest = f" of at least {schema['minItems']}" if "minItems" in schema else ""
            length = f" of {schema['minItems']}" if "prefixItems" in schema else fewest
            return f"a list{length}, each item {' or '.join(dict.fromkeys(map(_allowed, _items(schema))))}"
        case {"format": "path"}:
            return "a path"
        case {"type": kind}:
            limits = [f"{words} {schema[limit]:g}" for limit, words in LIMITS.items() if limit in schema]
            return " ".join([TYPES[kind][1], " and ".join(limits)]).strip()
    return "any value"


def _items(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return schema.get("prefixItems", [schema.get("items", {})])
