"""ConViT with a class-attention block above: the network of DyTox (d'Ascoli et al. 2021; Douillard et al. 2022).

The encoder's layers mix attention by content with attention by place, a gate g for each head (d'Ascoli et al., eq. 7):

    A = (1 - sigma(g)) softmax(q k^T / sqrt(d)) + sigma(g) softmax(v_pos r)       r = (dx, dy, dx^2 + dy^2)

where v_pos begins so that head (i, j) of a square looks at one neighbour, and W_V at the identity. The decoder's block
(CaiT, Touvron et al. 2021) lets one token attend to itself and all patches; the features are that token after the last
norm. A method may let tokens of its own attend (`encode`, `decoder`). DyTox's size is `width: 384, depth: 5,
attention_heads: 12`, with patches of 4 for 32 pixels.
"""

import math

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from fclmodels.backbones.base import Backbone, FeatureNet, Share
from fclmodels.errors import UserError
from fclmodels.settings.schema import BackboneSettings

STD = 0.02  # of everything that is drawn


class Convit(Backbone):
    """A vision transformer whose heads begin as convolutions, with one token that attends to its patches."""

    name = "convit"

    class Settings(BackboneSettings):
        patch: PositiveInt = Field(4, description="side of a patch in pixels, which divides the images' sides")
        width: PositiveInt = Field(384, description="D, the width of a token; features are as many")
        depth: PositiveInt = Field(5, le=1000, description="layers of the encoder, below the block of the token")
        attention_heads: PositiveInt = Field(12, description="heads of the attention, which divide the width")
        mlp_ratio: PositiveInt = Field(4, le=64, description="hidden units of each perceptron, in widths")
        drop_path: Share = Field(
            0.1, description="share of samples for which the last block is left out in training; less in those below"
        )

    settings: Settings

    def build(self, shape: tuple[int, ...]) -> FeatureNet:
        channels, height, width = shape
        settings = self.settings
        if height % settings.patch or width % settings.patch:
            raise UserError(
                f"model.patch: patches of {settings.patch} pixels do not divide images of {height}x{width}. "
                "Use another model.patch, or set data.size."
            )
        if settings.width % settings.attention_heads:
            raise UserError(
                f"model.attention_heads: {settings.attention_heads} heads do not divide model.width: {settings.width}."
            )
        return ConvitNet(channels, (height // settings.patch, width // settings.patch), settings)


class ConvitNet(FeatureNet):
    """Images [B, C, H, W] to the token [B, D] that has attended to all patches."""

    def __init__(self, channels: int, grid: tuple[int, int], settings: Convit.Settings) -> None:
        super().__init__()
        self.features, width = settings.width, settings.width
        self.blocks = ("embed", *(f"layers.{index}" for index in range(settings.depth)), "decoder")
        self.embed = PatchEmbed(channels, grid, settings.patch, width)
        shares = torch.linspace(0, settings.drop_path, settings.depth + 1, device="cpu").tolist()
        heads, hidden = settings.attention_heads, settings.mlp_ratio * width
        self.layers = nn.ModuleList(
            Residual(GatedAttention(width, heads, grid), width, hidden, share) for share in shares[:-1]
        )
        self.decoder = Decoder(width, heads, hidden, shares[-1])

    def encode(self, x: Tensor) -> Tensor:
        """Return the patches [B, N, D] after the encoder."""
        h: Tensor = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return h

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.decoder.norm(self.decoder(self.decoder.token, self.encode(x)))
        return features


class PatchEmbed(nn.Module):
    """Images to patches [B, N, D], by rows; positions are added."""

    def __init__(self, channels: int, grid: tuple[int, int], patch: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, math.prod(grid), width), std=STD))

    def forward(self, x: Tensor) -> Tensor:
        patches: Tensor = self.patches(x)
        return patches.flatten(2).transpose(1, 2) + self.positions


