"""The protected subspace of FOT, FedProTIP and GPM: a basis of each layer's input, which every task makes larger.

knowledge: `bases` {layer: O [d, r]}, columns appended task by task; `ranks` {layer: [r after each task]}; `thresholds`
[of each task]; `spectra` {layer: singular values of the last extraction}; `columns` {layer: [used, all] columns of it}.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fclmodels.backbones.inputs.gradient_projection import project_update, split_by_width
from fclmodels.backbones.inputs.layer_capture import BATCH, Layer, find_layers, observe_inputs
from fclmodels.backbones.inputs.layer_inputs import LayerInputs
from fclmodels.backbones.inputs.layer_names import find_module_name
from fclmodels.backbones.model.network import Network
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.errors import UserError, suggest_name
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.numerics.subspace import WIDE, limit_columns, union
from fclmodels.settings.base import Settings as BaseSettings

Bases = dict[str, Tensor]
# The share of a layer's input space beyond which its basis counts as full.
FULL = 0.99


class SubspaceSettings(BaseSettings):
    threshold: float = Field(0.95, gt=0, le=1, description="share of a layer's input that the first task's basis keeps")
    threshold_step: float = Field(0.001, ge=0, le=1, description="the threshold rises by this with each task")
    budget: float = Field(
        0.25, gt=0, le=1, description="largest share of a layer's directions still free that one task may fill (ours)"
    )
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


class ProtectedSubspace:
    """Finds the protected layers and their inputs, holds bases in the server's knowledge, and projects changes."""

    def __init__(self, settings: SubspaceSettings, run: Run, method: str) -> None:
        self.settings = settings
        self.run = run
        self.method = method
        self._cached_layers: tuple[Network, dict[str, Layer]] | None = None

    # On the server.

    def begin(self, network: Network) -> dict[str, Any]:
        """Return the knowledge before the first task: bases without columns."""
        self._refuse_unfit_data()
        layers = self.list_layers(network)
        if self.settings.protect and not layers:
            raise UserError(
                f"methods.{self.method}.protect: none of these blocks has a layer that model.freeze leaves free. "
                "Name others, or freeze fewer."
            )
        empty = {name: layer.module.weight.new_zeros(layer.width, 0) for name, layer in layers.items()}
        bases = {name: basis.detach().cpu() for name, basis in empty.items()}
        return {"bases": bases, "ranks": {name: [] for name in bases}, "thresholds": []}

    def start_task(self, server: Server) -> Server:
        """Return the server with complements, which are narrower than bases of more than d/2 columns."""
        _, complements = split_by_width(server.knowledge["bases"])
        return replace(server, knowledge={**server.knowledge, "complements": complements})

    def choose_spans(self, server: Server) -> dict[str, Bases]:
        """Return of each layer that has a basis the narrower of it (`bases`) and its complement (`complements`)."""
        complements = server.knowledge["complements"]
        bases = {
            name: basis
            for name, basis in server.knowledge["bases"].items()
            if basis.shape[1] and name not in complements
        }
        return {"bases": bases, "complements": complements}

    def make_payload(self, server: Server) -> Payload:
        """Return the spans as parts that a client downloads once a task."""
        return {name: Part("basis", bases, once=True) for name, bases in self.choose_spans(server).items() if bases}

    def project(self, server: Server, network: Network, changes: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return changes of weights, by name, without what acts on the protected span (FOT eq. 6, FedProTIP eq. 4)."""
        return project_update(changes, self.list_layers(network), **self.choose_spans(server))

    def extend(self, server: Server, directions: Bases, threshold: float, **facts: Any) -> Server:
        """Return the server whose bases cover these directions {layer: [d, k]} too; facts join its knowledge."""
        return self.replace_bases(server, union(server.knowledge["bases"], directions), threshold, **facts)

    def replace_bases(self, server: Server, bases: Bases, threshold: float, **facts: Any) -> Server:
        """Return the server after a task that ended with these bases, found by this threshold."""
        ranks = {name: [*server.knowledge["ranks"][name], basis.shape[1]] for name, basis in bases.items()}
        thresholds = [*server.knowledge["thresholds"], threshold]
        knowledge = {name: value for name, value in server.knowledge.items() if name != "complements"}
        facts |= {"bases": bases, "ranks": ranks, "thresholds": thresholds}
        return replace(server, knowledge={**knowledge, **facts})

    def find_threshold(self, task: int) -> float:
        return min(1.0, self.settings.threshold + self.settings.threshold_step * task)

    def limit_rank(self, rank: int, basis: Tensor) -> int:
        """Return how many directions a task may add to a basis [d, r], of so many that it asks for: within budget."""
        free = basis.shape[0] - basis.shape[1]
        return min(rank, math.ceil(self.settings.budget * free))

    def list_remarks(self, knowledge: Any) -> list[str]:
        """Return a line that says from which task on most layers are full, and one of wide layers without room."""
        return [*self._list_full_layers(knowledge), *self._list_layers_without_room(knowledge["bases"])]

    def _list_full_layers(self, knowledge: Any) -> list[str]:
        widths: dict[str, int] = {}
        ranks: dict[str, list[int]] = {}
        for name, basis in knowledge["bases"].items():
            module, of_tasks = find_module_name(name), knowledge["ranks"][name]
            widths[module] = widths.get(module, 0) + basis.shape[0]
            ranks[module] = [a + b for a, b in zip(ranks.get(module, [0] * len(of_tasks)), of_tasks, strict=True)]
        full = {name: [rank >= FULL * widths[name] for rank in of_tasks] for name, of_tasks in ranks.items()}
        for task, filled in enumerate(map(sum, zip(*full.values(), strict=True)), 1):
            if 2 * filled > len(widths):
                return [
                    f"after task {task} the bases fill {filled} of {len(widths)} protected layers: nothing more is "
                    f"learned in these. A lower methods.{self.method}.threshold ({self.settings.threshold:g}) leaves "
                    "room"
                ]
        return []

    def _list_layers_without_room(self, bases: Bases) -> list[str]:
        return [
            f"{name}: its basis has all {basis.shape[1]} columns that a layer of {len(basis)} inputs may have, for "
            "memory's sake, and no further directions are protected. Use smaller images or a backbone that pools"
            for name, basis in bases.items()
            if len(basis) > WIDE and basis.shape[1] == limit_columns(len(basis), len(basis))
        ]

    # The layers and their inputs.

    def list_layers(self, network: Network) -> dict[str, Layer]:
        """Return the protected layers of the network, by name."""
        return {name: layer for name, layer in self.list_all_layers(network).items() if self._protects(name)}

    def list_all_layers(self, network: Network) -> dict[str, Layer]:
        """Return all layers whose inputs can be protected, by name."""
        # A network stays the same object until its head grows; finding its layers takes a forward pass.
        if self._cached_layers is None or self._cached_layers[0] is not network:
            self._refuse_unknown_blocks(network)
            self._cached_layers = (network, find_layers(network, self.run.splits.shape))
        return self._cached_layers[1]

    def observe(
        self, client: Client, network: Network, layers: dict[str, Layer], column_limit: int = 0
    ) -> dict[str, LayerInputs]:
        """Return the inputs of these layers for the client's images, or for `samples` of them.

        column_limit: up to so many columns are stored as columns even where their Gram matrix is smaller.
        """
        random = client.make_generator("observe")
        rows = client.rows.draw_some(self.settings.samples, random)

        def inputs() -> Iterator[Tensor]:
            for batch in self.run.batches.iterate_ordered(rows, BATCH):
                yield batch.inputs

        return observe_inputs(network, layers, inputs(), len(rows), self.settings.patches, random, column_limit)

    def _protects(self, layer: str) -> bool:
        if layer.startswith("heads."):
            return self._protects_head
        protect = self.settings.protect
        return not _lies_in(layer, self.run.params.model.freeze) and (protect is None or _lies_in(layer, protect))

    @property
    def _protects_head(self) -> bool:
        """Return whether the head is protected: as set, and by default where no task brings new rows.

        A head of one task's own moves in that task only. Where only some classes come again, the rows of new ones must
        learn from features that earlier tasks had too.
        """
        if self.run.make_spec(1).head == "per-task":
            return False
        return {"auto": has_no_new_classes(self.run), "protected": True, "free": False}[self.settings.head]

    # Refusals.

    def _refuse_unfit_data(self) -> None:
        if find_kind(self.run.splits.shape) is TEXTS:
            # Padding passes the layers too, and would stand in the bases though no loss depends on it.
            raise UserError(
                f"methods.{self.method} finds bases from images, these samples are texts. Use another method."
            )
        if self.settings.head == "protected" and self.run.make_spec(1).head == "per-task":
            raise UserError(
                f"methods.{self.method}.head: protected needs a head that tasks share; here each task has its own, "
                "which nothing moves later. Use head: auto."
            )

    def _refuse_unknown_blocks(self, network: Network) -> None:
        for block in self.settings.protect or ():
            if block not in network.backbone.blocks:
                hint = suggest_name(block, network.backbone.blocks)
                raise UserError(f"methods.{self.method}.protect: {block} is not a block of this backbone. {hint}")


def _lies_in(layer: str, blocks: Sequence[str]) -> bool:
    """Return whether a layer of the backbone is one of these blocks or a part of one."""
    return f"{layer}.".startswith(tuple(f"backbone.{block}." for block in blocks))


def measure_energy(X: LayerInputs, basis: Tensor, samples: int) -> Tensor:
    """Return ||X||^2, ||X*||^2, n ||X*|| / ||X|| and n of a layer's input over n samples, X* = X - O O^T X."""
    energy, outside = X.measure_energy(), X.measure_energy(basis)
    ratio = (outside / energy) ** 0.5 if energy else 0.0
    return torch.tensor([energy, outside, samples * ratio, samples], dtype=torch.float64)


def has_no_new_classes(run: Run) -> bool:
    """Return whether all tasks are about the first one's classes, as domains are; one may lack some of them.

    Of a stream that goes on nobody knows.
    """
    if run.splits.grows:
        return False
    classes = [set(task.classes) for task in run.splits.tasks]
    return len(classes) > 1 and all(of_task <= classes[0] for of_task in classes)
