"""Methods on a frozen backbone: only what they attach to it and the head are trained and travel.

Every client has the backbone before the run (PIP Algorithm 1, line 2): read from `model.weights`, in evaluation mode,
without gradients. No message, no server state and no checkpoint holds it; a published model does.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from fclmodels import state
from fclmodels.backbones.adapters import Adapted, Features, OnVit, grow_prompts
from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.network import FROZEN, Network, build
from fclmodels.backbones.queries import kept
from fclmodels.backbones.spec import ModelSpec
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.executor import torch_threads
from fclmodels.federation.local import LocalTraining
from fclmodels.federation.messages import Part, outline
from fclmodels.federation.run import Run
from fclmodels.federation.server import Server
from fclmodels.fingerprint import source_closure
from fclmodels.foreign import checked, read_json
from fclmodels.methods.base import Memory
from fclmodels.methods.fedavg import FedAvg
from fclmodels.plugins import find
from fclmodels.settings import AugmentSettings
from fclmodels.settings import Settings as BaseSettings

AT_ONCE = 256  # samples that pass the frozen backbone together, where nothing is trained
MOST_KEPT = 4e9  # bytes of a data set's tokens on disk; its queries are hundreds of times smaller


class Frozen(FedAvg):
    attaches: ClassVar[type[Adapted]] = Adapted

    class Settings(BaseSettings):
        pass

    settings: Settings  # type: ignore[assignment]  # batch_norm has no meaning where nothing of the backbone moves

    def __init__(self, settings: BaseSettings, run: Run) -> None:
        self.settings = settings  # type: ignore[assignment]
        super().__init__(settings, replace(run, adapter=self.adapter))
        if run.params.model.freeze:
            raise UserError(f"model.freeze: methods.{self.name} freezes the whole backbone. Leave it out.")

    @property
    def adapter(self) -> dict[str, Any]:
        """What is attached to the backbone, with its settings among the method's own."""
        told = set(self.attaches.Settings.model_fields)
        return {"kind": self.attaches.kind, **self.settings.model_dump(mode="json", include=told)}

    def advice(self) -> list[str]:
        weights, lines = self.run.params.model.weights, []
        if weights is None:
            lines.append("model.weights is not set: the frozen backbone is as it was drawn. fcl pretrain makes one")
        elif met := sorted(classes_on_card(weights) & set(self.run.splits.classes)):
            lines.append(f"model.weights was pretrained on classes of this stream: {', '.join(met)}")
        if self.attaches.queried and not self.shown_as_prepared:
            lines.append("augment changes pixels: each step asks the frozen backbone for its queries anew")
        return lines

    @property
    def longest(self) -> float | None:
        """Under noise, the length at which the features are clipped that enter a prototype."""
        privacy = self.run.params.federation.privacy
        return privacy.features if privacy.on else None

    # A sample's query, its features on the frozen backbone, never changes, nor what enters the first layer with
    # something attached: computed once a data set, then kept.

    def setup(self) -> Server:
        server = super().setup()
        _ = self.queries, self.below  # here, so that workers find them
        return server

    @property
    def shown_as_prepared(self) -> bool:
        """Whether a client's network sees every sample as it was prepared, in each epoch and task."""
        changed = self.run.params.augment != AugmentSettings() or self.run.params.federation.attack.kind == "backdoor"
        return not changed and all(t.permutation is None for t in self.run.splits.tasks)

    @cached_property
    def queries(self) -> Tensor | None:
        """[N, F] of all prepared samples; None where none are asked for, clients see other pixels, or have no home."""
        return self.of_all_samples("queries", self.frozen) if self.attaches.queried else None

    @cached_property
    def below(self) -> Tensor | None:
        """[N, S, D]: the tokens of all samples below the first layer with something attached; None as for queries,
        where that is the lowest layer, and where they take too much room."""
        on = self.attached
        if not isinstance(on, OnVit) or on.first == 0 or 4 * self.run.splits.images.shape[0] * on.room > MOST_KEPT:
            return None
        return self.of_all_samples("below", on.below, on.first)

    def of_all_samples(self, what: str, ask: Callable[[Tensor], Tensor], *about: int) -> Tensor | None:
        """What the frozen layers say of each prepared sample."""
        if self.run.home is None or not self.shown_as_prepared:
            return None
        splits = self.run.splits

        def compute() -> Iterator[Tensor]:
            nothing = torch.zeros(AT_ONCE, dtype=torch.int64, device=self.run.device)
            for images in splits.images.split(AT_ONCE):
                labels = nothing[: len(images)]
                yield ask(self.run.batches.ready(Batch(images.to(self.run.device), labels, labels)).inputs)

        with torch_threads(1), torch.inference_mode():  # the same to the bit whoever computes them
            return kept(self.run.home / "queries", self.key_of(what, *about), len(splits.images), compute)

    def key_of(self, what: str, *about_it: int) -> str:
        """A digest of all that it depends on."""
        model, splits = self.run.params.model, self.run.splits
        about = {
            "what": [what, *about_it],
            "weights": state.digest(dict(self.frozen.state_dict())),
            "model": model.model_dump(mode="json", exclude={"weights"}),
            "data": [splits.prepared_digest, splits.mean, splits.std],
            "on": [self.run.device.type, torch.__version__],
            "code": source_closure(find("backbone", model.backbone).__module__),
        }
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def found(self, network: Network, batch: Batch, task: int) -> Features:
        """What the network says of a batch of the task, by its kept queries where there are some."""
        of_batch = (None if k is None else k[batch.samples].to(batch.inputs.device) for k in (self.queries, self.below))
        return backbone_of(network).prompted(batch.inputs, task, *of_batch)

    def loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        task, network = training.client.task, training.network
        return self.cross_entropy(network, self.found(network, batch, task).features, batch.labels, task)

    # The network: the frozen part is put in once, by `prepare`.

    @cached_property
    def attached(self) -> Adapted:
        """The backbone, read or drawn once, with the first prompts."""
        return backbone_of(build(self.run.spec(1), self.run.generator("init"))).to(self.run.device)

    @property
    def frozen(self) -> FeatureNet:
        return self.attached.frozen

    def prepare(self, network: nn.Module) -> None:
        assert isinstance(network, Network)
        backbone_of(network).frozen = self.frozen

    def built(self, spec: ModelSpec) -> dict[str, Tensor]:
        return {name: t for name, t in super().built(spec).items() if not name.startswith(FROZEN)}

    def model(self, server: Server) -> dict[str, Tensor]:
        frozen = {FROZEN + name: tensor.cpu() for name, tensor in self.frozen.state_dict().items()}
        return {**server.weights, **frozen}

    def start_task(self, server: Server, task: int) -> Server:
        started = super().start_task(server, task)
        learned = len(server.spec.tasks), len(started.spec.tasks)
        return replace(
            started, weights=grow_prompts(started.weights, self.adapter, *learned, self.run.generator("prompts", task))
        )

    def trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        own_head = f"heads.{task}." if network.spec.head == "per-task" else "heads."
        return {n: p for n, p in network.named_parameters() if n.startswith(("backbone.prompts.", own_head))}

    def moments_of(self, task: int) -> Part:
        """The outline of its classes' moments."""
        network = self.networks.of(self.run.spec(task + 1))
        rows = len(network.spec.tasks[task]), network.backbone.features
        return outline("prototype", {"weight": rows[:1], "sum": rows, "square": rows}, torch.float64)

    def set_modes(self, network: Network, task: int) -> None:
        network.train()  # which leaves the backbone in evaluation mode

    @property
    def personal(self) -> bool:
        return False

    def own(self, client: Client, network: Network) -> Memory:
        return {}


def classes_on_card(weights: Path) -> set[str]:
    """What weights were trained on, where fcl pretrain's card lies beside them."""
    card = weights.with_name("card.json")
    try:
        return set(checked(_Card, read_json(card)).classes) if card.is_file() else set()
    except (OSError, ValueError) as problem:
        raise UserError(
            f"{card} cannot be read ({problem}). Delete it, or get back what fcl pretrain wrote."
        ) from problem


class _Card(BaseModel):
    """What it says of classes."""

    classes: list[str] = []


def backbone_of(network: Network) -> Adapted:
    assert isinstance(network.backbone, Adapted)
    return network.backbone
