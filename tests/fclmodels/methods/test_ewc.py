"""EWC+FL: each client's Fisher sample by sample, its penalty by autograd, and the arithmetic of several tasks."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from fclmodels.backbones.layers.norms import use_statistics_of
from fclmodels.backbones.model.spec import to_local_labels
from fclmodels.federation.client import Client
from fclmodels.federation.exchange import Answer
from fclmodels.federation.messages import Payload
from fclmodels.federation.server import Server
from fclmodels.methods.ewc import Ewc, add_penalties, fade_fisher
from fclmodels.methods.fedavg import FedAvg
from fclmodels.storage import trees

# Client 1 misses the second task, client 2 the first; client 3 has a single sample of each.
MISSING = {(0, 0): 8, (0, 1): 5, (1, 0): 6, (1, 2): 9, (2, 1): 7, (2, 2): 8, (0, 3): 1, (1, 3): 1, (2, 3): 1}
RESNET = ("model.backbone=resnet18", "federation.rounds=1")


class Recording(Ewc):
    """Keeps each client's Fisher of each task, and what it remembers then."""

    def measure_fisher(self, client: Client, network: Any) -> dict[str, Tensor]:
        fisher = super().measure_fisher(client, network)
        self.fishers = {**getattr(self, "fishers", {}), (client.task, client.index): fisher}
        return fisher

    def add_springs(self, client: Client, payload: Payload) -> Answer:
        answer = super().add_springs(client, payload)
        assert not answer.tensors
        self.memories = {**getattr(self, "memories", {}), (client.task, client.index): answer.memory}
        return answer


def log_likelihoods(method: Ewc, server: Server, client: Client) -> tuple[Any, list[Tensor], Tensor]:
    """The network, log p [C] of each sample on its own, and their labels' columns."""
    network = method.networks.load(server.spec, {**server.weights, **client.memory.get("personal", {})}).eval()
    network.requires_grad_(True)
    (batch,) = method.run.batches.iterate_ordered(client.rows, 100)
    task = client.task if server.spec.head == "per-task" or method.run.params.model.loss_over == "task" else None
    columns = batch.labels if task is None else to_local_labels(server.spec, task, batch.labels)
    with use_statistics_of(network, batch.inputs):
        return network, [network(x[None], task).log_softmax(1)[0] for x in batch.inputs], columns


def squared(network: Any, value: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*network.named_parameters(), strict=True)
    gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    return {name: torch.zeros(()) if g is None else g**2 for name, g in zip(names, gradients, strict=True)}


@pytest.mark.parametrize(
    ("overrides", "head"),
    [
        ((), "growing"),
        (("model.loss_over=task",), "growing"),
        ((), "per-task"),
        (RESNET, "growing"),
        ((*RESNET, "methods.ewc.batch_norm=batch"), "growing"),
        ((*RESNET, "methods.ewc.batch_norm=local"), "growing"),
    ],
)
def test_the_empirical_fisher_is_the_mean_of_squared_gradients(
    overrides: tuple[str, ...],
    head: str,
    method_of: Callable,
    client_of: Callable,
    splits_of: Callable,
    federate: Callable,
) -> None:
    policy = next((o.split("=")[1] for o in overrides if "batch_norm" in o), "average")
    splits = splits_of(head=head, train=MISSING, tasks=3)
    method = method_of(Recording, *overrides, splits=splits, labels="data", batch_norm=policy)
    server = federate(method, 2)
    for index in (0, 2, 3):
        client = client_of(method, index, 1, memory=method.memories[1, index])
        network, log_p, columns = log_likelihoods(method, server, client)
        expected = [squared(network, p[c]) for p, c in zip(log_p, columns, strict=True)]
        fisher = method.fishers[1, index]
        moved = {n for n in server.weights if n.startswith("backbone.") and "running" not in n and "num_b" not in n}
        assert fisher.keys() == (moved if head == "per-task" else moved | {"heads.0.weight", "heads.0.bias"})
        for name, value in fisher.items():
            mean = torch.stack([of_sample[name] for of_sample in expected]).mean(0)
            torch.testing.assert_close(value, mean, rtol=1e-4, atol=1e-4 * float(mean.max()) + 1e-12)


