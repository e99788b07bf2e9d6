"""Tiny splits made by hand, settings to match, and short ways to federate on them."""

import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import fclmodels.backbones
import fclmodels.methods
from fclmodels import params as reading
from fclmodels.data import split as splitting
from fclmodels.data.splits import SCHEMA, Splits, content_digest
from fclmodels.experiment import Experiment
from fclmodels.federation import rounds
from fclmodels.federation.checkpoints import Checkpoints
from fclmodels.federation.client import Client
from fclmodels.federation.cohort import Cohort
from fclmodels.federation.executor import Serial
from fclmodels.federation.ledger import Ledger
from fclmodels.federation.run import Run
from fclmodels.federation.server import Server
from fclmodels.listener import Listener
from fclmodels.methods.base import Method
from fclmodels.methods.fedavg import FedAvg
from fclmodels.settings import Params

SETTINGS = """
partition: {clients: 1000}
model: {backbone: mlp, hidden: 12, dropout: [0, 0], width: 2, stem: cifar}
federation: {rounds: 2, batch_size: 4, executor: serial, workers: 1}
optimizer: {lr: 0.1}
device: cpu
"""
# For methods that attach something to the layers of a transformer.
ON_VIT = ("fed-dualp", "fed-l2p", "lora", "pip-dualp", "pip-l2p")
VIT = (
    *("model.backbone=vit", "model.patch=3", "model.width=8", "model.depth=2", "model.attention_heads=2"),
    *("model.mlp_width=8", "methods.fed-dualp.g_layers=[0]", "methods.fed-dualp.e_layers=[1]"),
    *("methods.pip-dualp.g_layers=[0]", "methods.pip-dualp.e_layers=[1]"),
)

MakeSplits = Callable[..., Splits]
MakeParams = Callable[..., Params]
MakeMethod = Callable[..., Any]
Federate = Callable[..., Server]


def write_splits(
    folder: Path,
    *,
    tasks: int = 2,
    classes: int = 2,
    clients: int = 4,
    train: int | Mapping[tuple[int, int], int] = 8,
    val: int = 0,
    test: int = 4,
    shared_test: bool = False,
    same_classes: bool = False,
    permuted: bool = False,
    head: str = "growing",
    shape: tuple[int, int, int] = (1, 6, 6),
) -> Splits:
    """Prepared images and their splits. `train`: samples of each (task, client), or of all.

    Each class is a random pattern with noise over it; a domain (one a task) shifts its brightness.
    """
    sizes = train if isinstance(train, Mapping) else dict.fromkeys(product(range(tasks), range(clients)), train)
    rows, images, random = [], [], np.random.default_rng(0)
    patterns = random.integers(40, 180, (tasks * classes, *shape))
    noise = np.random.default_rng(1)
    for task, client in product(range(tasks), range(clients)):
        owner = -1 if shared_test else client
        for split, n, who in (
            ("train", sizes.get((task, client), 0), client),
            ("val", val, client),
            ("test", test, owner),
        ):
            for i in range(n if (task, client) in sizes or split == "test" else 0):
                kind = (i + client) % classes
                label = kind if same_classes else task * classes + kind
                rows.append((len(rows), label, task if same_classes else 0, task, who, split))
                pattern = patterns[kind if same_classes else task * classes + kind] + 20 * task * same_classes
                images.append((pattern + noise.integers(0, 30, shape)).clip(0, 255))
    manifest = pl.DataFrame(rows, schema=SCHEMA, orient="row").sort("task", "client", "split", "sample")
    stack = np.array(images, np.uint8)
    prepared = folder / "prepared"
    prepared.mkdir(parents=True)
    np.save(prepared / "images.npy", stack)
    prepared_digest = hashlib.sha256(stack.tobytes()).hexdigest()
    (prepared / "meta.json").write_text(json.dumps({"format": 1, "digest": prepared_digest}))
    labels = classes if same_classes else tasks * classes
    facts: dict[str, Any] = {
        "format": 1,
        "kind": "by-hand",
        "tasks": [
            {
                "name": f"task {t}",
                "classes": list(range(classes)) if same_classes else list(range(t * classes, (t + 1) * classes)),
                "permutation": t if permuted and t else None,
                "classes_by_client": None,
            }
            for t in range(tasks)
        ],
        "classes": [f"class {c}" for c in range(labels)],
        "domains": [f"domain {t}" for t in range(tasks if same_classes else 1)],
        "clients": clients,
        "shape": list(shape),
        "mean": [0.5] * shape[0],
        "std": [0.25] * shape[0],
        "head": head,
        "prepared": "../prepared",
        "prepared_digest": prepared_digest,
    }
    facts["digest"] = content_digest(manifest, facts)
    splits = folder / "splits"
    splits.mkdir()
    manifest.write_parquet(splits / "manifest.parquet")
    (splits / "stream.json").write_text(json.dumps(facts))
    return Splits.open(splits)


