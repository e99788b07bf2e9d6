"""A work as processes read it that should hold nothing else: the bare loop's and the peers' (works.handed_over)."""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from fclmodels.backbones.dropout import Dropout
from fclmodels.backbones.linear import Linear
from fclmodels.backbones.network import Network, skeleton
from fclmodels.backbones.spec import ModelSpec

TORCHS: dict[type, type] = {Dropout: nn.Dropout, Linear: nn.Linear}  # layers of ours, and what they stand for
DATA, FACTS = "data.safetensors", "facts.json"


class Handed:
    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    @cached_property
    def facts(self) -> dict[str, Any]:
        return json.loads((self.folder / FACTS).read_text())

    def network(self) -> Network:
        """Of torch's own layers, as anybody writes it, unless it is to have ours."""
        told = self.facts
        tasks = tuple(tuple(classes) for classes in told["tasks"])
        network = skeleton(ModelSpec(told["settings"], tuple(told["shape"]), told["head"], tasks))
        for layer in () if told["own layers"] else network.modules():
            if type(layer) in TORCHS:
                layer.__class__ = TORCHS[type(layer)]
        return network

    def optimiser(self, network: Network) -> torch.optim.Optimizer:
        kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
        return kinds[self.facts["optimizer"]["kind"]](network.parameters(), self.facts["optimizer"]["lr"])

    def data(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A client's inputs and labels."""
        with safe_open(self.folder / DATA, framework="pt") as file:
            return file.get_tensor(f"x-{client}"), file.get_tensor(f"y-{client}")
