"""MLflow's run of a study, the parent of its runs and of its trials; it has the page and the table."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from prefect import task
from prefect.cache_policies import NO_CACHE

from fclmodels.errors import UserError
from fclmodels.report.read_runs import Group
from fclmodels.storage.digests import digest_json
from fclmodels.study.page import list_cells
from fclmodels.study.plan import Study
from fclmodels.study.results import Judged, Standing
from fclmodels.study.trial import TriedPoint
from flows.cli.terminal import tell
from tasks.mlflow.artifacts import REPORT, show_tables
from tasks.mlflow.comparison import PARENT, TABLE, find_tracked_runs
from tasks.mlflow.connection import create_database, find_or_create_experiment, report_unreachable
from tasks.mlflow.runs import BATCH, IDENTITY, collect_origin_tags

EXPERIMENT = "studies"


@task(name="track study", cache_policy=NO_CACHE)
def track_study(
    uri: str, name: str, study: Study, judged: Mapping[str, Judged], table: Sequence[Standing], page: Path
) -> None:
    """Log the study, the same run for the same study, as the parent of its trials and of its judged runs.

    A tracking server that does not answer is reported: the page is there all the same.
    """
    try:
        with report_unreachable(uri):
            create_database(uri)
            client = MlflowClient(uri)
            experiment = find_or_create_experiment(client, uri, EXPERIMENT)
            identity = digest_json(["study", name, study.model_dump(mode="json")])
            parent = find_or_create_run(client, experiment, name, identity, {"mlflow.source.type": "LOCAL"})
            client.log_text(parent, page.read_text("utf-8"), REPORT)
            header, *rows = list_cells(study, table)
            client.log_dict(parent, {"columns": header, "data": rows}, f"{TABLE}.json")
            show_tables(client, parent, [TABLE])
            for label, of_row in judged.items():
                for trial in of_row.trials:
                    log_trial(client, experiment, parent, label, trial, identity)
            runs = tuple(run for of_row in judged.values() for run in of_row.runs)
            for run in find_tracked_runs(client, [Group(name, runs)]).values():
                client.set_tag(run.info.run_id, PARENT, parent)
            client.set_terminated(parent)
    except UserError as problem:
        tell(f"{problem} The study is written, but not tracked.")


def log_trial(client: MlflowClient, experiment: str, parent: str, label: str, trial: TriedPoint, study: str) -> None:
    """Log a trial's settings and what val rows say, once."""
    identity = digest_json([study, label, *trial.point])
    run = find_or_create_run(client, experiment, f"{label}: trial", identity, {PARENT: parent})
    if client.get_run(run).info.status == "FINISHED":
        return
    settings = (text.partition("=") for text in trial.point)
    params = [Param("row", label), *(Param(key, value[:6000]) for key, _, value in settings)]
    values = {"val/acc": trial.value, "total/seconds": trial.seconds}
    metrics = [Metric(key, value, 0, 0) for key, value in values.items() if value is not None]
    tags = [RunTag("problem", trial.problem[:5000])] if trial.problem else []
    client.log_batch(run, metrics=metrics, params=params[:BATCH], tags=tags)
    client.set_terminated(run)


def find_or_create_run(client: MlflowClient, experiment: str, name: str, identity: str, tags: dict[str, str]) -> str:
    """Return the id of the run with this identity."""
    earlier = client.search_runs([experiment], f"tags.`{IDENTITY}` = '{identity}'", max_results=1)
    if earlier:
        return str(earlier[0].info.run_id)
    all_tags = {IDENTITY: identity, **tags, **collect_origin_tags()}
    return str(client.create_run(experiment, run_name=name, tags=all_tags).info.run_id)
