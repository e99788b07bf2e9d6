"""FOT under the Gaussian mechanism (appendix H): what a client lets out, and what the server makes of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from scipy.linalg import subspace_angles
from torch import Tensor

from fclmodels.federation.client import Client
from fclmodels.federation.messages import Reply
from fclmodels.federation.protection.privacy import add_noise
from fclmodels.federation.server import Server
from fclmodels.methods.fot import Fot
from fclmodels.storage import trees

LAYERS = ("backbone.fc1", "backbone.fc2", "backbone.fc3")
UNEVEN = {(task, client): 1 + 5 * client for task in range(2) for client in range(4)}
UNIFORM = "federation.weighting=uniform"
Z = "federation.privacy.noise_multiplier"


def ask(method: Any, server: Server, client: Client) -> Reply:
    reply = method.gpse.reply(client, method.make_gpse_payload(server))[0]
    return add_noise(reply, method, client, 4) if method.is_private else reply


def total(replies: list[Reply], part: str) -> dict[str, Tensor]:
    return {name: sum(reply.parts[part].tensors[name] for reply in replies) for name in replies[0].parts[part].tensors}


def norm(tensor: Tensor) -> float:
    return float(np.linalg.norm(tensor.double().numpy()))


@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_a_client_sends_its_clipped_sketches_and_shares(clip: float, method_of: Callable, client_of: Callable) -> None:
    """With so little noise that the rest can be seen: clipped sketches have the norm sketch_clip, others their own."""
    plain, private = method_of(Fot), method_of(Fot, f"{Z}=1e-9", UNIFORM, sketch_clip=clip)
    server = plain.start_task(plain.create_server(), 0)
    for index in range(4):
        before, after = (ask(method, server, client_of(method, index)).parts for method in (plain, private))
        for layer, sketch in before["sketch"].tensors.items():
            assert norm(sketch) > 1
            expected = sketch * min(1.0, clip / norm(sketch))
            torch.testing.assert_close(after["sketch"].tensors[layer], expected, rtol=1e-5, atol=1e-8 * clip)
            all_of_it, outside = before["energy"].tensors[layer][:2].tolist()
            assert float(after["share"].tensors[layer]) == pytest.approx(outside / all_of_it, abs=1e-7)


def test_the_noise_of_all_clients_together_is_what_six_releases_compose_to(
    method_of: Callable, splits_of: Callable, client_of: Callable
) -> None:
    """Three layers, each with a sketch and a share: in the sum sqrt(6) z sketch_clip, and sqrt(6) z."""
    z, clip, splits = 5.0, 2.0, splits_of()
    noises, shares = [], []
    for seed in range(12):
        quiet, loud = (
            method_of(Fot, f"{Z}={n}", UNIFORM, splits=splits, seed=seed, sketch_clip=clip) for n in (1e-9, z)
        )
        server = quiet.start_task(quiet.create_server(), 0)
        without, with_noise = ([ask(m, server, client_of(m, k)) for k in range(4)] for m in (quiet, loud))
        for part, seen in (("sketch", noises), ("share", shares)):
            both = total(with_noise, part), total(without, part)
            seen += [(both[0][name] - both[1][name]).double().flatten() for name in LAYERS]
    noise, share = torch.cat(noises), torch.cat(shares)
    assert float(noise.std()) == pytest.approx(6**0.5 * z * clip, rel=4 / (2 * len(noise)) ** 0.5)
    assert float(share.std()) == pytest.approx(6**0.5 * z, rel=4 / (2 * len(share)) ** 0.5)
    assert abs(float(noise.mean())) < 4 * 6**0.5 * z * clip / len(noise) ** 0.5


def test_nothing_that_tells_how_much_data_a_client_has_is_sent_in_clear(
    experiment_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    experiment_of(f"{Z}=1", UNIFORM, method="fot", splits=splits_of(train=UNEVEN)).run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet")
    up = ledger.filter(pl.col("direction") == "up")
    assert set(up.filter(pl.col("round") == -1)["part"]) == {"sketch", "share"}
    assert set(up.filter(pl.col("round") >= 0)["part"]) == {"update", "weight"}
    assert set(up["least"]) == {"sum"}
    assert set(up.group_by("task", "round", "part").agg(pl.col("bytes").n_unique())["bytes"]) == {1}
    knowledge = trees.load(tmp_path / "run" / "knowledge" / "task-01.safetensors")
    assert knowledge["columns"] == {}
    assert "energy" not in knowledge


@pytest.mark.parametrize(("rate", "shares", "mean"), [(1.0, 3.0, 0.75), (0.5, 1.0, 0.5), (1.0, -9.0, 0), (0.5, 9.0, 1)])
def test_the_mean_share_is_over_the_clients_that_were_expected(
    rate: float, shares: float, mean: float, method_of: Callable
) -> None:
    """Of four clients, each of which joins at this rate."""
    method = method_of(Fot, f"{Z}=1", UNIFORM, f"federation.privacy.sample_rate={rate}")
    sums = {"sketch": {"a": torch.zeros(3, 5)}, "share": {"a": torch.tensor(shares)}, "noise": 6.0, "clients": 4}
    denoised, share = method.read_noisy("a", torch.tensor([20.0, 15.0, 13.0]), sums)
    assert share == mean
    assert denoised.square().tolist() == pytest.approx([400 - 5 * 36, 225 - 5 * 36 - 11, 0], abs=1e-3)


def test_with_hardly_any_noise_on_sketches_the_subspace_is_that_without(
    method_of: Callable, federate: Callable
) -> None:
    """Clients of equal size and a clip above all norms, so that only the noise differs; none is on updates."""
    plain = federate(method_of(Fot, threshold=0.8, threshold_by="fixed"), 1)
    alone = (f"{Z}=1e-9", "federation.privacy.covers=knowledge")
    private = federate(method_of(Fot, *alone, threshold=0.8, sketch_clip=1e5), 1)
    assert private.knowledge["ranks"] == plain.knowledge["ranks"]
    for layer, basis in plain.knowledge["bases"].items():
        assert subspace_angles(basis.numpy(), private.knowledge["bases"][layer].numpy()).max() < 1e-3


def test_coins_leave_the_subspace_of_those_who_joined(method_of: Callable, federate: Callable) -> None:
    """The share is over the clients expected, so that a threshold means the same."""
    alone = (f"{Z}=1e-9", "federation.privacy.covers=knowledge", "federation.privacy.sample_rate=0.5")
    ranks = federate(method_of(Fot, *alone, threshold=0.8, sketch_clip=1e5), 1).knowledge["ranks"]
    assert all(rank[0] > 0 for rank in ranks.values())


@pytest.mark.parametrize("rule", ["total-energy", "paper", "release"])
def test_noise_that_is_not_subtracted_fills_the_bases(rule: str, method_of: Callable, federate: Callable) -> None:
    """Appendix H's noise for epsilon 5, delta 1e-5 and clip 1: 0.685 in each number of the sum, whatever C."""
    std = (np.log(1.25e5) / 25) ** 0.5
    assert std == pytest.approx(0.685, abs=1e-3)
    noise = (f"{Z}={std / 6**0.5}", "federation.privacy.covers=knowledge")
    ranks = {}
    for denoise in (True, False):
        method = method_of(Fot, *noise, rank_rule=rule, threshold=0.9, budget=1.0, sketch_denoise=denoise)
        ranks[denoise] = sum(rank[0] for rank in federate(method, 1).knowledge["ranks"].values())
    assert ranks[False] > 0.5 * (36 + 12 + 12)
    assert ranks[True] < 0.5 * ranks[False]
