"""What a plugin of any kind must declare: a name, a line of text, and settings with defaults and descriptions."""

import re
from typing import Any

from fclmodels.errors import UserError
from fclmodels.plugins import find
from fclmodels.settings.base import Settings
from fclmodels.settings.describe import describe
from fclmodels.settings.schema import BLOCKS, CHOICES


def check_declaration(kind: str, plugin: Any) -> None:
    """Raise AssertionError where a plugin has not what its listing, its settings and worker processes need."""
    label = f"{plugin.__module__}.{plugin.__qualname__}"
    name = vars(plugin).get("name")
    require(isinstance(name, str), f'{label} has no `name` of its own: name = "my-{kind}"')
    pattern = "[a-z0-9]+([-_][a-z0-9]+)*"
    require(
        re.fullmatch(pattern, name) is not None, f"{label}: the name {name!r} is not lower case with - between words"
    )
    require(bool(vars(plugin).get("__doc__")), f"{label} has no docstring: its first line is what `fcl list` shows")
    try:
        same = find(kind, name)
    except UserError as problem:
        raise AssertionError(
            f"{label} cannot be found by its name, as worker processes look for it ({problem}). "
            f"Put it into plugins/{kind}s/ of the current folder, or name it as an entry point."
        ) from problem
    require(same is plugin, f"{label}: {name} is the name of {same.__module__}.{same.__qualname__}")
    blocks = {of: BLOCKS[block] for block, (of, _) in CHOICES.items()}
    base = blocks.get(kind, Settings)
    settings = getattr(plugin, "Settings", None)
    is_block = isinstance(settings, type) and issubclass(settings, base)
    require(is_block, f"{label}.Settings is no subclass of {base.__module__}.{base.__qualname__}")
    for setting in describe(plugin.Settings):
        require(bool(setting.description), f"{label}: the setting {setting.path} has no description")
    required = [key for key, field in plugin.Settings.model_fields.items() if field.is_required()]
    require(not required, f"{label}: {', '.join(required)} has no default")


def require(holds: bool, otherwise: str) -> None:
    """Raise AssertionError with a line where something does not hold; unlike `assert`, also under `python -O`."""
    if not holds:
        raise AssertionError(otherwise)
