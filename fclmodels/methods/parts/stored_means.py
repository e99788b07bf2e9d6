"""The nearest mean of stored samples over all clients, which answers in a head's place (iCaRL, SCR).

Each client sends the sums of its stored samples' features, each of length 1, on the final model, and their numbers, by
column of the logits. A column's mean is its sum, scaled to length 1: the nearest of unit vectors has the largest
product, whatever the length of the feature that it is compared with.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fclmodels.backbones.model.network import Network
from fclmodels.federation.client import Client
from fclmodels.federation.exchange import Memory
from fclmodels.federation.messages import Part, make_outline
from fclmodels.methods.parts.coreset_memory import embed
from fclmodels.methods.parts.joined_heads import count_columns, find_columns
from fclmodels.methods.parts.replay_memory import unpack_samples
from fclmodels.numerics.fitted_heads import NEVER
from fclmodels.numerics.prototypes import LEAST


def outline_sums(network: Network, most: int) -> Part:
    """Return the outline of a client's numbers [C] and sums [C, F] of at most so many stored samples."""
    columns = count_columns(network.spec)
    shapes = {"weight": (columns,), "sum": (columns, network.backbone.features)}
    # Of m features of length 1, counts and sums are each m long at most.
    return make_outline("prototype", shapes, torch.float64, bound=2**0.5 * most)


@torch.no_grad()
def sum_features(client: Client, network: Network, memory: Memory) -> dict[str, Tensor]:
    """Return the numbers of a memory's samples and the sums of their features of length 1, by column."""
    columns, samples = count_columns(network.spec), unpack_samples(memory)
    weight = torch.zeros(columns, dtype=torch.float64)
    total = torch.zeros(columns, network.backbone.features, dtype=torch.float64)
    if samples is not None:
        places = find_columns(network.spec, samples.labels, samples.tasks).cpu()
        weight = places.bincount(minlength=columns).double()
        total = total.index_add(0, places, normalize(embed(client, network, samples).double()))
    return {"weight": weight, "sum": total}


def fit_directions(sums: dict[str, Tensor], noise: float) -> dict[str, Tensor]:
    """Return the head of the means, {weight [C, F], bias [C]}; a class without samples beyond noise never answers."""
    present = sums["weight"] > LEAST * noise
    directions = normalize(sums["sum"]).where(present[:, None], 0.0).float()
    return {"weight": directions, "bias": torch.zeros(len(present)).masked_fill(~present, NEVER)}
