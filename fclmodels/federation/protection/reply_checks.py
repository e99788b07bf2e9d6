"""Checks of one reply by itself, and the sizes by which it is compared with others; pure functions.

A basis must be orthonormal to the rounding of float32, a prototype the moments of real numbers, energies those of one
input, and a sketch as long as its energies say.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fclmodels.federation.messages import Part, Payload

NOT_FINITE = "is not finite"
# For float32 bases: those of honest clients deviate by up to 1e-5 (measured, d up to 2304).
ORTHONORMAL = 1e-3
# A variance is a difference of float64 numbers; below this share of the mean square it is rounding.
ROUNDING = 1e-9
# The range of a client's weight in a mean: beyond it float32 numbers times it, or times its inverse, may overflow.
LEAST_WEIGHT, MOST_SAMPLES = 1e-9, 1e9
MOST_COUNTED = 1e15  # the largest count, so that int64 and float64 hold sums over clients exactly
# For a layer's energies: rounding of float32 columns, and what a Gram matrix gets on its diagonal (numerics/sketch.py).
INACCURATE = 1e-3
UNLIKELY = 30.0  # -log of the chance that a sketch is longer than its bound
TYPES = {torch.float32, torch.float64, torch.int32, torch.int64}


class PartError(Exception):
    """The reason why a part of a reply cannot be used, in words that follow the part's name."""


def check_part(part: Part, norm: float, payload: Payload, parts: Mapping[str, Part], most: float) -> None:
    """Raise PartError where a part holds what no honest client sends, whatever the other clients send.

    norm: over all tensors of the part. most: the largest weight of a client in a mean.
    """
    if others := {tensor.dtype for tensor in part.tensors.values()} - TYPES:
        raise PartError(f"has numbers of {min(map(str, others))}")
    if not math.isfinite(norm):
        raise PartError(NOT_FINITE)
    if part.over and not (part.over in parts and LEAST_WEIGHT <= read_number(parts[part.over]) <= most):
        raise PartError(f"needs one number from {LEAST_WEIGHT:g} to {most:g} in {part.over}")
    if (part.kind in ("update", "gradient") or (part.kind == "statistics" and part.over)) and part.of in payload:
        check_names_and_shapes(part.tensors, payload[part.of].tensors)
        return
    if part.kind == "sparse":
        check_places(part.tensors, payload[part.of].tensors if part.of in payload else None)
    if part.kind == "loss" and part.over and not part.noise:
        check_weighted_loss(part.tensors, read_number(parts[part.over]))
        return
    if part.kind == "basis" and any(not is_orthonormal(basis) for basis in part.tensors.values()):
        raise PartError("is not orthonormal")
    if not part.noise:
        check_numbers(part)


def check_numbers(part: Part) -> None:
    """Raise PartError where a part without noise has numbers that its kind cannot have."""
    is_sum = part.kind in ("count", "reference", "energy", "loss") or (part.kind == "statistics" and not part.over)
    if is_sum and any((tensor < 0).any() for tensor in part.tensors.values()):
        raise PartError("is negative")
    if part.kind == "count" and any((tensor > MOST_COUNTED).any() for tensor in part.tensors.values()):
        raise PartError(f"is above {MOST_COUNTED:g}")
    if part.kind == "reference" and (part.tensors.get("count", torch.zeros(())) > 1).any():
        raise PartError("counts more than once")
    if part.kind in CHECKS:
        CHECKS[part.kind](part.tensors)


