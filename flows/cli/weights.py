"""`fcl weights`: pretrained weights at hand, whether a file fits, import of published ones, statistics anew."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.model.network import build_skeleton
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.backbones.weights.norm_statistics import estimate_statistics
from fclmodels.backbones.weights.published_weights import PUBLISHERS, find_place, find_weights_file
from fclmodels.backbones.weights.weight_files import fill, load_weights, read_card, read_tensors, refuse_other_settings
from fclmodels.backbones.weights.weights_import import import_weights, write_weights
from fclmodels.data.augment import to_inputs
from fclmodels.data.decoding import decode
from fclmodels.data.sources.image_folder import SUFFIXES
from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.settings.schema import ImageSettings, Params
from fclmodels.storage.digests import digest_file
from fclmodels.storage.untrusted import open_image

PRETRAINED = Path("data/pretrained")
SIDE = 224  # pixels, where data.size does not say it
AT_ONCE = 64  # images that pass together
MOST = 4096  # images of which statistics are estimated, spread over all that there are


class Images(NamedTuple):
    """Where unlabelled images come from: a folder with pictures below it, or the train rows of a task of splits."""

    folder: Path | None
    splits: Path | None
    task: int


def list_weights() -> list[dict[str, Any]]:
    """Return a row for each file that a publisher has or that lies in data/pretrained."""
    rows = [
        {
            "weights": publisher,
            "backbone": backbone,
            "file": file,
            "at": str(place) if (place := find_place(PUBLISHERS[publisher], backbone)).is_file() else None,
        }
        for publisher in PUBLISHERS
        for backbone, file in PUBLISHERS[publisher].files.items()
    ]
    for path in sorted(PRETRAINED.rglob("*.safetensors")):
        backbone = read_card(path).get("model", {}).get("backbone", "")
        rows.append({"weights": str(path), "backbone": backbone, "file": path.name, "at": str(path)})
    return rows


def check(weights: str, params: Params) -> dict[str, Any]:
    """Return what is known of a file that fits the settings' model; UserError where it does not fit."""
    path, backbone = find_weights_file(Path(weights), params.model.backbone), build(params)
    load_weights(backbone, path)
    refuse_other_settings(path, params.model.model_dump(mode="json"))
    card = read_card(path)
    own = backbone.state_dict()
    return {
        "file": str(path),
        "sha256": digest_file(path),
        "fits": params.model.backbone,
        "numbers": sum(p.numel() for p in backbone.parameters()),
        "names": card.get("names", "its own"),
        "made of": ", ".join(list(card.get("sources", {}))[:2]),
        "statistics": card.get("statistics", "as published"),
        "least variance": min((float(own[n].min()) for n in own if n.endswith("running_var")), default=None),
    }


def import_source(source: str, out: Path, params: Params) -> dict[str, Any]:
    """Import a file, a folder or what a publisher has; return its row, and the settings that it needs."""
    name = params.model.backbone
    if source in PUBLISHERS:
        path = find_weights_file(Path(source), name)
    else:
        path = import_weights(Path(source), build(params), name, out)
    return {"file": str(path), "sha256": digest_file(path), "settings": list_settings(path)}


def estimate(weights: str, images: Images, out: Path, params: Params) -> dict[str, Any]:
    """Write weights with statistics of other images; return the new file's row."""
    path, backbone = find_weights_file(Path(weights), params.model.backbone), build(params)
    tensors, card = read_tensors(path), read_card(path)
    refuse_other_settings(path, params.model.model_dump(mode="json"))
    fill(backbone, tensors, path)
    count = estimate_statistics(backbone, read_images(images, params))
    source = images.folder or f"task {images.task} of {images.splits}"
    card |= {"model": {"backbone": params.model.backbone, **card.get("model", {})}}
    card |= {"statistics": f"of {count} images: {source}", "of": digest_file(path)}
    written = write_weights(dict(backbone.state_dict()), card, out, f"{params.model.backbone}-estimated")
    return {"file": str(written), "sha256": digest_file(written), "images": count, "settings": list_settings(written)}


def list_settings(path: Path) -> dict[str, Any]:
    """Return the settings that imported weights need."""
    return {f"model.{key}": value for key, value in read_card(path)["model"].items()} | {"model.weights": str(path)}


def build(params: Params) -> FeatureNet:
    """Return the settings' backbone for images of the settings' size."""
    data = params.data
    size, channels = (getattr(data, name, None) for name in ("size", "channels"))
    shape = (channels or 3, size or SIDE, size or SIDE)
    return build_skeleton(ModelSpec(params.model.model_dump(mode="json"), shape, "growing", ((0,),))).backbone


def read_images(images: Images, params: Params) -> Iterator[Tensor]:
    """Yield batches as the network reads them, normalised by the settings' mean and std, or by those of the splits."""
    if images.splits is not None:
        splits = Splits.open(images.splits)
        if not 1 <= images.task <= len(splits.tasks):
            raise UserError(f"--task: {images.task}, but {images.splits} has tasks 1 to {len(splits.tasks)}.")
        rows = splits.select_rows(images.task - 1, "train")
        for part in torch.from_numpy(rows.samples[spread(len(rows))]).split(AT_ONCE):
            yield to_inputs(splits.images[part], splits.mean, splits.std)
        return
    if images.folder is None:
        raise UserError("fcl weights: name images by --images FOLDER or --splits FOLDER.")
    data = params.data
    if not isinstance(data, ImageSettings):
        raise UserError(f"data.source: {data.source} holds texts. Name a source of images.")
    files = sorted(file for file in images.folder.rglob("*") if file.suffix.lower() in SUFFIXES)
    if not files:
        raise UserError(f"--images: {images.folder} has no pictures. Name a folder of {', '.join(SUFFIXES)} files.")
    chosen = [files[place] for place in spread(len(files))]
    for start in range(0, len(chosen), AT_ONCE):
        yield to_inputs(read_pictures(chosen[start : start + AT_ONCE], data), data.mean, data.std)


def spread(count: int) -> np.ndarray:
    """Return at most MOST places among so many, at equal distances, in an order drawn once and for all."""
    places = np.linspace(0, count - 1, min(count, MOST)).astype(int)
    return np.random.default_rng(0).permutation(places)


def read_pictures(files: Sequence[Path], data: ImageSettings) -> Tensor:
    """Return files as uint8 pixels [B, C, H, W] of the settings' size and channels."""
    size, channels = data.size or SIDE, data.channels or 3
    pixels = []
    for file in files:
        with open_image(file) as picture:
            pixels.append(torch.from_numpy(decode(picture, (size, size), channels, data.smaller).copy()))
    return torch.stack(pixels)
