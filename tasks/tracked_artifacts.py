"""What MLflow keeps of a finished run besides numbers: matrices, report, knowledge, a model that it can serve."""

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

from fclmodels import report
from fclmodels.kinds import TEXTS, kind_of
from fclmodels.metrics import confusion_matrix, in_order, matrix, shares_of_rows
from fclmodels.report import words
from fclmodels.report.runs import read_table
from fclmodels.served import Model

SERVED = Path(__file__).with_name("served.py")
READING = "task_agnostic"
ACCURACY, REPORT = "accuracy", "report.html"
NUMBERED = 20  # tasks at most of a heat map with a number in each cell
NEEDED = ("fclflow", "torch", "torchvision", "numpy", "pandas", "pillow", "safetensors")  # mlflow adds itself
NEEDED_FOR_TEXTS = ("transformers",)
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
    params=ParamSchema([ParamSpec("task", "long", 0)]),  # from 1; 0: not known
)


@dataclass(frozen=True)
class Matrix:
    """Shares of 1 with a column for each task, NaN where there is none, and what to write beside them."""

    title: str
    rows: str
    first_row: int
    columns: str
    shares: np.ndarray


def log_artifacts(client: MlflowClient, run: str, folder: Path) -> None:
    """The files of a run folder, and what MLflow's pages show of them."""
    matrices = matrices_of(folder)
    for name, shown in matrices.items():
        client.log_figure(run, heat_map(shown), f"{name}.png")
        client.log_dict(run, as_table(shown), f"{name}.json")
    show_tables(client, run, list(matrices))
    client.log_text(run, report.page([folder]), REPORT)
    for file in (folder / "result.json", *sorted(folder.glob("*.parquet"))):
        client.log_artifact(run, str(file))
    if (folder / "knowledge").is_dir():
        client.log_artifacts(run, str(folder / "knowledge"), "knowledge")
    log_model(client, run, folder / "model")


def show_tables(client: MlflowClient, run: str, names: Sequence[str]) -> None:
    """MLflow shows these JSON files as tables."""
    tables = [{"path": f"{name}.json", "type": "table"} for name in names]
    client.set_tag(run, "mlflow.loggedArtifacts", json.dumps(tables))


def matrices_of(folder: Path) -> dict[str, Matrix]:
    """The accuracy matrix and, by each reading in which a method predicts tasks, which one was taken for which."""
    accuracies = matrix(read_table(folder, "accuracy"), READING)
    matrices = {ACCURACY: Matrix(f"accuracy in %, {_title(READING)}", "tasks learned", 0, "task", accuracies)}
    if (folder / "confusion.parquet").is_file():
        confusion = read_table(folder, "confusion")
        for reading in in_order(confusion["reading"]):
            shares = shares_of_rows(confusion_matrix(confusion, reading, accuracies.shape[1]))
            title = f"% of a task's samples\n{_title(reading)}"
            matrices[f"confusion_{reading}"] = Matrix(title, "task", 1, "predicted task", shares)
    return matrices


def heat_map(shown: Matrix) -> Figure:
    """Not larger than a screen: of many tasks cells get smaller, and have no numbers where these have no room."""
    height, width = shown.shares.shape
    cell = min(0.7, 9 / width)  # inches
    figure = Figure(figsize=(1.5 + cell * width, 1.2 + 0.7 * cell * height), layout="constrained")
    axes = figure.add_subplot()
    edges = np.arange(width + 1) + 0.5, np.arange(height + 1) + shown.first_row - 0.5
    # Not imshow, which resamples to dozens of bytes a pixel.
    drawn = axes.pcolormesh(*edges, 100 * shown.shares, vmin=0, vmax=100, cmap="viridis")
    for row, column in np.argwhere(~np.isnan(shown.shares)) if width <= NUMBERED else ():
        value = shown.shares[row, column]
        color = "white" if value < 0.6 else "black"
        axes.text(column + 1, row + shown.first_row, f"{100 * value:.0f}", ha="center", va="center", color=color)
    step = 1 + width // 30
    axes.set(
        title=shown.title,
        xlabel=shown.columns,
        ylabel=shown.rows,
        xticks=range(1, width + 1, step),
        yticks=range(shown.first_row, shown.first_row + height, step),
    )
    axes.invert_yaxis()
    figure.colorbar(drawn)
    return figure


def as_table(shown: Matrix) -> dict[str, Any]:
    """The same as rows and columns, as MLflow's pages show a table."""
    rows = [
        [number, *(None if np.isnan(share) else share for share in row)]
        for number, row in enumerate(shown.shares.tolist(), start=shown.first_row)
    ]
    return {
        "columns": [shown.rows, *(f"{shown.columns} {k}" for k in range(1, shown.shares.shape[1] + 1))],
        "data": rows,
    }


def log_model(client: MlflowClient, run: str, model: Path) -> None:
    """The model as a pyfunc: its code and its folder of safetensors and JSON, nothing pickled; once."""
    served = Model(model)
    kind = kind_of(served.shape)
    example = pd.DataFrame({"image": [np.zeros(served.shape, kind.dtype).tolist()]})
    known = client.get_run(run)
    if known.outputs and known.outputs.model_outputs:
        return
    experiment = known.info.experiment_id
    begun = client.search_logged_models([experiment], f"source_run_id = '{run}'")  # where a kill came between
    logged = begun[0] if begun else client.create_logged_model(experiment, name="model", source_run_id=run)
    mlflow.set_tracking_uri(client.tracking_uri)
    mlflow.pyfunc.log_model(
        name="model",
        python_model=str(SERVED),
        artifacts={"model": str(model)},
        signature=SIGNATURE,
        input_example=example,
        pip_requirements=[f"{name}=={_version(name)}" for name in (*NEEDED, *NEEDED_FOR_TEXTS * (kind is TEXTS))],
        metadata={"notes": served.notes} if served.notes else None,
        model_id=logged.model_id,
    )
    client.log_outputs(run, [LoggedModelOutput(logged.model_id, step=0)])


def _version(package: str) -> str:
    """Without what says which build it is: another machine takes its own."""
    return metadata.version(package).partition("+")[0]


def _title(reading: str) -> str:
    """As on the page."""
    return words.reading(reading).title.lower()
