"""Seconds until something happens: imports, `fcl --help`, `fcl run` of a finished run, `dvc repro` again."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from measuring import Bench, Row, take_turns

PROJECT = Path(__file__).parents[1]
PARTS = ("flows", "tasks", "fclmodels", "params.yaml", "dvc.yaml", ".dvc", ".dvcignore", ".gitignore")
IMPORT, HELP_SECONDS, START_SECONDS = 1.5, 0.5, 2.0
PLAIN = """
import sys
from pathlib import Path
from fclmodels import plugins
from fclmodels.settings.load import load_params
from fclmodels.data.splits.make_splits import make_splits
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
settings = load_params("params.yaml")
splits = Splits.open(make_splits(settings, Path("plain")))
for method in settings.experiment.methods:
    for seed in settings.experiment.seeds:
        with Experiment(settings, method, seed, splits, Path("plain/home")) as experiment:
            experiment.run(Path("plain/runs") / experiment.label)
"""


@contextmanager
def copy_project() -> Iterator[Path]:
    """Yield a copy of the project without data and runs, in a repository of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for part in PARTS:
            copy = shutil.copytree if (PROJECT / part).is_dir() else shutil.copy
            copy(PROJECT / part, folder / part)
        identity = ("-c", "user.email=bench@localhost", "-c", "user.name=bench")
        for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "bench"]):
            subprocess.run(["git", *command], cwd=folder, check=True)
        yield folder


def call(folder: Path, *command: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FCL_SERVER_IDLE_SECONDS": "20",
    }
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(ended.stderr.strip().splitlines() or ['no reason'])[-1]}")


def python(line: str) -> partial[None]:
    return partial(call, PROJECT, sys.executable, "-c", line)


def measure_imports(turns: int) -> Iterator[Row]:
    """Measure the imports of an experiment."""
    lines = {"ours": "import fclmodels, fclmodels.experiment.experiment", "torch": "import torch"}
    seconds = take_turns({side: python(line) for side, line in lines.items()}, turns)
    yield Row(
        "import",
        "import fclmodels.experiment.experiment, import torch",
        seconds["ours"],
        seconds["torch"],
        limit=IMPORT,
    )


def measure_help(turns: int) -> Iterator[Row]:
    seconds = take_turns({"help": partial(call, PROJECT, "fcl", "--help")}, turns)["help"]
    yield Row("help", f"fcl --help, {HELP_SECONDS} s", seconds, [HELP_SECONDS] * turns, limit=1)


def measure_start(turns: int) -> Iterator[Row]:
    """Measure `fcl run` with the server up: until a run's first step is in the store, and of a finished run."""
    imports = "import flows.cli.app, flows.prefect.launch, flows.experiment"
    with copy_project() as folder:
        call(folder, "fcl", "prepare")
        call(folder, "fcl", "partition")
        seeds, seconds_to_first_step = iter(range(1 + turns)), []

        def fresh() -> None:
            now = time.time()
            call(folder, *run, f"--seed={next(seeds)}")
            steps = (path.stat().st_mtime for path in (folder / ".fcl").rglob("done/*.json"))
            seconds_to_first_step.append(min(step for step in steps if step > now) - now)

        run = ("fcl", "run", "--method", "fedavg", "--set", "federation.rounds=1")
        again = partial(call, folder, *run, "--seed=0")
        python_alone = partial(call, folder, sys.executable, "-c", imports)
        seconds = take_turns({"fresh": fresh, "again": again, "imports": python_alone}, turns)
        together = partial(call, folder, *run, "--seed=0,1")
        one_by_one = [partial(call, folder, *run, f"--seed={seed}") for seed in range(2)]
        several = take_turns({"together": together, "one by one": lambda: [each() for each in one_by_one]}, turns)
    beyond_imports = [
        whole - before for whole, before in zip(seconds_to_first_step[1:], seconds["imports"], strict=True)
    ]
    yield Row(
        "start",
        f"fcl run until its first step, beyond imports, {START_SECONDS} s",
        beyond_imports,
        [START_SECONDS] * turns,
        limit=1,
    )
    yield Row("cached-run", "fcl run of a finished run, its imports", seconds["again"], seconds["imports"])
    yield Row("one-start", "fcl run of two finished runs, one by one", several["together"], several["one by one"])


def measure_pipeline(turns: int) -> Iterator[Row]:
    """Measure the demo by `dvc repro`, without DVC, Prefect and MLflow, and by `dvc repro` again."""
    sides: dict[str, list[float]] = {"first": [], "plain": [], "again": []}
    commands = {"first": ["dvc", "repro"], "plain": [sys.executable, "-c", PLAIN], "again": ["dvc", "repro"]}
    for _ in range(turns):
        with copy_project() as folder:
            for side, command in commands.items():
                measure_start = time.perf_counter()
                call(folder, *command)
                sides[side].append(time.perf_counter() - measure_start)
    yield Row(
        "pipeline",
        "dvc repro of the demo, its experiments without DVC, Prefect, MLflow",
        sides["first"],
        sides["plain"],
    )
    yield Row("cached-pipeline", "dvc repro again, the first time", sides["again"], sides["first"])


BENCHES = [
    Bench("import", measure_imports, 7),
    Bench("help", measure_help, 7),
    Bench("start", measure_start, 5),
    Bench("pipeline", measure_pipeline, 1),
]
