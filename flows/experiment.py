"""One method, one seed, all tasks in turn: the steps of an experiment as Prefect tasks, tracked by MLflow."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.costs.estimate import describe, estimate_run, refuse_what_does_not_fit
from fclmodels.experiment.costs.small_runs import is_small
from fclmodels.experiment.costs.trial import TrialFailedError
from fclmodels.experiment.experiment import Experiment
from fclmodels.experiment.run_folder import refuse_foreign
from fclmodels.settings.load import load_params, note_changes
from fclmodels.storage.files import lock_file
from flows.cli.preset_list import PRESETS
from flows.cli.progress import SilentProgress, create_progress
from flows.cli.terminal import tell
from flows.prefect.environment import HOME
from tasks.caching import Outcome, run_cached
from tasks.data import ensure_splits
from tasks.evaluation import evaluate, summarise_tasks
from tasks.knowledge import conclude
from tasks.mlflow.runs import Tracking, identify_experiment, log_result, track_experiment
from tasks.prefect_artifacts import ARTIFACTS
from tasks.reporting import publish, show_matrix
from tasks.training import begin, learn


@flow(name="experiment", flow_run_name="{method}-{seed}")
def experiment(
    method: str,
    seed: int,
    out: Path,
    params: Path = Path("params.yaml"),
    overrides: Sequence[str] = (),
    quiet: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Run the steps that are not cached, publish the run folder, track the run; return the content of result.json.

    A run that does not fit into memory or on the disk is refused before it begins, unless `force`.
    """
    refuse_foreign(out)
    settings = load_params(params, overrides, method, seed)
    if settings.preset.name is not None:
        published = PRESETS / f"{settings.preset.name}.yaml"
        settings = note_changes(settings, method, published if published.is_file() else params)
    folder = ensure_splits(settings, HOME, lambda text: tell(text, quiet))
    with Experiment(settings, method, seed, Splits.open(folder), HOME) as run:
        lock = HOME / "locks" / identify_experiment(run)
        with lock_file(lock, lambda: tell(f"{run.label}: waiting for another fcl that runs it", quiet)):
            for line in run.method.list_advice():
                tell(f"{run.label}: {line}", quiet)
            if not force:
                announce_costs(run, quiet)
            progress = create_progress(
                run.label, [run.method.run.count_rounds(task) for task in range(run.tasks)], quiet
            )
            run.listener = progress
            with track_experiment(run, settings.tracking, HOME, tell) as tracking, progress:
                outcomes = run_steps(run, tracking, progress)
                result = publish(run, run.label, outcomes, out)
                show_matrix(run.label, out)
                log_result(tracking, run.label, out, result)
    return result


@flow(name="estimate", flow_run_name="estimate {method}")
def estimate(
    method: str, params: Path = Path("params.yaml"), overrides: Sequence[str] = (), quiet: bool = False
) -> dict[str, Any]:
    """Return what a run of a method would cost with these settings on this machine."""
    settings = load_params(params, overrides, method, 0)
    folder = ensure_splits(settings, HOME, lambda text: tell(text, quiet))
    with Experiment(settings, method, 0, Splits.open(folder), HOME) as run:
        return asdict(estimate_run(run))


def announce_costs(run: Experiment, quiet: bool) -> None:
    """Say what a run will cost that has not begun and is not small; UserError where it does not fit here."""
    if run.step("begin", None, 0).recall() is not None or is_small(run):
        return
    tell(f"{run.label}: a short trial shows what it will cost", quiet)
    try:
        costs = estimate_run(run)
    except TrialFailedError as problem:
        tell(f"{run.label}: {problem}", quiet)
        return
    tell(f"{run.label}: {describe(costs)}", quiet)
    refuse_what_does_not_fit(costs, run)


def run_steps(run: Experiment, tracking: Tracking, progress: SilentProgress) -> list[Outcome]:
    """Run all steps in order and return their outcomes."""
    artifact = ARTIFACTS.publish(create_progress_artifact, 0.0, key=f"progress-{run.label}", description=run.label)
    first = run_cached(begin, run.step("begin", None, 0), f"{run.label}: begin")
    state = first["objects"]["state"]
    outcomes = [first, evaluate_after(run, state, 0)]
    remarks: list[str] = []
    for task in range(run.tasks):
        cached = run.step("learn", state, task).recall() is not None
        learned, concluded, evaluated = run_task(run, state, task)
        state = concluded["objects"]["state"]
        for remark in run.list_remarks(concluded):
            if remark not in remarks:
                progress.remark(remark)
                remarks.append(remark)
        outcomes += [learned, concluded, evaluated]
        summary = summarise_tasks(run.store, outcomes, task + 1)
        progress.on_task_learned(task, summary, cached)
        rounds = run.store.get_table(learned["objects"]["rounds"])
        tracking.log_task(task + 1, rounds, summary, run.collect_monitors(outcomes))
        ARTIFACTS.publish(update_progress_artifact, artifact, 100.0 * (task + 1) / run.tasks)
    return outcomes


def run_task(run: Experiment, state: str, task: int) -> tuple[Outcome, Outcome, Outcome]:
    """Learn a task from this state, conclude it, evaluate; return the three outcomes."""
    learned = run_cached(learn, run.step("learn", state, task), f"{run.label}: learn task {task + 1}")
    state = learned["objects"]["state"]
    concluded = run_cached(conclude, run.step("conclude", state, task), f"{run.label}: conclude task {task + 1}")
    state = concluded["objects"]["state"]
    return learned, concluded, evaluate_after(run, state, task + 1)


def evaluate_after(run: Experiment, state: str, learned: int) -> Outcome:
    """Evaluate the state after so many tasks; return the outcome."""
    return run_cached(evaluate, run.step("evaluate", state, learned), f"{run.label}: evaluate after {learned} tasks")
