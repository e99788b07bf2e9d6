"""Tables of vectors in memory and in files without names, against the vectors themselves."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fclmodels.methods.parts import vector_table
from fclmodels.methods.parts.vector_table import VectorTable
from fclmodels.numerics.alignment import align

LIKE = {"a.weight": torch.zeros(3, 4), "a.bias": torch.zeros(3), "b.weight": torch.zeros(2, 3)}


def vectors_of(seed: int, count: int) -> list[dict[str, Tensor]]:
    """Vectors that lack names here and there; none has b.weight where the seed is even."""
    random = np.random.default_rng(seed)
    present = [name for name in LIKE if seed % 2 or name != "b.weight"]
    return [
        {
            name: torch.from_numpy(random.normal(size=LIKE[name].shape)).float()
            for name in present
            if random.random() < 0.8
        }
        for _ in range(count)
    ]


@given(seed=st.integers(0, 10**6), count=st.integers(1, 4))
def test_vectors_come_back_with_zeros_for_what_they_lack(seed: int, count: int) -> None:
    """Also on a second filling, whatever the first has left."""
    table = VectorTable(LIKE, 4, None)
    table.fill(vectors_of(seed + 1, 4))
    vectors = vectors_of(seed, count)
    rows = table.fill(iter(vectors))
    reached = {name for vector in vectors for name in vector}
    assert len(rows) == count
    for row, vector in zip(rows, vectors, strict=True):
        assert row.keys() == reached
        assert all(torch.equal(row[name], vector.get(name, torch.zeros_like(LIKE[name]))) for name in reached)


def test_a_large_table_is_in_a_file_that_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is aligned there is aligned to the same bits."""
    random = torch.Generator().manual_seed(0)
    vectors = [{name: torch.randn(t.shape, generator=random) for name, t in LIKE.items()} for _ in range(5)]
    aligned = []
    for room in (10**9, 0):
        monkeypatch.setattr(vector_table, "IN_MEMORY", room)
        rows = VectorTable(LIKE, 5, tmp_path).fill(vectors)
        aligned.append(align(rows, [list(LIKE)], lambda G: G.sum(1) / G.sum()))
    assert not list(tmp_path.iterdir())
    assert all(torch.equal(aligned[0][name], aligned[1][name]) for name in LIKE)
