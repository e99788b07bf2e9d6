"""The network of a method on a frozen backbone: only the adapter that is attached to it and the head train and travel.

Every client has the backbone before the run (PIP Algorithm 1, line 2): read from `model.weights`, in evaluation mode,
without gradients. No message, no server state and no checkpoint holds it; a published model does.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from fclmodels.backbones.adapters.adapted import Adapted, AdaptedVit, Features
from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.model.network import FROZEN, Network, build_network
from fclmodels.backbones.model.prompt_adapters import grow_prompts
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.executors.base import set_torch_threads
from fclmodels.federation.messages import Part, make_outline
from fclmodels.federation.run_context import Run
from fclmodels.methods.parts.trained_network import TrainedNetwork, Weights
from fclmodels.plugins import find
from fclmodels.settings.base import Settings as BaseSettings
from fclmodels.settings.schema import AugmentSettings
from fclmodels.source_digest import digest_sources
from fclmodels.storage import trees
from fclmodels.storage.array_cache import load_or_compute
from fclmodels.storage.digests import digest_json
from fclmodels.storage.untrusted import read_json, validate

HeadPolicy = Literal["shared", "own", "task-end"]
AT_ONCE = 256  # samples that pass the frozen backbone together, where nothing is trained
MOST_CACHED = 4e9  # bytes of a data set's tokens on disk; its queries are hundreds of times smaller


class FrozenBackbone(TrainedNetwork):
    """Attaches an adapter (prompts, LoRA, or nothing) to the backbone and trains that and the head.

    A sample's query, its features on the frozen backbone, never changes, nor do its tokens below the first layer with
    something attached: both are computed once a data set, then read from disk.
    """

    def __init__(
        self,
        settings: BaseSettings,
        run: Run,
        method: str,
        attaches: type[Adapted] = Adapted,
        head: HeadPolicy = "shared",
    ) -> None:
        names = set(attaches.Settings.model_fields)
        self.adapter = {"kind": attaches.kind, **settings.model_dump(mode="json", include=names)}
        super().__init__(replace(run, adapter=self.adapter), batch_norm="average")  # which nothing trained has
        if run.params.model.freeze:
            raise UserError(f"model.freeze: methods.{method} freezes the whole backbone. Leave it out.")
        if head == "task-end" and run.params.federation.faults.late:
            raise UserError(
                f"methods.{method}.head: task-end reads heads in a task's last round alone, and a late answer of an "
                "earlier one has none. Set federation.faults.late: 0, or head: shared."
            )
        self.attaches = attaches
        self.head = head

    def list_advice(self) -> list[str]:
        weights, lines = self.run.params.model.weights, []
        if weights is None:
            lines.append("model.weights is not set: the frozen backbone is as it was drawn. fcl pretrain makes one")
        elif shared := sorted(read_pretrained_classes(weights) & set(self.run.splits.classes)):
            lines.append(f"model.weights was pretrained on classes of this stream: {', '.join(shared)}")
        if self.attaches.uses_queries and not self.shows_prepared_samples:
            lines.append("augment changes pixels: each step asks the frozen backbone for its queries anew")
        return lines

    @property
    def feature_clip(self) -> float | None:
        """The length at which features are clipped that enter a prototype; None where there is no noise."""
        privacy = self.run.params.federation.privacy
        return privacy.features if privacy.on else None

    def compute_features(self, network: Network, batch: Batch, task: int | None) -> Features:
        """Return the features [B, F] of a batch of a task, if given, by cached queries where there are some."""
        cached = (c if c is None else c[batch.samples].to(batch.inputs.device) for c in (self.queries, self.below))
        return get_backbone(network).extract(batch.inputs, task, *cached)

    def make_moments_form(self, network: Network, task: int, bound: float | None = None) -> Part:
        """Return the outline of the moments of a task's classes."""
        rows = len(network.spec.tasks[task]), network.backbone.features
        return make_outline("prototype", {"weight": rows[:1], "sum": rows, "square": rows}, torch.float64, bound=bound)

    # The network: the frozen part is put in once, by `prepare`.

    @property
    def is_personal(self) -> bool:
        return self.head == "own"

    def list_personal_names(self, network: Network) -> set[str]:
        return set() if self.head == "shared" else {name for name, _ in network.heads.named_parameters("heads")}

    def list_unsent_names(self, network: Network, task: int, round: int) -> set[str]:
        is_averaged = self.head == "task-end" and round == self.run.count_rounds(task) - 1
        return set() if is_averaged else self.list_personal_names(network)

    @cached_property
    def attached(self) -> Adapted:
        """The backbone, read or initialised once, with the first prompts."""
        return get_backbone(build_network(self.run.make_spec(1), self.run.make_generator("init"))).to(self.run.device)

    @property
    def frozen(self) -> FeatureNet:
        return self.attached.frozen

    def prepare(self, network: nn.Module) -> None:
        assert isinstance(network, Network)
        get_backbone(network).frozen = self.frozen

    def make_initial_weights(self, spec: ModelSpec) -> Weights:
        weights = {name: t for name, t in super().make_initial_weights(spec).items() if not name.startswith(FROZEN)}
        _ = self.queries, self.below  # here, so that workers find them
        return weights

    def grow(self, weights: Weights, before: ModelSpec, after: ModelSpec) -> Weights:
        tasks = len(before.tasks), len(after.tasks)
        random = self.run.make_generator("prompts", tasks[1] - 1)
        return grow_prompts(super().grow(weights, before, after), self.adapter, *tasks, random)

    def list_all_weights(self, weights: Weights) -> Weights:
        frozen = {FROZEN + name: tensor.cpu() for name, tensor in self.frozen.state_dict().items()}
        return {**weights, **frozen}

    def select_trainable(self, network: Network, task: int, freeze: bool) -> dict[str, nn.Parameter]:
        own_head = f"heads.{task}." if network.spec.head == "per-task" else "heads."
        return {n: p for n, p in network.named_parameters() if n.startswith(("backbone.prompts.", own_head))}

    def set_modes(self, network: Network, task: int, freeze: bool) -> None:
        network.train()  # which leaves the backbone in evaluation mode

    # The cache of frozen layers' outputs.

    @property
    def shows_prepared_samples(self) -> bool:
        """Return whether a client's network gets every sample as it was prepared, in each epoch and task."""
        changed = self.run.params.augment != AugmentSettings() or self.run.params.federation.attack.kind == "backdoor"
        return not changed and all(t.permutation is None and t.mean is None for t in self.run.splits.tasks)

    @cached_property
    def queries(self) -> Tensor | None:
        """The queries [N, F] of all prepared samples; None where none are used, pixels change, or there is no home."""
        return self._compute_once("queries", self.frozen) if self.attaches.uses_queries else None

    @cached_property
    def below(self) -> Tensor | None:
        """The tokens [N, S, D] of all samples below the first layer with something attached.

        None as for queries, where that layer is the lowest one, and where they take too much disk.
        """
        backbone = self.attached
        if (
            not isinstance(backbone, AdaptedVit)
            or backbone.first == 0
            or 4 * self.run.splits.images.shape[0] * backbone.numbers_per_sample > MOST_CACHED
        ):
            return None
        return self._compute_once("below", backbone.run_below, backbone.first)

    def _compute_once(self, name: str, layers: Callable[[Tensor], Tensor], *about: int) -> Tensor | None:
        """Return frozen layers' outputs for all prepared samples, from disk where they are there."""
        if self.run.home is None or not self.shows_prepared_samples:
            return None
        splits = self.run.splits

        def compute() -> Iterator[Tensor]:
            nothing = torch.zeros(AT_ONCE, dtype=torch.int64, device=self.run.device)
            for images in splits.images.split(AT_ONCE):
                labels = nothing[: len(images)]
                yield layers(self.run.batches.prepare_inputs(Batch(images.to(self.run.device), labels, labels)).inputs)

        with set_torch_threads(1), torch.inference_mode():  # the same to the bit whoever computes them
            return load_or_compute(
                self.run.home / "queries", self._compute_cache_key(name, *about), len(splits.images), compute
            )

    def _compute_cache_key(self, name: str, *about: int) -> str:
        """Return a digest of all that the cached array depends on."""
        model, splits = self.run.params.model, self.run.splits
        content = {
            "what": [name, *about],
            "weights": trees.digest(dict(self.frozen.state_dict())),
            "model": model.model_dump(mode="json", exclude={"weights"}),
            "data": [splits.prepared_digest, splits.mean, splits.std],
            "on": [self.run.device.type, torch.__version__],
            "code": digest_sources(find("backbone", model.backbone).__module__),
        }
        return digest_json(content)


def read_pretrained_classes(weights: Path) -> set[str]:
    """Return the classes that weights were trained on, where fcl pretrain's card lies beside them."""
    card = weights.with_name("card.json")
    try:
        return set(validate(_Card, read_json(card)).classes) if card.is_file() else set()
    except (OSError, ValueError) as problem:
        raise UserError(
            f"{card} cannot be read ({problem}). Delete it, or get back what fcl pretrain wrote."
        ) from problem


class _Card(BaseModel):
    """The part of a card that is about classes."""

    classes: list[str] = []


def get_backbone(network: Network) -> Adapted:
    assert isinstance(network.backbone, Adapted)
    return network.backbone
