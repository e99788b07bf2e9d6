"""Embeddings of classes' names: made by a text encoder of a local folder, or drawn where there is none.

A file of them is a tree (storage/trees.py) {names, embeddings [n, d], prompt, encoder}. They have the encoder's own
scale: LANDER's radius is of that scale.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fclmodels.errors import UserError, suggest_name
from fclmodels.optional.transformers import import_transformers
from fclmodels.randomness import make_generator
from fclmodels.storage import trees

# Of LANDER's embeddings for CIFAR-100: numbers of each, their mean square, cosine between two classes.
WIDTH, MEAN_SQUARE, COSINE = 512, 0.184, 0.78
PROMPT = "A photo of a {}"


def embed_labels(folder: Path, names: Sequence[str], prompt: str) -> Tensor:
    """Return the text features [n, d] of each name in the prompt: the encoder's projection, else its states' mean."""
    texts = [prompt.format(name.replace("_", " ")) for name in names]
    library = import_transformers()
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        encoder = library.AutoModel.from_pretrained(folder, local_files_only=True, trust_remote_code=False).eval()
        tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            return encode_texts(encoder, tokens)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        reason = str(problem).strip().partition("\n")[0]
        raise UserError(f"{folder} holds no text encoder that can be read ({reason}).") from problem


def encode_texts(encoder: Any, tokens: Any) -> Tensor:
    """Return the features [n, d] of tokenised texts."""
    if hasattr(encoder, "get_text_features"):
        answer = encoder.get_text_features(**tokens)
        features = answer if isinstance(answer, Tensor) else answer.pooler_output
    else:
        mask = tokens["attention_mask"][:, :, None]
        features = (encoder(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1)
    return features.detach().float()


def write_embeddings(file: Path, names: Sequence[str], embeddings: Tensor, prompt: str, encoder: str) -> None:
    """Write a file of embeddings."""
    trees.save({"names": list(names), "embeddings": embeddings, "prompt": prompt, "encoder": encoder}, file)


def read_embeddings(file: Path, names: Sequence[str]) -> Tensor:
    """Return the embeddings [n, d] of these names; UserError where the file lacks one."""
    if not file.is_file():
        raise UserError(f"{file} is not there. fcl embed-labels makes such a file.")
    tree = trees.load(file)
    try:
        rows, table = {name: row for row, name in enumerate(tree["names"])}, tree["embeddings"].float()
        if table.dim() != 2 or len(table) != len(rows) or not table.isfinite().all():
            raise ValueError("not one row of finite numbers for each name")
    except (LookupError, TypeError, AttributeError, ValueError) as problem:
        raise UserError(f"{file} holds no embeddings of labels ({problem}). fcl embed-labels makes some.") from problem
    if missing := next((name for name in names if name not in rows), None):
        raise UserError(f"{file} has no embedding of the class {missing}. {suggest_name(missing, rows)}")
    return table[[rows[name] for name in names]]


def draw_embeddings(seed: int, count: int) -> Tensor:
    """Return drawn rows [count, 512] with the scale of LANDER's for CIFAR-100 and their cosine between classes."""
    common = torch.randn(WIDTH, generator=make_generator(seed, "label embeddings"))
    own = [torch.randn(WIDTH, generator=make_generator(seed, "label embeddings", label)) for label in range(count)]
    return MEAN_SQUARE**0.5 * (COSINE**0.5 * common + (1 - COSINE) ** 0.5 * torch.stack(own))
