"""MLflow's run of a comparison: its report and table. It is the parent of the compared runs.

It lies in an experiment of its own, because MLflow's lists and charts hide runs below a parent of the same
experiment. A run of a method may be in several comparisons: each lists its runs, and a run names the newest.
"""

from collections.abc import Sequence
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run
from prefect import task
from prefect.cache_policies import NO_CACHE

from fclmodels.report import labels
from fclmodels.report.comparison import compare_groups
from fclmodels.report.read_runs import Group, group_runs, read_runs
from fclmodels.storage.digests import digest_json
from tasks.mlflow.artifacts import REPORT, show_tables
from tasks.mlflow.connection import find_database, find_or_create_experiment, report_unreachable
from tasks.mlflow.naming import DESCRIBED, READING, format_share, format_table
from tasks.mlflow.runs import IDENTITY, RESULT, collect_origin_tags

EXPERIMENT, PARENT, TABLE = "comparisons", "mlflow.parentRunId", "comparison"
MAX_LENGTH = 8000  # characters of a tag
Tracked = dict[str, Run]  # by run folder


@task(name="track comparison", cache_policy=NO_CACHE)
def track_comparison(uri: str, folders: Sequence[Path], page: Path) -> str | None:
    """Log the comparison and return its run's id, the same one for the same runs; None if MLflow holds none of them."""
    database = find_database(uri)
    if database is not None and not database.exists():
        return None
    groups = group_runs(read_runs(folders))
    with report_unreachable(uri):
        client = MlflowClient(uri)
        runs = find_tracked_runs(client, groups)
        if not runs:
            return None
        return log_comparison(client, find_or_create_experiment(client, uri, EXPERIMENT), groups, runs, page)


def find_tracked_runs(client: MlflowClient, groups: Sequence[Group]) -> Tracked:
    """Find MLflow's runs of these folders by their results, wherever the folders came from."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    tracked = {}
    for run in (run for group in groups for run in group.runs):
        same_result = f"tags.`{RESULT}` = '{digest_json(run.result.digests)}'"
        if matches := client.search_runs(experiments, same_result, max_results=1):
            tracked[str(run.folder)] = matches[0]
    return tracked


def log_comparison(client: MlflowClient, experiment: str, groups: Sequence[Group], runs: Tracked, page: Path) -> str:
    """Log report and table to the comparison's run, make it the parent of these runs, and return its id."""
    identity = digest_json(sorted(run.info.run_id for run in runs.values()))
    earlier = client.search_runs([experiment], f"tags.`{IDENTITY}` = '{identity}'", max_results=1)
    methods = ", ".join(group.label for group in groups)
    tags = {IDENTITY: identity, "mlflow.source.type": "LOCAL", "mlflow.source.name": "fcl report"}
    tags |= {name: _join_tags(runs, name) for name in ("method", "seed", "scenario", "splits")}
    tags |= collect_origin_tags()
    parent = earlier[0] if earlier else client.create_run(experiment, run_name=methods, tags=tags)
    id = str(parent.info.run_id)
    client.log_text(id, page.read_text("utf-8"), REPORT)
    frame = compare_groups(groups)
    client.log_dict(id, {"columns": frame.columns, "data": [list(row) for row in frame.rows()]}, f"{TABLE}.json")
    show_tables(client, id, [TABLE])
    client.set_tag(id, "mlflow.note.content", describe_comparison(groups, runs))
    for run in runs.values():
        client.set_tag(run.info.run_id, PARENT, id)
    client.set_terminated(id)
    return id


def describe_comparison(groups: Sequence[Group], runs: Tracked) -> str:
    """Return a Markdown table of the methods, with links to their runs, cut to as many rows as a tag can hold."""
    rows = []
    for row, group in zip(compare_groups(groups).filter(reading=READING).to_dicts(), groups, strict=True):
        links = (_format_link(run.result.seed, runs.get(str(run.folder))) for run in group.runs)
        shares = (format_share(row[name], row[f"{name}_std"]) for name in DESCRIBED)
        rows.append([group.label, *shares, ", ".join(links)])
    title = f"{labels.label_reading(READING).title}, in %"
    text = format_table([title, *(labels.METRICS[name].title for name in DESCRIBED), "runs, by seed"], rows)
    return text if len(text) <= MAX_LENGTH else text[:MAX_LENGTH].rpartition("\n")[0]


def _format_link(seed: int, run: Run | None) -> str:
    return f"[{seed}](#/experiments/{run.info.experiment_id}/runs/{run.info.run_id})" if run else str(seed)


def _join_tags(runs: Tracked, tag: str) -> str:
    return ", ".join(dict.fromkeys(run.data.tags[tag] for run in runs.values() if tag in run.data.tags))
