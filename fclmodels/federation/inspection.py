"""Replies are looked at before they touch the model; pure functions, of one reply and of all of an exchange.

By itself a reply must be finite, an update's tensors those of the model, a basis orthonormal and of the layers whose
bases were sent, counts not negative, a weight one that a client can have, a prototype the moments of real numbers (no
variance below 0), energies those of one input, and a sketch as long as they say. It must have the form that its method
declares (parts, kinds, names, types, shapes), and in what is not declared the form of most. No size may be `largest`
times the round's median (of an update the largest median of the task's rounds so far): the length of an update, of
running statistics' change, of a reference and of the samples in a prototype, the root of a layer's energy, a loss.
Where w*x travels it is of x, so that many samples make no update long. Sketches and directions outside of a basis have
no such bound: of honest clients the one with something new may have a thousand times the median. What fails is refused:
it costs its bytes, is noted in the ledger, and counts against its client, who is set aside after `patience` of them.

Under secure aggregation a client looks at its own reply and withholds what fails; the server sees forms alone.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fclmodels.federation.messages import Part, Payload, Reply
from fclmodels.federation.server import Server
from fclmodels.federation.soundness import (
    MOST_SAMPLES,
    NOT_FINITE,
    length,
    longer_than_told,
    not_of_the_bases,
    number,
    sizes_of,
    wrong_with,
)
from fclmodels.settings import InspectionSettings

WITHHELD = "is withheld"
UPDATE = "update"
MOST_LOSS = torch.finfo(torch.float32).max  # of a loss for the log, which must not overflow

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
    """What is kept of one reply for the comparison with others. sizes: of its parts, `UPDATE` of all its updates."""

    fault: Fault | None
    form: Form = ()
    sizes: Mapping[str, Sequence[float]] = field(default_factory=dict)


def look(reply: Reply, payload: Payload, most: float = MOST_SAMPLES) -> Look:
    """A reply by itself, in one pass over its numbers. most: what a client may count in a mean."""
    if not math.isfinite(reply.loss):
        return Look(Fault("loss", NOT_FINITE))
    if not (abs(reply.loss) <= MOST_LOSS and 0 <= reply.samples <= MOST_SAMPLES):
        return Look(Fault("loss", f"is above {MOST_LOSS:.2g}, or not of 0 to {MOST_SAMPLES:g} samples"))
    norms = {name: length(part.tensors) for name, part in reply.parts.items()}
    for name, part in reply.parts.items():
        if why := wrong_with(part, norms[name], payload, reply.parts, most):
            return Look(Fault(name, why))
    if "bases" in payload and (odd := not_of_the_bases(reply.parts, payload["bases"].tensors)):
        return Look(Fault(odd, "is not of the layers that have bases"))
    if odd := longer_than_told(reply.parts):
        return Look(Fault(odd, "is longer than its energy says"))
    of_one = {n: norms[n] / (number(reply.parts[part.over]) if part.over else 1) for n, part in reply.parts.items()}
    sizes = {name: found for name, part in reply.parts.items() if (found := sizes_of(part, of_one[name]))}
    if lengths := [of_one[name] for name, part in reply.parts.items() if part.kind == "update"]:
        sizes[UPDATE] = [math.hypot(*lengths)]
    return Look(None, form_of(reply.parts), sizes)


def outline(reply: Reply) -> Look:
    """What there is to see of a masked reply."""
    return Look(None, form_of(reply.parts))


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
    looks: Mapping[int, Look],
    settings: InspectionSettings,
    fits: Callable[[Form], bool] = lambda form: True,
    usual_length: float = 0.0,
) -> dict[int, Fault]:
    """Who is refused, and why; the same whoever answers first.

    fits: whether a form is that of the method. usual_length: an update's in earlier rounds of the task.
    """
    found = {client: seen.fault for client, seen in looks.items() if seen.fault}
    usual = usual_form([looks[client].form for client in looks.keys() - found.keys()], fits)
    for client in looks.keys() - found.keys():
        if usual is None:
            known = fits(looks[client].form)
            why = "has another form than as many others" if known else "has another form than the method's"
            found[client] = Fault("reply", why)
        elif looks[client].form != usual:
            differing = Fault(differing_part(looks[client].form, usual), "has another form than most")
            found[client] = differing if looks[client].form else Fault("reply", WITHHELD)
    sound = {client: seen for client, seen in looks.items() if client not in found}
    found |= far_out(sound, settings.largest, usual_length)
    return {client: found[client] for client in sorted(found)}


def far_out(looks: Mapping[int, Look], largest: float | None, usual_length: float) -> dict[int, Fault]:
    """Of replies of one form those with a size that is more than so many times the median.

    Where most of a round have nothing more to learn its median says nothing, and those that do would be refused: so an
    update's is the largest of the task's rounds so far.
    """
    found: dict[int, Fault] = {}
    if largest is None:
        return found
    for name in sorted({name for seen in looks.values() for name in seen.sizes}):
        sizes = {client: seen.sizes[name] for client, seen in looks.items() if name in seen.sizes}
        least = usual_length if name == UPDATE else 0.0
        middles = [max(median(of_all), least) for of_all in zip(*sizes.values(), strict=True)]
        for client, of_it in sizes.items():
            times = max((size / middle for size, middle in zip(of_it, middles, strict=True) if middle), default=0.0)
            if times > largest:
                found.setdefault(client, Fault(name, f"is {times:.3g} times as long as the median"))
    return found


def usual_form(forms: Sequence[Form], fits: Callable[[Form], bool]) -> Form | None:
    """Of those that fit what most have, if there is one."""
    counts = Counter(forms)
    fitting = {form: count for form, count in counts.items() if fits(form)}
    most = [form for form, count in fitting.items() if count == max(fitting.values())]
    return most[0] if len(most) == 1 else None


def shown(form: Form, masked: bool = False) -> set[tuple[object, ...]]:
    """What is declared of a form; the names of masked tensors end with their type."""
    return {
        (part, kind, over, name if masked else f"{name}:{str(dtype).removeprefix('torch.')}", shape)
        for part, kind, _, over, _, name, dtype, shape in form
    }


def differing_part(form: Form, usual: Form) -> str:
    return str(next(iter(sorted({entry[0] for entry in {*form} ^ {*usual}}, key=str)), ""))


def median(sizes: Iterable[float]) -> float:
    """The lower median of those above 0, which more than half of these reach; 0 where there is none."""
    some = sorted(size for size in sizes if size)
    return some[(len(some) - 1) // 2] if some else 0.0


def median_length(looks: Mapping[int, Look], without: Collection[int]) -> float | None:
    """Of the updates that were taken."""
    return to_three_digits(median(lengths_of(looks, without))) or None


def farthest(looks: Mapping[int, Look], without: Collection[int]) -> float | None:
    """The longest update that was taken, in medians."""
    lengths = lengths_of(looks, without)
    middle = median(lengths)
    return to_three_digits(max(lengths) / middle) if middle else None


def lengths_of(looks: Mapping[int, Look], without: Collection[int]) -> list[float]:
    taken = (seen.sizes for client, seen in looks.items() if client not in without)
    return [length for sizes in taken for length in sizes.get(UPDATE, ())]


def to_three_digits(number: float) -> float:
    """The same wherever it was summed up."""
    return float(f"{number:.3g}")


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
