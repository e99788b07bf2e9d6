"""The vision transformer: torchvision's by its weights, and what is attached to a layer by PIP eq. 3 and 4 in NumPy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from scipy.special import erf, softmax
from torch import Tensor, nn

from fclmodels.backbones.vit import Attached, LoraUpdate, Vit, VitNet, resize_positions
from fclmodels.backbones.weights.weight_files import fill, load_weights
from fclmodels.backbones.weights.weights_import import read_source
from fclmodels.errors import UserError
from fclmodels.optional.torchvision import import_torchvision

SMALL = {"patch": 8, "width": 16, "depth": 2, "attention_heads": 2, "mlp_width": 32}
VIT_B_16 = {"patch": 16, "width": 768, "depth": 12, "attention_heads": 12, "mlp_width": 3072}


def build(shape: tuple[int, ...] = (3, 32, 32), **settings: Any) -> VitNet:
    net = Vit(Vit.Settings(backbone="vit", **(SMALL | settings))).build(shape)
    assert isinstance(net, VitNet)
    return net.eval()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def redrawn(net: nn.Module, scale: float = 0.3) -> nn.Module:
    """Every tensor drawn anew, those too that start as zeros or ones."""
    with torch.no_grad():
        for seed, parameter in enumerate(net.parameters()):
            parameter.copy_(scale * drawn(*parameter.shape, seed=seed))
    return net


def theirs_of(size: int = 32) -> Any:
    """torchvision's of the same size as ours, without its head."""
    net = import_torchvision().models.VisionTransformer(
        image_size=size, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32
    )
    net.heads = nn.Identity()
    return redrawn(net).eval()


def saved(weights: dict[str, Tensor], folder: Path) -> Path:
    save_file(weights, folder / "vit.safetensors")
    return folder / "vit.safetensors"


