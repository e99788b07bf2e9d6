"""The model of a run behind MLflow's pyfunc interface. MLflow copies this file beside the weights."""

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
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
        samples = [self._sample(given) for given in model_input["image"]]
        rows = self.model.answer(np.stack(samples), (params or {}).get("task") or None)
        # Objects, so that a task that is not known is null in JSON.
        return pd.DataFrame(rows, dtype=object)

    def _sample(self, given: Any) -> np.ndarray:
        if isinstance(given, str | Path):
            return self.model.read([given])[0]
        try:
            return self.model.as_sample(given)
        except (TypeError, ValueError, OverflowError) as problem:
            raise UserError(f"image: neither a path nor an array of numbers ({problem}).") from problem


mlflow.models.set_model(Served())
