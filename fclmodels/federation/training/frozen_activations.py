"""Cache of frozen first blocks' activations: computed once a task, then read from a memory-mapped file.

That is right only where nothing of these blocks changes in training and a sample always looks the same; otherwise
`model.keep_frozen` is refused. Replayed and drawn samples pass these blocks in each step, without gradients. Results
equal those without the cache up to rounding, as batches differ. It takes 4 bytes a number: n samples times the blocks'
output, in the run's folder.
"""

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.executors.base import set_torch_threads
from fclmodels.settings.schema import AugmentSettings
from fclmodels.source_digest import digest_sources
from fclmodels.storage import trees
from fclmodels.storage.array_cache import load_or_compute
from fclmodels.storage.digests import digest_json

if TYPE_CHECKING:
    from fclmodels.federation.method import Method

AT_ONCE = 128  # samples that pass the blocks together


@dataclass(frozen=True)
class Activations:
    """The activations of a client's samples behind the first blocks."""

    samples: Tensor  # [n], in ascending order
    rows: Tensor  # [n, ...], an activation for each sample
    blocks: int  # how many blocks they have passed

    def gather_rows(self, batch: Batch, backbone: FeatureNet) -> Tensor:
        """Return the rows of a batch's samples; those of others, such as replayed ones, are computed."""
        assert batch.samples is not None
        samples = batch.samples.cpu()
        others = samples < 0
        rows = self.rows[torch.searchsorted(self.samples, samples)].to(batch.inputs.device)
        if others.any():
            rows[others] = self.compute(batch.inputs[others], backbone)
        return rows

    def compute(self, inputs: Tensor, backbone: FeatureNet) -> Tensor:
        """Return the activations of any inputs: the blocks are frozen, so no gradient is lost."""
        with torch.no_grad():
            return backbone.run_first(inputs, self.blocks)


def compute_activations(client: Client, network: Network, trained: Collection[str]) -> Activations | None:
    """Return the activations of the client's train rows; None where the first block trains, as in the first task."""
    run, blocks = client.run, count_frozen_blocks(network, trained)
    if not blocks:
        return None
    assert run.home is not None
    rows = client.rows.take(np.argsort(client.rows.samples, kind="stable"))
    names = tuple(f"{name}." for name in network.backbone.blocks[:blocks])
    about = {
        "weights": trees.digest({n: t for n, t in network.backbone.state_dict().items() if n.startswith(names)}),
        "model": [blocks, *network.spec.settings.items()],
        "data": [run.splits.digest, client.task, hashlib.sha256(rows.samples.tobytes()).hexdigest()],
        "on": [run.device.type, torch.__version__],
        "code": digest_sources(type(network.backbone).__module__),
    }
    digest = digest_json(about)

    def compute() -> Iterator[Tensor]:
        for batch in run.batches.iterate_ordered(rows, AT_ONCE):
            yield network.backbone.run_first(batch.inputs, blocks)

    with set_torch_threads(1), torch.inference_mode():  # the same to the bit whoever computes them
        arrays = load_or_compute(run.home / "activations", digest, len(rows), compute)
    return Activations(torch.from_numpy(rows.samples), arrays, blocks)


def count_frozen_blocks(network: Network, trained: Collection[str]) -> int:
    """Return how many of the first blocks training leaves as they are.

    No weight of theirs is trained, and no layer behaves differently in training mode.
    """
    names = network.backbone.blocks
    for count, name in enumerate(names):
        block = network.backbone.get_submodule(name)
        if any(n.startswith(f"backbone.{name}.") for n in trained) or any(map(_depends_on_mode, block.modules())):
            return count
    return len(names)


def _depends_on_mode(module: nn.Module) -> bool:
    """Return whether a layer normalises by the batch or drops units."""
    if isinstance(module, _BatchNorm):
        return module.training or module.running_mean is None
    return isinstance(module, _DropoutNd) and module.training and module.p > 0


def refuse_what_cannot_be_kept(method: "Method", network: Network) -> None:
    """Raise UserError where the cached activations would not be those of the network."""
    run, setting = method.run, "model.keep_frozen: "
    frozen = set(run.params.model.freeze)
    if not frozen or not method.freezes(1):
        raise UserError(f"{setting}nothing is frozen here. Name the first blocks in model.freeze, or leave it out.")
    if run.params.augment != AugmentSettings():
        raise UserError(f"{setting}augment changes the samples in each epoch. Leave one of the two out.")
    if not network.backbone.divisible:
        raise UserError(f"{setting}{run.params.model.backbone} cannot be entered between two blocks. Leave it out.")
    if not method.uses_frozen_activations:
        raise UserError(f"{setting}methods.{method.name} needs samples from the first block on. Leave it out.")
    if run.home is None:
        raise UserError(f"{setting}this run has no folder to keep them in. Leave it out.")
    method.set_modes(network, 1)
    first = network.backbone.blocks[: count_frozen_blocks(network, method.select_trainable(network, 1))]
    if later := [name for name in network.backbone.blocks if name in frozen.difference(first)]:
        changing = network.backbone.blocks[len(first)]
        why = "is trained" if changing not in frozen else "normalises by each batch, or drops units"
        raise UserError(
            f"{setting}{later[0]} is frozen, but {changing} {why}. Freeze all blocks from the first one on."
        )
