"""Local and global accuracy of clients' models, against those that the clients sent, evaluated by themselves."""

from collections.abc import Callable
from copy import copy
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from fclmodels.backbones.model.network import build_network
from fclmodels.data.splits.split_reader import Rows, Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.exchange import TRAIN, Answer
from fclmodels.federation.method import Method

ON = ("monitors.client_models=true", "monitors.accuracy=true", "federation.rounds=2")


def values_in(folder: Path) -> dict[tuple[str, int], float]:
    """{(monitor, task): value} of what is about no single task."""
    rows = pl.read_parquet(folder / "monitors.parquet").filter(pl.col("about").is_null()).sort("round")
    return {(monitor, task): value for monitor, task, value in rows.select("monitor", "task", "value").iter_rows()}


def record_models(method: Method) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    """Keep, by task and client, the model that a client made of the server's when it was asked last."""
    models: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    train = method.exchanges[TRAIN]

    def answer(client, payload) -> Answer:
        answer = train.answer(client, payload)
        if client.round == 1 and (client.task, client.index) not in models:  # the federation's own, not the monitor's
            weight = float(answer.tensors["weight"]["weight"])
            moved = {name: change / weight for name, change in answer.tensors["update"].items()}
            models[client.task, client.index] = {
                name: tensor + moved.get(name, 0) for name, tensor in payload["weights"].tensors.items()
            }
        return answer

    method.exchanges[TRAIN] = type(train)(train.name, train.payload, answer, train.form)
    return models


def score(method: Method, splits: Splits, task: int, weights: dict[str, torch.Tensor], rows: list[Rows]) -> float:
    """The mean over tasks of the share of right answers, class by class number: the head has them in that order."""
    network = build_network(method.run.make_spec(task + 1), torch.Generator()).eval()
    network.load_state_dict(weights)
    shares = []
    for part in rows:
        images = (splits.images[torch.from_numpy(part.samples)] / 255 - 0.5) / 0.25
        with torch.no_grad():
            answers = network.heads[0](network.backbone(images)).argmax(1).numpy()
        shares.append((answers == part.labels).mean())
    return float(sum(shares) / len(shares))


@pytest.mark.parametrize("name", ["fedavg", "er"])
def test_they_are_of_the_models_that_clients_sent_in_the_last_round(
    name: str, experiment_of: Callable[..., Experiment], splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    splits = splits_of(clients=3, test=6)
    experiment = experiment_of(*ON, method=name, splits=splits)
    models = record_models(experiment.method)
    experiment.run(tmp_path / "run")
    values = values_in(tmp_path / "run")
    for task in range(2):
        for monitor, pick in (("local_accuracy", lambda client: client), ("global_accuracy", lambda client: None)):
            expected = [
                score(
                    experiment.method,
                    splits,
                    task,
                    models[task, client],
                    [splits.select_test_rows(about, pick(client)) for about in range(task + 1)],
                )
                for client in range(3)
            ]
            assert values[monitor, task] == pytest.approx(sum(expected) / 3)


def test_where_there_is_one_client_all_three_accuracies_are_one(
    experiment_of: Callable[..., Experiment], splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    """Its model is the server's, and its test rows are all."""
    experiment_of(*ON, splits=splits_of(clients=1, test=20)).run(tmp_path / "run")
    values = values_in(tmp_path / "run")
    for task in range(2):
        assert values["local_accuracy", task] == values["global_accuracy", task] == values["accuracy", task]


def test_a_client_without_test_rows_has_no_local_accuracy(
    experiment_of: Callable[..., Experiment], splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    splits = copy(splits_of(clients=3, test=6))
    rows, nothing = splits.select_test_rows, np.arange(0)
    splits.select_test_rows = lambda task, client=None: (  # type: ignore[method-assign]
        rows(task, client).take(nothing) if client == 2 else rows(task, client)
    )
    experiment_of(*ON, splits=splits).run(tmp_path / "run")
    assert ("local_accuracy", 1) in values_in(tmp_path / "run")


def test_it_changes_no_bit(experiment_of: Callable[..., Experiment], tmp_path: Path) -> None:
    plain, watched = experiment_of(method="er"), experiment_of("monitors.client_models=true", method="er")
    digests = [made.run(tmp_path / name)["digests"]["model"] for name, made in (("plain", plain), ("watched", watched))]
    assert digests[0] == digests[1]


def test_a_model_of_which_a_part_stays_with_its_client_is_refused(
    experiment_of: Callable[..., Experiment], tmp_path: Path
) -> None:
    settings = ("model.backbone=resnet18", "methods.fedavg.batch_norm=local", "monitors.client_models=true")
    with pytest.raises(UserError, match=r"monitors\.client_models: fedavg leaves a part of the model"):
        experiment_of(*settings).run(tmp_path / "run")


def test_clients_with_models_of_their_own_have_readings_for_these(
    experiment_of: Callable[..., Experiment], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"fedas have models of their own.* readings personal_\*"):
        experiment_of("monitors.client_models=true", method="fedas").run(tmp_path / "run")
