"""What `fcl init` chooses for a folder of images and this machine: backbone, size, rounds and methods, with reasons."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fclmodels.backbones.weights.published_weights import PUBLISHERS
from fclmodels.plugins import find
from flows.cli.init_folder import FolderSummary, format_range
from flows.cli.init_machine import Machine

BATCH = 32
STEPS = 300  # of a client in each task, as far as the limits below allow
ROUNDS = (5, 15)  # in each task, at least and at most
EPOCHS = 4  # of a client in a round, at most
MINUTES = 5  # of FedAvg's training, at most
CPU_SIDE, GPU_SIDE = 32, 64  # pixels, at most
STORED = 5  # a client of er stores one image of so many
PRETRAINED = Path("data/pretrained")
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


@dataclass(frozen=True)
class Offer:
    """Pretrained weights that are on this machine, and the settings with which a run starts from them."""

    name: str
    settings: Mapping[str, Any]

    @property
    def command(self) -> str:
        """Return a command that starts a run from them."""
        settings = (f"--set {shlex.quote(f'{name}={json.dumps(value)}')}" for name, value in self.settings.items())
        return f"fcl run --method er {' '.join(settings)}"


@dataclass(frozen=True)
class ChosenSetting:
    """A setting's value, and the reason for it."""

    setting: str
    value: str
    why: str


def choose_settings(summary: FolderSummary, machine: Machine) -> dict[str, ChosenSetting]:
    """Return choices that suit the images and the machine, by the setting's last name."""
    size, rounds = _choose_size(summary, machine), _choose_rounds(summary)
    choices = (
        size,
        _choose_backbone(machine),
        rounds,
        _choose_epochs(summary, int(size.value), int(rounds.value), machine),
        _choose_memory(summary),
        _choose_methods(summary),
    )
    return {choice.setting.rpartition(".")[2]: choice for choice in choices}


def find_offer(summary: FolderSummary) -> Offer | None:
    """Return pretrained weights that are at hand for such images: the project's own, else ImageNet's."""
    for card in sorted(PRETRAINED.glob("*/card.json")):
        if offer := _read_card(card, summary.channels):
            return offer
    import torch

    file = Path(torch.hub.get_dir(), "checkpoints", PUBLISHERS["torchvision"].files["resnet18"])
    if summary.channels == 3 and summary.side >= GPU_SIDE and file.is_file():
        model = {"backbone": "resnet18", "weights": "torchvision"}
        return Offer("ImageNet's of resnet18", _list_settings({"size": GPU_SIDE, **IMAGENET}, model))
    return None


def _read_card(card: Path, channels: int) -> Offer | None:
    """Return an offer of what `fcl pretrain` has left, where it was trained on images of so many channels."""
    try:
        content = json.loads(card.read_text())
        (depth, height, width), backbone = content["shape"], content["backbone"]
        defaults = find("backbone", backbone).Settings().model_dump(mode="json")
        own = {name: value for name, value in content["settings"]["model"].items() if value != defaults.get(name)}
        data = {"size": height, "mean": content["mean"], "std": content["std"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if (depth, height) != (channels, width):
        return None
    model = {**own, "backbone": backbone, "weights": str(card.with_name("weights.safetensors"))}
    return Offer(f"{card.parent}, a {backbone} trained on {content['source']}", _list_settings(data, model))


def _list_settings(data: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    return {**{f"data.{name}": value for name, value in data.items()}, "model": model, "optimizer.lr": 0.01}


def _choose_size(summary: FolderSummary, machine: Machine) -> ChosenSetting:
    most = GPU_SIDE if machine.gpu else CPU_SIDE
    size = min(most, 2 ** (summary.side.bit_length() - 1))
    why = f"sides of the images: {format_range(summary.sides)}"
    if summary.side > most:
        why += "; more pixels take longer, in proportion"
    return ChosenSetting("data.size", str(size), why)


def _choose_backbone(machine: Machine) -> ChosenSetting:
    if machine.gpu:
        return ChosenSetting("model.backbone", "resnet18", f"for the GPU, {machine.gpu}")
    return ChosenSetting("model.backbone", "cnn", "small enough to be trained without a GPU")


def _choose_rounds(summary: FolderSummary) -> ChosenSetting:
    """Return as many rounds as give a client its steps of a task, and no more, for each sends the model twice."""
    steps = _count_steps(summary)
    rounds = max(ROUNDS[0], min(ROUNDS[1], -(-STEPS // steps)))
    why = f"in each task; an epoch is {steps} step{'s' * (steps > 1)} of a client, and each round sends the model twice"
    return ChosenSetting("federation.rounds", str(rounds), why)


def _choose_epochs(summary: FolderSummary, size: int, rounds: int, machine: Machine) -> ChosenSetting:
    """Return as many epochs as give a client its steps of a task, if the time allows."""
    needed = -(-STEPS // (rounds * _count_steps(summary)))
    if machine.gpu:
        return ChosenSetting("federation.local_epochs", str(min(EPOCHS, needed)), f"of each round, on {machine}")
    seconds = rounds * summary.count * size**2 * machine.pixel_seconds / machine.cores  # of one epoch a round
    epochs = max(1, min(EPOCHS, needed, int(60 * MINUTES / seconds)))
    minutes = max(1, round(epochs * seconds / 60))
    return ChosenSetting(
        "federation.local_epochs", str(epochs), f"fedavg trains for some {minutes} min on {machine}, as tried"
    )


def _count_steps(summary: FolderSummary) -> int:
    """Return the steps of an epoch of a client."""
    return -(-summary.images_of_client // BATCH)


def _choose_memory(summary: FolderSummary) -> ChosenSetting:
    images = summary.images_of_client * summary.tasks
    return ChosenSetting(
        "methods.er.memory", str(-(-images // STORED)), f"images that each client stores, of about {images}"
    )


def _choose_methods(summary: FolderSummary) -> ChosenSetting:
    if len(summary.domains) > 1:
        why = "the same classes in each task: er and stamp store images, fot and fedprotip store none"
        return ChosenSetting("experiment.methods", "fedavg, er, stamp, fot, fedprotip", why)
    why = "new classes in each task: er and stamp store images, fedprotip predicts the task instead"
    return ChosenSetting("experiment.methods", "fedavg, er, stamp, fedprotip", why)
