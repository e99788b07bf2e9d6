"""TARGET with LODE: worked numbers, and TARGET as the limit without its term."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fclmodels.errors import UserError
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.lode import decouple
from fclmodels.methods.target import Target
from fclmodels.methods.target_lode import TargetLode
from fclmodels.storage import trees

TINY: dict[str, Any] = {"pool": 8, "batch": 8, "g_steps": 1, "warmup": 0, "student_steps": 1, "noise": 4, "width": 2}


def test_worked_numbers() -> None:
    logits, labels = torch.tensor([[1.0, 0.0, 2.0, 1.5], [0.5, 2.0, 1.0, 0.0]]), torch.tensor([2, 3])
    inter, intra = decouple(logits, labels, torch.tensor([2, 3]))
    assert inter.item() == pytest.approx(0.752617, abs=1e-6)
    assert intra.item() == pytest.approx(0.893669, abs=1e-6)
    assert (inter + intra).item() == pytest.approx(1.646287, abs=1e-6)


def test_without_its_term_it_is_target_to_the_bit_and_with_it_not(method_of: Callable, federate: Callable) -> None:
    target, none, some = (
        trees.digest(federate(method_of(kind, **TINY, **own)).weights)
        for kind, own in ((Target, {}), (TargetLode, {"rho": 0.0}), (TargetLode, {"rho": 0.5}))
    )
    assert none == target
    assert some != target


def test_as_much_weight_as_tasks_and_no_images_is_fedavg_over_all_classes(
    method_of: Callable, federate: Callable
) -> None:
    def weights(method: Any) -> Server:
        return federate(method).weights

    lode, fedavg = weights(method_of(TargetLode, **TINY, kd=0.0, rho=1.0)), weights(method_of(FedAvg))
    assert all(torch.allclose(lode[name], tensor, atol=1e-6) for name, tensor in fedavg.items())


def test_it_needs_a_head_that_grows(method_of: Callable, splits_of: Callable) -> None:
    with pytest.raises(UserError, match=r"Use model\.head: growing"):
        method_of(TargetLode, splits=splits_of(head="per-task"))
