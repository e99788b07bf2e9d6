"""State as values: trees of tensors and JSON, saved without pickle and named by their content.

A tree is nested dicts (string keys) and lists whose leaves are tensors or JSON scalars. On disk it is one
safetensors file; all but the tensors is JSON, with a format version, in the file's metadata.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fclmodels.errors import UserError
from fclmodels.storage.digests import begin_digest
from fclmodels.storage.files import replace_file

Tree = Any
FORMAT = 1


def flatten(tree: Tree) -> tuple[Tree, dict[str, Tensor]]:
    """Return the tree with each tensor replaced by {"tensor": name}, and the tensors by name."""
    tensors: dict[str, Tensor] = {}
    return _drop_tensors(tree, "", tensors), tensors


def _drop_tensors(node: Tree, path: str, tensors: dict[str, Tensor]) -> Tree:
    # Not a function inside flatten: one that calls itself there would keep the tensors until the garbage collection.
    if isinstance(node, Tensor):
        tensors[path] = node
        return {"tensor": path}
    if isinstance(node, dict):
        return {"dict": {k: _drop_tensors(value, f"{path}/{_escape(k)}", tensors) for k, value in node.items()}}
    if isinstance(node, list | tuple):
        return {"list": [_drop_tensors(value, f"{path}/{i}", tensors) for i, value in enumerate(node)]}
    return {"json": node}


def _escape(key: str) -> str:
    """Escape a key as JSON pointers do (RFC 6901), so that no two tensors have the same path."""
    return key.replace("~", "~0").replace("/", "~1")


def unflatten(skeleton: Tree, tensor: Callable[[str], Tensor]) -> Tree:
    """Undo flatten; `tensor` returns a tensor by its name."""
    ((kind, value),) = skeleton.items()
    if kind == "dict":
        return {key: unflatten(node, tensor) for key, node in value.items()}
    if kind == "list":
        return [unflatten(node, tensor) for node in value]
    if kind == "tensor":
        return tensor(value)
    if kind == "json":
        return value
    raise ValueError(f"{kind} is no kind of node")


def digest(tree: Tree) -> str:
    """Return the SHA-256 of the content: structure, scalars, and each tensor's type, shape and bytes."""
    skeleton, tensors = flatten(tree)
    state = begin_digest(skeleton)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(view_bytes(tensor))
    return state.hexdigest()


def view_bytes(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def save(tree: Tree, path: Path) -> None:
    """Write the tree to a file, which appears complete or not at all."""
    skeleton, tensors = flatten(tree)
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"fclflow": json.dumps({"format": FORMAT, "tree": skeleton}, sort_keys=True)}
    try:
        with replace_file(path) as temporary:
            save_file(_copy_shared(content), temporary, metadata=metadata)
    except SafetensorError as problem:
        way_out = "Make room on its disk; the same command goes on from there."
        raise UserError(f"{path} cannot be written ({problem}). {way_out}") from problem


def load(path: Path, device: torch.device | str = "cpu") -> Tree:
    """Read a tree; UserError that names the file where it is cut short or not a tree."""
    return _read(path, device, lambda file, name: _align(file.get_tensor(name)))


def load_shapes(path: Path) -> Tree:
    """Read a tree with the shape of each tensor in its place, and no tensor."""
    return _read(path, "cpu", lambda file, name: tuple(file.get_slice(name).get_shape()))


def _read(path: Path, device: torch.device | str, leaf: Callable[[Any, str], Any]) -> Tree:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            content = json.loads((file.metadata() or {})["fclflow"])
            if content["format"] != FORMAT:
                version = f"format {content['format']!a}, this version reads {FORMAT}"
                raise UserError(f"{path}: {version}. Delete it to have it made again.")
            return unflatten(content["tree"], lambda name: leaf(file, name))
    except (SafetensorError, LookupError, TypeError, AttributeError, ValueError, RecursionError, OSError) as problem:
        reason = " ".join(str(problem).split())
        raise UserError(f"{path} cannot be read ({reason}). Delete it to have it made again.") from problem


def _align(tensor: Tensor) -> Tensor:
    """Return the tensor at an address aligned as torch aligns its own: the last bits of a product depend on that."""
    return tensor if tensor.data_ptr() % 64 == 0 else tensor.clone()


def _copy_shared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share storage with another, which safetensors refuses."""
    storages: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        is_complete = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        result[name] = tensor if is_complete and storage not in storages else tensor.clone()
        storages.add(storage)
    return result
