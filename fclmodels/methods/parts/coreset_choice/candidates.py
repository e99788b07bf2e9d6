"""The samples among which a client chooses when a task has ended, and what the rules of choice do with them."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fclmodels.backbones.model.network import FROZEN, Network, build_network, list_frozen
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.methods.parts.joined_heads import compute_cross_entropy_in_heads, find_columns


@dataclass(frozen=True)
class Candidates:
    """A task's samples that have not been stored yet, and those of earlier tasks that have."""

    client: Client
    network: Network  # the final global model, in evaluation mode
    new: Batch  # as prepared, not normalised
    old: Batch
    stays: Mapping[int, Tensor]  # of each class of either, the places of its stored samples that stay
    room: Mapping[int, int]  # of each class of the task, for how many of its samples there is room
    seen: Mapping[str, int]  # how many samples of a class the client has had

    def find_places(self, label: int) -> Tensor:
        """Return the places of a class among the new samples."""
        return self.new.labels.cpu().eq(label).nonzero().flatten()

    def prepare(self, places: Tensor) -> Batch:
        """Return the new samples at these places as the network takes them."""
        return self.client.run.batches.prepare_inputs(self.new.take(places))

    def iterate(self, raw: Batch, size: int) -> Iterator[Batch]:
        """Yield new or stored samples as the network takes them, so many at a time: all at once may not fit."""
        for places in torch.arange(len(raw.labels)).split(size):
            yield self.client.run.batches.prepare_inputs(raw.take(places))

    def take_best(self, scores: Tensor) -> dict[int, Tensor]:
        """Return of each class the places of the new samples with the highest scores [n], the best first."""
        best = {}
        for label, room in self.room.items():
            places = self.find_places(label)
            best[label] = places[scores[places].argsort(descending=True, stable=True)[:room]]
        return best

    def copy_network(self) -> Network:
        """Return the final model for training on: its parameters move, but for those of frozen blocks."""
        network = copy.deepcopy(self.network)
        frozen = list_frozen(network.spec, network)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name not in frozen and not name.startswith(FROZEN))
        return network

    def draw_network(self, purpose: str) -> Network:
        """Return a network as training starts from, drawn anew."""
        network = self.copy_network()
        drawn = build_network(network.spec, self.client.make_generator(purpose)).state_dict()
        network.load_state_dict({name: drawn[name] for name in network.state_dict()})
        return network


def measure_losses(network: Network, batch: Batch) -> Tensor:
    """Return each sample's cross entropy [B]: over all classes so far, or in its task's own head."""
    columns = find_columns(network.spec, batch.labels, batch.tasks)
    return compute_cross_entropy_in_heads(network, network.backbone(batch.inputs), columns)


def list_trained(network: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in network.parameters() if parameter.requires_grad]
