"""Published weights: fetched once from a server, here a folder, and checked by the hash in their name."""

import hashlib
import re
from pathlib import Path

import pytest
import torch

from fclmodels.backbones.weights import published_weights
from fclmodels.backbones.weights.weight_files import read_card, read_tensors
from fclmodels.errors import UserError


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with a file for vit, whose name tells the right hash, and one for swin-t that tells a wrong one."""
    folder = tmp_path / "server"
    folder.mkdir()
    torch.save({"x": torch.ones(3)}, folder / "new.pth")
    hash_prefix = hashlib.sha256((folder / "new.pth").read_bytes()).hexdigest()[:8]
    names = {"vit": f"vit_b_16-{hash_prefix}.pth", "swin-t": "swin_t-00000000.pth", "alexnet": "alexnet-not-there.pth"}
    (folder / names["swin-t"]).write_bytes((folder / "new.pth").read_bytes())
    (folder / "new.pth").rename(folder / names["vit"])
    publishers = {"torchvision": published_weights.Publisher(f"{folder.as_uri()}/", names)}
    monkeypatch.setattr(published_weights, "PUBLISHERS", publishers)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    return folder


def test_a_file_is_fetched_once(server: Path, tmp_path: Path) -> None:
    file = published_weights.find_weights_file(Path("torchvision"), "vit")
    assert file.suffix == ".safetensors"
    assert read_tensors(file)["x"].tolist() == [1, 1, 1]
    assert read_card(file)["model"] == {"backbone": "vit"}
    for source in server.iterdir():
        source.unlink()
    assert published_weights.find_weights_file(Path("torchvision"), "vit") == file
    assert published_weights.find_weights_file(tmp_path / "own.pth", "vit") == tmp_path / "own.pth"


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ("swin-t", r"cannot be fetched \(invalid hash value"),
        ("alexnet", "cannot be fetched"),
        ("cnn", r"torchvision publishes none for cnn, but for vit, swin-t, alexnet\. Name a file\."),
    ],
)
def test_what_cannot_be_had_is_told(backbone: str, message: str, server: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        published_weights.find_weights_file(Path("torchvision"), backbone)
    assert not [path for path in (tmp_path / "hub").rglob("*") if path.is_file()]


def test_every_publisher_has_a_vit_with_a_hash_in_its_name() -> None:
    for publisher in published_weights.PUBLISHERS.values():
        assert re.fullmatch("https://.*/", publisher.server)
        assert re.fullmatch(r".*-[0-9a-f]{8}\.pth", publisher.files["vit"])
