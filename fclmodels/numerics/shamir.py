"""Shamir's secret sharing (1979): of n shares any t give the secret, and fewer say nothing of it.

A share is the value at x of a random polynomial of degree t - 1 over the field of PRIME elements, whose value at 0 is
the secret. Coefficients come from the operating system's randomness.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence

PRIME = 2**256 + 297  # the first above 2^256: a secret is any 32 bytes
BYTES = 33  # of a share


def split(secret: int, places: Iterable[int], threshold: int) -> dict[int, int]:
    """A share for each place x, 0 < x < PRIME; so many of them give the secret."""
    polynomial = [secret, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {x: value_at(x, polynomial, PRIME) for x in places}


def value_at(x: int, polynomial: Sequence[int], prime: int) -> int:
    """By Horner's rule; coefficients from the constant one on."""
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % prime
    return value


def joined(shares: Mapping[int, int], weights: Mapping[int, int], prime: int = PRIME) -> int:
    """The secret, from shares at the places that the weights are for."""
    return sum(weight * shares[x] for x, weight in weights.items()) % prime


def weights_at_zero(places: Sequence[int], prime: int = PRIME) -> dict[int, int]:
    """Lagrange: what each place's value counts in that at 0, product over other places z of z / (z - x)."""
    weights = {}
    for x in places:
        above, below = 1, 1
        for z in places:
            if z != x:
                above, below = above * z % prime, below * (z - x) % prime
        weights[x] = above * pow(below, -1, prime) % prime
    return weights
