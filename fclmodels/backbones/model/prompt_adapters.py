"""Adapters that a method attaches to a frozen backbone: prompts selected by keys, LoRA, bottlenecks, or none.

An adapter is a mapping of JSON values: its "kind", and that kind's `Settings`. L2P is Wang et al. (CVPR 2022),
DualPrompt Wang et al. (ECCV 2022), as PIP sec. 3.2 and 4.1 take them; LoRA is Hu et al. (2021), AdaptFormer is Chen et
al. (2022).
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fclmodels.backbones.adapters.adapted import Adapted, AdaptedVit, Features
from fclmodels.backbones.adapters.coda_prompts import CodaVit
from fclmodels.backbones.adapters.low_rank import LowRank
from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.vit import Attached, Bottleneck, LoraUpdate
from fclmodels.randomness import make_generator as keyed
from fclmodels.settings.base import Settings as BaseSettings

Selection = Literal["sample", "batch"]


class PromptedVit(AdaptedVit):
    """Prompts of a pool, selected by the cosine of their keys and the query; a pool of one prompt a task grows."""

    prompts: "PromptPool"
    slots: ClassVar[Mapping[str, int]]
    """Tensors of `prompts` that grow with the pool, and the dimension in which they do."""

    class Settings(BaseSettings):
        pool: PositiveInt | None = Field(
            None, le=10_000, description="prompts; null: one a task, so that the pool grows"
        )
        length: PositiveInt = Field(5, le=1024, description="L_p, tokens of a prompt (as a prefix, of K and of V each)")
        top_k: PositiveInt = Field(1, le=10_000, description="prompts that are chosen for a sample, at most the pool")
        selection: Selection = Field(
            "sample", description="each sample chooses; batch: what most of a batch choose (the papers' protocol)"
        )
        start: Literal["previous", "fresh", "each-round"] = Field(
            "previous",
            description="a new task's prompt in a pool that grows: as the previous task's, or drawn; each-round: a "
            "task's expert is the previous task's again at each round's start, as in the release",
        )

    def __init__(self, frozen: FeatureNet, settings: Settings, tasks: int) -> None:
        super().__init__(frozen, settings, tasks)
        self.top_k, self.selection = settings.top_k, settings.selection
        self.depends_on_batch = settings.selection == "batch"

    @classmethod
    def grow(
        cls, weights: dict[str, Tensor], settings: Any, old_tasks: int, new_tasks: int, seed: int
    ) -> dict[str, Tensor]:
        """Return the weights with a slot for each new task, where the pool grows.

        A slot's key is drawn, and so is its prompt if `start` is fresh; else the prompt is the previous slot's.
        """
        if settings.pool is not None:
            return weights
        grown = dict(weights)
        for part, dimension in cls.slots.items():
            name = f"backbone.prompts.{part}"
            for slot in range(old_tasks, new_tasks):
                new = grown[name].narrow(dimension, slot - 1, 1)
                if part == "keys" or settings.start == "fresh":
                    draw = keyed(seed, "prompt", part, slot)
                    new = torch.empty(new.shape).uniform_(-1, 1, generator=draw).to(new)
                grown[name] = torch.cat([grown[name], new], dimension)
        return grown

    def score_keys(self, x: Tensor, queries: Tensor | None) -> Tensor:
        """Return cosines [B, pool] of the queries and the keys."""
        queries = self.query(x) if queries is None else queries
        return F.normalize(queries, dim=1) @ F.normalize(self.prompts.keys, dim=1).T


class PromptPool(nn.Module):
    """Keys [pool, D]; each kind adds its prompts."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.keys = nn.Parameter(_draw_uniform(size, width))


class L2P(PromptedVit):
    """Prompts before the sample's tokens, which have their positions already; features are the mean of their outputs.

    This is PIP eq. 2 at the first layer. A known task changes nothing, as in L2P.
    """

    kind = "l2p"
    prompts: "L2PPool"
    slots: ClassVar = {"prompts": 0, "keys": 0}

    class Settings(PromptedVit.Settings):
        top_k: PositiveInt = Field(5, le=10_000, description="prompts that are chosen for a sample, at most the pool")

    def __init__(self, frozen: FeatureNet, settings: Settings, tasks: int) -> None:
        super().__init__(frozen, settings, tasks)
        self.prompts = L2PPool(settings.pool or tasks, settings.length, frozen.features)

    def extract(
        self, x: Tensor, task: int | None = None, queries: Tensor | None = None, below: Tensor | None = None
    ) -> Features:
        scores = self.score_keys(x, queries)
        slots = select(scores, self.top_k, self.selection)
        prompts = self.prompts.prompts[slots].flatten(1, 2)
        tokens = torch.cat([prompts, self.run_below(x) if below is None else below], dim=1)
        output = self.encode(tokens, read=prompts.shape[1])
        return Features(output.mean(1), measure_distance(scores, slots))


