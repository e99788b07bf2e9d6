"""`fcl status`: which data and runs of the settings' experiment are done, running, or of other settings or code.

Also the stream's state, its champion and challenger, and arrivals that it has not taken in.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from fclmodels.data.arrivals.arrival_folders import MARKER, list_arrived, list_others
from fclmodels.data.arrivals.growing_stream import GrowingStream
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.report.read_runs import load_result
from fclmodels.settings.load import flatten_settings, follow_seed, load_params
from fclmodels.settings.schema import Params
from fclmodels.storage.files import is_locked
from flows.prefect.environment import HOME
from flows.stream import identify_version
from tasks.arrivals import STREAMS
from tasks.data import PREPARED, SPLITS, Origin, find_splits, get_prepared_origin, get_splits_origin
from tasks.mlflow.connection import CONNECTION_ERRORS
from tasks.mlflow.registry import GATE, TASKS, get_aliased_versions, has_verdict
from tasks.mlflow.runs import identify_experiment

RESOLVED = ("federation.executor", "federation.workers", "federation.threads", "device")  # may have been `auto`
MAX_DIFFERENCES = 4  # settings that differ, in a row


def list_states(params: Params, file: Path, overrides: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield a row for the prepared data, the splits, each run and the stream: state, why it is stale, cached steps."""
    by_seed = {seed: follow_seed(params, seed) for seed in params.experiment.seeds}
    origins = {PREPARED: get_prepared_origin(params)}
    origins |= {SPLITS / str(seed): get_splits_origin(of_seed) for seed, of_seed in by_seed.items()}
    for folder, origin in origins.items():
        yield {"what": str(folder), **_check_data(folder, origin), "steps": None}
    for method in params.experiment.methods:
        for seed in params.experiment.seeds:
            folder = Path("runs") / f"{method}-{seed}"
            splits = find_splits(by_seed[seed], HOME)
            if splits is None:
                exists = (folder / "result.json").is_file()
                state = _make_row("stale", "of other data") if exists else _make_row("not begun", "no data yet")
            else:
                state = _check_run(load_params(file, overrides, method, seed), method, seed, folder, splits)
            yield {"what": str(folder), **state}
    yield from list_stream_states(params)


def list_stream_states(params: Params) -> Iterator[dict[str, Any]]:
    """Yield a row for the stream, for its champion and challenger, and for each arrival that it has not taken in."""
    name, incoming = params.arrivals.name, params.arrivals.incoming
    growing = GrowingStream(STREAMS / name)
    parts = growing.parts
    waiting = [arrival for arrival in list_arrived(incoming) if not growing.has(arrival)]
    others = list(list_others(incoming))
    if not (parts or waiting or others):
        return
    versions, registered = {}, 0
    if parts:  # else there is nothing to look up, and MLflow would create its database
        try:
            client = MlflowClient(params.tracking.uri)
            versions = get_aliased_versions(client, name)
            keys = (identify_version(params, parts[: part.number])[1] for part in parts)
            registered = sum(has_verdict(client, name, key) for key in keys)
        except CONNECTION_ERRORS as problem:
            yield {"what": params.tracking.uri, **_make_row("not reached", str(problem).partition("\n")[0])}
    if is_locked(HOME / "locks" / f"stream-{name}"):
        state = "running"
    else:
        state = "not begun" if not parts else "done" if registered == len(parts) else "stopped"
    yield {"what": f"streams/{name}", **_make_row(state, None, f"{registered} of {len(parts)} tasks registered")}
    for alias, version in versions.items():
        why = version.tags.get(GATE, "").partition("; ")[2] or None
        row = _make_row(f"version {version.version}", why, f"{version.tags[TASKS]} tasks learned")
        yield {"what": f"models:/{name}@{alias}", **row}
    for arrival in waiting:
        yield {"what": str(arrival.folder), **_make_row("waiting")}
    for folder, reason in others:
        row = _make_row("set aside", reason) if reason else _make_row("not complete", f"has no {MARKER} yet")
        yield {"what": str(folder), **row}


def _check_data(folder: Path, origin: Origin) -> dict[str, Any]:
    if not folder.exists():
        return {"state": "not there", "why": "each run prepares its own"}
    differences = origin.list_differences(folder)
    return {"state": "stale" if differences else "done", "why": ", ".join(differences[:MAX_DIFFERENCES]) or None}


def _check_run(params: Params, method: str, seed: int, folder: Path, splits: Path) -> dict[str, Any]:
    if params.federation.threads != "auto":  # then the keys of the steps do not depend on a measurement
        federation = params.federation.model_copy(update={"executor": "serial"})
        params = params.model_copy(update={"federation": federation})
    experiment = Experiment(params, method, seed, Splits.open(splits), HOME)
    count, state = _count_cached_steps(experiment)
    steps = f"{count} of {2 + 3 * experiment.tasks} cached"
    if is_locked(HOME / "locks" / identify_experiment(experiment)):
        return _make_row("running", None, steps)
    if not (folder / "result.json").is_file():
        return _make_row("stopped" if count else "not begun", None, steps)
    result = load_result(folder / "result.json")
    if result.digests.get("state") == state and count == 2 + 3 * experiment.tasks:
        return _make_row("done", None, steps)
    current, earlier = flatten_settings(experiment.settings), flatten_settings(result.settings)
    names = [name for name in {**earlier, **current} if current.get(name) != earlier.get(name)]
    differences = [name for name in names if name not in RESOLVED]
    if not differences:
        same_splits = result.digests.get("splits") == experiment.splits.digest
        differences = ["code, or its objects are no longer in .fcl/store" if same_splits else "splits"]
    return _make_row("stale", ", ".join(differences[:MAX_DIFFERENCES]), steps)


def _make_row(state: str, why: str | None = None, steps: str | None = None) -> dict[str, Any]:
    return {"state": state, "why": why, "steps": steps}


def _count_cached_steps(experiment: Experiment) -> tuple[int, str | None]:
    """Return how many steps from the first on the store has, and the state after the last of them."""
    tasks = range(experiment.tasks)
    order: list[tuple[Any, int]] = [("begin", 0), ("evaluate", 0)]
    order += [step for t in tasks for step in (("learn", t), ("conclude", t), ("evaluate", t + 1))]
    state, count = None, 0
    for stage, task in order:
        outcome = experiment.step(stage, state, task).recall()
        if outcome is None:
            break
        count, state = count + 1, outcome["objects"].get("state", state)
    return count, state
