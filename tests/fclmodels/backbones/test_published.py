"""torchvision's weights: fetched once from a server, here a folder, and checked by the hash in their name."""

import hashlib
from pathlib import Path

import pytest
import torch

from fclmodels.backbones import published
from fclmodels.errors import UserError


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with a file for vit, whose name tells the right hash, and one for swin-t that tells a wrong one."""
    folder = tmp_path / "server"
    folder.mkdir()
    torch.save({"x": torch.ones(3)}, folder / "new.pth")
    told = hashlib.sha256((folder / "new.pth").read_bytes()).hexdigest()[:8]
    names = {"vit": f"vit_b_16-{told}.pth", "swin-t": "swin_t-00000000.pth", "alexnet": "alexnet-not-there.pth"}
    (folder / names["swin-t"]).write_bytes((folder / "new.pth").read_bytes())
    (folder / "new.pth").rename(folder / names["vit"])
    monkeypatch.setattr(published, "SERVER", f"{folder.as_uri()}/")
    monkeypatch.setattr(published, "PUBLISHED", names)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    return folder


def test_a_file_is_fetched_once(server: Path, tmp_path: Path) -> None:
    file = published.file_of(Path("torchvision"), "vit")
    assert torch.load(file, weights_only=True)["x"].tolist() == [1, 1, 1]
    for source in server.iterdir():
        source.unlink()
    assert published.file_of(Path("torchvision"), "vit") == file
    assert published.file_of(tmp_path / "own.pth", "vit") == tmp_path / "own.pth"


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ("swin-t", r"cannot be had \(invalid hash value"),
        ("alexnet", "cannot be had"),
        ("cnn", r"torchvision publishes none for cnn, but for vit, swin-t, alexnet\. Name a file\."),
    ],
)
def test_what_cannot_be_had_is_told(backbone: str, message: str, server: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        published.file_of(Path("torchvision"), backbone)
    assert not [*(tmp_path / "hub").rglob("*.pth")]
