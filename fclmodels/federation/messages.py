"""The messages between the server and its clients: parts made of named tensors.

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

from fclmodels.storage.files import reserve
from fclmodels.storage.trees import Tree, flatten, unflatten

Kind = Literal[
    "weights",
    "update",
    "statistics",
    "sketch",
    "energy",
    "basis",
    "directions",
    "sparse",
    "prototype",
    "reference",
    "loss",
    "count",
    "samples",
    "gradient",
    "generator",
    "class-statistics",
    "input-statistics",
    "protocol",
]
Least = Literal["sum", "group", "each"]
Place = tuple[str, list[int], int | None]
ALIGNMENT = 64


@dataclass(frozen=True)
class Part:
    """Named tensors of one kind, as they travel.

    Kinds whose names do not explain them: "statistics" are changes of a mean (with `over`), or sums of numbers that are
    not negative (without); "energy" of a layer's input is [||X||^2, ||X*||^2, n ||X*|| / ||X||, n]; "loss" a sum over
    samples, and their number (with `over`: w times their mean, and w); "samples" are synthetic; "gradient" is that of a
    loss, by parameter; "generator" the weights of a network beside the model; "class-statistics" counts, sums and
    second moments of features by class, or A^T A and A^T Y of features A and classes Y; "sparse" has, of some entries
    or rows of weights, `places.NAME` and `values.NAME`, as many as each client has; "input-statistics" sums of x x^T of
    layers' inputs, or their diagonals.
    """

    kind: Kind
    tensors: dict[str, Tensor]
    # The least that the method's server needs of it: a sum over all clients, sums over groups, or each client's.
    # What is summed in a reply to training is of floating point: a late reply counts in part.
    least: Least = "sum"
    once: bool = False  # it stays the same during a task, so a client downloads it the first time that it takes part
    over: str = ""  # the part with the weight w where tensors are w*x: their mean is their sum divided by that part's
    bound: float | None = None  # the largest length of its tensors together, which noise needs; None: no bound
    noise: float = 0.0  # standard deviation of the noise in each number, which may bring counts below 0
    of: str = "weights"  # of an update: the part of the payload that its tensors are a change of

    def to(self, device: torch.device | str) -> "Part":
        """Return the part with its tensors on a device."""
        return replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})

    @property
    def is_outline(self) -> bool:
        """Return whether its tensors are on the device "meta": names, types and shapes without numbers."""
        return any(tensor.is_meta for tensor in self.tensors.values())

    @property
    def bytes(self) -> int:
        """The size of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


Payload = dict[str, Part]


def make_outline(
    kind: Kind,
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype = torch.float32,
    least: Least = "sum",
    bound: float | None = None,
) -> Part:
    """Return the outline of a part: its tensors' names, types and shapes, without numbers."""
    tensors = {name: torch.empty(tuple(shape), dtype=dtype, device="meta") for name, shape in shapes.items()}
    return Part(kind, tensors, least, bound=bound)


@dataclass(frozen=True)
class Reply:
    """The message with a client's answer."""

    parts: dict[str, Part]
    loss: float = 0.0  # mean over samples; like `samples` for the log only: no method reads it
    samples: int = 0
    base_round: int = 0  # the round in which the client has trained
    out_of_memory: bool = False  # the client could not train: there are no parts
    withheld: bool = False  # by the client itself, under secure aggregation: there are no parts either

    @property
    def facts(self) -> dict[str, float]:
        """All fields but the parts."""
        return {name: getattr(self, name) for name in ("loss", "samples", "base_round", "out_of_memory", "withheld")}

    def set_apart(self) -> tuple["Reply", dict[str, dict[str, Tensor]]]:
        """Return the reply with outlines of the parts that are needed as sums only, and the tensors of these parts."""
        sums = {name: part for name, part in self.parts.items() if part.least == "sum"}
        outlines = {name: part.to("meta") for name, part in sums.items()}
        return replace(self, parts=self.parts | outlines), {name: part.tensors for name, part in sums.items()}


@dataclass(frozen=True)
class Block:
    """Parts summed over some clients of a job: a node of the tree over them all (replies.py)."""

    level: int  # it is a sum over up to 2**level clients
    place: int  # of the node in its level, from the left
    parts: dict[str, dict[str, Tensor]]


def convert_parts_to_tree(parts: dict[str, Part]) -> Tree:
    """Return parts as a tree that can be written."""
    facts = ("kind", "tensors", "least", "once", "over", "bound", "noise", "of")
    return {name: {fact: getattr(part, fact) for fact in facts} for name, part in parts.items()}


def convert_tree_to_parts(tree: Tree) -> dict[str, Part]:
    """Return the parts that such a tree holds."""
    return {name: Part(**part) for name, part in tree.items()}


class SharedBuffer:
    """Memory that processes share through a file descriptor: it has no name, so nothing is left behind."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _open_anonymous_file() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None

    def write(self, tree: Tree) -> int:
        """Copy a tree into the buffer; return its size, which the reader needs."""
        return _write(tree, self._map_file)[1]

    def read(self, size: int) -> Tree:
        """Return the tree of that size; its tensors are views, which the next write changes."""
        return _read(self._map_file(size), size)

    def empty(self) -> None:
        """Give the memory back; nobody may read what was written before."""
        self._map = None
        os.ftruncate(self.descriptor, 0)

    def _map_file(self, size: int) -> mmap.mmap:
        if self._map is None or len(self._map) < size:
            if os.fstat(self.descriptor).st_size < size:
                reserve(self.descriptor, size)
            self._map = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)
        return self._map


def to_bytes(tree: Tree) -> bytes:
    """Return a tree as one message."""
    memory, size = _write(tree, lambda size: mmap.mmap(-1, size))
    return memory[:size]


def from_bytes(message: bytes) -> Tree:
    """Return the tree of a message. Its tensors lie in memory of their own, aligned as torch's are."""
    memory = mmap.mmap(-1, len(message))
    memory[:] = message
    return _read(memory, len(message))


def _write(tree: Tree, memory_of: Callable[[int], mmap.mmap]) -> tuple[mmap.mmap, int]:
    """Write the tensors, then a header that says where each lies, then its length; return memory and size."""
    skeleton, tensors = flatten(tree)
    layout, end = _lay_out(tensors.values())
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


def _lay_out(tensors: Iterable[Tensor]) -> tuple[list[Place], int]:
    """Return each tensor's type, shape and aligned offset (None for an outline's), and where the last one ends."""
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


def _open_anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fclflow")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
