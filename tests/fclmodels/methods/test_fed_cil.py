"""FedCIL: a client's two steps by hand, its limit case, what is replayed, and what the server draws from."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import binary_cross_entropy, cross_entropy

from fclmodels.errors import UserError
from fclmodels.federation.exchange import TRAIN
from fclmodels.methods.fed_cil import FedCil
from fclmodels.methods.parts.ac_gan import AcGan, GanTraining
from fclmodels.randomness import seed_torch

SMALL = {"width": 1, "noise": 4}
PLAIN = {**SMALL, "consolidation": 0, "consistency": 0}
ONE_STEP = ("federation.batch_size=64", "federation.rounds=1")
UNEVEN = {(0, 0): 6, (0, 1): 8, (1, 1): 5, (1, 2): 4}  # client 0 has the first task, client 2 the other


def test_a_clients_steps_by_hand(method_of: Callable, client_of: Callable) -> None:
    """One batch: a step of SGD of the critic, then Adam's first of the generator, by the gradient's sign."""
    method = method_of(FedCil, *ONE_STEP, **PLAIN, generator_lr=0.01)
    server = method.start_task(method.create_server(), 0)
    client = client_of(method, 1)
    answer = method.train(client, method.make_payload(server))

    run, weight = method.run, client.weight
    network = method_of(FedCil, *ONE_STEP, **PLAIN).networks.load(server.spec, server.weights)
    judge, generator = (
        method.auxiliaries.load(a, server.networks[a.name]).requires_grad_(True)
        for a in reversed(method.auxiliaries.auxiliaries)
    )
    generator.train()
    (batch,) = run.batches.iterate_shuffled(client.rows, 64, client.make_generator("batches"))
    columns = torch.tensor([0, 1])

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        of = columns[torch.randint(2, (len(batch.labels),))]
        return (generator(of) - 0.5) / 0.25, of

    with seed_torch(run.seed, "dropout", 0, 0, 1, device=run.device):
        false, of = draw()
        h, h_false = network.backbone(batch.inputs), network.backbone(false.detach())
        ones = torch.ones(len(of), 1)
        loss = (
            binary_cross_entropy(judge(h).sigmoid(), ones)
            + cross_entropy(network.compute_logits(h), batch.labels)
            + binary_cross_entropy(judge(h_false).sigmoid(), 0 * ones)
            + cross_entropy(network.compute_logits(h_false), of)
        )
        critic = {**dict(network.named_parameters()), **dict(judge.named_parameters("judge"))}
        gradients = torch.autograd.grad(loss, list(critic.values()))
        with torch.no_grad():
            for parameter, gradient in zip(critic.values(), gradients, strict=True):
                parameter -= 0.1 * gradient
        false, of = draw()
        h = network.backbone(false)
        of_generator = binary_cross_entropy(judge(h).sigmoid(), ones) + cross_entropy(network.compute_logits(h), of)
        moves = torch.autograd.grad(of_generator, list(generator.parameters()))
    assert answer.loss == pytest.approx(loss.item(), rel=1e-5)
    for name, update in answer.tensors["update"].items():
        moved = critic[name].detach() - server.weights[name]
        torch.testing.assert_close(update / weight, moved, rtol=1e-3, atol=1e-5)
    for (name, start), gradient in zip(
        {n: server.networks["generator"][n] for n, _ in generator.named_parameters()}.items(), moves, strict=True
    ):
        moved, clear = answer.tensors["generator-update"][name] / weight, gradient.abs() > 1e-4
        expected = -0.01 * (gradient + 1e-5 * start).sign()
        torch.testing.assert_close(moved[clear], expected[clear], rtol=1e-2, atol=1e-5)


def test_without_consolidation_the_first_task_is_fedavg_of_an_ac_gan(method_of: Callable, client_of: Callable) -> None:
    """All three networks are the clients' weighted means."""
    method = method_of(FedCil, *ONE_STEP, **PLAIN)
    server = method.start_task(method.create_server(), 0)
    payload, sums, total = method.make_payload(server), {}, 0.0
    assert payload.keys() == {"weights", "generator", "judge", "columns"}
    for index in range(4):
        reply, _ = method.exchanges[TRAIN].reply(client_of(method, index), payload)
        assert all(part.least == "sum" for part in reply.parts.values())
        total += reply.parts["weight"].tensors["weight"].item()
        for part in ("update", "generator-update", "judge-update"):
            for name, tensor in reply.parts[part].tensors.items():
                sums[part, name] = sums.get((part, name), 0) + tensor.double()
    after = run_round(method, server)
    for (part, name), summed in sums.items():
        of = "weights" if part == "update" else part.removesuffix("-update")
        before, now = ((s.weights if of == "weights" else s.networks[of])[name] for s in (server, after))
        torch.testing.assert_close((now - before).double(), summed / total, rtol=1e-4, atol=1e-6)


