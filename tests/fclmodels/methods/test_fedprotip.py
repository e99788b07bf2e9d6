"""FedProTIP's exchanges at the end of a task, against NumPy on what the clients' layers really saw."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor

from fclmodels.backbones.inputs.layer_inputs import LayerInputs
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.exchange import TRAIN, Answer, Exchange, Memory
from fclmodels.federation.messages import Part, Reply
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.fedprotip import FedProTIP
from fclmodels.storage import trees

MLP = ("model.backbone=mlp", "model.hidden=24")
PAPER: dict[str, Any] = {"profile": "paper", "tip_rank": 10}
FIXED: dict[str, Any] = {"threshold_by": "fixed", "budget": 1.0}
# Each client misses some task but the first and the last; client 3 has a single sample of each of its tasks.
MISSING = {(0, 0): 8, (0, 1): 5, (1, 0): 6, (1, 2): 9, (2, 1): 7, (2, 2): 8, (0, 3): 1, (2, 3): 1}


@dataclass(frozen=True)
class Recorded(Exchange):
    """Keeps every reply: question, client, task, reply, memory."""

    answers: list[tuple[str, int, int, Reply, Memory]] = field(default_factory=list)

    def fill(self, client: Client, answer: Answer) -> Reply:
        reply = super().fill(client, answer)
        self.answers.append((self.name, client.index, client.task, reply, answer.memory))
        return reply


class Recording(FedProTIP):
    """Keeps every reply to what it asks at the end of a task."""

    def __init__(self, settings: FedProTIP.Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.answers: list[tuple[str, int, int, Reply, Memory]] = []
        for name in self.exchanges.keys() - {TRAIN}:
            self.declare(Recorded(**vars(self.exchanges[name]), answers=self.answers))

    def those(self, question: str, task: int) -> dict[int, tuple[Reply, Memory]]:
        return {c: (reply, memory) for q, c, t, reply, memory in self.answers if (q, t) == (question, task)}


def inputs_of(method: FedProTIP, server: Server, task: int, client: int) -> dict[str, np.ndarray]:
    """What an MLP's layers see of a client's images: columns [d, n], by a forward pass written out here."""
    rows = method.run.splits.select_rows(task, "train", client)
    x = (method.run.splits.images[torch.from_numpy(rows.samples)].double().numpy() / 255 - 0.5) / 0.25
    seen, x = {}, x.reshape(len(x), -1).T
    for layer in ("fc1", "fc2", "fc3"):
        seen[f"backbone.{layer}"] = x
        weight, bias = (server.weights[f"backbone.{layer}.{part}"].double().numpy() for part in ("weight", "bias"))
        x = np.maximum(weight @ x + bias[:, None], 0)
    return {**seen, "features": x}


def directions_of(tensors: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """The directions of all inputs in an answer, those of the features too."""
    return {**tensors["directions"], **tensors.get("features", {})}


def sent_by(parts: dict[str, Part]) -> dict[str, Tensor]:
    """The directions of all inputs in a reply, those of the features too."""
    return directions_of({name: part.tensors for name, part in parts.items()})


def projector(basis: Any) -> np.ndarray:
    basis = np.asarray(basis, dtype=np.float64)
    return basis @ basis.T


def mass_rank(sigma: np.ndarray, share: float) -> int:
    """eq. 8, as it is written."""
    return next(r for r in range(1, len(sigma) + 1) if sigma[:r].sum() >= share * sigma.sum())


def test_a_client_sends_the_leading_directions_of_the_residual(method_of: Callable, after_each_task: Callable) -> None:
    """eq. 6 to 8 with NumPy's SVD, in the first task and on top of what is known."""
    method = method_of(Recording, *MLP, **PAPER, threshold=0.5, threshold_step=0.1, tip_threshold=0.4)
    servers = after_each_task(method)
    for task, server in enumerate(servers):
        known = {name: np.zeros((basis.shape[0], 0)) for name, basis in server.knowledge["bases"].items()}
        if task:
            known = {name: basis.numpy() for name, basis in servers[task - 1].knowledge["bases"].items()}
        for client, (reply, _) in method.those("bases", task).items():
            assert reply.parts["directions"].least == "each"
            for name, found in sent_by(reply.parts).items():
                X = inputs_of(method, server, task, client)[name]
                if name == "features":
                    earlier = [U.numpy() for U in server.knowledge["tip"]["bases"][:task]]
                    basis, share = np.concatenate([np.zeros((24, 0)), *earlier], axis=1), 0.4
                else:
                    basis, share = known[name], 0.5 + 0.1 * task
                U, sigma, _ = np.linalg.svd(X - basis @ (basis.T @ X), full_matrices=False)
                rank = mass_rank(sigma, share)
                assert found.shape[1] == rank
                sent = U[:, :rank] * sigma[:rank] if name == "features" else U[:, :rank]
                assert_allclose(projector(found), projector(sent), atol=1e-4 * np.linalg.norm(sent, 2) ** 2)
                squares = reply.parts["spectra"].tensors[name]
                assert_allclose(squares[: len(sigma)].sqrt(), sigma, atol=1e-4 * sigma[0])
                assert_allclose(squares[len(sigma) :], 0, atol=1e-8 * sigma[0] ** 2)


