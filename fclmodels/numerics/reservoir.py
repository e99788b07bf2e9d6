"""Reservoir sampling: a uniform sample of fixed size from a stream of unknown length (Vitter 1985, Algorithm R)."""

import torch
from torch import Tensor


def reservoir(earlier: int, arriving: int, capacity: int, random: torch.Generator) -> Tensor:
    """Return which samples a reservoir holds after more arrive: ascending int64 [min(capacity, earlier + arriving)].

    Numbers count the min(earlier, capacity) samples that it held, then the arriving ones. The i-th sample of the stream
    takes place i while places are free, then a place drawn from 1..i, if there is one of that number.
    """
    size = min(earlier, capacity)
    numbers = torch.arange(earlier, earlier + arriving)
    draws = (torch.rand(arriving, dtype=torch.float64, generator=random) * (numbers + 1)).long()
    places = torch.where(numbers < capacity, numbers, draws)
    has_place = places < capacity
    # The last to arrive of several with one place has it.
    holder = torch.arange(min(capacity, earlier + arriving))
    newcomers = size + torch.arange(arriving)
    return holder.scatter_reduce(0, places[has_place], newcomers[has_place], "amax").sort().values
