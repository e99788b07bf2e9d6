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
from fclmodels.data.augment import as_inputs
from fclmodels.federation.prediction import Columns
from fclmodels.numerics.relevance import Router


class Served(PythonModel):
    """Samples as they were prepared, images [B, C, H, W] or token ids [B, 2, L], to the names of their classes.

    Where the model has a router, a sample's classes are those of the task predicted for it; else all tasks'.
    """

    def load_context(self, context: PythonModelContext) -> None:
        model = Path(context.artifacts["model"])
        facts = json.loads(Path(context.artifacts["stream"]).read_text())
        weights = state.load(model / "weights.safetensors")
        spec = ModelSpec.from_json(json.loads((model / "spec.json").read_text()))
        self.network = skeleton(spec)
        if not any(name.endswith("running_mean") for name in weights):
            drop_statistics(self.network)
        self.network.load_state_dict(weights)
        self.network.eval()
        self.columns = Columns.of(spec, torch.device("cpu"))
        self.columns_of_task = self.columns.of_tasks(spec.tasks)
        router = model / "router.safetensors"
        self.router = Router.from_tree(state.load(router)) if router.exists() else None
        self.classes, self.mean, self.std = np.array(facts["classes"]), facts["mean"], facts["std"]

    def predict(
        self, context: PythonModelContext, model_input: np.ndarray, params: dict[str, Any] | None = None
    ) -> np.ndarray:
        with torch.inference_mode():
            features = self.network.backbone(as_inputs(torch.as_tensor(model_input), self.mean, self.std))
            logits = torch.cat([head(features) for head in self.network.heads], dim=1)
            if self.router is not None:
                tasks = self.router.sample_scores(features).argmax(1)
                logits = logits.masked_fill(~self.columns_of_task[tasks], -torch.inf)
            labels = self.columns.labels[logits.argmax(1)]
        return self.classes[labels.numpy()]


mlflow.models.set_model(Served())
