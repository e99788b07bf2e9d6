"""What STAMP claims, on the embedded digits, two classes a task: means over the seeds 0 to 4, task-agnostic.

Ten clients, ten rounds of one epoch. Each side has the learning rate that fcl tune finds best on val rows with the
seeds 100 to 102, of 0.02 (not stamp), 0.05, 0.1 and 0.2 (ER's with a memory of 127 samples). ER's memory takes as many
bytes as STAMP's coreset.
"""

from collections.abc import Callable

import numpy as np
import pytest

from fclmodels.data.splits.split_reader import Splits

TUNED = {
    "fedavg": ["optimizer.lr=0.02"],
    "stamp": ["optimizer.lr=0.1", "methods.stamp.budget=5"],
    "er": ["optimizer.lr=0.05", "methods.er.memory=38"],
}
METRICS = ("acc", "ft", "learning_acc", "bytes_kept")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stamp_ends_3_points_above_fedavg(
    split_of: Callable[[list[str]], Splits], over_seeds: Callable[..., dict[str, dict[str, np.ndarray]]]
) -> None:
    measured = over_seeds(split_of([]), TUNED, ["federation.executor=serial"], "task_agnostic", METRICS)
    acc, kept = ({method: of[name].mean() for method, of in measured.items()} for name in ("acc", "bytes_kept"))
    assert acc["stamp"] >= acc["fedavg"] + 0.03
    assert kept["er"] == pytest.approx(kept["stamp"], rel=0.02)