def by_hand(
    net: VitNet, tokens: np.ndarray, prefixes: dict[int, list[np.ndarray]], added: dict[int, list[np.ndarray]]
) -> np.ndarray:
    """Tokens [S, D] of one sample through the layers: prefixes p_K, p_V and additions to W_Q, W_V by layer."""
    weights = {name: tensor.detach().numpy() for name, tensor in net.state_dict().items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scaled = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    h = tokens
    for index in range(len(net.layers)):
        own = {name.removeprefix(f"layers.{index}."): w for name, w in weights.items()}
        W_Q, W_K, W_V = np.split(own["self_attention.in_proj.weight"], 3)
        b_Q, b_K, b_V = np.split(own["self_attention.in_proj.bias"], 3)
        x = norm(h, f"layers.{index}.ln_1")
        p_K, p_V = prefixes.get(index, [x[:0], x[:0]])
        dQ, dV = added.get(index, [np.zeros_like(W_Q)] * 2)
        Q = x @ (W_Q + dQ).T + b_Q
        K = np.concatenate([p_K, x]) @ W_K.T + b_K
        V = np.concatenate([p_V, x]) @ (W_V + dV).T + b_V
        heads = []
        for columns in np.split(np.arange(Q.shape[1]), net.layers[index].self_attention.heads):
            shares = softmax(Q[:, columns] @ K[:, columns].T / len(columns) ** 0.5, axis=1)
            heads.append(shares @ V[:, columns])
        h = h + np.hstack(heads) @ own["self_attention.out_proj.weight"].T + own["self_attention.out_proj.bias"]
        hidden = norm(h, f"layers.{index}.ln_2") @ own["mlp.0.weight"].T + own["mlp.0.bias"]
        gelu = hidden * (1 + erf(hidden / 2**0.5)) / 2
        h = h + gelu @ own["mlp.2.weight"].T + own["mlp.2.bias"]
    return norm(h, "norm")


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("rank", [None, 3])
def test_each_samples_own_prefixes_reach_keys_and_values(batch: int, rank: int | None) -> None:
    net = redrawn(build()).double()
    tokens = drawn(batch, 7, 16).double()
    prefixes = {0: drawn(2, batch, 3, 16, seed=1).double(), 1: drawn(2, batch, 4, 16, seed=2).double()}
    lora, added = None, {}
    if rank:
        lora = LoraUpdate(drawn(2, rank, 16, seed=3).double(), drawn(2, 16, rank, seed=4).double(), scale=0.5)
        added = {1: list((0.5 * lora.B @ lora.A).numpy())}
    attached = {
        0: Attached(prefix=(prefixes[0][0], prefixes[0][1])),
        1: Attached(prefix=(prefixes[1][0], prefixes[1][1]), lora=lora),
    }
    with torch.no_grad():
        output = net.encode(tokens, attached, read=7).numpy()
    for sample in range(batch):
        own = {layer: [p[sample].numpy() for p in pair] for layer, pair in prefixes.items()}
        np.testing.assert_allclose(output[sample], by_hand(net, tokens[sample].numpy(), own, added), atol=1e-10)


def test_keys_and_values_enter_after_their_matrices() -> None:
    """As in the release: K and V beside W_K h and W_V h. Prefixes whose products they are do the same."""
    net, tokens = redrawn(build()).double(), drawn(2, 7, 16).double()
    prefix = drawn(2, 2, 3, 16, seed=1).double()
    attention = net.layers[1].self_attention
    _, W_K, W_V = attention.in_proj.weight.detach().numpy().reshape(3, 16, 16)
    _, b_K, b_V = attention.in_proj.bias.detach().numpy().reshape(3, 16)
    K, V = (torch.from_numpy(p.numpy() @ W.T + b) for p, W, b in zip(prefix, (W_K, W_V), (b_K, b_V), strict=True))
    with torch.no_grad():
        before = net.encode(tokens, {1: Attached(prefix=(prefix[0], prefix[1]))}, read=7)
        after = net.encode(tokens, {1: Attached(keys_values=(K, V))}, read=7)
    torch.testing.assert_close(after, before, atol=1e-12, rtol=0)


@pytest.mark.parametrize("read", [1, 3])
def test_of_the_last_layer_only_what_is_read_is_computed(read: int) -> None:
    net, tokens = redrawn(build()).double(), drawn(2, 7, 16).double()
    more = {1: Attached(tokens=drawn(2, 4, 16, seed=1).double())}
    calls = []
    net.layers[-1].mlp.register_forward_pre_hook(lambda module, inputs: calls.append(inputs[0].shape[1]))
    for attached in ({}, more):
        whole, part = net.encode(tokens, attached, read=7), net.encode(tokens, attached, read=read)
        torch.testing.assert_close(part, whole[:, :read], atol=1e-12, rtol=0)
    assert calls == [7, read, 7, read]


def test_with_nothing_attached_features_are_the_class_token() -> None:
    net = redrawn(build()).double()
    x = drawn(2, 3, 32, 32).double()
    with torch.no_grad():
        features, tokens = net(x), net.embed(x).numpy()
    expected = [by_hand(net, one, {}, {})[0] for one in tokens]
    np.testing.assert_allclose(features.numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("older", [False, True])
def test_with_torchvisions_weights_it_is_torchvisions(tmp_path: Path, older: bool) -> None:
    theirs = theirs_of()
    weights = {**theirs.state_dict(), "heads.head.weight": torch.zeros(1000, 16), "heads.head.bias": torch.zeros(1000)}
    if older:
        weights = {n.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): w for n, w in weights.items()}
    ours = build()
    load_weights(ours, saved(weights, tmp_path))
    x = drawn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=0)


def test_vit_b_16_is_within_reach() -> None:
    with torch.device("meta"):
        ours = build((3, 224, 224), **VIT_B_16)
        theirs = import_torchvision().models.vit_b_16()
    read = {name: w for name, w in ours.rename_tensors(theirs.state_dict()).items() if not name.startswith("heads.")}
    assert {n: w.shape for n, w in read.items()} == {n: w.shape for n, w in ours.state_dict().items()}
    # torchvision's page gives 86,567,656 with a head of 1000 classes.
    assert sum(p.numel() for p in ours.parameters()) == 86_567_656 - 769 * 1000


