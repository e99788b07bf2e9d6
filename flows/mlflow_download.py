"""Results and tables of runs that MLflow holds, downloaded once into .fcl/mlflow, for a comparison."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fclmodels.errors import UserError, hide_passwords
from fclmodels.storage.untrusted import resolve_inside
from flows.prefect import environment

if TYPE_CHECKING:
    from mlflow import MlflowClient

RESULT = "result.json"
FILTER = re.compile(r"[=<>]| (NOT )?(I?LIKE|IN) ", re.IGNORECASE)


def download_runs(uri: str, selectors: Sequence[str]) -> list[Path]:
    """Download finished runs and return their folders, each once.

    A selector is the name of an experiment, a run's id or an MLflow filter of runs; without selectors: all runs. Only
    results and tables are read, not a model, whose code may be of an earlier fclflow.
    """
    environment.set_defaults()
    import mlflow
    from mlflow import MlflowClient

    from tasks.mlflow.connection import report_unreachable

    client, folders = MlflowClient(uri), []
    with report_unreachable(uri):
        for run in dict.fromkeys(_find_run_ids(client, selectors)):
            folder = resolve_inside(environment.HOME / "mlflow", run)
            names = [file.path for file in client.list_artifacts(run) if file.path.endswith((RESULT, ".parquet"))]
            if RESULT not in names:  # a run of something else than an experiment, such as pretraining
                continue
            for name in sorted(names, key=lambda name: name == RESULT):  # the result last: it marks a complete folder
                resolve_inside(folder, name)
                if not (folder / RESULT).exists():
                    mlflow.artifacts.download_artifacts(
                        run_id=run, artifact_path=name, dst_path=str(folder), tracking_uri=uri
                    )
            folders.append(folder)
    if not folders:
        of = " of " + ", ".join(selectors) if selectors else ""
        raise UserError(f"{hide_passwords(uri)} holds no finished run{of}. See: fcl ui")
    return folders


def _find_run_ids(client: "MlflowClient", selectors: Sequence[str]) -> Iterator[str]:
    """Yield the ids of selected runs, for each selector the oldest first; one may come twice."""
    experiments = {experiment.name: experiment.experiment_id for experiment in client.search_experiments()}
    for selector in selectors or experiments:
        if selector in experiments:
            yield from _search_finished(client, [experiments[selector]])
        elif FILTER.search(selector):
            yield from _search_finished(client, list(experiments.values()), f" and {selector}")
        else:
            yield client.get_run(selector).info.run_id


def _search_finished(client: "MlflowClient", experiments: list[str], condition: str = "") -> Iterator[str]:
    query, token = f"attributes.status = 'FINISHED'{condition}", None
    while token != "":
        page = client.search_runs(experiments, query, order_by=["start_time"], page_token=token)
        yield from (run.info.run_id for run in page)
        token = page.token or ""
