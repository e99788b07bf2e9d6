"""Low-rank changes of a frozen transformer's linear maps, a pair of factors for each task: W + scale sum_t B_t A_t.

Of a vit or of an encoder of texts. The maps are those of queries, keys and values, of the attention's output, and the
two of the perceptron. The changed weights are computed once a batch, so that a model that is served has them merged.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn

from fclmodels.backbones.adapters.adapted import PROMPTS, Adapted, Features
from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.vit import VitNet
from fclmodels.errors import UserError
from fclmodels.randomness import make_generator as keyed
from fclmodels.settings.base import Settings as BaseSettings

Target = Literal["attention-in", "query", "key", "value", "output", "perceptron-in", "perceptron-out"]
# Parts of the names of an encoder's linear layers (BERT and its kin, DistilBERT).
TEXT_NAMES: dict[Target, str] = {
    "query": r"attention\.(self\.query|q_lin)$",
    "key": r"attention\.(self\.key|k_lin)$",
    "value": r"attention\.(self\.value|v_lin)$",
    "output": r"attention\.(output\.dense|out_lin)$",
    "perceptron-in": r"(intermediate\.dense|ffn\.lin1)$",
    "perceptron-out": r"(?<!attention\.)(output\.dense|ffn\.lin2)$",
}
ATTENTION: list[Target] = ["query", "key", "value"]
VIT_ROWS: dict[Target, int] = {target: third for third, target in enumerate(ATTENTION)}  # thirds of in_proj
VIT_NAMES: dict[Target, str] = {
    "output": "self_attention.out_proj",
    "perceptron-in": "mlp.0",
    "perceptron-out": "mlp.2",
}


class LinearMap(NamedTuple):
    """A linear map [out, in] of the frozen network: rows of a layer's weight."""

    layer: str  # the name of the linear layer
    start: int  # its first row there
    out: int
    inputs: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.out)


class LowRank(Adapted):
    """Factors A [r, in] and B [out, r] for each task and map; features are the frozen network's with W + sum B A."""

    kind = "low-rank"
    uses_queries = False
    needs_transformer = True
    prompts: nn.ModuleList

    class Settings(BaseSettings):
        rank: PositiveInt = Field(8, le=1024, description="r, the rank of what a task adds to a map")
        scale: PositiveFloat = Field(1.0, le=1000, description="factor on B A (alpha / r of LoRA)")
        targets: tuple[Target, ...] = Field(
            ("query", "value"),
            min_length=1,
            description="the maps that change; attention-in: queries, keys and values, of a vit as one map",
        )
        layers: tuple[NonNegativeInt, ...] | None = Field(None, description="layers, from 0, in which; null: all")

    def __init__(self, frozen: FeatureNet, settings: Settings, tasks: int) -> None:
        super().__init__(frozen, settings, tasks)
        self.scale = settings.scale
        self.maps = list(find_maps(frozen, settings))
        self.prompts = nn.ModuleList(
            nn.ModuleList(Factors(of.inputs, of.out, settings.rank) for of in self.maps) for _ in range(tasks)
        )

    @classmethod
    def grow(
        cls, weights: dict[str, Tensor], settings: Any, old_tasks: int, new_tasks: int, seed: int
    ) -> dict[str, Tensor]:
        """Return the weights with drawn factors A and with B = 0 for each new task."""
        first = {
            name.removeprefix(f"{PROMPTS}.0."): w for name, w in weights.items() if name.startswith(f"{PROMPTS}.0.")
        }
        for task in range(old_tasks, new_tasks):
            for name, w in first.items():
                bound = w.shape[1] ** -0.5 if name.endswith("A") else 0.0
                random = keyed(seed, "low-rank", task, name)
                weights[f"{PROMPTS}.{task}.{name}"] = (
                    torch.empty(w.shape).uniform_(-bound, bound, generator=random).to(w)
                )
        return weights

    def extract(
        self, x: Tensor, task: int | None = None, queries: Tensor | None = None, below: Tensor | None = None
    ) -> Features:
        features: Tensor = torch.func.functional_call(self.frozen, self.merge(), (x,))
        return Features(features)

    def merge(self) -> dict[str, Tensor]:
        """Return the weights of the layers with changed maps, by name in the frozen network."""
        changed: dict[str, Tensor] = {}
        for index, of in enumerate(self.maps):
            A = torch.cat([self._pair(task, index).A for task in range(len(self.prompts))])
            B = torch.cat([self._pair(task, index).B for task in range(len(self.prompts))], dim=1)
            name = f"{of.layer}.weight"
            W = changed.get(name, self.frozen.get_parameter(name))
            change = torch.zeros_like(W)
            change[of.rows] = self.scale * (B @ A)
            changed[name] = W + change
        return changed

    def _pair(self, task: int, index: int) -> "Factors":
        pairs = self.prompts[task]
        assert isinstance(pairs, nn.ModuleList)
        pair = pairs[index]
        assert isinstance(pair, Factors)
        return pair


