"""Import of the Hugging Face library `transformers` (extra `text`): the only one, and only when somebody needs it.

Tokenizers and encoders are read from local folders only; no code that lies in them is run.
"""

import functools
import importlib
from types import ModuleType

from fclmodels.errors import UserError
from fclmodels.optional.torchvision import import_torchvision


@functools.cache
def import_transformers() -> ModuleType:
    """Return the transformers module; UserError where it is not installed."""
    import_torchvision()  # what its encoders import besides
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as problem:
        raise UserError("texts need the package transformers. Install it: pip install 'fclflow[text]'.") from problem
