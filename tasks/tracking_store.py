"""MLflow's store or server: set up where it is a database that is not there, asked, its experiments found by name."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from fclmodels.errors import UserError, without_passwords

ARTIFACTS = Path("mlartifacts")
UNREACHED = (MlflowException, SQLAlchemyError, OSError)


@contextmanager
def asked(uri: str) -> Iterator[None]:
    """What keeps the store from answering within the block is a mistake in the settings."""
    try:
        yield
    except UNREACHED as problem:
        raise UserError(without_passwords(f"tracking.uri: {uri} cannot be used: {reason(problem)}")) from problem


def reason(problem: Exception) -> str:
    """In one line, without SQLAlchemy's remark on how it came to write at all."""
    lines = str(problem).splitlines() or [type(problem).__name__]
    return next((line for line in lines if not line.startswith("(raised as a result of")), lines[0])


def set_up(uri: str) -> None:
    """A database that is not there is made beside its place: MLflow refuses what a kill leaves of one half-made."""
    database = database_of(uri)
    if database is None or database.exists():
        return
    unfinished = Path(f"{database}.new")
    unfinished.unlink(missing_ok=True)
    MlflowClient(f"sqlite:///{unfinished}").search_experiments(max_results=1)
    unfinished.replace(database)


def database_of(uri: str) -> Path | None:
    """The file of a SQLite database; where a link leads to, for a file that is put in a link's place would be lost."""
    database = make_url(uri).database if uri.startswith("sqlite:") else None
    return Path(database).resolve() if database else None


def experiment_named(client: MlflowClient, uri: str, name: str) -> str:
    """The id of the experiment of this name, which is made where there is none."""
    if found := client.get_experiment_by_name(name):
        return found.experiment_id
    location = None if uri.startswith("http") else ARTIFACTS.resolve().as_uri()
    return client.create_experiment(name, artifact_location=location)
