"""Keras' ResNet-50 of ImageNet, by torchvision's names and for torchvision's inputs.

Keras' network differs in five things, and its weights are changed so that features stay the same: kernels have their
filters last; a convolution has a bias b, which goes into the running mean (mean - b); batch normalisation adds its own
epsilon to variances (variance + epsilon - 1e-5); channels are blue, green, red, of 0..255 less the mean of each; and a
block's stride is that of its first convolution, which is a setting here (model.stride_in: 1x1). Inputs are normalised
by `mean` and `std` here, and a picture's edge is padded with these: Keras' means differ by at most 0.5 of 255.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

MEANS = (103.939, 116.779, 123.68)  # of blue, green and red
OURS = 1e-5  # epsilon of torch's batch normalisation
PARTS = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean", "moving_variance": "running_var"}
# Of Keras up to 2.2: res3a_branch2b, bn3a_branch2b; later: conv3_block1_2_conv, conv3_block1_2_bn.
OLD = re.compile(r"(?:res|bn)(\d)([a-f])_branch(1|2[abc])")
NEW = re.compile(r"conv(\d)_block(\d)_(\d)_(?:conv|bn)")
OLD_EPSILON, NEW_EPSILON = 1e-3, 1.001e-5
STEMS = {"conv1": "conv1", "bn_conv1": "bn1", "conv1_conv": "conv1", "conv1_bn": "bn1"}
HEADS = ("fc1000", "predictions", "probs")


def is_keras_resnet(tensors: Mapping[str, Tensor]) -> bool:
    return "conv1/kernel" in tensors or "conv1_conv/kernel" in tensors


def find_epsilon(model: Path) -> float | None:
    """Return the epsilon of all batch normalisations of a Keras model in JSON; None where they differ."""
    epsilons = {float(value) for value in re.findall(r'"epsilon": *([0-9.e-]+)', model.read_text())}
    return epsilons.pop() if len(epsilons) == 1 else None


def translate_keras_resnet(
    tensors: Mapping[str, Tensor], epsilon: float | None, mean: Sequence[float], std: Sequence[float]
) -> dict[str, Tensor]:
    """Return the tensors by torchvision's names, for inputs (pixels - mean) / std of red, green, blue in 0..1."""
    if epsilon is None:
        epsilon = OLD_EPSILON if "conv1/kernel" in tensors else NEW_EPSILON
    translated: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.partition("/")
        own, is_norm = translate_layer(layer), part in PARTS
        if layer in HEADS:
            translated["fc.weight" if part == "kernel" else "fc.bias"] = tensor.mT if part == "kernel" else tensor
        elif is_norm:
            translated[f"{own}.{PARTS[part]}"] = tensor
        elif part == "kernel":
            translated[f"{own}.weight"] = tensor.permute(3, 2, 0, 1)
        else:
            biases[find_norm(own)] = tensor
    of_pixels = translated["conv1.weight"].flip(1)  # red first, of 255 pixels less Keras' means
    scale, shift = (torch.tensor(values).view(3, 1, 1) for values in _compare_inputs(mean, std))
    translated["conv1.weight"] = of_pixels * scale
    biases["bn1"] = biases.get("bn1", 0) + (of_pixels * shift).sum((1, 2, 3))
    for norm, bias in biases.items():
        translated[f"{norm}.running_mean"] = translated[f"{norm}.running_mean"] - bias
    for name in [name for name in translated if name.endswith("running_var")]:
        translated[name] = translated[name] + (epsilon - OURS)
    return translated


def translate_layer(layer: str) -> str:
    """Return torchvision's name of a layer: of a stem, a block or its shortcut; else the same."""
    is_norm = layer.startswith("bn") or layer.endswith("_bn")
    if match := OLD.fullmatch(layer):
        stage, block, place = int(match[1]) - 1, ord(match[2]) - ord("a"), "0abc".index(match[3][-1].replace("1", "0"))
    elif match := NEW.fullmatch(layer):
        stage, block, place = int(match[1]) - 1, int(match[2]) - 1, int(match[3])
    else:
        return STEMS.get(layer, layer)
    within = f"{'bn' if is_norm else 'conv'}{place}" if place else f"downsample.{int(is_norm)}"
    return f"layer{stage}.{block}.{within}"


def find_norm(convolution: str) -> str:
    """Return the name of the batch normalisation behind a convolution."""
    if convolution.endswith("downsample.0"):
        return f"{convolution[:-1]}1"
    return re.sub(r"conv(\d)$", r"bn\1", convolution)


def _compare_inputs(mean: Sequence[float], std: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return a and c with 255 pixel - Keras' mean = a x + c for x = (pixel - mean) / std, of red, green, blue."""
    scale = [255 * value for value in std]
    shift = [255 * value - of_keras for value, of_keras in zip(mean, reversed(MEANS), strict=True)]
    return scale, shift
