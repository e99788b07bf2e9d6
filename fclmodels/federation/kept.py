"""What frozen first blocks give of a client's samples: computed once a task, then read from a memory-mapped file.

That is right only where nothing of these blocks changes in training and a sample always looks the same; otherwise
`model.keep_frozen` is refused. Results are those without it up to rounding: samples pass the blocks in other batches.
"""

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fclmodels import state
from fclmodels.backbones.network import Network
from fclmodels.backbones.queries import kept
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.executor import torch_threads
from fclmodels.fingerprint import source_closure
from fclmodels.settings import AugmentSettings

if TYPE_CHECKING:
    from fclmodels.methods.fedavg import FedAvg

AT_ONCE = 128  # samples that pass the blocks together


@dataclass(frozen=True)
class Activations:
    """rows [n, ...]: what the first `blocks` blocks give of these samples [n], which are in order."""

    samples: Tensor
    rows: Tensor
    blocks: int

    def of(self, batch: Batch) -> Tensor:
        assert batch.samples is not None
        places = torch.searchsorted(self.samples, batch.samples.cpu())
        return self.rows[places].to(batch.inputs.device)


def activations(client: Client, network: Network, trained: Collection[str]) -> Activations | None:
    """Those of the client's train rows; None where the first block is trained, as all are in the first task."""
    run, blocks = client.run, still(network, trained)
    if not blocks:
        return None
    assert run.home is not None
    rows = client.rows.take(np.argsort(client.rows.samples, kind="stable"))
    names = tuple(f"{name}." for name in network.backbone.blocks[:blocks])
    about = {
        "weights": state.digest({n: t for n, t in network.backbone.state_dict().items() if n.startswith(names)}),
        "model": [blocks, *network.spec.settings.items()],
        "data": [run.splits.digest, client.task, hashlib.sha256(rows.samples.tobytes()).hexdigest()],
        "on": [run.device.type, torch.__version__],
        "code": source_closure(type(network.backbone).__module__),
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def compute() -> Iterator[Tensor]:
        for batch in run.batches.ordered(rows, AT_ONCE):
            yield network.backbone.up_to(batch.inputs, blocks)

    with torch_threads(1), torch.inference_mode():  # the same to the bit whoever computes them
        found = kept(run.home / "activations", digest, len(rows), compute)
    return Activations(torch.from_numpy(rows.samples), found, blocks)


def still(network: Network, trained: Collection[str]) -> int:
    """How many of the first blocks stay as they are in training: no weight is trained, no layer has a training mode
    that shows."""
    names = network.backbone.blocks
    for count, name in enumerate(names):
        block = network.backbone.get_submodule(name)
        if any(n.startswith(f"backbone.{name}.") for n in trained) or any(map(_moves, block.modules())):
            return count
    return len(names)


def _moves(module: nn.Module) -> bool:
    if isinstance(module, _BatchNorm):
        return module.training or module.running_mean is None
    return isinstance(module, _DropoutNd) and module.training and module.p > 0


def refuse_what_cannot_be_kept(method: "FedAvg", network: Network) -> None:
    """In the words of the settings: why frozen blocks' activations would not be what the network gives."""
    run, said = method.run, "model.keep_frozen: "
    frozen = set(run.params.model.freeze)
    if not frozen or not method.freezes(1):
        raise UserError(f"{said}nothing is frozen here. Name the first blocks in model.freeze, or leave it out.")
    if run.params.augment != AugmentSettings():
        raise UserError(f"{said}augment changes the samples in each epoch. Leave one of the two out.")
    if not network.backbone.divisible:
        raise UserError(f"{said}{run.params.model.backbone} cannot be entered between two blocks. Leave it out.")
    if not method.loss_is_of_features:
        raise UserError(f"{said}methods.{method.name} has a loss of its own, which needs the samples. Leave it out.")
    if run.home is None:
        raise UserError(f"{said}this run has no folder to keep them in. Leave it out.")
    method.set_modes(network, 1)
    first = network.backbone.blocks[: still(network, method.trainable(network, 1))]
    if left := [name for name in network.backbone.blocks if name in frozen.difference(first)]:
        moves = network.backbone.blocks[len(first)]
        why = "is trained" if moves not in frozen else "normalises by each batch, or drops units"
        raise UserError(f"{said}{left[0]} is frozen, but {moves} {why}. Freeze all blocks from the first one on.")
