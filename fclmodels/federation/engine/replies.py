"""The replies of an exchange: summed as they arrive where only sums are needed, or stored until all are checked.

Up to IN_MEMORY bytes stay in memory, the rest goes to the spool. Sums run along a fixed binary tree over the clients in
their order in the exchange, so that the bits do not depend on who answers first, and about log2(n) partial sums exist
at a time, of which those over many clients wait in the spool. A late reply counts less, by one factor on all that is
summed: means that travel as two sums, w*x and w, stay means. Where a robust rule is set, it replaces such a mean
(numerics/robust_means.py).
"""

import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fclmodels.errors import UserError
from fclmodels.federation.messages import Block, Part, Reply, SharedBuffer
from fclmodels.storage.files import name_in_errors

IN_MEMORY = 2**25  # bytes of a round's replies; later replies go to the spool
SPOOLED = 4  # the level of the tree from which on a partial sum waits in the spool

Tensors = dict[str, Tensor]
Rule = Callable[[Sequence[Tensors], Tensor, Tensor], Tensors]


class TreeSum:
    """The sum of n values along a fixed binary tree; values arrive in any order, each with its index.

    spool: a folder for partial sums of 2**SPOOLED values and more, so that memory does not grow with n.
    """

    def __init__(self, n: int, spool: Path | None = None) -> None:
        self.n = n
        self.spool = spool
        self._waiting: dict[tuple[int, int], Tensors] = {}

    def add(self, index: int, value: Tensors, level: int = 0) -> None:
        """Add a value, which may be a view: it is copied where it has to wait for its sibling.

        level: above 0, the value is a sum already, of the 2**level values from index * 2**level on.
        """
        owned = False
        while not self._is_root(level):
            left, right = index & ~1, index | 1
            if right * 2**level < self.n:
                sibling = self._waiting.pop((level, index ^ 1), None)
                if sibling is None:
                    break
                value = _add(value, sibling) if owned else _add(sibling, value)
                owned = True
            level, index = level + 1, left >> 1
        if self.spool and level >= SPOOLED and not self._is_root(level):
            file = self.spool / f"{level}-{index}"
            self._waiting[level, index] = _read(file, _write(value, file))
        else:
            self._waiting[level, index] = value if owned else _clone(value)

    def compute_sum(self) -> Tensors:
        """Return the sum of all n values."""
        ((place, value),) = self._waiting.items()
        assert self._is_root(place[0])
        return value

    def _is_root(self, level: int) -> bool:
        return 2**level >= self.n


def _add(into: Tensors, value: Tensors) -> Tensors:
    """Add a value in place; return the sum."""
    if into:
        torch._foreach_add_(list(into.values()), [value[name] for name in into])
    return into


def _clone(value: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in value.items()}


