"""`fcl predict`: what a model of a run folder, or of MLflow's registry, says of image files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fclmodels.errors import UserError, without_passwords
from fclmodels.served import Model
from flows import environment

REGISTERED = "models:/"


def open_model(name: str, tracking_uri: Callable[[], str]) -> Model:
    """A run folder's model, or models:/NAME@ALIAS (or any other form of models:/) of the store at this address."""
    if name.startswith(REGISTERED):
        return Model(_downloaded(name, tracking_uri()))
    folder = Path(name)
    if not (folder / "result.json").is_file():
        raise UserError(f"{name} is no run folder. Right: one such as runs/fedavg-0, or {REGISTERED}NAME@champion.")
    return Model(folder / "model")


def answers(model: Model, files: Sequence[Path], task: int | None) -> list[dict[str, Any]]:
    rows = model.answer(model.read(files), task)
    return [{"file": str(file), **row} for file, row in zip(files, rows, strict=True)]


def _downloaded(name: str, tracking_uri: str) -> Path:
    environment.settle()
    import mlflow
    from mlflow.exceptions import MlflowException

    mlflow.set_tracking_uri(tracking_uri)
    try:
        return Path(mlflow.artifacts.download_artifacts(name)) / "artifacts" / "model"
    except MlflowException as problem:
        reason = str(problem).partition("\n")[0]
        raise UserError(without_passwords(f"{name} cannot be had from {tracking_uri}: {reason}")) from problem
