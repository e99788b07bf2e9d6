"""MLflow's run of a comparison: its report and table, and the parent of the runs that were compared.

It lies in an experiment of its own, because MLflow's lists and charts hide runs below a parent of the same
experiment. A run of a method may be in several comparisons: each lists its runs, and a run names the newest.
"""

from collections.abc import Sequence
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Run
from prefect import task
from prefect.cache_policies import NO_CACHE

from fclmodels import report
from fclmodels.experiment import digest_of
from fclmodels.report import words
from fclmodels.report.runs import Group
from tasks.tracked_artifacts import READING, REPORT, show_tables
from tasks.tracked_words import DESCRIBED, in_percent, table
from tasks.tracking import IDENTITY, RESULT, origin
from tasks.tracking_store import asked, database_of, experiment_named

EXPERIMENT, PARENT, TABLE = "comparisons", "mlflow.parentRunId", "comparison"
LONGEST = 8000  # characters of a tag
Tracked = dict[str, Run]  # by run folder


@task(name="track comparison", cache_policy=NO_CACHE)
def track_comparison(uri: str, folders: Sequence[Path], page: Path) -> str | None:
    """The id of the comparison's run, one for the same runs; none where MLflow holds none of them."""
    database = database_of(uri)
    if database is not None and not database.exists():
        return None
    groups = report.grouped(report.read_runs(folders))
    with asked(uri):
        client = MlflowClient(uri)
        runs = tracked_runs(client, groups)
        return logged(client, experiment_named(client, uri, EXPERIMENT), groups, runs, page) if runs else None


def tracked_runs(client: MlflowClient, groups: Sequence[Group]) -> Tracked:
    """The runs that MLflow holds of these folders, wherever the folders came from."""
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = {}
    for run in (run for group in groups for run in group.runs):
        same = f"tags.`{RESULT}` = '{digest_of(run.result.digests)}'"
        if known := client.search_runs(experiments, same, max_results=1):
            found[str(run.folder)] = known[0]
    return found


def logged(client: MlflowClient, experiment: str, groups: Sequence[Group], runs: Tracked, page: Path) -> str:
    identity = digest_of(sorted(run.info.run_id for run in runs.values()))
    found = client.search_runs([experiment], f"tags.`{IDENTITY}` = '{identity}'", max_results=1)
    methods = ", ".join(group.label for group in groups)
    tags = {IDENTITY: identity, "mlflow.source.type": "LOCAL", "mlflow.source.name": "fcl report"}
    tags |= {name: _of_all(runs, name) for name in ("method", "seed", "scenario", "splits")}
    parent = found[0] if found else client.create_run(experiment, run_name=methods, tags={**tags, **origin()})
    id = str(parent.info.run_id)
    client.log_text(id, page.read_text("utf-8"), REPORT)
    frame = report.compare(groups)
    client.log_dict(id, {"columns": frame.columns, "data": [list(row) for row in frame.rows()]}, f"{TABLE}.json")
    show_tables(client, id, [TABLE])
    client.set_tag(id, "mlflow.note.content", description(groups, runs))
    for run in runs.values():
        client.set_tag(run.info.run_id, PARENT, id)
    client.set_terminated(id)
    return id


def description(groups: Sequence[Group], runs: Tracked) -> str:
    """The methods in one reading with links to their runs, as Markdown; as many of them as a tag can hold."""
    rows = []
    for row, group in zip(report.compare(groups).filter(reading=READING).to_dicts(), groups, strict=True):
        links = (_link(run.result.seed, runs.get(str(run.folder))) for run in group.runs)
        rows.append([group.label, *(in_percent(row[name], row[f"{name}_std"]) for name in DESCRIBED), ", ".join(links)])
    title = f"{words.reading(READING).title}, in %"
    text = table([title, *(words.METRICS[name].title for name in DESCRIBED), "runs, by seed"], rows)
    return text if len(text) <= LONGEST else text[:LONGEST].rpartition("\n")[0]


def _link(seed: int, run: Run | None) -> str:
    return f"[{seed}](#/experiments/{run.info.experiment_id}/runs/{run.info.run_id})" if run else str(seed)


def _of_all(runs: Tracked, tag: str) -> str:
    return ", ".join(dict.fromkeys(run.data.tags[tag] for run in runs.values() if tag in run.data.tags))
