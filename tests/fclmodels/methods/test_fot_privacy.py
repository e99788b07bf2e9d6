"""FOT's Gaussian mechanism (appendix H): what a client lets out, what the server makes of it, and what it is worth."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy.linalg import subspace_angles
from torch import Tensor

from fclmodels import state
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Part, Payload, Reply
from fclmodels.federation.server import Server
from fclmodels.methods.fot import Fot, known

LAYERS = ("backbone.fc1", "backbone.fc2", "backbone.fc3")
UNEVEN = {(task, client): 1 + 5 * client for task in range(2) for client in range(4)}
MISSING = {(0, 0): 4, (0, 1): 4, (1, 1): 4, (2, 1): 4, (2, 2): 4, (3, 2): 4}  # client 1 has most tasks, three


def question(method: Any, server: Server) -> Payload:
    size = Part("count", {"clients": torch.tensor(len(method.participants(server.task)))})
    return {**method.payload(server), **known(server), "cohort": size}


def ask(method: Any, server: Server, client: Client) -> Reply:
    return method.answer(client, "gpse", question(method, server))[0]


def total(replies: list[Reply], part: str) -> dict[str, Tensor]:
    return {name: sum(reply.parts[part].tensors[name] for reply in replies) for name in replies[0].parts[part].tensors}


def norm(tensor: Tensor) -> float:
    return float(np.linalg.norm(tensor.double().numpy()))


def test_without_noise_no_accountant_is_loaded(
    method_of: Callable, federate: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    assert federate(method_of(Fot)).knowledge["privacy"] is None
    with pytest.raises(ImportError):
        federate(method_of(Fot, dp_noise_multiplier=1.0))


@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_a_client_sends_its_clipped_sketch_and_its_share_of_the_noise(
    clip: float, method_of: Callable, client_of: Callable
) -> None:
    """Of so little noise that the rest can be seen: clipped sketches have the norm dp_clip, others are as they were."""
    plain, private = method_of(Fot), method_of(Fot, dp_noise_multiplier=1e-9, dp_clip=clip)
    server = plain.start_task(plain.setup(), 0)
    for index in range(4):
        before, after = (ask(method, server, client_of(method, index)).parts for method in (plain, private))
        for layer, sketch in before["sketch"].tensors.items():
            assert norm(sketch) > 1
            expected = sketch * min(1.0, clip / norm(sketch))
            torch.testing.assert_close(after["sketch"].tensors[layer], expected, rtol=1e-5, atol=1e-8 * clip)
            all_of_it, outside = before["energy"].tensors[layer][:2].tolist()
            assert float(after["share"].tensors[layer]) == pytest.approx(outside / all_of_it, abs=1e-7)


def test_the_noise_of_all_clients_together_is_the_multiplier_times_the_bound(
    method_of: Callable, splits_of: Callable, client_of: Callable
) -> None:
    """In the sum of sketches z dp_clip, in that of the shares z; it is new for each client, layer and task."""
    z, clip, splits = 5.0, 2.0, splits_of()
    plain, noises, shares = method_of(Fot, splits=splits), [], []
    for seed in range(12):
        quiet, loud = (method_of(Fot, splits=splits, seed=seed, dp_noise_multiplier=n, dp_clip=clip) for n in (1e-9, z))
        for task in (0, 1):
            server = plain.start_task(plain.setup(), task)
            without, with_noise = ([ask(m, server, client_of(m, k, task)) for k in range(4)] for m in (quiet, loud))
            for part, seen in (("sketch", noises), ("share", shares)):
                both = total(with_noise, part), total(without, part)
                seen += [(both[0][name] - both[1][name]).double().flatten() for name in LAYERS]
    noise, share = torch.cat(noises), torch.cat(shares)
    assert float(noise.std()) == pytest.approx(z * clip, rel=4 / (2 * len(noise)) ** 0.5)
    assert float(share.std()) == pytest.approx(z, rel=4 / (2 * len(share)) ** 0.5)
    assert abs(float(noise.mean())) < 4 * z * clip / len(noise) ** 0.5
    for i, one in enumerate(noises[:6]):
        for other in noises[:i]:
            n = min(len(one), len(other))
            assert abs(np.corrcoef(one[:n], other[:n])[0, 1]) < 4.5 / n**0.5


def test_nothing_that_tells_how_much_data_a_client_has_is_sent_in_clear(
    experiment_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    experiment = experiment_of("methods.fot.dp_noise_multiplier=1", method="fot", splits=splits_of(train=UNEVEN))
    experiment.run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet").filter(pl.col("round") == -1)
    up = ledger.filter(pl.col("direction") == "up")
    assert set(up["part"]) == {"sketch", "share"}
    assert set(up["least"]) == {"sum"}
    assert up.group_by("task", "part").agg(pl.col("bytes").n_unique())["bytes"].to_list() == [1] * 4
    knowledge = state.load(tmp_path / "run" / "knowledge" / "task-01.safetensors")
    assert knowledge["columns"] == {}
    assert "energy" not in knowledge


def test_who_does_not_join_sends_noise_whatever_its_data(
    method_of: Callable, splits_of: Callable, client_of: Callable
) -> None:
    settings = {"dp_noise_multiplier": 1.0, "dp_sample_rate": 0.5}
    one, other = (method_of(Fot, splits=splits_of(train=n), **settings) for n in (8, 5))
    server = one.start_task(one.setup(), 0)
    same = []
    for index in range(4):
        replies = [ask(method, server, client_of(method, index)) for method in (one, other)]
        digests = {state.digest({name: part.tensors for name, part in reply.parts.items()}) for reply in replies}
        same.append(len(digests) == 1)
    assert True in same
    assert False in same


def test_each_client_joins_by_itself_with_the_probability_that_is_set(method_of: Callable, client_of: Callable) -> None:
    method = method_of(Fot, dp_noise_multiplier=1e-9, dp_sample_rate=0.3)
    parts = {"sketch": Part("sketch", {}), "energy": Part("count", {"layer": torch.ones(4, dtype=torch.float64)})}
    rows = method.rows(0, 0)
    clients = [Client(index, task, -1, method.run, rows, {}) for index in range(500) for task in (0, 1)]
    joined = np.array([round(float(method.noisy(c, parts, 4)["share"].tensors["layer"])) for c in clients])
    assert set(joined) == {0, 1}
    assert joined.mean() == pytest.approx(0.3, abs=4 * (0.21 / 1000) ** 0.5)
    assert abs(np.corrcoef(joined[::2], joined[1::2])[0, 1]) < 4 / 500**0.5


@pytest.mark.parametrize(("rate", "shares", "mean"), [(1.0, 3.0, 0.75), (0.5, 1.0, 0.5), (1.0, -9.0, 0), (0.5, 9.0, 1)])
def test_the_mean_share_is_over_the_clients_that_were_expected(
    rate: float, shares: float, mean: float, method_of: Callable
) -> None:
    method = method_of(Fot, dp_noise_multiplier=2.0, dp_clip=3.0, dp_sample_rate=rate)
    sketch, sigma = torch.zeros(3, 5), torch.tensor([20.0, 15.0, 13.0])
    left, share = method.denoised(sigma, sketch, torch.tensor(shares), clients=4)
    assert share == mean
    assert left.square().tolist() == pytest.approx([400 - 5 * 36, 225 - 5 * 36 - 11, 0], abs=1e-3)


@pytest.mark.filterwarnings("ignore:Optimal order is the smallest alpha")
def test_with_hardly_any_noise_the_subspace_is_that_without(
    method_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    """Clients of equal size and a clip above all norms, so that only the noise differs."""
    plain = federate(method_of(Fot, threshold=0.8), 1)
    private = federate(method_of(Fot, threshold=0.8, dp_noise_multiplier=1e-9, dp_clip=1e5), 1)
    assert private.knowledge["ranks"] == plain.knowledge["ranks"]
    for layer, basis in plain.knowledge["bases"].items():
        assert subspace_angles(basis.numpy(), private.knowledge["bases"][layer].numpy()).max() < 1e-3


def spent(method: Any, federate: Callable, tasks: int) -> dict[str, Any]:
    return federate(method, tasks).knowledge["privacy"]


def test_epsilon_is_opacus_own_for_all_releases_of_all_tasks(method_of: Callable, federate: Callable) -> None:
    """Of each of three layers the sketch and the share, after two tasks: where all join, twelve Gaussian releases."""
    privacy = spent(method_of(Fot, dp_noise_multiplier=4.0, dp_clip=0.7, dp_delta=1e-6), federate, 2)
    rdp, prv = RDPAccountant(), PRVAccountant()
    for _ in range(12):
        rdp.step(noise_multiplier=4.0, sample_rate=1.0)
    assert privacy["epsilon"] == pytest.approx(rdp.get_epsilon(1e-6), rel=1e-12)
    for _ in range(2):
        prv.step(noise_multiplier=4.0 / 6**0.5, sample_rate=0.999999)
    assert 0.9 * privacy["epsilon"] < prv.get_epsilon(1e-6) < privacy["epsilon"]
    facts = {"noise_multiplier": 4.0, "clip": 0.7, "sample_rate": 1.0, "delta": 1e-6, "releases": 6, "rounds": 2}
    assert facts.items() <= privacy.items()
    for word in ("one client", "added or removed", "central", "secure aggregation", "Not covered: the training"):
        assert word in privacy["covers"]


def test_tasks_and_layers_raise_epsilon_and_a_sample_lowers_it(method_of: Callable, federate: Callable) -> None:
    def epsilon(tasks: int, **settings: Any) -> float:
        return spent(method_of(Fot, dp_noise_multiplier=4.0, **settings), federate, tasks)["epsilon"]

    assert epsilon(1, protect=("fc1",)) < epsilon(1) < epsilon(2)
    assert epsilon(1, dp_sample_rate=0.3) < epsilon(2, dp_sample_rate=0.3) < epsilon(2) / 1.5


def test_epsilon_is_that_of_the_client_that_was_asked_most_often(
    method_of: Callable, splits_of: Callable, federate: Callable
) -> None:
    method = method_of(Fot, splits=splits_of(tasks=4, train=MISSING), dp_noise_multiplier=4.0)
    assert [spent(method, federate, tasks)["rounds"] for tasks in (1, 2, 3, 4)] == [1, 2, 3, 3]


def test_the_result_says_what_was_spent(experiment_of: Callable, tmp_path: Path) -> None:
    result = experiment_of("methods.fot.dp_noise_multiplier=4", method="fot").run(tmp_path / "run")
    after = [state.load(tmp_path / "run" / "knowledge" / f"task-0{t}.safetensors")["privacy"] for t in (0, 1)]
    assert result["privacy"] == json.loads((tmp_path / "run" / "result.json").read_text())["privacy"] == after[1]
    assert after[0]["epsilon"] < after[1]["epsilon"]
    assert "privacy" not in experiment_of(method="fot").run(tmp_path / "plain")


@pytest.mark.parametrize("other", ["gpse=local", "rank_rule=release"])
def test_noise_with_the_releases_extraction_is_refused(other: str, params_of: Callable) -> None:
    """Its clients are not sampled by themselves, and its ratio is weighted by their numbers of samples."""
    with pytest.raises(UserError) as error:
        params_of("methods.fot.dp_noise_multiplier=1", f"methods.fot.{other}")
    assert "dp_noise_multiplier needs gpse: global and rank_rule: total-energy." in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", ["dp_clip=2.0", "dp_sample_rate=0.5", "dp_delta=1e-6"])
def test_what_concerns_the_noise_alone_is_refused_without_it(given: str, params_of: Callable) -> None:
    with pytest.raises(UserError, match=f"methods.fot: {given.partition('=')[0]} needs dp_noise_multiplier"):
        params_of(f"methods.fot.{given}")
    params_of(f"methods.fot.{given}", "methods.fot.dp_noise_multiplier=1.0")
    params_of("methods.fot.dp_clip=1.0")  # its default, as in settings that a run wrote out
