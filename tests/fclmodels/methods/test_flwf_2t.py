"""FLwF-2T: which models teach, and the loss and the step that they make."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fclmodels.backbones.model.network import NetworkCache
from fclmodels.federation.client import Client
from fclmodels.federation.exchange import Answer
from fclmodels.federation.messages import Payload
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.flwf_2t import Flwf2T
from fclmodels.methods.parts.distillation import Teachers
from fclmodels.storage import trees

# Client 1 misses the second task, client 2 the first; client 3 has a single sample of each.
MISSING = {(0, 0): 8, (0, 1): 5, (1, 0): 6, (1, 2): 9, (2, 1): 7, (2, 2): 8, (0, 3): 1, (1, 3): 1, (2, 3): 1}
HARD = ("optimizer.momentum=0.9", "optimizer.weight_decay=0.1", "model.dropout=[0.2, 0.5]")


class Recording(Flwf2T):
    """Keeps what each client remembers after each task."""

    def keep_own_model(self, client: Client, payload: Payload) -> Answer:
        answer = super().keep_own_model(client, payload)
        assert not answer.tensors
        self.memories = {**getattr(self, "memories", {}), (client.task, client.index): answer.memory}
        return answer


def logits_of(method: Any, server: Server, weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """Of a model with the server's shapes, by a network of its own."""
    network = NetworkCache(method.run.device, method.prepare_network).load(server.spec, weights).eval()
    return network(inputs)


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    p, q = ((logits[:, : teacher.shape[1]] / 2).softmax(1) for logits in (teacher, student))
    return (p * (p / q).log()).sum(1).mean()


@pytest.mark.parametrize("backbone", ["mlp", "resnet18"])
def test_a_clients_own_model_is_the_global_one_after_one_more_round_of_its_own(
    backbone: str, method_of: Callable, client_of: Callable, federate: Callable
) -> None:
    settings = (f"model.backbone={backbone}", "optimizer.lr_decay=0.5", "augment.flip=true")
    method, fedavg = method_of(Recording, *settings), method_of(FedAvg, *settings)
    server = federate(method, 1)
    for index in range(4):
        tensors = fedavg.train(client_of(fedavg, index, 0, round=2), fedavg.make_payload(server)).tensors
        moved = {**tensors["update"], **(tensors["statistics"] if backbone != "mlp" else {})}
        model = method.memories[0, index]["model"]
        assert model.keys() == server.weights.keys()
        for name, change in moved.items():
            torch.testing.assert_close(model[name], server.weights[name] + change / 8)
            assert not torch.equal(model[name], server.weights[name])


def test_it_trains_that_model_with_the_tasks_teachers(method_of: Callable, federate: Callable) -> None:
    methods = [method_of(Recording, "federation.rounds=1", alpha=alpha, beta=0.0) for alpha in (1.0, 0.2)]
    for method in methods:
        federate(method, 1)
    payloads = [m.make_payload(m.start_task(federate(m, 1), 1)) for m in methods]
    models = []
    for method, payload in zip(methods, payloads, strict=True):
        client = Client(0, 1, -1, method.run, method.select_rows(1, 0), method.memories[0, 0])
        models.append(method.keep_own_model(client, payload).memory["model"])
    assert trees.digest(models[0]) != trees.digest(models[1])


@pytest.mark.parametrize("server_teaches", ["previous", "current"])
def test_the_loss_and_the_step_of_two_teachers_by_hand(
    server_teaches: str, method_of: Callable, client_of: Callable, federate: Callable
) -> None:
    """alpha CE + beta KL(own || student) + (1 - alpha - beta) KL(server || student), through networks of their own."""
    settings = ("federation.batch_size=8", "federation.local_epochs=2")
    method = method_of(Recording, *settings, alpha=0.2, beta=0.3, server=server_teaches)
    ended = federate(method, 1)
    server = method.start_task(ended, 1)
    client = client_of(method, 1, 1, memory=method.memories[0, 1])
    answer = method.train(client, method.make_payload(server))
    assert answer.memory is client.memory

    network = NetworkCache(method.run.device, method.prepare_network).load(server.spec, server.weights)
    for (batch,) in client.yield_epochs():
        with torch.no_grad():
            own = logits_of(method, ended, method.memories[0, 1]["model"], batch.inputs)
            of_server = logits_of(
                method,
                *{"previous": (ended, ended.weights), "current": (server, server.weights)}[server_teaches],
                batch.inputs,
            )
        assert own.shape[1] == 2
        assert of_server.shape[1] == (2 if server_teaches == "previous" else 4)
        student = network(batch.inputs)
        losses = cross_entropy(student, batch.labels), divergence(student, own), divergence(student, of_server)
        loss = 0.2 * losses[0] + 0.3 * losses[1] + 0.5 * losses[2]
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    for name, parameter in network.named_parameters():
        moved = parameter.detach() - server.weights[name]
        torch.testing.assert_close(answer.tensors["update"][name] / 8, moved, rtol=1e-3, atol=2e-6)


