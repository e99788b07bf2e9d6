"""Runs of the scripts here, each in a folder of its own that is not done again; side by side, one thread each."""

import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from fclmodels.data.prepare import prepare
from fclmodels.data.splits.make_splits import write_splits
from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.executors import glibc_malloc
from fclmodels.plugins import find
from fclmodels.settings import load as reading
from fclmodels.settings.schema import Params
from fclmodels.storage.digests import digest_json

ALONE = ["federation.executor=serial", "federation.threads=1"]


class Job(BaseModel):
    """One run, and its folder."""

    params: Path
    settings: list[str]
    method: str
    seed: int
    out: Path

    @property
    def folder(self) -> Path:
        identity = {**self.model_dump(mode="json", exclude={"out"}), "text": self.params.read_text()}
        return self.out / "runs" / f"{self.method}-{self.seed}-{digest_json(identity)[:10]}"

    def load(self) -> Params:
        return reading.load_params(self.params, self.settings, self.method, self.seed)


def run_job(job: Job) -> str | None:
    """Run a job that has not finished; returns why it ended early, if it did."""
    glibc_malloc.tune()
    folder, home = job.folder, job.out / "home" / job.folder.name
    if is_finished(job):
        return None
    splits = Splits.open(make_splits(job.load(), job.out))
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


def run_jobs(pool: ProcessPoolExecutor, jobs: list[Job]) -> None:
    for job in jobs:
        make_splits(job.load(), job.out)
    for number, (job, problem) in enumerate(zip(jobs, pool.map(run_job, jobs), strict=True), start=1):
        reason = f": {problem}" if problem else ""
        print(f"{number} of {len(jobs)}: {job.folder.name} {' '.join(job.settings[-4:])}{reason}", file=sys.stderr)


def is_finished(job: Job) -> bool:
    return (job.folder / "result.json").is_file()


def find_metric(metrics: dict[str, dict[str, float | None]], by: str, name: str) -> float | None:
    """Return a metric of a reading, or, as reading.name, of another."""
    other, _, name = name.rpartition(".")
    return metrics.get(other or by, {}).get(name)


def format_spread(values: list[float | None]) -> str:
    if None in values:
        return ""
    numbers = 100 * np.array(values, float)
    return f"{numbers.mean():.1f}" + (f" ± {numbers.std(ddof=1):.1f}" if len(numbers) > 1 else "")
