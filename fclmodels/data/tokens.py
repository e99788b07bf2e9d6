"""Texts and pairs of texts as token ids, by the tokenizer of a local folder."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fclmodels.errors import UserError
from fclmodels.transformers_guard import transformers


class Tokenizer:
    """Encodes texts to one length; `digest` names its vocabulary and rules, not the files that they stand in.

    It works in several threads at once: lengths are set here, and nothing changes later.
    """

    def __init__(self, folder: Path, length: int) -> None:
        read = _read(folder)
        self._rules = read.backend_tokenizer
        self._rules.no_truncation()
        self._rules.no_padding()
        self.digest = hashlib.sha256(self._rules.to_str().encode()).hexdigest()
        self._rules.enable_truncation(length)
        self._rules.enable_padding(length=length, pad_id=read.pad_token_id, pad_token=read.pad_token)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """A text, or the two of a pair, as int32 [2, L] (kinds.py); of a pair that is too long the longer is cut."""
        found = self._rules.encode(*texts)
        which = np.where(found.attention_mask, np.array(found.type_ids) + 1, 0)
        return np.stack([found.ids, which]).astype(np.int32)


def _read(folder: Path) -> Any:
    if not folder.is_dir():
        raise UserError(f"data.tokenizer: {folder} is not a folder. Name the one that holds tokenizer.json.")
    try:
        read = transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as problem:
        reason = str(problem).strip().partition("\n")[0]
        raise UserError(f"data.tokenizer: {folder} holds no tokenizer that can be read ({reason}).") from problem
    if not hasattr(read, "backend_tokenizer") or read.pad_token_id is None:
        raise UserError(f"data.tokenizer: {folder} holds one without fast rules or without a token for padding.")
    return read
