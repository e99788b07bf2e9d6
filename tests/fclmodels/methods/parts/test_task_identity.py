"""References of the release: means of batches of unit vectors."""

import numpy as np
import torch
from numpy.testing import assert_allclose

from fclmodels.methods.parts.task_identity import average_batches, measure_reference

# Nothing is protected, so that features drift.
DRIFTING = ("model.backbone=mlp", "model.hidden=24", "optimizer.lr=0.2", "federation.rounds=4")


def test_a_reference_of_the_release_is_the_mean_of_its_batches_unit_vectors() -> None:
    random = np.random.default_rng(0)
    A = torch.from_numpy(random.normal(size=(130, 6)))
    bases = [torch.eye(6, dtype=torch.float64)[:, 2 * t : 2 * t + 2] for t in range(3)]
    units = []
    for start in (0, 64, 128):
        part = A[start : start + 64].numpy()
        lengths = np.array([0, np.linalg.norm(part[:, 2:4]), np.linalg.norm(part[:, 4:6])])
        units.append(lengths / np.linalg.norm(lengths))
    assert_allclose(average_batches(A, bases), np.mean(units, axis=0))
    assert_allclose(measure_reference(A, bases)[1], np.sqrt((A[:, 2:4] ** 2).sum() / 130))
