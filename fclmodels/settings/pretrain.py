"""Schema of pretrain/params.yaml, and its reading; most blocks are those of params.yaml."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, create_model

from fclmodels.settings.base import Settings, list_blocks
from fclmodels.settings.describe import describe, explain
from fclmodels.settings.load import SettingsCheck
from fclmodels.settings.schema import (
    CHOICES,
    AugmentSettings,
    BackboneSettings,
    Params,
    SourceSettings,
    TrackingSettings,
)
from fclmodels.settings.yaml_source import YamlSource


class AdamWSettings(Settings):
    lr: PositiveFloat = Field(1e-3, le=1e30, description="AdamW's rate at the start; it falls to 0 as half a cosine")
    weight_decay: NonNegativeFloat = Field(0.05, le=1e6, description="weight decay")


class PretrainSettings(Settings):
    epochs: PositiveInt = Field(10, le=1_000_000, description="times over all training samples")
    batch_size: PositiveInt = Field(128, le=1_000_000, description="samples a step")
    test: float = Field(0.1, gt=0, lt=1, description="share of samples held out where the source has no official split")
    threads: PositiveInt = Field(1, le=256, description="torch threads; the last bits of the weights depend on them")
    seed: NonNegativeInt = Field(0, description="seed of all that is random in training")
    name: str | None = Field(
        None, pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$", description="in MLflow's registry; null: backbone and source"
    )


class PretrainParams(Settings):
    """All of pretrain/params.yaml, with every default filled in."""

    data: SourceSettings
    model: BackboneSettings
    optimizer: AdamWSettings
    augment: AugmentSettings
    pretrain: PretrainSettings
    tracking: TrackingSettings
    device: str

    @property
    def name(self) -> str:
        """Name of the weights, by default what was trained and on what."""
        return self.pretrain.name or f"{self.model.backbone}-{self.data.source}"


BLOCKS = list_blocks(PretrainParams)
OWN = ("optimizer", "pretrain")  # blocks that params.yaml has otherwise or not at all
_OUTSIDE: dict[str, Any] = {"device": (Params.model_fields["device"].annotation, Params.model_fields["device"])}
_Outside = create_model("_Outside", __base__=Settings, **_OUTSIDE)  # the settings outside of all blocks


class _PretrainCheck(SettingsCheck):
    @cached_property
    def valid_paths(self) -> list[str]:
        shared = (row.path for row in explain() if row.path.partition(".")[0] in BLOCKS.keys() - set(OWN))
        own = (row.path for block in OWN for row in describe(BLOCKS[block], f"{block}."))
        return [*PretrainParams.model_fields, *shared, *own]


def load_pretrain_params(path: str | Path, overrides: Sequence[str] = ()) -> PretrainParams:
    """Read the settings of a file after overrides `a.b=value`; one error lists all mistakes, in file order."""
    source = YamlSource(str(path))
    source.read_file(Path(path))
    for number, text in enumerate(overrides):
        source.override(number, text)
    check = _PretrainCheck(source)
    if "source" not in check.read_block(("data",)):
        check.refuse(("data", "source"), "data.source is not there. Name what to train on: fcl list sources.")
    outside = {key: value for key, value in check.read_block(()).items() if key not in BLOCKS}
    settings = check.build_settings((), _Outside, outside)
    blocks = {
        name: check.build_plugin_settings(name) if name in CHOICES else check.build_settings((name,), cls)
        for name, cls in BLOCKS.items()
    }
    check.raise_problems()
    return PretrainParams(**blocks, **dict(settings))
