"""GeoDL+iCaRL+FL: iCaRL with distillation along the geodesic between features in place of its own (Simon et al. 2021).

A client descends  H + beta D  on the union of its rows and exemplars: H the cross entropy over all classes so far, D
the distance of geodesic.py between the batch's features on its model and on the last task's, beta = lambda sqrt(n / m)
for n old and m new columns. Answers are iCaRL's nearest mean of exemplars.

The release has GeoDL on LUCIR alone. That iCaRL's own distillation goes, is what its paper says; that the labels then
have a cross entropy, is our choice, and that features are the backbone's (the release: of 2x2 fields).
"""

from typing import ClassVar

from pydantic import Field, NonNegativeFloat
from torch import Tensor
from torch.nn.functional import cross_entropy

from fclmodels.data.batches import Batch
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.joined_heads import find_columns, join_heads
from fclmodels.methods.parts.rehearsal import LastModel, Rehearsed
from fclmodels.numerics.geodesic import geodesic_loss


class GeodlIcarl(Rehearsed):
    """Clients keep features along the way from the old model's to their own."""

    name = "geodl-icarl"
    paper = "On Learning the Geodesic Path for Incremental Learning"
    answers_by_means: ClassVar[bool] = True

    class Settings(Rehearsed.Settings):
        lam: NonNegativeFloat = Field(
            10.0, le=1e6, alias="lambda", description="weight of the distance; the release's README (its code: 5)"
        )

    settings: Settings

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        network, teacher, features = training.network, training.find_added(LastModel), training.compute_features(batch)
        logits, labels = join_heads(network, features), find_columns(network.spec, batch.labels, batch.tasks)
        loss = cross_entropy(logits, labels)
        if teacher is None or not len(teacher.old):
            return loss
        old = len(teacher.old)
        beta = self.settings.lam * (old / (logits.shape[1] - old)) ** 0.5
        return loss + beta * geodesic_loss(features, teacher.answer(batch.inputs)[0])