class Decoder(nn.Module):
    """The class-attention block, its own token, and the norm of what comes out."""

    def __init__(self, width: int, heads: int, hidden: int, drop_path: float) -> None:
        super().__init__()
        self.token = nn.Parameter(nn.init.trunc_normal_(torch.empty(width), std=STD))
        self.block = Residual(ClassAttention(width, heads), width, hidden, drop_path)
        self.norm = nn.LayerNorm(width)

    def forward(self, token: Tensor, patches: Tensor) -> Tensor:
        """Return a token [D] for each sample [B, D], after it has attended to itself and the patches [B, N, D]."""
        output: Tensor = self.block(torch.cat([token.expand(len(patches), 1, -1), patches], dim=1), read=1)
        return output[:, 0]


class Residual(nn.Module):
    """h + attention(norm(h)), then h + perceptron(norm(h)); in training each is left out for a share of samples."""

    def __init__(self, attention: nn.Module, width: int, hidden: int, drop_path: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attention = attention
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(draw_linear(width, hidden), nn.GELU(), draw_linear(hidden, width))
        self.drop_path = drop_path

    def forward(self, h: Tensor, read: int | None = None) -> Tensor:
        """Return the first `read` tokens (None: all) of the output for h [B, S, D]."""
        h = h[:, :read] + self.drop(self.attention(self.ln_1(h)))
        return h + self.drop(self.mlp(self.ln_2(h)))

    def drop(self, change: Tensor) -> Tensor:
        """Return a change [B, S, D] without some samples' in training, the others' scaled up by as much."""
        if not (self.training and self.drop_path):
            return change
        stays = torch.rand(len(change), 1, 1, device=change.device) >= self.drop_path
        return change * stays / (1 - self.drop_path)


class GatedAttention(nn.Module):
    """Attention by content and by place, mixed by a gate for each head."""

    offsets: Tensor

    def __init__(self, width: int, heads: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.heads = heads
        self.query_key = draw_linear(width, 2 * width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        nn.init.eye_(self.value.weight)
        self.out = draw_linear(width, width)
        self.place = draw_linear(3, heads)
        self.gate = nn.Parameter(torch.ones(heads))
        self.register_buffer("offsets", list_offsets(grid), persistent=False)
        side = math.isqrt(heads)
        centre = (side - 1) / 2 if side % 2 == 0 else side // 2
        with torch.no_grad():
            for row in range(side):
                for column in range(side):
                    looks_at = torch.tensor([2 * (column - centre), 2 * (row - centre), -1.0])
                    self.place.weight[row + side * column] = looks_at

    def forward(self, h: Tensor) -> Tensor:
        q, k = (split_heads(part, self.heads) for part in self.query_key(h).chunk(2, dim=-1))
        by_content = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        by_place = self.place(self.offsets).permute(2, 0, 1).softmax(-1)
        gate = self.gate.sigmoid()[:, None, None]
        mixed = (1 - gate) * by_content + gate * by_place
        attended: Tensor = self.out((mixed @ split_heads(self.value(h), self.heads)).transpose(1, 2).flatten(2))
        return attended


class ClassAttention(nn.Module):
    """Attention of the first token to all."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (draw_linear(width, width, bias=False) for _ in range(3))
        self.out = draw_linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in (self.query(h[:, :1]), self.key(h), self.value(h)))
        attended: Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return attended


def split_heads(h: Tensor, heads: int) -> Tensor:
    """Return h [B, S, D] as [B, heads, S, D / heads]."""
    return h.unflatten(-1, (heads, -1)).transpose(1, 2)


def list_offsets(grid: tuple[int, int]) -> Tensor:
    """Return (dx, dy, dx^2 + dy^2) from each patch to each other [N, N, 3], by rows of the grid."""
    rows, columns = grid
    y, x = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
    dx, dy = x[None] - x[:, None], y[None] - y[:, None]
    return torch.stack([dx, dy, dx**2 + dy**2], dim=-1).float()


def draw_linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """Return a linear layer with weights from a narrow normal law, cut off, and no bias at first."""
    linear = nn.Linear(inputs, outputs, bias=bias)
    nn.init.trunc_normal_(linear.weight, std=STD)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear
