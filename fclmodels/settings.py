"""What params.yaml may say: every setting, its default and what it means.

A block that has kinds (data, stream, partition, model) holds what all kinds share here; the chosen
plugin's own `Settings` class extends it. Reading the file is `params.py`'s work.
"""

import inspect
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
    field_validator,
    model_validator,
)

from fclmodels.errors import without_passwords


class Settings(BaseModel):
    """A block of settings: frozen, and a key that it does not know is an error.

    A setting whose name is a word of Python's has it as its alias, which is what is written everywhere.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, serialize_by_alias=True)


class SourceSettings(Settings):
    source: str = Field("digits", description="where the samples come from: fcl list sources")
    root: Path = Field(Path("data/raw"), description="folder of the raw files (not read by embedded sources)")
    skip_bad: bool = Field(False, description="leave out unreadable samples and empty classes instead of refusing them")


class ImageSettings(SourceSettings):
    size: PositiveInt | None = Field(None, description="side in pixels that images are resized to; null: as they are")
    channels: Literal[1, 3] | None = Field(None, description="1 grey, 3 colour; null: as they are")
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
    train_share: float = Field(
        1.0, gt=0, le=1, description="share of the train samples of each class that are dealt at all: a smaller study"
    )
    test_share: float = Field(
        1.0, gt=0, le=1, description="share of the test samples of each class that are evaluated: a smaller study"
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
    keep_frozen: bool = Field(
        False,
        description="keep on disk what frozen first blocks give of a client's samples: computed once a task",
    )
    weights: Path | None = Field(
        None,
        description="state dict (.safetensors or .pth) to start from; torchvision: the one that it publishes",
    )
    fresh: tuple[str, ...] = Field((), description="blocks that keep their random start where weights are read")


class FaultSettings(Settings):
    """Clients that fail in rounds of training, by a schedule that is drawn from the run's seed."""

    missing: float = Field(0.0, ge=0, le=1, description="probability that a sampled client does not answer a round")
    crash: float = Field(
        0.0, ge=0, le=1, description="probability that a client dies after its training, with its answer and its memory"
    )
    out_of_memory: float = Field(
        0.0, ge=0, le=1, description="probability that a client cannot train for want of memory"
    )
    late: float = Field(0.0, ge=0, le=1, description="probability that an answer comes late")
    late_rounds: PositiveInt = Field(1, le=1_000_000, description="largest delay in rounds; any from 1 on is as likely")
    late_weight: Literal["age", "drop"] = Field(
        "age",
        description="what a late answer counts beside those in time: (1 + rounds of delay)^-1/2 of one, or nothing",
    )
    least: PositiveInt = Field(
        1, le=1_000_000, description="answers without which a round is repeated with clients drawn anew"
    )

    @property
    def rates(self) -> tuple[float, ...]:
        """How often a client does not answer, or not in time."""
        return self.missing, self.crash, self.out_of_memory, self.late

    @property
    def on(self) -> bool:
        """Whether a round can go otherwise than all sampled clients answering in time."""
        return any(self.rates) or self.least > 1


class SecAggSettings(Settings):
    """Secure aggregation (Bonawitz et al. 2017): the server gets sums over clients and no single reply."""

    on: bool = Field(False, description="mask replies; methods and settings that need single replies refuse")
    threshold: float = Field(
        2 / 3, gt=0.5, le=1, description="share of the clients that must stay until their sum is unmasked"
    )
    limit: PositiveFloat = Field(
        1e9, ge=1, le=1e12, description="largest number that a client may send; lower: a finer encoding"
    )


class PrivacySettings(Settings):
    """The Gaussian mechanism on what clients send (federation/private.py)."""

    noise_multiplier: PositiveFloat | None = Field(
        None,
        description="standard deviation of the noise in a sum, or in each reply, in times a part's bound; null: none",
    )
    kind: Literal["central", "local"] = Field(
        "central", description="each client adds its share of the noise in the sum; local: each all of it"
    )
    covers: Literal["all", "knowledge"] = Field(
        "all", description="what has noise: all that is sent, or knowledge without updates (FOT, appendix H)"
    )
    clip: PositiveFloat = Field(1.0, description="under noise: largest norm of a client's update")
    features: PositiveFloat = Field(10.0, description="under noise: largest norm of a sample's features in prototypes")
    sample_rate: float = Field(
        1.0,
        gt=0,
        le=1,
        description="probability with which a client joins an exchange, by itself; others send noise alone",
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="under noise: the delta for which epsilon is told")

    @model_validator(mode="after")
    def _noise_is_on(self) -> "PrivacySettings":
        fields = type(self).model_fields
        idle = [name for name in fields if getattr(self, name) != fields[name].default]
        if self.noise_multiplier is None and idle:
            raise ValueError(f"{idle[0]} does nothing without noise. Set noise_multiplier too, or leave it out.")
        if self.kind == "local" and self.sample_rate < 1:
            raise ValueError("sample_rate needs kind: central: a single reply tells whether its client has joined.")
        return self

    @property
    def on(self) -> bool:
        return self.noise_multiplier is not None

    @property
    def shared(self) -> bool:
        """Whether clients add up to the noise together, so that none may be left out."""
        return self.on and self.kind == "central"

    @property
    def multiplier(self) -> float:
        return self.noise_multiplier or 0.0


