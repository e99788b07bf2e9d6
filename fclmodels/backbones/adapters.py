"""What a method attaches to a frozen backbone: prompts chosen by keys (L2P, DualPrompt), LoRA, or nothing.

An adapter is a mapping of JSON values: its "kind", and that kind's `Settings`. L2P is Wang et al. (CVPR 2022),
DualPrompt Wang et al. (ECCV 2022), as PIP sec. 3.2 and 4.1 take them; LoRA is Hu et al. (2021).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.vit import Attached, Lora, VitNet
from fclmodels.errors import UserError
from fclmodels.randomness import generator as keyed
from fclmodels.settings import Settings as BaseSettings

Selection = Literal["sample", "batch"]


@dataclass(frozen=True)
class Features:
    """distance: 1 - cosine of a query and each key chosen for it, in sum over these and in mean over samples (eq. 5);
    None where there are no keys."""

    features: Tensor
    distance: Tensor | None = None


class Adapted(FeatureNet):
    """Kind none: the features of the frozen backbone. The others add `prompts`, a module of all that is trained."""

    kind: ClassVar[str] = "none"
    queried: ClassVar[bool] = True
    """Whether features or what is chosen follow from the samples' queries."""
    depends_on_batch = False
    """Whether a sample's features depend on the others of its batch."""

    class Settings(BaseSettings):
        """What a kind can be told."""

    def __init__(self, frozen: FeatureNet, settings: BaseSettings, tasks: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False).eval()
        # By the backbone's own names, as model.fresh gives them.
        self.features, self.blocks = frozen.features, frozen.blocks

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.prompted(x).features

    def prompted(
        self, x: Tensor, task: int | None = None, queries: Tensor | None = None, below: Tensor | None = None
    ) -> Features:
        """Features of a batch. task: the one that it is of, if known; queries and below: what `query(x)` and, on a
        vit, `below(x)` gave, if kept."""
        return Features(self.query(x) if queries is None else queries)

    @torch.no_grad()
    def query(self, x: Tensor) -> Tensor:
        """Features [B, D] of the frozen backbone with nothing attached."""
        features: Tensor = self.frozen(x)
        return features


class OnVit(Adapted):
    """What reaches into the layers of a vit."""

    frozen: VitNet
    first = 0
    """The first layer with something attached."""

    def __init__(self, frozen: FeatureNet, settings: BaseSettings, tasks: int) -> None:
        if not isinstance(frozen, VitNet):
            raise UserError("model.backbone: prompts and LoRA attach to the layers of a vit. Use model.backbone: vit.")
        super().__init__(frozen, settings, tasks)

    def check(self, setting: str, layers: Sequence[int]) -> None:
        """Refuse layers that the backbone does not have, and one that is named twice."""
        last = len(self.frozen.layers) - 1
        for index, layer in enumerate(layers):
            if layer > last:
                raise UserError(f"{setting}: there is no layer {layer}, this vit has 0 to {last}. See model.depth.")
            if layer in layers[:index]:
                raise UserError(f"{setting}: layer {layer} is named twice. Name it once.")

    @torch.no_grad()
    def below(self, x: Tensor) -> Tensor:
        """Tokens [B, S, D] that enter that layer, which nothing that is trained can change."""
        return self.frozen.below(x, self.first)

    @property
    def room(self) -> int:
        """Numbers in a sample's tokens."""
        return (1 + math.prod(self.frozen.grid)) * self.features

    def encode(self, tokens: Tensor, attached: Mapping[int, Attached] = {}, read: int = 1) -> Tensor:
        """Those tokens, or prompts and tokens, through that layer and all above: the first `read` of them."""
        return self.frozen.encode(tokens, attached, self.first, read)


class Prompted(OnVit):
    """Prompts of a pool, chosen by the cosine of their keys and the query; a pool of one prompt a task grows."""

    prompts: "Pool"
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
        start: Literal["previous", "fresh"] = Field(
            "previous", description="a new task's prompt in a pool that grows: as the previous task's, or drawn"
        )

    def __init__(self, frozen: FeatureNet, settings: Settings, tasks: int) -> None:
        super().__init__(frozen, settings, tasks)
        self.top_k, self.selection = settings.top_k, settings.selection
        self.depends_on_batch = settings.selection == "batch"

    def scores(self, x: Tensor, queries: Tensor | None) -> Tensor:
        """Cosines [B, pool] of the queries and the keys."""
        queries = self.query(x) if queries is None else queries
        return F.normalize(queries, dim=1) @ F.normalize(self.prompts.keys, dim=1).T