def check_names_and_shapes(update: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raise PartError where an update's tensors are not those of the model."""
    for name, tensor in update.items():
        if name not in weights or (tensor.shape, tensor.dtype) != (weights[name].shape, weights[name].dtype):
            raise PartError(f"{name} is not of the model")


def check_places(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None) -> None:
    """Raise PartError where rising places are none of entries (values [n]) or rows (values [n, ...]) of these weights.

    None: of any.
    """
    for name in tensors:
        kind, _, of = name.partition(".")
        pair = [tensors.get(f"{one}.{of}") for one in ("places", "values")]
        if kind not in ("places", "values") or pair[0] is None or pair[1] is None:
            raise PartError(f"has {name} without its pair")
        places, values = pair[0], pair[1]
        if places.ndim != 1 or places.is_floating_point() or not values.ndim or len(places) != len(values):
            raise PartError("has not one value for each place")
        if (places < 0).any() or (places.diff() <= 0).any():
            raise PartError("has places that are not in their order")
        if weights is None:
            continue
        if of not in weights or (values.ndim > 1 and values.shape[1:] != weights[of].shape[1:]):
            raise PartError(f"{of} is not of the model")
        if (places >= (weights[of].numel() if values.ndim == 1 else len(weights[of]))).any():
            raise PartError(f"has places beyond {of}")


def find_misfit_to_bases(parts: Mapping[str, Part], bases: Mapping[str, Tensor]) -> str | None:
    """Return the first part with directions, unless these are of all layers whose bases the client was sent."""
    names = [name for name, part in parts.items() if part.kind in ("basis", "directions", "sketch")]
    heights = {layer: (X.shape[:1], X.dtype) for name in names for layer, X in parts[name].tensors.items()}
    return names[0] if names and heights != {layer: (X.shape[:1], X.dtype) for layer, X in bases.items()} else None


def is_orthonormal(basis: Tensor) -> bool:
    """Return whether columns [d, k] are orthonormal; there are at most d of them."""
    if basis.ndim != 2 or basis.shape[1] > basis.shape[0]:
        return False
    deviation = basis.T @ basis - torch.eye(basis.shape[1], dtype=basis.dtype)
    return not deviation.numel() or bool(deviation.abs().max() <= ORTHONORMAL)


def check_moments(tensors: Mapping[str, Tensor]) -> None:
    """Raise PartError where weight W [C], sum s [C, F] and square S [C, F] are no moments of samples: W S - s^2 < 0.

    There may be no squares.
    """
    if not {"weight", "sum"} <= tensors.keys():
        raise PartError("has no counts")
    classes, shape = tensors["weight"].shape, tensors["sum"].shape
    square_shape = tensors.get("square", tensors["sum"]).shape
    if not (len(classes) == 1 and len(shape) == 2 and shape[:1] == classes and square_shape == shape):
        raise PartError("has no row for each count")
    weight, total = tensors["weight"][:, None], tensors["sum"]
    if (weight < 0).any():
        raise PartError("has a negative count")
    if (weight > MOST_COUNTED).any():
        raise PartError(f"has a count above {MOST_COUNTED:g}")
    if any(((weight == 0) & (tensors[name] != 0)).any() for name in ("sum", "square") if name in tensors):
        raise PartError("has a sum of no samples")
    if "square" in tensors:
        variance = weight * tensors["square"] - total.square()
        if (variance < -ROUNDING * (weight * tensors["square"]).abs()).any():
            raise PartError("has a negative variance")


def check_energies(tensors: Mapping[str, Tensor]) -> None:
    """Raise PartError where ||X||^2, ||X*||^2, n ||X*|| / ||X|| and n of layers are of no samples' inputs."""
    for energy in tensors.values():
        if energy.shape != (4,):
            raise PartError("has not four numbers for each layer")
        total, outside, ratios, samples = energy.tolist()
        if outside > (1 + INACCURATE) * total or ratios > (1 + INACCURATE) * samples:
            raise PartError("has more outside of a basis than in all")
        if samples > MOST_SAMPLES:
            raise PartError(f"is of more than {MOST_SAMPLES:g} samples")


def check_loss(tensors: Mapping[str, Tensor]) -> None:
    """Raise PartError where this is no sum of losses and its number of samples."""
    if tensors.keys() != {"loss", "samples"} or any(tensor.numel() != 1 for tensor in tensors.values()):
        raise PartError("is not one loss and a number of samples")
    if tensors["samples"] > MOST_SAMPLES or (tensors["loss"] > 0 and tensors["samples"] < 1):
        raise PartError(f"is not of 1 to {MOST_SAMPLES:g} samples")


def check_weighted_loss(tensors: Mapping[str, Tensor], weight: float) -> None:
    """Raise PartError where this is no mean loss times the client's weight, and that weight: its one vote."""
    if tensors.keys() != {"loss", "samples"} or any(tensor.numel() != 1 for tensor in tensors.values()):
        raise PartError("is not one loss and a weight")
    if float(tensors["loss"]) < 0:
        raise PartError("is negative")
    if float(tensors["samples"]) != weight:
        raise PartError("counts otherwise than the client's weight")


def check_samples(tensors: Mapping[str, Tensor]) -> None:
    """Raise PartError where these are no synthetic samples: inputs [n, ...] for the network, and labels [n]."""
    if not {"inputs", "labels"} <= tensors.keys() or tensors["inputs"].ndim < 2:
        raise PartError("has no inputs and labels")
    if tensors["labels"].shape != tensors["inputs"].shape[:1]:
        raise PartError("has not one label for each input")
    if (tensors["labels"] < 0).any():
        raise PartError("has a negative label")


def check_labels(part: Part, classes: int | None) -> None:
    """Raise PartError where labels of synthetic samples are beyond the first so many classes."""
    if part.kind == "samples" and classes is not None and (part.tensors["labels"] >= classes).any():
        raise PartError(f"has a label above {classes - 1}")


def check_class_statistics(tensors: Mapping[str, Tensor]) -> None:
    """Raise PartError where weight [C], sum [C, F] and outer [C, F, F], if there, are of no samples' features.

    Of gram [F, F] = A^T A and cross [F, C] = A^T Y only the first can be checked.
    """
    if tensors.keys() == {"gram", "cross"}:
        check_second_moments(tensors["gram"][None])
        return
    check_moments({name: X for name, X in tensors.items() if name != "outer"})
    if "outer" not in tensors:
        return
    outer, total = tensors["outer"], tensors["sum"]
    if outer.shape != (*total.shape, total.shape[1]):
        raise PartError("has no square matrix for each class")
    check_second_moments(outer)
    check_moments({"weight": tensors["weight"], "sum": total, "square": outer.diagonal(dim1=1, dim2=2)})


def check_second_moments(outer: Tensor) -> None:
    """Raise PartError where matrices [C, F, F] are no sums of a a^T."""
    if outer.ndim != 3 or outer.shape[1] != outer.shape[2]:
        raise PartError("has a matrix that is not square")
    largest = float(outer.abs().max()) if outer.numel() else 0.0
    if not torch.allclose(outer, outer.mT, rtol=ROUNDING, atol=ROUNDING * largest):
        raise PartError("has a matrix that is not symmetric")
    if (outer.diagonal(dim1=1, dim2=2) < 0).any():
        raise PartError("has a negative sum of squares")


def check_input_statistics(tensors: Mapping[str, Tensor]) -> None:
    """Raise PartError where a matrix [d, d] or a diagonal [d] is no sum of x x^T; weights times one are not checked."""
    for name, tensor in tensors.items():
        if name.startswith("times."):
            continue
        if tensor.ndim == 2:
            check_second_moments(tensor[None])
        elif tensor.ndim != 1 or (tensor < 0).any():
            raise PartError("has a negative sum of squares")


CHECKS: Mapping[str, Callable[[Mapping[str, Tensor]], None]] = {
    "samples": check_samples,
    "class-statistics": check_class_statistics,
    "input-statistics": check_input_statistics,
    "prototype": check_moments,
    "energy": check_energies,
    "loss": check_loss,
}


def find_overlong_sketch(parts: Mapping[str, Part]) -> str | None:
    """Return the first part with a sketch X* G [d, s] that is too long for ||X*||^2, which another part says.

    ||X* G||^2 is a sum of chi-squares, above s ||X*||^2 (1 + 2 sqrt(t / s) + 2 t / s) with probability exp(-t) at most
    (Laurent and Massart 2000, Lemma 1).
    """
    energies = {layer: e for part in parts.values() if part.kind == "energy" for layer, e in part.tensors.items()}
    for name, part in parts.items():
        for layer, sketch in part.tensors.items():
            if part.kind != "sketch" or part.noise or layer not in energies or not sketch.numel():
                continue
            total, outside = energies[layer][:2].tolist()
            s = sketch.shape[-1]
            most = (outside + INACCURATE * total) * (s + 2 * math.sqrt(UNLIKELY * s) + 2 * UNLIKELY)
            if measure_length({layer: sketch}) ** 2 > most:
                return name
    return None


def measure_sizes(part: Part, norm: float) -> list[float]:
    """Return the sizes of a part that are alike among honest clients; norm: of the part, of x where w*x travels."""
    if part.noise:
        return []
    if part.kind == "statistics" and part.over:
        return [norm]
    if part.kind == "reference":
        return [measure_length({"omega": part.tensors["omega"]})] if "omega" in part.tensors else []
    if part.kind == "energy":
        return [math.sqrt(float(energy[0])) for _, energy in sorted(part.tensors.items())]
    if part.kind == "loss":  # plus one nat: beside a client whose loss is 0 no other's loss is refused
        return [1 + float(part.tensors["loss"]) / (float(part.tensors["samples"]) or 1.0)]
    if part.kind == "prototype" and "square" in part.tensors:
        return [measure_longest_sample(part.tensors["square"].sum(1), part.tensors["weight"])]
    if part.kind == "class-statistics" and "outer" in part.tensors:
        return [measure_longest_sample(part.tensors["outer"].diagonal(dim1=1, dim2=2).sum(1), part.tensors["weight"])]
    return []


def measure_longest_sample(squares: Tensor, counts: Tensor) -> float:
    """Return the root of the largest mean square over classes, from sums [C] and counts [C]; 0 where there is none."""
    mean = (squares / counts).nan_to_num(0)
    return math.sqrt(mean.max()) if len(mean) else 0.0


def measure_length(tensors: Mapping[str, Tensor]) -> float:
    """Return the norm over all floating tensors; not finite where one of their numbers is not."""
    floating = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    return math.hypot(*(norm.item() for norm in torch._foreach_norm(floating))) if floating else 0.0


def read_number(part: Part) -> float:
    """Return the number of a part that holds one; NaN for any other part."""
    values = [tensor for tensor in part.tensors.values() if tensor.numel() == 1]
    return float(values[0]) if len(values) == len(part.tensors) == 1 else math.nan
