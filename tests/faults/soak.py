"""A stream of many arrivals, each with a random fault while it is learned: nothing lost or doubled, memory, disk flat.

    python tests/faults/soak.py --arrivals 24 --seed 0

Prints a line an arrival: the bytes of states and checkpoints in .fcl, the largest memory of the process that learned
it, what grows with each task (tables in the store, MLflow's artifacts), and what happened to it. In the end each
arrival has been trained once and has one version in MLflow, and the model is that of an undisturbed experiment over all
of them, to the bit; else the exit code is 1.
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

from injuries import REFUSALS, damage, follow_way_out, told_in_one_line
from workshop import Command, Lost, Project, Workshop, import_all

SETTINGS = """
data: {source: image-folder}
partition: {kind: iid, clients: 3, val: 0.2}
model: {backbone: mlp, hidden: 16}
federation: {rounds: 4, executor: serial, threads: 1, checkpoint_seconds: 0, faults: {late: 0.2, crash: 0.1}}
device: cpu
methods: {er: {}}
arrivals: {method: er, gate: {acc: 0, forgetting: 1}}
"""
IMAGES = 30  # of each of two digits an arrival
# Bytes over the first three. A state is 24 kB, and a kill may leave one until the next arrival; a process that learns
# many tasks in a row, as after a damaged record, holds 10 MB more than one that learns the last.
ROOM = {"caches": 60_000, "memory": 20_000_000}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arrivals", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="fclflow-soak-"))
    workshop = Workshop(root)
    try:
        workshop.prefect.start()
        import_all()
        rows = soak(project_in(root / "stream"), options.arrivals, random.Random(options.seed))
        refuse_growth(rows)
    except Lost as problem:
        print(f"lost: {problem}\n{root}")  # noqa: T201
        return 1
    finally:
        workshop.close()
    shutil.rmtree(root)
    return 0


def project_in(folder: Path) -> Project:
    folder.mkdir()
    (folder / "params.yaml").write_text(SETTINGS)
    return Project(folder, "er")


def soak(project: Project, arrivals: int, chance: random.Random) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number in range(arrivals):
        arrive(project.folder / "incoming", number)
        seconds = rows[-1]["seconds"] if rows else 4.0
        faults = [chance.choice(FAULTS)(project, chance, seconds) for _ in range(chance.choice([0, 1, 1, 2]))]
        happened = [fault for fault in faults if fault]
        begun = time.monotonic()
        command = come_through(project)
        rows.append({"caches": caches(project.folder / ".fcl"), "memory": command.memory, "faults": len(happened)})
        rows[-1]["seconds"] = time.monotonic() - begun
        told = "; ".join(happened) or "nothing"
        kept = " ".join(
            f"{name} {bytes_of(project.folder / name) / 1e3:7.1f} kB" for name in (".fcl/store", "mlartifacts")
        )
        row = f"{number + 1:>3} caches {rows[-1]['caches'] / 1e3:6.1f} kB, memory {command.memory / 1e6:4.0f} MB"
        print(f"{row}, {kept}  {told}", flush=True)  # noqa: T201
        refuse_lost_or_doubled(project.folder, number + 1)
    if model_of(project.folder / "streams/arrivals") != undisturbed(project):
        raise Lost("the model is not that of an undisturbed experiment over all arrivals")
    print(f"{arrivals} arrivals, {sum(row['faults'] for row in rows)} faults: nothing lost, nothing doubled")  # noqa: T201
    return rows


def caches(home: Path) -> int:
    """Bytes of what a stream keeps to go on from: states and clients' memories in the store, and checkpoints."""
    trees = [file for file in home.glob("store/[0-9a-f][0-9a-f]/*") if b"fclflow" in file.read_bytes()[:99]]
    return sum(file.stat().st_size for file in trees) + bytes_of(home / "checkpoints")


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def arrive(incoming: Path, number: int) -> None:
    """The next images of two digits, as a tree of folders."""
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


def stream(project: Project) -> Command:
    return project.fork("stream", "--once", "-q")


def come_through(project: Project) -> Command:
    for _ in range(REFUSALS):
        command = stream(project)
        if (code := command.end()) == 0:
            return command
        follow_way_out(project, told_in_one_line(command, code))
    raise Lost("refuses again and again")


# Faults. Each tells what it did, and nothing where it came too late.


def stopped(number: signal.Signals) -> Callable[[Project, random.Random, float], str]:
    def stop(project: Project, chance: random.Random, seconds: float) -> str:
        command, after = stream(project), chance.uniform(0, seconds)
        until = time.monotonic() + after
        while time.monotonic() < until and not command.ended:
            time.sleep(0.005)
        command.send(number)
        return f"{number.name} after {after:.1f} s" if command.end() else ""

    return stop


def damaged(project: Project, chance: random.Random, seconds: float) -> str:
    """What a killed run has left in .fcl, cut short or with a bit flipped."""
    killed = stopped(signal.SIGKILL)(project, chance, seconds)
    kinds = ("store/[0-9a-f][0-9a-f]/*", "store/done/*", "results/*", "checkpoints/*/**/*.[sj]*")
    found = [file for kind in kinds for file in sorted(project.folder.glob(f".fcl/{kind}"))]
    return damage(chance.choice(found), chance).removeprefix(f"{project.folder}/") if found else killed


FAULTS = [*map(stopped, (signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM)), damaged, damaged]


# What must hold.


def refuse_lost_or_doubled(folder: Path, arrivals: int) -> None:
    """One run and one version a task, finished, each round of each task in it once."""
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
        raise Lost(f"versions of {tasks}, not of {arrivals} tasks")
    if {status for _, status in runs} != {"FINISHED"} or models != (arrivals,) or len(runs) != arrivals:
        raise Lost(f"{arrivals} tasks, runs {runs}, {models} models")
    if sorted(len(of_run) for of_run in steps) != [4 * n for n in learned] or any(len(set(s)) != len(s) for s in steps):
        raise Lost(f"rounds in MLflow: {sorted(map(len, steps))}")


def refuse_growth(rows: list[dict[str, Any]]) -> None:
    """Over the most of the first three arrivals, after which there are two states; the slope is the median of pairs."""
    from scipy.stats import theilslopes

    for what, room in ROOM.items():
        first, later = [row[what] for row in rows[:3]], [row[what] for row in rows[3:]]
        if len(later) > 2:
            slope, _, low, high = (f"{each / 1e3:.1f}" for each in theilslopes(later))
            print(f"{what}: {slope} kB an arrival ({low} to {high}), {(max(later) - max(first)) / 1e3:.1f} kB in all")  # noqa: T201
        if max(later, default=0) > max(first) + room:
            raise Lost(f"{what} grows: {first + later}")


def model_of(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["digests"]["model"])


def undisturbed(project: Project) -> str:
    """The model's digest from one experiment over all that has arrived."""
    from fclmodels.data.growing import GrowingStream, assembled
    from fclmodels.data.splits import Splits
    from fclmodels.experiment import Experiment
    from fclmodels.params import load

    parts = GrowingStream(project.folder / "data/streams/arrivals").parts
    splits = Splits.open(assembled(parts, project.folder / "whole"))
    with Experiment(load(project.folder / "params.yaml"), "er", 0, splits, project.folder / "home") as experiment:
        experiment.run(project.folder / "alone")
    return model_of(project.folder / "alone")


if __name__ == "__main__":
    sys.exit(main())