def test_the_server_knows_the_union_of_what_clients_sent(method_of: Callable, after_each_task: Callable) -> None:
    """Proposition 1: span [Phi, U_1, ..., U_K], by NumPy's rank and projector."""
    method = method_of(Recording, *MLP, **PAPER, threshold=0.4)
    servers = after_each_task(method)
    for name in servers[0].knowledge["bases"]:
        sent: list[np.ndarray] = []
        for task, server in enumerate(servers):
            sent += [r.parts["directions"].tensors[name].numpy() for r, _ in method.those("bases", task).values()]
            U, sigma, _ = np.linalg.svd(np.concatenate(sent, axis=1))
            rank = int((sigma > 1e-5).sum())
            basis = server.knowledge["bases"][name]
            assert basis.shape[1] == rank == server.knowledge["ranks"][name][task]
            squares = [r.parts["spectra"].tensors[name] for r, _ in method.those("bases", task).values()]
            assert_allclose(server.knowledge["spectra"][name].square(), sum(squares), rtol=1e-4, atol=1e-6)
            assert_allclose(projector(basis), projector(U[:, :rank]), atol=1e-4)
    assert any(basis.shape[1] < basis.shape[0] for basis in servers[-1].knowledge["bases"].values())
    first = servers[0].knowledge["bases"]
    assert all(torch.equal(servers[1].knowledge["bases"][name][:, : b.shape[1]], b) for name, b in first.items())


@pytest.mark.parametrize("exchange", ["bases", "sketch"])
def test_one_threshold_joins_what_clients_sent(exchange: str, method_of: Callable, after_each_task: Callable) -> None:
    """The least r whose directions of sum_k U_k diag(sigma_k^2) U_k^T cover the share of all inputs, by NumPy.

    A sketch is so wide here that sampling hardly matters.
    """
    wide = {"exchange": "sketch", "sketch_width": 20_000} if exchange == "sketch" else {}
    method = method_of(Recording, *MLP, threshold=0.8, threshold_step=0.0, **FIXED, **wide)
    servers, before = after_each_task(method), {}
    for task, server in enumerate(servers):
        for name, basis in server.knowledge["bases"].items():
            X = np.concatenate([inputs_of(method, server, task, k)[name] for k in range(4)], axis=1)
            old = before.get(name, np.zeros((len(X), 0)))
            outside = X - old @ (old.T @ X)
            total, missing = (X**2).sum(), (outside**2).sum()
            squares = np.zeros((len(X), len(X)))
            for k in range(4):
                alone = inputs_of(method, server, task, k)[name]
                U, sigma, _ = np.linalg.svd(alone - old @ (old.T @ alone), full_matrices=False)
                energies, own = np.cumsum(sigma**2), (alone**2).sum()
                need = 0.8 * own - (own - energies[-1])
                r = int((energies < need * (1 - 1e-5)).sum()) + 1 if need > 0 else 0
                squares += (U[:, :r] * sigma[:r] ** 2) @ U[:, :r].T
            covered = total - missing + np.concatenate([[0], np.cumsum(np.linalg.eigvalsh(squares)[::-1])])
            tolerance = 0.02 * total if exchange == "sketch" else 1e-4 * total
            added = basis.shape[1] - old.shape[1]
            assert covered[added] >= 0.8 * total - tolerance
            assert added == 0 or covered[added - 1] < 0.8 * total + tolerance
        before = {name: basis.double().numpy() for name, basis in server.knowledge["bases"].items()}


