"""A stream of many arrivals, with random faults while it learns: nothing is lost or doubled, memory and disk stay flat.

    python tests/faults/soak.py --arrivals 24 --seed 0

Prints a line for each arrival: the bytes of states and checkpoints in .fcl, the peak memory of the process that learned
it, the bytes that grow with each task (tables in the store, MLflow's artifacts), and its faults. In the end each
arrival must have been trained once and have one version in MLflow, and the model must equal that of an undisturbed
experiment over all of them, to the bit; else the exit code is 1.
"""

import argparse
import json
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from injuries import REFUSALS, damage, follow_remedy, read_refusal
from workshop import BrokenPromise, Command, Project, Workshop, import_everything

SETTINGS = """
data: {source: image-folder}
partition: {kind: iid, clients: 3, val: 0.2}
model: {backbone: mlp, hidden: 16}
federation: {rounds: 4, executor: serial, threads: 1, checkpoint_seconds: 0, faults: {late: 0.2, crash: 0.1}}
device: cpu
methods: {er: {}}
arrivals: {method: er, gate: {acc: 0, forgetting: 1}}
"""
IMAGES = 30  # of each of the two digits of an arrival
# Bytes over the first three. A state is 24 kB, and a kill may leave one until the next arrival; a process that learns
# many tasks in a row, as after a damaged record, needs 10 MB more than one that learns the last.
MARGINS = {"caches": 60_000, "memory": 20_000_000}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrivals", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="fclflow-soak-"))
    workshop = Workshop(root)
    try:
        workshop.prefect.start()
        import_everything()
        rows = soak(create_project(root / "stream"), options.arrivals, random.Random(options.seed))
        refuse_growth(rows)
    except BrokenPromise as problem:
        print(f"lost: {problem}\n{root}")  # noqa: T201
        return 1
    finally:
        workshop.close()
    shutil.rmtree(root)
    return 0


def create_project(folder: Path) -> Project:
    folder.mkdir()
    (folder / "params.yaml").write_text(SETTINGS)
    return Project(folder, "er")


def soak(project: Project, arrivals: int, chance: random.Random) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number in range(arrivals):
        arrive(project.folder / "incoming", number)
        seconds = rows[-1]["seconds"] if rows else 4.0
        faults = [chance.choice(FAULTS)(project, chance, seconds) for _ in range(chance.choice([0, 1, 1, 2]))]
        effective = [fault for fault in faults if fault]
        started = time.monotonic()
        command = learn_arrivals(project)
        rows.append(
            {"caches": count_cache_bytes(project.folder / ".fcl"), "memory": command.memory, "faults": len(effective)}
        )
        rows[-1]["seconds"] = time.monotonic() - started
        description = "; ".join(effective) or "nothing"
        sizes = " ".join(
            f"{name} {count_bytes(project.folder / name) / 1e3:7.1f} kB" for name in (".fcl/store", "mlartifacts")
        )
        row = f"{number + 1:>3} caches {rows[-1]['caches'] / 1e3:6.1f} kB, memory {command.memory / 1e6:4.0f} MB"
        print(f"{row}, {sizes}  {description}", flush=True)  # noqa: T201
        refuse_lost_or_doubled(project.folder, number + 1)
    if read_model_digest(project.folder / "streams/arrivals") != train_undisturbed(project):
        raise BrokenPromise("the model is not that of an undisturbed experiment over all arrivals")
    print(f"{arrivals} arrivals, {sum(row['faults'] for row in rows)} faults: nothing lost, nothing doubled")  # noqa: T201
    return rows


def count_cache_bytes(home: Path) -> int:
    """Return the bytes from which a stream resumes: states and clients' memories in the store, and checkpoints."""
    trees = [file for file in home.glob("store/[0-9a-f][0-9a-f]/*") if b"fclflow" in file.read_bytes()[:99]]
    return sum(file.stat().st_size for file in trees) + count_bytes(home / "checkpoints")