class InspectionSettings(Settings):
    """What the server does with a reply before it touches the model."""

    check: bool = Field(True, description="refuse replies that are malformed, not finite or far too long")
    largest: float | None = Field(
        30.0,
        ge=1,
        description="largest update, or size of another part, that is taken, in medians; null: any finite",
    )
    patience: PositiveInt | None = Field(
        3, description="refused replies after which a client is not asked any more; null: never"
    )


class AttackSettings(Settings):
    """Some clients are bad, in a simulation (federation/attacks.py)."""

    kind: Literal[
        "none",
        "label-flip",
        "backdoor",
        "sign-flip",
        "scaled",
        "noise",
        "claim",
        "basis",
        "prototype",
        "reference",
    ] = Field("none", description="what bad clients do, for studies: to their data, their updates or their knowledge")
    share: float = Field(0.2, gt=0, le=1, description="share of all clients that are bad, drawn from the seed")
    tasks: PositiveInt | None = Field(None, description="they are bad in the first so many tasks; null: in all")
    strength: PositiveFloat = Field(
        10.0, description="factor on a bad update's length, or on the samples that are claimed; not of all attacks"
    )


class RobustSettings(Settings):
    """Of the robust rules of federation.aggregation."""

    bad: float = Field(
        0.2, ge=0, lt=0.5, description="share of replies that may be bad, under trimmed-mean, krum and multi-krum"
    )
    clip: PositiveFloat = Field(
        1.0, description="under clipped: longest update that counts in full, in lengths of the round's median one"
    )


class FederationSettings(Settings):
    rounds: PositiveInt | tuple[PositiveInt, ...] = Field(
        10, description="rounds a task, or a list with one number a task"
    )
    rounds_scale: PositiveFloat = Field(
        1.0,
        le=1,
        description="shrinks the rounds of every task, to at least 1; what is left of them is in the result",
    )
    clients_per_round: PositiveInt | None = Field(
        None, description="clients sampled each round; null: all that have the task's data"
    )
    local_epochs: PositiveInt = Field(1, description="epochs over its samples that a client trains in a round")
    batch_size: PositiveInt = Field(32, le=1_000_000, description="samples a local step")
    weighting: Literal["samples", "uniform"] = Field("samples", description="weight of a client in the average")
    server_lr: PositiveFloat = Field(1.0, le=1000, description="share of the average update that the server applies")
    server_lr_schedule: Literal["constant", "1/t", "1/sqrt(t)"] = Field(
        "constant", description="how server_lr falls with the task number t"
    )
    executor: Literal["auto", "serial", "processes", "ray"] = Field(
        "auto", description="where clients run; auto measures before round 1 and keeps its choice, never ray"
    )
    workers: PositiveInt | None = Field(
        None, le=10_000, description="worker processes, or actors on ray; null: one a core of the machine or cluster"
    )
    threads: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = Field(
        1, description="torch threads of the serial executor or of each worker; enters every cache key"
    )
    checkpoint_seconds: NonNegativeFloat = Field(
        5.0, description="least time between checkpoints of a task's rounds; 0: after every round"
    )
    faults: FaultSettings = FaultSettings()
    secagg: SecAggSettings = SecAggSettings()
    privacy: PrivacySettings = PrivacySettings()
    inspection: InspectionSettings = InspectionSettings()
    aggregation: Literal["mean", "clipped", "median", "trimmed-mean", "krum", "multi-krum"] = Field(
        "mean", description="what the server makes of updates; all but mean bear some bad ones, and need single replies"
    )
    robust: RobustSettings = RobustSettings()
    attack: AttackSettings = AttackSettings()

    @property
    def sums_only(self) -> bool:
        """Whether the server may not look at single replies."""
        return self.secagg.on or self.privacy.shared


class OptimizerSettings(Settings):
    kind: Literal["sgd", "adam", "adamw"] = Field("sgd", description="the clients' optimiser, new in each round")
    lr: PositiveFloat = Field(0.05, le=1e30, description="its learning rate")
    lr_decay: PositiveFloat = Field(1.0, le=1, description="factor on it from one round of a task to the next")
    momentum: float = Field(0.0, ge=0, lt=1, description="momentum of sgd")
    weight_decay: NonNegativeFloat = Field(0.0, le=1e6, description="weight decay")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of products in local training; weights, gradients and sums are float32 always"
    )


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
    batch_size: PositiveInt = Field(
        256, le=1_000_000, description="samples an evaluation batch; it changes the readings that route whole batches"
    )


