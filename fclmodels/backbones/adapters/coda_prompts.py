"""CODA-Prompt's pool (Smith et al., CVPR 2023): a sample's prompt is a weighted sum of components, some for each task.

In each of some layers: alpha_m = cos(q * A_m, K_m) for the query q, attention A_m and key K_m of component m, and the
prompt is sum_m alpha_m P_m, whose first half of rows joins the keys, the rest the values, after their projection.
Components of all tasks so far take part. `attention: softmax` takes softmax(A_m) over its D numbers, as Fed-CPrompt's
release does.
"""

from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fclmodels.backbones.adapters.adapted import PROMPTS, AdaptedVit, Features
from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.vit import Attached
from fclmodels.randomness import make_generator as keyed
from fclmodels.settings.base import Settings as BaseSettings

FIRST = 5  # layers with prompts, where none are named


class CodaVit(AdaptedVit):
    """Weighted sums of components as prefixes; features are the class token."""

    kind = "coda"
    prompts: nn.ModuleList

    class Settings(BaseSettings):
        components: PositiveInt = Field(10, le=1000, description="components that each task adds in each layer")
        length: PositiveInt = Field(8, le=1024, multiple_of=2, description="L, rows of a prompt, half of them keys")
        prompt_layers: tuple[NonNegativeInt, ...] | None = Field(
            None, min_length=1, description="layers, from 0, that have prompts; null: the first five"
        )
        attention: Literal["plain", "softmax"] = Field(
            "plain", description="A as it is (CODA-Prompt), or its softmax (Fed-CPrompt's release)"
        )

    def __init__(self, frozen: FeatureNet, settings: Settings, tasks: int) -> None:
        super().__init__(frozen, settings, tasks)
        count = min(FIRST, len(self.frozen.layers))
        self.layers = tuple(range(count)) if settings.prompt_layers is None else settings.prompt_layers
        self.refuse_layers("prompt_layers", self.layers)
        self.first, self.uses_softmax = min(self.layers), settings.attention == "softmax"
        shape = len(self.layers), settings.components, settings.length, frozen.features
        self.prompts = nn.ModuleList(Components(*shape) for _ in range(tasks))

    @classmethod
    def grow(
        cls, weights: dict[str, Tensor], settings: Any, old_tasks: int, new_tasks: int, seed: int
    ) -> dict[str, Tensor]:
        """Return the weights with each new task's components: drawn, and orthogonal to earlier ones while that can be.

        Of each layer alone, flattened; fed-mammoth's CODA starts so, by Gram and Schmidt.
        """
        for task in range(old_tasks, new_tasks):
            for part in ("P", "K", "A"):
                earlier = [weights[f"{PROMPTS}.{t}.{part}"] for t in range(task)]
                random = keyed(seed, "components", part, task)
                drawn = torch.empty(earlier[0].shape).uniform_(generator=random).to(earlier[0])
                weights[f"{PROMPTS}.{task}.{part}"] = orthogonalise(drawn, earlier)
        return weights

    def extract(
        self, x: Tensor, task: int | None = None, queries: Tensor | None = None, below: Tensor | None = None
    ) -> Features:
        queries = self.query(x) if queries is None else queries
        P, K, A = (torch.cat([getattr(of, part) for of in self.prompts], dim=1) for part in ("P", "K", "A"))
        A = A.softmax(-1) if self.uses_softmax else A
        attached = {}
        for index, layer in enumerate(self.layers):
            prompt = mix_components(queries, P[index], K[index], A[index])
            keys, values = prompt.chunk(2, dim=1)
            attached[layer] = Attached(keys_values=(keys, values))
        output = self.encode(self.run_below(x) if below is None else below, attached)
        return Features(output[:, 0])


class Components(nn.Module):
    """P [layers, E, L, D], K [layers, E, D] and A [layers, E, D] of a task's E components."""

    def __init__(self, layers: int, count: int, length: int, width: int) -> None:
        super().__init__()
        for part, shape in (("P", (length, width)), ("K", (width,)), ("A", (width,))):
            self.register_parameter(part, nn.Parameter(orthogonalise(torch.rand(layers, count, *shape), [])))


def mix_components(queries: Tensor, P: Tensor, K: Tensor, A: Tensor) -> Tensor:
    """Return prompts [B, L, D]: sum_m cos(q * A_m, K_m) P_m, for q [B, D], P [E, L, D], K [E, D] and A [E, D]."""
    # q * A_m for all m is never made: its product with K_m and its square are sums over D of q A K and q^2 A^2.
    products = queries @ F.normalize(K, dim=1).mul(A).T
    lengths = (queries.square() @ A.square().T).sqrt().clamp(min=1e-12)
    return torch.einsum("bm,mld->bld", products / lengths, P)


def orthogonalise(drawn: Tensor, earlier: list[Tensor]) -> Tensor:
    """Return drawn components [layers, E, ...] with length 1, orthogonal in each layer to each other and to earlier.

    Where there are more components than numbers in one, the last ones are only of length 1.
    """
    new = drawn.flatten(2)
    before = torch.cat([old.flatten(2) for old in earlier], dim=1) if earlier else new[:, :0]
    start, room = before.shape[1], new.shape[2]
    rows = torch.cat([before, new], dim=1)[:, :room]
    count = max(0, rows.shape[1] - start)
    directions = torch.linalg.qr(rows.mT).Q.mT[:, start : start + count]
    return torch.cat([directions, F.normalize(new[:, count:], dim=2)], dim=1).view_as(drawn)
