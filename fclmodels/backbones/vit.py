"""A vision transformer (Dosovitskiy et al. 2021): torchvision's and timm's ViT-B/16 load; or any smaller one.

ViT-B/16 is `patch: 16, width: 768, depth: 12, attention_heads: 12, mlp_width: 3072`. Methods attach tokens (PIP eq. 2),
prefixes (eq. 3 and 4), LoRA (Hu et al. 2021) and bottlenecks (AdaptFormer) to its layers (prompt_adapters.py).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fclmodels.backbones.base import Backbone, FeatureNet
from fclmodels.errors import UserError
from fclmodels.settings.schema import BackboneSettings

EPS = 1e-6
# Parts of torchvision's and timm's names, and ours; linear_1 and linear_2 are in torchvision's older files. timm's qkv
# has W_Q, W_K and W_V below each other, as in_proj has.
OWN_NAMES = {
    r"^(class_token|cls_token)$": "embed.class_token",
    r"^(conv_proj|patch_embed\.proj)\.": "embed.patches.",
    r"^(encoder\.pos_embedding|pos_embed)$": "embed.positions",
    r"^(encoder\.layers\.encoder_layer_|blocks\.)": "layers.",
    r"^encoder\.ln\.": "norm.",
    r"\.norm([12])\.": r".ln_\1.",
    r"\.in_proj_": ".in_proj.",
    r"\.attn\.qkv\.": ".self_attention.in_proj.",
    r"\.attn\.proj\.": ".self_attention.out_proj.",
    r"\.mlp\.(linear_1|fc1)\.": ".mlp.0.",
    r"\.mlp\.(linear_2|3|fc2)\.": ".mlp.2.",
}


class Vit(Backbone):
    """A vision transformer of any size, for images and prompts; torchvision's and timm's ViT-B/16 load."""

    name = "vit"

    class Settings(BackboneSettings):
        patch: PositiveInt = Field(4, description="side of a patch in pixels, which divides the images' sides")
        width: PositiveInt = Field(192, description="D, the width of a token; features are as many")
        depth: PositiveInt = Field(6, le=1000, description="number of layers, each attention and a perceptron")
        attention_heads: PositiveInt = Field(3, description="heads of the attention, which divide the width")
        mlp_width: PositiveInt = Field(768, description="hidden units of each layer's perceptron")

    settings: Settings

    def build(self, shape: tuple[int, ...]) -> FeatureNet:
        channels, height, width = shape
        patch, heads = self.settings.patch, self.settings.attention_heads
        if height % patch or width % patch:
            nearest = max(side for side in range(1, patch) if height % side == width % side == 0)
            raise UserError(
                f"model.patch: patches of {patch} pixels do not divide images of {height}x{width}. "
                f"Use model.patch: {nearest}, or set data.size."
            )
        if self.settings.width % heads:
            raise UserError(f"model.attention_heads: {heads} heads do not divide model.width: {self.settings.width}.")
        return VitNet(channels, (height // patch, width // patch), self.settings)


@dataclass(frozen=True)
class LoraUpdate:
    """dW = scale * B A, added to W_Q and W_V: A [2, r, D] and B [2, D, r], for Q and V in this order."""

    A: Tensor
    B: Tensor
    scale: float


@dataclass(frozen=True)
class Bottleneck:
    """scale * (U relu(D h + d) + u), added to a layer's perceptron: D [m, width], d [m], U [width, m], u [width]."""

    down: Tensor
    down_bias: Tensor
    up: Tensor
    up_bias: Tensor
    scale: float

    def run(self, h: Tensor) -> Tensor:
        """Return what it adds, for the perceptron's input h [B, S, width] before its norm."""
        return self.scale * F.linear(F.linear(h, self.down, self.down_bias).relu(), self.up, self.up_bias)


@dataclass(frozen=True)
class Attached:
    """Tensors that a method attaches to one layer, with a row for each sample."""

    tokens: Tensor | None = None  # [B, L, D], before the layer's input; their outputs are dropped
    prefix: tuple[Tensor, Tensor] | None = None  # (p_K, p_V), each [B, L, D], to which W_K and W_V are applied
    keys_values: tuple[Tensor, Tensor] | None = None  # (K, V), each [B, L, D], beside those that W_K and W_V give
    lora: LoraUpdate | None = None
    bottleneck: Bottleneck | None = None


