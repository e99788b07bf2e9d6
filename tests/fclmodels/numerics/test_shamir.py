"""Shamir's sharing: known values, any t shares and no fewer, a field that is one."""

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fclmodels.numerics.shamir import BYTES, PRIME, evaluate_polynomial, join_shares, split_secret, weights_at_zero


def test_the_example_of_wikipedia() -> None:
    """Secret 1234, polynomial 1234 + 166 x + 94 x^2 over the field of 1613 elements, any three of six shares."""
    shares = {x: evaluate_polynomial(x, [1234, 166, 94], 1613) for x in range(1, 7)}
    assert shares == {1: 1494, 2: 329, 3: 965, 4: 176, 5: 1188, 6: 775}
    for three in combinations(shares, 3):
        assert join_shares(shares, weights_at_zero(three, 1613), 1613) == 1234


@given(secret=st.integers(0, 2**256 - 1), n=st.integers(2, 9), data=st.data())
def test_any_so_many_shares_give_the_secret_and_one_fewer_another_number(
    secret: int, n: int, data: st.DataObject
) -> None:
    t = data.draw(st.integers(2, n))
    shares = split_secret(secret, range(1, n + 1), t)
    order = data.draw(st.permutations(sorted(shares)))
    assert join_shares(shares, weights_at_zero(order[:t])) == secret
    assert join_shares(shares, weights_at_zero(order)) == secret
    assert join_shares(shares, weights_at_zero(order[: t - 1])) != secret
    assert all(share < 2 ** (8 * BYTES) for share in shares.values())


@pytest.mark.parametrize("secret", range(5))
def test_fewer_shares_say_nothing(secret: int) -> None:
    """Over all polynomials of degree 2 with this secret, two shares take each pair of values equally often."""
    pairs = [tuple(evaluate_polynomial(x, [secret, a, b], 5) for x in (1, 3)) for a in range(5) for b in range(5)]
    assert len(set(pairs)) == 25


def test_the_modulus_is_the_first_prime_that_a_secret_of_32_bytes_fits_below() -> None:
    assert is_prime(PRIME)
    assert not any(is_prime(n) for n in range(2**256, PRIME))


def is_prime(n: int) -> bool:
    """Miller and Rabin, with 30 random bases: wrong with probability below 4^-30."""
    twos = ((n - 1) & (1 - n)).bit_length() - 1
    bases = (random.Random(number).randrange(2, n - 1) for number in range(30))
    return n % 2 == 1 and all(passes(n, pow(base, (n - 1) >> twos, n), twos) for base in bases)


def passes(n: int, x: int, twos: int) -> bool:
    return x == 1 or any(pow(x, 2**i, n) == n - 1 for i in range(twos))
