"""Folder of a run, runs/<method>-<seed>/: result.json, tables, model and knowledge."""

import os
import platform
import shlex
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from fclmodels.errors import UserError
from fclmodels.experiment import exported_model
from fclmodels.federation.protection import privacy
from fclmodels.federation.protection.attacks import draw_bad_clients
from fclmodels.federation.server import Server
from fclmodels.metrics import compute_metrics, rounds_to_best
from fclmodels.storage import trees
from fclmodels.storage.digests import digest_folder
from fclmodels.storage.files import find_existing, replace_folder
from fclmodels.storage.object_store import Store
from fclmodels.storage.sealed_json import write_json, write_sealed
from fclmodels.storage.untrusted import read_json

if TYPE_CHECKING:
    from fclmodels.experiment.experiment import Experiment
    from fclmodels.experiment.stages import Outcome

FORMAT = 1
TABLES = ("accuracy", "confusion", "rounds", "ledger", "costs")
PACKAGES = ("fclflow", "torch", "numpy", "polars", "safetensors")


def publish(experiment: "Experiment", folder: Path, outcomes: "list[Outcome]") -> dict[str, Any]:
    """Write the complete folder beside its place, then move it there; returns the content of result.json."""
    refuse_foreign(folder)
    with replace_folder(folder) as temporary:
        return _write(experiment, temporary, folder, outcomes)


def gather_tables(store: Store, outcomes: "Sequence[Outcome]", names: Sequence[str]) -> dict[str, pl.DataFrame]:
    """Return the steps' tables of these names, each concatenated; a table that no step made is absent."""
    parts = {name: [store.get_table(o["objects"][name]) for o in outcomes if name in o["objects"]] for name in names}
    return {name: pl.concat(tables) for name, tables in parts.items() if tables}


def refuse_foreign(folder: Path) -> None:
    """Raise UserError, before any work, where a run folder would replace anything else than an older one."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "result.json").is_file():
        raise UserError(f"{folder} holds something other than a run. Name another folder, such as runs/fedavg-0.")
    there = find_existing(folder)
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"{folder}: {there} is not a folder that can be written to. Name another.")


def _write(experiment: "Experiment", folder: Path, place: Path, outcomes: "list[Outcome]") -> dict[str, Any]:
    store = experiment.store
    tables = gather_tables(store, outcomes, TABLES)
    if (monitors := experiment.collect_monitors(outcomes)) is not None:
        tables["monitors"] = monitors
    for name, table in tables.items():
        table.write_parquet(folder / f"{name}.parquet")
    last = [o for o in outcomes if "state" in o["objects"]][-1]["objects"]["state"]
    server = Server.from_tree(store.get(last)["server"])
    model = exported_model.write_model(experiment.method, server, folder / "model")
    for outcome in outcomes:
        knowledge = store.get(outcome["objects"]["knowledge"]) if "knowledge" in outcome["objects"] else None
        if trees.flatten(knowledge)[1]:
            trees.save(knowledge, folder / "knowledge" / f"task-{outcome['task']:02d}.safetensors")
    concluded = [o for o in outcomes if o["stage"] == "conclude"][-1]
    preset = _describe_preset(experiment)
    write_json(folder / "settings.json", {**experiment.settings, **preset})
    result = {
        "format": FORMAT,
        "command": _format_command(experiment, place),
        "label": experiment.label,
        "method": type(experiment.method).name,
        "seed": experiment.seed,
        "metrics": compute_metrics(tables["accuracy"], tables.get("confusion")),
        "settings": experiment.settings,
        "digests": {
            "splits": experiment.splits.digest,
            "prepared": experiment.splits.prepared_digest,
            "model": trees.digest(model),
            "state": last,
            "code": experiment.code,
            "accuracy": _find_last_digest(outcomes, "accuracy"),
        },
        "files": digest_folder(folder),
        "versions": {name: metadata.version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "seconds": sum(outcome["seconds"] for outcome in outcomes),
        "timings": {
            stage: sum(o["seconds"] for o in outcomes if o["stage"] == stage)
            for stage in ("begin", "learn", "conclude", "evaluate")
        },
        **_sum_bytes(tables["ledger"]),
        "client_bytes": _measure_client(experiment, server, tables["ledger"]),
        "peaks": _find_peaks(outcomes),
        **preset,
        **_count_scaled_rounds(experiment),
        **({"rounds_to_best": best} if monitors is not None and (best := rounds_to_best(monitors)) else {}),
        **_count_faults(experiment, tables["rounds"]),
        **({"refused": server.refused} if server.refused else {}),
        **_describe_attack(experiment),
        **({"remarks": remarks} if (remarks := experiment.list_remarks(concluded)) else {}),
        **({"privacy": privacy} if (privacy := _measure_privacy(experiment, tables["ledger"])) else {}),
    }
    write_sealed(folder / "result.json", result)
    return read_json(folder / "result.json")


def _describe_preset(experiment: "Experiment") -> dict[str, Any]:
    """Return the preset of the settings, without its settings for single methods: the run's settings have them."""
    preset = experiment.params.preset
    content = preset.model_dump(mode="json", exclude={"only"}, exclude_defaults=True)
    return {"preset": content} if preset.name else {}


