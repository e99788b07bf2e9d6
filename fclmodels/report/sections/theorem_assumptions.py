"""Settings that the theorems assume whose bounds stand beside measured values on the page."""

from collections.abc import Mapping

from fclmodels.report.read_runs import RunFolder

# Settings by dotted name with the texts that a theorem covers.
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


def list_uncovered(run: RunFolder, assumptions: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the run's settings that a theorem with these assumptions does not cover, as "name: value"."""
    settings = {name: run.settings.get(name, covered[0]) for name, covered in assumptions.items()}
    return [f"{name}: {text}" for name, text in settings.items() if text not in assumptions[name]]
