"""What travels between the server and its clients: parts made of named tensors.

Between processes a message is JSON plus raw tensor bytes, in shared memory or as one bytes object; nothing is pickled.
"""

import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fclmodels.mapped import reserve
from fclmodels.state import Tree, flatten, unflatten

Kind = Literal[
    "weights",
    "update",
    "statistics",
    "sketch",
    "energy",
    "basis",
    "directions",
    "prototype",
    "reference",
    "loss",
    "count",
    "protocol",
]
Least = Literal["sum", "each"]
Place = tuple[str, list[int], int | None]
ALIGNMENT = 64


@dataclass(frozen=True)
class Part:
    """Named tensors of one kind, and the least that the method's server needs of them over clients.

    kind "statistics": changes of a mean over `over`, or without it sums of what is not negative; "energy": of a layer's
    input, [||X||^2, ||X*||^2, n ||X*|| / ||X||, n]; "loss": a sum over samples, and their number.
    least "sum": of floating point in a reply to training, for a late one counts in part.
    once: it stays the same for a whole task, so a client downloads it the first time that it takes part.
    over: the part with the one number w that its tensors w*x are multiplied by; the mean is the sum over that part's.
    bound: what noise takes for the largest length of its tensors together; None: nothing is known of it.
    noise: standard deviation of a mechanism's noise in each number, so that counts and variances may be below 0.
    """

    kind: Kind
    tensors: dict[str, Tensor]
    least: Least = "sum"
    once: bool = False
    over: str = ""
    bound: float | None = None
    noise: float = 0.0

    def to(self, device: torch.device | str) -> "Part":
        return replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})

    @property
    def is_outline(self) -> bool:
        """Whether its tensors are on the device "meta": names, types and shapes without numbers."""
        return any(tensor.is_meta for tensor in self.tensors.values())

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


Payload = dict[str, Part]


def outline(kind: Kind, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype = torch.float32) -> Part:
    """A part of which there is no more than its form."""
    return Part(kind, {name: torch.empty(tuple(of), dtype=dtype, device="meta") for name, of in shapes.items()})


@dataclass(frozen=True)
class Reply:
    """A client's answer. `loss` and `samples` are for the log only: no method reads them."""

    parts: dict[str, Part]
    loss: float = 0.0
    samples: int = 0
    base_round: int = 0
    out_of_memory: bool = False  # then there are no parts
    withheld: bool = False  # by the client itself, under secure aggregation: neither

    @property
    def facts(self) -> dict[str, float]:
        """All but the parts."""
        return {name: getattr(self, name) for name in ("loss", "samples", "base_round", "out_of_memory", "withheld")}

    def apart(self) -> tuple["Reply", dict[str, dict[str, Tensor]]]:
        """The reply with outlines of the parts that are needed as sums only, and the tensors of these."""
        sums = {name: part for name, part in self.parts.items() if part.least == "sum"}
        outlines = {name: part.to("meta") for name, part in sums.items()}
        return replace(self, parts=self.parts | outlines), {name: part.tensors for name, part in sums.items()}


@dataclass(frozen=True)
class Block:
    """Parts summed over some clients of a job: a node of the tree over them all (replies.py)."""

    level: int
    place: int
    parts: dict[str, dict[str, Tensor]]


def parts_to_tree(parts: dict[str, Part]) -> Tree:
    facts = ("kind", "tensors", "least", "once", "over", "bound", "noise")
    return {name: {fact: getattr(part, fact) for fact in facts} for name, part in parts.items()}


def parts_from_tree(tree: Tree) -> dict[str, Part]:
    return {name: Part(**part) for name, part in tree.items()}


class SharedBuffer:
    """Memory that processes share through a file descriptor: it has no name, so nothing is left behind."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _anonymous_file() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None

    def write(self, tree: Tree) -> int:
        """Copy a tree in; returns its size, which the reader must be told."""
        return _write(tree, self._mapped)[1]

    def read(self, size: int) -> Tree:
        """The tree of that size; its tensors are views that the next write changes."""
        return _read(self._mapped(size), size)

    def _mapped(self, size: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size:
            if os.fstat(self.descriptor).st_size < size:
                reserve(self.descriptor, size)
            self._map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        return self._map


def to_bytes(tree: Tree) -> bytes:
    """A tree as one message."""
    memory, size = _write(tree, lambda size: mmap.mmap(-1, size))
    return memory[:size]


def from_bytes(message: bytes) -> Tree:
    """The inverse. Its tensors lie in memory of their own, at addresses as torch would give them."""
    memory = mmap.mmap(-1, len(message))
    memory[:] = message
    return _read(memory, len(message))


def _write(tree: Tree, memory_of: Callable[[int], mmap.mmap]) -> tuple[mmap.mmap, int]:
    """The tensors, then where each lies, then how long that is."""
    skeleton, tensors = flatten(tree)
    layout, end = _layout(tensors.values())
    header = json.dumps([skeleton, dict(zip(tensors, layout, strict=True))]).encode()
    size = end + len(header) + 8
    memory = memory_of(size)
    for tensor, place in zip(tensors.values(), layout, strict=True):
        if not tensor.is_meta:
            _view(memory, place).copy_(tensor)
    memory[end : end + len(header)] = header
    memory[end + len(header) : size] = len(header).to_bytes(8, "little")
    return memory, size


def _read(memory: mmap.mmap, size: int) -> Tree:
    length = int.from_bytes(memory[size - 8 : size], "little")
    skeleton, layout = json.loads(memory[size - 8 - length : size - 8])
    return unflatten(skeleton, lambda name: _view(memory, layout[name]))


def _layout(tensors: Iterable[Tensor]) -> tuple[list[Place], int]:
    """Type, shape and aligned offset of each tensor, and where the last one ends; no offset of what has no numbers."""
    places: list[Place] = []
    offset = 0
    for tensor in tensors:
        offset = -(-offset // ALIGNMENT) * ALIGNMENT
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        places.append((dtype, shape, None if tensor.is_meta else offset))
        offset += 0 if tensor.is_meta else tensor.numel() * tensor.element_size()
    return places, offset


def _view(memory: mmap.mmap, place: Place) -> Tensor:
    name, shape, offset = place
    dtype = getattr(torch, name)
    if offset is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fclflow")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
