"""Layers that are too wide for matrices of d x d: what they cost, and that little is lost."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fclmodels.backbones.inputs import layer_inputs
from fclmodels.backbones.inputs.layer_inputs import LayerInputs
from fclmodels.data.splits.split_reader import Splits
from fclmodels.methods.fedprotip import FedProTIP
from fclmodels.methods.fot import Fot
from fclmodels.methods.parts import protected_subspace
from fclmodels.numerics import subspace
from fclmodels.numerics.sketch import gaussian_sketch
from fclmodels.numerics.subspace import extend, principal, rank_by_energy, residual

MOST_MEGABYTES = 1000  # Python, torch and the libraries among them
RUN = """
import json, sys
from pathlib import Path
import torch
from fclmodels import machine
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.settings.load import load_params
torch.set_num_threads(1)
settings, method, splits, home = sys.argv[1:5]
with Experiment(load_params(settings, sys.argv[5:]), method, 0, Splits.open(Path(splits)), Path(home)) as experiment:
    experiment.run(Path(home) / "run")
print(json.dumps(machine.read_peak_memory() / 2**20))
"""
LAYER = """
import json, torch
from fclmodels import machine
from fclmodels.backbones.inputs.layer_inputs import LayerInputs
from fclmodels.numerics.subspace import extend, principal
torch.set_num_threads(1)
d, random, basis = 16384, torch.Generator().manual_seed(0), torch.zeros(16384, 0)
for task in range(2):
    X = LayerInputs(d, 3000, 3000)
    for _ in range(10):
        X.add(torch.randn(d, 300, generator=random))
    U, sigma = principal(X.finish().draw_sketch(basis, 768, random))
    X.measure_energy(), X.measure_energy(basis), X.decompose_principal(basis)
    basis = extend(basis, U[:, :500])
assert basis.shape == (d, 768), basis.shape
print(json.dumps(machine.read_peak_memory() / 2**20))
"""


def run_python(*arguments: str) -> float:
    """Return what the program printed, the megabytes of its peak."""
    end = subprocess.run([sys.executable, "-c", *arguments], capture_output=True, check=False, text=True)
    assert end.returncode == 0, end.stderr[-2000:]
    return float(json.loads(end.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fot", "{}"),
        pytest.param("fedprotip", "{exchange: sketch, tip_reference: mean}", marks=pytest.mark.slow),
        pytest.param("fedprotip", "{}", marks=pytest.mark.slow),
        pytest.param("gpm", "{}", marks=pytest.mark.slow),
    ],
)
def test_a_layer_of_16384_inputs_takes_less_than_a_gigabyte(
    method: str, settings: str, params_file: Path, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    """Of photographs of 128 x 128 pixels, straight into a linear layer: both the clients' work and the server's."""
    splits = splits_of(shape=(1, 128, 128), clients=2, train=12, test=1)
    overrides = ("model.hidden=4", "federation.rounds=1", f"methods.{method}={settings}")
    assert run_python(RUN, str(params_file), method, str(splits.folder), str(tmp_path), *overrides) < MOST_MEGABYTES


@pytest.mark.slow
def test_many_columns_of_16384_inputs_and_a_basis_without_room_take_less_than_a_gigabyte() -> None:
    assert run_python(LAYER) < MOST_MEGABYTES


@pytest.fixture
def narrow_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of 400 inputs is wide, and has room for 100 columns."""
    for module in (subspace, layer_inputs, protected_subspace):
        monkeypatch.setattr(module, "WIDE", 50)
    monkeypatch.setattr(subspace, "LARGEST", 400 * 100)


