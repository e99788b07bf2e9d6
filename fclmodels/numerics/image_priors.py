"""What an image drawn without data should be like (MFCL, after Smith et al. 2021): as the model expects, and smooth."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import conv2d, cross_entropy, pad

EPSILON = 1e-8  # beside variances
TEMPERATURE = 1000.0
BLUR, SHARPNESS = 5, 4.0  # pixels of a side, and the divisor of squared distances: a Gaussian with sigma sqrt(2)


def measure_certainty(logits: Tensor) -> Tensor:
    """Return CE(o / 1000, argmax o) of logits o [B, K]; with that temperature next to no gradient is left."""
    return cross_entropy(logits / TEMPERATURE, logits.argmax(1))


def measure_imbalance(logits: Tensor) -> Tensor:
    """Return 1 + sum_k q_k ln q_k / ln K with q the batch's mean probabilities; 0 where all K classes are alike."""
    classes = logits.shape[1]
    if classes == 1:
        return logits.new_zeros(())
    q = logits.softmax(1).mean(0)
    return 1 + torch.special.xlogy(q, q).sum() / math.log(classes)


def measure_divergence(batch: Sequence[tuple[Tensor, Tensor]], running: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean over layers of the mean over channels of KL(N(running) || N(batch)), by mean and variance."""
    gaps = []
    for (mean, variance), (running_mean, running_variance) in zip(batch, running, strict=True):
        ours, theirs = variance + EPSILON, running_variance + EPSILON
        gap = 0.5 * (ours / theirs).log() + (theirs + (running_mean - mean).square()) / (2 * ours) - 0.5
        gaps.append(gap.mean())
    return torch.stack(gaps).mean()


def blur(images: Tensor) -> Tensor:
    """Return images [B, C, H, W] after a Gaussian of 5 x 5, with mirrored edges."""
    steps = torch.arange(BLUR, device=images.device).to(images) - BLUR // 2
    window = (-(steps[:, None].square() + steps.square()) / SHARPNESS).exp()
    window = (window / window.sum()).expand(images.shape[1], 1, -1, -1)
    return conv2d(pad(images, (BLUR // 2,) * 4, mode="reflect"), window, groups=images.shape[1])


def measure_roughness(images: Tensor) -> Tensor:
    """Return the mean squared distance of images from their blur."""
    return (images - blur(images)).square().mean()
