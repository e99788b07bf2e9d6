"""A study: methods side by side on one stream, each with the settings that val rows choose, as Markdown.

    python bench/study.py bench/studies/special-digits.yaml [--out tries/special-digits] [--workers 2] [--rows SPECIAL]

The file names params (a preset), settings over it (`set`), seeds, metrics of a reading, and rows: a label, a method,
settings of its own, and a `grid` of settings. Of a grid the point with the best mean ACC on val rows is taken, found
with `tune_seeds`, never looking at test rows; `like` takes what another row's grid has chosen. Metrics that are named
under `after_each` come in a further table, as they stood after each task. Every run is a folder under --out, which is
not done again and which `fcl compare` reads. Runs go side by side, one thread each.
"""

import argparse
import itertools
import json
import multiprocessing
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict
from tune import OnVal

from fclmodels import params as reading
from fclmodels.data.prepare import prepare
from fclmodels.data.split import split
from fclmodels.data.splits import Splits
from fclmodels.errors import UserError
from fclmodels.experiment import Experiment, digest_of
from fclmodels.federation import malloc
from fclmodels.metrics import OF_MATRIX
from fclmodels.plugins import find
from fclmodels.report.runs import read_run
from fclmodels.settings import Params

ALONE = ["federation.executor=serial", "federation.threads=1"]


class Row(BaseModel):
    model_config = ConfigDict(extra="forbid")

    method: str
    set: list[str] = []
    grid: dict[str, list[Any]] = {}
    like: str | None = None  # a row whose grid has chosen for this one too
    seeds: list[int] | None = None

    @property
    def points(self) -> list[list[str]]:
        """Each point of the grid, as settings."""
        axes = [[f"{key}={json.dumps(value)}" for value in values] for key, values in self.grid.items()]
        return [list(point) for point in itertools.product(*axes)]


class Study(BaseModel):
    model_config = ConfigDict(extra="forbid")

    params: Path
    set: list[str] = []
    seeds: list[int]
    tune_seeds: list[int] = [100]
    reading: str = "task_agnostic"
    metrics: list[str]
    after_each: list[str] = []  # metrics of fclmodels.metrics.OF_MATRIX
    rows: dict[str, Row]


class Job(BaseModel):
    """One run, and the folder that holds it when it is done."""

    params: Path
    settings: list[str]
    method: str
    seed: int
    on_val: bool
    out: Path

    @property
    def folder(self) -> Path:
        known = {**self.model_dump(mode="json", exclude={"out"}), "text": self.params.read_text()}
        return self.out / ("tuned" if self.on_val else "runs") / f"{self.method}-{self.seed}-{digest_of(known)[:10]}"

    def load(self) -> Params:
        return reading.load(self.params, self.settings, self.method)


def done(job: Job) -> str | None:
    """Run it where that has not been done; why it ended early, if it did."""
    malloc.tune()
    folder, home = job.folder, job.out / "home" / job.folder.name
    if finished(job):
        return None
    splits = (OnVal if job.on_val else Splits).open(splits_of(job.load(), job.out))
    shared = job.out.absolute() / "queries"  # what frozen backbones say of the samples, asked for once
    for place in (shared, home):
        place.mkdir(parents=True, exist_ok=True)
    if not (home / "queries").exists():
        (home / "queries").symlink_to(shared)
    try:
        with Experiment(job.load(), job.method, job.seed, splits, home) as experiment:
            experiment.run(folder)
    except UserError as problem:
        return str(problem)
    shutil.rmtree(home)
    return None


def splits_of(params: Params, out: Path) -> Path:
    """Made once for the same settings of data, stream and partition."""
    settings = {name: getattr(params, name).model_dump(mode="json") for name in ("data", "stream", "partition")}
    prepared = out / "data" / f"prepared-{digest_of(settings['data'])[:10]}"
    splits = out / "data" / f"splits-{digest_of(settings)[:10]}"
    if not (prepared / "meta.json").is_file():
        prepare(find("source", params.data.source)(params.data), prepared)
    if not (splits / "stream.json").is_file():
        stream = find("stream", params.stream.kind)(params.stream)
        split(prepared, stream, find("partition", params.partition.kind)(params.partition), splits)
    return splits


def jobs(study: Study, row: Row, chosen: list[str], seeds: list[int], on_val: bool, out: Path) -> list[Job]:
    settings = [*study.set, *ALONE, *chosen, *row.set]
    shared = {"params": study.params, "settings": settings, "method": row.method, "on_val": on_val, "out": out}
    return [Job(seed=seed, **shared) for seed in seeds]


def do(pool: ProcessPoolExecutor, wanted: list[Job]) -> None:
    for job in wanted:
        splits_of(job.load(), job.out)
    for number, (job, problem) in enumerate(zip(wanted, pool.map(done, wanted), strict=True), start=1):
        told = f": {problem}" if problem else ""
        print(f"{number} of {len(wanted)}: {job.folder.name} {' '.join(job.settings[-4:])}{told}", file=sys.stderr)


