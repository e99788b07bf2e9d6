"""What a run leaves behind: runs/<method>-<seed>/ with result.json, tables, model and knowledge."""

import os
import platform
import shlex
import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from fclmodels import served, state
from fclmodels.errors import UserError
from fclmodels.federation import private
from fclmodels.federation.attacks import bad_clients
from fclmodels.federation.server import Server
from fclmodels.foreign import read_json
from fclmodels.metrics import rounds_to_best, summary
from fclmodels.sealed import digests_of
from fclmodels.store import Store

if TYPE_CHECKING:
    from fclmodels.experiment import Experiment, Outcome

FORMAT = 1
TABLES = ("accuracy", "confusion", "rounds", "ledger")
PACKAGES = ("fclflow", "torch", "numpy", "polars", "safetensors")


def publish(experiment: "Experiment", folder: Path, outcomes: "list[Outcome]") -> dict[str, Any]:
    """Write the whole folder beside its place, then put it there; returns what result.json says."""
    refuse_foreign(folder)
    place, folder = folder, folder.resolve()  # a link to another disk stays a link
    temporary = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        result = _write(experiment, temporary, place, outcomes)
        _put_in_place(temporary, folder)
        return result
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def gathered(store: Store, outcomes: "Sequence[Outcome]", names: Sequence[str]) -> dict[str, pl.DataFrame]:
    """The steps' tables of these names, each in one; none where no step made one."""
    parts = {name: [store.get_table(o["objects"][name]) for o in outcomes if name in o["objects"]] for name in names}
    return {name: pl.concat(tables) for name, tables in parts.items() if tables}


def refuse_foreign(folder: Path) -> None:
    """A run folder takes the place of an older one, never of anything else. Asked before any work."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "result.json").is_file():
        raise UserError(f"{folder} holds something else than a run. Name another folder, such as runs/fedavg-0.")
    there = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"{folder}: {there} is not a folder that can be written to. Name another.")


def _write(experiment: "Experiment", folder: Path, place: Path, outcomes: "list[Outcome]") -> dict[str, Any]:
    store = experiment.store
    tables = gathered(store, outcomes, TABLES)
    if (monitored := experiment.monitored(outcomes)) is not None:
        tables["monitors"] = monitored
    for name, table in tables.items():
        table.write_parquet(folder / f"{name}.parquet")
    last = [o for o in outcomes if "state" in o["objects"]][-1]["objects"]["state"]
    server = Server.from_tree(store.get(last)["server"])
    model = served.write(experiment.method, server, folder / "model")
    for outcome in outcomes:
        knowledge = store.get(outcome["objects"]["knowledge"]) if "knowledge" in outcome["objects"] else None
        if state.flatten(knowledge)[1]:
            state.save(knowledge, folder / "knowledge" / f"task-{outcome['task']:02d}.safetensors")
    concluded = [o for o in outcomes if o["stage"] == "conclude"][-1]
    origin = _preset(experiment)
    state.write_json(folder / "settings.json", {**experiment.settings, **origin})
    result = {
        "format": FORMAT,
        "command": _command(experiment, place),
        "label": experiment.label,
        "method": type(experiment.method).name,
        "seed": experiment.seed,
        "metrics": summary(tables["accuracy"], tables.get("confusion")),
        "settings": experiment.settings,
        "digests": {
            "splits": experiment.splits.digest,
            "prepared": experiment.splits.prepared_digest,
            "model": state.digest(model),
            "state": last,
            "code": experiment.code,
            "accuracy": _digest(outcomes, "accuracy"),
        },
        "files": digests_of(folder),
        "versions": {name: metadata.version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "seconds": sum(outcome["seconds"] for outcome in outcomes),
        "timings": {
            stage: sum(o["seconds"] for o in outcomes if o["stage"] == stage)
            for stage in ("begin", "learn", "conclude", "evaluate")
        },
        **_bytes(tables["ledger"]),
        **origin,
        **_scaled(experiment),
        **({"rounds_to_best": best} if monitored is not None and (best := rounds_to_best(monitored)) else {}),
        **_faults(experiment, tables["rounds"]),
        **({"refused": server.refused} if server.refused else {}),
        **_attack(experiment),
        **({"remarks": remarks} if (remarks := experiment.remarks(concluded)) else {}),
        **({"privacy": privacy} if (privacy := _privacy(experiment, tables["ledger"])) else {}),
    }
    state.write_sealed(folder / "result.json", result)
    return read_json(folder / "result.json")


def _preset(experiment: "Experiment") -> dict[str, Any]:
    """Whose preset the settings are. What it says for one method only is among them already."""
    preset = experiment.params.preset
    kept = preset.model_dump(mode="json", exclude={"only"}, exclude_defaults=True)
    return {"preset": kept} if preset.name else {}


def _scaled(experiment: "Experiment") -> dict[str, Any]:
    """What federation.rounds_scale left of each task's rounds, where it shrinks them."""
    if experiment.params.federation.rounds_scale == 1:
        return {}
    run = experiment.method.run
    rounds = {"rounds": run.rounds, "of": run.rounds_set}
    return {"scaled": {name: [count(task) for task in range(experiment.tasks)] for name, count in rounds.items()}}


def _faults(experiment: "Experiment", rounds: pl.DataFrame) -> dict[str, Any]:
    """What became of the clients that were sampled, where one was refused or they fail by a schedule."""
    counts = rounds.select(pl.col("clients", "missing", "lost", "late", "refused", "answers").sum()).row(0, named=True)
    if not (experiment.params.federation.faults.on or counts["refused"] or counts["lost"]):
        return {}
    gone = ("missing", "lost", "refused", "answers")
    counts["dropped"] = counts["clients"] - sum(counts[name] for name in gone)
    return {"faults": counts}


def _privacy(experiment: "Experiment", ledger: pl.DataFrame) -> dict[str, Any] | None:
    return private.worth(experiment.method, ledger) if experiment.params.federation.privacy.on else None


def _attack(experiment: "Experiment") -> dict[str, Any]:
    """What bad clients did, and which those were."""
    bad = bad_clients(experiment.method)
    return {"attack": {**experiment.params.federation.attack.model_dump(), "clients": bad}} if bad else {}


def _command(experiment: "Experiment", place: Path) -> str:
    """What makes this run again: what has arrived, or the settings that are kept with it."""
    if experiment.splits.grows:
        return "fcl stream --once"
    words = ["fcl", "run", "--method", type(experiment.method).name, "--seed", str(experiment.seed)]
    return shlex.join([*words, "--params", str(place / "settings.json"), "--out", str(place)])


def _digest(outcomes: "list[Outcome]", name: str) -> str:
    return [o["objects"][name] for o in outcomes if name in o["objects"]][-1]


def _bytes(ledger: pl.DataFrame) -> dict[str, int]:
    """Bytes over the whole run, both ways, and what the clients hold at its end."""
    travelled = {
        f"bytes_{direction}": int(ledger.filter(pl.col("direction") == direction)["bytes"].sum())
        for direction in ("up", "down")
    }
    kept = ledger.filter(pl.col("direction") == "kept").group_by("client", maintain_order=True).last()
    return {**travelled, "bytes_kept": int(kept["bytes"].sum())}


def _put_in_place(temporary: Path, folder: Path) -> None:
    """A folder cannot be replaced in one step: the old one steps aside and goes only when the new one is there."""
    aside = folder.parent / f".{folder.name}.old"
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        os.replace(folder, aside)
    os.replace(temporary, folder)
    shutil.rmtree(aside, ignore_errors=True)
