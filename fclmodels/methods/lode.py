"""LODE+FL: loss decoupling with replay in every client by itself, averaged by FedAvg (Liang and Li 2023).

The cross entropy of a new sample (logits z, class y) over all classes so far is the sum of two losses, which LODE
weighs apart:

    inter = lse(z) - lse(z_new)    new classes against old ones        intra = lse(z_new) - z_y    within the new ones

with lse(z) = log sum exp z, and z_new the columns of the task's classes. Each local step descends ER's loss (er.py)
with (rho / t) inter + intra in place of the cross entropy, t the number of earlier tasks:

    ((rho / t) inter(B) + intra(B) + L(B_M)) / 2

With rho = t it is ER, up to rounding. In the release the head has all future columns too, which count as new, and the
memory has samples of the present task too. Here the head has the classes so far, and the memory is ER's. A client that
missed all earlier tasks has nothing to replay and descends (rho / t) inter + intra (ours). FedProTIP (Table 5) puts
LODE onto TARGET's synthetic samples; this is the variant with a client's own old samples.
"""

from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fclmodels.backbones.model.network import Network
from fclmodels.backbones.model.spec import get_task_columns
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.run_context import Run
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.replay_memory import Replaying, descend_both


class Lode(Replaying):
    """Clients replay stored samples, and learn to tell new classes from old ones with less weight than from another."""

    name = "lode"
    paper = "Loss Decoupling for Task-Agnostic Continual Learning"

    class Settings(Replaying.Settings):
        rho: NonNegativeFloat = Field(
            0.05,
            le=1e6,
            description="weight of new against old classes, over the number of earlier tasks; the release's for "
            "CIFAR-100 and 500 stored samples, 0.01 for 5120",
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        if not self.loss_is_over_seen(run.make_spec(1)):
            raise UserError(
                "methods.lode: it weighs new classes against old ones in one loss over all. "
                "Use model.head: growing and model.loss_over: seen."
            )

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        return descend_both(self, training, batch, self.compute_decoupled_loss)

    def compute_decoupled_loss(self, network: Network, features: Tensor, labels: Tensor, task: int) -> Tensor:
        """Return (rho / t) inter + intra of the task's own samples; in the first task the cross entropy."""
        if task == 0:
            return self.compute_cross_entropy(network, features, labels, task)
        logits = network.compute_logits(features)
        inter, intra = decouple(logits, labels, get_task_columns(network.spec, task, logits.device))
        return self.settings.rho / task * inter + intra


def decouple(logits: Tensor, labels: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return inter and intra, means over samples, of logits [B, C] and the columns of the new classes."""
    of_new = logits[:, new].logsumexp(1)
    right = logits.gather(1, labels[:, None])[:, 0]
    return (logits.logsumexp(1) - of_new).mean(), (of_new - right).mean()
