"""Swin-T: torchvision's network below its head, by torchvision's weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fclmodels.backbones.swin_t import SwinT
from fclmodels.backbones.weights.weight_files import load_weights
from fclmodels.errors import UserError
from fclmodels.optional.torchvision import import_torchvision


def test_with_torchvisions_weights_it_has_torchvisions_features(tmp_path: Path) -> None:
    theirs = import_torchvision().models.swin_t().eval()
    save_file(theirs.state_dict(), tmp_path / "swin.safetensors")
    ours = SwinT(SwinT.Settings(backbone="swin-t")).build((3, 32, 32)).eval()
    load_weights(ours, tmp_path / "swin.safetensors")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs.norm(theirs.features(x)).mean((1, 2)))


@pytest.mark.parametrize("shape", [(1, 32, 32), (3, 28, 28)])
def test_images_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="swin-t reads 3 channels of 32 pixels or more"):
        SwinT(SwinT.Settings(backbone="swin-t")).build(shape)
