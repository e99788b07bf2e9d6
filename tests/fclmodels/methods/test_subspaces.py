"""What the methods with bases have to say of them."""

from collections.abc import Callable

import pytest
import torch

from fclmodels.methods.fedprotip import FedProTIP
from fclmodels.methods.fot import Fot
from fclmodels.methods.gpm import Gpm


def knowledge(**ranks: list[int]) -> dict[str, dict]:
    """Of layers with 200 inputs each, that hold so many directions after each task."""
    return {"bases": {name: torch.eye(200)[:, : of[-1]] for name, of in ranks.items()}, "ranks": ranks}


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ({"a": [10, 20], "b": [10, 20], "c": [10, 20]}, None),
        ({"a": [200, 200], "b": [10, 197], "c": [10, 20]}, None),
        ({"a": [10, 200], "b": [10, 198], "c": [10, 20]}, "after task 2 the bases fill 2 of 3 protected layers"),
        ({"a": [200, 200], "b": [199, 199], "c": [10, 200]}, "after task 1 the bases fill 2 of 3 protected layers"),
    ],
)
def test_bases_that_fill_most_layers_are_told_of(
    ranks: dict[str, list[int]], found: str | None, method_of: Callable
) -> None:
    """With the first task that it is true after, and the setting that would help."""
    remarks = method_of(Fot, threshold=0.9).remarks(knowledge(**ranks))
    assert (remarks == []) == (found is None)
    assert all(line.startswith(f"{found}: ") and "methods.fot.threshold (0.9)" in line for line in remarks)


def test_a_run_that_keeps_every_direction_says_so(method_of: Callable, federate: Callable) -> None:
    method = method_of(FedProTIP, threshold=1.0, samples=None, patches=None)
    (line,) = method.remarks(federate(method, 2).knowledge)
    assert "nothing more is learned" in line


def test_bases_that_stay_with_clients_are_not_spoken_of(method_of: Callable, federate: Callable) -> None:
    method = method_of(Gpm, threshold=1.0)
    assert method.remarks(federate(method, 2).knowledge) == []