class Pool(nn.Module):
    """Keys [pool, D]; each kind adds its prompts."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.keys = nn.Parameter(_uniform(size, width))


class L2P(Prompted):
    """Prompts before the sample's tokens, which have their positions already; the mean over the prompts' outputs.

    This is PIP eq. 2 at the first layer. A known task changes nothing, as in L2P.
    """

    kind = "l2p"
    prompts: "L2PPool"
    slots: ClassVar = {"prompts": 0, "keys": 0}

    class Settings(Prompted.Settings):
        top_k: PositiveInt = Field(5, le=10_000, description="prompts that are chosen for a sample, at most the pool")

    def __init__(self, frozen: FeatureNet, settings: Settings, tasks: int) -> None:
        super().__init__(frozen, settings, tasks)
        self.prompts = L2PPool(settings.pool or tasks, settings.length, frozen.features)

    def prompted(
        self, x: Tensor, task: int | None = None, queries: Tensor | None = None, below: Tensor | None = None
    ) -> Features:
        scores = self.scores(x, queries)
        chosen = select(scores, self.top_k, self.selection)
        prompts = self.prompts.prompts[chosen].flatten(1, 2)
        tokens = torch.cat([prompts, self.below(x) if below is None else below], dim=1)
        output = self.encode(tokens, read=prompts.shape[1])
        return Features(output.mean(1), distance(scores, chosen))


class L2PPool(Pool):
    """prompts [pool, L, D]"""

    def __init__(self, size: int, length: int, width: int) -> None:
        super().__init__(size, width)
        self.prompts = nn.Parameter(_uniform(size, length, width))


class DualP(Prompted):
    """A general prompt in some layers and expert prompts in others, as prefixes or as tokens; the class token.

    A batch of a known task has that task's expert alone: slot task, or task modulo the pool where that is smaller.
    Else a sample has the top_k experts that its query finds, one after the other.
    """

    kind = "dualp"
    prompts: "DualPool"
    slots: ClassVar = {"experts": 2, "keys": 0}

    class Settings(Prompted.Settings):
        g_layers: tuple[NonNegativeInt, ...] = Field((0, 1), description="layers, from 0, that have the general prompt")
        e_layers: tuple[NonNegativeInt, ...] = Field(
            (2, 3, 4), min_length=1, description="layers, from 0, that have expert prompts"
        )
        enter: Literal["prefix", "tokens"] = Field(
            "prefix", description="prompts enter a layer as K and V (PIP eq. 3), or as tokens before its input (eq. 2)"
        )

    def __init__(self, frozen: FeatureNet, settings: Settings, tasks: int) -> None:
        super().__init__(frozen, settings, tasks)
        self.layers = (*settings.g_layers, *settings.e_layers)
        self.check("g_layers and e_layers", self.layers)
        self.first = min(self.layers)
        self.prompts = DualPool(settings.pool or tasks, settings, frozen.features)

    def prompted(
        self, x: Tensor, task: int | None = None, queries: Tensor | None = None, below: Tensor | None = None
    ) -> Features:
        scores = self.scores(x, queries)
        if task is None:
            chosen = select(scores, self.top_k, self.selection)
        else:
            chosen = torch.full((len(x), 1), task % scores.shape[1], device=x.device)
        general = self.prompts.general[:, :, None].expand(-1, -1, len(x), -1, -1)
        experts = self.prompts.experts[:, :, chosen].flatten(3, 4)
        prompts = zip(self.layers, (*general, *experts), strict=True)
        attached = {layer: entering(prompt) for layer, prompt in prompts}
        output = self.encode(self.below(x) if below is None else below, attached)
        return Features(output[:, 0], distance(scores, chosen))


def entering(prompt: Tensor) -> Attached:
    """What [2, B, L, D], p_K and p_V, or the tokens [1, B, L, D] attach to a layer."""
    return Attached(prefix=(prompt[0], prompt[1])) if len(prompt) == 2 else Attached(tokens=prompt[0])


class DualPool(Pool):
    """general [g_layers, n, L, D] and experts [e_layers, n, pool, L, D]; n is 2 for p_K and p_V, 1 for tokens"""

    def __init__(self, size: int, settings: DualP.Settings, width: int) -> None:
        super().__init__(size, width)
        n = 2 if settings.enter == "prefix" else 1
        self.general = nn.Parameter(_uniform(len(settings.g_layers), n, settings.length, width))
        self.experts = nn.Parameter(_uniform(len(settings.e_layers), n, size, settings.length, width))


class LoraOnVit(OnVit):
    """dW = scale * B A on W_Q and W_V of some layers; the class token."""

    kind = "lora"
    queried = False
    prompts: "LoraMatrices"

    class Settings(BaseSettings):
        rank: PositiveInt = Field(4, le=1024, description="r, the rank of what is added to W_Q and to W_V")
        scale: PositiveFloat = Field(1.0, le=1000, description="factor on B A")
        layers: tuple[NonNegativeInt, ...] | None = Field(None, description="layers, from 0, that it is in; null: all")

    def __init__(self, frozen: FeatureNet, settings: Settings, tasks: int) -> None:
        super().__init__(frozen, settings, tasks)
        self.layers = tuple(range(len(self.frozen.layers))) if settings.layers is None else settings.layers
        self.check("layers", self.layers)
        self.first = min(self.layers, default=0)
        self.scale = settings.scale
        self.prompts = LoraMatrices(len(self.layers), settings.rank, frozen.features)

    def prompted(
        self, x: Tensor, task: int | None = None, queries: Tensor | None = None, below: Tensor | None = None
    ) -> Features:
        matrices = zip(self.layers, self.prompts.A, self.prompts.B, strict=True)
        attached = {layer: Attached(lora=Lora(A, B, self.scale)) for layer, A, B in matrices}
        return Features(self.encode(self.below(x) if below is None else below, attached)[:, 0])


class LoraMatrices(nn.Module):
    """A [layers, 2, r, D] and B [layers, 2, D, r], the 2 being Q and V; B A is zero at first."""

    def __init__(self, layers: int, rank: int, width: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn(layers, 2, rank, width) * width**-0.5)
        self.B = nn.Parameter(torch.zeros(layers, 2, width, rank))


KINDS: dict[str, type[Adapted]] = {kind.kind: kind for kind in (Adapted, L2P, DualP, LoraOnVit)}


def adapt(backbone: FeatureNet, adapter: Mapping[str, Any], tasks: int) -> Adapted:
    """The backbone, frozen from here on, with what the adapter attaches to it after so many tasks."""
    kind, settings = _read(adapter)
    return kind(backbone, settings, tasks)


def distance(scores: Tensor, chosen: Tensor) -> Tensor:
    """Of cosines [B, pool], 1 - that of each chosen slot [B, k], in sum over k and in mean over the batch."""
    return (1 - scores.gather(1, chosen)).sum(1).mean()


def select(scores: Tensor, top_k: int, selection: Selection) -> Tensor:
    """Slots [B, k] of a pool by scores [B, pool], best first; of equal ones the first."""
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
    """The weights of a network with a slot for each task that is new, where its pool grows; the rest as it was.

    A slot's key is drawn, and so is its prompt if `start` is fresh; else that is the previous slot's. Only the
    generator's seed is used: what is drawn depends on it and the slot, not on how many come at once.
    """
    kind, settings = _read(adapter)
    grown = dict(weights)
    if not issubclass(kind, Prompted) or settings.pool is not None:
        return grown
    for part, dimension in kind.slots.items():
        name = f"backbone.prompts.{part}"
        for slot in range(old_tasks, new_tasks):
            new = grown[name].narrow(dimension, slot - 1, 1)
            if part == "keys" or settings.start == "fresh":
                draw = keyed(generator.initial_seed(), "prompt", part, slot)
                new = torch.empty(new.shape).uniform_(-1, 1, generator=draw).to(new)
            grown[name] = torch.cat([grown[name], new], dimension)
    return grown


def shrink_prompts(weights: Mapping[str, Tensor], adapter: Mapping[str, Any], tasks: int) -> dict[str, Tensor]:
    """The inverse: the weights after so many tasks only."""
    kind, settings = _read(adapter)
    shrunk = dict(weights)
    if issubclass(kind, Prompted) and settings.pool is None:
        for part, dimension in kind.slots.items():
            name = f"backbone.prompts.{part}"
            shrunk[name] = shrunk[name].narrow(dimension, 0, tasks)
    return shrunk


def _read(adapter: Mapping[str, Any]) -> tuple[type[Adapted], Any]:
    kind = KINDS[adapter["kind"]]
    return kind, kind.Settings(**{name: value for name, value in adapter.items() if name != "kind"})


def _uniform(*shape: int) -> Tensor:
    return torch.rand(shape) * 2 - 1
