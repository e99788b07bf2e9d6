"""Artifacts that MLflow gets of a run: the contact sheet of synthetic images."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fclmodels.storage import trees
from tasks.mlflow.artifacts import log_sheet


class Client:
    """Notes the images that it is given."""

    def __init__(self) -> None:
        self.images: list[tuple[str, Any, str]] = []

    def log_image(self, run: str, image: np.ndarray, file: str) -> None:
        self.images.append((run, image.shape, file))


def test_a_run_with_synthetic_images_has_their_sheet(tmp_path: Path) -> None:
    client = Client()
    log_sheet(client, "r", tmp_path)
    assert client.images == []
    for folder in ("model", "knowledge"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "serving.json").write_text(json.dumps({"classes": ["a", "b"]}))
    pool = {"images": torch.zeros(2, 1, 9, 9, dtype=torch.uint8), "labels": torch.tensor([0, 1])}
    trees.save({"synthetic": pool}, tmp_path / "knowledge" / "task-03.safetensors")
    log_sheet(client, "r", tmp_path)
    assert client.images == [("r", (20 * 40, 9 * 40, 3), "synthetic.png")]
