"""The network of a run behind MLflow's pyfunc interface. MLflow copies this file beside the weights."""

import json
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import torch
from mlflow.pyfunc import PythonModel, PythonModelContext

from fclmodels import state
from fclmodels.backbones.batch_norm import drop_statistics
from fclmodels.backbones.network import skeleton
from fclmodels.backbones.spec import ModelSpec
from fclmodels.data.augment import normalise


class Served(PythonModel):
    """Images, uint8 [B, C, H, W] as they were prepared, to the names of their classes among all tasks'."""

    def load_context(self, context: PythonModelContext) -> None:
        model = Path(context.artifacts["model"])
        facts = json.loads(Path(context.artifacts["stream"]).read_text())
        weights = state.load(model / "weights.safetensors")
        self.network = skeleton(ModelSpec.from_json(json.loads((model / "spec.json").read_text())))
        if not any(name.endswith("running_mean") for name in weights):
            drop_statistics(self.network)
        self.network.load_state_dict(weights)
        self.network.eval()
        self.classes, self.mean, self.std = np.array(facts["classes"]), facts["mean"], facts["std"]

    def predict(
        self, context: PythonModelContext, model_input: np.ndarray, params: dict[str, Any] | None = None
    ) -> np.ndarray:
        with torch.inference_mode():
            logits = self.network(normalise(torch.as_tensor(model_input), self.mean, self.std))
        return self.classes[logits.argmax(1).numpy()]


mlflow.models.set_model(Served())
