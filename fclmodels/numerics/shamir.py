"""Shamir's secret sharing (1979): any t of n shares give the secret, fewer reveal nothing.

A share is the value at x of a random polynomial of degree t - 1 over the field of PRIME elements, whose value at 0 is
the secret. Coefficients come from the operating system's randomness.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence

PRIME = 2**256 + 297  # the first above 2^256: a secret is any 32 bytes
BYTES = 33  # in a share


def split_secret(secret: int, places: Iterable[int], threshold: int) -> dict[int, int]:
    """Split a secret into a share for each place x, 0 < x < PRIME, of which `threshold` give it."""
    polynomial = [secret, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {x: evaluate_polynomial(x, polynomial, PRIME) for x in places}


def evaluate_polynomial(x: int, polynomial: Sequence[int], prime: int) -> int:
    """Return the value at x by Horner's rule; coefficients from the constant one on."""
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % prime
    return value


def join_shares(shares: Mapping[int, int], weights: Mapping[int, int], prime: int = PRIME) -> int:
    """Return the secret, from shares at the places of the weights."""
    return sum(weight * shares[x] for x, weight in weights.items()) % prime


def weights_at_zero(places: Sequence[int], prime: int = PRIME) -> dict[int, int]:
    """Return Lagrange's weight of each place's value in that at 0: the product over other places z of z / (z - x)."""
    weights = {}
    for x in places:
        above, below = 1, 1
        for z in places:
            if z != x:
                above, below = above * z % prime, below * (z - x) % prime
        weights[x] = above * pow(below, -1, prime) % prime
    return weights