def test_clients_that_join_late_or_miss_a_task(
    method_of: Callable, client_of: Callable, after_each_task: Callable, splits_of: Callable
) -> None:
    """In the third task: a model of the second, of the first, or none; the server's is always of the second.

    It has the share of a client's own model that there is not.
    """
    method = method_of(Recording, splits=splits_of(tasks=3, train=MISSING), alpha=0.2, beta=0.3)
    ended = after_each_task(method)[1]
    payload = method.make_payload(method.start_task(ended, 2))
    assert method.memories.keys() == MISSING.keys()
    for index, memory, rows in (
        (1, method.memories[0, 1], [4, 2]),
        (2, {}, [4]),
        (2, method.memories[1, 2], [4, 4]),
        (3, method.memories[1, 3], [4, 4]),
    ):
        training = method.prepare_training(client_of(method, index, 2, memory=memory), payload)
        teachers = training.find_added(Teachers)
        assert [len(weight) for teacher in teachers for weight, _ in teacher.heads] == rows
        assert [teacher.loss_weight for teacher in teachers] == pytest.approx([0.5, 0.3] if len(rows) == 2 else [0.8])
        inputs = next(next(client_of(method, index, 2).yield_epochs())).inputs
        (answer,) = teachers[0].compute_logits(inputs)
        torch.testing.assert_close(answer, logits_of(method, ended, ended.weights, inputs))
        training.run()


def test_old_heads_of_a_client_that_missed_their_task_move_for_the_servers_sake(
    method_of: Callable, client_of: Callable, after_each_task: Callable, splits_of: Callable
) -> None:
    splits = splits_of(tasks=3, train=MISSING, head="per-task")
    method = method_of(Recording, splits=splits)
    payload = method.make_payload(method.start_task(after_each_task(method)[1], 2))
    client = client_of(method, 1, 2, memory=method.memories[0, 1])
    training = method.prepare_training(client, payload)
    assert [len(teacher.heads) for teacher in training.find_added(Teachers)] == [2, 1]
    update = method.train(client, payload).tensors["update"]
    assert all(update[f"heads.{head}.weight"].any() for head in range(3))


@pytest.mark.parametrize("server_teaches", ["previous", "current"])
def test_without_weights_and_in_the_first_task_it_is_fedavg_to_the_bit(
    server_teaches: str, method_of: Callable, federate: Callable
) -> None:
    fedavg = [trees.digest(federate(method_of(FedAvg, *HARD), tasks).weights) for tasks in (1, 2)]
    silent = federate(method_of(Flwf2T, *HARD, alpha=1.0, beta=0.0, server=server_teaches))
    first = federate(method_of(Flwf2T, *HARD, alpha=0.1, beta=0.9, server=server_teaches), 1)
    assert [trees.digest(server.weights) for server in (first, silent)] == fedavg


def test_the_rounds_own_model_as_teacher_needs_no_further_download(method_of: Callable, federate: Callable) -> None:
    method = method_of(Flwf2T, server="current")
    assert method.make_payload(method.start_task(federate(method, 1), 1)).keys() == {"weights"}


def test_the_servers_model_travels_once_a_task(experiment_of: Callable, splits_of: Callable, tmp_path: Path) -> None:
    """To teach in the rounds and in the one more: who was sampled has it, the others download it at the end."""
    settings = ("federation.clients_per_round=1", "federation.rounds=2")
    experiment_of(*settings, method="flwf-2t", splits=splits_of(tasks=3)).run(tmp_path / "run")
    anchors = pl.read_parquet(tmp_path / "run" / "ledger.parquet").filter(pl.col("part") == "anchor")
    assert {round >= 0 for round in anchors["round"]} == {True, False}
    everyone = [(task, client) for task in (1, 2) for client in range(4)]
    assert anchors.select("task", "client").sort("task", "client").rows() == everyone
