"""Shares of a budget for several needs."""

from collections.abc import Sequence


def split_evenly(budget: int, needs: Sequence[int]) -> list[int]:
    """Return the share of a budget for each need: as equal as can be, none above its need, a rest to the last ones."""
    shares = [0] * len(needs)
    rising = sorted(range(len(needs)), key=lambda place: (needs[place], place))
    for done, place in enumerate(rising):
        shares[place] = min(needs[place], budget // (len(needs) - done))
        budget -= shares[place]
    return shares
