"""Classes that clients draw anew in each round, where they share images."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fclmodels.errors import UserError
from fclmodels.federation.training.redrawn_classes import RedrawStage, refuse_unfit_method
from fclmodels.methods.fedavg import FedAvg

SHARED = ("partition.kind=class-share", "partition.samples=shared", "federation.redraw_classes=true")


def test_a_client_has_all_images_of_as_many_classes_anew_in_each_round(
    method_of: Callable, client_of: Callable
) -> None:
    method = method_of(FedAvg, *SHARED)
    client = client_of(method, 0)
    client = replace(client, rows=client.rows.take(np.flatnonzero(client.rows.labels == 0)))
    everyone, stage, seen = method.run.splits.select_rows(0, "train"), RedrawStage(method), []
    for round in range(12):
        rows = stage.prepare(replace(client, round=round)).rows
        (label,) = set(rows.labels.tolist())
        assert sorted(rows.samples) == sorted(set(everyone.samples[everyone.labels == label].tolist()))
        assert set(rows.clients.tolist()) == {0}
        again = stage.prepare(replace(client, round=round)).rows
        assert np.array_equal(again.samples, rows.samples)
        seen.append(label)
    assert set(seen) == {0, 1}
    assert stage.prepare(replace(client, round=-1)).rows is client.rows


def test_the_federation_trains_on_them(experiment_of: Callable, tmp_path: Path) -> None:
    """Here each client trains on all images of both classes, not on its eight."""
    losses = []
    for number, overrides in enumerate((SHARED[:2], SHARED)):
        experiment_of(*overrides).run(tmp_path / str(number))
        rounds = pl.read_parquet(next((tmp_path / str(number)).rglob("rounds.parquet")))
        losses.append(rounds["loss"][0])
    assert losses[1] != losses[0]


def test_clients_with_images_of_their_own_are_refused(method_of: Callable) -> None:
    with pytest.raises(UserError, match=r"federation\.redraw_classes: a client has all images"):
        refuse_unfit_method(method_of(FedAvg, "federation.redraw_classes=true"))