def test_ten_clients_do_not_fill_a_layer_with_what_each_has_alone(method_of: Callable) -> None:
    """All see e0, and each a little of a direction of its own: a union has eleven directions, the sum needs one."""
    e = torch.eye(11)
    received = [{"layer": torch.stack([10 * e[0], e[1 + k]], dim=1)} for k in range(10)]
    energies = {"layer": torch.tensor([1010.0, 1010.0, 80, 80])}
    joined = method_of(FedProTIP).join(received, energies, 0.95)["layer"]
    assert_allclose(joined.abs(), e[:, :1], atol=1e-6)
    assert method_of(FedProTIP).join(received, energies, 1.0)["layer"].shape == (11, 11)


class Backwards(FedProTIP):
    """Takes in the clients' bases in the other order."""

    def __init__(self, settings: FedProTIP.Settings, run: Run) -> None:
        super().__init__(settings, run)
        forwards = self.core_bases.yield_directions
        self.core_bases.yield_directions = lambda replies: reversed(list(forwards(replies)))  # type: ignore[method-assign]


def test_the_union_does_not_depend_on_the_order_of_clients(method_of: Callable, federate: Callable) -> None:
    one, other = (federate(method_of(kind, *MLP, **PAPER, threshold=0.4)).knowledge for kind in (FedProTIP, Backwards))
    for name, basis in one["bases"].items():
        assert basis.shape == other["bases"][name].shape
        assert_allclose(projector(basis), projector(other["bases"][name]), atol=1e-4)
    for mine, theirs in zip(one["tip"]["bases"], other["tip"]["bases"], strict=True):
        assert mine.shape == theirs.shape


def test_the_sequential_variant_is_no_larger_and_asks_one_client_at_a_time(
    method_of: Callable, federate: Callable
) -> None:
    """Each client needs fewer directions where earlier ones have covered its inputs."""
    release = {"rank_rule": "total-energy", "threshold": 0.9, **FIXED}
    union, one_by_one = (method_of(Recording, *MLP, **release, union=kind) for kind in ("union", "sequential"))
    ranks = [federate(method, 1).knowledge["ranks"] for method in (union, one_by_one)]
    assert all(ranks[1][name][0] <= ranks[0][name][0] for name in ranks[0])
    assert any(ranks[1][name][0] < ranks[0][name][0] for name in ranks[0])
    sent = [m.those("bases", 0)[3][0].parts["directions"].tensors["backbone.fc1"].shape[1] for m in (union, one_by_one)]
    assert sent[1] < sent[0]  # the last client sees what the others have covered
    columns = federate(method_of(FedProTIP, *MLP, **release, union="sequential"), 1).knowledge["columns"]
    assert columns["backbone.fc1"] == [32, 32]  # four clients with eight images each


def test_the_very_first_client_of_the_sequential_variant_takes_a_column_less_than_its_threshold_needs(
    method_of: Callable, federate: Callable
) -> None:
    release = {"rank_rule": "total-energy", "threshold": 0.9, **FIXED}
    union, one_by_one = (method_of(Recording, *MLP, **release, union=kind) for kind in ("union", "sequential"))
    ranks = []
    for method in (union, one_by_one):
        federate(method, 1)
        directions = method.those("bases", 0)[0][0].parts["directions"].tensors
        ranks.append({name: U.shape[1] for name, U in directions.items()})
    assert any(rank > 1 for rank in ranks[0].values())
    assert ranks[1] == {name: max(rank - 1, 1) for name, rank in ranks[0].items()}


def test_the_sequential_bases_cover_every_client_up_to_the_threshold(method_of: Callable, federate: Callable) -> None:
    """GPM's criterion for the last client, on the final basis."""
    method = method_of(FedProTIP, *MLP, profile="release", threshold=0.9, tip=False)
    server = federate(method, 1)
    for client in range(4):
        for name, X in inputs_of(method, server, 0, client).items():
            if name != "features":
                inside = projector(server.knowledge["bases"][name]) @ X
                assert (inside**2).sum() >= 0.9 * (X**2).sum() * (1 - 1e-6)