class Factors(nn.Module):
    """A [r, in], drawn as a linear layer's weight, and B [out, r], zero at first."""

    def __init__(self, inputs: int, out: int, rank: int) -> None:
        super().__init__()
        self.A = nn.Parameter((2 * torch.rand(rank, inputs) - 1) * inputs**-0.5)
        self.B = nn.Parameter(torch.zeros(out, rank))


def name_factor(task: int, index: int, factor: str) -> str:
    """Return the name in a network of the factor A or B of a task and a map, by its place."""
    return f"{PROMPTS}.{task}.{index}.{factor}"


def find_maps(frozen: FeatureNet, settings: LowRank.Settings) -> Iterator[LinearMap]:
    """Yield the maps that the settings name, layer by layer; raise UserError where the backbone has none such."""
    layers = _list_layers(frozen)
    if not layers:
        raise UserError(
            "model.backbone: prompts and LoRA attach to layers of a transformer. Use model.backbone: vit. For texts: "
            "transformer."
        )
    chosen = range(len(layers)) if settings.layers is None else settings.layers
    for place, layer in enumerate(chosen):
        if layer >= len(layers):
            raise UserError(f"layers: there is no layer {layer}, this network has 0 to {len(layers) - 1}.")
        if layer in chosen[:place]:
            raise UserError(f"layers: layer {layer} is named twice. Name it once.")
        yield from _choose_maps(layers[layer], layer, settings.targets)


def _choose_maps(maps: dict[Target, LinearMap], layer: int, targets: tuple[Target, ...]) -> list[LinearMap]:
    """Return a layer's maps of these targets, of which no two share rows."""
    names: list[Target] = []
    for target in targets:
        names += ATTENTION if target == "attention-in" and target not in maps else [target]
    if missing := [name for name in names if name not in maps]:
        raise UserError(f"targets: layer {layer} has no {missing[0]}. Use some of {', '.join(maps)}.")
    used: set[tuple[str, int]] = set()
    for name in names:
        rows = {(maps[name].layer, row) for row in range(maps[name].start, maps[name].start + maps[name].out)}
        if rows & used:
            raise UserError(f"targets: {name} is named twice, or is a part of attention-in. Name each map once.")
        used |= rows
    return [maps[name] for name in names]


def _list_layers(frozen: FeatureNet) -> list[dict[Target, LinearMap]]:
    """Return each layer's maps."""
    if isinstance(frozen, VitNet):
        D, layers = frozen.features, []
        for index in range(len(frozen.layers)):
            prefix = f"layers.{index}"
            in_proj = f"{prefix}.self_attention.in_proj"
            of_layer = {t: LinearMap(in_proj, D * i, D, D) for t, i in VIT_ROWS.items()}
            of_layer["attention-in"] = LinearMap(in_proj, 0, 3 * D, D)
            for target, name in VIT_NAMES.items():
                out, inputs = frozen.get_parameter(f"{prefix}.{name}.weight").shape
                of_layer[target] = LinearMap(f"{prefix}.{name}", 0, out, inputs)
            layers.append(of_layer)
        return layers
    linear = [(name, module) for name, module in frozen.named_modules() if isinstance(module, nn.Linear)]
    by_target = {
        target: [LinearMap(n, 0, m.out_features, m.in_features) for n, m in linear if re.search(pattern, n)]
        for target, pattern in TEXT_NAMES.items()
    }
    count = max(map(len, by_target.values()))
    return [{t: maps[layer] for t, maps in by_target.items() if len(maps) == count} for layer in range(count)]
