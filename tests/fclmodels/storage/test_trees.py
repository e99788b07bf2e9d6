"""Trees on disk: nothing is lost, nothing is taken for another, nothing is left half-written."""

import contextlib
import copy
import errno
import gc
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from fclmodels.errors import UserError
from fclmodels.storage import trees
from fclmodels.storage.sealed_json import write_json
from fclmodels.storage.trees import Tree

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any type, no to three dimensions, empty ones and transposed views too."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensor = torch.randn(shape, generator=random).mul(9).to(draw(st.sampled_from(DTYPES)))
    return tensor.transpose(0, -1) if shape and draw(st.booleans()) else tensor


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
KEYS = st.text(st.characters(codec="utf-8") | st.sampled_from("/~."), max_size=4)
TREES = st.recursive(
    SCALARS | tensors(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def plain(tree: Tree) -> Any:
    """The tree with each tensor as its type, shape and values, comparable with ==; 1, 1.0 and True are different."""
    if isinstance(tree, Tensor):
        bits = tree.contiguous().reshape(-1).view(torch.uint8).tolist()
        return ("tensor", str(tree.dtype), tuple(tree.shape), bits)
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    return (type(tree).__name__, repr(tree))


def with_shapes(tree: Tree) -> Tree:
    if isinstance(tree, dict):
        return {key: with_shapes(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [with_shapes(value) for value in tree]
    return tuple(tree.shape) if isinstance(tree, Tensor) else tree


def reordered(tree: Tree) -> Tree:
    if isinstance(tree, dict):
        return {key: reordered(value) for key, value in reversed(tree.items())}
    return [reordered(value) for value in tree] if isinstance(tree, list) else tree


def leaves(tree: Tree, path: tuple = ()) -> list[tuple]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    return [path] if items is None else [leaf for key, value in items for leaf in leaves(value, (*path, key))]


def other(leaf: Tree) -> Tree:
    """A leaf that differs as little as possible."""
    if not isinstance(leaf, Tensor):
        return {"no": leaf} if leaf is None else [leaf]
    if leaf.numel() == 0:
        return leaf[None]
    flipped = leaf.clone().contiguous()
    first = flipped.view(torch.uint8) if flipped.ndim else flipped[None].view(torch.uint8)
    first.view(-1)[0] ^= 1
    return flipped


@given(tree=TREES)
def test_a_tree_comes_back_whole(tree: Tree, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "tree.safetensors"
    trees.save(tree, file)
    back = trees.load(file)
    assert plain(back) == plain(tree)
    assert trees.digest(back) == trees.digest(tree)
    assert trees.flatten(trees.load_shapes(file))[0] == trees.flatten(with_shapes(tree))[0]


@given(tree=TREES)
def test_the_digest_does_not_depend_on_the_order_of_keys(tree: Tree) -> None:
    assert trees.digest(reordered(tree)) == trees.digest(tree)


@given(tree=st.dictionaries(KEYS, TREES, min_size=1, max_size=3), choice=st.randoms(use_true_random=False))
def test_any_changed_leaf_changes_the_digest(tree: Tree, choice: Any) -> None:
    paths = leaves(tree)
    if not paths:
        return
    *way, last = choice.choice(paths)
    changed = copy.deepcopy(tree)
    node = changed
    for key in way:
        node = node[key]
    node[last] = other(node[last])
    assert trees.digest(changed) != trees.digest(tree)


@given(one=TREES, two=TREES)
def test_different_trees_have_different_digests(one: Tree, two: Tree) -> None:
    assert (trees.digest(one) == trees.digest(two)) == (plain(one) == plain(two))


ONE = torch.ones(2)
UNLIKE = {
    "a path in a key and a key below a key": ({"a/b": ONE, "a": {"b": 2 * ONE}}, {"a/b": 2 * ONE, "a": {"b": ONE}}),
    "an escaped path": ({"a~1b": ONE, "a/b": 2 * ONE}, {"a~1b": 2 * ONE, "a/b": ONE}),
    "a list and a dict of the same places": ([ONE], {"0": ONE}),
    "a number and its text": ({"a": 1}, {"a": "1"}),
    "a whole number and a float": ({"a": 1}, {"a": 1.0}),
    "true and one": ({"a": True}, {"a": 1}),
    "a tensor and its description": ({"a": torch.ones(2)}, {"a": {"tensor": "/a"}}),
    "same bytes, other type": ({"a": torch.zeros(1)}, {"a": torch.zeros(1, dtype=torch.int32)}),
    "same bytes, other shape": ({"a": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2)}),
    "a scalar and a vector of one": ({"a": torch.tensor(1.0)}, {"a": torch.ones(1)}),
    "nothing and an empty list": ({"a": None}, {"a": []}),
    "an empty list and an empty dict": ({"a": []}, {"a": {}}),
    "tensors exchanged": ({"a": ONE, "b": 2 * ONE}, {"a": 2 * ONE, "b": ONE}),
    "no sign and a sign of zero": ({"a": torch.zeros(1)}, {"a": -torch.zeros(1)}),
}


@pytest.mark.parametrize("pair", UNLIKE.values(), ids=UNLIKE)
def test_what_is_told_apart(pair: tuple[Tree, Tree], tmp_path: Path) -> None:
    assert trees.digest(pair[0]) != trees.digest(pair[1])
    for tree in pair:
        trees.save(tree, tmp_path / "tree")
        assert plain(trees.load(tmp_path / "tree")) == plain(tree)


def test_the_digest_sees_content_not_storage() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    assert trees.digest({"a": matrix.T.contiguous().T}) == trees.digest({"a": matrix})
    assert trees.digest({"a": torch.stack([matrix, matrix])[1]}) == trees.digest({"a": matrix})
    assert trees.digest({"a": matrix.clone().requires_grad_()}) == trees.digest({"a": matrix})


def test_tensors_that_share_memory_are_saved_each_for_itself(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    tree = {
        "whole": base,
        "again": base,
        "head": base[:3],
        "tail": base[9:],
        "matrix": base.view(3, 4),
        "turned": base.view(3, 4).T,
        "repeated": base[:1].expand(5),
        "every second": base[::2],
        "empty": base[:0],
        "other empty": torch.empty(0),
    }
    trees.save(tree, tmp_path / "tree")
    assert plain(trees.load(tmp_path / "tree")) == plain(tree)
    assert base.tolist() == list(range(12))


def saved(folder: Path) -> Path:
    file = folder / "weights.safetensors"
    trees.save({"weights": {"a": torch.arange(20.0), "b": torch.ones(3, 2)}, "task": 3, "names": ["x", None]}, file)
    return file


def assert_refused(file: Path) -> None:
    with pytest.raises(UserError) as error:
        trees.load(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.5, 0.9, 0.999])
def test_a_file_cut_short_is_refused(share: float, tmp_path: Path) -> None:
    file = saved(tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    assert_refused(file)


def foreign(metadata: dict[str, str] | None) -> Callable[[Path], None]:
    return lambda file: save_file({"/a": torch.ones(2)}, file, metadata)


def tree_of(content: Any) -> Callable[[Path], None]:
    return foreign({"fclflow": json.dumps(content)})


FOREIGN: dict[str, Callable[[Path], object]] = {
    "text": lambda file: file.write_text("weights: 3\n"),
    "an array": lambda file: np.save(file.open("wb"), np.ones(3)),
    "a pickle": lambda file: torch.save({"a": torch.ones(2)}, file),
    "someone else's tensors": foreign(None),
    "no JSON": foreign({"fclflow": "{"}),
    "JSON of another kind": tree_of([1, 2]),
    "no tree": tree_of({"format": 1}),
    "a later format": tree_of({"format": 2, "tree": {"dict": {}}}),
    "a tree that is none": tree_of({"format": 1, "tree": 7}),
    "a tree with two kinds": tree_of({"format": 1, "tree": {"dict": {}, "list": []}}),
    "a tree with another kind of dict": tree_of({"format": 1, "tree": {"dict": [1]}}),
    "a tensor that is not there": tree_of({"format": 1, "tree": {"tensor": "/b"}}),
    "a tensor without a name": tree_of({"format": 1, "tree": {"tensor": 5}}),
    "an abyss": lambda file: foreign({"fclflow": f'{{"format": 1, "tree": {"[" * 100_000}{"]" * 100_000}}}'})(file),
    "a folder": lambda file: file.mkdir(),
}


@pytest.mark.parametrize("write", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_file_is_refused(write: Callable[[Path], object], tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    write(file)
    assert_refused(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path / "weights.safetensors")


def test_a_flipped_bit_never_ends_in_anything_but_a_user_error(tmp_path: Path) -> None:
    file = saved(tmp_path)
    content = file.read_bytes()
    for place in range(len(content)):
        file.write_bytes(content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :])
        with contextlib.suppress(UserError):
            trees.load(file)


def test_a_tree_that_cannot_be_saved_changes_nothing(tmp_path: Path) -> None:
    file = saved(tmp_path)
    before = file.read_bytes()
    with pytest.raises(TypeError):
        trees.save({"a": torch.ones(2), "b": object()}, file)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == [file.name]


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = saved(tmp_path)
    before = file.read_bytes()
    monkeypatch.setattr(trees, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        trees.save({"a": torch.ones(2)}, file)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(file, {"a": 1})
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == [file.name]


def test_a_folder_is_made_where_it_is_missing_and_the_file_can_be_read_by_others(tmp_path: Path) -> None:
    write_json(tmp_path / "a" / "b.json", {"z": 1, "a": None})
    assert json.loads((tmp_path / "a" / "b.json").read_text()) == {"z": 1, "a": None}
    assert (tmp_path / "a" / "b.json").stat().st_mode & 0o777 == 0o644


def test_what_is_read_stands_where_torch_puts_its_own(tmp_path: Path) -> None:
    """A product's last bits depend on the address modulo 64: a saved state must compute as one that was not saved."""
    tree = {str(size): torch.arange(size, dtype=torch.float32) for size in range(1, 20)}
    trees.save(tree, tmp_path / "tree.safetensors")
    assert all(tensor.data_ptr() % 64 == 0 for tensor in trees.load(tmp_path / "tree.safetensors").values())


def test_flattening_keeps_no_tensor_alive() -> None:
    """A cycle would hold a model's worth of memory a message until the garbage collector comes by."""
    tensor = torch.zeros(3)
    alive = weakref.ref(tensor)
    gc.disable()
    try:
        trees.flatten({"a": [{"b": tensor}]})
        del tensor
        assert alive() is None
    finally:
        gc.enable()
