"""Base class of every block of settings."""

import inspect

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A block of settings: frozen, and an unknown key is an error.

    A setting whose name is a keyword of Python has it as its alias, which stands in files and messages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, serialize_by_alias=True)


def list_blocks(cls: type[Settings]) -> dict[str, type[Settings]]:
    """Return the settings of a class that are blocks themselves."""
    return {
        name: field.annotation
        for name, field in cls.model_fields.items()
        if inspect.isclass(field.annotation) and issubclass(field.annotation, Settings)
    }
