"""`model.weights: torchvision`: the file that torchvision publishes for a backbone, fetched once.

Its name ends in the first digits of its SHA-256, by which it is checked.
"""

from pathlib import Path

import torch

from fclmodels.errors import UserError

SERVER = "https://download.pytorch.org/models/"
PUBLISHED = {  # of ImageNet, its first 1,000 classes
    "alexnet": "alexnet-owt-7be5be79.pth",
    "resnet18": "resnet18-f37072fd.pth",
    "swin-t": "swin_t-704ceda3.pth",
    "vit": "vit_b_16-c867db91.pth",
}


def find_weights_file(weights: Path, backbone: str) -> Path:
    """Return the file that `model.weights` names, or torchvision's for this backbone, fetched if it is missing."""
    if str(weights) != "torchvision":
        return weights
    if backbone not in PUBLISHED:
        names = ", ".join(PUBLISHED)
        raise UserError(f"model.weights: torchvision publishes none for {backbone}, but for {names}. Name a file.")
    name = PUBLISHED[backbone]
    file = Path(torch.hub.get_dir(), "checkpoints", name)
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        hash_prefix = name.removesuffix(".pth").rpartition("-")[2]
        try:
            torch.hub.download_url_to_file(SERVER + name, str(file), hash_prefix, progress=False)
        except (OSError, RuntimeError) as problem:  # RuntimeError: another hash
            raise UserError(
                f"model.weights: {SERVER}{name} cannot be fetched ({problem}). Name a file instead."
            ) from None
    return file
