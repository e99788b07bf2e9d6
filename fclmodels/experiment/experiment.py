"""Steps of an experiment: one method, one seed, all tasks in turn; each step has a key of all that it depends on.

begin -> evaluate(0) -> for each task: learn -> conclude -> evaluate. Conclude is the end of a task, in which the
method's `finish_task` runs. A step whose outcome is in the store is not run again; a task whose training was
interrupted goes on from its last checkpoint. Prefect chains the same steps (flows/), and for a gate one more: judge,
which evaluates on val rows.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from fclmodels import plugins
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment import run_folder
from fclmodels.experiment.stages import Outcome, Stage, Step
from fclmodels.experiment.step_keys import compute_step_key, identify
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.executors.auto_choice import Choice, choose
from fclmodels.federation.executors.base import Executor
from fclmodels.federation.executors.client_work import Serial, refuse_unfit_method
from fclmodels.federation.executors.processes import Processes
from fclmodels.federation.run_context import Run
from fclmodels.federation.training.server_training import read_peak_memory
from fclmodels.settings.load import collect_settings, load_method_settings
from fclmodels.settings.schema import Params
from fclmodels.storage.digests import digest_json
from fclmodels.storage.object_store import Store
from fclmodels.storage.sealed_json import write_json


class Experiment:
    """A method with a seed on a stream, its steps and their store."""

    def __init__(
        self,
        params: Params,
        method: str,
        seed: int,
        splits: Splits,
        home: Path = Path(".fcl"),
        listener: Listener | None = None,
        place: Path | None = None,  # of store and checkpoints, where it is not `home`
    ) -> None:
        kind = plugins.find("method", method)
        self.params = params
        self.seed = seed
        self.splits = splits
        self.home = Path(place or home)
        self.listener = listener or Listener()
        self.store = Store(self.home / "store")
        self.method = kind(load_method_settings(params, method), Run.on(params, splits, seed, Path(home)))
        refuse_unfit_method(self.method)
        self.label = f"{method}-{seed}"
        self.tasks = len(splits.tasks)
        self._identity = identify(self.method)
        self.choice = choose(self.method, Path(home) / "choices", digest_json(self._identity))
        self._executor: Executor | None = None

    def __enter__(self) -> "Experiment":
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.close()
        self._workers_params.unlink(missing_ok=True)

    @property
    def settings(self) -> dict[str, Any]:
        """Effective settings, with the values that `auto` stands for."""
        settings = collect_settings(self.params, type(self.method).name)
        choice = {"executor": self.choice.executor, "workers": self.choice.workers, "threads": self.choice.threads}
        settings["federation"] = {**settings["federation"], **choice}
        settings["device"] = str(self.method.run.device)
        return settings

    @property
    def code(self) -> str:
        """Digest of the source that training depends on."""
        return str(self._identity["code"])

    def run(self, folder: Path) -> dict[str, Any]:
        """Run every step that is not in the store, then write the run folder; returns the content of result.json."""
        run_folder.refuse_foreign(Path(folder))
        return self.publish(folder, list(self.run_steps()))

    def run_steps(self) -> Iterator[Outcome]:
        """Yield the outcomes of all steps in order; run those that are not in the store."""
        stages: list[tuple[Stage, int]] = [("begin", 0), ("evaluate", 0)]
        for task in range(self.tasks):
            stages += [("learn", task), ("conclude", task), ("evaluate", task + 1)]
        state = None
        for stage, task in stages:
            step = self.step(stage, state, task)
            outcome = step.recall() or step.run()
            state = outcome["objects"].get("state", state)
            yield outcome

    def step(self, stage: Stage, state: str | None, task: int) -> Step:
        """Return a step from a state (None before `begin`); for `evaluate` and `judge`, `task` counts learned tasks."""
        key = compute_step_key(self.method, self._identity, stage, state, task, self.choice.threads)
        return Step(self, stage, state, task, key)

    def publish(self, folder: Path, outcomes: list[Outcome]) -> dict[str, Any]:
        """Write the run folder from the steps' objects in the store; returns the content of result.json."""
        return run_folder.publish(self, Path(folder), outcomes)

    def list_remarks(self, concluded: Outcome) -> list[str]:
        """Return the method's remarks on its knowledge after a task."""
        return self.method.list_remarks(self.store.get(concluded["objects"]["knowledge"]))

    def collect_monitors(self, outcomes: list[Outcome]) -> pl.DataFrame | None:
        """Return the monitors' table of these steps, with bounds; None where no monitor has rows."""
        tables = run_folder.gather_tables(self.store, outcomes, ("monitors", "rounds"))
        if "monitors" not in tables or tables["monitors"].is_empty():
            return None
        from fclmodels.federation.monitors.oracles.theorem2 import add_bounds

        return add_bounds(tables["monitors"], tables["rounds"], self.params.optimizer.lr)

    def read_peak_memory(self) -> dict[str, int | None]:
        """Return the peak memory in bytes of the server's process (or GPU), and of the largest worker so far."""
        workers = self._executor.read_peak_memory() if self._executor else None
        return {"server": read_peak_memory(self.method.run.device), "worker": workers}

    @property
    def executor(self) -> Executor:
        """The executor, started when it is first needed: an experiment whose steps are all in the store starts none."""
        if self._executor is None:
            self._executor = self._start(self.choice)
        return self._executor

    def _start(self, choice: Choice) -> Executor:
        if choice.executor == "serial":
            return Serial(self.method, choice.threads)
        write_json(self._workers_params, collect_settings(self.params, type(self.method).name))
        if choice.executor == "processes":
            return Processes(self.method, self._workers_params, choice.workers or 1, choice.threads)
        from fclmodels.federation.executors.ray.cluster import RayCluster  # Ray is installed with an extra

        return RayCluster(self.method, self._workers_params, choice.workers, choice.threads)

    @property
    def _workers_params(self) -> Path:
        return self.home / "workers" / f"{os.getpid()}-{self.label}.json"