def timms_shapes(classes: int, depth: int, D: int, mlp: int, patch: int, tokens: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of timm's vision transformer, with the head and the layer before it of older files."""
    block = {
        "norm1": (D,),
        "attn.qkv": (3 * D, D),
        "attn.proj": (D, D),
        "norm2": (D,),
        "mlp.fc1": (mlp, D),
        "mlp.fc2": (D, mlp),
    }
    layers = {
        "patch_embed.proj": (D, 3, patch, patch),
        **{f"blocks.{index}.{name}": shape for index in range(depth) for name, shape in block.items()},
        "norm": (D,),
        "pre_logits.fc": (D, D),
        "head": (classes, D),
    }
    both = {name: {f"{name}.weight": shape, f"{name}.bias": shape[:1]} for name, shape in layers.items()}
    return {
        "cls_token": (1, 1, D),
        "pos_embed": (1, tokens, D),
        **{name: shape for parts in both.values() for name, shape in parts.items()},
    }


def timms_block(tokens: np.ndarray, weights: dict[str, np.ndarray], heads: int) -> np.ndarray:
    """Tokens [S, D] through a block: h + attention(norm1(h)), then h + fc2(gelu(fc1(norm2(h)))); its own arithmetic."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(1, keepdims=True)
        scale = np.sqrt((centred**2).mean(1, keepdims=True) + 1e-6)
        return centred / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return np.einsum("sd,od->so", x, weights[f"{name}.weight"]) + weights[f"{name}.bias"]

    S, D = tokens.shape
    q, k, v = linear(norm(tokens, "norm1"), "attn.qkv").reshape(S, 3, heads, D // heads).transpose(1, 2, 0, 3)
    shares = np.exp(np.einsum("hsd,htd->hst", q, k) / np.sqrt(D // heads))
    shares /= shares.sum(2, keepdims=True)
    h = tokens + linear(np.einsum("hst,htd->shd", shares, v).reshape(S, D), "attn.proj")
    hidden = linear(norm(h, "norm2"), "mlp.fc1")
    return h + linear(hidden / 2 * (1 + erf(hidden / np.sqrt(2))), "mlp.fc2")


@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta parameter")
@pytest.mark.parametrize("head", [True, False])
def test_timms_vit_b_16_of_imagenet_21k_fits(tmp_path: Path, head: bool) -> None:
    shapes = timms_shapes(21_843, 12, 768, 3072, 16, 1 + 14**2)
    if not head:
        shapes = {name: s for name, s in shapes.items() if not name.startswith(("head.", "pre_logits."))}
    weights = {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}  # without memory of their own
    torch.save(weights, tmp_path / "vit.pth")
    with torch.device("meta"):
        ours = build((3, 224, 224), **VIT_B_16)
    fill(ours, read_source(tmp_path / "vit.pth"), tmp_path / "vit.pth")
    # timm's page gives 85.8 million parameters without a head.
    assert sum(np.prod(s) for n, s in shapes.items() if not n.startswith(("head.", "pre_logits."))) == 85_798_656
    assert sum(p.numel() for p in ours.parameters()) == 85_798_656


def test_with_timms_weights_a_block_is_timms(tmp_path: Path) -> None:
    shapes = timms_shapes(7, 2, 16, 32, 8, 1 + 4**2)
    weights = {name: 0.3 * drawn(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}
    net = build()
    load_weights(net, saved(weights, tmp_path))
    tokens = drawn(1, 5, 16).double()
    for index, layer in enumerate(net.double().layers):
        prefix = f"blocks.{index}."
        own = {n.removeprefix(prefix): w.double().numpy() for n, w in weights.items() if n.startswith(prefix)}
        with torch.no_grad():
            output = layer(tokens, Attached(), 5)[0].numpy()
        np.testing.assert_allclose(output, timms_block(tokens[0].numpy(), own, heads=2), atol=1e-12)
    assert torch.equal(net.embed.positions.float(), weights["pos_embed"])
    assert torch.equal(net.norm.bias.float(), weights["norm.bias"])


def test_its_own_names_load_again(tmp_path: Path) -> None:
    first, again = redrawn(build()), build()
    load_weights(again, saved({f"backbone.{name}": w for name, w in first.state_dict().items()}, tmp_path))
    assert all(torch.equal(w, first.state_dict()[name]) for name, w in again.state_dict().items())


def test_it_starts_as_torchvisions() -> None:
    """The spread of every tensor, over 20 draws of each."""
    torch.manual_seed(0)
    spread: dict[str, list[list[float]]] = {}
    for _ in range(20):
        theirs = import_torchvision().models.VisionTransformer(32, 8, 2, 2, 16, 32)
        ours = build()
        for whose, net in enumerate((ours.rename_tensors(theirs.state_dict()), ours.state_dict())):
            for name in ours.state_dict():
                spread.setdefault(name, [[], []])[whose].append(float(net[name].square().mean()))
    for name, (mean_theirs, mean_ours) in spread.items():
        assert np.mean(mean_ours) == pytest.approx(np.mean(mean_theirs), rel=0.2), name


@pytest.mark.parametrize("size", [16, 48])
def test_positions_of_another_image_size_are_interpolated_as_torchvision_does(tmp_path: Path, size: int) -> None:
    weights, other = theirs_of(32).state_dict(), theirs_of(size)
    ours = build((3, size, size))
    load_weights(ours, saved(weights, tmp_path))
    resize = import_torchvision().models.vision_transformer.interpolate_embeddings
    other.load_state_dict(resize(size, 8, dict(weights)))
    x = drawn(2, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), other(x), atol=1e-5, rtol=0)


def test_the_class_tokens_position_and_the_corners_stay() -> None:
    old = drawn(1, 1 + 9, 4)
    new = resize_positions(old, (2, 5))
    assert new.shape == (1, 1 + 10, 4)
    assert torch.equal(new[:, 0], old[:, 0])
    corners_before, corners_after = old[0, 1:].view(3, 3, 4)[::2, ::2], new[0, 1:].view(2, 5, 4)[::1, ::4]
    torch.testing.assert_close(corners_after, corners_before)


def test_blocks_are_all_of_it_in_the_order_of_the_forward_pass() -> None:
    net, order = build(), []
    for name in net.blocks:
        net.get_submodule(name).register_forward_hook(lambda *_, name=name: order.append(name))
    net(drawn(1, 3, 32, 32))
    assert tuple(order) == net.blocks == ("embed", "layers.0", "layers.1", "norm")
    assert all(name.startswith(tuple(f"{block}." for block in net.blocks)) for name in net.state_dict())


@pytest.mark.parametrize(
    ("settings", "shape", "line"),
    [
        ({"patch": 8}, (3, 28, 28), "model.patch: patches of 8 pixels do not divide images of 28x28. .*patch: 7,"),
        ({"patch": 8}, (1, 8, 12), "model.patch: patches of 8 pixels do not divide images of 8x12. .*patch: 4,"),
        ({"patch": 64}, (3, 32, 32), "model.patch: patches of 64 pixels do not divide images of 32x32. .*patch: 32,"),
        ({"attention_heads": 3}, (3, 32, 32), "model.attention_heads: 3 heads do not divide model.width: 16."),
    ],
)
def test_sizes_that_do_not_divide_are_refused(settings: dict[str, int], shape: tuple[int, ...], line: str) -> None:
    with pytest.raises(UserError, match=f"^{line}"):
        build(shape, **settings)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"patch": 4}, "embed.patches.weight is 16x3x8x8 in the file and 16x3x4x4 here.* Patches follow model.patch"),
        ({"mlp_width": 64}, "layers.0.mlp.0.weight is 32x16 in the file.* The perceptrons follow model.mlp_width"),
        ({"depth": 3}, "layers.2.ln_1.weight is missing"),
    ],
)
def test_a_file_of_another_size_is_refused(tmp_path: Path, settings: dict[str, int], line: str) -> None:
    file = saved(theirs_of().state_dict(), tmp_path)
    with pytest.raises(UserError, match=line):
        load_weights(build(**settings), file)


def test_positions_of_no_square_are_refused(tmp_path: Path) -> None:
    file = saved(build((3, 16, 24)).state_dict(), tmp_path)
    with pytest.raises(UserError, match=r"embed\.positions is 1x7x16 in the file and 1x17x16 here"):
        load_weights(build(), file)
