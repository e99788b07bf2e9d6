"""`fcl predict`: answers of a model, of a run folder or of MLflow's registry, to image files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fclmodels.errors import UserError, hide_passwords
from fclmodels.experiment.exported_model import ExportedModel
from flows.prefect import environment

REGISTERED = "models:/"


def open_model(name: str, tracking_uri: Callable[[], str]) -> ExportedModel:
    """Open the model of a run folder, a model's folder alone, or models:/NAME@ALIAS (or any other form of models:/) of
    the store at this URI.

    Of a registered model only data are read: weights and JSON. The code that MLflow holds beside them is not imported.
    """
    if name.startswith(REGISTERED):
        return ExportedModel(_download_model(name, tracking_uri()))
    folder = Path(name)
    if (folder / "result.json").is_file():
        return ExportedModel(folder / "model")
    if (folder / "spec.json").is_file():
        return ExportedModel(folder)
    right = f"one such as runs/fedavg-0, its folder model, or {REGISTERED}NAME@champion"
    raise UserError(f"{name} is not a run folder. Right: {right}.")


def predict_files(model: ExportedModel, files: Sequence[Path], task: int | None) -> list[dict[str, Any]]:
    """Return a row for each file: file, class, probability, task and relevance."""
    rows = model.answer(model.read_images(files), task)
    return [{"file": str(file), **row} for file, row in zip(files, rows, strict=True)]


def _download_model(name: str, tracking_uri: str) -> Path:
    environment.set_defaults()
    import mlflow
    from mlflow.exceptions import MlflowException

    mlflow.set_tracking_uri(tracking_uri)
    try:
        return Path(mlflow.artifacts.download_artifacts(name)) / "artifacts" / "model"
    except MlflowException as problem:
        reason = str(problem).partition("\n")[0]
        raise UserError(hide_passwords(f"{name} cannot be downloaded from {tracking_uri}: {reason}")) from problem