class Replies:
    """The replies of the clients of one exchange, by part."""

    def __init__(self, clients: Sequence[int], spool: Path, rule: Rule | None = None) -> None:
        self.clients = tuple(clients)
        self.spool = spool
        self.rule = rule
        self.facts: dict[int, dict[str, float]] = {}
        self._outlines: dict[int, dict[str, Part]] = {}  # parts without tensors, by client
        self._in_memory: dict[tuple[str, int], Tensors] = {}
        self._spooled: dict[tuple[str, int], tuple[Path, int]] = {}
        self._room = IN_MEMORY
        self._sums: dict[str, TreeSum] = {}
        self._groups = 0  # sums among some of the clients so far
        self.in_blocks = False  # whether some part has arrived only as sums over some clients

    def add(self, client: int, reply: Reply, weight: float = 1.0) -> None:
        """Store a reply, whose tensors may be views. weight: what it counts in sums."""
        self.facts[client] = {**reply.facts, "weight": weight}
        self._outlines[client] = {name: replace(part, tensors={}) for name, part in reply.parts.items()}
        for name, part in reply.parts.items():
            if part.is_outline:
                self.in_blocks = True
                continue
            if part.bytes <= self._room:
                self._room -= part.bytes
                self._in_memory[name, client] = _clone(part.tensors)
            else:
                # A client's names of parts are not safe as names of files.
                file = self.spool / str(len(self._spooled))
                self._spooled[name, client] = file, _write(part.tensors, file)

    def add_block(self, block: Block) -> None:
        """Add parts that are summed over some of the clients."""
        for name, tensors in block.parts.items():
            if name not in self._sums:
                self._sums[name] = TreeSum(len(self.clients), self.spool / f"sums{len(self._sums)}")
            self._sums[name].add(block.place, tensors, block.level)

    def drop_blocks(self) -> None:
        """Forget all blocks; the replies in them must be added one by one."""
        self._sums, self.in_blocks = {}, False

    def drop(self, client: int) -> None:
        """Forget the reply of a client."""
        self.clients = tuple(other for other in self.clients if other != client)
        self.facts.pop(client, None)

    @property
    def parts(self) -> dict[str, Part]:
        """All parts of the replies, without tensors."""
        self._refuse_silence()
        return {name: part for client in self.clients for name, part in self._outlines[client].items()}

    def sum_among(self, part: str, clients: Collection[int]) -> Tensors:
        """Return a part's sum over some of the clients, along a tree of its own; not to be changed in place.

        Zeros where none of these has answered. Under a robust rule, as `sum`.
        """
        self._refuse_silence()
        if self.parts[part].least == "sum":
            raise ValueError(f"{part} is declared as a sum over all clients, and asked for by group")
        members = [client for client in sorted(self.clients) if client in clients]
        if not members:
            return {name: torch.zeros_like(t) for name, t in self._read_tensors(part, self.clients[0]).items()}
        if self.rule is not None and self.parts[part].over:
            return self._sum_by_rule(part, self.rule, members)
        self._groups += 1
        return self._add_up(part, members, self.spool / f"group{self._groups}")

    def sum(self, part: str) -> Tensors:
        """Return a part's sum over all clients, not to be changed in place.

        Under a robust rule, for a part of a weighted mean: the rule's mean times the sum of the weights.
        """
        self._refuse_silence()
        if self.rule is not None and self.parts[part].over:
            return self._sum_by_rule(part, self.rule, self.clients)
        if part in self._sums:
            return self._sums[part].compute_sum()
        return self._add_up(part, self.clients, self.spool / "sums")

    def _add_up(self, part: str, clients: Sequence[int], spool: Path) -> Tensors:
        """Return a part's weighted sum over these clients."""
        total = TreeSum(len(clients), spool)
        for place, client in enumerate(clients):
            total.add(place, self._yield_weighted(client, part, self._read_tensors(part, client)))
        return total.compute_sum()

    def yield_each(self, part: str) -> Iterator[tuple[int, Tensors]]:
        """Yield (client, tensors) of a part in order of clients, one at a time where they are in the spool."""
        self._refuse_silence()
        for client in sorted(self.clients):
            yield client, self._read_tensors(part, client)

    def compute_noise(self, part: str) -> float:
        """Return the standard deviation of the noise in each number of a part's sum."""
        return math.hypot(
            *(self._outlines[client][part].noise * self._find_share(client, part) for client in self.clients)
        )

    @property
    def loss(self) -> float | None:
        """The mean training loss over samples, for the log; None where no reply has one."""
        facts = [self.facts[client] for client in sorted(self.clients)]
        weights = [fact["samples"] * fact["weight"] for fact in facts]
        if not sum(weights):
            return None
        return sum(fact["loss"] * w for fact, w in zip(facts, weights, strict=True)) / sum(weights)

    def _refuse_silence(self) -> None:
        """Raise UserError where no reply can be used."""
        if not self.clients:
            raise UserError(
                f"{self.spool.name}: no reply can be used, all were refused or their clients set aside. "
                "Look at those clients, at whether training diverges, or at federation.inspection."
            )

    def _sum_by_rule(self, part: str, rule: Rule, clients: Sequence[int]) -> Tensors:
        """Return the rule's mean of a part over these clients, times the sum of their weights."""
        over = self.parts[part].over
        (total,) = self._add_up(over, clients, self.spool / "weights").values()
        counts = {client: next(iter(self._read_tensors(over, client).values())).item() for client in sorted(clients)}
        members = [client for client in counts if self._find_share(client, part)]
        if not members:
            return {name: torch.zeros_like(t) for name, t in self._read_tensors(part, self.clients[0]).items()}
        vectors = [self._read_tensors(part, client) for client in members]
        scales = torch.tensor([1 / counts[client] for client in members], dtype=torch.float64)
        weights = torch.tensor(
            [counts[client] * self._find_share(client, part) for client in members], dtype=torch.float64
        )
        return {name: mean * total.item() for name, mean in rule(vectors, scales, weights).items()}

    def _yield_weighted(self, client: int, part: str, tensors: Tensors) -> Tensors:
        weight = self._find_share(client, part)
        return tensors if weight == 1 else {name: tensor * weight for name, tensor in tensors.items()}

    def _find_share(self, client: int, part: str) -> float:
        """Return what a client's reply counts in the sum of a part."""
        weight = self.facts[client]["weight"]
        if weight != 1 and self.parts[part].kind in ("statistics", "loss"):
            # Statistics and losses of an older model do not apply to the current one: changes of running statistics
            # could even make a variance negative.
            return 0.0
        return weight

    def _read_tensors(self, part: str, client: int) -> Tensors:
        tensors = self._in_memory.get((part, client))
        return _read(*self._spooled[part, client]) if tensors is None else tensors


def _write(tensors: Tensors, file: Path) -> int:
    """Write tensors to a file, unsynced as it need not outlive this process; return its size."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with name_in_errors(file):
            return SharedBuffer(descriptor).write(tensors)
    finally:
        os.close(descriptor)


def _read(file: Path, size: int) -> Tensors:
    """Return the tensors as views of the file, which are read only where they are used."""
    descriptor = os.open(file, os.O_RDWR)
    try:
        tensors: Tensors = SharedBuffer(descriptor).read(size)
        return tensors
    finally:
        os.close(descriptor)
