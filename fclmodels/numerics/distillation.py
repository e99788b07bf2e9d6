"""Distillation: how far a model's answers are from those of a teacher (Hinton et al. 2015; Li and Hoiem 2017)."""

from torch import Tensor
from torch.nn.functional import kl_div


def distillation(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL(teacher || student) of softmax(logits / temperature), mean over samples; logits [B, C].

    Its gradient is that of Li and Hoiem's eq. 2, the cross entropy of the same distributions, and like there no factor
    temperature^2 is put before it; but it is 0 where the student answers as the teacher does.
    """
    log_p, log_q = ((logits / temperature).log_softmax(1) for logits in (student, teacher))
    return kl_div(log_p, log_q, reduction="batchmean", log_target=True)
