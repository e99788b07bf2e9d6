"""Differential privacy: the Gaussian mechanism on all that clients send, whatever the method; one epsilon for a run.

A reply is one release. Each of its k parts is clipped to a length b (`clip` for an update; other parts declare their
bound) and gets noise of standard deviation z sqrt(k) b in each number. In units of sqrt(k) b the parts together are no
longer than 1, so that a reply is one Gaussian mechanism of noise multiplier z.

central: the sum over an exchange's n clients has this much noise, to which each client adds the share 1/sqrt(n); so all
must answer, and secure aggregation keeps the server from seeing single replies with less noise. Neighbours: with a
client's data, or with zeros in place of all that it sends (DP-FedAvg, McMahan et al. 2018).
sample_rate q: in each exchange a client joins with probability q, and sends noise alone where it does not. This is
Poisson sampling that nobody sees, not even the server, so the accountant may count its amplification. A weight is q, so
that a mean is over the expected number of clients. A client that does not join trains and updates its memory all the
same: no reply may depend on whether it joined before.
local: each reply has all of this noise by itself. Neighbours: any two data sets of a client, whose replies are up to
twice the bounds apart, so that the accountant uses z / 2.

Noise comes from the run's seed, so that a simulation can be repeated; a deployment must use a secret source.
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import polars as pl
import torch

from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Part, Reply
from fclmodels.federation.protection.disclosures import find_part_without_bound
from fclmodels.federation.protection.reply_checks import measure_length, read_number
from fclmodels.federation.protection.secure_aggregation import LOG, find_obstacle_to_secure_sums
from fclmodels.numerics.gaussian_mechanism import compute_epsilon, draw_noise
from fclmodels.settings.federation import PrivacySettings

if TYPE_CHECKING:
    from fclmodels.federation.executors.base import Job
    from fclmodels.federation.method import Method

WEIGHT = "weight"  # public, for it is uniform
OF_UPDATES = ("update", "statistics")  # `covers: knowledge` is about all other parts
COVERS = {
    "all": "all that one client sends in the run",
    "knowledge": "what one client sends in the run besides updates, losses and numbers of samples",
    "central": "in the sums over clients, against zeros in its place",
    "local": "as it is sent, whatever its data",
}
SEES_SHARES = "Not against the server, which sees single replies with their share of it: federation.secagg is off"
NOT_COVERED = "Not covered: who has data of which task, accuracies, monitors, sizes of memories in the ledger"


def refuse_unfit_method(method: "Method") -> None:
    """Raise UserError, before a run, under settings with which epsilon would not hold."""
    federation = method.run.params.federation
    privacy = federation.privacy
    if method.is_centralised:
        raise UserError(f"federation.privacy: methods.{method.name} brings all samples to one place. Leave it out.")
    if method.is_personal:
        raise UserError(
            f"federation.privacy: methods.{method.name} keeps parts of the model with its clients, which tell the "
            "accuracy of each without noise. Share them."
        )
    if obstacle := method.obstacle_to_noise:
        raise UserError(f"federation.privacy: methods.{method.name} {obstacle}")
    if unbounded := find_part_without_bound(method):
        raise UserError(
            f"federation.privacy: methods.{method.name} sends {unbounded[0]} ({unbounded[1].kind}), which noise "
            "cannot cover. Use another method."
        )
    if privacy.covers == "all" and federation.weighting != "uniform":
        raise UserError(
            "federation.privacy: federation.weighting: samples tells and trusts numbers of samples. Use uniform."
        )
    if privacy.shared and (obstacle := find_obstacle_to_secure_sums(method)):
        raise UserError(f"federation.privacy: {obstacle} Or set federation.privacy.kind: local.")
    if privacy.shared and federation.attack.kind != "none":
        raise UserError(
            "federation.privacy: bad clients need not add their share of the noise. Leave federation.attack out, or "
            "set federation.privacy.kind to local."
        )
    if privacy.shared and any(federation.faults.rates):
        raise UserError(
            "federation.privacy: a client that does not answer in time takes its share of the noise with it. "
            "Set federation.faults' missing, late, crash and out_of_memory to 0, or federation.privacy.kind to local."
        )


class NoiseStage:
    """The stage of a client's work in which its reply gets noise."""

    def __init__(self, method: "Method") -> None:
        self.method = method

    def prepare(self, client: Client) -> Client:
        return client

    def change(self, reply: Reply, client: Client, job: "Job") -> Reply:
        return add_noise(reply, self.method, client, job.client_count)


