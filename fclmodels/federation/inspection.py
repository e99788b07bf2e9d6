"""Replies are looked at before they touch the model; pure functions, of one reply and of all of an exchange.

By itself a reply must be finite, an update's tensors those of the model, a basis orthonormal and of the layers whose
bases were sent, counts not negative, a weight one that a client can have, and a prototype the moments of real numbers
(no variance below 0). Beside the others it must have the form that most have (parts, kinds, names, types, shapes), or
where no form is that of most, the model's; no update may be `largest` times as long as the round's median. Lengths are
of x where w*x travels, so that many samples make no update long. What fails is refused: it costs its bytes, is noted in
the ledger, and counts against its client, who is set aside after `patience` of them.

Under secure aggregation a client looks at its own reply and withholds what fails; the server sees forms alone.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fclmodels.federation.messages import Part, Payload, Reply
from fclmodels.federation.server import Server
from fclmodels.settings import InspectionSettings

# Of float32 bases: honest ones are off by up to 1e-5 (measured, d up to 2304).
ORTHONORMAL = 1e-3
# A variance is a difference of float64 numbers; below this share of the mean square it is rounding.
ROUNDING = 1e-9
NOT_FINITE = "is not finite"
WITHHELD = "is withheld"
# What a client may count in a mean: beyond that float32 numbers times it, or times its inverse, may overflow.
LEAST_WEIGHT, MOST_SAMPLES = 1e-9, 1e9
TYPES = {torch.float32, torch.float64, torch.int32, torch.int64}

Form = tuple[tuple[object, ...], ...]


class Fault(NamedTuple):
    """What is wrong with a part of a reply."""

    part: str
    why: str


class Refusal(NamedTuple):
    round: int
    client: int
    fault: Fault


@dataclass(frozen=True)
class Look:
    """What is kept of one reply for the comparison with others. length: of its update."""

    fault: Fault | None
    form: Form = ()
    length: float | None = None


def look(reply: Reply, payload: Payload, most: float = MOST_SAMPLES) -> Look:
    """A reply by itself, in one pass over its numbers. most: what a client may count in a mean."""
    if not math.isfinite(reply.loss):
        return Look(Fault("loss", NOT_FINITE))
    norms = {name: length(part.tensors) for name, part in reply.parts.items()}
    for name, part in reply.parts.items():
        if why := wrong_with(part, norms[name], payload, reply.parts, most):
            return Look(Fault(name, why))
    if "bases" in payload and (odd := not_of_the_bases(reply.parts, payload["bases"].tensors)):
        return Look(Fault(odd, "is not of the layers that have bases"))
    updates = [(name, part.over) for name, part in reply.parts.items() if part.kind == "update"]
    lengths = [norms[name] / (number(reply.parts[over]) if over else 1) for name, over in updates]
    return Look(None, form_of(reply.parts), math.hypot(*lengths) if lengths else None)


def outline(reply: Reply) -> Look:
    """What there is to see of a masked reply."""
    return Look(None, form_of(reply.parts))


def wrong_with(part: Part, norm: float, payload: Payload, parts: Mapping[str, Part], most: float) -> str | None:
    """What no reply may hold, whatever the others do. norm: over all tensors of the part."""
    if other := {tensor.dtype for tensor in part.tensors.values()} - TYPES:
        return f"has numbers of {min(map(str, other))}"
    if not math.isfinite(norm):
        return NOT_FINITE
    if part.over and not (part.over in parts and LEAST_WEIGHT <= number(parts[part.over]) <= most):
        return f"needs one number from {LEAST_WEIGHT:g} to {most:g} in {part.over}"
    if (part.kind == "update" or (part.kind == "statistics" and part.over)) and "weights" in payload:
        return not_of_the_model(part.tensors, payload["weights"].tensors)
    if part.kind == "basis" and any(not orthonormal(basis) for basis in part.tensors.values()):
        return "is not orthonormal"
    if part.noise:
        return None
    sums = part.kind in ("count", "reference") or (part.kind == "statistics" and not part.over)
    if sums and any((tensor < 0).any() for tensor in part.tensors.values()):
        return "is negative"
    if part.kind == "reference" and (part.tensors.get("count", torch.zeros(())) > 1).any():
        return "counts more than once"
    if part.kind == "prototype":
        return no_moments(part.tensors)
    return None


def not_of_the_model(update: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str | None:
    for name, tensor in update.items():
        if name not in weights or (tensor.shape, tensor.dtype) != (weights[name].shape, weights[name].dtype):
            return f"{name} is not of the model"
    return None


def not_of_the_bases(parts: Mapping[str, Part], bases: Mapping[str, Tensor]) -> str | None:
    """The first part with what a client found beside the bases that it was sent, unless there is something of each."""
    found = [name for name, part in parts.items() if part.kind in ("basis", "directions", "sketch")]
    heights = {layer: (X.shape[:1], X.dtype) for name in found for layer, X in parts[name].tensors.items()}
    return found[0] if found and heights != {layer: (X.shape[:1], X.dtype) for layer, X in bases.items()} else None


def orthonormal(basis: Tensor) -> bool:
    """Whether columns [d, k] are; a basis has no more of them than d."""
    if basis.ndim != 2 or basis.shape[1] > basis.shape[0]:
        return False
    off = basis.T @ basis - torch.eye(basis.shape[1], dtype=basis.dtype)
    return not off.numel() or bool(off.abs().max() <= ORTHONORMAL)


def no_moments(found: Mapping[str, Tensor]) -> str | None:
    """Why weight [C], sum [C, F] and square [C, F], the last where it is there, are of no samples: W S - s^2 < 0."""
    if not {"weight", "sum"} <= found.keys():
        return "has no counts"
    classes, like = found["weight"].shape, found["sum"].shape
    if not (
        len(classes) == 1 and len(like) == 2 and like[:1] == classes and found.get("square", found["sum"]).shape == like
    ):
        return "has no row for each count"
    weight, total = found["weight"][:, None], found["sum"]
    if (weight < 0).any():
        return "has a negative count"
    if ((weight == 0) & (total != 0)).any():
        return "has a sum of no samples"
    if "square" in found:
        variance = weight * found["square"] - total.square()
        if (variance < -ROUNDING * (weight * found["square"]).abs()).any():
            return "has a negative variance"
    return None


def length(tensors: Mapping[str, Tensor]) -> float:
    """The norm over all of them; not finite where a number is not."""
    floating = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    return math.hypot(*(norm.item() for norm in torch._foreach_norm(floating))) if floating else 0.0


def number(part: Part) -> float:
    """Of a part that holds one."""
    values = [tensor for tensor in part.tensors.values() if tensor.numel() == 1]
    return float(values[0]) if len(values) == len(part.tensors) == 1 else math.nan


def form_of(parts: Mapping[str, Part]) -> Form:
    """All of a reply but its numbers. How many columns a basis has is each client's own."""
    return tuple(
        (name, part.kind, part.least, part.over, part.noise, tensor_name, tensor.dtype, shape_of(part, tensor))
        for name, part in sorted(parts.items())
        for tensor_name, tensor in sorted(part.tensors.items())
    )


