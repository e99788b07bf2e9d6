"""The one place that imports the Hugging Face library `transformers` (extra `text`), and only when somebody needs it.

Tokenizers and encoders are read from local folders only; no code that lies in them is run.
"""

import functools
import importlib
from types import ModuleType

from fclmodels.errors import UserError
from fclmodels.torchvision_guard import torchvision


@functools.cache
def transformers() -> ModuleType:
    """The transformers module; UserError where it is not installed."""
    torchvision()  # what its encoders import besides
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as problem:
        raise UserError("texts need the package transformers. Install it: pip install 'fclflow[text]'.") from problem
