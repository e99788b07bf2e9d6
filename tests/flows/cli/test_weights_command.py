"""`fcl weights`: what it lists, that an import fits and runs, and estimated statistics of pictures and of splits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fclmodels.backbones.mobilenet_v2 import MobileNetV2
from fclmodels.backbones.weights.weight_files import read_card, read_tensors
from fclmodels.testing.tiny_splits import write_splits
from flows.cli import weights

NARROW = ["--set", "model.backbone=mobilenet-v2", "--set", "model.width=0.1"]
PICTURES = ["--set", "data.source=image-folder", "--set", "data.folder=."]


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file as torchvision saves it, in a project's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    state = MobileNetV2(MobileNetV2.Settings(width=0.1)).build((3, 32, 32)).state_dict()
    torch.save({name.replace("stages.", "features."): tensor for name, tensor in state.items()}, tmp_path / "w.pth")
    Path("params.yaml").write_text("data: {size: 32}\n")
    return tmp_path / "w.pth"


def run(fcl: Any, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert fcl("weights", *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_a_published_file_is_imported_checked_and_listed(fcl: Any, published: Path, capsys: Any) -> None:
    row = run(fcl, capsys, "import", str(published), *NARROW)
    assert row["settings"] == {"model.backbone": "mobilenet-v2", "model.weights": row["file"]}
    checked = run(fcl, capsys, "check", row["file"], *NARROW)
    assert checked["sha256"] == row["sha256"]
    assert (checked["fits"], checked["made of"], checked["statistics"]) == ("mobilenet-v2", "w.pth", "as published")
    listed = run(fcl, capsys, "list")
    assert {"weights": row["file"], "backbone": "mobilenet-v2"}.items() <= listed[-1].items()
    assert {"weights": "torchvision", "file": "resnet50-0676ba61.pth", "at": None}.items() <= listed[2].items()


def test_statistics_are_those_of_pictures(fcl: Any, published: Path, capsys: Any, monkeypatch: Any) -> None:
    """The first convolution's, of all pictures below the folder in one batch; weights stay."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    for number, picture in enumerate(pixels):
        folder = Path("pictures") / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(folder / f"{number}.png")
    before = run(fcl, capsys, "import", str(published), *NARROW)
    after = run(fcl, capsys, "estimate", before["file"], "--images", "pictures", *NARROW)
    assert after["images"] == 6
    old, new = read_tensors(Path(before["file"])), read_tensors(Path(after["file"]))
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 * 2 - 1
    maps = torch.nn.functional.conv2d(x, new["stages.0.0.weight"], stride=2, padding=1)
    torch.testing.assert_close(new["stages.0.1.running_mean"], maps.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    assert torch.equal(new["stages.0.0.weight"], old["features.0.0.weight"])
    assert read_card(Path(after["file"]))["statistics"] == "of 6 images: pictures"
    monkeypatch.setattr(weights, "MOST", 4)
    assert run(fcl, capsys, "estimate", before["file"], "--images", "pictures", *NARROW)["images"] == 4


def test_statistics_are_those_of_the_train_rows_of_a_task(
    fcl: Any, published: Path, capsys: Any, tmp_path: Path
) -> None:
    """Test rows and other tasks are not looked at."""
    splits = write_splits(tmp_path / "data", tasks=2, train=5)
    state = MobileNetV2(MobileNetV2.Settings(width=0.1)).build(splits.shape).state_dict()
    torch.save(state, published)
    Path("params.yaml").write_text(f"data: {{size: {splits.shape[1]}, channels: {splits.shape[0]}}}\n")
    row = run(fcl, capsys, "import", str(published), *NARROW)
    done = run(fcl, capsys, "estimate", row["file"], "--splits", str(splits.folder), "--task", "2", *NARROW)
    assert done["images"] == len(splits.select_rows(1, "train"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lst"], "fcl weights lst: there is no such action. Did you mean list?"),
        (["check"], "fcl weights check: name a file or folder of weights, torchvision or timm."),
        (["check", "none.safetensors"], "model.weights: there is no file none.safetensors"),
        (["import", "w.pth"], "does not fit this backbone"),
        (["estimate", "w.pth", *NARROW], "model.weights: no run reads w.pth. Import it once: fcl weights import w.pth"),
    ],
)
def test_a_mistake_is_one_line(fcl: Any, published: Path, words: list[str], message: str, capsys: Any) -> None:
    assert fcl("weights", *words) == 2
    assert message in capsys.readouterr().err


def test_what_has_no_images_is_refused(fcl: Any, published: Path, capsys: Any) -> None:
    row = run(fcl, capsys, "import", str(published), *NARROW)
    Path("empty").mkdir()
    for words, message in (([], "name images by --images FOLDER"), (["--images", "empty"], "has no pictures")):
        assert fcl("weights", "estimate", row["file"], *words, *NARROW) == 2
        assert message in capsys.readouterr().err