def test_over_all_random_signs_it_is_the_expectation_over_the_models_labels(
    method_of: Callable, client_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sum_c p_c (grad log p_c)^2, which the mean over all 2^C patterns of signs equals."""
    method = method_of(Ewc)
    server = method.start_task(method.create_server(), 0)
    client = client_of(method, 0)
    network, log_p, _ = log_likelihoods(method, server, client)
    expected = [squared(network, p[c]) for p in log_p for c in range(len(p))]
    weights = torch.cat([p.detach().exp() for p in log_p]) / len(log_p)
    found = []
    for signs in itertools.product((0, 1), repeat=2):
        monkeypatch.setattr(torch, "randint", lambda _, shape, signs=signs, **__: torch.tensor([signs]).expand(shape))
        found.append(method.measure_fisher(client, network))
    for name, of_samples in found[0].items():
        exact = sum(w * square[name] for w, square in zip(weights, expected, strict=True))
        torch.testing.assert_close(torch.stack([f[name] for f in found]).mean(0), exact, rtol=1e-4, atol=1e-9)
        assert not torch.allclose(of_samples, exact, rtol=0.05, atol=0) or name == "heads.0.bias"


def test_at_most_so_many_samples_are_looked_at(method_of: Callable, client_of: Callable) -> None:
    method = method_of(Ewc, samples=3, labels="data")
    server = method.start_task(method.create_server(), 0)
    network, log_p, columns = log_likelihoods(method, server, client_of(method, 0))
    fisher = method.measure_fisher(client_of(method, 0), network)["heads.0.bias"]
    each = [squared(network, p[c])["heads.0.bias"] for p, c in zip(log_p, columns, strict=True)]
    means = [torch.stack(some).mean(0) for some in itertools.combinations(each, 3)]
    assert sum(torch.allclose(fisher, mean, rtol=1e-4) for mean in means) >= 1


@pytest.mark.parametrize("lam", [0.0, 0.5, 40.0])
def test_the_gradient_is_autograds_of_the_penalised_objective(
    lam: float, method_of: Callable, client_of: Callable, federate: Callable, training_on: Callable
) -> None:
    """lambda/2 F (w - W*)^2, on the rows that the head had when the first task ended."""
    method = method_of(Recording, **{"lambda": lam})
    ended = federate(method, 1)
    server = method.start_task(ended, 1)
    client = client_of(method, 1, 1, memory=method.memories[0, 1])
    network = method.networks.load(server.spec, server.weights)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.1)
    training = training_on(method, client, method.make_payload(server), network, server.weights)
    batch = next(next(client.yield_epochs()))
    penalty = sum(
        (method.fishers[0, 1][name] * (w[: len(ended.weights[name])] - ended.weights[name]) ** 2).sum()
        for name, w in network.named_parameters()
    )
    objective = cross_entropy(network(batch.inputs), batch.labels) + lam / 2 * penalty
    expected = torch.autograd.grad(objective, list(network.parameters()))
    network.zero_grad()
    method.compute_loss(training, batch).backward()
    method.change_gradients(training)
    for parameter, gradient in zip(network.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_one_step_by_hand(method_of: Callable, client_of: Callable, federate: Callable) -> None:
    """Gradient descent from W*: the spring is slack there, so it takes a second step to feel it."""
    method = method_of(
        Recording, "federation.batch_size=8", "federation.local_epochs=2", "optimizer.lr=0.1", **{"lambda": 9.0}
    )
    server = method.start_task(federate(method, 1), 1)
    memory = method.memories[0, 0]
    answer = method.train(client_of(method, 0, 1, memory=memory), method.make_payload(server))
    assert answer.memory == memory
    network = method.networks.load(server.spec, server.weights)
    for first_batch in client_of(method, 0, 1).yield_epochs():
        (batch,) = first_batch
        gradients = torch.autograd.grad(cross_entropy(network(batch.inputs), batch.labels), list(network.parameters()))
        with torch.no_grad():
            for (name, w), g in zip(network.named_parameters(), gradients, strict=True):
                old, F = len(memory["fisher"][name]), memory["fisher"][name]
                pull = torch.cat([9.0 * F * (w[:old] - memory["centre"][name]), torch.zeros_like(w[old:])])
                w -= 0.1 * (g + pull)
    for name, w in network.named_parameters():
        moved = answer.tensors["update"][name] / 8
        torch.testing.assert_close(moved, w.detach() - server.weights[name], rtol=1e-4, atol=1e-6)


Trees = dict[str, Tensor]


def spring(seed: int, rows: int) -> tuple[Trees, Trees]:
    random = torch.Generator().manual_seed(seed)
    F = torch.rand(rows, 2, generator=random, dtype=torch.float64) - 0.4
    return {"w": F.clamp(min=0)}, {"w": torch.randn(rows, 2, generator=random, dtype=torch.float64)}


@given(st.integers(0, 999), st.lists(st.integers(1, 4), min_size=2, max_size=5))
def test_springs_added_up_pull_as_all_of_them_do(seed: int, rows: list[int]) -> None:
    """sum_t F_t (w - c_t) = F (w - c), with tasks whose heads grow."""
    springs = [spring(seed + i, count) for i, count in enumerate(sorted(rows))]
    F, c = springs[0]
    for further in springs[1:]:
        F, c = add_penalties((F, c), further)
    w = torch.linspace(-2, 2, 2 * max(rows), dtype=torch.float64).view(-1, 2)
    expected = torch.zeros_like(w)
    for fisher, centre in springs:
        expected[: len(fisher["w"])] += fisher["w"] * (w[: len(fisher["w"])] - centre["w"])
    torch.testing.assert_close(F["w"] * (w - c["w"]), expected)
    assert c["w"].isfinite().all()


@pytest.mark.parametrize("penalty", ["separate", "online"])
def test_memories_after_several_tasks(
    penalty: str, method_of: Callable, after_each_task: Callable, splits_of: Callable
) -> None:
    """Those of a client that has all tasks, of one that misses the second, and of one that joins at the second."""
    fading = {"gamma": 0.5} if penalty == "online" else {}
    method = method_of(Recording, splits=splits_of(tasks=3, train=MISSING), penalty=penalty, **fading)
    servers = after_each_task(method)
    assert method.memories.keys() == MISSING.keys()
    name = "heads.0.weight"
    for index in range(4):
        had = [task for task in range(3) if (task, index) in MISSING]
        memory = method.memories[had[-1], index]
        fishers = [method.fishers[task, index][name] for task in had]
        centres = [servers[task].weights[name] for task in had]
        if penalty == "online":
            assert torch.equal(memory["centre"][name], centres[-1])
            weights = [0.5 ** (len(had) - 1 - i) for i in range(len(had))]
        else:
            weights = [1.0] * len(had)
            pulls = torch.zeros_like(fishers[-1])
            for fisher, centre in zip(fishers, centres, strict=True):
                pulls[: len(fisher)] += fisher * centre
            torch.testing.assert_close(memory["fisher"][name] * memory["centre"][name], pulls)
        total = torch.zeros_like(fishers[-1])
        for weight, fisher in zip(weights, fishers, strict=True):
            total[: len(fisher)] += weight * fisher
        torch.testing.assert_close(memory["fisher"][name], total)
    assert all(not server.knowledge for server in servers)


def test_fading_to_nothing_leaves_the_last_task() -> None:
    (old, _), (new, _) = spring(1, 2), spring(2, 3)
    assert torch.equal(fade_fisher(old, new, 0.0)["w"], new["w"])


def test_without_weight_it_is_fedavg_to_the_bit(method_of: Callable, federate: Callable) -> None:
    hard = ("optimizer.momentum=0.9", "optimizer.weight_decay=0.1", "model.dropout=[0.2, 0.5]")
    fedavg = trees.digest(federate(method_of(FedAvg, *hard)).to_tree())
    assert trees.digest(federate(method_of(Ewc, *hard, **{"lambda": 0.0})).to_tree()) == fedavg
    assert trees.digest(federate(method_of(Ewc, *hard, **{"lambda": 1.0})).to_tree()) != fedavg


def test_a_stiffer_spring_leaves_important_weights_nearer(
    method_of: Callable, client_of: Callable, federate: Callable
) -> None:
    first = method_of(Recording)
    server = first.start_task(federate(first, 1), 1)
    memory, stretches = first.memories[0, 0], []
    for lam in (0.0, 10.0, 100.0):
        method = method_of(Ewc, "federation.local_epochs=5", "optimizer.lr=0.01", **{"lambda": lam})
        update = method.train(client_of(method, 0, 1, memory=memory), method.make_payload(server)).tensors["update"]
        stretches.append(sum(float((F * update[name][: len(F)] ** 2).sum()) for name, F in memory["fisher"].items()))
    assert stretches == sorted(stretches, reverse=True)
    assert stretches[-1] < stretches[0] / 4


def test_frozen_blocks_and_old_heads_have_no_springs(
    method_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    method = method_of(Recording, "model.freeze=[fc1]", splits=splits_of(head="per-task"))
    federate(method, 2)
    for memory in method.memories.values():
        assert {name.rpartition(".")[0] for name in memory["fisher"]} == {"backbone.fc2", "backbone.fc3"}
        assert memory["centre"].keys() == memory["fisher"].keys()


def test_where_all_is_frozen_but_new_heads_there_is_nothing_to_hold(
    method_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    settings = ("model.freeze=[fc1,fc2,fc3]",)
    splits = splits_of(head="per-task")
    mine, fedavg = (federate(method_of(kind, *settings, splits=splits)) for kind in (Ewc, FedAvg))
    assert trees.digest(mine.weights) == trees.digest(fedavg.weights)


def test_gamma_is_for_a_running_fisher() -> None:
    with pytest.raises(ValueError, match="gamma needs penalty: online"):
        Ewc.Settings(gamma=0.5)
