"""Texts and pairs of texts as token ids, by the tokenizer of a local folder."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fclmodels.errors import UserError
from fclmodels.optional.transformers import import_transformers


class Tokenizer:
    """Encodes texts to one length; `digest` is that of its vocabulary and rules, whatever files they are in.

    It may be used by several threads: lengths are set here, and nothing changes later.
    """

    def __init__(self, folder: Path, length: int) -> None:
        tokenizer = _load(folder)
        self._rules = tokenizer.backend_tokenizer
        self._rules.no_truncation()
        self._rules.no_padding()
        self.digest = hashlib.sha256(self._rules.to_str().encode()).hexdigest()
        self._rules.enable_truncation(length)
        self._rules.enable_padding(length=length, pad_id=tokenizer.pad_token_id, pad_token=tokenizer.pad_token)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Encode a text, or the two of a pair, as int32 [2, L]; of a pair that is too long the longer is cut."""
        encoding = self._rules.encode(*texts)
        text_numbers = np.where(encoding.attention_mask, np.array(encoding.type_ids) + 1, 0)
        return np.stack([encoding.ids, text_numbers]).astype(np.int32)


def _load(folder: Path) -> Any:
    if not folder.is_dir():
        raise UserError(f"data.tokenizer: {folder} is not a folder. Name the one that holds tokenizer.json.")
    try:
        tokenizer = import_transformers().AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as problem:
        reason = str(problem).strip().partition("\n")[0]
        raise UserError(f"data.tokenizer: {folder} holds no tokenizer that can be read ({reason}).") from problem
    if not hasattr(tokenizer, "backend_tokenizer") or tokenizer.pad_token_id is None:
        raise UserError(f"data.tokenizer: {folder} holds a tokenizer without fast rules or without a padding token.")
    return tokenizer