def acc_on_val(study: Study, runs: list[Job]) -> float:
    """The mean over the tuning seeds; none where a run ended early, as one that diverges does."""
    if not all(map(finished, runs)):
        return -1.0
    return float(np.mean([read_run(job.folder).result.metrics[study.reading]["acc"] for job in runs]))


def choices(study: Study, labels: list[str], pool: ProcessPoolExecutor, out: Path) -> dict[str, list[str]]:
    """Of each row with a grid the point that val rows choose."""
    tuned = {
        label: [(point, jobs(study, row, point, study.tune_seeds, True, out)) for point in row.points]
        for label, row in study.rows.items()
        if row.grid and (label in labels or any(study.rows[one].like == label for one in labels))
    }
    do(pool, [job for points in tuned.values() for _, runs in points for job in runs])
    found = {}
    for label, points in tuned.items():
        judged = [(acc_on_val(study, runs), point) for point, runs in points]
        for value, point in judged:
            print(f"val: {label}: {100 * value:.1f} {' '.join(point)}", file=sys.stderr)
        found[label] = max(judged, key=lambda one: one[0])[1]
    return found


def table(study: Study, done: dict[str, list[Job]]) -> Iterator[str]:
    travelled = {f"MB {way}": (f"bytes_{way}", 1e6) for way in ("up", "down", "kept")}
    # Rounds to the best are known where monitors.accuracy is on.
    costs = {"rounds to best": ("rounds_to_best", 1), "s a round": ("seconds_per_round", 1), **travelled}
    yield "| | " + " | ".join([*study.metrics, *costs, "settings"]) + " |"
    yield "|---" * (len(study.metrics) + len(costs) + 2) + "|"
    for label, runs in done.items():
        there = [read_run(job.folder) for job in runs if finished(job)]
        if len(there) < len(runs):
            yield f"| {label} | ended early with {len(runs) - len(there)} of {len(runs)} seeds |"
            continue
        cells = [spread([metric(run.result.metrics, study.reading, name) for run in there]) for name in study.metrics]
        for name, unit in costs.values():
            values = [run.costs[name] for run in there]
            cells.append("" if None in values else f"{np.mean(np.array(values, float)) / unit:.3g}")
        own = runs[0].settings[len(study.set) + len(ALONE) :]
        yield f"| {label} | " + " | ".join(cells) + f" | {' '.join(f'`{one}`' for one in own)} |"


def table_after_each(study: Study, done: dict[str, list[Job]], name: str) -> Iterator[str]:
    """A metric after 1 to T tasks: of the accuracies as they stood then, on the tasks that had been learned."""
    tasks = max(read_run(job.folder).tasks for runs in done.values() for job in runs if finished(job))
    yield f"| {name} | " + " | ".join(map(str, range(1, tasks + 1))) + " |"
    yield "|---" * (tasks + 1) + "|"
    for label, runs in done.items():
        matrices = [read_run(job.folder).matrices[study.reading] for job in runs if finished(job)]
        if not matrices:
            continue
        stood = [[OF_MATRIX[name](a[: t + 1, :t]) for a in matrices] for t in range(1, len(matrices[0]))]
        yield f"| {label} | " + " | ".join(spread(values).partition(" ")[0] for values in stood) + " |"


def finished(job: Job) -> bool:
    return (job.folder / "result.json").is_file()


def metric(metrics: dict[str, dict[str, float | None]], by: str, name: str) -> float | None:
    """A metric of the study's reading, or, as reading.name, of another."""
    other, _, name = name.rpartition(".")
    return metrics.get(other or by, {}).get(name)


def spread(values: list[float | None]) -> str:
    if None in values:
        return ""
    numbers = 100 * np.array(values, float)
    return f"{numbers.mean():.1f}" + (f" ± {numbers.std(ddof=1):.1f}" if len(numbers) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", nargs="+", help="labels, if not all")
    parser.add_argument("--set", nargs="+", default=[], help="settings over the study's own")
    given = parser.parse_args()
    study = Study.model_validate(yaml.safe_load(given.study.read_text()))
    study.set += given.set
    out = given.out or Path("tries") / given.study.stem
    labels = given.rows or list(study.rows)
    with ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn")) as pool:
        chosen = choices(study, labels, pool, out)
        runs = {}
        for label in labels:
            row = study.rows[label]
            point = chosen.get(row.like or label, [])
            runs[label] = jobs(study, row, point, row.seeds or study.seeds, False, out)
        do(pool, [job for of_row in runs.values() for job in of_row])
    print("\n".join(table(study, runs)))
    for name in study.after_each:
        print("\n" + "\n".join(table_after_each(study, runs, name)))


if __name__ == "__main__":
    main()