def decaying(seed: int, d: int, n: int) -> Tensor:
    """Return columns [d, n] whose singular values fall, as those of photographs do."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.arange(1, d + 1).float() ** -1.0
    directions = torch.linalg.qr(torch.randn(d, d, generator=random)).Q
    return directions * lengths @ torch.randn(d, n, generator=random)


def observe(X: Tensor) -> LayerInputs:
    inputs = LayerInputs(len(X), X.shape[1], 2 * X.shape[1])
    for part in X.split(37, dim=1):
        inputs.add(part)
    return inputs.finish()


@pytest.mark.usefixtures("narrow_is_wide")
@pytest.mark.parametrize("n", [60, 100, 101, 200, 1500])
def test_a_wide_layers_leading_directions_are_those_of_all_columns(n: int) -> None:
    X, basis = decaying(0, 400, n), torch.linalg.qr(decaying(1, 400, 5)).Q
    inputs = observe(X)
    assert inputs.columns is not None
    assert inputs.columns.shape[1] <= 128
    assert inputs.measure_energy() == pytest.approx(2 * float(X.square().sum()), rel=1e-4)
    assert inputs.measure_energy(basis) == pytest.approx(2 * float(residual(X, basis).square().sum()), rel=1e-2)
    U, sigma = inputs.decompose_principal(basis)
    exact, lengths, _ = torch.linalg.svd(residual(X, basis), full_matrices=False)
    torch.testing.assert_close(sigma[:20], lengths[:20], rtol=2e-2, atol=0)
    angles = torch.linalg.svdvals(U[:, :20].T @ exact[:, :30])
    assert angles.min() > 0.98


@pytest.mark.usefixtures("narrow_is_wide")
def test_a_random_range_finder_gives_the_basis_of_the_columns_themselves() -> None:
    """Of the sum of two clients' sketches, each with as many columns as there is room for."""
    X = [decaying(0, 400, 80), decaying(0, 400, 90)]
    random = torch.Generator().manual_seed(1)
    U, sigma = principal(sum(gaussian_sketch(of_one, 100, random) for of_one in X))
    lengths = torch.linalg.svdvals(torch.cat(X, dim=1))
    rank, expected = rank_by_energy(sigma, 1.0, 0.9), rank_by_energy(lengths, 1.0, 0.9)
    assert abs(rank - expected) <= 2
    covered = (U[:, :rank].T @ torch.cat(X, dim=1)).square().sum() / lengths.square().sum()
    assert covered == pytest.approx(0.9, abs=0.02)


@pytest.mark.usefixtures("narrow_is_wide")
def test_a_wide_basis_takes_the_longest_directions_that_it_has_room_for() -> None:
    basis = torch.linalg.qr(decaying(0, 400, 70)).Q
    D = torch.linalg.qr(decaying(1, 400, 60)).Q * torch.linspace(1, 60, 60)
    grown = extend(basis, D)
    assert grown.shape == (400, 100)
    assert torch.equal(grown[:, :70], basis)
    assert (grown.T @ grown - torch.eye(100)).abs().max() < 1e-5
    expected = torch.linalg.svd(residual(D, basis), full_matrices=False).U[:, :30]
    torch.testing.assert_close(grown[:, 70:] @ grown[:, 70:].T, expected @ expected.T, atol=1e-4, rtol=0)
    assert extend(grown, D) is grown


@pytest.mark.usefixtures("narrow_is_wide")
@pytest.mark.parametrize("kind", [Fot, FedProTIP])
def test_a_run_says_which_layers_have_no_room_left(
    kind: type, method_of: Callable, splits_of: Callable, federate: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subspace, "LARGEST", 108 * 10)
    method = method_of(kind, splits=splits_of(shape=(3, 6, 6)), threshold=0.99, threshold_by="fixed", budget=1.0)
    server = federate(method, 2)
    assert server.knowledge["bases"]["backbone.fc1"].shape == (108, 10)
    (line,) = (line for line in method.list_remarks(server.knowledge) if "memory" in line)
    assert line.startswith("backbone.fc1: its basis has all 10 columns that a layer of 108 inputs may have")


def test_a_large_residual_is_that_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    X, basis = decaying(0, 60, 50), torch.linalg.qr(decaying(1, 60, 5)).Q
    at_once = residual(X, basis)
    monkeypatch.setattr(subspace, "PART", 60 * 7)
    torch.testing.assert_close(residual(X, basis), at_once, atol=1e-6, rtol=0)
    torch.testing.assert_close(residual(X.T.contiguous().T, basis), at_once, atol=1e-6, rtol=0)
