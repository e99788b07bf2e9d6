"""Disclosures: what each kind of message reveals to the server, and whether masks and noise can cover it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from fclmodels.federation.messages import Kind, Part

if TYPE_CHECKING:
    from fclmodels.federation.method import Method


class Disclosure(NamedTuple):
    """The information in a kind of message."""

    opens: str  # what the server learns
    has_sum: bool = True  # whether a sum over clients means anything, so that masks can cover it
    takes_noise: bool = True  # whether numbers with noise are still of the kind


DISCLOSURES: dict[Kind, Disclosure] = {
    "weights": Disclosure("a client's own model: what samples changed in it, and what the client started from"),
    "update": Disclosure("what samples changed in the model: membership, and single samples of small batches"),
    "statistics": Disclosure("means and variances of activations, or energies by direction"),
    "sketch": Disclosure("random mixtures of layer inputs, outside of known directions"),
    "energy": Disclosure("how much of a layer's input is new"),
    "basis": Disclosure("the directions that a client's layer inputs lie in", False, False),
    "directions": Disclosure(
        "the directions of a client's layer inputs or features, and how strong they are", False, False
    ),
    "sparse": Disclosure("some of a client's weights, and which of them it holds to be its own", False, False),
    "prototype": Disclosure("mean and variance of the features of each class, and which classes a client has"),
    "reference": Disclosure("how long a client's features are on each task's basis"),
    "loss": Disclosure(
        "how well the model fits a client's samples: those it trains on (lander), or val rows (special)"
    ),
    "count": Disclosure("numbers of samples"),
    "samples": Disclosure("synthetic samples: as much of the real ones as their generator has learned", False, False),
    "gradient": Disclosure("a gradient of few samples, from which these can be reconstructed"),
    "generator": Disclosure("a model of a client's data, from which anyone draws samples", has_sum=False),
    "class-statistics": Disclosure("mean and covariance of each class's features: a Gaussian that can be sampled"),
    "input-statistics": Disclosure("second moments of layer inputs: in which directions a client's samples lie"),
}


def list_declared_parts(method: "Method") -> Iterator[tuple[str, Part]]:
    """Yield each part, by name, that a method's clients send in the first or the last task, at its begin or its end."""
    for task in sorted({0, len(method.run.splits.tasks) - 1}):
        for round in sorted({0, 1, method.run.count_rounds(task) - 1} & set(range(method.run.count_rounds(task)))):
            for exchange in method.exchanges.values():
                yield from exchange.form(task, round).items()


def find_part_without_sum(method: "Method") -> tuple[str, Part] | None:
    """Return the first declared part that is not needed as a sum alone, or whose kind has none."""
    parts = list_declared_parts(method)
    return next(((n, p) for n, p in parts if p.least != "sum" or not DISCLOSURES[p.kind].has_sum), None)


def find_part_without_bound(method: "Method") -> tuple[str, Part] | None:
    """Return the first declared part that noise cannot cover: it has no bound, or is nothing any more with noise."""
    parts = list_declared_parts(method)
    return next(((n, p) for n, p in parts if not DISCLOSURES[p.kind].takes_noise or _lacks_bound(p)), None)


def _lacks_bound(part: Part) -> bool:
    """Return whether noise needs a bound that the part does not declare; of other kinds the first reply is refused."""
    return part.bound is None and part.kind in ("gradient", "generator", "class-statistics", "input-statistics")
