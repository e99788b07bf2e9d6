"""The Gaussian mechanism on all that clients send, whatever the method, and one epsilon for a whole run.

A reply is one release. Each of its k parts is brought to the length b where it has more (`clip` for an update; other
parts declare their bound) and gets noise of standard deviation z sqrt(k) b in each number. In units of sqrt(k) b the
parts together are no longer than 1, so that a reply is one Gaussian mechanism of noise multiplier z.

central: so much noise is in the sum over an exchange's n clients, of which each adds the share 1/sqrt(n); so all must
answer, and secure aggregation is what keeps the server from less noise. Neighbours: with a client's data, or with zeros
in the place of all that it sends (DP-FedAvg, McMahan et al. 2018).
sample_rate q: in each exchange a client joins by a coin of its own, and sends noise alone where it does not. This is
Poisson sampling that nobody sees, the server neither, and the accountant may count what it amplifies. A weight is q,
so that a mean is over the clients expected. Who does not join trains and remembers all the same: no reply may depend on
earlier coins.
local: each reply has all of that noise by itself. Neighbours: any two data sets of a client, whose replies are up to
twice the bounds apart, so that the accountant sees z / 2.

Noise comes from the run's seed, so that a simulation can be repeated; who deploys this draws it from a source that
nobody else knows.
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import polars as pl
import torch

from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Part, Reply
from fclmodels.federation.secure import LOG, needs_more
from fclmodels.federation.soundness import length, number
from fclmodels.numerics.privacy import epsilon, gaussian
from fclmodels.settings import PrivacySettings

if TYPE_CHECKING:
    from fclmodels.methods.base import Method

WEIGHT = "weight"  # public, for it is uniform
OF_UPDATES = ("update", "statistics")  # all other parts are knowledge
COVERS = {
    "all": "all that one client sends in the run",
    "knowledge": "what one client sends in the run besides updates, losses and numbers of samples",
    "central": "in the sums over clients, against zeros in its place",
    "local": "as it is sent, whatever its data",
}
SEES_SHARES = "Not against the server, which sees single replies with their share of it: federation.secagg is off"
NOT_COVERED = "Not covered: who has data of which task, accuracies, monitors, sizes of memories in the ledger"


def refuse_what_is_not_covered(method: "Method") -> None:
    """Before a run: settings under which epsilon would not be what it says."""
    federation = method.run.params.federation
    privacy = federation.privacy
    if not privacy.on:
        return
    if method.pooled_bytes is not None:
        raise UserError(f"federation.privacy: methods.{method.name} brings all samples to one place. Leave it out.")
    if method.personal:
        raise UserError(
            f"federation.privacy: methods.{method.name} keeps parts of the model with its clients, which tell the "
            "accuracy of each without noise. Share them."
        )
    if why := method.without_bound:
        raise UserError(f"federation.privacy: methods.{method.name} {why}")
    if privacy.covers == "all" and federation.weighting != "uniform":
        raise UserError(
            "federation.privacy: federation.weighting: samples tells and trusts numbers of samples. Use uniform."
        )
    if privacy.shared and (why := needs_more(method)):
        raise UserError(f"federation.privacy: {why} Or set federation.privacy.kind: local.")
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


def protected(reply: Reply, method: "Method", client: Client, asked: int) -> Reply:
    """A reply in which nothing depends on the client's data but what is covered. asked: clients of the exchange."""
    privacy = client.run.params.federation.privacy
    public = (WEIGHT, *(OF_UPDATES if privacy.covers == "knowledge" else ()))
    bounds = {name: bound_of(name, part, method) for name, part in reply.parts.items() if name not in public}
    random = client.generator("privacy")
    joins = torch.rand((), generator=random, dtype=torch.float64) < privacy.sample_rate
    unit = privacy.multiplier * math.sqrt(len(bounds) / (asked if privacy.shared else 1))
    parts = dict(reply.parts)
    for name, bound in bounds.items():
        parts[name] = noisy(parts[name], bound, bool(joins), unit * bound, random)
    if privacy.covers == "knowledge":
        return replace(reply, parts=parts)
    if WEIGHT in parts:
        if number(parts[WEIGHT]) != 1:
            raise UserError(f"federation.privacy: methods.{method.name} weighs clients. It must weigh all alike.")
        expected = {name: w * privacy.sample_rate for name, w in parts[WEIGHT].tensors.items()}
        parts[WEIGHT] = replace(parts[WEIGHT], tensors=expected)
    return replace(reply, parts=parts, loss=0.0, samples=0)


def bound_of(name: str, part: Part, method: "Method") -> float:
    privacy = method.run.params.federation.privacy
    bound = privacy.clip if part.kind == "update" else part.bound
    if bound is None:
        way = " Noise may make variances negative: use batch_norm: batch." if name == "statistics" else ""
        raise UserError(f"federation.privacy: {name} of methods.{method.name} has no bound, and is not covered.{way}")
    if part.least == "each" and privacy.shared:
        raise UserError(f"federation.privacy: {name} of methods.{method.name} is for single replies. Use kind: local.")
    return bound


def noisy(part: Part, bound: float, joins: bool, deviation: float, random: torch.Generator) -> Part:
    """The part at the length `bound` where it has more, or zeros, with noise. What is not finite counts as 0."""
    tensors = {name: X.nan_to_num(0, 0, 0) for name, X in part.tensors.items()}
    norm = length(tensors)
    factor = joins * (min(1.0, bound / norm) if norm else 1.0)
    drawn = {name: gaussian(X, deviation, random) for name, X in tensors.items()}
    return replace(part, tensors={name: X * factor + drawn[name] for name, X in tensors.items()}, noise=deviation)


def worth(method: "Method", ledger: pl.DataFrame) -> dict[str, Any]:
    """What noise is worth to the client that has released most, by all that came up to the server."""
    privacy = method.run.params.federation.privacy
    up = ledger.filter(pl.col("direction") == "up", pl.col("kind") != "protocol")
    if privacy.covers == "knowledge":
        up = up.filter(~pl.col("part").is_in([WEIGHT, *OF_UPDATES, LOG]))
    begun = pl.struct("task", pl.coalesce("base_round", "round"))
    releases = max(up.group_by("client").agg(begun.n_unique().alias("releases"))["releases"], default=0)
    z = privacy.multiplier if privacy.shared else privacy.multiplier / 2
    what = f"{COVERS[privacy.covers]}, {COVERS[privacy.kind]}; {amplified(privacy)}"
    open_to_server = privacy.shared and not method.run.params.federation.secagg.on
    return {
        "epsilon": epsilon(z, privacy.sample_rate, releases, privacy.delta),
        "delta": privacy.delta,
        "covers": ". ".join([what, *([SEES_SHARES] if open_to_server else []), NOT_COVERED]),
        "kind": privacy.kind,
        "noise_multiplier": privacy.multiplier,
        "sample_rate": privacy.sample_rate,
        "clip": privacy.clip,
        "releases": releases,
    }


def amplified(privacy: PrivacySettings) -> str:
    if privacy.sample_rate == 1:
        return "uniform weights, no amplification by sampling"
    return f"uniform weights, amplified: each joins an exchange with probability {privacy.sample_rate:g} (Poisson)"
