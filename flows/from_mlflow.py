"""Runs as MLflow holds them, for a comparison: their result and tables, downloaded once into .fcl/mlflow."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fclmodels.errors import UserError, without_passwords
from fclmodels.foreign import inside
from flows import environment

if TYPE_CHECKING:
    from mlflow import MlflowClient

RESULT = "result.json"
FILTER = re.compile(r"[=<>]| (NOT )?(I?LIKE|IN) ", re.IGNORECASE)


def run_folders(uri: str, wanted: Sequence[str]) -> list[Path]:
    """Of finished runs, each once: those of these experiments, with these ids or found by these filters, or all."""
    environment.settle()
    import mlflow
    from mlflow import MlflowClient

    from tasks.tracking_store import asked

    client, folders = MlflowClient(uri), []
    with asked(uri):
        for run in dict.fromkeys(_ids(client, wanted)):
            folder = inside(environment.HOME / "mlflow", run)
            names = [file.path for file in client.list_artifacts(run) if file.path.endswith((RESULT, ".parquet"))]
            if RESULT not in names:  # of something else than an experiment, such as pretraining
                continue
            for name in sorted(names, key=lambda name: name == RESULT):  # the result last: with it a folder is whole
                inside(folder, name)
                if not (folder / RESULT).exists():
                    mlflow.artifacts.download_artifacts(
                        run_id=run, artifact_path=name, dst_path=str(folder), tracking_uri=uri
                    )
            folders.append(folder)
    if not folders:
        of = " of " + ", ".join(wanted) if wanted else ""
        raise UserError(f"{without_passwords(uri)} holds no finished run{of}. See: fcl ui")
    return folders


def _ids(client: "MlflowClient", wanted: Sequence[str]) -> Iterator[str]:
    """Oldest first."""
    experiments = {experiment.name: experiment.experiment_id for experiment in client.search_experiments()}
    for name in wanted or experiments:
        if name in experiments:
            yield from _finished(client, [experiments[name]])
        elif FILTER.search(name):
            yield from _finished(client, list(experiments.values()), f" and {name}")
        else:
            yield client.get_run(name).info.run_id


def _finished(client: "MlflowClient", experiments: list[str], also: str = "") -> Iterator[str]:
    wanted, token = f"attributes.status = 'FINISHED'{also}", None
    while token != "":
        found = client.search_runs(experiments, wanted, order_by=["start_time"], page_token=token)
        yield from (run.info.run_id for run in found)
        token = found.token or ""
