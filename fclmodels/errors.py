"""Errors for a user's mistakes: one line with what is wrong, where, and what would be right."""

import difflib
import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class UserError(Exception):
    """A mistake outside the program. The user sees its message and nothing else."""


def suggest_name(name: str, valid: Iterable[str]) -> str:
    """Return the end of an error line: the nearest valid name, or all of them where none is near."""
    valid = sorted(valid)
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    if near:
        return f"Did you mean {near[0]}?"
    return f"Valid: {', '.join(valid)}."


@dataclass(frozen=True, order=True)
class Place:
    """A line of a settings file or, ordered after all of these, an override."""

    is_override: bool
    number: int
    text: str


def hide_passwords(text: str) -> str:
    """Return the text without the passwords of addresses (scheme://user:password@host)."""
    return re.sub(r"(://[^\s/@:]*):[^\s]*@", r"\1:***@", text)


def format_value(value: Any) -> str:
    """Return a value for an error line: as JSON without passwords, cut where it is long."""
    text = hide_passwords(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_unprintable(text: str) -> bool:
    """Return whether a text would break an error line: by control characters, line ends, halves of surrogate pairs."""
    return any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text)
