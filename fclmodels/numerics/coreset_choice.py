"""Which samples to store, by other rules than herding: the mathematics of OCS, CSReL and BCSR.

OCS (Yoon et al. 2022): a sample's gradient is like the mean one, unlike each other sample's, and like that of what is
stored. CSReL (Tong et al. 2025): the loss of a sample is high on a network of the selected samples and low on one of
all samples. BCSR (Hao et al. 2023): weights on the simplex whose weighted training lowers the mean loss.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fclmodels.numerics.shares import split_evenly

NEUMANN_TERMS = 4  # of the inverse Hessian's series: powers 0 to 3


def score_similarity(gradients: Callable[[], Iterable[Tensor]], stored: Tensor | None, tau: float) -> Tensor:
    """Return OCS's u_i = cos(g, g_i) - mean over j != i of cos(g_i, g_j) + tau cos(r, g_i): [n].

    gradients: yields each g_i [P], twice, so that no table [n, P] is held. g: their mean. stored: r [P], or none.
    """
    total, directions, count = torch.zeros(()), torch.zeros(()), 0
    for gradient in gradients():
        total, directions, count = total + gradient, directions + find_direction(gradient), count + 1
    mean = find_direction(total)
    memory = find_direction(stored) if stored is not None else torch.zeros_like(mean)
    scores = []
    for gradient in gradients():
        own = find_direction(gradient)
        others = (own @ directions - own @ own) / max(1, count - 1)
        scores.append(own @ mean - others + tau * (own @ memory))
    return torch.stack(scores)


def find_direction(vector: Tensor) -> Tensor:
    """Return the vector at length 1; zeros stay zeros."""
    length = vector.norm()
    return vector / length if length > 0 else vector


def choose_levelled(
    gains: Tensor, labels: Sequence[int], chosen: Mapping[int, int], room: Mapping[int, int], k: int
) -> list[int]:
    """Return the places of k samples of the highest gains [n], so that the classes' numbers become as equal as can be.

    chosen: how many each class has already, whose gains are -inf. room: how many it may have, and has, in all.
    """
    shares = split_evenly(k + sum(chosen.values()), list(room.values()))
    free = {label: share - chosen[label] for label, share in zip(room, shares, strict=True)}
    places = []
    for place in gains.argsort(descending=True, stable=True).tolist():
        if free[labels[place]] > 0:
            free[labels[place]] -= 1
            places.append(place)
    return places


def project_onto_simplex(v: Tensor) -> Tensor:
    """Return the nearest vector [n] with no negative entry and sum 1 (Duchi et al. 2008)."""
    falling = v.sort(descending=True).values
    excess = falling.cumsum(0) - 1
    ranks = torch.arange(1, len(v) + 1, dtype=v.dtype, device=v.device)
    last = int((falling - excess / ranks > 0).sum()) - 1
    return (v - excess[last] / ranks[last]).clamp(min=0)


def compute_weight_gradient(
    parameters: Sequence[Tensor], losses: Callable[[], Tensor], outer: Callable[[], Tensor], p: Tensor, step: float
) -> Tensor:
    """Return the gradient of the outer loss by the weights p [n], after an inner step that `parameters` have taken.

    - (d/dp grad inner)^T Q, inner = mean p_i l_i, Q = sum_{j=0..3} (I - step H)^j grad outer, H the inner Hessian.
    losses: the l_i [n] at the parameters; outer: the outer loss there.
    """
    p = p.detach().requires_grad_()
    flows = torch.autograd.grad((p * losses()).mean(), parameters, create_graph=True, allow_unused=True)
    used = [parameter for parameter, flow in zip(parameters, flows, strict=True) if flow is not None]
    inner = [flow for flow in flows if flow is not None]
    term = list(torch.autograd.grad(outer(), used))
    total = [t.clone() for t in term]
    for _ in range(NEUMANN_TERMS - 1):
        products = torch.autograd.grad(inner, used, term, retain_graph=True)
        term = [t - step * product for t, product in zip(term, products, strict=True)]
        torch._foreach_add_(total, term)
    (gradient,) = torch.autograd.grad(inner, p, total)
    return -gradient
