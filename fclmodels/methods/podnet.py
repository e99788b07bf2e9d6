"""PODNet+FL: distillation of pooled block outputs, and a classifier of cosine proxies (Douillard et al. 2020).

A client descends  NCA + sqrt((n + m) / m) (lambda_c POD-spatial + lambda_f POD-flat)  for n old and m new columns on
the union of its rows and exemplars (parts/proxy_classifier.py, which says how a federation has it). POD-spatial is the
mean over blocks of the distance between pooled outputs, POD-flat that of the features (pooled_distillation.py).

Answers are the nearest mean of exemplars, the paper's NME, whose lambda_c is 5. Its CNN, with 3, where the classifier
answers, is not there.
"""

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.proxy_classifier import FEATURES, Outputs, ProxyRehearsed
from fclmodels.numerics.pooled_distillation import measure_angle, measure_pooled_distance


class Podnet(ProxyRehearsed):
    """Clients hold on to pooled outputs of all blocks while they learn proxies of new classes."""

    name = "podnet"
    paper = "PODNet: Pooled Outputs Distillation for Small-Tasks Incremental Learning"

    class Settings(ProxyRehearsed.Settings):
        spatial: NonNegativeFloat = Field(5.0, le=1e6, description="lambda_c, weight of the blocks' distance")
        flat: NonNegativeFloat = Field(1.0, le=1e6, description="lambda_f, weight of the features' distance")

    settings: Settings

    def compare(self, training: LocalTraining, outputs: Outputs, targets: Outputs) -> Tensor:
        names = [name for name in outputs if name != FEATURES]
        spatial = torch.stack([measure_pooled_distance(outputs[name], targets[name]) for name in names]).mean()
        angle = measure_angle(outputs[FEATURES], targets[FEATURES])
        return self.settings.spatial * spatial + self.settings.flat * angle
