"""Tiny splits made by hand, settings to match, and short ways to federate on them."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import fclmodels.backbones
import fclmodels.methods
from fclmodels.data.splits import make_splits as splitting
from fclmodels.data.splits.split_reader import Splits, digest_splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.client import Client
from fclmodels.federation.engine import rounds
from fclmodels.federation.engine.checkpoints import Checkpoints
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.ledger import Ledger, open_ledger
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.executors.client_work import Serial
from fclmodels.federation.method import Method
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.server_training import ServerTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.plugins import find
from fclmodels.settings import load as reading
from fclmodels.settings.schema import Params
from fclmodels.testing import tiny_splits
from fclmodels.testing.method_trial import find_needed_settings, read_outcome
from fclmodels.testing.tiny_splits import write_splits

# For methods that attach something to the layers of a transformer.
VIT = (
    *tiny_splits.VIT,
    *("methods.fed-dualp.g_layers=[0]", "methods.fed-dualp.e_layers=[1]"),
    *("methods.pip-dualp.g_layers=[0]", "methods.pip-dualp.e_layers=[1]"),
)

MakeSplits = Callable[..., Splits]
MakeParams = Callable[..., Params]
MakeMethod = Callable[..., Any]
Federate = Callable[..., Server]


@pytest.fixture(scope="session")
def reopened() -> Callable[[Splits], Splits]:
    """Splits whose files were changed by hand, given the digest of what they hold now, and opened anew."""

    def reopen(splits: Splits) -> Splits:
        file = splits.folder / "stream.json"
        facts = json.loads(file.read_text())
        facts["digest"] = digest_splits(pl.read_parquet(splits.folder / "manifest.parquet"), facts)
        file.write_text(json.dumps(facts))
        return Splits.open(splits.folder)

    return reopen


@pytest.fixture(scope="session")
def splits_of(tmp_path_factory: pytest.TempPathFactory) -> MakeSplits:
    """Splits with these properties (see write_splits), written once a session. Do not change their files."""
    made: dict[str, Splits] = {}

    def make(**properties: Any) -> Splits:
        key = repr(sorted(properties.items()))
        if key not in made:
            made[key] = write_splits(tmp_path_factory.mktemp("data"), **properties)
        return made[key]

    return make


@pytest.fixture
def own_splits(tmp_path: Path) -> MakeSplits:
    """Splits whose files a test may change."""
    number = count()
    return lambda **properties: write_splits(tmp_path / f"data-{next(number)}", **properties)


@pytest.fixture(scope="session")
def params_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("params") / "params.yaml"
    path.write_text(tiny_splits.SETTINGS)
    return path


@pytest.fixture(scope="session")
def params_of(params_file: Path) -> MakeParams:
    """The tiny settings above after overrides such as "federation.rounds=3"."""
    return lambda *overrides: reading.load_params(params_file, overrides)


@pytest.fixture
def method_of(params_of: MakeParams, splits_of: MakeSplits) -> MakeMethod:
    """A method on tiny splits; `settings` are its own."""

    def make(
        kind: type[Method] = FedAvg, *overrides: str, splits: Splits | None = None, seed: int = 0, **settings: Any
    ) -> Any:
        run = Run.on(params_of(*overrides), splits or splits_of(), seed)
        return kind(kind.Settings(**settings), run)

    return make


@pytest.fixture
def client_of() -> Callable[..., Client]:
    """A client as the engine shows it to a method."""

    def make(method: Method, index: int, task: int = 0, round: int = 0, memory: dict[str, Any] | None = None) -> Client:
        return Client(index, task, round, method.run, method.select_rows(task, index), memory or {})

    return make


@pytest.fixture
def federate(tmp_path: Path) -> Federate:
    """The server after a method has learned the first tasks (None: all of them)."""
    number = count()

    def learn(method: Method, tasks: int | None = None) -> Server:
        server, memories = method.create_server(), {}
        for task in range(len(method.run.splits.tasks) if tasks is None else tasks):
            checkpoints = Checkpoints(tmp_path / f"federate-{next(number)}")
            executor = Serial(method, 1)
            training = ServerTraining(checkpoints.folder / "work", (method.run.seed, task), method.run.device, 1, 60.0)
            position = rounds.learn(
                method,
                server,
                memories,
                task,
                executor,
                checkpoints,
                open_ledger(method, checkpoints.ledger),
                Listener(),
                training,
            )
            clients = method.list_participants(task)
            cohort = Cohort(executor, task, clients, position.memories, Ledger(checkpoints.ledger), checkpoints)
            server, memories = method.finish_task(position.server, cohort), cohort.memories
            checkpoints.close()
        return server

    return learn


@pytest.fixture(scope="session")
def new_experiment(params_of: MakeParams, splits_of: MakeSplits) -> Callable[..., Experiment]:
    """An experiment on tiny splits, which whoever asks for it closes."""

    def make(
        *overrides: str,
        home: Path,
        method: str = "fedavg",
        seed: int = 0,
        splits: Splits | None = None,
        listener: Listener | None = None,
    ) -> Experiment:
        needed = find_needed_settings(find("method", method))
        overrides = (*(VIT if needed == tiny_splits.VIT else needed), *overrides)
        return Experiment(params_of(*overrides), method, seed, splits or splits_of(), home, listener)

    return make


@pytest.fixture
def experiment_of(tmp_path: Path, new_experiment: Callable[..., Experiment]) -> Iterator[Callable[..., Experiment]]:
    """An experiment of its own home unless one is given; closed after the test."""
    opened: list[Experiment] = []

    def make(*overrides: str, home: Path | None = None, **further: Any) -> Experiment:
        opened.append(new_experiment(*overrides, home=home or tmp_path / f"home-{len(opened)}", **further))
        return opened[-1]

    yield make
    for experiment in opened:
        experiment.__exit__()


@pytest.fixture(scope="session")
def remains() -> Callable[[Path], dict[str, Any]]:
    """A function that reads all that a run folder holds but for times and where it ran: equal for equal runs."""
    return read_outcome


@pytest.fixture(scope="module")
def toys() -> Iterator[Path]:
    """The plugins of toys/ are there for a module's tests, in this process and in those that it starts."""
    folder = Path(__file__).parent / "toys"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.delitem(sys.modules, "sitecustomize", raising=False)  # Debian's Python has one
        importlib.import_module("sitecustomize")
        yield folder
        for package in (fclmodels.backbones, fclmodels.methods):
            package.__path__.pop()
        del sys.modules["sitecustomize"]