class MonitorSettings(Settings):
    """They look on and change no result."""

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
        description="accuracy on the test rows of each task so far, round by round, at the cost of an evaluation a "
        "look; nothing is tuned by it (SPECIAL Figure 2, Table 3)",
    )
    drift: bool = Field(
        False,
        description="distance of the model from the one that the previous task left; where the server anchors to that, "
        "also an oracle's bound of it (SPECIAL Lemma 4.9)",
    )
    conflicts: bool = Field(
        False,
        description="an oracle that reads old tasks' train data: cosines between the gradients of clients and between "
        "those of each client's tasks, how many are negative, gradient divergence (STAMP Figures 5, 6, 21 to 24)",
    )
    every: PositiveInt = Field(5, description="rounds from one look to the next within a task")

    @property
    def of_rounds(self) -> tuple[str, ...]:
        """Those that are on and look at rounds."""
        return tuple(name for name in ("gradients", "accuracy", "drift", "conflicts") if getattr(self, name))


class ExperimentSettings(Settings):
    methods: tuple[str, ...] = Field(
        ("fedavg", "fedprox"), min_length=1, description="methods that dvc repro runs: fcl list methods"
    )
    seeds: tuple[NonNegativeInt, ...] = Field((0, 1), min_length=1, description="seeds of each method")


class GateSettings(Settings):
    """What a model has to reach on val rows to become the champion."""

    acc: float = Field(0.5, ge=0, le=1, description="least mean accuracy on the tasks so far")
    forgetting: float = Field(
        0.2, ge=-1, le=1, description="most mean forgetting: accuracy on a task right after it was learned minus now"
    )


class ArrivalSettings(Settings):
    """The stream that goes on: each data set that arrives is its next task (fcl stream)."""

    name: str = Field(
        "arrivals",
        pattern="^[a-z0-9][a-z0-9-]*$",
        description="name of the stream: of its folder in data/streams and of its model in MLflow",
    )
    incoming: Path = Field(Path("incoming"), description="folder in which tasks arrive, each in a folder of its own")
    method: str = Field("fedavg", description="the method that learns them: fcl list methods")
    seed: NonNegativeInt = Field(0, description="seed of everything random in it")
    gate: GateSettings = GateSettings()


class PaperTable(Settings):
    """Figures of a paper in percent, a row a method. where: settings, by dotted name, that differ from the preset's."""

    table: str
    reading: str
    where: dict[str, str | int | float] = {}
    columns: tuple[Literal["acc", "acc_std", "ft", "ft_std", "fgt", "fgt_std", "af", "af_std", "avg", "pd"], ...]
    rows: dict[str, tuple[float, ...]]

    @model_validator(mode="after")
    def _rows_fit_columns(self) -> "PaperTable":
        for method, row in self.rows.items():
            if len(row) != len(self.columns):
                raise ValueError(f"{method} has {len(row)} figures for {len(self.columns)} columns.")
        return self


class PresetSettings(Settings):
    name: str | None = Field(None, description="name of the preset; null: these settings are nobody's preset")
    paper: str = Field("", description="the paper whose settings these are")
    needs: tuple[str, ...] = Field((), description="what has to be there before it can run")
    note: str = Field("", description="where it differs from the paper")
    figures: tuple[PaperTable, ...] = Field((), description="the paper's figures: table, reading, where, columns, rows")
    only: dict[str, dict[Literal["model", "federation", "optimizer", "augment"], dict[str, Any]]] = Field(
        {}, description="settings that hold for one method only: under its name, as they are written at the top"
    )


class TrackingSettings(Settings):
    uri: str = Field("sqlite:///mlflow.db", description="MLflow's store or server")
    experiment: str | None = Field(None, description="MLflow experiment; null: named after source and stream")

    @field_validator("uri")
    @classmethod
    def _no_password_of_a_server(cls, uri: str) -> str:
        """MLflow tells a server's whole address whenever something is wrong; of databases it hides the password."""
        if uri.startswith("http") and without_passwords(uri) != uri:
            raise ValueError("leave the password out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.")
        return uri


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


def blocks_of(cls: type[Settings]) -> dict[str, type[Settings]]:
    """The settings of a class that are blocks themselves."""
    return {
        name: field.annotation
        for name, field in cls.model_fields.items()
        if inspect.isclass(field.annotation) and issubclass(field.annotation, Settings)
    }


BLOCKS = blocks_of(Params)