def of_length_one(directions: np.ndarray) -> np.ndarray:
    """Directions of the features come with their singular values."""
    return directions / np.linalg.norm(directions, axis=0)


def test_sketches_as_wide_as_the_layer_span_the_union(method_of: Callable, federate: Callable) -> None:
    """eq. 40, and what the server may see of it: sums only."""
    methods = [method_of(Recording, *MLP, **PAPER, threshold=0.4, exchange=kind) for kind in ("bases", "sketch")]
    one, other = (federate(method, 1).knowledge for method in methods)
    for name, basis in one["bases"].items():
        assert basis.shape == other["bases"][name].shape
        assert_allclose(projector(basis), projector(other["bases"][name]), atol=2e-3)
    for client, (reply, _) in methods[1].those("bases", 0).items():
        part = reply.parts["directions"]
        assert (part.kind, part.least) == ("sketch", "sum")
        for name, sketch in part.tensors.items():
            U = of_length_one(sent_by(methods[0].those("bases", 0)[client][0].parts)[name].numpy())
            assert sketch.shape == (len(U), len(U))
            assert_allclose(sketch.numpy() - projector(U) @ sketch.numpy(), 0, atol=1e-4 * float(sketch.norm()))


def test_a_sketch_has_the_law_of_eq_40(method_of: Callable, client_of: Callable) -> None:
    """E[B B^T] = s U diag(sigma^2) U^T: over many clients, that is over many independent G."""
    method = method_of(FedProTIP, exchange="sketch", threshold=1.0, sketch_width=5)
    X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    seen, basis = LayerInputs(6, 4, 4, columns=X), {"layer": torch.zeros(6, 0)}
    total = torch.zeros(6, 6, dtype=torch.float64)
    for round in range(2000):
        client = client_of(method, 0, round=round)
        B = method.core_bases.extract(client, {"layer": seen}, basis)["directions"]["layer"].double()
        assert B.shape == (6, 5)
        total += B @ B.T / (5 * 2000)
    expected = (X @ X.T).double()
    assert_allclose(total, expected, atol=0.05 * float(expected.diagonal().max()))


def test_directions_of_small_singular_values_are_orthonormal_too(method_of: Callable, client_of: Callable) -> None:
    """Far more directions than matter, down to 1/500 of the longest: what a Gram matrix in float32 blurs."""
    method, random = method_of(FedProTIP, **PAPER, threshold=1.0), torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(d, 90, generator=random)).Q for d in (300, 90))
    X = U * torch.logspace(0, -2.7, 90) @ V.T
    seen, basis = LayerInputs(300, 90, 90, columns=X), torch.zeros(300, 0)
    blurred = seen.decompose_principal(basis)[0]
    assert (blurred.T @ blurred - torch.eye(90)).abs().max() > 1e-4
    sent = method.core_bases.extract(client_of(method, 0), {"layer": seen}, {"layer": basis})["directions"]["layer"]
    assert sent.shape == (300, 90)
    assert (sent.T @ sent - torch.eye(90)).abs().max() < 1e-5
    assert (sent @ (sent.T @ blurred) - blurred).abs().max() < 1e-5  # the same span


def test_a_narrow_sketch_bounds_what_a_task_adds(method_of: Callable, federate: Callable) -> None:
    ranks = federate(method_of(FedProTIP, *MLP, **PAPER, exchange="sketch", sketch_width=3)).knowledge["ranks"]
    assert all(of_layer == [3, 6] for of_layer in ranks.values())


@pytest.mark.parametrize("rule", ["residual-mass", "total-energy"])
def test_what_is_known_already_adds_nothing(rule: str, method_of: Callable, client_of: Callable) -> None:
    """The residual is rounding: no share of it is worth a direction. Few columns are kept, of many a Gram matrix."""
    method = method_of(FedProTIP, rank_rule=rule, threshold=1.0)
    random = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(40, 7, generator=random)).Q
    for n in (3, 60, 300, 5000):
        seen = LayerInputs(40, n, n)
        for part in (basis @ torch.randn(7, n, generator=random)).split(1000, dim=1):
            seen.add(part)
        tensors = method.core_bases.extract(client_of(method, 0), {"layer": seen.finish()}, {"layer": basis})
        assert tensors["directions"]["layer"].shape == (40, 0)


