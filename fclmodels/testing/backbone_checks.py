"""What every backbone keeps: features of the declared width, blocks by name, one network for one seed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fclmodels.backbones.base import Backbone, FeatureNet
from fclmodels.backbones.model.network import build_network, find_misfit
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.data.sample_kind import TEXTS
from fclmodels.randomness import make_generator, seed_torch
from fclmodels.storage import trees
from fclmodels.testing.plugin_declaration import check_declaration, require
from fclmodels.testing.tiny_splits import load_tiny_params

SAMPLES = 3
CPU = torch.device("cpu")


def check_backbone(backbone: type[Backbone], *settings: str, shape: Sequence[int] | None = None) -> None:
    """Raise AssertionError with a line that says what a backbone does not keep; `settings` as "model.width=4".

    It must build for samples of this shape (the default is an image [3, 32, 32], of texts [2, 16]), on any device, the
    same for the same seed, and give features [B, features]; its blocks must be parts of it.
    """
    check_declaration("backbone", backbone)
    name = backbone.name
    shape = tuple(shape or ((2, 16) if backbone.reads is TEXTS else (3, 32, 32)))
    params = load_tiny_params(f"model.backbone={name}", *settings, settings="device: cpu")
    spec = ModelSpec(params.model.model_dump(mode="json"), shape, "growing", ((0, 1),))
    network = build_network(spec, make_generator(0, name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        again, other = build_network(spec, make_generator(0, name)), build_network(spec, make_generator(1, name))
    digests = [trees.digest(n.state_dict()) for n in (network, again, other)]
    require(digests[0] == digests[1], f"{name}: two networks of one seed differ: draw from torch's global generator")
    drawn = digests[0] != digests[2] or not list(network.backbone.parameters())
    require(drawn, f"{name}: networks of two seeds are the same: draw from torch's global generator")
    misfit = find_misfit(spec, network.state_dict(), lambda tensor: False)
    require(misfit is None, f"{name}: {misfit} has another shape, or is not there, when built on the device meta")
    _check_blocks(name, network.backbone)
    _check_features(name, network.backbone, _draw_samples(backbone, shape))


def _check_blocks(name: str, net: FeatureNet) -> None:
    require(bool(net.blocks), f"{name}: it names no blocks; `blocks` are its children, or theirs, in their order")
    modules = {path for path, _ in net.named_modules() if path}
    strange = [block for block in net.blocks if block not in modules]
    require(not strange, f"{name}: the blocks {', '.join(strange)} are not among its modules")


def _check_features(name: str, net: FeatureNet, samples: Tensor) -> None:
    before = samples.clone()
    net.eval()
    with torch.inference_mode():
        features = net(samples)
        shape, right = list(features.shape), [SAMPLES, net.features]
        require(shape == right, f"{name}: features of {SAMPLES} samples are {shape}, not [B, features] = {right}")
        require(bool(features.isfinite().all()), f"{name}: a feature is not finite")
        require(torch.equal(samples, before), f"{name}: it changes its inputs in place")
        alike = torch.allclose(net(samples[:1]), features[:1], rtol=1e-3, atol=1e-4)
        require(alike, f"{name}: in evaluation the features of a sample depend on the others of its batch")
        for blocks in range(1, len(net.blocks) + 1) if net.divisible else ():
            parts = net.run_rest(net.run_first(samples, blocks), blocks)
            same = torch.allclose(parts, features, rtol=1e-3, atol=1e-4)
            require(same, f"{name}: run_rest after run_first of {blocks} blocks gives other features than forward")
    net.train()
    trained = []
    for _ in range(2):
        with seed_torch(0, "check", device=CPU):
            trained.append(net(samples))
    require(torch.equal(*trained), f"{name}: in training it draws from another generator than torch's global one")
    trained[-1].square().sum().backward()
    without = [path for path, p in net.named_parameters() if p.grad is None]
    require(not without, f"{name}: no gradient reaches {', '.join(without[:3])}")


def _draw_samples(backbone: type[Backbone], shape: tuple[int, ...]) -> Tensor:
    """Return samples as a network reads them: images in [-1, 1], or token ids of the text 1."""
    random = make_generator(0, "samples")
    if backbone.reads is TEXTS:
        ids = torch.randint(1, 10, (SAMPLES, shape[1]), generator=random)
        return torch.stack([ids, torch.ones_like(ids)], dim=1)
    return 2 * torch.rand(SAMPLES, *shape, generator=random) - 1
