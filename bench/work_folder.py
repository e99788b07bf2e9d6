"""Folder of a workload for processes that need nothing else: the bare loop's and the peers' (see workloads.py)."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from fclmodels.backbones.layers.fast_dropout import Dropout
from fclmodels.backbones.layers.onednn_linear import Linear
from fclmodels.backbones.model.network import Network, build_skeleton
from fclmodels.backbones.model.spec import ModelSpec

TORCHS: dict[type, type] = {Dropout: nn.Dropout, Linear: nn.Linear}  # layers of ours, and what they stand for
DATA, FACTS = "data.safetensors", "facts.json"


class WorkFolder:
    """Inputs and labels of each client, and facts of the network and its training."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    @cached_property
    def facts(self) -> dict[str, Any]:
        return json.loads((self.folder / FACTS).read_text())

    def network(self) -> Network:
        """Return the network, of torch's own layers unless the folder's facts ask for ours."""
        facts = self.facts
        tasks = tuple(tuple(classes) for classes in facts["tasks"])
        network = build_skeleton(ModelSpec(facts["settings"], tuple(facts["shape"]), facts["head"], tasks))
        for layer in () if facts["own layers"] else network.modules():
            if type(layer) in TORCHS:
                layer.__class__ = TORCHS[type(layer)]
        return network

    def optimiser(self, network: Network) -> torch.optim.Optimizer:
        kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
        return kinds[self.facts["optimizer"]["kind"]](network.parameters(), self.facts["optimizer"]["lr"])

    def data(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a client's inputs [n, C, H, W] and labels [n]."""
        with safe_open(self.folder / DATA, framework="pt") as file:
            return file.get_tensor(f"x-{client}"), file.get_tensor(f"y-{client}")