def test_global_projection_takes_the_span_out_of_the_mean_only(
    method_of: Callable, client_of: Callable, after_each_task: Callable
) -> None:
    method = method_of(FedProTIP, *MLP, **PAPER, threshold=0.4, projection="global")
    first, second = after_each_task(method)
    during = method.start_task(first, 1)
    assert set(method.make_payload(during)) == {"weights"}
    update = method.train(client_of(method, 0, 1), method.make_payload(during)).tensors["update"]
    for name, basis in first.knowledge["bases"].items():
        change = second.weights[f"{name}.weight"] - first.weights[f"{name}.weight"]
        assert float((change @ basis).norm()) < 1e-5 * float(first.weights[f"{name}.weight"].norm())
        assert float((update[f"{name}.weight"] @ basis).norm()) > 1e-2 * float(update[f"{name}.weight"].norm())


def test_bases_are_downloaded_with_the_weights(method_of: Callable, federate: Callable) -> None:
    method = method_of(FedProTIP, *MLP, **PAPER, threshold=0.4)
    assert set(method.make_payload(method.start_task(method.create_server(), 0))) == {"weights"}
    server = method.start_task(federate(method, 1), 1)
    payload = method.make_payload(server)
    sent = {name for part in ("bases", "complements") if part in payload for name in payload[part].tensors}
    assert sent == set(server.knowledge["bases"])
    assert all(payload[part].once for part in ("bases", "complements") if part in payload)


# Task identity prediction.


def reference_of(X: np.ndarray, bases: list[Tensor]) -> list[float]:
    """eq. 10 with the features at hand: root mean square length of their projections."""
    return [float(np.sqrt(((U.double().numpy().T @ X) ** 2).sum() / X.shape[1])) for U in bases]


@pytest.mark.parametrize("later", ["features", "zero"])
def test_references_are_those_of_the_features_themselves(
    later: str, method_of: Callable, after_each_task: Callable, splits_of: Callable
) -> None:
    """Clients that miss tasks, one with a single sample: each task's features at its end, on the final bases."""
    splits = splits_of(tasks=3, train=MISSING)
    method = method_of(Recording, *MLP, splits=splits, tip_later=later, tip_rank=4)
    servers = after_each_task(method)
    router = method.make_router(servers[-1])
    clients = servers[-1].knowledge["tip"]["clients"]
    assert clients == [0, 1, 2, 3]
    for client in clients:
        for task, server in enumerate(servers):
            known = (task, client) in MISSING
            assert router.has_reference[client, task].item() is known
            expected = np.zeros(3)
            if known:
                X = inputs_of(method, server, task, client)["features"]
                expected = np.array(reference_of(X, list(router.bases)))
                if later == "zero":
                    expected[task + 1 :] = 0
            assert_allclose(router.references[client, task], expected, atol=1e-4)
    kept = {client: memory for client, (_, memory) in method.those("references", 2).items()}
    if later == "zero":
        assert set(kept) == {1, 2, 3}  # only those that have the task's images are asked
        assert not any(kept.values())
    else:
        assert {c: set(m["features"]) for c, m in kept.items()} == {
            c: {str(t) for t, client in MISSING if client == c} for c in range(4)
        }
        for client, memory in kept.items():
            for task, features in memory["features"].items():
                X = inputs_of(method, servers[int(task)], int(task), client)["features"]
                assert_allclose(features, X.T, atol=1e-5)
                assert len(memory["labels"][task]) == len(features) == MISSING[int(task), client]


def test_a_tasks_basis_is_new_and_limited(method_of: Callable, federate: Callable, splits_of: Callable) -> None:
    for rank in (1, 3, None):
        bases = federate(method_of(FedProTIP, *MLP, splits=splits_of(tasks=3), tip_rank=rank)).knowledge["tip"]["bases"]
        together = torch.cat(bases, dim=1).double()
        assert_allclose(together.T @ together, np.eye(together.shape[1]), atol=1e-5)
        if rank is not None:
            assert [U.shape for U in bases] == [(24, rank)] * 3


