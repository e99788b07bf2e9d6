"""Jobs of a study, side by side in processes or one after another in this one; their results do not differ.

A worker ends with the process that started it, also if that is killed. What it has done is in the store.
"""

import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fclmodels.errors import UserError
from fclmodels.machine import end_with_parent
from fclmodels.study.plan import Point, Study, StudyJob, build_job
from fclmodels.study.trial import Look, TriedPoint, try_point, watch_trial
from flows.prefect.environment import HOME
from tasks.data import ensure_splits

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


@contextmanager
def open_map(workers: int) -> Iterator[Map]:
    """Return a map over jobs, results in their order: in so many processes, or in this one where there is one."""
    if workers == 1:
        yield map
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _set_up_worker) as pool:
        try:
            yield pool.map
        except BrokenProcessPool:
            raise UserError(
                "a process of the study was killed, as one is where memory runs out. The same command resumes; "
                "--workers 1 needs the least memory."
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


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
    job, folder = order
    try:
        if multiprocessing.parent_process() is None:
            from flows.experiment import experiment

            experiment(job.method, job.seed, folder, Path(job.params), job.overrides, quiet=True)
        else:
            from flows.prefect.launch import run_flow

            arguments = {"method": job.method, "seed": job.seed, "out": folder, "params": Path(job.params)}
            run_flow("flows.experiment", "experiment", **arguments, overrides=job.overrides, quiet=True)
    except UserError as problem:
        return str(problem)
    return ""


def _set_up_worker() -> None:
    """Leave interrupts to the parent, which ends its workers, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