@pytest.fixture(scope="session")
def reopened() -> Callable[[Splits], Splits]:
    """Splits whose files were changed by hand, given the digest of what they hold now, and opened anew."""

    def reopen(splits: Splits) -> Splits:
        file = splits.folder / "stream.json"
        facts = json.loads(file.read_text())
        facts["digest"] = content_digest(pl.read_parquet(splits.folder / "manifest.parquet"), facts)
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
    path.write_text(SETTINGS)
    return path


@pytest.fixture(scope="session")
def params_of(params_file: Path) -> MakeParams:
    """The tiny settings above after overrides such as "federation.rounds=3"."""
    return lambda *overrides: reading.load(params_file, overrides)


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
        return Client(index, task, round, method.run, method.rows(task, index), memory or {})

    return make


@pytest.fixture
def federate(tmp_path: Path) -> Federate:
    """The server after a method has learned the first tasks (None: all of them)."""
    number = count()

    def learn(method: Method, tasks: int | None = None) -> Server:
        server, memories = method.setup(), {}
        for task in range(len(method.run.splits.tasks) if tasks is None else tasks):
            checkpoints = Checkpoints(tmp_path / f"federate-{next(number)}")
            executor = Serial(method, 1)
            position = rounds.learn(method, server, memories, task, executor, checkpoints, Listener())
            clients = method.participants(task)
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
        overrides = (*(VIT if method in ON_VIT else ()), *overrides)
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
    """All that a run folder holds but for times and where it ran: equal for equal runs."""

    def read(folder: Path) -> dict[str, Any]:
        result = json.loads((folder / "result.json").read_text())
        tables = {name: pl.read_parquet(folder / f"{name}.parquet") for name in ("accuracy", "rounds", "ledger")}
        tables["rounds"] = tables["rounds"].drop("seconds")
        files = [folder / "model" / "weights.safetensors", *sorted(folder.glob("knowledge/*"))]
        return (
            {key: result[key] for key in ("metrics", "digests", "bytes_up", "bytes_down", "bytes_kept")}
            | {name: table.rows() for name, table in tables.items()}
            | {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        )

    return read


@pytest.fixture(scope="session")
def toys() -> Iterator[Path]:
    """The plugins of toys/ are there, in this process and in those that it starts."""
    folder = Path(__file__).parent / "toys"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        importlib.import_module("sitecustomize")
        yield folder
        for package in (fclmodels.backbones, fclmodels.methods):
            package.__path__.pop()


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
        return Splits.open(splitting.splits_of(reading.load(DEFAULTS, settings), tmp_path_factory.mktemp("split")))

    return make


@pytest.fixture(scope="session")
def over_seeds(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, dict[str, np.ndarray]]]:
    """Metrics of a reading, and bytes: {method: {metric: one value a seed}}, settings of each method given; printed."""

    def measure(
        splits: Splits, tuned: Mapping[str, list[str]], shared: list[str], by: str, metrics: tuple[str, ...]
    ) -> dict[str, dict[str, np.ndarray]]:
        folder, values = tmp_path_factory.mktemp("seeds"), {}
        for method, own in tuned.items():
            params, found = reading.load(DEFAULTS, [*shared, *own]), []
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