class Forks:
    """Runs, each in a fork of one process that has imported everything (toys/forks.py), which may be killed."""

    def __init__(self, script: Path, params: Path, root: Path) -> None:
        self.params, self.root = params, root
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            # With toys/ first, whose sitecustomize is found before the one of Debian's Python.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def begin(
        self,
        name: str,
        method: str,
        splits: Splits,
        overrides: Sequence[str] = (),
        die: tuple[str, str, int] | None = None,
    ) -> int:
        """Start `name`; its process id. `die`: (point, before or after, nth call)."""
        assert self.process.stdin
        assert self.process.stdout
        order = {
            "params": str(self.params),
            "splits": str(splits.folder),
            "method": method,
            "overrides": overrides,
            "home": str(self.root / name / "home"),
            "folder": str(self.folder(name)),
            "die": die,
        }
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def end(self) -> int:
        """How the run that was begun ended: 0, or minus the signal that killed it."""
        assert self.process.stdout
        return os.waitstatus_to_exitcode(int(self.process.stdout.readline()))

    def run(self, *args: Any, **kwargs: Any) -> int:
        self.begin(*args, **kwargs)
        return self.end()

    def folder(self, name: str) -> Path:
        return self.root / name / "run"

    def calls(self, name: str) -> int:
        return int((self.folder(name) / "calls").read_text())


@pytest.fixture(scope="session")
def started_forks() -> Iterator[list[Forks]]:
    """The process that `forks` has started, if it has: its imports take seconds."""
    started: list[Forks] = []
    yield started
    for forks in started:
        assert forks.process.stdin
        forks.process.stdin.close()
        forks.process.wait(10)


@pytest.fixture(scope="module")
def forks(toys: Path, started_forks: list[Forks], params_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Forks:
    if not started_forks:
        started_forks.append(Forks(toys / "forks.py", params_file, tmp_path_factory.mktemp("forks")))
    return started_forks[0]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


# What methods claim, over seeds.

DEFAULTS = Path(__file__).parents[2] / "params.yaml"
SEEDS = range(5)


@pytest.fixture(scope="session")
def split_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], Splits]:
    """The splits of params.yaml with other settings."""

    def make(settings: list[str]) -> Splits:
        return Splits.open(
            splitting.make_splits(reading.load_params(DEFAULTS, settings), tmp_path_factory.mktemp("split"))
        )

    return make


@pytest.fixture(scope="session")
def over_seeds(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, dict[str, np.ndarray]]]:
    """Metrics of a reading, and bytes: {method: {metric: one value a seed}}, settings of each method given; printed."""

    def measure(
        splits: Splits, tuned: Mapping[str, list[str]], shared: list[str], by: str, metrics: tuple[str, ...]
    ) -> dict[str, dict[str, np.ndarray]]:
        folder, values = tmp_path_factory.mktemp("seeds"), {}
        for method, own in tuned.items():
            params, found = reading.load_params(DEFAULTS, [*shared, *own]), []
            for seed in SEEDS:
                with Experiment(params, method, seed, splits, folder) as experiment:
                    result = experiment.run(folder / f"{method}-{seed}")
                found.append(result | result["metrics"][by])
            values[method] = {name: np.array([of[name] for of in found]) for name in metrics}
            for name, of_seeds in values[method].items():
                shown = of_seeds if name.startswith("bytes") else 100 * of_seeds
                sys.stdout.write(f"{method:9} {name:12} mean {shown.mean():5.1f}  seeds {np.round(shown, 1)}\n")
        return values

    return measure


@pytest.fixture(scope="session")
def write_splits_into() -> MakeSplits:
    """Splits in a folder of the caller's (see write_splits)."""
    return write_splits
