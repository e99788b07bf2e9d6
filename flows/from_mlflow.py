"""Runs as MLflow holds them, for a comparison: their result and tables, downloaded once into .fcl/mlflow."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fclmodels.errors import UserError
from flows import environment

if TYPE_CHECKING:
    from mlflow import MlflowClient

RESULT = "result.json"


def run_folders(uri: str, wanted: Sequence[str]) -> list[Path]:
    """Of finished runs: those of these experiments or with these ids, or all; on any tracking server."""
    environment.settle()
    import mlflow
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    client, folders = MlflowClient(uri), []
    try:
        for run in _ids(client, wanted):
            folder = environment.HOME / "mlflow" / run
            names = [file.path for file in client.list_artifacts(run) if file.path.endswith((RESULT, ".parquet"))]
            if RESULT not in names:  # of something else than an experiment, such as pretraining
                continue
            for name in sorted(names, key=lambda name: name == RESULT):  # the result last: with it a folder is whole
                if not (folder / RESULT).exists():
                    mlflow.artifacts.download_artifacts(
                        run_id=run, artifact_path=name, dst_path=str(folder), tracking_uri=uri
                    )
            folders.append(folder)
    except (MlflowException, SQLAlchemyError, OSError) as problem:
        reason = str(problem).partition("\n")[0]
        raise UserError(f"tracking.uri: {uri} cannot be used: {reason}") from problem
    if not folders:
        raise UserError(f"{uri} holds no finished run{' of ' + ', '.join(wanted) if wanted else ''}. See: fcl ui")
    return folders


def _ids(client: "MlflowClient", wanted: Sequence[str]) -> Iterator[str]:
    """Oldest first."""
    experiments = {experiment.name: experiment.experiment_id for experiment in client.search_experiments()}
    for name in wanted or experiments:
        if name in experiments:
            found = client.search_runs([experiments[name]], "attributes.status = 'FINISHED'", order_by=["start_time"])
            yield from (run.info.run_id for run in found)
        else:
            yield client.get_run(name).info.run_id
