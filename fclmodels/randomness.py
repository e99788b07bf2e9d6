"""Randomness keyed by what it is for, never drawn from ambient state.

Each stream derives from a key such as (seed, purpose, task, round, client), so a result depends neither on
the executor, nor on the order of clients, nor on an interruption.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(*key: int | str) -> int:
    """63 bits that this key alone determines; of these torch's CPU generator uses 32."""
    return int.from_bytes(hashlib.sha256(json.dumps(key).encode()).digest()[:8]) >> 1


def generator(*key: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed_of(*key))


@contextmanager
def ambient(*key: int | str, device: torch.device) -> Iterator[None]:
    """Torch's global generator, seeded by the key and put back afterwards: for dropout, which can use no other."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.random.default_generator.manual_seed(seed_of(*key))
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed_of(*key))
        yield
