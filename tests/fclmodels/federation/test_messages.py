"""Messages in shared memory: what another process reads is what was written, at any size."""

import subprocess
import sys

import pytest
import torch

from fclmodels.federation.messages import (
    Part,
    SharedBuffer,
    convert_parts_to_tree,
    convert_tree_to_parts,
    from_bytes,
    to_bytes,
)
from fclmodels.storage import trees

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
# Answers each size with the digest of what it read, then writes the tree back with its numbers doubled.
ECHO = """
import sys
from fclmodels.storage import trees
from fclmodels.federation.messages import SharedBuffer
ours, theirs = (SharedBuffer(int(descriptor)) for descriptor in sys.argv[1:])
for line in sys.stdin:
    tree = ours.read(int(line))
    print(trees.digest(tree), theirs.write({name: 2 * tensor for name, tensor in tree.items()}), flush=True)
"""


def tree_of(size: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(size)
    tree = {str(dtype): torch.randn(size, generator=random).mul(50).to(dtype) for dtype in DTYPES}
    return tree | {
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "turned": torch.arange(6.0).view(2, 3).T,
        "odd": torch.ones(3),
    }


def test_what_is_read_is_what_was_written() -> None:
    buffer = SharedBuffer()
    for size in (5, 5000, 1, 0, 20000, 7):
        tree = {"tensors": tree_of(size), "facts": [1, None, {"a": "b"}]}
        back = buffer.read(buffer.write(tree))
        assert trees.digest(back) == trees.digest(tree)


def test_a_message_of_bytes_holds_the_same_at_addresses_as_torch_would_give() -> None:
    for size in (5, 0, 20000):
        tree = {"tensors": tree_of(size), "facts": [1, None, {"a": "b"}]}
        back = from_bytes(to_bytes(tree))
        assert trees.digest(back) == trees.digest(tree)
        assert all(tensor.data_ptr() % 64 == 0 for tensor in back["tensors"].values())


def test_tensors_are_views_until_the_next_write() -> None:
    buffer = SharedBuffer()
    view = buffer.read(buffer.write({"a": torch.ones(4)}))["a"]
    buffer.write({"a": torch.zeros(4)})
    assert view.tolist() == [0, 0, 0, 0]


def test_views_outlive_the_growth_of_the_buffer() -> None:
    buffer = SharedBuffer()
    view = buffer.read(buffer.write({"a": torch.arange(4.0)}))["a"]
    buffer.write({"b": torch.zeros(100_000)})
    assert view.shape == (4,)
    assert torch.isfinite(view).all()


def test_two_processes_share_buffers_that_grow_both_ways() -> None:
    ours, theirs = SharedBuffer(), SharedBuffer()
    descriptors = [ours.descriptor, theirs.descriptor]
    command = [sys.executable, "-c", ECHO, *map(str, descriptors)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=descriptors
    ) as process:
        assert process.stdin
        assert process.stdout
        for size in (3, 200_000, 10, 400_000):
            tree = {"a": torch.arange(size, dtype=torch.float32), "b": torch.ones(size)}
            print(ours.write(tree), file=process.stdin, flush=True)
            digest, answer = process.stdout.readline().split()
            assert digest == trees.digest(tree)
            back = theirs.read(int(answer))
            assert torch.equal(back["a"], 2 * tree["a"])
            assert torch.equal(back["b"], 2 * tree["b"])
        process.stdin.close()
        assert process.wait(10) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_counts_its_real_bytes(dtype: torch.dtype) -> None:
    part = Part("update", {"a": torch.ones(3, 5, dtype=dtype), "b": torch.ones(0), "c": torch.tensor(1.0)})
    assert part.bytes == 15 * torch.ones((), dtype=dtype).element_size() + 4


def test_parts_survive_the_way_with_kind_and_least() -> None:
    parts = {"x": Part("basis", {"a": torch.ones(2)}, "each"), "y": Part("count", {"a": torch.zeros(1)})}
    buffer = SharedBuffer()
    back = convert_tree_to_parts(buffer.read(buffer.write(convert_parts_to_tree(parts))))
    assert {name: (p.kind, p.least, p.bytes) for name, p in back.items()} == {
        "x": ("basis", "each", 8),
        "y": ("count", "sum", 4),
    }
    assert torch.equal(back["x"].tensors["a"], torch.ones(2))
