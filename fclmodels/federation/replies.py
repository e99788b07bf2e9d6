"""The answers of a round's clients: added up as they come where a sum is all that anyone needs, or held until all have
been checked, then summed, or given one by one.

Few bytes are held in memory, what is more in the spool. Sums run along a fixed binary tree over the clients in the
order in which they are asked, so that they do not depend on who answers first, and only about log2(n) partial sums
exist at any time, of which those over many clients wait in the spool. A late reply counts less, by one factor on all
that is summed: means that travel as two sums, x*w and w, stay means. Where a robust rule is set, such a mean is the
rule's (numerics/robust.py).
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fclmodels.errors import UserError
from fclmodels.federation.messages import Block, Part, Reply, SharedBuffer
from fclmodels.mapped import naming

IN_MEMORY = 2**25  # bytes of a round's replies; what comes after them goes to the spool
SPOOLED = 4  # the level of the tree from which on a partial sum waits in the spool

Tensors = dict[str, Tensor]
Rule = Callable[[Sequence[Tensors], Tensor, Tensor], Tensors]


class TreeSum:
    """The sum of n values along a fixed binary tree; values come in any order, each with its index.

    spool: a folder for partial sums over 2**SPOOLED and more, so that what is in memory does not grow with n.
    """

    def __init__(self, n: int, spool: Path | None = None) -> None:
        self.n = n
        self.spool = spool
        self._waiting: dict[tuple[int, int], Tensors] = {}

    def add(self, index: int, value: Tensors, level: int = 0) -> None:
        """Take in a value, which may be a view: what has to wait for its sibling is copied.

        level: above 0, the value is the sum of those at 2**level places from index * 2**level on.
        """
        owned = False
        while not self._is_root(level):
            left, right = index & ~1, index | 1
            if right * 2**level < self.n:
                sibling = self._waiting.pop((level, index ^ 1), None)
                if sibling is None:
                    break
                value = _added(value, sibling) if owned else _added(sibling, value)
                owned = True
            level, index = level + 1, left >> 1
        if self.spool and level >= SPOOLED and not self._is_root(level):
            file = self.spool / f"{level}-{index}"
            self._waiting[level, index] = _read(file, _write(value, file))
        else:
            self._waiting[level, index] = value if owned else _cloned(value)

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


def _cloned(value: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in value.items()}


class Replies:
    """Re-iterable answers of the clients of one exchange, by part."""

    def __init__(self, clients: Sequence[int], spool: Path, rule: Rule | None = None) -> None:
        self.clients = tuple(clients)
        self.spool = spool
        self.rule = rule
        self.facts: dict[int, dict[str, float]] = {}
        self._declared: dict[int, dict[str, Part]] = {}
        self._held: dict[tuple[str, int], Tensors] = {}
        self._spooled: dict[tuple[str, int], tuple[Path, int]] = {}
        self._room = IN_MEMORY
        self._sums: dict[str, TreeSum] = {}
        self.in_blocks = False  # whether of some part only sums over some clients have come

    def add(self, client: int, reply: Reply, weight: float = 1.0) -> None:
        """Hold a reply, whose tensors may be views. weight: what it counts in sums."""
        self.facts[client] = {**reply.facts, "weight": weight}
        self._declared[client] = {name: replace(part, tensors={}) for name, part in reply.parts.items()}
        for name, part in reply.parts.items():
            if part.is_outline:
                self.in_blocks = True
                continue
            if part.bytes <= self._room:
                self._room -= part.bytes
                self._held[name, client] = _cloned(part.tensors)
            else:
                # A name that a client has chosen is no name for a file.
                file = self.spool / str(len(self._spooled))
                self._spooled[name, client] = file, _write(part.tensors, file)

    def add_block(self, block: Block) -> None:
        for name, tensors in block.parts.items():
            if name not in self._sums:
                self._sums[name] = TreeSum(len(self.clients), self.spool / f"sums{len(self._sums)}")
            self._sums[name].add(block.place, tensors, block.level)

    def drop_blocks(self) -> None:
        """What they held of the clients has to be added one by one."""
        self._sums, self.in_blocks = {}, False

    def drop(self, client: int) -> None:
        """As if it had not answered."""
        self.clients = tuple(other for other in self.clients if other != client)
        self.facts.pop(client, None)

    @property
    def parts(self) -> dict[str, Part]:
        """What was declared of each part, without its tensors."""
        self._refuse_silence()
        return {name: part for client in self.clients for name, part in self._declared[client].items()}

    def sum(self, part: str) -> Tensors:
        """The sum over clients; under a robust rule, of a weighted mean what the rule makes of it, times the weights'.

        Do not change it in place.
        """
        self._refuse_silence()
        if self.rule is not None and self.parts[part].over:
            return self._by_rule(part, self.rule)
        if part in self._sums:
            return self._sums[part].result()
        total = TreeSum(len(self.clients), self.spool / "sums")
        for place, client in enumerate(self.clients):
            total.add(place, self._weighted(client, part, self._tensors(part, client)))
        return total.result()

    def each(self, part: str) -> Iterator[tuple[int, Tensors]]:
        """(client, tensors) in order of ids, one at a time where they are in the spool."""
        self._refuse_silence()
        for client in sorted(self.clients):
            yield client, self._tensors(part, client)

    def noise(self, part: str) -> float:
        """The standard deviation of a mechanism's noise in each number of the sum."""
        return math.hypot(*(self._declared[client][part].noise * self._share(client, part) for client in self.clients))

    @property
    def loss(self) -> float | None:
        """Mean training loss over samples, for the log; None where nobody tells it."""
        facts = [self.facts[client] for client in sorted(self.clients)]
        weights = [fact["samples"] * fact["weight"] for fact in facts]
        if not sum(weights):
            return None
        return sum(fact["loss"] * w for fact, w in zip(facts, weights, strict=True)) / sum(weights)

    def _refuse_silence(self) -> None:
        if not self.clients:
            raise UserError(
                f"{self.spool.name}: no reply can be used, all were refused or their clients set aside. "
                "Look at those clients, at whether training diverges, or at federation.inspection."
            )

    def _by_rule(self, part: str, rule: Rule) -> Tensors:
        over = self.parts[part].over
        (total,) = self.sum(over).values()
        counts = {client: next(iter(tensors.values())).item() for client, tensors in self.each(over)}
        heard = [client for client in counts if self._share(client, part)]
        if not heard:
            return {name: torch.zeros_like(t) for name, t in self._tensors(part, self.clients[0]).items()}
        vectors = [self._tensors(part, client) for client in heard]
        scales = torch.tensor([1 / counts[client] for client in heard], dtype=torch.float64)
        weights = torch.tensor([counts[client] * self._share(client, part) for client in heard], dtype=torch.float64)
        return {name: mean * total.item() for name, mean in rule(vectors, scales, weights).items()}

    def _weighted(self, client: int, part: str, tensors: Tensors) -> Tensors:
        weight = self._share(client, part)
        return tensors if weight == 1 else {name: tensor * weight for name, tensor in tensors.items()}

    def _share(self, client: int, part: str) -> float:
        weight = self.facts[client]["weight"]
        if weight != 1 and self.parts[part].kind in ("statistics", "loss"):
            # What was measured of an older model says nothing of today's: changes of its running statistics could even
            # make a variance negative.
            return 0.0
        return weight

    def _tensors(self, part: str, client: int) -> Tensors:
        held = self._held.get((part, client))
        return _read(*self._spooled[part, client]) if held is None else held


def _write(tensors: Tensors, file: Path) -> int:
    """Into a file that need not outlive this process, so that nothing waits for the disk; its size."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with naming(file):
            return SharedBuffer(descriptor).write(tensors)
    finally:
        os.close(descriptor)


def _read(file: Path, size: int) -> Tensors:
    """Views of the file: what is not looked at is not read."""
    descriptor = os.open(file, os.O_RDWR)
    try:
        tensors: Tensors = SharedBuffer(descriptor).read(size)
        return tensors
    finally:
        os.close(descriptor)
