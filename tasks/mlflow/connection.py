"""Connection to MLflow's store or server: creation of its database, its errors, its experiments by name."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from fclmodels.errors import UserError, hide_passwords
from fclmodels.storage.files import replace_file

ARTIFACT_FOLDER = Path("mlartifacts")
MODEL_TRAINING = {"mlflow.experimentKind": "custom_model_development"}  # else the pages take it for a chat agent's
CONNECTION_ERRORS = (MlflowException, SQLAlchemyError, OSError)


@contextmanager
def report_unreachable(uri: str) -> Iterator[None]:
    """Turn connection errors of the block into a UserError that names tracking.uri."""
    try:
        yield
    except CONNECTION_ERRORS as problem:
        text = f"tracking.uri: {uri} cannot be used: {summarise_error(problem)}"
        raise UserError(hide_passwords(text)) from problem


def summarise_error(problem: Exception) -> str:
    """Return the first line of the error, without SQLAlchemy's remark on what made it write."""
    lines = str(problem).splitlines() or [type(problem).__name__]
    return next((line for line in lines if not line.startswith("(raised as a result of")), lines[0])


def create_database(uri: str) -> None:
    """Create the database if it does not exist, all of it at once: MLflow refuses one whose creation was killed."""
    database = find_database(uri)
    if database is None or database.exists():
        return
    with replace_file(database) as temporary:
        MlflowClient(f"sqlite:///{temporary}").search_experiments(max_results=1)


def find_database(uri: str) -> Path | None:
    """Return the file of a SQLite database, None for another store.

    Links are followed: a new file must not replace a link, which leads out of DVC's temporary copy of the project.
    """
    database = make_url(uri).database if uri.startswith("sqlite:") else None
    return Path(database).resolve() if database else None


def find_or_create_experiment(
    client: MlflowClient, uri: str, name: str, tags: Mapping[str, str] = MODEL_TRAINING
) -> str:
    """Return the id of the experiment of this name, created if there is none; tags that it lacks are added."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        location = None if uri.startswith("http") else ARTIFACT_FOLDER.resolve().as_uri()
        return client.create_experiment(name, artifact_location=location, tags=dict(tags))
    for tag in tags.keys() - experiment.tags.keys():
        client.set_experiment_tag(experiment.experiment_id, tag, tags[tag])
    return experiment.experiment_id