class L2PPool(PromptPool):
    """prompts [pool, L, D]"""

    def __init__(self, size: int, length: int, width: int) -> None:
        super().__init__(size, width)
        self.prompts = nn.Parameter(_draw_uniform(size, length, width))


class DualP(PromptedVit):
    """A general prompt in some layers, expert prompts in others, as prefixes or tokens; features are the class token.

    A batch of a known task has only that task's expert, where the pool has a slot for it. Else a sample has the top_k
    experts of its query, one after the other.
    """

    kind = "dualp"
    prompts: "DualPool"
    slots: ClassVar = {"experts": 2, "keys": 0}

    class Settings(PromptedVit.Settings):
        g_layers: tuple[NonNegativeInt, ...] = Field((0, 1), description="layers, from 0, that have the general prompt")
        e_layers: tuple[NonNegativeInt, ...] = Field(
            (2, 3, 4), min_length=1, description="layers, from 0, that have expert prompts"
        )
        enter: Literal["prefix", "keys-values", "tokens"] = Field(
            "prefix",
            description="prompts enter a layer before W_K and W_V (PIP eq. 3, 4), after them as keys and values (the "
            "release), or as tokens before its input (eq. 2)",
        )

    def __init__(self, frozen: FeatureNet, settings: Settings, tasks: int) -> None:
        super().__init__(frozen, settings, tasks)
        self.layers = (*settings.g_layers, *settings.e_layers)
        self.refuse_layers("g_layers and e_layers", self.layers)
        self.first, self.enter = min(self.layers), settings.enter
        self.prompts = DualPool(settings.pool or tasks, settings, frozen.features)

    def extract(
        self, x: Tensor, task: int | None = None, queries: Tensor | None = None, below: Tensor | None = None
    ) -> Features:
        scores = self.score_keys(x, queries)
        if task is not None and task < scores.shape[1]:
            slots = torch.full((len(x), 1), task, device=x.device)
        else:
            slots = select(scores, self.top_k, self.selection)
        general = self.prompts.general[:, :, None].expand(-1, -1, len(x), -1, -1)
        experts = self.prompts.experts[:, :, slots].flatten(3, 4)
        prompts = zip(self.layers, (*general, *experts), strict=True)
        attached = {layer: attach_prompt(prompt, self.enter) for layer, prompt in prompts}
        output = self.encode(self.run_below(x) if below is None else below, attached)
        return Features(output[:, 0], measure_distance(scores, slots))


def attach_prompt(prompt: Tensor, enter: str) -> Attached:
    """Return a prompt as attached to a layer: a pair for keys and values [2, B, L, D], or tokens [1, B, L, D]."""
    if enter == "tokens":
        return Attached(tokens=prompt[0])
    pair = prompt[0], prompt[1]
    return Attached(prefix=pair) if enter == "prefix" else Attached(keys_values=pair)


class DualPool(PromptPool):
    """general [g_layers, n, L, D] and experts [e_layers, n, pool, L, D]; n is 1 for tokens, else 2, for K and V"""

    def __init__(self, size: int, settings: DualP.Settings, width: int) -> None:
        super().__init__(size, width)
        n = 1 if settings.enter == "tokens" else 2
        self.general = nn.Parameter(_draw_uniform(len(settings.g_layers), n, settings.length, width))
        self.experts = nn.Parameter(_draw_uniform(len(settings.e_layers), n, size, settings.length, width))


class LoraVit(AdaptedVit):
    """dW = scale * B A on W_Q and W_V of some layers; features are the class token."""

    kind = "lora"
    uses_queries = False
    prompts: "LoraMatrices"

    class Settings(BaseSettings):
        rank: PositiveInt = Field(4, le=1024, description="r, the rank of what is added to W_Q and to W_V")
        scale: PositiveFloat = Field(1.0, le=1000, description="factor on B A")
        layers: tuple[NonNegativeInt, ...] | None = Field(None, description="layers, from 0, that it is in; null: all")

    def __init__(self, frozen: FeatureNet, settings: Settings, tasks: int) -> None:
        super().__init__(frozen, settings, tasks)
        self.layers = tuple(range(len(self.frozen.layers))) if settings.layers is None else settings.layers
        self.refuse_layers("layers", self.layers)
        self.first = min(self.layers, default=0)
        self.scale = settings.scale
        self.prompts = LoraMatrices(len(self.layers), settings.rank, frozen.features)

    def extract(
        self, x: Tensor, task: int | None = None, queries: Tensor | None = None, below: Tensor | None = None
    ) -> Features:
        matrices = zip(self.layers, self.prompts.A, self.prompts.B, strict=True)
        attached = {layer: Attached(lora=LoraUpdate(A, B, self.scale)) for layer, A, B in matrices}
        return Features(self.encode(self.run_below(x) if below is None else below, attached)[:, 0])


class LoraMatrices(nn.Module):
    """A [layers, 2, r, D] and B [layers, 2, D, r], the 2 being Q and V; B A is zero at first."""

    def __init__(self, layers: int, rank: int, width: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn(layers, 2, rank, width) * width**-0.5)
        self.B = nn.Parameter(torch.zeros(layers, 2, width, rank))


