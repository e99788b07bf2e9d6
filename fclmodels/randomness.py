"""Random generators keyed by their purpose, never global state.

Each one derives from a key such as (seed, purpose, task, round, client), so a result depends neither on
the executor, nor on the order of clients, nor on an interruption.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*key: int | str) -> int:
    """Return 63 bits that this key alone determines; torch's CPU generator uses 32 of them."""
    return int.from_bytes(hashlib.sha256(json.dumps(key).encode()).digest()[:8]) >> 1


def make_generator(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(derive_seed(*key))


@contextmanager
def seed_torch(*key: int | str, device: torch.device) -> Iterator[None]:
    """Seed torch's global generator by the key, and restore it afterwards: for dropout, which can use no other."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.random.default_generator.manual_seed(derive_seed(*key))
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(derive_seed(*key))
        yield
