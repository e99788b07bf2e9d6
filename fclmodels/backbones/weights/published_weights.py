"""`model.weights: torchvision` or `timm`: the file that a library publishes for a backbone, fetched and imported once.

Its name ends in the first digits of its SHA-256, by which it is checked. What runs read is the safetensors file beside
it, into which it is imported.
"""

import glob
from pathlib import Path
from typing import NamedTuple

import torch

from fclmodels.backbones.weights.weights_import import convert, write_weights
from fclmodels.errors import UserError


class Publisher(NamedTuple):
    server: str
    files: dict[str, str]  # by backbone


PUBLISHERS = {
    "torchvision": Publisher(  # of ImageNet, its first 1,000 classes
        "https://download.pytorch.org/models/",
        {
            "mobilenet-v2": "mobilenet_v2-b0353104.pth",  # the first of two trainings, as of resnet50
            "resnet18": "resnet18-f37072fd.pth",
            "resnet50": "resnet50-0676ba61.pth",
            "swin-t": "swin_t-704ceda3.pth",
            "vit": "vit_b_16-c867db91.pth",
        },
    ),
    "timm": Publisher(  # vit_base_patch16_224.orig_in21k: of ImageNet-21k, which PIP's release starts from
        "https://github.com/huggingface/pytorch-image-models/releases/download/v0.1-vitjx/",
        {"vit": "jx_vit_base_patch16_224_in21k-e5005f0a.pth"},
    ),
}


def find_place(publisher: Publisher, backbone: str) -> Path:
    """Return where a publisher's file for a backbone is, or would be."""
    return Path(torch.hub.get_dir(), "checkpoints", publisher.files[backbone])


def find_weights_file(weights: Path, backbone: str) -> Path:
    """Return the file that `model.weights` names, or the import of a publisher's, fetched if it is missing."""
    publisher = PUBLISHERS.get(str(weights))
    if publisher is None:
        return weights
    published = fetch(publisher, str(weights), backbone)
    imported = sorted(published.parent.glob(f"{glob.escape(published.stem)}-????????.safetensors"))
    return imported[0] if imported else write_weights(*convert(published, backbone), published.parent, published.stem)


def fetch(publisher: Publisher, weights: str, backbone: str) -> Path:
    """Return a publisher's file for a backbone, fetched if it is missing."""
    if backbone not in publisher.files:
        names = ", ".join(publisher.files)
        raise UserError(f"model.weights: {weights} publishes none for {backbone}, but for {names}. Name a file.")
    file = find_place(publisher, backbone)
    name = file.name
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        hash_prefix = name.removesuffix(".pth").rpartition("-")[2]
        try:
            torch.hub.download_url_to_file(publisher.server + name, str(file), hash_prefix, progress=False)
        except (OSError, RuntimeError) as problem:  # RuntimeError: another hash
            raise UserError(
                f"model.weights: {publisher.server}{name} cannot be fetched ({problem}). Name a file instead."
            ) from None
    return file