def test_what_most_clients_share_stands_for_a_task(method_of: Callable) -> None:
    """Of three clients that found e1, e1 and e2, e1 and e3 (and what is known already): e1 first."""
    method = method_of(FedProTIP, tip_rank=1)
    e = torch.eye(6)
    known = e[:, 5:]
    found = [e[:, [1]], e[:, [2, 1]], e[:, [3, 5, 1]]]
    assert_allclose(method.identity._extract_task_basis(known, found).abs(), e[:, [1]], atol=1e-6)


@pytest.mark.parametrize("exchange", ["bases", "sketch"])
def test_a_client_with_more_data_counts_more(exchange: str, method_of: Callable, client_of: Callable) -> None:
    """Both took two columns, 9 times as long on e0 as on e1: of 2 there are, and of 200 with the axes changed."""
    method = method_of(FedProTIP, exchange=exchange, tip_rank=1, tip_threshold=1.0)
    nothing, found = {"features": torch.zeros(6, 0)}, []
    for axes, total in (([0, 1], 2), ([1, 0], 200)):
        X = torch.eye(6)[:, axes] * torch.tensor([9.0, 1.0])
        seen = {"features": LayerInputs(6, 2, total, columns=X)}
        found.append(directions_of(method.core_bases.extract(client_of(method, 0), seen, nothing))["features"])
    assert_allclose(method.identity._extract_task_basis(nothing["features"], found[:1])[0].abs(), 1, atol=0.1)
    assert_allclose(method.identity._extract_task_basis(nothing["features"], found)[1].abs(), 1, atol=0.2)


@pytest.mark.parametrize("rule", ["residual-mass", "total-energy"])
def test_features_that_mostly_lie_in_known_directions_have_some_of_their_own(
    rule: str, method_of: Callable, client_of: Callable
) -> None:
    """By energy nine tenths are covered: the task would have no relevance of its own."""
    method = method_of(FedProTIP, rank_rule=rule)
    X = torch.randn(8, 20, generator=torch.Generator().manual_seed(0))
    X[0] += 10
    seen = {name: LayerInputs(8, 20, 20, columns=X) for name in ("features", "layer")}
    tensors = method.core_bases.extract(client_of(method, 0), seen, dict.fromkeys(seen, torch.eye(8)[:, :1]))
    sent = {name: directions.shape[1] for name, directions in directions_of(tensors).items()}
    assert sent["features"] == mass_rank(np.linalg.svd(X[1:].numpy(), compute_uv=False), 0.7)
    assert (sent["layer"] == 0) == (rule == "total-energy")


def test_core_bases_are_of_sampled_columns(params_of: Callable) -> None:
    with pytest.raises(UserError, match=r"methods\.fedprotip\.patches is null; it must be a whole number"):
        params_of("methods.fedprotip.patches=null")


@pytest.mark.parametrize(
    ("settings", "refused", "accepted"),
    [
        (("sketch_width=8",), "sketch_width needs exchange: sketch", "exchange=sketch"),
        (
            ("exchange=sketch", "union=sequential", "threshold_by=fixed"),
            "union: sequential asks clients one by one",
            "exchange=bases",
        ),
        (("union=union",), "union: union needs threshold_by: fixed", "threshold_by=fixed"),
    ],
)
def test_sketches_have_a_width_and_are_only_summed(
    settings: tuple[str, ...], refused: str, accepted: str, params_of: Callable
) -> None:
    own = [f"methods.fedprotip.{setting}" for setting in settings]
    with pytest.raises(UserError, match=rf"methods\.fedprotip: {refused}"):
        params_of(*own)
    params_of(*own, f"methods.fedprotip.{accepted}")


