"""Noise on updates: what leaves a client, how much noise a sum has, and what the accountant is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.accountants import RDPAccountant

from fclmodels.data.splits import Splits
from fclmodels.errors import UserError
from fclmodels.federation.messages import Part, Reply
from fclmodels.federation.private import protected, worth
from fclmodels.methods.fedavg import FedAvg

UNIFORM = "federation.weighting=uniform"
Z = "federation.privacy.noise_multiplier"


def reply_of(size: int, value: float) -> Reply:
    """An update and statistics of equal size, and their weight."""
    half = {"w": torch.full((size // 2,), value)}
    weight = {"weight": torch.tensor(1.0, dtype=torch.float64)}
    return Reply(
        {"update": Part("update", half), "statistics": Part("statistics", half), "weight": Part("count", weight)}
    )


def sent(reply: Reply) -> torch.Tensor:
    return torch.cat([reply.parts[part].tensors["w"] for part in ("update", "statistics")])


@pytest.mark.parametrize(("length", "left"), [(0.3, 0.3), (2.0, 2.0), (2.1, 2.0), (1e6, 2.0)])
def test_update_and_statistics_are_clipped_together(
    length: float, left: float, method_of: Callable, client_of: Callable
) -> None:
    method = method_of(FedAvg, UNIFORM, f"{Z}=1e-9", "federation.privacy.clip=2.0")
    out = protected(reply_of(100, length / 10), method, client_of(method, 0))
    assert sent(out).norm().item() == pytest.approx(left, rel=1e-4)
    assert out.parts["weight"].tensors["weight"] == 1


@pytest.mark.parametrize(("kind", "each"), [("central", 3 * 0.5 / 2), ("local", 3 * 0.5)])
def test_four_clients_have_the_noise_of_the_sum_together_or_all_of_it_each(
    kind: str, each: float, method_of: Callable, client_of: Callable
) -> None:
    """z = 3, clip = 0.5: 1.5 in the sum of four, which is 0.75 of each; in another round it is other noise."""
    method = method_of(FedAvg, UNIFORM, f"{Z}=3", "federation.privacy.clip=0.5", f"federation.privacy.kind={kind}")
    out = [sent(protected(reply_of(20_000, 0.0), method, client_of(method, client))) for client in range(4)]
    for noise in out:
        assert noise.std().item() == pytest.approx(each, rel=0.03)
    assert sum(out).std().item() == pytest.approx(2 * each, rel=0.03)
    later = sent(protected(reply_of(20_000, 0.0), method, client_of(method, 0, round=1)))
    assert (later - out[0]).std().item() == pytest.approx(2**0.5 * each, rel=0.03)


@pytest.mark.parametrize(("kind", "seen"), [("central", 3.0), ("local", 1.5)])
def test_epsilon_is_that_of_the_client_with_most_rounds(
    kind: str, seen: float, method_of: Callable, own_splits: Callable[..., Splits]
) -> None:
    """Client 0 has both tasks of 2 and 5 rounds, the others one."""
    splits = own_splits(train={(0, 0): 4, (0, 1): 4, (1, 0): 4, (1, 2): 4})
    settings = (f"{Z}=3", f"federation.privacy.kind={kind}", "federation.rounds=[2,5]")
    method = method_of(FedAvg, UNIFORM, *settings, "federation.privacy.delta=1e-4", splits=splits)
    accountant = RDPAccountant()
    for _ in range(7):
        accountant.step(noise_multiplier=seen, sample_rate=1.0)
    found = worth(method, 2)
    assert found["epsilon"] == pytest.approx(accountant.get_epsilon(1e-4))
    assert (found["rounds"], found["delta"]) == (7, 1e-4)
    assert worth(method, 1)["rounds"] == 2


def test_a_run_tells_what_its_noise_is_worth(experiment_of: Callable, tmp_path: Path) -> None:
    """With secure aggregation it is the same noise, under the masks."""
    results = [
        experiment_of(UNIFORM, f"{Z}=0.1", *some).run(tmp_path / f"{len(some)}")
        for some in ((), ("federation.secagg.on=true",))
    ]
    assert results[0]["privacy"] == results[1]["privacy"]
    assert results[0]["privacy"]["epsilon"] > 100
    assert results[0]["metrics"] == results[1]["metrics"]
    assert "against an update of zero" in results[0]["privacy"]["covers"]


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("fedavg", (), r"federation\.weighting: samples tells"),
        ("fot", (UNIFORM,), r"methods\.fot sends sketches besides updates"),
        ("fedprotip", (UNIFORM,), r"methods\.fedprotip sends bases or sketches besides updates"),
        ("pip-dualp", (UNIFORM,), r"methods\.pip-dualp sends prototypes"),
        ("nearest-prototype", (UNIFORM,), r"methods\.nearest-prototype sends prototypes"),
        ("joint", (UNIFORM,), r"methods\.joint brings all samples to one place"),
        ("fedavg", (UNIFORM, "federation.faults.missing=0.1"), r"takes its share of the noise with it"),
    ],
)
def test_what_is_not_covered_refuses_before_the_run(
    name: str, settings: tuple[str, ...], told: str, experiment_of: Callable
) -> None:
    with pytest.raises(UserError, match=rf"^federation\.privacy: .*{told}"):
        experiment_of(f"{Z}=1", *settings, method=name)


def test_a_part_that_is_not_covered_does_not_leave(method_of: Callable, client_of: Callable) -> None:
    method: Any = method_of(FedAvg, UNIFORM, f"{Z}=1")
    with pytest.raises(UserError, match=r"sketch of methods\.fedavg is not covered"):
        protected(Reply({"sketch": Part("sketch", {})}), method, client_of(method, 0))
    assert protected(Reply({}), method, client_of(method, 0)) == Reply({})


def test_settings_without_noise_do_nothing_and_say_so(params_of: Callable) -> None:
    with pytest.raises(UserError, match="clip does nothing without noise"):
        params_of("federation.privacy.clip=2.0")
