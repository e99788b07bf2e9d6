"""State as values: trees of tensors and JSON, saved without pickle and named by their content.

A tree is nested dicts (string keys) and lists whose leaves are tensors or JSON scalars. On disk it is one
safetensors file; what is not a tensor stands as JSON, with a format version, in the file's metadata.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fclmodels.errors import UserError
from fclmodels.sealed import seal, written

Tree = Any
FORMAT = 1


def flatten(tree: Tree) -> tuple[Tree, dict[str, Tensor]]:
    """The tree with each tensor replaced by {"tensor": name}, and the tensors by name."""
    tensors: dict[str, Tensor] = {}
    return _without_tensors(tree, "", tensors), tensors


def _without_tensors(node: Tree, path: str, tensors: dict[str, Tensor]) -> Tree:
    # Not a function inside flatten: one that calls itself there would keep the tensors until the garbage collection.
    if isinstance(node, Tensor):
        tensors[path] = node
        return {"tensor": path}
    if isinstance(node, dict):
        return {"dict": {k: _without_tensors(value, f"{path}/{_escaped(k)}", tensors) for k, value in node.items()}}
    if isinstance(node, list | tuple):
        return {"list": [_without_tensors(value, f"{path}/{i}", tensors) for i, value in enumerate(node)]}
    return {"json": node}


def _escaped(key: str) -> str:
    """A key as one part of a path, so that no two tensors have the same path (as in JSON pointers, RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def unflatten(skeleton: Tree, tensor: Callable[[str], Tensor]) -> Tree:
    """The inverse of flatten; `tensor` gives a tensor by its name."""
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
    """SHA-256 of the content: structure, scalars, and each tensor's type, shape and bytes."""
    skeleton, tensors = flatten(tree)
    state = hashlib.sha256(json.dumps(skeleton, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(as_bytes(tensor))
    return state.hexdigest()


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def save(tree: Tree, path: Path) -> None:
    """Write the tree under a temporary name, then rename: the file is there whole or not at all."""
    skeleton, tensors = flatten(tree)
    content = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"fclflow": json.dumps({"format": FORMAT, "tree": skeleton}, sort_keys=True)}
    try:
        with replacing(path) as temporary:
            save_file(_unshared(content), temporary, metadata=metadata)
    except SafetensorError as problem:
        way_out = "Make room on its disk; the same command goes on from there."
        raise UserError(f"{path} cannot be written ({problem}). {way_out}") from problem


def load(path: Path, device: torch.device | str = "cpu") -> Tree:
    """Read a tree back; a file that is cut short or foreign is a UserError that names it."""
    return _read(path, device, lambda file, name: _aligned(file.get_tensor(name)))


def shapes(path: Path) -> Tree:
    """The tree with the shape of each tensor in its place; no tensor is read."""
    return _read(path, "cpu", lambda file, name: tuple(file.get_slice(name).get_shape()))


def _read(path: Path, device: torch.device | str, leaf: Callable[[Any, str], Any]) -> Tree:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            content = json.loads((file.metadata() or {})["fclflow"])
            if content["format"] != FORMAT:
                found = f"format {content['format']!a}, this version reads {FORMAT}"
                raise UserError(f"{path}: {found}. Delete it to have it made again.")
            return unflatten(content["tree"], lambda name: leaf(file, name))
    except (SafetensorError, LookupError, TypeError, AttributeError, ValueError, RecursionError, OSError) as problem:
        reason = " ".join(str(problem).split())
        raise UserError(f"{path} cannot be read ({reason}). Delete it to have it made again.") from problem


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor at an address as torch would give it one: the last bits of a product depend on that."""
    return tensor if tensor.data_ptr() % 64 == 0 else tensor.clone()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block ends well, and goes when it does not."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Tree) -> None:
    with replacing(path) as temporary:
        temporary.write_text(written(content))


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """JSON that carries its own digest, so that no change of a word or a number goes unseen."""
    content = json.loads(json.dumps(content))
    write_json(path, {**content, "seal": seal(content)})


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses tensors that share storage; give each repeated one its own."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        result[name] = tensor if whole and storage not in seen else tensor.clone()
        seen.add(storage)
    return result