@pytest.mark.parametrize(
    ("overrides", "tip", "head"),
    [((), True, "per-task"), ((), False, "growing"), (("model.head=growing",), True, "growing")],
)
def test_tasks_of_the_same_classes_get_a_head_each(
    overrides: tuple[str, ...], tip: bool, head: str, method_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    """But for FedProTIP(-t), and as it is set: in a shared head a predicted task would change no answer."""
    method = method_of(FedProTIP, *MLP, *overrides, splits=splits_of(same_classes=True), tip=tip)
    server = federate(method)
    assert server.spec.head == head
    assert [f"heads.{task}.weight" in server.weights for task in range(2)] == [True, head == "per-task"]
    owners = method.list_columns(server).owners.tolist()
    assert owners == ([0, 0, 1, 1] if head == "per-task" else [-1, -1])
    assert method_of(FedProTIP).run.make_spec(2).head == "growing"  # where classes differ


def test_the_mean_reference_is_the_mean_over_those_that_know_the_task(
    method_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    splits = splits_of(tasks=3, train=MISSING)
    methods = [method_of(Recording, *MLP, splits=splits, tip_reference=kind) for kind in ("each", "mean")]
    each, mean = (method.make_router(federate(method)) for method in methods)
    assert each is not None
    assert mean is not None
    assert mean.references.shape == (1, 3, 3)
    assert mean.has_reference.all()
    for task in range(3):
        assert_allclose(mean.references[0, task], each.references[each.has_reference[:, task], task].mean(0), atol=1e-5)
    replies = [reply for reply, _ in methods[1].those("references", 2).values()]
    assert {part.least for reply in replies for part in reply.parts.values()} == {"sum"}


def test_voters_are_a_fixed_part_of_those_that_took_part(
    method_of: Callable, after_each_task: Callable, splits_of: Callable
) -> None:
    splits = splits_of(tasks=3, train=MISSING)
    method = method_of(Recording, *MLP, splits=splits, tip_voters=2)
    tips = [server.knowledge["tip"] for server in after_each_task(method)]
    assert [len(method.identity.choose_reference_clients(task)) for task in range(3)] == [2, 2, 2]
    for task, tip in enumerate(tips):
        assert tip["clients"] == method.identity.list_reference_clients(task)
        known = {(client, t) for client, row in zip(tip["clients"], tip["known"], strict=True) for t in row.nonzero()}
        assert {(client, int(t)) for client, t in known} == {
            (client, t) for t in range(task + 1) for client in method.identity.choose_reference_clients(t)
        }
    asked = {client for question, client, *_ in method.answers if question == "references"}
    kept = {client for _, client, _, _, memory in method.answers if "features" in memory}
    assert kept == asked == set(method.identity.list_reference_clients(2))
    other = method_of(Recording, *MLP, splits=splits, tip_voters=2, seed=3)
    assert [
        method_of(FedProTIP, splits=splits, tip_voters=2, seed=s).identity.list_reference_clients(2) for s in range(5)
    ] != [other.identity.list_reference_clients(2)] * 5


@pytest.mark.parametrize("clients", [1, 3])
def test_a_tasks_basis_holds_the_leading_directions_of_all_clients(clients: int, method_of: Callable) -> None:
    """Each client has two strong directions of its own and many weak ones; with unit vectors all would be alike."""
    method = method_of(FedProTIP, tip_rank=2 * clients)
    Q = np.linalg.qr(np.random.default_rng(0).normal(size=(30, 30)))[0]
    strong, weak = Q[:, : 2 * clients], Q[:, 2 * clients :]
    found = [
        torch.from_numpy(np.hstack([0.1 * weak, 5.0 * strong[:, 2 * k : 2 * k + 2]])).float() for k in range(clients)
    ]
    basis = method.identity._extract_task_basis(torch.zeros(30, 0), found).numpy()
    assert_allclose(projector(basis), strong @ strong.T, atol=1e-4)


@pytest.mark.parametrize("tasks", [1, 2, 3])
def test_predictions_carry_the_routers_scores(
    tasks: int, method_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    method = method_of(FedProTIP, *MLP, splits=splits_of(tasks=3))
    server = federate(method, tasks)
    rows = method.run.splits.select_test_rows(0)
    batch = next(method.run.batches.iterate_ordered(rows, 100))
    prediction = method.make_predictor(server)(batch.inputs)
    router, network = method.make_router(server), method.networks.load(server.spec, server.weights).eval()
    features = network.backbone(batch.inputs)
    assert prediction.task_scores.shape == (len(rows), tasks)
    torch.testing.assert_close(prediction.task_scores, router.score_samples(features))
    torch.testing.assert_close(prediction.batch_scores, router.score_batch(features))
    torch.testing.assert_close(prediction.logits, network(batch.inputs))


def test_without_tip_nothing_of_it_is_asked_or_kept(method_of: Callable, federate: Callable) -> None:
    """FedProTIP(-t)."""
    method = method_of(Recording, *MLP, tip=False)
    server = federate(method)
    assert "tip" not in server.knowledge
    assert method.make_router(server) is None
    assert {question for question, *_ in method.answers} == {"bases"}
    assert all("features" not in sent_by(reply.parts) for *_, reply, _ in method.answers)
    batch = next(method.run.batches.iterate_ordered(method.run.splits.select_test_rows(0), 100))
    assert method.make_predictor(server)(batch.inputs).task_scores is None
    with_tip = federate(method_of(FedProTIP, *MLP))
    assert trees.digest(with_tip.weights) == trees.digest(server.weights)


def test_tip_tells_tasks_of_different_images_apart(
    method_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    method = method_of(FedProTIP, *MLP, "federation.rounds=8", splits=splits_of(tasks=3, test=8), tip_rank=3)
    predict = method.make_predictor(federate(method))
    right = total = 0
    for task in range(3):
        batch = next(method.run.batches.iterate_ordered(method.run.splits.select_test_rows(task), 100))
        scores = predict(batch.inputs)
        assert int(scores.batch_scores.argmax()) == task
        right, total = right + int((scores.task_scores.argmax(1) == task).sum()), total + len(batch.labels)
    assert right > 0.7 * total


# The engine.


VARIANTS = {
    "default": (),
    "release": ("profile=release", "tip_later=zero", "vectors=trained"),
    "sums": ("exchange=sketch", "tip_reference=mean", "projection=global", "tip_voters=2"),
}


class StoppedError(Exception):
    pass


class Stops(Listener):
    """Stops a run after a round of a task."""

    def on_round_done(self, row: dict[str, Any]) -> None:
        if (row["task"], row["round"]) == (1, 1):
            raise StoppedError


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_interruption_and_workers_change_no_bit(
    variant: tuple[str, ...], experiment_of: Callable, splits_of: Callable, remains: Callable, tmp_path: Path
) -> None:
    """With clients that miss tasks, partial participation, momentum and decay."""
    own = [f"methods.fedprotip.{setting}" for setting in variant]
    hard = ["optimizer.momentum=0.9", "optimizer.weight_decay=0.01", "federation.clients_per_round=2"]
    hard += ["federation.checkpoint_seconds=0", "federation.rounds=3", *MLP, *own]
    splits = splits_of(tasks=3, train=MISSING)
    plain = experiment_of(*hard, method="fedprotip", splits=splits)
    plain.run(tmp_path / "plain")
    with pytest.raises(StoppedError):
        experiment_of(*hard, method="fedprotip", splits=splits, home=tmp_path / "home", listener=Stops()).run(
            tmp_path / "again"
        )
    workers = ("federation.executor=processes", "federation.workers=2")
    again = experiment_of(*hard, *workers, method="fedprotip", splits=splits, home=tmp_path / "home")
    again.run(tmp_path / "again")
    assert remains(tmp_path / "again") == remains(tmp_path / "plain")


def test_a_profile_is_one_word_for_many_settings() -> None:
    """Those that are given stay."""
    assert FedProTIP.Settings(profile="paper").rank_rule == "residual-mass"
    release = FedProTIP.Settings(profile="release", threshold=0.5)
    assert (release.union, release.rank_rule, release.threshold_by, release.threshold) == (
        "sequential",
        "total-energy",
        "fixed",
        0.5,
    )


@pytest.mark.parametrize("start", ["earlier", "drawn"])
def test_a_domains_head_begins_as_the_last_ones(
    start: str, method_of: Callable, federate: Callable, splits_of: Callable
) -> None:
    method = method_of(FedProTIP, *MLP, splits=splits_of(same_classes=True), head_start=start)
    begun = method.start_task(federate(method, 1), 1).weights
    for part in ("weight", "bias"):
        alike = torch.equal(begun[f"heads.0.{part}"], begun[f"heads.1.{part}"])
        assert alike == (start == "earlier")
