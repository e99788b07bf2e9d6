"""The least margin at which routing pays."""

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st

from fclmodels.methods.fedprotip import FedProTIP
from fclmodels.methods.parts.routing_margin import MARGINS, find_least_margin

# Nothing is protected, so that features drift.
DRIFTING = ("model.backbone=mlp", "model.hidden=24", "optimizer.lr=0.2", "federation.rounds=4")


@given(counts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=len(MARGINS), max_size=len(MARGINS)))
def test_the_least_margin_answers_most_right(counts: list[tuple[int, int]]) -> None:
    """By trying each; samples are routed from it on and all heads answer below."""
    routed, by_all = (torch.tensor(column) for column in zip(*counts, strict=True))
    margin = find_least_margin(routed, by_all)
    right = [int(by_all[:i].sum() + routed[i:].sum()) for i in range(len(MARGINS) + 1)]
    place = int((margin > MARGINS).sum())
    assert right[place] == max(right)


def test_without_calibration_every_sample_is_routed(
    method_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    always, never = (
        method_of(FedProTIP, splits=splits_of(train=20), tip_reject=reject) for reject in ("calibrated", "never")
    )
    assert always.make_router(federate(always)).least_margin is not None
    assert never.make_router(federate(never)).least_margin is None
    assert "calibration" not in never.exchanges
