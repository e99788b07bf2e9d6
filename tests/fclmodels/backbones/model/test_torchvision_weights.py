"""torchvision's weights: fetched once from a server, here a folder, and checked by the hash in their name."""

import hashlib
from pathlib import Path

import pytest
import torch

from fclmodels.backbones.model import torchvision_weights
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
    monkeypatch.setattr(torchvision_weights, "SERVER", f"{folder.as_uri()}/")
    monkeypatch.setattr(torchvision_weights, "PUBLISHED", names)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    return folder


def test_a_file_is_fetched_once(server: Path, tmp_path: Path) -> None:
    file = torchvision_weights.find_weights_file(Path("torchvision"), "vit")
    assert torch.load(file, weights_only=True)["x"].tolist() == [1, 1, 1]
    for source in server.iterdir():
        source.unlink()
    assert torchvision_weights.find_weights_file(Path("torchvision"), "vit") == file
    assert torchvision_weights.find_weights_file(tmp_path / "own.pth", "vit") == tmp_path / "own.pth"


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
        torchvision_weights.find_weights_file(Path("torchvision"), backbone)
    assert not [*(tmp_path / "hub").rglob("*.pth")]
