"""`fcl status`: what of the experiment in the settings is there, what runs, and what is of other settings or code.

And of the stream that goes on: what it is at, which versions are champion and challenger, what has arrived.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from fclmodels.data.growing import GrowingStream
from fclmodels.data.incoming import MARKER, arrived, not_taken
from fclmodels.data.splits import Splits
from fclmodels.experiment import Experiment
from fclmodels.params import flat, load
from fclmodels.report.runs import result_of
from fclmodels.settings import Params
from flows.environment import HOME
from flows.stream import known_by
from tasks.arrivals import STREAMS
from tasks.data import PREPARED, SPLITS, Origin, existing_splits, origin_of_prepared, origin_of_splits
from tasks.locking import held
from tasks.registry import GATE, TASKS, by_alias, gated
from tasks.tracking import identity_of
from tasks.tracking_store import UNREACHED

CHOSEN = ("federation.executor", "federation.workers", "federation.threads", "device")  # what `auto` may become
NAMED = 4  # settings that differ


def states(params: Params, file: Path, overrides: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """A row for the prepared data, the splits and each run: state, steps in the store, and why it is stale."""
    for folder, origin in ((PREPARED, origin_of_prepared(params)), (SPLITS, origin_of_splits(params))):
        yield {"what": str(folder), **_of_data(folder, origin), "steps": None}
    splits = existing_splits(params, HOME)
    for method in params.experiment.methods:
        for seed in params.experiment.seeds:
            folder = Path("runs") / f"{method}-{seed}"
            if splits is None:
                there = (folder / "result.json").is_file()
                found = _row("stale", "of other data") if there else _row("not begun", "its data are not made yet")
            else:
                found = _of_run(load(file, overrides, method), method, seed, folder, splits)
            yield {"what": str(folder), **found}
    yield from of_stream(params)


def of_stream(params: Params) -> Iterator[dict[str, Any]]:
    """A row for the stream, for its champion and challenger, and for each arrival that it has not taken in."""
    name, incoming = params.arrivals.name, params.arrivals.incoming
    growing = GrowingStream(STREAMS / name)
    parts = growing.parts
    coming = [arrival for arrival in arrived(incoming) if not growing.has(arrival)]
    left = list(not_taken(incoming))
    if not (parts or coming or left):
        return
    versions, registered = {}, 0
    if parts:  # else MLflow is not asked, which would make its database
        try:
            client = MlflowClient(params.tracking.uri)
            versions = by_alias(client, name)
            keys = (known_by(params, parts[: part.number])[1] for part in parts)
            registered = sum(gated(client, name, key) for key in keys)
        except UNREACHED as problem:
            yield {"what": params.tracking.uri, **_row("not reached", str(problem).partition("\n")[0])}
    if held(HOME / "locks" / f"stream-{name}"):
        state = "running"
    else:
        state = "not begun" if not parts else "done" if registered == len(parts) else "stopped"
    yield {"what": f"streams/{name}", **_row(state, None, f"{registered} of {len(parts)} tasks registered")}
    for alias, version in versions.items():
        why = version.tags.get(GATE, "").partition("; ")[2] or None
        row = _row(f"version {version.version}", why, f"{version.tags[TASKS]} tasks learned")
        yield {"what": f"models:/{name}@{alias}", **row}
    for arrival in coming:
        yield {"what": str(arrival.folder), **_row("waiting")}
    for folder, reason in left:
        yield {"what": str(folder), **_row("set aside" if reason else "not complete", reason or f"has no {MARKER} yet")}


def _of_data(folder: Path, origin: Origin) -> dict[str, Any]:
    if not folder.exists():
        return {"state": "not there", "why": "a run makes its own"}
    differs = origin.differs_from(folder)
    return {"state": "stale" if differs else "done", "why": ", ".join(differs[:NAMED]) or None}


def _of_run(params: Params, method: str, seed: int, folder: Path, splits: Path) -> dict[str, Any]:
    if params.federation.threads != "auto":  # nothing has to be measured to know the keys of the steps
        federation = params.federation.model_copy(update={"executor": "serial"})
        params = params.model_copy(update={"federation": federation})
    experiment = Experiment(params, method, seed, Splits.open(splits), HOME)
    done, state = _done(experiment)
    steps = f"{done} of {2 + 3 * experiment.tasks} cached"
    if held(HOME / "locks" / identity_of(experiment)):
        return _row("running", None, steps)
    if not (folder / "result.json").is_file():
        return _row("stopped" if done else "not begun", None, steps)
    result = result_of(folder / "result.json")
    if result.digests.get("state") == state and done == 2 + 3 * experiment.tasks:
        return _row("done", None, steps)
    mine, its = flat(experiment.settings), flat(result.settings)
    differs = [name for name in {**its, **mine} if mine.get(name) != its.get(name) and name not in CHOSEN]
    if not differs:
        same = result.digests.get("splits") == experiment.splits.digest
        differs = ["code, or what it needs is no longer in .fcl/store" if same else "splits"]
    return _row("stale", ", ".join(differs[:NAMED]), steps)


def _row(state: str, why: str | None = None, steps: str | None = None) -> dict[str, Any]:
    return {"state": state, "why": why, "steps": steps}


def _done(experiment: Experiment) -> tuple[int, str | None]:
    """How many steps the store has in turn, and the state that the last of them left."""
    tasks = range(experiment.tasks)
    order: list[tuple[Any, int]] = [("begin", 0), ("evaluate", 0)]
    order += [step for t in tasks for step in (("learn", t), ("conclude", t), ("evaluate", t + 1))]
    state, done = None, 0
    for stage, task in order:
        outcome = experiment.step(stage, state, task).done()
        if outcome is None:
            break
        done, state = done + 1, outcome["objects"].get("state", state)
    return done, state