def _count_scaled_rounds(experiment: "Experiment") -> dict[str, Any]:
    """Return each task's rounds beside those of the settings, where federation.rounds_scale shrinks them."""
    if experiment.params.federation.rounds_scale == 1:
        return {}
    run = experiment.method.run
    rounds = {"rounds": run.count_rounds, "of": run.count_unscaled_rounds}
    return {"scaled": {name: [count(task) for task in range(experiment.tasks)] for name, count in rounds.items()}}


def _count_faults(experiment: "Experiment", rounds: pl.DataFrame) -> dict[str, Any]:
    """Count what became of the sampled clients, where one was refused or lost or they fail by a schedule."""
    counts = rounds.select(pl.col("clients", "missing", "lost", "late", "refused", "answers").sum()).row(0, named=True)
    if not (experiment.params.federation.faults.on or counts["refused"] or counts["lost"]):
        return {}
    accounted = ("missing", "lost", "refused", "answers")
    counts["dropped"] = counts["clients"] - sum(counts[name] for name in accounted)
    return {"faults": counts}


def _measure_privacy(experiment: "Experiment", ledger: pl.DataFrame) -> dict[str, Any] | None:
    return privacy.find_largest_epsilon(experiment.method, ledger) if experiment.params.federation.privacy.on else None


def _describe_attack(experiment: "Experiment") -> dict[str, Any]:
    """Return the attack's settings and the bad clients, where there are any."""
    attack = experiment.params.federation.attack
    if attack.kind == "none" or not (bad := draw_bad_clients(experiment.method)):
        return {}
    return {"attack": {**attack.model_dump(), "clients": bad}}


def _format_command(experiment: "Experiment", place: Path) -> str:
    """Return the command that reproduces this run, from its settings in the folder or from the arrivals."""
    if experiment.splits.grows:
        return "fcl stream --once"
    arguments = ["fcl", "run", "--method", type(experiment.method).name, "--seed", str(experiment.seed)]
    return shlex.join([*arguments, "--params", str(place / "settings.json"), "--out", str(place)])


def _find_last_digest(outcomes: "list[Outcome]", name: str) -> str:
    return [o["objects"][name] for o in outcomes if name in o["objects"]][-1]


def _measure_client(experiment: "Experiment", server: Server, ledger: pl.DataFrame) -> dict[str, int]:
    """Return the bytes that a client holds after the last task: parameters, buffers, and the largest memory so far."""
    weights = experiment.method.list_all_weights(server)
    buffers = {name for name, _ in experiment.method.networks.build(server.spec).named_buffers()}
    largest = ledger.filter(pl.col("direction") == "kept").group_by("task", "round", "client").agg(pl.sum("bytes"))
    return {
        "model": sum(weight.nbytes for name, weight in weights.items() if name not in buffers),
        "buffers": sum(weight.nbytes for name, weight in weights.items() if name in buffers),
        "memory": max(largest["bytes"].to_list(), default=0),
    }


def _find_peaks(outcomes: "list[Outcome]") -> dict[str, int | None]:
    """Return the peak memory in bytes over all steps: of the server, and of a worker (None where there were none)."""
    peaks = [outcome.get("peaks", {}) for outcome in outcomes]  # a store may have outcomes without
    return {who: max((peak.get(who) or 0 for peak in peaks), default=0) or None for who in ("server", "worker")}


def _sum_bytes(ledger: pl.DataFrame) -> dict[str, int]:
    """Sum the bytes of the run in both directions, and of the clients' memories at its end."""
    messages = {
        f"bytes_{direction}": int(ledger.filter(pl.col("direction") == direction)["bytes"].sum())
        for direction in ("up", "down")
    }
    memories = ledger.filter(pl.col("direction") == "kept").group_by("client", maintain_order=True).last()
    return {**messages, "bytes_kept": int(memories["bytes"].sum())}
