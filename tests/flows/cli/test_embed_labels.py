"""`fcl embed-labels`: a file of the classes' embeddings, by a tiny encoder of a local folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fclmodels.data.label_embeddings import read_embeddings
from fclmodels.data.splits.split_reader import Splits
from fclmodels.optional.transformers import import_transformers
from fclmodels.testing.tiny_splits import write_splits


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Splits:
    return write_splits(tmp_path_factory.mktemp("data"))


def test_it_writes_a_row_for_each_class(
    fcl: Callable[..., int], splits: Splits, encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = import_transformers()
    library.AutoModel.from_config(library.AutoConfig.from_pretrained(encoder)).save_pretrained(tmp_path / "encoder")
    library.AutoTokenizer.from_pretrained(encoder).save_pretrained(tmp_path / "encoder")
    out = tmp_path / "labels.safetensors"
    arguments = (str(tmp_path / "encoder"), "--splits", str(splits.folder), "--out", str(out))
    assert fcl("embed-labels", *arguments, "--prompt", "the {}") == 0
    assert "4 classes, 16 numbers each" in capsys.readouterr().err
    assert read_embeddings(out, splits.classes).shape == (4, 16)


def test_a_prompt_without_a_place_for_the_name_is_refused(
    fcl: Callable[..., int], splits: Splits, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fcl("embed-labels", str(tmp_path), "--splits", str(splits.folder), "--prompt", "a photo") == 2
    assert "must have {} once" in capsys.readouterr().err
