"""The model of a run behind MLflow's pyfunc interface. MLflow copies this file beside the weights."""

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModel, PythonModelContext

from fclmodels.errors import UserError
from fclmodels.served import Model


class Served(PythonModel):
    """A column `image` to class, probability, task and relevance.

    An image is an array [C, H, W] of uint8 as it was prepared (token ids [2, L] of int32 where the model reads texts),
    or the path of an image file.
    """

    def load_context(self, context: PythonModelContext) -> None:
        self.model = Model(Path(context.artifacts["model"]))

    def predict(
        self, context: PythonModelContext | None, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        try:
            rows = self._rows(list(model_input["image"]), (params or {}).get("task") or None)
        except UserError as mistake:  # what MLflow tells whoever asked; of others it tells where in the code they arose
            raise MlflowException.invalid_parameter_value(str(mistake)) from None
        # Objects, so that a task that is not known is null in JSON.
        return pd.DataFrame(rows, dtype=object)

    def _rows(self, images: list[Any], task: int | None) -> list[dict[str, Any]]:
        samples = [self._sample(given) for given in images]
        if any(sample.shape != self.model.shape for sample in samples):
            raise UserError(f"image: not of the shape {list(self.model.shape)}.")
        return self.model.answer(np.stack(samples), task) if samples else []

    def _sample(self, given: Any) -> np.ndarray:
        if isinstance(given, str | Path):
            return self.model.read([given])[0]
        try:
            return self.model.as_sample(given)
        except (TypeError, ValueError, OverflowError) as problem:
            raise UserError(f"image: neither a path nor an array of numbers ({problem}).") from problem


mlflow.models.set_model(Served())
