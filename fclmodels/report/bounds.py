"""What of a run's settings lies outside of a theorem whose bound stands beside what was seen."""

from collections.abc import Mapping

from fclmodels.report.runs import Run

# Settings by dotted name with the texts that a theorem covers; what is not covered is named beside the bound.
PLAIN_SGD = {
    "optimizer.kind": ("sgd",),
    "optimizer.momentum": ("0.0", "0"),
    "optimizer.weight_decay": ("0.0", "0"),
    "model.dropout": ("[0.0, 0.0]", "[0, 0]"),
    "augment.crop_padding": ("0",),
    "augment.flip": ("false",),
    "augment.brightness": ("0.0", "0"),
    "augment.resize_crop": ("null",),
}
ALL_CLIENTS = {"federation.clients_per_round": ("null",)}


def uncovered(run: Run, theorem: Mapping[str, tuple[str, ...]]) -> list[str]:
    said = {name: run.settings.get(name, covered[0]) for name, covered in theorem.items()}
    return [f"{name}: {text}" for name, text in said.items() if text not in theorem[name]]
