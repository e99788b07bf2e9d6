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

from fclmodels.data.prepare import prepare
from fclmodels.data.splits.make_splits import write_splits
from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.executors import glibc_malloc
from fclmodels.metrics import MATRIX_METRICS
from fclmodels.plugins import find
from fclmodels.report.read_runs import read_run
from fclmodels.settings import load as reading
from fclmodels.settings.schema import Params
from fclmodels.storage.digests import digest_json

ALONE = ["federation.executor=serial", "federation.threads=1"]


class Row(BaseModel):
    model_config = ConfigDict(extra="forbid")

    method: str
    set: list[str] = []
    grid: dict[str, list[Any]] = {}
    like: str | None = None  # a row whose best point this one uses too
    seeds: list[int] | None = None

    @property
    def points(self) -> list[list[str]]:
        """Points of the grid, as settings."""
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
    after_each: list[str] = []  # metrics of fclmodels.metrics.MATRIX_METRICS
    rows: dict[str, Row]


class Job(BaseModel):
    """One run, and its folder."""

    params: Path
    settings: list[str]
    method: str
    seed: int
    on_val: bool
    out: Path

    @property
    def folder(self) -> Path:
        identity = {**self.model_dump(mode="json", exclude={"out"}), "text": self.params.read_text()}
        return (
            self.out / ("tuned" if self.on_val else "runs") / f"{self.method}-{self.seed}-{digest_json(identity)[:10]}"
        )

    def load(self) -> Params:
        return reading.load_params(self.params, self.settings, self.method, self.seed)


def run_job(job: Job) -> str | None:
    """Run a job that has not finished; returns why it ended early, if it did."""
    glibc_malloc.tune()
    folder, home = job.folder, job.out / "home" / job.folder.name
    if is_finished(job):
        return None
    splits = (OnVal if job.on_val else Splits).open(make_splits(job.load(), job.out))
    shared = job.out.absolute() / "queries"  # activations of frozen backbones, computed once
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


def make_splits(params: Params, out: Path) -> Path:
    """Return the folder of splits, made once for the same settings of data, stream and partition."""
    settings = {name: getattr(params, name).model_dump(mode="json") for name in ("data", "stream", "partition")}
    prepared = out / "data" / f"prepared-{digest_json(settings['data'])[:10]}"
    splits = out / "data" / f"splits-{digest_json(settings)[:10]}"
    if not (prepared / "meta.json").is_file():
        prepare(find("source", params.data.source)(params.data), prepared)
    if not (splits / "stream.json").is_file():
        stream = find("stream", params.stream.kind)(params.stream)
        write_splits(prepared, stream, find("partition", params.partition.kind)(params.partition), splits)
    return splits


def build_jobs(study: Study, row: Row, point: list[str], seeds: list[int], on_val: bool, out: Path) -> list[Job]:
    settings = [*study.set, *ALONE, *point, *row.set]
    shared = {"params": study.params, "settings": settings, "method": row.method, "on_val": on_val, "out": out}
    return [Job(seed=seed, **shared) for seed in seeds]


def run_jobs(pool: ProcessPoolExecutor, jobs: list[Job]) -> None:
    for job in jobs:
        make_splits(job.load(), job.out)
    for number, (job, problem) in enumerate(zip(jobs, pool.map(run_job, jobs), strict=True), start=1):
        reason = f": {problem}" if problem else ""
        print(f"{number} of {len(jobs)}: {job.folder.name} {' '.join(job.settings[-4:])}{reason}", file=sys.stderr)


def mean_val_acc(study: Study, runs: list[Job]) -> float:
    """Return the mean over the tuning seeds; -1 where a run ended early, as one that diverges does."""
    if not all(map(is_finished, runs)):
        return -1.0
    return float(np.mean([read_run(job.folder).result.metrics[study.reading]["acc"] for job in runs]))


