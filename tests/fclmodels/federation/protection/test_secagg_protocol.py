"""The protocol: exact sums whoever leaves when, below the threshold an error, and nothing of one client in between."""

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from fclmodels.errors import UserError
from fclmodels.federation.engine.faults import compute_secagg_threshold
from fclmodels.federation.protection import secagg_protocol
from fclmodels.federation.protection.secagg_protocol import Secrets
from fclmodels.numerics import shamir

THERE = 4  # the step before which one leaves who stays to the end


class Server:
    """All that a server gets in one execution, and the sum that it makes of it. leaves: client -> the first step that
    it does not take; whoever leaves before 3 has sent its masked vector."""

    def __init__(
        self,
        vectors: Mapping[int, np.ndarray],
        threshold: int,
        leaves: Mapping[int, int] | None = None,
        secrets: Mapping[int, Secrets] | None = None,
    ) -> None:
        own = secrets or {client: Secrets.new() for client in vectors}
        leaves = leaves or {}
        there = [{c for c in vectors if leaves.get(c, THERE) > step} for step in range(4)]
        self.keys = {c: own[c].public for c in there[0]}
        self.sealed = {c: secagg_protocol.share_secrets(own[c], c, self.keys, threshold) for c in there[1]}
        self.masked = {c: vectors[c].copy() for c in there[2]}
        for c, vector in self.masked.items():
            secagg_protocol.mask_values(own[c], c, self.keys, self.sealed.keys(), vector)
        received = {c: {u: sealed[c] for u, sealed in self.sealed.items()} for c in there[3]}
        self.revealed = {
            c: secagg_protocol.reveal_shares(own[c], c, self.keys, received[c], self.masked.keys(), threshold)
            for c in there[3]
        }
        self.total = sum(self.masked.values(), np.zeros_like(next(iter(vectors.values()))))
        secagg_protocol.unmask_sum(
            self.total, self.keys, self.sealed.keys(), self.masked.keys(), self.revealed, threshold
        )


def vectors_of(clients: int, size: int = 5, seed: int = 0) -> dict[int, np.ndarray]:
    random = np.random.default_rng(seed)
    return {c: random.integers(0, 2**64, size, dtype=np.uint64) for c in range(clients)}


@settings(deadline=None, max_examples=40)
@given(n=st.integers(2, 7), data=st.data())
def test_the_sum_is_exact_whoever_leaves_when(n: int, data: st.DataObject) -> None:
    """By the numbers of Python, modulo 2^64. Clients' numbers have gaps."""
    names = data.draw(st.lists(st.integers(0, 99), min_size=n, max_size=n, unique=True))
    vectors = {name: vectors_of(n, seed=n)[place] for place, name in enumerate(names)}
    t = compute_secagg_threshold(n, 2 / 3)
    gone = data.draw(st.lists(st.sampled_from(names), max_size=n - t, unique=True))
    leaves = {name: data.draw(st.integers(0, 3)) for name in gone}
    summed = [vectors[c] for c in names if leaves.get(c, THERE) > 2]
    expected = [sum(int(vector[i]) for vector in summed) % 2**64 for i in range(5)]
    assert Server(vectors, t, leaves).total.tolist() == expected


@pytest.mark.parametrize(("step", "told"), [(0, "have keys"), (1, "sent"), (2, "sent"), (3, "revealed")])
def test_below_the_threshold_nothing_is_unmasked(step: int, told: str) -> None:
    leaves = dict.fromkeys((0, 3), step)
    with pytest.raises(UserError, match=rf"only 3 clients .*{told}.*, and 4 are needed.*federation\.secagg\.threshold"):
        Server(vectors_of(5), 4, leaves)
    assert Server(vectors_of(6), 4, leaves).total.any()


def test_the_threshold_is_above_half_and_at_least_two() -> None:
    assert [compute_secagg_threshold(n, 2 / 3) for n in (1, 2, 3, 4, 9, 10)] == [2, 2, 2, 3, 6, 7]
    assert all(2 * compute_secagg_threshold(n, 0.5 + 1e-6) > n for n in range(1, 1000))


# What the server gets


@pytest.mark.parametrize("value", [0, 1, 2**40, 2**64 - 1])
def test_a_masked_vector_looks_uniform_whatever_it_hides(value: int) -> None:
    """Bytes at each of the eight places of a number, by chi-squared at 1e-9, and bits among neighbours."""
    vectors = vectors_of(3, size=40_000) | {1: np.full(40_000, value, dtype=np.uint64)}
    hidden = Server(vectors, 2).masked[1]
    for place in hidden.view(np.uint8).reshape(-1, 8).T:
        counts = np.bincount(place, minlength=256)
        assert ((counts - 156.25) ** 2 / 156.25).sum() < chi2.isf(1e-9, 255)
    ones = int(np.bitwise_count(hidden[1:] ^ hidden[:-1]).sum())
    assert abs(ones - 32 * 39_999) < 6 * 800  # standard deviations