def count_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def arrive(incoming: Path, number: int) -> None:
    """Write the next images of two digits as an arrival."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    digits, (turn, pair) = load_digits(), divmod(number, 5)
    for digit in (2 * pair, 2 * pair + 1):
        place = incoming / f"arrival-{number + 1:02d}" / f"digit {digit}"
        place.mkdir(parents=True)
        for n, image in enumerate(digits.images[digits.target == digit][turn * IMAGES :][:IMAGES]):
            Image.fromarray((image * 15.9).astype(np.uint8)).save(place / f"{n}.png")
    (place.parent / "COMPLETE").touch()


def start_stream(project: Project) -> Command:
    return project.fork("stream", "--once", "-q")


def learn_arrivals(project: Project) -> Command:
    """Repeat the command, following the remedies of refusals, until it succeeds; return its last start."""
    for _ in range(REFUSALS):
        command = start_stream(project)
        if (code := command.wait()) == 0:
            return command
        follow_remedy(project, read_refusal(command, code))
    raise BrokenPromise("refuses each time")


# Faults. Each returns a description of what it did, "" if it came too late.


def make_stop(number: signal.Signals) -> Callable[[Project, random.Random, float], str]:
    def stop(project: Project, chance: random.Random, seconds: float) -> str:
        command, after = start_stream(project), chance.uniform(0, seconds)
        until = time.monotonic() + after
        while time.monotonic() < until and not command.has_ended:
            time.sleep(0.005)
        command.send(number)
        return f"{number.name} after {after:.1f} s" if command.wait() else ""

    return stop


def kill_and_damage(project: Project, chance: random.Random, seconds: float) -> str:
    """Kill a run, and cut a file short that it left in .fcl, or flip a bit."""
    killed = make_stop(signal.SIGKILL)(project, chance, seconds)
    kinds = ("store/[0-9a-f][0-9a-f]/*", "store/done/*", "results/*", "checkpoints/*/**/*.[sj]*")
    files = [file for kind in kinds for file in sorted(project.folder.glob(f".fcl/{kind}"))]
    return damage(chance.choice(files), chance).removeprefix(f"{project.folder}/") if files else killed


FAULTS = [
    *map(make_stop, (signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM)),
    kill_and_damage,
    kill_and_damage,
]


# Conditions at the end.


def refuse_lost_or_doubled(folder: Path, arrivals: int) -> None:
    """Raise BrokenPromise unless each task has one finished run, one version, and each of its rounds once."""
    with sqlite3.connect(f"file:{folder}/mlflow.db?mode=ro", uri=True) as store:
        tasks = store.execute("select value from model_version_tags where key = 'tasks'").fetchall()
        runs = store.execute("select run_uuid, status from runs").fetchall()
        models = store.execute("select count(*) from logged_models where status = 2").fetchone()
        versions = store.execute("select count(*) from model_versions").fetchone()
        steps = [
            store.execute("select step from metrics where key = 'train/loss' and run_uuid = ?", (run,)).fetchall()
            for run, _ in runs
        ]
    learned = list(range(1, arrivals + 1))
    if sorted(int(value) for (value,) in tasks) != learned or versions != (arrivals,):
        raise BrokenPromise(f"versions of {tasks}, not of {arrivals} tasks")
    if {status for _, status in runs} != {"FINISHED"} or models != (arrivals,) or len(runs) != arrivals:
        raise BrokenPromise(f"{arrivals} tasks, runs {runs}, {models} models")
    if sorted(len(of_run) for of_run in steps) != [4 * n for n in learned] or any(len(set(s)) != len(s) for s in steps):
        raise BrokenPromise(f"rounds in MLflow: {sorted(map(len, steps))}")


def refuse_growth(rows: list[dict[str, Any]]) -> None:
    """Raise BrokenPromise where caches or memory exceed their peak in the first three arrivals by a margin."""
    from scipy.stats import theilslopes

    for what, margin in MARGINS.items():
        first, later = [row[what] for row in rows[:3]], [row[what] for row in rows[3:]]
        if len(later) > 2:
            slope, _, low, high = (f"{each / 1e3:.1f}" for each in theilslopes(later))
            print(f"{what}: {slope} kB an arrival ({low} to {high}), {(max(later) - max(first)) / 1e3:.1f} kB in all")  # noqa: T201
        if max(later, default=0) > max(first) + margin:
            raise BrokenPromise(f"{what} grows: {first + later}")


def read_model_digest(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["digests"]["model"])


def train_undisturbed(project: Project) -> str:
    """Train one experiment over all arrivals; return the model's digest."""
    from fclmodels.data.arrivals.growing_stream import GrowingStream, assemble
    from fclmodels.data.splits.split_reader import Splits
    from fclmodels.experiment.experiment import Experiment
    from fclmodels.settings.load import load_params

    parts = GrowingStream(project.folder / "data/streams/arrivals").parts
    splits = Splits.open(assemble(parts, project.folder / "all-tasks"))
    with Experiment(
        load_params(project.folder / "params.yaml"), "er", 0, splits, project.folder / "home"
    ) as experiment:
        experiment.run(project.folder / "alone")
    return read_model_digest(project.folder / "alone")


if __name__ == "__main__":
    sys.exit(main())
