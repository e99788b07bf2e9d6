"""Parameters that never travel: neither sent up nor downloaded, evaluated at the client; and several models there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.experiment.exported_model import PERSONAL, ExportedModel
from fclmodels.federation.client import Client
from fclmodels.plugins import find

SIZES = {(task, client): 6 + 2 * client for task in range(2) for client in range(4) if (task, client) != (1, 0)}
BIAS = "heads.0.bias"


@pytest.fixture(scope="module")
def splits(splits_of: Callable[..., Splits]) -> Splits:
    return splits_of(train=SIZES)


@pytest.fixture
def method(toys: Path, method_of: Callable[..., Any], splits: Splits) -> Any:
    return method_of(find("method", "personal-bias"), splits=splits)


def test_a_personal_bias_is_in_no_message(
    toys: Path, experiment_of: Callable[..., Experiment], splits: Splits, tmp_path: Path
) -> None:
    sizes = {}
    for name in ("fedavg", "personal-bias"):
        experiment_of(method=name, splits=splits).run(tmp_path / name)
        ledger = pl.read_parquet(tmp_path / name / "ledger.parquet").filter(task=0, round=0, client=1)
        sizes[name] = [ledger.filter(part=part)["bytes"].item() for part in ("weights", "update")]
    assert sizes["fedavg"] == [size + 4 * 2 for size in sizes["personal-bias"]]


def test_the_server_keeps_what_the_seed_drew(method: Any) -> None:
    server = method.start_task(method.start_task(method.create_server(), 0), 1)
    assert BIAS not in method.make_payload(server)["weights"].tensors
    assert BIAS in server.weights
    assert BIAS not in method.make_update_form(1, 0)["update"].tensors


def test_a_client_begins_with_that_and_goes_on_with_its_own(
    method: Any, client_of: Callable[..., Client], federate: Callable[..., Any]
) -> None:
    server = method.start_task(method.create_server(), 0)
    client = client_of(method, 1)
    first = method.join_own_weights(client, method.make_payload(server))
    assert torch.equal(first[BIAS], server.weights[BIAS])
    answer = method.train(client, method.make_payload(server))
    own = answer.memory["personal"][BIAS]
    assert not torch.equal(own, server.weights[BIAS])
    later = method.start_task(server, 1)
    weights = method.join_own_weights(client_of(method, 1, 1, memory=answer.memory), method.make_payload(later))
    assert torch.equal(weights[BIAS], torch.cat([own, later.weights[BIAS][2:]]))  # the new classes' from the seed


def test_each_client_answers_with_its_own(method: Any, client_of: Callable[..., Client]) -> None:
    server = method.start_task(method.create_server(), 0)
    payload = method.make_payload(server)
    bias = torch.tensor([50.0, -50.0])
    predict = method.make_client_predictor(client_of(method, 1, memory={"personal": {BIAS: bias}}), payload)
    inputs = torch.zeros(3, 1, 6, 6)
    assert predict(inputs).logits.argmax(1).tolist() == [0, 0, 0]
    network = method.networks.load(server.spec, {**server.weights, BIAS: bias}).eval()
    with torch.no_grad():
        torch.testing.assert_close(predict(inputs).logits, network(inputs))


def test_the_published_model_says_that_clients_answer_with_parts_of_their_own(
    toys: Path, experiment_of: Callable[..., Experiment], splits: Splits, tmp_path: Path
) -> None:
    experiment_of(method="personal-bias", splits=splits).run(tmp_path / "run")
    assert PERSONAL in ExportedModel(tmp_path / "run" / "model").notes


def test_a_client_keeps_a_model_of_each_task_that_it_has_had(
    toys: Path, experiment_of: Callable[..., Experiment], splits: Splits, tmp_path: Path
) -> None:
    experiment = experiment_of(method="several-models", splits=splits)
    experiment.run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet").filter(direction="kept", round=1)
    sizes = {(task, client): size for task, client, size in ledger.select("task", "client", "bytes").iter_rows()}
    assert all(sizes[1, client] > 1.9 * sizes[0, client] for client in (1, 2, 3))
    assert (1, 0) not in sizes


def test_several_models_answer_together(
    toys: Path, method_of: Callable[..., Any], client_of: Callable[..., Client], splits: Splits
) -> None:
    method = method_of(find("method", "several-models"), splits=splits)
    server = method.start_task(method.create_server(), 0)
    memory = method.train(client_of(method, 1), method.make_payload(server)).memory
    later = method.start_task(server, 1)
    predict = method.make_client_predictor(client_of(method, 1, 1, memory=memory), method.make_payload(later))
    inputs = torch.randn(3, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        mine = predict(inputs).logits
        own = method.networks.load(method.run.make_spec(1), memory["models"]["0"]).eval()(inputs).softmax(1)
        of_all = method.networks.load(method.run.make_spec(2), later.weights).eval()(inputs).softmax(1)
    expected = of_all / 2
    expected[:, :2] += own / 2
    torch.testing.assert_close(mine, expected)
    method.train(client_of(method, 1, 1), method.make_payload(later))  # a network made by a predictor can be trained