def test_what_a_client_hides_changes_no_other_message_and_its_own_by_as_much() -> None:
    """The masks are the same, whatever is hidden, and other ones in each execution."""
    secrets = {client: Secrets.new() for client in range(4)}
    vectors = vectors_of(4)
    one, two = Server(vectors, 3, secrets=secrets), Server(vectors | {2: vectors[2] + np.uint64(7)}, 3, secrets=secrets)
    assert one.keys == two.keys
    for client in (0, 1, 3):
        assert (one.masked[client] == two.masked[client]).all()
    assert (two.masked[2] - one.masked[2] == 7).all()
    again = Server(vectors, 3)
    assert not any((one.masked[client] == again.masked[client]).any() for client in vectors)


def test_of_no_client_both_secrets_are_revealed() -> None:
    """Survivors' seeds and the keys of those that left: from t shares the server gets these, and the other of none."""
    secrets = {client: Secrets.new() for client in range(5)}
    server = Server(vectors_of(5), 3, {1: 2, 4: 3}, secrets)

    def told(about: int) -> bytes:
        shares = {c + 1: int.from_bytes(of[about]) for c, of in list(server.revealed.items())[:3]}
        return shamir.join_shares(shares, shamir.weights_at_zero(list(shares))).to_bytes(33)[1:]

    assert {about: told(about) for about in range(5)} == {
        about: secrets[about].masks if about == 1 else secrets[about].seed for about in range(5)
    }


def test_a_seed_or_a_key_alone_unmasks_nobody() -> None:
    """y_u less its own mask is still masked by the pairs, and less the pairs' masks by its own."""
    secrets = {client: Secrets.new() for client in range(3)}
    vectors = vectors_of(3)
    server = Server(vectors, 2, secrets=secrets)
    less_own, less_pairs = server.masked[0].copy(), server.masked[0].copy()
    secagg_protocol.add_stream(less_own, secrets[0].seed, minus=True)
    for other in (1, 2):
        pair = secagg_protocol.agree_on_key(secrets[0].masks, server.keys[other][32:], b"masks")
        secagg_protocol.add_stream(less_pairs, pair, minus=True)
    assert not (less_own == vectors[0]).any()
    assert not (less_pairs == vectors[0]).any()
    secagg_protocol.add_stream(less_pairs, secrets[0].seed, minus=True)
    assert (less_pairs == vectors[0]).all()


@pytest.mark.parametrize("spoilt", ["other receiver", "other sender", "changed"])
def test_sealed_shares_open_for_their_receiver_alone_and_unchanged(spoilt: str) -> None:
    secrets = {client: Secrets.new() for client in range(3)}
    keys = {client: own.public for client, own in secrets.items()}
    sealed = secagg_protocol.share_secrets(secrets[0], 0, keys, 2)
    sender, text = (1, sealed[2]) if spoilt == "other sender" else (0, sealed[1 if spoilt == "other receiver" else 2])
    if spoilt == "changed":
        text = text[:-1] + bytes([text[-1] ^ 1])
    secagg_protocol.reveal_shares(secrets[2], 2, keys, {0: sealed[2]}, [0, 1, 2], 2)
    with pytest.raises(InvalidTag):
        secagg_protocol.reveal_shares(secrets[2], 2, keys, {sender: text}, [0, 1, 2], 2)


def test_shares_that_do_not_fit_are_noticed_where_they_are_of_a_key() -> None:
    secrets: dict[int, Any] = {client: Secrets.new() for client in range(3)}
    server = Server(vectors_of(3), 2, {1: 2}, secrets)
    server.keys[1] = Secrets.new().public
    with pytest.raises(UserError, match="shares of client 1's key do not fit"):
        secagg_protocol.unmask_sum(server.total, server.keys, {0, 1, 2}, {0, 2}, server.revealed, 2)


# Primitives against known answers


def test_two_clients_agree_as_in_rfc_7748_and_derive_as_in_rfc_5869() -> None:
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    secret = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    extracted = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    expected = hmac.new(extracted, b"fclflow secagg masks\x01", hashlib.sha256).digest()
    assert secagg_protocol.agree_on_key(alice, secagg_protocol.derive_public_key(bob), b"masks") == expected
    assert secagg_protocol.agree_on_key(bob, secagg_protocol.derive_public_key(alice), b"masks") == expected


def test_masks_are_the_blocks_of_aes_in_counter_mode() -> None:
    """Over more than one piece; the same stream added and taken off leaves nothing."""
    seed, values = bytes(range(32)), np.zeros(40_001, dtype=np.uint64)
    secagg_protocol.add_stream(values, seed)
    blocks = b"".join(number.to_bytes(16) for number in range(20_001))
    expected = Cipher(algorithms.AES(seed), modes.ECB()).encryptor().update(blocks)
    assert values.tobytes() == expected[: values.nbytes]
    secagg_protocol.add_stream(values, seed, minus=True)
    assert not values.any()
