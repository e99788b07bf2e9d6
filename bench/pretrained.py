"""Pretrained backbones measured: torchvision's logits, a photograph's name, ridge on features, a step's seconds.

`python bench/pretrained.py logits FILE.pth`: largest difference of a MobileNetV2's logits from torchvision's own.
`... photograph WEIGHTS LABELS.json`: the five likeliest ImageNet classes of scikit-learn's two photographs.
`... probe FOLDER WEIGHTS...`: share of test photographs right by ridge on the features of each file of weights, the
folder's classes by image-folder's rules, three draws of an eighth of them for testing.
`... step`: seconds of a training step of MobileNetV2 at 96 pixels, with and without kept activations, by frozen blocks.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.mobilenet_v2 import MobileNetV2
from fclmodels.backbones.model.network import build_skeleton
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.backbones.weights.weight_files import load_weights, read_card, read_tensors
from fclmodels.data.sources.image_folder import SUFFIXES
from fclmodels.optional.torchvision import import_torchvision

MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
RIDGE = 1.0  # times the mean eigenvalue of the features' Gram matrix, by n / 1000
DRAWS = 3


def build(weights: Path, side: int) -> FeatureNet:
    """Return the backbone that a card names, with these weights, in evaluation mode."""
    settings = read_card(weights)["model"]
    spec = ModelSpec(settings, (3, side, side), "growing", ((0,),))
    network = build_skeleton(spec).backbone
    load_weights(network, weights)
    return network.eval()


def read(files: Sequence[Path], side: int) -> Tensor:
    """Return photographs [n, 3, side, side] as torchvision's weights read them."""
    pixels = [np.asarray(Image.open(file).convert("RGB").resize((side, side))) for file in files]
    return normalise(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2))


def normalise(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - MEAN.view(3, 1, 1)) / STD.view(3, 1, 1)


@torch.inference_mode()
def measure_logits(file: Path) -> None:
    state = torch.load(file, map_location="cpu", weights_only=True)
    theirs = import_torchvision().models.mobilenet_v2()
    theirs.load_state_dict(state)
    theirs.eval()
    for side in (32, 96, 224):
        ours = MobileNetV2(MobileNetV2.Settings()).build((3, side, side))
        ours.load_state_dict(ours.rename_tensors(state))
        x = torch.randn(16, 3, side, side, generator=torch.Generator().manual_seed(side))
        logits = nn.functional.linear(ours.eval()(x), state["classifier.1.weight"], state["classifier.1.bias"])
        right = theirs(x)
        difference, largest = (float(of.abs().max()) for of in (logits - right, right))
        print(f"{side} pixels: largest difference {difference:g} of {largest:.1f}")


@torch.inference_mode()
def name_photographs(weights: Path, labels: Path) -> None:
    names, tensors, backbone = json.loads(labels.read_text()), read_tensors(weights), build(weights, 224)
    head = next(name for name in ("fc", "classifier.1") if f"{name}.weight" in tensors)
    sample = load_sample_images()
    for file, pixels in zip(sample.filenames, sample.images, strict=True):
        cut = (pixels.shape[1] - pixels.shape[0]) // 2
        square = Image.fromarray(pixels[:, cut : cut + pixels.shape[0]]).resize((224, 224))
        x = normalise(torch.from_numpy(np.asarray(square).copy()).permute(2, 0, 1))[None]
        scores = backbone(x) @ tensors[f"{head}.weight"].T + tensors[f"{head}.bias"]
        best = scores.softmax(1)[0].topk(5)
        listed = ", ".join(f"{names[str(i)]} {p:.2f}" for p, i in zip(*(t.tolist() for t in best), strict=True))
        print(f"{Path(file).name}: {listed}")


@torch.inference_mode()
def probe(folder: Path, files: Sequence[Path], side: int, most: int) -> None:
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    pictures = [[f for f in sorted(c.iterdir()) if f.suffix.lower() in SUFFIXES][:most] for c in classes]
    labels = torch.tensor([label for label, of_class in enumerate(pictures) for _ in of_class])
    flat = [file for of_class in pictures for file in of_class]
    for weights in files:
        backbone = build(weights, side)
        features = torch.cat([backbone(read(flat[i : i + 64], side)) for i in range(0, len(flat), 64)])
        shares = [fit_and_test(features, labels, draw) for draw in range(DRAWS)]
        print(
            f"{weights.name}: {100 * np.mean(shares):.1f} +- {100 * np.std(shares, ddof=1):.1f} % of test images right "
            f"({len(flat)} images, {len(classes)} classes, {side} pixels, {DRAWS} draws)"
        )


def fit_and_test(features: Tensor, labels: Tensor, draw: int) -> float:
    """Return the share of an eighth of the samples that ridge on the features of the others names right."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(draw))
    test, train = order[: len(order) // 8], order[len(order) // 8 :]
    mean, std = features[train].mean(0), features[train].std(0).clamp(min=1e-6)
    X = ((features - mean) / std).double()
    Y = nn.functional.one_hot(labels).double()
    gram = X[train].T @ X[train]
    gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()) * len(X.T) / len(train))
    W = torch.linalg.solve(gram, X[train].T @ (Y[train] - Y[train].mean(0)))
    return float(((X[test] @ W + Y[train].mean(0)).argmax(1) == labels[test]).double().mean())


def measure_steps(side: int, batch: int, turns: int) -> None:
    """Print the seconds of a step, the median over turns: all blocks trained; the first n frozen; and n kept."""
    torch.manual_seed(0)
    x, labels = torch.randn(batch, 3, side, side), torch.randint(10, (batch,))
    for frozen in (0, 4, 7, 11, 14, 17, 18):
        backbone = MobileNetV2(MobileNetV2.Settings()).build((3, side, side)).train()
        head = nn.Linear(backbone.features, 10)
        for name in backbone.blocks[:frozen]:
            backbone.get_submodule(name).eval().requires_grad_(False)
        parameters = [p for p in [*backbone.parameters(), *head.parameters()] if p.requires_grad]
        optimiser = torch.optim.SGD(parameters, 0.01)
        with torch.no_grad():
            stored = backbone.run_first(x, frozen) if frozen else x
        seconds: dict[str, list[float]] = {"whole": [], "rest": []}
        for _ in range(turns):
            for side_of in seconds:
                start = time.perf_counter()
                features = backbone(x) if side_of == "whole" or not frozen else backbone.run_rest(stored, frozen)
                optimiser.zero_grad()
                nn.functional.cross_entropy(head(features), labels).backward()
                optimiser.step()
                seconds[side_of].append(time.perf_counter() - start)
        whole, rest = (float(np.median(of_side[1:])) for of_side in seconds.values())
        kilobytes = stored[0].numel() * 4 / 1000
        print(f"{frozen} blocks frozen: {whole:.3f} s, kept {rest:.3f} s, {kilobytes:.1f} kB a sample on disk")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("logits", "photograph", "probe", "step"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--side", type=int, default=96, help="pixels")
    parser.add_argument("--batch", type=int, default=32, help="samples of a step")
    parser.add_argument("--turns", type=int, default=9, help="steps of each side")
    parser.add_argument("--most", type=int, default=100, help="images of a class in a probe")
    chosen = parser.parse_args()
    if chosen.what == "logits":
        measure_logits(*chosen.files)
    elif chosen.what == "photograph":
        name_photographs(*chosen.files)
    elif chosen.what == "probe":
        probe(chosen.files[0], chosen.files[1:], chosen.side, chosen.most)
    else:
        measure_steps(chosen.side, chosen.batch, chosen.turns)


if __name__ == "__main__":
    main()
