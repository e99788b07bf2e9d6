"""Schema of params.yaml: every setting, its default and its meaning.

A block that has kinds (data, stream, partition, model) has the settings of all kinds here; the `Settings` class of
the plugin that it names extends it. load.py reads the file.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from fclmodels.errors import hide_passwords
from fclmodels.settings.base import Settings, list_blocks
from fclmodels.settings.federation import FederationSettings
from fclmodels.settings.preset import PresetSettings


class SourceSettings(Settings):
    source: str = Field("digits", description="where the samples come from: fcl list sources")
    root: Path = Field(Path("data/raw"), description="folder of the raw files (not read by embedded sources)")
    skip_bad: bool = Field(False, description="leave out unreadable samples and empty classes instead of refusing them")


class ImageSettings(SourceSettings):
    size: PositiveInt | None = Field(None, description="side in pixels that images are resized to; null: as they are")
    smaller: Literal["resize", "pad"] = Field(
        "resize", description="images smaller than size are enlarged, or get a black border"
    )
    channels: Literal[1, 3] | None = Field(None, description="1 grey, 3 colour; null: as they are")
    mean: tuple[float, ...] = Field(
        (0.5,), description="subtracted from pixels in 0..1, one for all channels or one each"
    )
    std: tuple[PositiveFloat, ...] = Field((0.5,), description="then divided by, one for all channels or one each")


class StreamSettings(Settings):
    kind: str = Field("class-incremental", description="how samples become tasks: fcl list streams")
    seed: NonNegativeInt | None = Field(
        None, description="seed of everything random in the stream; null: the run's seed"
    )


class PartitionSettings(Settings):
    kind: str = Field("dirichlet", description="how a task's samples go to clients: fcl list partitions")
    clients: PositiveInt = Field(10, le=1_000_000, description="number of clients")
    val: float = Field(0.1, ge=0, lt=1, description="share of each client's train samples set apart for tuning")
    test: float = Field(
        0.2, gt=0, lt=1, description="share of samples held out for evaluation where the source has no official split"
    )
    train_share: float = Field(
        1.0, gt=0, le=1, description="share of the train samples of each class that are used at all: a smaller study"
    )
    test_share: float = Field(
        1.0, gt=0, le=1, description="share of the test samples of each class that are evaluated: a smaller study"
    )
    task_share: float = Field(
        1.0, gt=0, le=1, description="share of the clients that have data of a task, drawn anew for each task"
    )
    seed: NonNegativeInt | None = Field(None, description="seed of the partition; null: the run's seed")


class BackboneSettings(Settings):
    backbone: str = Field("cnn", description="the network below the head: fcl list backbones")
    head: Literal["auto", "growing", "per-task"] = Field(
        "auto", description="one head that grows or one a task; auto: what the stream suggests"
    )
    loss_over: Literal["seen", "task"] = Field(
        "seen", description="classes in the training loss: all seen so far, or the current task's"
    )
    freeze: tuple[str, ...] = Field((), description="blocks of the backbone that are frozen after the first task")
    freeze_after: Literal[0, 1] = Field(
        1,
        description="tasks that are learned before they freeze: 1, or 0 for blocks of pretrained weights",
    )
    keep_frozen: bool = Field(
        False,
        description="store activations of frozen first blocks on disk: computed once a task for each sample",
    )
    weights: Path | None = Field(
        None,
        description="file of weights (fcl weights import) to start from; torchvision or timm: what it publishes",
    )
    fresh: tuple[str, ...] = Field((), description="blocks that keep their random start where weights are read")


class OptimizerSettings(Settings):
    kind: Literal["sgd", "adam", "adamw"] = Field("sgd", description="the clients' optimiser, new in each round")
    lr: PositiveFloat = Field(0.05, le=1e30, description="its learning rate")
    lr_decay: PositiveFloat = Field(1.0, le=1, description="factor on it from one round of a task to the next")
    lr_decay_epochs: PositiveInt | None = Field(
        None, description="local epochs of a task after which lr_decay applies, in place of a round"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd")
    weight_decay: NonNegativeFloat = Field(0.0, le=1e6, description="weight decay")
    clip: PositiveFloat | None = Field(None, description="most length of a step's gradient; null: any")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of products in local training; weights, gradients and sums are float32 always"
    )

    def compute_lr(self, round: int, epochs: int) -> float:
        """Return the learning rate after so many rounds of a task, which are so many local epochs."""
        return self.lr * self.lr_decay ** (round if self.lr_decay_epochs is None else epochs // self.lr_decay_epochs)


def _refuse_unordered(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[0] > pair[1]:
        raise ValueError("the smaller share must come first.")
    return pair


AreaShare = Annotated[float, Field(gt=0, le=1)]
AreaRange = Annotated[tuple[AreaShare, AreaShare], AfterValidator(_refuse_unordered)]


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
    batch_size: PositiveInt = Field(
        256, le=1_000_000, description="samples an evaluation batch; it changes the readings that route whole batches"
    )


class MonitorSettings(Settings):
    """Monitors, which change no result."""

    used_share: bool = Field(
        False,
        description="share of each protected layer's input space in use, after each task, where the server has the "
        "bases (not gpm)",
    )
    gradients: bool = Field(
        False,
        description="an oracle that reads old tasks' train data: gradient adequacy rho, interference beta, and the "
        "loss increase of old tasks beside its bound (FedProTIP section 5)",
    )
    accuracy: bool = Field(
        False,
        description="accuracy on the test rows of each task so far, round by round, at the cost of an evaluation "
        "each; nothing is tuned by it (SPECIAL Figure 2, Table 3)",
    )
    drift: bool = Field(
        False,
        description="distance of the model from the one that the previous task left; where the server anchors to that, "
        "also an oracle's bound of it (SPECIAL Lemma 4.9); also how far features moved (FedProTIP)",
    )
    conflicts: bool = Field(
        False,
        description="an oracle that reads old tasks' train data: cosines between the gradients of clients and between "
        "those of each client's tasks, how many are negative, gradient divergence (STAMP Figures 5, 6, 21 to 24)",
    )
    transfer: bool = Field(
        False,
        description="an oracle that reads old tasks' train data: alignment of clients' gradients with earlier tasks', "
        "these tasks' loss and a bound of it, the gradient over all tasks (SPECIAL Theorems 4.7 and 4.10)",
    )
    client_models: bool = Field(
        False,
        description="local and global accuracy of the clients' own models after a task's last round, which each client "
        "repeats (STAMP Figure 1)",
    )
    every: PositiveInt = Field(5, description="rounds between two looks of a monitor within a task")

    @property
    def round_monitors(self) -> tuple[str, ...]:
        """Names of the monitors that are on and look at rounds."""
        names = ("gradients", "accuracy", "drift", "conflicts", "transfer", "client_models")
        return tuple(name for name in names if getattr(self, name))


class ExperimentSettings(Settings):
    methods: tuple[str, ...] = Field(
        ("fedavg", "fedprox"), min_length=1, description="methods that dvc repro runs: fcl list methods"
    )
    seeds: tuple[NonNegativeInt, ...] = Field((0, 1), min_length=1, description="seeds of each method")


class GateSettings(Settings):
    """Limits on val rows that a model must meet to become the champion."""

    acc: float = Field(0.5, ge=0, le=1, description="least mean accuracy on the tasks so far")
    forgetting: float = Field(
        0.2, ge=-1, le=1, description="most mean forgetting: accuracy on a task right after it was learned minus now"
    )


class ArrivalSettings(Settings):
    """Settings of a growing stream: each data set that arrives is its next task (fcl stream)."""

    name: str = Field(
        "arrivals",
        pattern="^[a-z0-9][a-z0-9-]*$",
        description="name of the stream: of its folder in data/streams and of its model in MLflow",
    )
    incoming: Path = Field(Path("incoming"), description="folder in which tasks arrive, each in a folder of its own")
    method: str = Field("fedavg", description="the method that learns them: fcl list methods")
    seed: NonNegativeInt = Field(0, description="seed of everything random in it")
    gate: GateSettings = GateSettings()


class TrackingSettings(Settings):
    uri: str = Field("sqlite:///mlflow.db", description="MLflow's store or server")
    experiment: str | None = Field(None, description="MLflow experiment; null: named after source and stream")

    @field_validator("uri")
    @classmethod
    def _no_password_of_a_server(cls, uri: str) -> str:
        """Refuse it: MLflow's errors show a server's full address; of databases they hide the password."""
        if uri.startswith("http") and hide_passwords(uri) != uri:
            raise ValueError("leave the password out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.")
        return uri


class Params(Settings):
    """All of params.yaml, with every default filled in."""

    data: SourceSettings
    stream: StreamSettings
    partition: PartitionSettings
    model: BackboneSettings
    federation: FederationSettings = FederationSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    augment: AugmentSettings = AugmentSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    monitors: MonitorSettings = MonitorSettings()
    device: Literal["auto", "cpu", "cuda"] | Annotated[str, Field(pattern="^cuda:[0-9]+$")] = Field(
        "auto", description="where the server and the clients compute; auto takes a GPU where there is one"
    )
    methods: dict[str, Any] = Field(default_factory=dict, description="settings of each method: fcl params METHOD")
    experiment: ExperimentSettings = ExperimentSettings()
    arrivals: ArrivalSettings = ArrivalSettings()
    preset: PresetSettings = PresetSettings()
    tracking: TrackingSettings = TrackingSettings()


CHOICES = {  # the blocks whose settings depend on a plugin: its kind, and the key that names it
    "data": ("source", "source"),
    "stream": ("stream", "kind"),
    "partition": ("partition", "kind"),
    "model": ("backbone", "backbone"),
}


BLOCKS = list_blocks(Params)
