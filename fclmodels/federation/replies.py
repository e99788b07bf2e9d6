"""The answers of a round's clients: summed as they arrive, or spooled where the server needs each.

Sums run along a fixed binary tree over the clients in the order in which they are asked, so that they do not depend
on who answers first, and only about log2(n) partial sums exist at any time: answers come nearly in that order.
A late reply counts less, by one factor on all that is summed: means that travel as two sums, x*w and w, stay means.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fclmodels import state
from fclmodels.federation.messages import Kind, Reply

Tensors = dict[str, Tensor]


class TreeSum:
    """The sum of n values along a fixed binary tree; values come in any order, each with its index."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._waiting: dict[tuple[int, int], Tensors] = {}

    def add(self, index: int, value: Tensors) -> None:
        """Take in a value, which may be a view: what has to wait for its sibling is copied."""
        level, owned = 0, False
        while not self._is_root(level):
            left, right = index & ~1, index | 1
            if right * 2**level < self.n:
                sibling = self._waiting.pop((level, index ^ 1), None)
                if sibling is None:
                    break
                value = _added(sibling, value)
                owned = True
            level, index = level + 1, left >> 1
        self._waiting[level, index] = value if owned else {name: tensor.clone() for name, tensor in value.items()}

    def result(self) -> Tensors:
        ((place, value),) = self._waiting.items()
        assert self._is_root(place[0])
        return value

    def _is_root(self, level: int) -> bool:
        return 2**level >= self.n


def _added(into: Tensors, value: Tensors) -> Tensors:
    if into:
        torch._foreach_add_(list(into.values()), [value[name] for name in into])
    return into


class Replies:
    """Re-iterable answers of the clients of one exchange, by part."""

    def __init__(self, clients: Sequence[int], spool: Path) -> None:
        self.clients = tuple(clients)
        self.spool = spool
        self.facts: dict[int, dict[str, float]] = {}
        self.parts: dict[str, Kind] = {}
        self._place = {client: index for index, client in enumerate(self.clients)}
        self._sums: dict[str, TreeSum] = {}

    def add(self, client: int, reply: Reply, weight: float = 1.0) -> None:
        """Fold in what is needed as a sum only, spool what is needed one by one. weight: what it counts in sums."""
        self.facts[client] = {**reply.facts, "weight": weight}
        self.parts |= {name: part.kind for name, part in reply.parts.items()}
        for name, part in reply.parts.items():
            if part.least == "sum":
                total = self._sums.setdefault(name, TreeSum(len(self.clients)))
                total.add(self._place[client], self._weighted(client, name, part.tensors))
            else:
                state.save(part.tensors, self._file(name, client))

    def sum(self, part: str) -> Tensors:
        """The sum over clients. Do not change it in place."""
        if part in self._sums:
            return self._sums[part].result()
        total = TreeSum(len(self.clients))
        for client, tensors in self.each(part):
            total.add(self._place[client], self._weighted(client, part, tensors))
        return total.result()

    def each(self, part: str) -> Iterator[tuple[int, Tensors]]:
        """(client, tensors) in order of ids, read from the spool one at a time; for parts declared `each`."""
        for client in sorted(self.clients):
            yield client, state.load(self._file(part, client))

    @property
    def loss(self) -> float:
        """Mean training loss over samples, for the log."""
        facts = [self.facts[client] for client in sorted(self.clients)]
        weights = [fact["samples"] * fact["weight"] for fact in facts]
        return sum(fact["loss"] * w for fact, w in zip(facts, weights, strict=True)) / (sum(weights) or 1)

    def _weighted(self, client: int, part: str, tensors: Tensors) -> Tensors:
        weight = self.facts[client]["weight"]
        if weight == 1:
            return tensors
        if self.parts[part] == "statistics":
            # What was measured of an older model says nothing of today's: changes of its running statistics could even
            # make a variance negative.
            weight = 0.0
        return {name: tensor * weight for name, tensor in tensors.items()}

    def _file(self, part: str, client: int) -> Path:
        return self.spool / f"{part}-{client}.safetensors"
