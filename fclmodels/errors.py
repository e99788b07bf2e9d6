"""What a user gets wrong is told in one line: what, where, and what would be right."""

import difflib
import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class UserError(Exception):
    """A mistake outside the program. Its message is the whole of what the user sees."""


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """The end of an error line: the nearest valid name, or all of them where none is near."""
    valid = sorted(valid)
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    if near:
        return f"Did you mean {near[0]}?"
    return f"Valid: {', '.join(valid)}."


@dataclass(frozen=True, order=True)
class Place:
    """Where a setting was written: a line of the file or, after all of these, an override."""

    override: bool
    number: int
    text: str


def without_passwords(text: str) -> str:
    """A text whose addresses (scheme://user:password@host) have lost their passwords."""
    return re.sub(r"(://[^\s/@:]*):[^\s]*@", r"\1:***@", text)


def shown(value: Any) -> str:
    """A value in an error line: as JSON without passwords, cut where it is long."""
    text = without_passwords(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 60 else f"{text[:57]}..."


def unprintable(text: str) -> bool:
    """Whether it holds what would break an error line: control characters, line ends, halves of surrogate pairs."""
    return any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text)
