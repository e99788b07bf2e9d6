"""Jobs of a study, side by side in processes or one after another in this one; their results do not differ.

A worker (worker.py) is sent a job as a line of JSON and answers in one. What it has done is in the store.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from fclmodels.errors import UserError
from fclmodels.study.plan import Point, Study, StudyJob, build_job
from fclmodels.study.trial import Look, TriedPoint, try_point, watch_trial
from flows.prefect.environment import HOME
from tasks.data import ensure_splits

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
WORKER = "flows.study.worker"


@contextmanager
def open_map(workers: int) -> Iterator[Map]:
    """Return a map over jobs, results in their order: in so many processes, or in this one where there is one."""
    if workers == 1:
        yield map
        return
    processes = [start_worker() for _ in range(workers)]
    idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
    for process in processes:
        idle.put(process)

    def run(function: Callable[[Any], Any], order: Any) -> Any:
        process = idle.get()
        try:
            return read_answer(ask_worker(process, function.__name__, order))
        finally:
            idle.put(process)

    threads = ThreadPoolExecutor(workers)
    try:
        yield lambda function, orders: threads.map(lambda order: run(function, order), orders)
    finally:
        for process in processes:
            process.terminate()
        threads.shutdown(cancel_futures=True)
        for process in processes:
            process.communicate()


def start_worker() -> "subprocess.Popen[str]":
    """Return a new worker; in a session of its own, for an interrupt is this process's to handle."""
    return subprocess.Popen(
        [sys.executable, "-m", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def ask_worker(process: "subprocess.Popen[str]", name: str, order: Any) -> dict[str, Any]:
    """Return a worker's answer to a job."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        print(json.dumps({"job": name, **pack_order(order)}), file=process.stdin, flush=True)
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        raise UserError(
            "a process of the study was killed, as one is where memory runs out. The same command resumes; "
            "--workers 1 needs the least memory."
        )
    answer: dict[str, Any] = json.loads(line)
    return answer


def pack_order(order: Any) -> dict[str, Any]:
    """Return a job's order as JSON values: (study, label), (study, label, point) or (job, folder)."""
    first, *rest = order
    if isinstance(first, Study):
        return {"study": first.model_dump(mode="json"), "rest": rest}
    return {"run": asdict(first), "rest": [str(folder) for folder in rest]}


def unpack_order(packed: dict[str, Any]) -> Any:
    """Return the order that `pack_order` has packed."""
    if "study" in packed:
        label, *points = packed["rest"]
        return (Study.model_validate(packed["study"]), label, *map(tuple, points))
    run = {**packed["run"], "overrides": tuple(packed["run"]["overrides"])}
    return StudyJob(**run), *map(Path, packed["rest"])


def pack_result(result: Any) -> Any:
    """Return a job's result as JSON values: of a search a list of trials, of a run the reason why it ended early."""
    if isinstance(result, TriedPoint):
        return result._asdict()
    return [trial._asdict() for trial in result] if isinstance(result, list) else result


def read_answer(answer: dict[str, Any]) -> Any:
    """Return the result in a worker's answer; raise what it has raised."""
    if "mistake" in answer:
        raise UserError(answer["mistake"])
    if "error" in answer:
        raise RuntimeError(answer["error"])
    result = answer["result"]
    if isinstance(result, list):
        return [unpack_trial(trial) for trial in result]
    return unpack_trial(result) if isinstance(result, dict) else result


def unpack_trial(trial: dict[str, Any]) -> TriedPoint:
    return TriedPoint(**{**trial, "point": tuple(trial["point"]), "values": tuple(trial["values"])})


def run_trials(order: tuple[Study, str, Point]) -> TriedPoint:
    """Try one choice of settings of a row with all tuning seeds."""
    study, label, point = order
    return try_point([watch(build_job(study, label, point, seed), study, False) for seed in study.tuning_seeds], point)


def watch(job: StudyJob, study: Study, each_task: bool) -> Generator[Look]:
    """Yield what val rows say of a job: after each task, or after the last."""
    params = job.load()
    folder = ensure_splits(params, HOME, lambda text: None)
    yield from watch_trial(params, job.method, job.seed, folder, HOME, study.reading, each_task)


def run_judged(order: tuple[StudyJob, Path]) -> str:
    """Run a job as `fcl run` does, into its folder; return why it ended early, nothing where it did not."""
    from flows.experiment import experiment

    job, folder = order
    try:
        experiment(job.method, job.seed, folder, Path(job.params), job.overrides, quiet=True)
    except UserError as problem:
        return str(problem)
    return ""