def choose_points(study: Study, labels: list[str], pool: ProcessPoolExecutor, out: Path) -> dict[str, list[str]]:
    """Return, for each row with a grid, the point that is best on val rows."""
    tuned = {
        label: [(point, build_jobs(study, row, point, study.tune_seeds, True, out)) for point in row.points]
        for label, row in study.rows.items()
        if row.grid and (label in labels or any(study.rows[one].like == label for one in labels))
    }
    run_jobs(pool, [job for points in tuned.values() for _, runs in points for job in runs])
    best_points = {}
    for label, points in tuned.items():
        judged = [(mean_val_acc(study, runs), point) for point, runs in points]
        for value, point in judged:
            print(f"val: {label}: {100 * value:.1f} {' '.join(point)}", file=sys.stderr)
        best_points[label] = max(judged, key=lambda one: one[0])[1]
    return best_points


def format_table(study: Study, run_job: dict[str, list[Job]]) -> Iterator[str]:
    travelled = {f"MB {way}": (f"bytes_{way}", 1e6) for way in ("up", "down", "kept")}
    # There are rounds to the best where monitors.accuracy is on.
    costs = {"rounds to best": ("rounds_to_best", 1), "s a round": ("seconds_per_round", 1), **travelled}
    yield "| | " + " | ".join([*study.metrics, *costs, "settings"]) + " |"
    yield "|---" * (len(study.metrics) + len(costs) + 2) + "|"
    for label, runs in run_job.items():
        there = [read_run(job.folder) for job in runs if is_finished(job)]
        if len(there) < len(runs):
            yield f"| {label} | ended early with {len(runs) - len(there)} of {len(runs)} seeds |"
            continue
        cells = [
            format_spread([find_metric(run.result.metrics, study.reading, name) for run in there])
            for name in study.metrics
        ]
        for name, unit in costs.values():
            values = [run.costs[name] for run in there]
            cells.append("" if None in values else f"{np.mean(np.array(values, float)) / unit:.3g}")
        own = runs[0].settings[len(study.set) + len(ALONE) :]
        yield f"| {label} | " + " | ".join(cells) + f" | {' '.join(f'`{one}`' for one in own)} |"


def format_table_after_each(study: Study, run_job: dict[str, list[Job]], name: str) -> Iterator[str]:
    """Yield a table of a metric after 1 to T tasks: of the accuracies at that time on the tasks learned so far."""
    tasks = max(read_run(job.folder).tasks for runs in run_job.values() for job in runs if is_finished(job))
    yield f"| {name} | " + " | ".join(map(str, range(1, tasks + 1))) + " |"
    yield "|---" * (tasks + 1) + "|"
    for label, runs in run_job.items():
        matrices = [read_run(job.folder).matrices[study.reading] for job in runs if is_finished(job)]
        if not matrices:
            continue
        stood = [[MATRIX_METRICS[name](a[: t + 1, :t]) for a in matrices] for t in range(1, len(matrices[0]))]
        yield f"| {label} | " + " | ".join(format_spread(values).partition(" ")[0] for values in stood) + " |"


def is_finished(job: Job) -> bool:
    return (job.folder / "result.json").is_file()


def find_metric(metrics: dict[str, dict[str, float | None]], by: str, name: str) -> float | None:
    """Return a metric of the study's reading, or, as reading.name, of another."""
    other, _, name = name.rpartition(".")
    return metrics.get(other or by, {}).get(name)


def format_spread(values: list[float | None]) -> str:
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
    options = parser.parse_args()
    study = Study.model_validate(yaml.safe_load(options.study.read_text()))
    study.set += options.set
    out = options.out or Path("tries") / options.study.stem
    labels = options.rows or list(study.rows)
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        points = choose_points(study, labels, pool, out)
        runs = {}
        for label in labels:
            row = study.rows[label]
            point = points.get(row.like or label, [])
            runs[label] = build_jobs(study, row, point, row.seeds or study.seeds, False, out)
        run_jobs(pool, [job for of_row in runs.values() for job in of_row])
    print("\n".join(format_table(study, runs)))
    for name in study.after_each:
        print("\n" + "\n".join(format_table_after_each(study, runs, name)))


if __name__ == "__main__":
    main()
