"""A study: each row's settings are chosen on val rows, then its runs are judged on test rows, and shown on one page.

    trials (val rows) -> choice -> runs (as `fcl run`) -> page, MLflow

Every run is stored under the key of what it depends on. A study that was stopped, or is repeated, goes on from there.
"""

from pathlib import Path

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from fclmodels.errors import UserError
from fclmodels.report.read_runs import read_run
from fclmodels.settings.load import load_params
from fclmodels.study.page import write_results
from fclmodels.study.plan import Point, Study, build_job, name_folder
from fclmodels.study.results import Judged, Standing, build_table
from fclmodels.study.trial import TriedPoint, choose
from flows.cli.terminal import format_percent, tell
from flows.study.jobs import Map, open_map, run_judged, run_trials
from flows.study.search import search_row
from flows.study.tracking import track_study

Trials = dict[str, list[TriedPoint]]  # by row


@flow(name="study", flow_run_name="{name}", validate_parameters=False)
def study(name: str, plan: Study, out: Path, workers: int = 1, quiet: bool = False) -> list[Standing]:
    """Choose settings, run, write the page into `out`, track it; return the table."""
    with open_map(workers) as run_all:
        trials = try_settings(plan, run_all, quiet)
        judged = judge_rows(plan, trials, out, run_all, quiet)
    table = build_table(plan, judged)
    page = write_results(plan, name, table, out)
    track_study(load_params(plan.params, plan.set).tracking.uri, name, plan, judged, table, page)
    return table


@flow(name="tune", flow_run_name="{name}", validate_parameters=False)
def tune(name: str, plan: Study, workers: int = 1, quiet: bool = False) -> list[TriedPoint]:
    """Try the settings of the only row and return the trials."""
    with open_map(workers) as run_all:
        (trials,) = try_settings(plan, run_all, quiet).values()
    return trials


@task(name="try settings", cache_policy=NO_CACHE)
def try_settings(plan: Study, run_all: Map, quiet: bool) -> Trials:
    """Return the trials of each row that has some, on val rows alone."""
    trials: Trials = {}
    orders = [(plan, label, point) for label, row in plan.rows.items() if row.grid for point in row.points]
    for number, ((_, label, _), trial) in enumerate(zip(orders, run_all(run_trials, orders), strict=True), start=1):
        trials.setdefault(label, []).append(trial)
        tell(f"val {number} of {len(orders)}: {label}: {describe_trial(trial)}", quiet)
    searches = [(plan, label) for label, row in plan.rows.items() if row.search]
    for (_, label), of_row in zip(searches, run_all(search_row, searches), strict=True):
        trials[label] = of_row
        for trial in of_row:
            tell(f"val, searched: {label}: {describe_trial(trial)}", quiet)
    return trials


@task(name="judge", cache_policy=NO_CACHE)
def judge_rows(plan: Study, trials: Trials, out: Path, run_all: Map, quiet: bool) -> dict[str, Judged]:
    """Run every row with its chosen settings and each of its seeds; return the runs of each row.

    A row none of whose choices ran to its end has a problem in place of runs; the others go on.
    """
    points, problems = choose_points(trials)
    judged, orders = {}, []
    for label, row in plan.rows.items():
        tuned, seeds = row.like or label, plan.get_seeds(label)
        point = points.get(tuned, ())
        early = [problems[tuned]] * len(seeds) if tuned in problems else []
        judged[label] = Judged([], early, trials.get(label, ()), point)
        jobs = [build_job(plan, label, point, seed) for seed in seeds] if not early else []
        orders += [(job, out / "runs" / f"{name_folder(label)}-{job.seed}") for job in jobs]
    for number, ((job, folder), problem) in enumerate(zip(orders, run_all(run_judged, orders), strict=True), start=1):
        of_row = judged[job.label]
        if problem:
            of_row.problems.append(problem)
        else:
            of_row.runs.append(read_run(folder))
        tell(f"run {number} of {len(orders)}: {job.label}, seed {job.seed}{problem and f': {problem}'}", quiet)
    return judged


def choose_points(trials: Trials) -> tuple[dict[str, Point], dict[str, str]]:
    """Return each row's choice, and of the rows without one the reason."""
    points, problems = {}, {}
    for label, of_row in trials.items():
        try:
            points[label] = choose(label, of_row).point
        except UserError as problem:
            problems[label] = str(problem)
    return points, problems


def describe_trial(trial: TriedPoint) -> str:
    """Return what val rows say of a choice of settings."""
    return f"{format_percent(trial.value)} {' '.join(trial.point)}{trial.problem and f' ({trial.problem})'}"