def shape_of(part: Part, tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape[:1] if part.kind in ("basis", "directions") else tensor.shape)


def faults(
    looks: Mapping[int, Look], settings: InspectionSettings, fits: Callable[[Form], bool] = lambda form: True
) -> dict[int, Fault]:
    """Who is refused, and why; the same whoever answers first. fits: whether a form is that of the model."""
    found = {client: seen.fault for client, seen in looks.items() if seen.fault}
    usual = usual_form([looks[client].form for client in looks.keys() - found.keys()], fits)
    for client in looks.keys() - found.keys():
        if usual is None:
            known = fits(looks[client].form)
            why = "has another form than as many others" if known else "has another form than the model"
            found[client] = Fault("reply", why)
        elif looks[client].form != usual:
            differing = Fault(differing_part(looks[client].form, usual), "has another form than most")
            found[client] = differing if looks[client].form else Fault("reply", WITHHELD)
    middle = median_length(looks, found)
    for client in looks.keys() - found.keys():
        of_it = looks[client].length
        if of_it is not None and middle and settings.largest is not None and of_it > settings.largest * middle:
            found[client] = Fault("update", f"is {of_it / middle:.3g} times as long as the median")
    return {client: found[client] for client in sorted(found)}


def usual_form(forms: Sequence[Form], fits: Callable[[Form], bool]) -> Form | None:
    """What most have, and at least two; else the only one of the model."""
    counts = Counter(forms)
    most = [form for form, count in counts.items() if count == max(counts.values())]
    if len(most) > 1 or len(forms) == 1:
        most = [form for form in most if fits(form)]
    return most[0] if len(most) == 1 else None


def updated(form: Form) -> set[str]:
    """The names in its updates; masked ones end with their type."""
    return {str(entry[5]).partition(":")[0] for entry in form if entry[1] == "update"}


def differing_part(form: Form, usual: Form) -> str:
    return str(next(iter(sorted({entry[0] for entry in {*form} ^ {*usual}}, key=str)), ""))


def median_length(looks: Mapping[int, Look], without: Collection[int]) -> float:
    """The lower median, which more than half of the replies reach."""
    lengths = sorted(seen.length for client, seen in looks.items() if client not in without and seen.length is not None)
    return lengths[(len(lengths) - 1) // 2] if lengths else 0.0


def farthest(looks: Mapping[int, Look], without: Collection[int]) -> float | None:
    """The longest update that was taken, in medians."""
    lengths = [seen.length for client, seen in looks.items() if client not in without and seen.length is not None]
    middle = median_length(looks, without)
    return float(f"{max(lengths) / middle:.3g}") if middle else None


def counted(server: Server, refusals: Collection[Refusal]) -> Server:
    """The server that remembers how often each client was refused."""
    if not refusals:
        return server
    counts = Counter(server.refused)
    counts.update(str(refusal.client) for refusal in refusals)
    return replace(server, refused=dict(sorted(counts.items())))


def set_aside(server: Server, settings: InspectionSettings) -> set[int]:
    """The clients that were refused too often to be asked again."""
    if settings.patience is None:
        return set()
    return {int(client) for client, times in server.refused.items() if times >= settings.patience}
