"""What one reply may hold, whatever the others do, and the sizes by which it is compared with them; pure functions.

A basis is orthonormal to the rounding of float32, a prototype the moments of real numbers, energies are those of one
input, and a sketch is as long as its energies say.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fclmodels.federation.messages import Part, Payload

NOT_FINITE = "is not finite"
# Of float32 bases: honest ones are off by up to 1e-5 (measured, d up to 2304).
ORTHONORMAL = 1e-3
# A variance is a difference of float64 numbers; below this share of the mean square it is rounding.
ROUNDING = 1e-9
# What a client may count in a mean: beyond that float32 numbers times it, or times its inverse, may overflow.
LEAST_WEIGHT, MOST_SAMPLES = 1e-9, 1e9
MOST_COUNTED = 1e15  # of anything, so that int64 and float64 hold sums over clients exactly
# Of a layer's energies: rounding of float32 columns, and what a Gram matrix gets on its diagonal (numerics/sketch.py).
INACCURATE = 1e-3
UNLIKELY = 30.0  # -log of the chance that a sketch is longer than its bound
TYPES = {torch.float32, torch.float64, torch.int32, torch.int64}


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
    sums = part.kind in ("count", "reference", "energy", "loss") or (part.kind == "statistics" and not part.over)
    if sums and any((tensor < 0).any() for tensor in part.tensors.values()):
        return "is negative"
    if part.kind == "count" and any((tensor > MOST_COUNTED).any() for tensor in part.tensors.values()):
        return f"is above {MOST_COUNTED:g}"
    if part.kind == "reference" and (part.tensors.get("count", torch.zeros(())) > 1).any():
        return "counts more than once"
    return NOT_AS_IT_IS[part.kind](part.tensors) if part.kind in NOT_AS_IT_IS else None


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
    if (weight > MOST_COUNTED).any():
        return f"has a count above {MOST_COUNTED:g}"
    if any(((weight == 0) & (found[name] != 0)).any() for name in ("sum", "square") if name in found):
        return "has a sum of no samples"
    if "square" in found:
        variance = weight * found["square"] - total.square()
        if (variance < -ROUNDING * (weight * found["square"]).abs()).any():
            return "has a negative variance"
    return None


def no_energies(found: Mapping[str, Tensor]) -> str | None:
    """Why ||X||^2, ||X*||^2, n ||X*|| / ||X|| and n of layers are of no samples' inputs."""
    for energy in found.values():
        if energy.shape != (4,):
            return "has not four numbers for each layer"
        whole, outside, ratios, samples = energy.tolist()
        if outside > (1 + INACCURATE) * whole or ratios > (1 + INACCURATE) * samples:
            return "has more outside of a basis than in all"
        if samples > MOST_SAMPLES:
            return f"is of more than {MOST_SAMPLES:g} samples"
    return None


def no_loss(found: Mapping[str, Tensor]) -> str | None:
    if found.keys() != {"loss", "samples"} or any(tensor.numel() != 1 for tensor in found.values()):
        return "is not one loss and a number of samples"
    if found["samples"] > MOST_SAMPLES or (found["loss"] > 0 and found["samples"] < 1):
        return f"is not of 1 to {MOST_SAMPLES:g} samples"
    return None


NOT_AS_IT_IS: Mapping[str, Callable[[Mapping[str, Tensor]], str | None]] = {
    "prototype": no_moments,
    "energy": no_energies,
    "loss": no_loss,
}


def longer_than_told(parts: Mapping[str, Part]) -> str | None:
    """The first part with a sketch X* G [d, s] that is too long for ||X*||^2, told in another part.

    ||X* G||^2 is a sum of chi-squares, above s ||X*||^2 (1 + 2 sqrt(t / s) + 2 t / s) with probability exp(-t) at most
    (Laurent and Massart 2000, Lemma 1).
    """
    energies = {layer: e for part in parts.values() if part.kind == "energy" for layer, e in part.tensors.items()}
    for name, part in parts.items():
        for layer, sketch in part.tensors.items():
            if part.kind != "sketch" or part.noise or layer not in energies or not sketch.numel():
                continue
            whole, outside = energies[layer][:2].tolist()
            s = sketch.shape[-1]
            most = (outside + INACCURATE * whole) * (s + 2 * math.sqrt(UNLIKELY * s) + 2 * UNLIKELY)
            if length({layer: sketch}) ** 2 > most:
                return name
    return None


def sizes_of(part: Part, norm: float) -> list[float]:
    """What of a part is alike among honest clients, to `largest` times. norm: of x, where w*x travels."""
    if part.noise:
        return []
    if part.kind == "statistics" and part.over:
        return [norm]
    if part.kind == "reference":
        return [length({"omega": part.tensors["omega"]})] if "omega" in part.tensors else []
    if part.kind == "energy":
        return [math.sqrt(float(energy[0])) for _, energy in sorted(part.tensors.items())]
    if part.kind == "loss":  # beside one nat: a client whose loss is 0 makes no other's absurd
        return [1 + float(part.tensors["loss"]) / max(1.0, float(part.tensors["samples"]))]
    if part.kind == "prototype" and "square" in part.tensors:
        of_a_sample = part.tensors["square"].sum(1) / part.tensors["weight"]
        return [math.sqrt(of_a_sample.nan_to_num(0).max())] if len(of_a_sample) else []
    return []


def length(tensors: Mapping[str, Tensor]) -> float:
    """The norm over all of them; not finite where a number is not."""
    floating = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    return math.hypot(*(norm.item() for norm in torch._foreach_norm(floating))) if floating else 0.0


def number(part: Part) -> float:
    """Of a part that holds one."""
    values = [tensor for tensor in part.tensors.values() if tensor.numel() == 1]
    return float(values[0]) if len(values) == len(part.tensors) == 1 else math.nan
