"""Reservoir sampling: a uniform sample of fixed size from a stream of unknown length (Vitter 1985, Algorithm R)."""

import torch
from torch import Tensor


def reservoir(seen: int, arriving: int, capacity: int, random: torch.Generator) -> Tensor:
    """Which samples a reservoir holds after more have arrived: ascending int64 [min(capacity, seen + arriving)].

    They are numbered over what it holds, the first min(seen, capacity) of them, and then what arrives. The i-th sample
    of the stream takes place i while places are free, then a place drawn from 1..i, if there is one of that number.
    """
    held = min(seen, capacity)
    numbers = torch.arange(seen, seen + arriving)
    drawn = (torch.rand(arriving, dtype=torch.float64, generator=random) * (numbers + 1)).long()
    places = torch.where(numbers < capacity, numbers, drawn)
    placed = places < capacity
    # Of several that were given one place, the last to arrive has it.
    holder = torch.arange(min(capacity, seen + arriving))
    newcomers = held + torch.arange(arriving)
    return holder.scatter_reduce(0, places[placed], newcomers[placed], "amax").sort().values
