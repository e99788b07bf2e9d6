"""MLflow's artifacts of a finished run: matrices, report, knowledge, and a model that MLflow can serve."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput
from mlflow.models.signature import ModelSignature
from mlflow.types.schema import AnyType, Array, ColSpec, ParamSchema, ParamSpec, Schema

from fclmodels import metrics
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.experiment.exported_model import ExportedModel
from fclmodels.report import labels
from fclmodels.report.charts.contact_sheets import join_strips, load_strips
from fclmodels.report.page import render_page
from fclmodels.report.read_runs import read_table
from tasks.mlflow.naming import READING

PYFUNC_FILE = Path(__file__).with_name("pyfunc_model.py")
ACCURACY, REPORT, SHEET = "accuracy", "report.html", "synthetic.png"
MAX_NUMBERED = 20  # tasks of a heat map with a number in each cell
REQUIREMENTS = ("fclflow", "torch", "torchvision", "numpy", "pandas", "pillow", "safetensors")  # mlflow adds itself
TEXT_REQUIREMENTS = ("transformers",)
SIGNATURE = ModelSignature(
    inputs=Schema([ColSpec(AnyType(), "image")]),
    outputs=Schema(
        [
            ColSpec("string", "class"),
            ColSpec("double", "probability"),
            ColSpec("long", "task", required=False),
            ColSpec(Array("double"), "relevance", required=False),
        ]
    ),
    params=ParamSchema([ParamSpec("task", "long", 0)]),  # from 1; 0: unknown
)


@dataclass(frozen=True)
class Matrix:
    """A matrix with a column for each task, and its labels."""

    title: str
    rows: str  # label of the rows
    first_row: int  # number of the first row
    columns: str  # label of the columns
    shares: np.ndarray  # [rows, tasks], of 1; NaN if there is none


def log_artifacts(client: MlflowClient, run: str, folder: Path) -> None:
    """Log the files of a run folder, its matrices, its report page and its model."""
    matrices = read_matrices(folder)
    for name, matrix in matrices.items():
        client.log_figure(run, draw_heat_map(matrix), f"{name}.png")
        client.log_dict(run, to_table(matrix), f"{name}.json")
    show_tables(client, run, list(matrices))
    log_sheet(client, run, folder)
    client.log_text(run, render_page([folder]), REPORT)
    for file in (folder / "result.json", *sorted(folder.glob("*.parquet"))):
        client.log_artifact(run, str(file))
    if (folder / "knowledge").is_dir():
        client.log_artifacts(run, str(folder / "knowledge"), "knowledge")
    log_model(client, run, folder / "model")


def log_sheet(client: MlflowClient, run: str, folder: Path) -> None:
    """Log the contact sheet of synthetic images, where the server has some."""
    if sheet := load_strips(folder):
        client.log_image(run, join_strips(sheet[1]), SHEET)


def show_tables(client: MlflowClient, run: str, names: Sequence[str]) -> None:
    """Have MLflow's pages show these JSON files as tables."""
    tables = [{"path": f"{name}.json", "type": "table"} for name in names]
    client.set_tag(run, "mlflow.loggedArtifacts", json.dumps(tables))


def read_matrices(folder: Path) -> dict[str, Matrix]:
    """Return the accuracy matrix and, for each reading in which a method predicts tasks, its confusion matrix."""
    accuracies = metrics.accuracy_matrix(read_table(folder, "accuracy"), READING)
    matrices = {ACCURACY: Matrix(f"accuracy in %, {_get_title(READING)}", "tasks learned", 0, "task", accuracies)}
    if (folder / "confusion.parquet").is_file():
        confusion = read_table(folder, "confusion")
        for reading in metrics.sort_readings(confusion["reading"]):
            shares = metrics.normalise_rows(metrics.confusion_matrix(confusion, reading, accuracies.shape[1]))
            title = f"% of a task's samples\n{_get_title(reading)}"
            matrices[f"confusion_{reading}"] = Matrix(title, "task", 1, "predicted task", shares)
    return matrices


def draw_heat_map(matrix: Matrix) -> Figure:
    """Draw a figure that fits a screen: with many tasks cells get smaller, and have no numbers if there is no room."""
    height, width = matrix.shares.shape
    cell = min(0.7, 9 / width)  # inches
    figure = Figure(figsize=(1.5 + cell * width, 1.2 + 0.7 * cell * height), layout="constrained")
    axes = figure.add_subplot()
    edges = np.arange(width + 1) + 0.5, np.arange(height + 1) + matrix.first_row - 0.5
    # Not imshow, which resamples at dozens of bytes a pixel.
    mesh = axes.pcolormesh(*edges, 100 * matrix.shares, vmin=0, vmax=100, cmap="viridis")
    for row, column in np.argwhere(~np.isnan(matrix.shares)) if width <= MAX_NUMBERED else ():
        value = matrix.shares[row, column]
        color = "white" if value < 0.6 else "black"
        axes.text(column + 1, row + matrix.first_row, f"{100 * value:.0f}", ha="center", va="center", color=color)
    step = 1 + width // 30
    axes.set(
        title=matrix.title,
        xlabel=matrix.columns,
        ylabel=matrix.rows,
        xticks=range(1, width + 1, step),
        yticks=range(matrix.first_row, matrix.first_row + height, step),
    )
    axes.invert_yaxis()
    figure.colorbar(mesh)
    return figure


def to_table(matrix: Matrix) -> dict[str, Any]:
    """Return the columns and rows of the matrix, in MLflow's format of a table."""
    rows = [
        [number, *(None if np.isnan(share) else share for share in row)]
        for number, row in enumerate(matrix.shares.tolist(), start=matrix.first_row)
    ]
    return {
        "columns": [matrix.rows, *(f"{matrix.columns} {k}" for k in range(1, matrix.shares.shape[1] + 1))],
        "data": rows,
    }


def log_model(client: MlflowClient, run: str, model: Path) -> None:
    """Log the model, unless the run has one, as a pyfunc: code beside a folder of safetensors and JSON, no pickle."""
    exported = ExportedModel(model)
    kind = find_kind(exported.shape)
    packages = (*REQUIREMENTS, *TEXT_REQUIREMENTS) if kind is TEXTS else REQUIREMENTS
    example = pd.DataFrame({"image": [np.zeros(exported.shape, kind.dtype).tolist()]})
    tracked = client.get_run(run)
    if tracked.outputs and tracked.outputs.model_outputs:
        return
    experiment = tracked.info.experiment_id
    unfinished = client.search_logged_models([experiment], f"source_run_id = '{run}'")  # after a kill
    logged = unfinished[0] if unfinished else client.create_logged_model(experiment, name="model", source_run_id=run)
    mlflow.set_tracking_uri(client.tracking_uri)
    mlflow.pyfunc.log_model(
        name="model",
        python_model=str(PYFUNC_FILE),
        artifacts={"model": str(model)},
        signature=SIGNATURE,
        input_example=example,
        pip_requirements=[f"{name}=={_find_version(name)}" for name in packages],
        metadata={"notes": exported.notes} if exported.notes else None,
        model_id=logged.model_id,
    )
    client.log_outputs(run, [LoggedModelOutput(logged.model_id, step=0)])


def _find_version(package: str) -> str:
    """Return an installed package's version without its build (+cpu), which another machine chooses itself."""
    return metadata.version(package).partition("+")[0]


def _get_title(reading: str) -> str:
    """Return a reading's title on the report page, in lower case."""
    return labels.label_reading(reading).title.lower()
