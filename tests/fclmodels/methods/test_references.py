"""The two upper references: joint sees everything at once, single-task nothing of the others."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.joint import Joint
from fclmodels.methods.single_task import SingleTask
from fclmodels.storage import trees


class RecordingJoint(Joint):
    seen: list[tuple[int, float]]

    def compute_loss(self, training: Any, batch: Any) -> Tensor:
        self.seen += zip(batch.tasks.tolist(), batch.inputs.double().flatten(1).sum(1).tolist(), strict=True)
        return super().compute_loss(training, batch)


def test_joint_sees_each_row_of_all_tasks_so_far_once_an_epoch(
    method_of: Callable, splits_of: Callable, client_of: Callable
) -> None:
    method = method_of(
        RecordingJoint, splits=splits_of(tasks=3, train={(t, c): 2 + t + c for t in range(3) for c in range(4)}, val=2)
    )
    server = method.create_server()
    for task in range(3):
        server = method.start_task(server, task)
        method.seen = []
        method.train(client_of(method, 0, task), method.make_payload(server))
        sizes = Counter(task for task, _ in method.seen)
        assert sizes == {earlier: sum(2 + earlier + client for client in range(4)) for earlier in range(task + 1)}
        assert len(set(method.seen)) == len(method.seen)
        assert method.list_participants(task) == (0,)


def test_joint_takes_a_sample_once_where_clients_share_it(
    method_of: Callable, own_splits: Callable, reopened: Callable
) -> None:
    splits = own_splits()
    manifest = pl.read_parquet(splits.folder / "manifest.parquet")
    shared = manifest.filter(pl.col("split") == "train", pl.col("client") == 0).with_columns(client=pl.lit(3, pl.Int32))
    pl.concat([manifest, shared]).write_parquet(splits.folder / "manifest.parquet")
    method = method_of(Joint, splits=reopened(splits))
    rows = method.select_rows(1, 0)
    assert len(rows) == len(np.unique(rows.samples)) == 2 * 4 * 8


def test_joint_starts_from_scratch_after_each_task(method_of: Callable, federate: Callable) -> None:
    method = method_of(Joint, "model.freeze=[fc1]")
    fresh = method.start_task(method.start_task(method.create_server(), 0), 1)
    learned = method.start_task(federate(method, 1), 1)
    assert trees.digest(learned.to_tree()) == trees.digest(fresh.to_tree())
    end = federate(method, 2).weights
    assert not torch.equal(end["backbone.fc1.weight"], fresh.weights["backbone.fc1.weight"])


@pytest.mark.parametrize(("head", "over"), [("growing", "seen"), ("growing", "task"), ("per-task", "seen")])
def test_joint_loss_is_the_mean_over_samples_of_each_ones_own(
    head: str, over: str, method_of: Callable, splits_of: Callable, client_of: Callable
) -> None:
    method = method_of(Joint, f"model.loss_over={over}", "federation.batch_size=64", splits=splits_of(head=head))
    server = method.start_task(method.start_task(method.create_server(), 0), 1)
    client = client_of(method, 0, 1)
    network = method.networks.load(server.spec, server.weights).eval()
    batch = next(next(client.yield_epochs()))
    assert set(batch.tasks.tolist()) == {0, 1}
    losses = []
    for x, label, task in zip(batch.inputs, batch.labels.tolist(), batch.tasks.tolist(), strict=True):
        columns = network.compute_logits(
            network.backbone(x[None]), None if (head, over) == ("growing", "seen") else task
        )
        target = label if (head, over) == ("growing", "seen") else label - 2 * task
        losses.append(cross_entropy(columns, torch.tensor([target])))
    got = method.compute_loss(LocalTraining(method, client, network, server.weights), batch)
    torch.testing.assert_close(got, torch.stack(losses).mean())


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_single_tasks_model_is_independent_of_other_tasks_data(
    head: str, method_of: Callable, own_splits: Callable, federate: Callable
) -> None:
    servers = []
    for noisy in (False, True):
        splits = own_splits(tasks=3, head=head)
        if noisy:
            images = np.lib.format.open_memmap(splits.folder / "../prepared/images.npy", "r+")
            others = np.concatenate([splits.select_rows(task, "train").samples for task in (0, 2)])
            images[others] = 255 - images[others]
            images.flush()
            splits = Splits.open(splits.folder)
        servers.append(federate(method_of(SingleTask, splits=splits)))
    models = [[*server.knowledge["models"], server.weights] for server in servers]
    same = [trees.digest(one) == trees.digest(two) for one, two in zip(*models, strict=True)]
    assert same == [False, True, False]


def test_single_task_answers_with_the_tasks_own_model(
    method_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    method = method_of(SingleTask, splits=splits_of(tasks=3))
    server = federate(method)
    x = torch.randn(5, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    columns = method.list_columns(server)
    assert columns.labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert columns.owners.tolist() == [0, 0, 1, 1, 2, 2]
    with torch.no_grad():
        got = method.make_predictor(server)(x).logits
        for task, weights in enumerate([*server.knowledge["models"], server.weights]):
            network = method.networks.load(method.run.make_spec(task + 1), weights).eval()
            torch.testing.assert_close(got[:, 2 * task : 2 * task + 2], network(x, task))


@pytest.mark.parametrize("method", ["joint", "single-task"])
@pytest.mark.parametrize("policy", ["local", "frozen"])
def test_a_reference_that_starts_anew_keeps_no_statistics_of_earlier_tasks(
    method: str, policy: str, params_of: Callable
) -> None:
    with pytest.raises(UserError, match=f"methods.{method}.batch_norm .* must be average or batch"):
        params_of(f"methods.{method}.batch_norm={policy}")


@pytest.mark.parametrize("reference", [Joint, SingleTask])
def test_a_server_lr_that_falls_over_tasks_does_not_hold_a_reference_back(
    reference: type, method_of: Callable, federate: Callable
) -> None:
    """Each task begins anew, so nothing of the last task's model is there to be kept."""
    falling = federate(method_of(reference, "federation.server_lr_schedule=1/t"))
    constant = federate(method_of(reference))
    assert trees.digest(falling.weights) == trees.digest(constant.weights)


def test_in_joints_ledger_only_samples_travel(experiment_of: Callable, splits_of: Callable, tmp_path: Path) -> None:
    splits = splits_of()
    experiment_of(method="joint", splits=splits).run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet")
    assert set(ledger["kind"]) == {"samples"}
    train = sum(len(splits.select_rows(task.index, "train")) for task in splits.tasks)
    assert ledger["bytes"].sum() == train * splits.images[0].numel()
