"""Settings of the block `federation`: rounds, executors, faults, protection and attacks."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from fclmodels.settings.base import Settings


class FaultSettings(Settings):
    """Clients that fail in rounds of training, by a schedule that is drawn from the run's seed."""

    missing: float = Field(0.0, ge=0, le=1, description="probability that a sampled client does not answer a round")
    crash: float = Field(
        0.0, ge=0, le=1, description="probability that a client dies after its training, with its answer and its memory"
    )
    out_of_memory: float = Field(
        0.0, ge=0, le=1, description="probability that a client runs out of memory and cannot train"
    )
    late: float = Field(0.0, ge=0, le=1, description="probability that an answer comes late")
    late_rounds: PositiveInt = Field(1, le=1_000_000, description="largest delay in rounds; any from 1 on is as likely")
    late_weight: Literal["age", "drop"] = Field(
        "age",
        description="weight of a late answer beside those in time: (1 + rounds of delay)^-1/2, or nothing",
    )
    least: PositiveInt = Field(
        1, le=1_000_000, description="fewest answers of a round; with fewer it is repeated with newly drawn clients"
    )

    @property
    def rates(self) -> tuple[float, ...]:
        """Probabilities with which a client does not answer, or not in time."""
        return self.missing, self.crash, self.out_of_memory, self.late

    @property
    def on(self) -> bool:
        """Return whether a round can end without all sampled clients having answered in time."""
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
    """The Gaussian mechanism on what clients send (federation/protection/privacy.py)."""

    noise_multiplier: PositiveFloat | None = Field(
        None,
        description="standard deviation of the noise in a sum, or in each reply, in times a part's bound; null: none",
    )
    kind: Literal["central", "local"] = Field(
        "central", description="each client adds its share of the noise in the sum; local: each all of it"
    )
    covers: Literal["all", "knowledge"] = Field(
        "all", description="what gets noise: all that is sent, or knowledge without updates (FOT, appendix H)"
    )
    clip: PositiveFloat = Field(1.0, description="under noise: largest norm of a client's update")
    features: PositiveFloat = Field(10.0, description="under noise: largest norm of a sample's features in prototypes")
    sample_rate: float = Field(
        1.0,
        gt=0,
        le=1,
        description="probability with which each client joins an exchange; the others send noise alone",
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="under noise: the delta for which epsilon is reported")

    @model_validator(mode="after")
    def _noise_is_on(self) -> "PrivacySettings":
        fields = type(self).model_fields
        idle = [name for name in fields if getattr(self, name) != fields[name].default]
        if self.noise_multiplier is None and idle:
            raise ValueError(f"{idle[0]} does nothing without noise. Set noise_multiplier too, or leave it out.")
        if self.kind == "local" and self.sample_rate < 1:
            raise ValueError("sample_rate needs kind: central: a single reply shows whether its client has joined.")
        return self

    @property
    def on(self) -> bool:
        return self.noise_multiplier is not None

    @property
    def shared(self) -> bool:
        """Return whether only all clients' noise together is enough, so that none may be left out."""
        return self.on and self.kind == "central"

    @property
    def multiplier(self) -> float:
        return self.noise_multiplier or 0.0


class InspectionSettings(Settings):
    """Checks of a reply before it touches the model."""

    check: bool = Field(True, description="refuse replies that are malformed, not finite or far too long")
    largest: float | None = Field(
        30.0,
        ge=1,
        description="largest update, or size of another part, that is accepted, in medians; null: any finite",
    )
    patience: PositiveInt | None = Field(
        3, description="refused replies after which a client is set aside; null: never"
    )


class AttackSettings(Settings):
    """Simulation of bad clients (federation/protection/attacks.py)."""

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
        10.0, description="factor on a bad update's length, or on the samples that are claimed; some attacks have none"
    )


class RobustSettings(Settings):
    """Parameters of the robust rules of federation.aggregation."""

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
        description="factor on the rounds of every task, which keeps at least 1; the result has the numbers",
    )
    clients_per_round: PositiveInt | None = Field(
        None, description="clients sampled each round; null: all that have the task's data"
    )
    redraw_classes: bool = Field(
        False,
        description="a client draws its classes anew in each round, as many as it has, where clients share images "
        "(PIP section 4.2)",
    )
    local_epochs: PositiveInt = Field(1, description="epochs over its samples that a client trains in a round")
    batch_size: PositiveInt = Field(32, le=1_000_000, description="samples a local step")
    weighting: Literal["samples", "uniform"] = Field("samples", description="weight of a client in the average")
    server_lr: PositiveFloat = Field(1.0, le=1000, description="share of the average update that the server applies")
    server_lr_schedule: Literal["constant", "1/t", "1/sqrt(t)"] = Field(
        "constant", description="how server_lr falls with the task number t"
    )
    executor: Literal["auto", "serial", "processes", "ray"] = Field(
        "auto", description="where clients run; auto measures before round 1 and stores its choice, never ray"
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
        "mean", description="how the server combines updates; all but mean bear some bad ones, and need single replies"
    )
    robust: RobustSettings = RobustSettings()
    attack: AttackSettings = AttackSettings()

    @property
    def sums_only(self) -> bool:
        """Return whether the server may see sums of replies only."""
        return self.secagg.on or self.privacy.shared