stage = NoiseStage


def add_noise(reply: Reply, method: "Method", client: Client, count: int) -> Reply:
    """Return the reply with clipped and noisy parts, and without facts about the client's data.

    count: the number of clients in the exchange.
    """
    privacy = client.run.params.federation.privacy
    public = (WEIGHT, *(OF_UPDATES if privacy.covers == "knowledge" else ()))
    bounds = {name: bound_of(name, part, method) for name, part in reply.parts.items() if name not in public}
    random = client.make_generator("privacy")
    joins = torch.rand((), generator=random, dtype=torch.float64) < privacy.sample_rate
    unit = privacy.multiplier * math.sqrt(len(bounds) / (count if privacy.shared else 1))
    parts = dict(reply.parts)
    for name, bound in bounds.items():
        parts[name] = add_noise_to_part(parts[name], bound, bool(joins), unit * bound, random)
    if privacy.covers == "knowledge":
        return replace(reply, parts=parts)
    if WEIGHT in parts:
        if read_number(parts[WEIGHT]) != 1:
            raise UserError(f"federation.privacy: methods.{method.name} weighs clients. It must weigh all alike.")
        expected = {name: w * privacy.sample_rate for name, w in parts[WEIGHT].tensors.items()}
        parts[WEIGHT] = replace(parts[WEIGHT], tensors=expected)
    return replace(reply, parts=parts, loss=0.0, samples=0)


def bound_of(name: str, part: Part, method: "Method") -> float:
    """Return the largest length of a part; raise UserError where noise cannot cover it."""
    privacy = method.run.params.federation.privacy
    bound = privacy.clip if part.kind == "update" else part.bound
    if bound is None:
        hint = " Noise may make variances negative: use batch_norm: batch." if name == "statistics" else ""
        raise UserError(f"federation.privacy: {name} of methods.{method.name} has no bound, and is not covered.{hint}")
    if part.least != "sum" and privacy.shared:
        raise UserError(f"federation.privacy: {name} of methods.{method.name} is for single replies. Use kind: local.")
    return bound


def add_noise_to_part(part: Part, bound: float, joins: bool, deviation: float, random: torch.Generator) -> Part:
    """Return the part with noise: clipped to a length, or zeros where the client does not join.

    Numbers that are not finite count as 0.
    """
    tensors = {name: X.nan_to_num(0, 0, 0) for name, X in part.tensors.items()}
    norm = measure_length(tensors)
    factor = joins * (min(1.0, bound / norm) if norm else 1.0)
    noise = {name: draw_noise(X, deviation, random) for name, X in tensors.items()}
    return replace(part, tensors={name: X * factor + noise[name] for name, X in tensors.items()}, noise=deviation)


def find_largest_epsilon(method: "Method", ledger: pl.DataFrame) -> dict[str, Any]:
    """Return epsilon of the client with the most releases in the ledger, and what it covers."""
    privacy = method.run.params.federation.privacy
    uncovered = [WEIGHT, *OF_UPDATES, LOG] if privacy.covers == "knowledge" else [WEIGHT]
    up = ledger.filter(pl.col("direction") == "up", pl.col("kind") != "protocol", ~pl.col("part").is_in(uncovered))
    exchange = pl.struct("task", pl.coalesce("base_round", "round"))
    releases = max(up.group_by("client").agg(exchange.n_unique().alias("releases"))["releases"], default=0)
    z = privacy.multiplier if privacy.shared else privacy.multiplier / 2
    scope = f"{COVERS[privacy.covers]}, {COVERS[privacy.kind]}; {describe_sampling(privacy)}"
    open_to_server = privacy.shared and not method.run.params.federation.secagg.on
    return {
        "epsilon": compute_epsilon(z, privacy.sample_rate, releases, privacy.delta),
        "delta": privacy.delta,
        "covers": ". ".join([scope, *([SEES_SHARES] if open_to_server else []), NOT_COVERED]),
        "kind": privacy.kind,
        "noise_multiplier": privacy.multiplier,
        "sample_rate": privacy.sample_rate,
        "clip": privacy.clip,
        "releases": releases,
    }


def describe_sampling(privacy: PrivacySettings) -> str:
    """Return words about weights and amplification by sampling."""
    if privacy.sample_rate == 1:
        return "uniform weights, no amplification by sampling"
    return f"uniform weights, amplified: each joins an exchange with probability {privacy.sample_rate:g} (Poisson)"