def run_round(method: FedCil, server: Any) -> Any:
    """The server after a round of all clients, in place of the engine."""
    from fclmodels.federation.client import Client
    from fclmodels.federation.engine.replies import Replies

    clients = list(method.list_participants(server.task))
    replies = Replies(clients, method.run.splits.folder / "spool")
    for index in clients:
        client = Client(index, server.task, 0, method.run, method.select_rows(server.task, index), {})
        replies.add(index, method.exchanges[TRAIN].reply(client, method.make_payload(server))[0])
    return method.aggregate(server, replies)


def trainings(method: FedCil, server: Any, client_of: Callable, memories: dict[int, Any], round: int = 0) -> dict:
    payload, made = method.make_payload(server), {}
    for index in method.list_participants(server.task):
        client = replace(client_of(method, index, server.task, memory=memories.get(index)), round=round)
        of = method.prepare_training(client, payload).find_added(GanTraining)
        made[index] = (of, None if of.past is None else of.past[1].tolist(), of.own.tolist())
    return made


def test_clients_replay_their_own_last_generator_or_the_global_one(
    method_of: Callable, client_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    method = method_of(FedCil, splits=splits_of(clients=3, train=UNEVEN), **SMALL, consolidation=1)
    server = federate(method, 1)
    memory = method.train(client_of(method, 1), method.make_payload(server)).memory
    started = method.start_task(server, 1)
    by_client = trainings(method, started, client_of, {1: memory})
    assert {index: sets for index, (_, *sets) in by_client.items()} == {1: [[0, 1], [0, 1, 2, 3]], 2: [[0, 1], [2, 3]]}
    assert all(of.server is None for of, *_ in by_client.values())
    again = trainings(method, started, client_of, {1: memory}, round=1)
    assert all(of.server is not None for of, *_ in again.values())
    # The generator that it replays is that of the task before, also after a round of this one.
    client = client_of(method, 1, 1, memory=memory)
    later = method.train(client, method.make_payload(started)).memory
    assert later["generator"]["task"] == 1
    for name, tensor in memory["generator"]["state"].items():
        assert torch.equal(later["last"]["state"][name], tensor)


def test_the_server_draws_from_each_clients_own_generator(
    method_of: Callable, client_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    """Uploads are the clients' own, to rounding; earlier ones stay for a client that comes again."""
    method = method_of(FedCil, splits=splits_of(clients=3, train=UNEVEN), **SMALL, consolidation=1)
    server = method.start_task(method.create_server(), 0)
    own = {index: method.train(client_of(method, index), method.make_payload(server)).memory for index in (0, 1)}
    after = run_round(method, server)
    uploads = after.knowledge["uploads"]
    assert uploads.keys() == {"0", "1"}
    for index, memory in own.items():
        for name, tensor in memory["generator"]["state"].items():
            if tensor.is_floating_point():
                torch.testing.assert_close(uploads[str(index)]["state"][name], tensor, rtol=1e-4, atol=1e-5)
        assert uploads[str(index)]["columns"].tolist() == [[1, 1], [1, 1]]
    ended = federate(method)
    assert ended.knowledge["uploads"].keys() == {"1", "2"}
    assert ended.knowledge["earlier"].keys() == {"0", "1"}
    assert ended.knowledge["uploads"]["1"]["columns"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert ended.knowledge["uploads"]["2"]["columns"].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1]]


def test_consolidation_moves_all_three_networks(method_of: Callable, splits_of: Callable) -> None:
    plain, method = (method_of(FedCil, **SMALL, consolidation=steps) for steps in (0, 2))
    one, other = (run_round(m, m.start_task(m.create_server(), 0)) for m in (plain, method))
    assert not torch.equal(one.weights["heads.0.weight"], other.weights["heads.0.weight"])
    for name in ("generator", "judge"):
        assert any(not torch.equal(t, other.networks[name][n]) for n, t in one.networks[name].items())
    again = run_round(method, method.start_task(method.create_server(), 0))
    assert all(torch.equal(tensor, other.weights[name]) for name, tensor in again.weights.items())


def test_a_consolidation_that_diverges_is_refused(method_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    method = method_of(FedCil, **SMALL, consolidation=2)
    measure = AcGan.measure_samples
    monkeypatch.setattr(AcGan, "measure_samples", lambda *args: measure(*args) * torch.nan)
    server = method.start_task(method.create_server(), 0)
    with pytest.raises(UserError, match=r"consolidation in round 1 diverged.* Lower methods.fed-cil.generator_lr"):
        run_round(method, server)


def test_a_stream_that_goes_on_adds_rows_to_all_generators(
    method_of: Callable, federate: Callable, client_of: Callable, splits_of: Callable
) -> None:
    """Of the server, of the clients' that it has, and of a client's own."""
    short, longer = (method_of(FedCil, splits=splits_of(tasks=n), **SMALL, consolidation=1) for n in (2, 3))
    before = federate(short)
    memory = short.train(client_of(short, 0, 1), short.make_payload(before)).memory
    server = longer.start_task(before, 2)
    states = [server.networks["generator"], *(of["state"] for of in server.knowledge["earlier"].values())]
    assert [len(state["of_class.weight"]) for state in states] == [6] * 5
    assert torch.equal(states[0]["of_class.weight"][:4], before.networks["generator"]["of_class.weight"])
    trained = longer.train(client_of(longer, 0, 2, memory=memory), longer.make_payload(server))
    assert trained.memory["columns"].tolist() == [*range(2, 6)]
    after = run_round(longer, server)
    assert all(tensor.isfinite().all() for tensor in after.networks["generator"].values())


def test_what_the_server_stores_is_said(method_of: Callable) -> None:
    method = method_of(FedCil, **SMALL)
    size = sum(tensor.nbytes for tensor in method.auxiliaries.create_initial()["generator"].values())
    assert f"two generators of each client, of {size:,} bytes" in method.list_advice()[0]
    assert method_of(FedCil, **PLAIN).list_advice() == []


def test_a_late_clients_generator_is_averaged_and_not_drawn_from(method_of: Callable) -> None:
    method = method_of(FedCil, **SMALL, consolidation=1)
    server = method.start_task(method.create_server(), 0)
    later = replace(server, knowledge={**server.knowledge, "rounds": 1})  # the answers are of round 0
    assert run_round(method, later).knowledge["uploads"] == {}
    assert run_round(method, server).knowledge["uploads"].keys() == {"0", "1", "2", "3"}


@pytest.mark.parametrize("rule", ["median", "trimmed-mean"])
def test_robust_rules_are_refused(rule: str, method_of: Callable) -> None:
    with pytest.raises(UserError, match=r"fed-cil draws images with each client's generator. Use mean"):
        method_of(FedCil, f"federation.aggregation={rule}", **SMALL)
