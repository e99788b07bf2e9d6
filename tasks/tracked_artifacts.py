"""What MLflow keeps of a finished run besides numbers: the accuracy matrix, knowledge, a model that it can serve."""

import json
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import polars as pl
from matplotlib.figure import Figure
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput
from mlflow.models.signature import ModelSignature
from mlflow.types.schema import ColSpec, Schema, TensorSpec

from fclmodels.metrics import matrix

SERVED = Path(__file__).with_name("served.py")
READING = "task_agnostic"


def log_artifacts(client: MlflowClient, run: str, folder: Path, splits: Path) -> None:
    table = pl.read_parquet(folder / "accuracy.parquet")
    accuracies = matrix(table, READING)
    client.log_figure(run, heat_map(accuracies), "accuracy.png")
    client.log_dict(run, as_table(accuracies), "accuracy.json")
    client.set_tag(run, "mlflow.loggedArtifacts", json.dumps([{"path": "accuracy.json", "type": "table"}]))
    for name in ("result.json", "accuracy.parquet", "rounds.parquet", "ledger.parquet"):
        client.log_artifact(run, str(folder / name))
    if (folder / "knowledge").is_dir():
        client.log_artifacts(run, str(folder / "knowledge"), "knowledge")
    log_model(client, run, folder / "model", splits / "stream.json")


def heat_map(accuracies: np.ndarray) -> Figure:
    """The accuracy matrix [T + 1, T] as a picture, a row for each number of tasks learned."""
    learned, tasks = accuracies.shape
    figure = Figure(figsize=(1.5 + 0.7 * tasks, 1.2 + 0.5 * learned), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(accuracies, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for (row, column), value in np.ndenumerate(accuracies):
        if not np.isnan(value):
            axes.text(
                column, row, f"{100 * value:.0f}", ha="center", va="center", color="white" if value < 0.6 else "black"
            )
    axes.set(
        xlabel="task",
        ylabel="tasks learned",
        xticks=range(tasks),
        xticklabels=range(1, tasks + 1),
        yticks=range(learned),
    )
    axes.set_title(f"accuracy in %, {READING.replace('_', '-')}")
    figure.colorbar(image)
    return figure


def as_table(accuracies: np.ndarray) -> dict[str, Any]:
    """The same as rows and columns, as MLflow's pages show a table."""
    rows = [[learned, *(None if np.isnan(a) else a for a in row.tolist())] for learned, row in enumerate(accuracies)]
    return {"columns": ["tasks learned", *(f"task {k}" for k in range(1, accuracies.shape[1] + 1))], "data": rows}


def log_model(client: MlflowClient, run: str, model: Path, stream: Path) -> None:
    """The network as a pyfunc from images to class names: code and safetensors, nothing pickled."""
    shape = json.loads(stream.read_text())["shape"]
    signature = ModelSignature(
        Schema([TensorSpec(np.dtype("uint8"), (-1, *shape))]), Schema([ColSpec("string", "class")])
    )
    logged = client.create_logged_model(client.get_run(run).info.experiment_id, name="model", source_run_id=run)
    mlflow.set_tracking_uri(client.tracking_uri)
    mlflow.pyfunc.log_model(
        name="model",
        python_model=str(SERVED),
        artifacts={"model": str(model), "stream": str(stream)},
        signature=signature,
        input_example=np.zeros((1, *shape), np.uint8),
        pip_requirements=["fclflow"],
        model_id=logged.model_id,
    )
    client.log_outputs(run, [LoggedModelOutput(logged.model_id, step=0)])
