"""What FOT, FedProTIP and GPM share: a basis of each layer's input that grows by every task, and is kept clear of.

knowledge: `bases` {layer: O [d, r]}, columns appended task by task; `ranks` {layer: [r after each task]}; `spectra`
{layer: singular values of the last extraction}; `columns` {layer: [taken, of so many] of the last extraction}.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, PositiveInt
from torch import Tensor

from fclmodels.backbones.capture import BATCH, Layer, layers_of, observe
from fclmodels.backbones.layer_inputs import LayerInputs
from fclmodels.backbones.network import Network
from fclmodels.backbones.projection import project_update, split_by_width
from fclmodels.errors import UserError, did_you_mean
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Part
from fclmodels.federation.server import Server
from fclmodels.kinds import TEXTS, kind_of
from fclmodels.methods.fedavg import FedAvg
from fclmodels.numerics.subspace import union

Bases = dict[str, Tensor]
# The share of a layer's input space beyond which its basis counts as full.
FULL = 0.99


class Subspaces(FedAvg):
    class Settings(FedAvg.Settings):
        threshold: float = Field(
            0.95, gt=0, le=1, description="share of a layer's input that the first task's basis keeps"
        )
        threshold_step: float = Field(0.001, ge=0, le=1, description="the threshold rises by this with each task")
        samples: PositiveInt | None = Field(256, description="images a client looks at to find a basis; null: all")
        patches: PositiveInt | None = Field(
            512, description="m_s, random columns of each layer's input that a client takes; null: all"
        )
        protect: tuple[str, ...] | None = Field(
            None, description="blocks of the backbone that are protected; null: all that are not frozen"
        )
        head: Literal["auto", "protected", "free"] = Field(
            "auto",
            description="whether the head is protected; auto: where no later task brings new classes",
        )

    settings: Settings

    def setup(self) -> Server:
        if kind_of(self.run.splits.shape) is TEXTS:
            # Padding passes the layers too, and would stand in the bases though no loss depends on it.
            raise UserError(
                f"methods.{self.name} finds bases from images, these samples are texts. Use another method."
            )
        if self.settings.head == "protected" and self.run.spec(1).head == "per-task":
            raise UserError(
                f"methods.{self.name}.head: protected needs a head that tasks share; here each task has its own, which "
                "nothing moves later. Use head: auto."
            )
        server = super().setup()
        layers = self.layers(self.networks.load(server.spec, server.weights))
        if self.settings.protect and not layers:
            raise UserError(
                f"methods.{self.name}.protect: none of these blocks has a layer that model.freeze leaves free. "
                "Name others, or freeze fewer."
            )
        empty = {name: layer.module.weight.new_zeros(layer.width, 0) for name, layer in layers.items()}
        bases = {name: basis.detach().cpu() for name, basis in empty.items()}
        return replace(server, knowledge={"bases": bases, "ranks": {name: [] for name in bases}})

    def start_task(self, server: Server, task: int) -> Server:
        """What lies orthogonal to a basis of more than d/2 columns is narrower: projections use that."""
        server = super().start_task(server, task)
        _, complements = split_by_width(server.knowledge["bases"])
        return replace(server, knowledge={**server.knowledge, "complements": complements})

    def guard(self, server: Server) -> dict[str, Bases]:
        """Of each layer that has a basis, the narrower of it and its complement."""
        complements = server.knowledge["complements"]
        bases = {
            name: basis
            for name, basis in server.knowledge["bases"].items()
            if basis.shape[1] and name not in complements
        }
        return {"bases": bases, "complements": complements}

    def guard_parts(self, server: Server) -> dict[str, Part]:
        """The same as parts of a payload, which a client downloads once a task."""
        return {name: Part("basis", bases, once=True) for name, bases in self.guard(server).items() if bases}

    def admissible(self, server: Server, changes: dict[str, Tensor]) -> dict[str, Tensor]:
        """P: changes of weights, by name, without what acts on the protected span (FOT eq. 6, FedProTIP eq. 4)."""
        layers = self.layers(self.networks.load(server.spec, server.weights))
        return project_update(changes, layers, **self.guard(server))

    def layers(self, network: Network) -> dict[str, Layer]:
        """The protected layers of the network, by name."""
        return {name: layer for name, layer in self._all_layers(network).items() if self._protects(name)}

    def _all_layers(self, network: Network) -> dict[str, Layer]:
        # A network stays the same object until its head grows; finding its layers takes a forward pass.
        known = getattr(self, "_known_layers", None)
        if known is None or known[0] is not network:
            self._refuse_unknown_blocks(network)
            known = self._known_layers = (network, layers_of(network, self.run.splits.shape))
        return known[1]

    def _protects(self, layer: str) -> bool:
        place, block = layer.split(".")[:2]
        if place == "heads":
            return self._protects_the_head
        protect = self.settings.protect
        return block not in self.run.params.model.freeze and (protect is None or block in protect)

    @property
    def _protects_the_head(self) -> bool:
        """Where no task brings new rows, or as set; a head of one task's own moves in that task only.

        Where only some classes come again, the rows of new ones must learn from features that earlier tasks had too.
        """
        if self.run.spec(1).head == "per-task":
            return False
        return {"auto": self.no_new_classes, "protected": True, "free": False}[self.settings.head]

    @property
    def no_new_classes(self) -> bool:
        """Whether all tasks are about the first one's classes, as domains are; one may lack some of them.

        Of a stream that goes on nobody knows.
        """
        if self.run.splits.grows:
            return False
        classes = [set(task.classes) for task in self.run.splits.tasks]
        return len(classes) > 1 and all(of_task <= classes[0] for of_task in classes)

    def _refuse_unknown_blocks(self, network: Network) -> None:
        for block in self.settings.protect or ():
            if block not in network.backbone.blocks:
                name = type(self).name
                hint = did_you_mean(block, network.backbone.blocks)
                raise UserError(f"methods.{name}.protect: {block} is not a block of this backbone. {hint}")

    def threshold(self, task: int) -> float:
        return min(1.0, self.settings.threshold + self.settings.threshold_step * task)

    def observe(
        self, client: Client, network: Network, layers: dict[str, Layer], kept: int = 0
    ) -> dict[str, LayerInputs]:
        """What these layers see of the client's images, or of some of them."""
        random = client.generator("observe")
        rows = client.rows.some(self.settings.samples, random)

        def inputs() -> Iterator[Tensor]:
            for batch in self.run.batches.ordered(rows, BATCH):
                yield batch.inputs

        return observe(network, layers, inputs(), len(rows), self.settings.patches, random, kept)

    def extended(self, server: Server, directions: Bases, **facts: Any) -> Server:
        """The server whose bases cover these directions {layer: [d, k]} too; facts join its knowledge."""
        return self.with_bases(server, union(server.knowledge["bases"], directions), **facts)

    def remarks(self, knowledge: Any) -> list[str]:
        """From which task on most layers are full."""
        widths = {name: basis.shape[0] for name, basis in knowledge["bases"].items()}
        full = {name: [rank >= FULL * widths[name] for rank in ranks] for name, ranks in knowledge["ranks"].items()}
        for task, filled in enumerate(map(sum, zip(*full.values(), strict=True)), 1):
            if 2 * filled > len(widths):
                return [
                    f"after task {task} the bases fill {filled} of {len(widths)} protected layers: nothing more is "
                    f"learned in these. A lower methods.{self.name}.threshold ({self.settings.threshold:g}) leaves room"
                ]
        return []

    def with_bases(self, server: Server, bases: Bases, **facts: Any) -> Server:
        """The server after a task that ended with these bases."""
        ranks = {name: [*server.knowledge["ranks"][name], basis.shape[1]] for name, basis in bases.items()}
        kept = {name: value for name, value in server.knowledge.items() if name != "complements"}
        return replace(server, knowledge={**kept, **facts, "bases": bases, "ranks": ranks})
