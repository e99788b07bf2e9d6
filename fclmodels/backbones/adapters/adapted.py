"""A frozen backbone with an adapter: what all kinds of adapters share, and what those on a vit's layers share.

An adapter is a mapping of JSON values: its "kind", and that kind's `Settings`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.vit import Attached, VitNet
from fclmodels.errors import UserError
from fclmodels.settings.base import Settings as BaseSettings

PROMPTS = "backbone.prompts"  # of an adapter's tensors in a network; those that a task adds are PROMPTS.<task>.*


@dataclass(frozen=True)
class Features:
    """Features of a batch, and the distance of its queries from the keys selected for them."""

    features: Tensor  # [B, D]
    distance: Tensor | None = None  # mean over samples of the sum of 1 - cosine (eq. 5); None without keys


class Adapted(FeatureNet):
    """Kind none: the features of the frozen backbone. The others add `prompts`, a module of all that is trained."""

    kind: ClassVar[str] = "none"
    uses_queries: ClassVar[bool] = True
    """True where features or selected prompts depend on the samples' queries."""
    depends_on_batch = False
    """True where a sample's features depend on the others of its batch."""
    needs_transformer: ClassVar[bool] = False

    class Settings(BaseSettings):
        """The settings of a kind."""

    def __init__(self, frozen: FeatureNet, settings: BaseSettings, tasks: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False).eval()
        # The backbone's own names, as in model.fresh.
        self.features, self.blocks = frozen.features, frozen.blocks

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.extract(x).features

    def extract(
        self, x: Tensor, task: int | None = None, queries: Tensor | None = None, below: Tensor | None = None
    ) -> Features:
        """Return the features of a batch.

        task: that of the batch, if known; queries and below: results of `query(x)` and `run_below(x)`, if available.
        """
        return Features(self.query(x) if queries is None else queries)

    @classmethod
    def grow(
        cls, weights: dict[str, Tensor], settings: Any, old_tasks: int, new_tasks: int, seed: int
    ) -> dict[str, Tensor]:
        """Return the weights of a network with what each new task adds; a draw depends on the seed and the task."""
        return weights

    @torch.no_grad()
    def query(self, x: Tensor) -> Tensor:
        """Return features [B, D] of the frozen backbone with nothing attached."""
        features: Tensor = self.frozen(x)
        return features


class AdaptedVit(Adapted):
    """A vit with tensors attached to its layers."""

    needs_transformer = True
    frozen: VitNet
    first = 0
    """The first layer with something attached."""

    def __init__(self, frozen: FeatureNet, settings: BaseSettings, tasks: int) -> None:
        if not isinstance(frozen, VitNet):
            raise UserError("model.backbone: prompts and LoRA attach to the layers of a vit. Use model.backbone: vit.")
        super().__init__(frozen, settings, tasks)

    def refuse_layers(self, setting: str, layers: Sequence[int]) -> None:
        """Raise UserError for layers that the backbone does not have, or that are named twice."""
        last = len(self.frozen.layers) - 1
        for index, layer in enumerate(layers):
            if layer > last:
                raise UserError(f"{setting}: there is no layer {layer}, this vit has 0 to {last}. See model.depth.")
            if layer in layers[:index]:
                raise UserError(f"{setting}: layer {layer} is named twice. Name it once.")

    @torch.no_grad()
    def run_below(self, x: Tensor) -> Tensor:
        """Return the tokens [B, S, D] that enter the first layer with something attached; training changes none."""
        return self.frozen.run_below(x, self.first)

    @property
    def numbers_per_sample(self) -> int:
        """Numbers in the tokens of a sample."""
        return (1 + math.prod(self.frozen.grid)) * self.features

    def encode(self, tokens: Tensor, attached: Mapping[int, Attached] = {}, read: int = 1) -> Tensor:
        """Return the first `read` tokens after that layer and all above, from its tokens or prompts and tokens."""
        return self.frozen.encode(tokens, attached, self.first, read)
