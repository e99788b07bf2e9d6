"""Inspection of replies before they touch the model; pure functions, of one reply and of all replies of an exchange.

By itself a reply must be finite, an update's tensors those of the model, a basis orthonormal and of the layers whose
bases were sent, counts not negative, a weight one that a client can have, a prototype the moments of real numbers (no
variance below 0), energies those of one input, and a sketch as long as they say (reply_checks.py). It must have the
form that its method declares (parts, kinds, names, types, shapes), and where the method declares nothing, the form that
most replies have. No size may exceed `largest` times the round's median (for an update the largest median of the task's
rounds so far): the length of an update, of running statistics' change, of a reference and of the samples in a
prototype, the root of a layer's energy, a loss. Where w*x travels the size is that of x, so that many samples make no
update long. Sketches and directions outside of a basis have no such bound: an honest client with something new may have
a thousand times the median. A reply that fails is refused: it costs its bytes, gets a row in the ledger, and counts
against its client, who is set aside after `patience` refusals.

Under secure aggregation a client inspects its own reply and withholds it where it fails; the server sees forms alone.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fclmodels.federation.messages import Part, Payload, Reply
from fclmodels.federation.protection.reply_checks import (
    MOST_SAMPLES,
    NOT_FINITE,
    PartError,
    check_labels,
    check_part,
    find_misfit_to_bases,
    find_overlong_sketch,
    measure_length,
    measure_sizes,
    read_number,
)
from fclmodels.federation.server import Server
from fclmodels.settings.federation import InspectionSettings

WITHHELD = "is withheld"
UPDATE = "update"
MOST_LOSS = torch.finfo(torch.float32).max  # the largest loss for the log, so that sums do not overflow

ReplyForm = tuple[tuple[object, ...], ...]  # an entry for each tensor


class ReplyDefect(NamedTuple):
    """A reason why a reply cannot be used."""

    part: str  # the part's name, or "loss" or "reply"
    why: str  # in words that follow it


class Refusal(NamedTuple):
    """A reply that is not used."""

    round: int
    client: int
    defect: ReplyDefect


@dataclass(frozen=True)
class Finding:
    """The result of the inspection of one reply, for the comparison with others."""

    defect: ReplyDefect | None
    form: ReplyForm = ()
    sizes: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by part; `UPDATE`: of all updates together


def inspect_reply(reply: Reply, payload: Payload, most: float = MOST_SAMPLES, classes: int | None = None) -> Finding:
    """Return the finding on a reply by itself.

    most: the largest weight of a client in a mean. classes: how many the server has columns for; None: any number.
    """
    if not math.isfinite(reply.loss):
        return Finding(ReplyDefect("loss", NOT_FINITE))
    if not (abs(reply.loss) <= MOST_LOSS and 0 <= reply.samples <= MOST_SAMPLES):
        return Finding(ReplyDefect("loss", f"is above {MOST_LOSS:.2g}, or not of 0 to {MOST_SAMPLES:g} samples"))
    norms = {name: measure_length(part.tensors) for name, part in reply.parts.items()}
    for name, part in reply.parts.items():
        try:
            check_part(part, norms[name], payload, reply.parts, most)
            check_labels(part, classes)
        except PartError as problem:
            return Finding(ReplyDefect(name, str(problem)))
    if "bases" in payload and (misfit := find_misfit_to_bases(reply.parts, payload["bases"].tensors)):
        return Finding(ReplyDefect(misfit, "is not of the layers that have bases"))
    if overlong := find_overlong_sketch(reply.parts):
        return Finding(ReplyDefect(overlong, "is longer than its energy says"))
    unweighted = {
        n: norms[n] / (read_number(reply.parts[part.over]) if part.over else 1) for n, part in reply.parts.items()
    }
    sizes = {name: of_part for name, part in reply.parts.items() if (of_part := measure_sizes(part, unweighted[name]))}
    if lengths := [unweighted[name] for name, part in reply.parts.items() if part.kind == "update"]:
        sizes[UPDATE] = [math.hypot(*lengths)]
    return Finding(None, describe_form(reply.parts), sizes)


def outline(reply: Reply) -> Finding:
    """Return the finding on a masked reply, of which only the form can be read."""
    return Finding(None, describe_form(reply.parts))


def describe_form(parts: Mapping[str, Part]) -> ReplyForm:
    """Return all of a reply but its numbers. How many columns a basis has is each client's own."""
    return tuple(
        (name, part.kind, part.least, part.over, part.noise, tensor_name, tensor.dtype, describe_shape(part, tensor))
        for name, part in sorted(parts.items())
        for tensor_name, tensor in sorted(part.tensors.items())
    )


def describe_shape(part: Part, tensor: Tensor) -> tuple[int, ...]:
    """Return the sizes of a tensor in which all clients must agree."""
    if part.kind == "sparse":
        return tuple(tensor.shape[1:])
    return tuple(tensor.shape[:1] if part.kind in ("basis", "directions") else tensor.shape)


def find_defects(
    findings: Mapping[int, Finding],
    settings: InspectionSettings,
    fits: Callable[[ReplyForm], bool] = lambda form: True,
    usual_length: float = 0.0,
) -> dict[int, ReplyDefect]:
    """Return the clients whose replies are refused, and why; the same whoever answers first.

    fits: whether a form is that of the method. usual_length: that of updates in earlier rounds of the task.
    """
    refused = {client: finding.defect for client, finding in findings.items() if finding.defect}
    usual = find_usual_form([findings[client].form for client in findings.keys() - refused.keys()], fits)
    for client in findings.keys() - refused.keys():
        if usual is None:
            fitting = fits(findings[client].form)
            why = "has another form than as many others" if fitting else "has another form than the method's"
            refused[client] = ReplyDefect("reply", why)
        elif findings[client].form != usual:
            differing = ReplyDefect(find_differing_part(findings[client].form, usual), "has another form than most")
            refused[client] = differing if findings[client].form else ReplyDefect("reply", WITHHELD)
    sound = {client: finding for client, finding in findings.items() if client not in refused}
    refused |= find_outliers(sound, settings.largest, usual_length)
    return {client: refused[client] for client in sorted(refused)}


def find_outliers(
    findings: Mapping[int, Finding], largest: float | None, usual_length: float
) -> dict[int, ReplyDefect]:
    """Return the clients with a size above `largest` times the median; their replies have one form.

    Updates are compared with the largest median of the task's rounds so far: in a round in which most clients have
    nothing more to learn, the others would be refused.
    """
    outliers: dict[int, ReplyDefect] = {}
    if largest is None:
        return outliers
    for name in sorted({name for finding in findings.values() for name in finding.sizes}):
        sizes = {client: finding.sizes[name] for client, finding in findings.items() if name in finding.sizes}
        least = usual_length if name == UPDATE else 0.0
        medians = [max(compute_median(of_all), least) for of_all in zip(*sizes.values(), strict=True)]
        for client, of_client in sizes.items():
            times = max((size / middle for size, middle in zip(of_client, medians, strict=True) if middle), default=0.0)
            if times > largest:
                outliers.setdefault(client, ReplyDefect(name, f"is {times:.3g} times as long as the median"))
    return outliers


def find_usual_form(forms: Sequence[ReplyForm], fits: Callable[[ReplyForm], bool]) -> ReplyForm | None:
    """Return the form that most of the fitting replies have; None where several are as frequent."""
    counts = Counter(forms)
    fitting = {form: count for form, count in counts.items() if fits(form)}
    most = [form for form, count in fitting.items() if count == max(fitting.values())]
    return most[0] if len(most) == 1 else None


def list_entries(form: ReplyForm, masked: bool = False) -> set[tuple[object, ...]]:
    """Return the entries of a form that a method declares; the names of masked tensors end with their type."""
    return {
        (part, kind, over, name if masked else f"{name}:{str(dtype).removeprefix('torch.')}", shape)
        for part, kind, _, over, _, name, dtype, shape in form
    }


def find_differing_part(form: ReplyForm, usual: ReplyForm) -> str:
    """Return the first part in which two forms differ."""
    return str(next(iter(sorted({entry[0] for entry in {*form} ^ {*usual}}, key=str)), ""))


def compute_median(sizes: Iterable[float]) -> float:
    """Return the lower median of the sizes above 0, which more than half of these reach; 0 where there is none."""
    positive = sorted(size for size in sizes if size)
    return positive[(len(positive) - 1) // 2] if positive else 0.0


def measure_median_length(findings: Mapping[int, Finding], without: Collection[int]) -> float | None:
    """Return the median length of the accepted updates; `without`: the clients refused."""
    return to_three_digits(compute_median(list_lengths(findings, without))) or None


def measure_farthest(findings: Mapping[int, Finding], without: Collection[int]) -> float | None:
    """Return the length of the longest accepted update, in medians; `without`: the clients refused."""
    lengths = list_lengths(findings, without)
    middle = compute_median(lengths)
    return to_three_digits(max(lengths) / middle) if middle else None


def list_lengths(findings: Mapping[int, Finding], without: Collection[int]) -> list[float]:
    """Return the lengths of all updates but those of some clients."""
    accepted = (finding.sizes for client, finding in findings.items() if client not in without)
    return [length for sizes in accepted for length in sizes.get(UPDATE, ())]


def to_three_digits(number: float) -> float:
    """Return the number to three digits, which are the same wherever it was summed."""
    return float(f"{number:.3g}")


def count_refusals(server: Server, refusals: Collection[Refusal]) -> Server:
    """Return the server with refusals added to its counts by client."""
    if not refusals:
        return server
    counts = Counter(server.refused)
    counts.update(str(refusal.client) for refusal in refusals)
    return replace(server, refused=dict(sorted(counts.items())))


def set_aside(server: Server, settings: InspectionSettings) -> set[int]:
    """Return the clients that were refused too often to be asked again."""
    if settings.patience is None:
        return set()
    return {int(client) for client, times in server.refused.items() if times >= settings.patience}
