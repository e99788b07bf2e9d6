"""Distillation: the distance of a model's outputs from a teacher's (Hinton et al. 2015; Li and Hoiem 2017)."""

from torch import Tensor
from torch.nn.functional import kl_div


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Return KL(teacher || student) of softmax(logits / temperature), mean over samples; logits [B, C].

    Its gradient is that of Li and Hoiem's eq. 2, the cross entropy of the same distributions, also without a
    factor temperature^2; but it is 0 where the student's outputs are the teacher's.
    """
    log_p, log_q = ((logits / temperature).log_softmax(1) for logits in (student, teacher))
    return kl_div(log_p, log_q, reduction="batchmean", log_target=True)
