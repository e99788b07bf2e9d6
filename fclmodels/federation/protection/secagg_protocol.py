"""Secure aggregation (Bonawitz et al. 2017, figure 4, for a server that is honest but curious): the protocol alone.

A server learns the sum of its clients' vectors in Z_2^64 and nothing else, although some clients leave on the way:

0 AdvertiseKeys: a client makes two X25519 key pairs and sends the public keys.
1 ShareKeys: it splits the private key of its masks and the seed b of its own mask into shares, any t of which restore
  them, and sends one of each to every client, encrypted.
2 MaskedInputCollection: over the clients v that have sent shares it sends
  y_u = x_u + PRG(b_u) + sum_{u<v} PRG(s_uv) - sum_{u>v} PRG(s_uv), where s_uv is the key that the pair agrees on.
3 Unmasking: it reveals its share of b_u for each u whose y_u has arrived, of the private key for each other u.

In sum_u y_u the s_uv of two clients that are there cancel; from the shares the server restores the PRG(b_u), and the
PRG(s_uv) of those v that left after 1. It gets both secrets of nobody, as long as it names the same survivors to all,
and t > n / 2. The version against a server that lies needs signed keys and a round in which clients compare the list
of survivors (ConsistencyCheck): neither is here. Nor is a client detected that sends a wrong vector or share.

Clients are named by numbers from 0 on. Keys, seeds and nonces are the operating system's randomness, new in each run.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fclmodels.errors import UserError
from fclmodels.numerics import shamir

KEY = 32  # bytes of a key or a seed
NONCE = 12
ZEROS = memoryview(bytes(1 << 17))  # encrypted piece by piece to get a key stream; a piece fits into the CPU's cache


@dataclass(frozen=True)
class Secrets:
    """The secrets of a client."""

    shares: bytes  # the private key with which shares are encrypted
    masks: bytes  # the private key of the masks
    seed: bytes  # b, of its own mask

    @classmethod
    def new(cls) -> "Secrets":
        """Return new keys and a new seed."""
        return cls.of(b"".join(X25519PrivateKey.generate().private_bytes_raw() for _ in range(2)) + os.urandom(KEY))

    @classmethod
    def of(cls, joined: bytes) -> "Secrets":
        """Return the secrets that `to_bytes` has written."""
        return cls(joined[:KEY], joined[KEY : 2 * KEY], joined[2 * KEY :])

    def to_bytes(self) -> bytes:
        """Return all secrets, to be stored by the client."""
        return self.shares + self.masks + self.seed

    @property
    def public(self) -> bytes:
        """Both public keys (step 0)."""
        return derive_public_key(self.shares) + derive_public_key(self.masks)


# On a client.


def share_secrets(secrets: Secrets, me: int, keys: Mapping[int, bytes], threshold: int) -> dict[int, bytes]:
    """Return for each client, itself too, its shares of both secrets, encrypted for it alone (step 1)."""
    refuse_too_few("have keys", keys, threshold)
    places = [client + 1 for client in keys]
    of_key, of_seed = (
        shamir.split_secret(int.from_bytes(secret), places, threshold) for secret in (secrets.masks, secrets.seed)
    )
    sealed = {}
    for client, public in keys.items():
        nonce, place = os.urandom(NONCE), client + 1
        pair = of_key[place].to_bytes(shamir.BYTES) + of_seed[place].to_bytes(shamir.BYTES)
        cipher = AESGCM(agree_on_key(secrets.shares, public[:KEY], b"shares"))
        sealed[client] = nonce + cipher.encrypt(nonce, pair, bind_to_sender(me, client))
    return sealed


def mask_values(
    secrets: Secrets, me: int, keys: Mapping[int, bytes], sharers: Collection[int], values: np.ndarray
) -> None:
    """Add the client's masks to values (uint64) in place, which hides them from everyone (step 2)."""
    add_stream(values, secrets.seed)
    for client in sharers:
        if client != me:
            add_stream(values, agree_on_key(secrets.masks, keys[client][KEY:], b"masks"), minus=me > client)


def reveal_shares(
    secrets: Secrets,
    me: int,
    keys: Mapping[int, bytes],
    received: Mapping[int, bytes],
    survivors: Collection[int],
    threshold: int,
) -> dict[int, bytes]:
    """Return one of the two shares of each client that `me` has received: its seed's where it survives (step 3)."""
    refuse_too_few("have sent their masked replies", survivors, threshold)
    opened = {}
    for client, sealed in received.items():
        cipher = AESGCM(agree_on_key(secrets.shares, keys[client][:KEY], b"shares"))
        pair = cipher.decrypt(sealed[:NONCE], sealed[NONCE:], bind_to_sender(client, me))
        opened[client] = pair[shamir.BYTES :] if client in survivors else pair[: shamir.BYTES]
    return opened


# On the server.


def unmask_sum(
    total: np.ndarray,
    keys: Mapping[int, bytes],
    sharers: Collection[int],
    survivors: Collection[int],
    shares: Mapping[int, Mapping[int, bytes]],
    threshold: int,
) -> None:
    """Remove the masks from the survivors' sum (uint64), in place. shares: those that each client has revealed."""
    refuse_too_few("have revealed their shares", shares, threshold)
    holders = sorted(shares)[:threshold]
    weights = shamir.weights_at_zero([client + 1 for client in holders])
    for about in sharers:
        secret = shamir.join_shares({c + 1: int.from_bytes(shares[c][about]) for c in holders}, weights).to_bytes(KEY)
        if about in survivors:
            add_stream(total, secret, minus=True)
            continue
        if derive_public_key(secret) != keys[about][KEY:]:
            raise UserError(f"secure aggregation: the shares of client {about}'s key do not fit together.")
        for client in survivors:
            add_stream(total, agree_on_key(secret, keys[client][KEY:], b"masks"), minus=client < about)


def refuse_too_few(predicate: str, clients: Collection[int], threshold: int) -> None:
    """Raise UserError where fewer clients than needed satisfy a predicate, such as "have keys"."""
    if len(clients) < threshold:
        raise UserError(
            f"secure aggregation: only {len(clients)} clients {predicate}, and {threshold} are needed. "
            "Sample more clients, or lower federation.secagg.threshold."
        )


# Primitives, all of the package `cryptography`.


def derive_public_key(private: bytes) -> bytes:
    """Return the public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree_on_key(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """Return the key that two clients agree on, each by its own private and the other's public key."""
    secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return HKDF(SHA256(), KEY, salt=None, info=b"fclflow secagg " + purpose).derive(secret)


def bind_to_sender(sender: int, receiver: int) -> bytes:
    """Return the bytes that bind an encrypted pair of shares to its sender and receiver."""
    return f"{sender}>{receiver}".encode()


def add_stream(values: np.ndarray, seed: bytes, minus: bool = False) -> None:
    """Add PRG(seed), the key stream of AES-256-CTR, or subtract it. A seed serves once, so the nonce can be 0."""
    combine = np.subtract if minus else np.add
    start = 0
    for piece in generate_key_stream(seed, values.nbytes):
        end = start + len(piece)
        combine(values[start:end], piece, out=values[start:end])
        start = end


def generate_key_stream(seed: bytes, size: int) -> Iterator[np.ndarray]:
    """Yield the first `size` bytes of a seed's stream, in pieces (uint64)."""
    cipher = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    for start in range(0, size, len(ZEROS)):
        yield np.frombuffer(cipher.update(ZEROS[: size - start]), "<u8")