class VitNet(FeatureNet):
    """Images [B, C, H, W] to the class token [B, D] after the last norm."""

    divisible = True

    hints: ClassVar = {
        "embed.patches.weight": "Patches follow model.patch, model.width and data.channels.",
        "layers.0.mlp.0.weight": "The perceptrons follow model.mlp_width and model.width.",
    }

    def __init__(self, channels: int, grid: tuple[int, int], settings: Vit.Settings) -> None:
        super().__init__()
        self.features, self.grid = settings.width, grid
        self.blocks = ("embed", *(f"layers.{index}" for index in range(settings.depth)), "norm")
        self.embed = Embed(channels, grid, settings.patch, settings.width)
        self.layers = nn.ModuleList(
            EncoderLayer(settings.width, settings.attention_heads, settings.mlp_width) for _ in range(settings.depth)
        )
        self.norm = nn.LayerNorm(settings.width, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(self.embed(x))[:, 0]

    def run_first(self, x: Tensor, blocks: int) -> Tensor:
        return self.run_below(x, min(blocks - 1, len(self.layers)))

    def run_rest(self, h: Tensor, blocks: int) -> Tensor:
        return self.encode(h, first=min(blocks - 1, len(self.layers)))[:, 0]

    def run_below(self, x: Tensor, first: int) -> Tensor:
        """Return the tokens [B, S, D] that enter layer `first`, from images [B, C, H, W]."""
        tokens: Tensor = self.embed(x)
        for layer in list(self.layers)[:first]:
            tokens = layer(tokens, Attached(), tokens.shape[1])
        return tokens

    def encode(self, tokens: Tensor, attached: Mapping[int, Attached] = {}, first: int = 0, read: int = 1) -> Tensor:
        """Return the first `read` tokens [B, read, D] after all layers from `first` on and the last norm.

        tokens [B, S, D] enter layer `first`. The last layer computes only the tokens that are returned.
        """
        last = len(self.layers) - 1
        for index, layer in list(enumerate(self.layers))[first:]:
            tokens = layer(tokens, attached.get(index, Attached()), read if index == last else tokens.shape[1])
        normed: Tensor = self.norm(tokens)
        return normed

    def rename_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with torchvision's names, timm's or ours by ours, positions resized to this grid."""
        own = {_translate_name(name): tensor for name, tensor in tensors.items()}
        positions = own.get("embed.positions")
        if positions is not None and positions.ndim == 3 and positions.shape[1] != self.embed.positions.shape[1]:
            own["embed.positions"] = resize_positions(positions, self.grid)
        return own


class Embed(nn.Module):
    """Images [B, C, H, W] to tokens [B, 1 + N, D]: the class token, then N patches by rows; positions are added."""

    def __init__(self, channels: int, grid: tuple[int, int], patch: int, width: int) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + math.prod(grid), width))
        nn.init.trunc_normal_(self.patches.weight, std=(channels * patch**2) ** -0.5)
        _zero_bias(self.patches)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        return torch.cat([self.class_token.expand(len(x), -1, -1), patches], dim=1) + self.positions


class EncoderLayer(nn.Module):
    """h + attention(norm(h)), then h + perceptron(norm(h))."""

    def __init__(self, width: int, heads: int, mlp_width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=EPS)
        self.self_attention = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width, eps=EPS)
        wider, back = nn.Linear(width, mlp_width), nn.Linear(mlp_width, width)
        self.mlp = nn.Sequential(wider, nn.GELU(), back)
        for linear in (wider, back):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.normal_(linear.bias, std=1e-6)

    def forward(self, h: Tensor, attached: Attached, read: int) -> Tensor:
        """Return the first `read` tokens [B, read, D] of the output for h [B, S, D]."""
        offset = 0
        if attached.tokens is not None:
            h, offset = torch.cat([attached.tokens, h], dim=1), attached.tokens.shape[1]
        rows = slice(offset, offset + read)
        h = h[:, rows] + self.self_attention(self.ln_1(h), attached, rows)
        output: Tensor = h + self.mlp(self.ln_2(h))
        return output if attached.bottleneck is None else output + attached.bottleneck.run(h)


class Attention(nn.Module):
    """Multi-head self-attention of h [B, S, D] (PIP eq. 4); `in_proj` holds W_Q, W_K and W_V, one below the other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj.weight)
        _zero_bias(self.in_proj)
        _zero_bias(self.out_proj)

    def forward(self, h: Tensor, attached: Attached, rows: slice) -> Tensor:
        """Return the attention of the tokens in `rows` to all of h [B, S, D]."""
        q, k, v = self.in_proj(h).chunk(3, dim=-1)
        value_inputs = h
        if attached.prefix is not None:  # eq. 3: keys of [p_K; h], values of [p_V; h], queries of h
            p_K, p_V = attached.prefix
            (_, W_K, W_V), (_, b_K, b_V) = self.in_proj.weight.chunk(3), self.in_proj.bias.chunk(3)
            k = torch.cat([F.linear(p_K, W_K, b_K), k], dim=1)
            v = torch.cat([F.linear(p_V, W_V, b_V), v], dim=1)
            value_inputs = torch.cat([p_V, h], dim=1)
        if attached.keys_values is not None:
            k, v = (torch.cat(pair, dim=1) for pair in zip(attached.keys_values, (k, v), strict=True))
        if attached.lora is not None:
            (A_Q, A_V), (B_Q, B_V), scale = attached.lora.A, attached.lora.B, attached.lora.scale
            q = q + scale * F.linear(F.linear(h, A_Q), B_Q)
            v = v + scale * F.linear(F.linear(value_inputs, A_V), B_V)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q[:, rows], k, v))
        attended: Tensor = self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return attended


def resize_positions(positions: Tensor, grid: tuple[int, int]) -> Tensor:
    """Resize positions [1, 1 + side^2, D] to another grid, bicubic like torchvision; the class token's stays.

    Positions of a grid that is not square stay as they are, and then do not fit.
    """
    token, patches = positions.float().split([1, positions.shape[1] - 1], dim=1)
    side = math.isqrt(patches.shape[1])
    if side == 0 or side**2 != patches.shape[1]:
        return positions
    square = patches.unflatten(1, (side, side)).permute(0, 3, 1, 2)
    resized = F.interpolate(square, size=grid, mode="bicubic", align_corners=True)
    return torch.cat([token, resized.flatten(2).transpose(1, 2)], dim=1)


def _translate_name(name: str) -> str:
    for pattern, own_part in OWN_NAMES.items():
        name = re.sub(pattern, own_part, name)
    return name


def _zero_bias(layer: nn.Linear | nn.Conv2d) -> None:
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
