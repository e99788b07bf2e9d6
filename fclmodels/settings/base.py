"""Base class of every block of settings."""

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator

Profiles = Mapping[str, Mapping[str, Any]]


class Settings(BaseModel):
    """A block of settings: frozen, and an unknown key is an error.

    A setting whose name is a keyword of Python has it as its alias, which stands in files and messages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, serialize_by_alias=True)

    profiles: ClassVar[Profiles] = {}
    """Values of the settings that are not set, by the name that the setting `profile` has."""

    @model_validator(mode="after")
    def _fill_in_profile(self) -> Self:
        for name, value in self.profiles.get(getattr(self, "profile", None) or "", {}).items():
            if name not in self.model_fields_set:
                object.__setattr__(self, name, value)  # this is still its construction: frozen from here on
        return self


def list_blocks(cls: type[Settings]) -> dict[str, type[Settings]]:
    """Return the settings of a class that are blocks themselves."""
    return {
        name: field.annotation
        for name, field in cls.model_fields.items()
        if inspect.isclass(field.annotation) and issubclass(field.annotation, Settings)
    }
