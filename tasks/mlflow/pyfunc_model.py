"""The model of a run behind MLflow's pyfunc interface. MLflow copies this file beside the weights and runs the copy.

So a copy needs the modules that this file imports at the places that they had when the model was logged. MLflow alone
runs it: `fcl predict` reads the weights without it, also those of a model whose copy no longer runs.
"""

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModel, PythonModelContext

from fclmodels.errors import UserError
from fclmodels.experiment.exported_model import ExportedModel


class PyfuncModel(PythonModel):
    """Answers a column `image` with class, probability, task and relevance.

    An image is an array [C, H, W] of uint8 as it was prepared (token ids [2, L] of int32 where the model reads texts),
    or the path of an image file.
    """

    def load_context(self, context: PythonModelContext) -> None:
        self.model = ExportedModel(Path(context.artifacts["model"]))

    def predict(
        self, context: PythonModelContext | None, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        try:
            rows = self._answer(list(model_input["image"]), (params or {}).get("task") or None)
        except UserError as mistake:  # MLflow shows the sender this text; of other errors it shows a traceback
            raise MlflowException.invalid_parameter_value(str(mistake)) from None
        # Objects, so that an unknown task is null in JSON.
        return pd.DataFrame(rows, dtype=object)

    def _answer(self, images: list[Any], task: int | None) -> list[dict[str, Any]]:
        samples = [self._to_sample(image) for image in images]
        if any(sample.shape != self.model.shape for sample in samples):
            raise UserError(f"image: not of the shape {list(self.model.shape)}.")
        return self.model.answer(np.stack(samples), task) if samples else []

    def _to_sample(self, image: Any) -> np.ndarray:
        if isinstance(image, str | Path):
            return self.model.read_images([image])[0]
        try:
            return self.model.parse_sample(image)
        except (TypeError, ValueError, OverflowError) as problem:
            raise UserError(f"image: neither a path nor an array of numbers ({problem}).") from problem


mlflow.models.set_model(PyfuncModel())
