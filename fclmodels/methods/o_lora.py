"""O-LoRA, federated: a pair of low-rank factors for each task, whose spans are held orthogonal (Wang et al. 2023).

The model is W + scale sum_{i <= t} B_i A_i with all pairs but the present task's fixed, and the loss

    CE + lambda_1 sum_{i < t} sum |A_i A_t^T| + lambda_2 sum (||A_t|| + ||B_t||),

over all maps, with the absolute values of the release (the paper squares them) and norms that are not squared. O-LoRA
was made for language models trained in one place; federated (our choice) A_t, B_t and the head are averaged, though the
mean of products is not the product of means. The first task is that of LoRA. The release's dropout before A is left
out. Rank, scale (alpha 32 / r 8) and both weights are the release's; its scripts vary lambda_1 from 0 to 5 by task.
"""

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from fclmodels.backbones.adapters.adapted import PROMPTS
from fclmodels.backbones.adapters.low_rank import LowRank
from fclmodels.data.batches import Batch
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.task_adapters import AdapterTraining
from fclmodels.numerics.low_rank_overlap import measure_overlap


class OLora(AdapterTraining):
    """Trains a pair of low-rank factors a task, orthogonal to those of earlier tasks, and the head."""

    name = "o-lora"
    paper = "Orthogonal Subspace Learning for Language Model Continual Learning"

    attaches = LowRank

    class Settings(LowRank.Settings):
        scale: PositiveFloat = Field(4.0, le=1000, description="factor on B A: alpha / r, 32 / 8")
        orthogonal: NonNegativeFloat = Field(0.5, le=1e6, description="lambda_1, weight of |A_i A_t^T| (release: 0.5)")
        length: NonNegativeFloat = Field(0.0, le=1e6, description="lambda_2, weight of ||A_t|| + ||B_t|| (release: 0)")

    settings: Settings

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        loss, task = super().compute_loss(training, batch), training.client.task
        factors = dict(training.network.named_parameters())
        for name, A in factors.items():
            if not (name.startswith(f"{PROMPTS}.{task}.") and name.endswith("A")):
                continue
            place = name.removeprefix(f"{PROMPTS}.{task}.")
            if self.settings.orthogonal and task > 0:
                earlier = torch.cat([factors[f"{PROMPTS}.{i}.{place}"] for i in range(task)])
                loss = loss + self.settings.orthogonal * measure_overlap(earlier, A)
            if self.settings.length:
                loss = loss + self.settings.length * (A.norm() + factors[f"{name[:-1]}B"].norm())
        return loss
