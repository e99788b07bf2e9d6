"""`fcl predict` on a run whose server has fitted the head."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import fclmodels.methods

TOYS = Path(__file__).parents[2] / "fclmodels" / "toys" / "methods"


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fclmodels.methods.__path__.append(str(TOYS))
    yield
    fclmodels.methods.__path__.remove(str(TOYS))


def test_files_are_answered_by_the_fitted_head_and_routed(
    toys: None, project: Path, fcl: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    own = "methods.fitted-classes={fit: ridge, routed: true}"
    assert fcl("run", "-m", "fitted-classes", "-q", "--set", own) == 0
    folder = project / "runs" / "fitted-classes-0"
    assert (folder / "model" / "fitted_head.safetensors").exists()
    for digit, pixels in enumerate(load_digits().images[:2]):
        Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(project / f"{digit}.png")
    capsys.readouterr()
    assert fcl("predict", "runs/fitted-classes-0", "0.png", "1.png", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["file"] for row in rows] == ["0.png", "1.png"]
    assert all(row["task"] in (1, 2) and len(row["relevance"]) == 2 for row in rows)
