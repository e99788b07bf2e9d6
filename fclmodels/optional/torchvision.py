"""Import of torchvision: the only one, and only when somebody needs it.

A torchvision built for another torch (on Linux the default index pairs a CUDA build with any torch) cannot load its
compiled extension, and its import then dies where it describes the extension's operators: "operator torchvision::nms
does not exist". Models, data sets and transforms need none of them, so here those two operators are declared first.
"""

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

OPERATORS = ("nms", "qnms")


@functools.cache
def import_torchvision() -> ModuleType:
    """Return the torchvision module, whether or not its extension loads."""
    if "torchvision" not in sys.modules and not _can_load_extension():
        _declare_operators()
    return importlib.import_module("torchvision")


def _can_load_extension() -> bool:
    """Return whether the extension loads into this torch, tried as torchvision itself will try it."""
    spec = importlib.util.find_spec("torchvision")
    libraries = (
        [path for folder in spec.submodule_search_locations or () for path in Path(folder).glob("_C.*")] if spec else []
    )
    try:
        for library in libraries:
            torch.ops.load_library(str(library))
    except OSError:
        return False
    return bool(libraries)


@functools.cache
def _declare_operators() -> torch.library.Library:
    """Declare the schemas without code. They vanish with their Library, so the cache keeps it."""
    library = torch.library.Library("torchvision", "DEF")
    for operator in OPERATORS:
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
