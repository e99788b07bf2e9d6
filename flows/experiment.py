"""One method, one seed, all tasks in turn: the steps of fclmodels.experiment as Prefect tasks, tracked by MLflow."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from fclmodels.data.splits import Splits
from fclmodels.experiment import Experiment
from fclmodels.params import load
from fclmodels.run_folder import refuse_foreign
from flows.environment import HOME
from flows.progress import Silent, watch
from flows.terminal import tell
from tasks.caching import Outcome, through_store
from tasks.data import splits_for
from tasks.evaluation import evaluate, so_far
from tasks.knowledge import conclude
from tasks.locking import locked
from tasks.pages import PAGES
from tasks.reporting import publish, show_matrix
from tasks.tracking import Tracking, identity_of, track, tracked
from tasks.training import begin, learn


@flow(name="experiment", flow_run_name="{method}-{seed}")
def experiment(
    method: str,
    seed: int,
    out: Path,
    params: Path = Path("params.yaml"),
    overrides: Sequence[str] = (),
    quiet: bool = False,
) -> dict[str, Any]:
    """Train, evaluate, publish the run folder, track; what was done before is not done again."""
    refuse_foreign(out)
    settings = load(params, overrides, method)
    folder = splits_for(settings, HOME, lambda text: tell(text, quiet))
    with (
        Experiment(settings, method, seed, Splits.open(folder), HOME) as run,
        locked(HOME / "locks" / identity_of(run), lambda: tell(f"{run.label}: another fcl is at it; waiting", quiet)),
    ):
        for line in run.method.advice():
            tell(f"{run.label}: {line}", quiet)
        watcher = watch(run.label, [run.method.run.rounds(task) for task in range(run.tasks)], quiet)
        run.listener = watcher
        with tracked(run, settings.tracking, HOME, tell) as tracking, watcher:
            outcomes = follow(run, tracking, watcher)
            result = publish(run, run.label, outcomes, out)
            show_matrix(run.label, out)
            track(tracking, run.label, out, result)
    return result


def follow(run: Experiment, tracking: Tracking, watcher: Silent) -> list[Outcome]:
    """The outcomes of all steps, in order."""
    progress = PAGES.show(create_progress_artifact, 0.0, key=f"progress-{run.label}", description=run.label)
    begun = through_store(begin, run.step("begin", None, 0), label=run.label)
    state = begun["objects"]["state"]
    outcomes = [begun, through_store(evaluate, run.step("evaluate", state, 0), label=run.label, learned=0)]
    remarks: list[str] = []
    for task in range(run.tasks):
        again = run.step("learn", state, task).done() is not None
        learned, concluded, evaluated = one_task(run, state, task)
        state = concluded["objects"]["state"]
        for remark in run.remarks(concluded):
            if remark not in remarks:
                watcher.remark(remark)
                remarks.append(remark)
        outcomes += [learned, concluded, evaluated]
        summary = so_far(run.store, outcomes, task + 1)
        watcher.task_learned(task, summary, again)
        rounds = run.store.get_table(learned["objects"]["rounds"])
        tracking.task_learned(task + 1, rounds, summary, run.monitored(outcomes))
        PAGES.show(update_progress_artifact, progress, 100.0 * (task + 1) / run.tasks)
    return outcomes


def one_task(run: Experiment, state: str, task: int) -> tuple[Outcome, Outcome, Outcome]:
    """Learn a task, extract knowledge, evaluate."""
    learned = through_store(learn, run.step("learn", state, task), label=run.label, task=task + 1)
    state = learned["objects"]["state"]
    concluded = through_store(conclude, run.step("conclude", state, task), label=run.label, task=task + 1)
    state = concluded["objects"]["state"]
    evaluated = through_store(evaluate, run.step("evaluate", state, task + 1), label=run.label, learned=task + 1)
    return learned, concluded, evaluated
