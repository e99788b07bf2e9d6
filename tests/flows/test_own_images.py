"""The tutorial's four commands: from an empty folder to a model of one's own images and its first answer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
CLASSES = ("circle", "cross", "dots", "square")


def draw_picture(kind: str, random: np.random.Generator) -> Image.Image:
    """Draw 24 x 20 pixels with noise; the bright shape is the class."""
    across, down = np.meshgrid(np.linspace(-1, 1, 24), np.linspace(-1, 1, 20))
    shapes = {
        "circle": np.hypot(across, down) < 0.7,
        "cross": np.minimum(abs(across), abs(down)) < 0.2,
        "dots": (abs(across) > 0.5) & (abs(down) > 0.5),
        "square": np.maximum(abs(across), abs(down)) > 0.7,
    }
    pixels = 60 * random.random((20, 24, 3)) + 180 * shapes[kind][:, :, None]
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.mark.slow
def test_four_commands_from_an_empty_folder_to_an_answer(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for kind in CLASSES:
        (tmp_path / "shapes" / kind).mkdir(parents=True)
        for number in range(60):
            draw_picture(kind, random).save(tmp_path / "shapes" / kind / f"{number}.png")
    folder = tmp_path / "mine"
    folder.mkdir()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_API", "MLFLOW_T"))
    }
    environment |= {"PYTHONPATH": str(ROOT)}

    def fcl(*words: str) -> str:
        code = "from flows.cli.app import main; main()"
        end = subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert end.returncode == 0, end.stderr[-3000:]
        return end.stdout

    fcl("init", "../shapes")
    fcl("run", "--method", "er")
    draw_picture("cross", random).save(folder / "new.png")
    (answer,) = json.loads(fcl("predict", "runs/er-0", "new.png", "--json"))
    assert answer["class"] in CLASSES
    accuracy = json.loads((folder / "runs" / "er-0" / "result.json").read_text())["metrics"]["task_aware"]["acc"]
    assert accuracy > 0.8
    status = {row["what"]: row["state"] for row in json.loads(fcl("status", "--json"))}
    assert status["runs/er-0"] == "done"