class AdaptFormer(AdaptedVit):
    """A bottleneck beside each layer's perceptron (Chen et al. 2022); features are the class token."""

    kind = "adaptformer"
    uses_queries = False
    prompts: "Bottlenecks"

    class Settings(BaseSettings):
        bottleneck: PositiveInt = Field(64, le=4096, description="m, the width of an adapter's hidden layer")
        scale: PositiveFloat = Field(0.1, le=1000, description="factor on what an adapter adds")

    def __init__(self, frozen: FeatureNet, settings: Settings, tasks: int) -> None:
        super().__init__(frozen, settings, tasks)
        self.scale = settings.scale
        self.prompts = Bottlenecks(len(self.frozen.layers), settings.bottleneck, frozen.features)

    def extract(
        self, x: Tensor, task: int | None = None, queries: Tensor | None = None, below: Tensor | None = None
    ) -> Features:
        tensors = (self.prompts.down, self.prompts.down_bias, self.prompts.up, self.prompts.up_bias)
        attached = {
            layer: Attached(bottleneck=Bottleneck(*of_layer, self.scale))
            for layer, of_layer in enumerate(zip(*tensors, strict=True))
        }
        return Features(self.encode(self.run_below(x) if below is None else below, attached)[:, 0])


class Bottlenecks(nn.Module):
    """down [layers, m, D] and up [layers, D, m] with their biases [layers, m] and [layers, D]; they add 0 at first."""

    def __init__(self, layers: int, hidden: int, width: int) -> None:
        super().__init__()
        bound = width**-0.5  # Kaiming's uniform for a gain of sqrt(5) is 1 / sqrt(width), as a linear layer has
        self.down = nn.Parameter((2 * torch.rand(layers, hidden, width) - 1) * bound)
        self.down_bias = nn.Parameter(torch.zeros(layers, hidden))
        self.up = nn.Parameter(torch.zeros(layers, width, hidden))
        self.up_bias = nn.Parameter(torch.zeros(layers, width))


KINDS: dict[str, type[Adapted]] = {
    kind.kind: kind for kind in (Adapted, L2P, DualP, LoraVit, AdaptFormer, LowRank, CodaVit)
}


def adapt(backbone: FeatureNet, adapter: Mapping[str, Any], tasks: int) -> Adapted:
    """Freeze the backbone and return it with what the adapter attaches to it after so many tasks."""
    kind, settings = _parse(adapter)
    return kind(backbone, settings, tasks)


def measure_distance(scores: Tensor, slots: Tensor) -> Tensor:
    """Return 1 - cosine of each selected slot [B, k], summed over k, as mean over the batch; scores [B, pool]."""
    return (1 - scores.gather(1, slots)).sum(1).mean()


def select(scores: Tensor, top_k: int, selection: Selection) -> Tensor:
    """Return slots [B, k] of a pool by scores [B, pool], best first; of equal ones the first."""
    best = scores.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    if selection == "sample":
        return best
    votes = best.flatten().bincount(minlength=scores.shape[1])
    return votes.argsort(descending=True, stable=True)[:top_k].expand(len(scores), -1)


def grow_prompts(
    weights: Mapping[str, Tensor],
    adapter: Mapping[str, Any],
    old_tasks: int,
    new_tasks: int,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Return the weights of a network with what each new task adds to its adapter, by the generator's seed."""
    kind, settings = _parse(adapter)
    return kind.grow(dict(weights), settings, old_tasks, new_tasks, generator.initial_seed())


def restart_expert(network: nn.Module, adapter: Mapping[str, Any], task: int) -> None:
    """Put the previous task's expert in the task's place, where `start` is each-round and both have a slot."""
    kind, settings = _parse(adapter)
    if not issubclass(kind, DualP) or settings.start != "each-round":
        return
    experts = network.get_parameter("backbone.prompts.experts")
    if 0 < task < experts.shape[2]:
        experts[:, :, task] = experts[:, :, task - 1]


def shrink_prompts(weights: Mapping[str, Tensor], adapter: Mapping[str, Any], tasks: int) -> dict[str, Tensor]:
    """Undo grow_prompts: return the weights after so many tasks."""
    kind, settings = _parse(adapter)
    shrunk = dict(weights)
    if issubclass(kind, PromptedVit) and settings.pool is None:
        for part, dimension in kind.slots.items():
            name = f"backbone.prompts.{part}"
            shrunk[name] = shrunk[name].narrow(dimension, 0, tasks)
    return shrunk


def _parse(adapter: Mapping[str, Any]) -> tuple[type[Adapted], Any]:
    kind = KINDS[adapter["kind"]]
    return kind, kind.Settings(**{name: value for name, value in adapter.items() if name != "kind"})


def _draw_uniform(*shape: int) -> Tensor:
    return torch.rand(shape) * 2 - 1
