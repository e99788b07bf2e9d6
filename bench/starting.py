"""How long it takes until something happens: importing, `fcl --help`, `fcl run` of what is done, `dvc repro` again."""

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

from measuring import Bench, Row, taking_turns

PROJECT = Path(__file__).parents[1]
PARTS = ("flows", "tasks", "fclmodels", "params.yaml", "dvc.yaml", ".dvc", ".dvcignore", ".gitignore")
IMPORT, HELP_SECONDS, START_SECONDS = 1.5, 0.5, 2.0
PLAIN = """
import sys
from pathlib import Path
from fclmodels import params, plugins
from fclmodels.data.split import splits_of
from fclmodels.data.splits import Splits
from fclmodels.experiment import Experiment
settings = params.load("params.yaml")
splits = Splits.open(splits_of(settings, Path("plain")))
for method in settings.experiment.methods:
    for seed in settings.experiment.seeds:
        with Experiment(settings, method, seed, splits, Path("plain/home")) as experiment:
            experiment.run(Path("plain/runs") / experiment.label)
"""


@contextmanager
def copy_of_the_project() -> Iterator[Path]:
    """Without data and runs, in a repository of its own."""
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


def imported(turns: int) -> Iterator[Row]:
    """All that an experiment needs, not only the package's name."""
    lines = {"ours": "import fclmodels, fclmodels.experiment", "torch": "import torch"}
    seconds = taking_turns({side: python(line) for side, line in lines.items()}, turns)
    yield Row("import", "import fclmodels.experiment, import torch", seconds["ours"], seconds["torch"], limit=IMPORT)


def helped(turns: int) -> Iterator[Row]:
    seconds = taking_turns({"help": partial(call, PROJECT, "fcl", "--help")}, turns)["help"]
    yield Row("help", f"fcl --help, {HELP_SECONDS} s", seconds, [HELP_SECONDS] * turns, limit=1)


def started(turns: int) -> Iterator[Row]:
    """`fcl run`, the server up: until a run's first step is in the store, and of a run that is done."""
    imports = "import flows.cli, flows.launch, flows.experiment"
    with copy_of_the_project() as folder:
        call(folder, "fcl", "prepare")
        call(folder, "fcl", "partition")
        seeds, begun = iter(range(1 + turns)), []

        def fresh() -> None:
            now = time.time()
            call(folder, *run, f"--seed={next(seeds)}")
            steps = (path.stat().st_mtime for path in (folder / ".fcl").rglob("done/*.json"))
            begun.append(min(step for step in steps if step > now) - now)

        run = ("fcl", "run", "--method", "fedavg", "--set", "federation.rounds=1")
        again = partial(call, folder, *run, "--seed=0")
        python_alone = partial(call, folder, sys.executable, "-c", imports)
        seconds = taking_turns({"fresh": fresh, "again": again, "imports": python_alone}, turns)
    beyond = [whole - before for whole, before in zip(begun[1:], seconds["imports"], strict=True)]
    yield Row(
        "start",
        f"fcl run until its first step, beyond imports, {START_SECONDS} s",
        beyond,
        [START_SECONDS] * turns,
        limit=1,
    )
    yield Row("cached-run", "fcl run of what is done, its imports", seconds["again"], seconds["imports"])


def pipeline(turns: int) -> Iterator[Row]:
    """The demo by `dvc repro`, the same without DVC, Prefect and MLflow, and `dvc repro` again."""
    sides: dict[str, list[float]] = {"first": [], "plain": [], "again": []}
    commands = {"first": ["dvc", "repro"], "plain": [sys.executable, "-c", PLAIN], "again": ["dvc", "repro"]}
    for _ in range(turns):
        with copy_of_the_project() as folder:
            for side, command in commands.items():
                started = time.perf_counter()
                call(folder, *command)
                sides[side].append(time.perf_counter() - started)
    yield Row(
        "pipeline",
        "dvc repro of the demo, its experiments without DVC, Prefect, MLflow",
        sides["first"],
        sides["plain"],
    )
    yield Row("cached-pipeline", "dvc repro again, the first time", sides["again"], sides["first"])


BENCHES = [
    Bench("import", imported, 7),
    Bench("help", helped, 7),
    Bench("start", started, 5),
    Bench("pipeline", pipeline, 1),
]
