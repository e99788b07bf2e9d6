"""The monitor `transfer` on losses chosen by hand, and on a run that it must not disturb."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch
from torch import Tensor

from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Splits
from fclmodels.federation.engine.journal import Log
from fclmodels.federation.engine.rounds import Position
from fclmodels.federation.monitors.oracles.transfer import Transfer
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.special import Special

BIAS = "backbone.fc1.bias"


class Bowls(FedAvg):
    """L_u^tau is a bowl in the first two biases, round for the earlier tasks: a / 2 ||b - c||^2."""

    name = "bowls"
    of: dict[tuple[int, int], tuple[float, tuple[float, float]]]  # a and c by client and task

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        a, center = self.of[training.client.index, training.client.task]
        return a / 2 * (training.network.get_parameter(BIAS)[:2] - torch.tensor(center)).square().sum()


def at(server: Server, x: float, y: float) -> Server:
    bias = server.weights[BIAS].clone()
    bias[:2] = torch.tensor([x, y])
    return replace(server, weights={**server.weights, BIAS: bias})


def look_at(monitor: Transfer, before: Server, round: int = 0) -> dict[str, float]:
    monitor.look(Position(before, {}, round), Position(before, {}, round + 1))
    rows = [row for row in monitor.log.read_rows() if row["round"] == round]
    assert len({row["monitor"] for row in rows}) == len(rows)
    return {row["monitor"]: row["value"] for row in rows}


def test_two_clients_and_two_earlier_tasks_worked_out_by_hand(
    method_of: Callable, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    """Earlier bowls around (1, 0) with a = 1 and around (-1, 0) with a = 3; W* is (0, 2), W is (0, 1).

    F_old = ((x - 1)^2 + y^2 + 3 (x + 1)^2 + 3 y^2) / 4: 5 at W*, 2 at W; its gradient ((4 x + 2) / 2, 2 y) at W* is
    (1, 4), at W (1, 2). The curvature is 2 in all directions, so that the bound, 5 + (0, -1) (1, 4) + 2 / 2, is exact.
    """
    method = method_of(Bowls, splits=splits_of(tasks=3, clients=2))
    method.of = {(k, 0): (1.0, (1.0, 0.0)) for k in (0, 1)} | {(k, 1): (3.0, (-1.0, 0.0)) for k in (0, 1)}
    # At (0, 1) the clients' gradients of the new task are (-2, 0) and (0, -2); their mean is (-1, -1).
    method.of |= {(0, 2): (1.0, (2.0, 1.0)), (1, 2): (1.0, (0.0, 3.0))}
    last = method.start_task(method.start_task(method.create_server(), 0), 1)
    start, before = at(last, 0, 2), at(method.start_task(last, 2), 0, 1)
    log = Log(tmp_path / "log.jsonl")
    seen = look_at(Transfer(method, 2, log, start), before)
    assert seen.pop("epsilon") == pytest.approx(-4 / 17**0.5)
    assert seen.pop("old_loss") == pytest.approx(2)
    assert seen.pop("old_loss_bound") == pytest.approx(2)
    # Over all three tasks: (2 (1, 2) + (-1, -1)) / 3.
    assert seen.pop("gradient_norm") == pytest.approx((1**2 + 3**2) ** 0.5 / 3)
    assert not seen
    log.close()


def test_the_first_task_has_no_earlier_ones(method_of: Callable, tmp_path: Path) -> None:
    method = method_of(Bowls)
    method.of = {(k, 0): (1.0, (3.0, 4.0)) for k in range(4)}
    server = method.start_task(method.create_server(), 0)
    log = Log(tmp_path / "log.jsonl")
    seen = look_at(Transfer(method, 0, log, server), at(server, 0, 0))
    assert seen == {"gradient_norm": pytest.approx(5)}
    log.close()


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_a_run_with_it_has_its_rows_and_the_same_model(
    head: str, experiment_of: Callable, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    digests = []
    for on in ("true", "false"):
        settings = (f"monitors.transfer={on}", "monitors.every=2", "federation.rounds=3", "methods.special.lambda=0.2")
        splits = splits_of(tasks=3, head=head)
        result = experiment_of(*settings, method=Special.name, splits=splits).run(tmp_path / on)
        digests.append(result["digests"]["model"])
    assert digests[0] == digests[1]
    rows = pl.read_parquet(tmp_path / "true" / "monitors.parquet").filter(pl.col("monitor") != "used_share")
    counts = dict(rows.group_by("monitor").len().iter_rows())
    assert counts == {"gradient_norm": 6, "epsilon": 4, "old_loss": 4, "old_loss_bound": 4}
    first = rows.filter(pl.col("round") == 0, pl.col("monitor").is_in(["old_loss", "old_loss_bound"]))
    for _, task in first.group_by("task"):
        assert task["value"].max() == pytest.approx(task["value"].min())  # W is W*: the bound is the loss
