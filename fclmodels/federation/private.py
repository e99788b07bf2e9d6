"""The Gaussian mechanism on updates: each client's update is clipped and gets noise, whatever the method.

central: the sum over a round's clients has noise of standard deviation z * clip, of which each of n clients adds the
share 1/sqrt(n); so all must answer, and secure aggregation is what keeps the server from less noise. Neighbours: with
a client's data, or with an update of zero in its place. DP-FedAvg (McMahan et al. 2018), without amplification by
sampling: rounds here sample a fixed number of clients.
local: each update has noise of standard deviation z * clip by itself. Neighbours: any two data sets of a client, which
are 2 clip apart, so that the accountant sees z / 2.

Epsilon is that of a client that is sampled in every round of its tasks. Noise comes from the run's seed, so that a
simulation can be repeated; who deploys this draws it from a source that nobody else knows.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Part, Reply
from fclmodels.numerics.privacy import epsilon, noise_share

if TYPE_CHECKING:
    from fclmodels.methods.base import Method

COVERED = ("update", "statistics")  # clipped together
PUBLIC = ("weight",)  # under uniform weights
COVERS = {
    "central": "one client's updates in all rounds, in the sums over clients, which are all that a server sees under "
    "secure aggregation, against an update of zero; sampling amplifies nothing",
    "local": "one client's updates in all rounds, as they are sent, whatever its data",
}
NOT_COVERED = "Not covered: training losses and numbers of samples in the log"


def refuse_what_is_not_covered(method: "Method") -> None:
    """Before a run: settings under which epsilon would not be what it says."""
    federation = method.run.params.federation
    if not federation.privacy.on:
        return
    if method.pooled_bytes is not None:
        raise UserError(f"federation.privacy: methods.{method.name} brings all samples to one place. Leave it out.")
    if other := method.sends_besides:
        raise UserError(
            f"federation.privacy: methods.{method.name} sends {other} besides updates, which it does not cover. "
            "Use a method that sends updates alone, or the method's own noise."
        )
    if federation.weighting != "uniform":
        raise UserError(
            "federation.privacy: federation.weighting: samples tells and trusts numbers of samples. Use uniform."
        )
    if federation.privacy.kind == "central" and (federation.faults.missing or federation.faults.late):
        raise UserError(
            "federation.privacy: a client that does not answer in time takes its share of the noise with it. "
            "Set federation.faults.missing and federation.faults.late to 0, or federation.privacy.kind to local."
        )


def protected(reply: Reply, method: "Method", client: Client) -> Reply:
    """A reply in which nothing depends on the client's data but what is covered."""
    if other := reply.parts.keys() - {*COVERED, *PUBLIC}:
        raise UserError(f"federation.privacy: {', '.join(sorted(other))} of methods.{method.name} is not covered.")
    if not reply.parts:
        return reply
    privacy = client.run.params.federation.privacy
    sharing = method.sampled(client.task) if privacy.kind == "central" else 1
    covered = [reply.parts[name] for name in COVERED if name in reply.parts]
    tensors = [X for part in covered for X in part.tensors.values()]
    factor = (privacy.clip / torch.stack(torch._foreach_norm(tensors)).norm()).clamp(max=1)
    random, deviation = client.generator("update noise"), privacy.multiplier * privacy.clip

    def noisy(part: Part) -> Part:
        noise = {name: noise_share(X, deviation, sharing, random) for name, X in part.tensors.items()}
        return replace(part, tensors={name: X * factor + noise[name] for name, X in part.tensors.items()})

    return replace(reply, parts={n: noisy(part) if n in COVERED else part for n, part in reply.parts.items()})


def worth(method: "Method", tasks: int) -> dict[str, Any]:
    """What the noise in the rounds of so many tasks is worth to the client that has most of them."""
    privacy, run = method.run.params.federation.privacy, method.run
    rounds: dict[int, int] = {}
    for task in range(tasks):
        for client in method.participants(task):
            rounds[client] = rounds.get(client, 0) + run.rounds(task)
    most, z = max(rounds.values(), default=0), privacy.multiplier
    seen = z if privacy.kind == "central" else z / 2
    return {
        "epsilon": epsilon(seen, sample_rate=1.0, releases=1, rounds=most, delta=privacy.delta),
        "delta": privacy.delta,
        "covers": f"{COVERS[privacy.kind]}. {NOT_COVERED}",
        "noise_multiplier": z,
        "clip": privacy.clip,
        "rounds": most,
    }
