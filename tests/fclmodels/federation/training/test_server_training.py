"""The server's own training: a kill inside of it changes no bit, and its costs are noted."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor, nn

from fclmodels import tables
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.training import server_training
from fclmodels.federation.training.optimisers import make_optimiser
from fclmodels.federation.training.server_training import NetworkTraining, ServerTraining, ServerWork
from fclmodels.settings.schema import OptimizerSettings
from fclmodels.storage import trees

HARD = ("model.backbone=noisy", "federation.clients_per_round=3", "federation.checkpoint_seconds=0")
WORKS = [("learn", "before"), ("conclude", "after"), ("conclude", "after that")]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def splits(splits_of: Callable[..., Splits]) -> Splits:
    return splits_of()


@pytest.fixture(scope="module")
def undisturbed(
    toys: Path, new_experiment: Callable[..., Experiment], splits: Splits, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    home = tmp_path_factory.mktemp("undisturbed")
    with new_experiment(*HARD, method="server-student", splits=splits, home=home) as experiment:
        experiment.run(home / "run")
    return home / "run"


def read_costs(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(folder / "costs.parquet")


def test_costs_have_a_row_for_each_work_in_its_step(undisturbed: Path) -> None:
    costs = read_costs(undisturbed)
    assert costs.schema == tables.COSTS
    assert costs.select("task", "stage", "work").rows() == [(task, *work) for task in range(2) for work in WORKS]
    assert costs.select(pl.col("steps", "device", "threads").unique()).rows() == [(6, "cpu", 2)]
    assert costs.select((pl.col("seconds") > 0).all(), (pl.col("peak_bytes") > 2**24).all()).row(0) == (True, True)
    assert costs["loss"].is_finite().all()
    assert not (undisturbed / "nothing.parquet").exists()


def test_a_method_whose_server_does_not_train_has_no_costs(
    experiment_of: Callable[..., Experiment], splits: Splits, tmp_path: Path
) -> None:
    experiment_of(splits=splits).run(tmp_path / "run")
    assert not (tmp_path / "run" / "costs.parquet").exists()


@pytest.mark.parametrize(
    ("seconds", "nth"),
    [pytest.param("0", 5, marks=pytest.mark.slow), ("1e6", 8)],
    ids=["saved after every step", "saved after each work"],
)
def test_deaths_in_its_steps_change_no_bit(
    seconds: str,
    nth: int,
    undisturbed: Path,
    forks: Any,
    splits: Splits,
    remains: Callable[[Path], dict[str, Any]],
) -> None:
    """Each process kills itself (SIGKILL) after so many steps of the server's, until one comes through."""
    overrides = (*HARD, f"federation.checkpoint_seconds={seconds}")
    die = partial(
        forks.run, seconds, method="server-student", splits=splits, overrides=overrides, die=("step", "after", nth)
    )
    kills = list(iter(die, 0))
    assert len(kills) >= 3
    assert {*kills} == {-signal.SIGKILL}
    assert remains(forks.folder(seconds)) == remains(undisturbed)
    differing = ("seconds", "peak_bytes")
    assert read_costs(forks.folder(seconds)).drop(differing).equals(read_costs(undisturbed).drop(differing))


def test_its_progress_is_told_step_by_step(
    toys: Path, experiment_of: Callable[..., Experiment], splits: Splits, tmp_path: Path
) -> None:
    steps: list[tuple[int, str, int, int]] = []

    class Notes(Listener):
        def on_server_step(self, task: int, work: str, done: int, of: int) -> None:
            steps.append((task, work, done, of))

    experiment_of(*HARD, method="server-student", splits=splits, listener=Notes()).run(tmp_path / "run")
    assert steps == [(task, work, done, 6) for task in range(2) for _, work in WORKS for done in range(1, 7)]


# The training by itself.


def noisy_work(losses: list[float] | None = None) -> tuple[NetworkTraining, nn.Module]:
    """A work that draws from torch's global generator in each step."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    optimiser = make_optimiser(OptimizerSettings(kind="adam", lr=0.1), list(network.parameters()), 0)

    def loss(number: int) -> Tensor:
        if losses is not None and len(losses) == number:
            raise KeyboardInterrupt
        return network(torch.randn(5, 3)).square().mean()

    return NetworkTraining("work", {"network": network}, [optimiser], loss), network


def training_in(folder: Path, save_seconds: float = 0.0, **more: Any) -> ServerTraining:
    folder.mkdir(exist_ok=True)
    return ServerTraining(folder, (3, "test"), CPU, 1, save_seconds, **more)


@pytest.mark.parametrize("save_seconds", [0.0, 1e9])
def test_it_goes_on_from_what_was_saved(save_seconds: float, tmp_path: Path) -> None:
    work, network = noisy_work()
    training_in(tmp_path / "whole").run(work, 8)
    half, _ = noisy_work()
    rows: list[dict[str, Any]] = []
    training_in(tmp_path / "half", save_seconds).run(half, 3)
    rest, other = noisy_work()
    torch.manual_seed(99)
    training_in(tmp_path / "half", save_seconds, note=rows.append).run(rest, 8)
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in network.state_dict().items())
    assert [row["steps"] for row in rows] == [8]


def test_an_interrupted_step_leaves_the_last_saved_state(tmp_path: Path) -> None:
    work, network = noisy_work()
    training_in(tmp_path / "whole").run(work, 6)
    broken, _ = noisy_work(losses=[0.0] * 4)
    with pytest.raises(KeyboardInterrupt):
        training_in(tmp_path / "broken").run(broken, 6)
    rest, other = noisy_work()
    training_in(tmp_path / "broken").run(rest, 6)
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in network.state_dict().items())


def test_the_global_generator_is_as_it_was_before(tmp_path: Path) -> None:
    work, _ = noisy_work()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    training_in(tmp_path / "one").run(work, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_seconds_and_the_largest_peak_add_up_over_interruptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = iter([300, 100])
    monkeypatch.setattr(server_training, "read_peak_memory", lambda device: next(peaks))
    rows: list[dict[str, Any]] = []
    training_in(tmp_path / "one", 1e9, note=rows.append).run(noisy_work()[0], 4)
    training_in(tmp_path / "one", 1e9, note=rows.append).run(noisy_work()[0], 6)
    assert [row["peak_bytes"] for row in rows] == [300, 300]
    assert rows[1]["seconds"] > rows[0]["seconds"]
    assert rows[1].keys() | {"task", "stage"} == tables.COSTS.keys()


def test_each_work_of_a_step_has_a_file_of_its_own(tmp_path: Path) -> None:
    training = training_in(tmp_path / "one")
    (first, network), (second, other) = noisy_work(), noisy_work()
    training.run(first, 2)
    training.run(second, 4)
    files = sorted((tmp_path / "one").iterdir())
    assert [trees.load(file)["costs"]["steps"] for file in files] == [2, 4]
    assert not torch.equal(network[0].weight, other[0].weight)


def test_steps_run_with_the_threads_that_are_noted(tmp_path: Path) -> None:
    threads, rows = [], []

    class Work(ServerWork):
        name = "threads"

        def step(self, number: int) -> float:
            threads.append(torch.get_num_threads())
            return 0.5

        def collect_state(self) -> dict[str, Any]:
            return {}

        def restore(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(TypeError, match="object is no ServerWork"):
        training_in(tmp_path).run(object(), 1)
    before = torch.get_num_threads()
    ServerTraining(tmp_path, (0,), CPU, 2, 0, rows.append).run(Work(), 2)
    assert threads == [2, 2]
    assert torch.get_num_threads() == before
    assert (rows[0]["threads"], rows[0]["loss"]) == (2, 0.5)


def test_on_a_gpu_it_waits_for_its_work_and_reads_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one here: the calls that are made, in their order."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: calls.append("read") or 77)
    cuda = torch.device("cuda")
    server_training.reset_peak_memory(cuda)
    server_training.wait_for(cuda)
    assert server_training.read_peak_memory(cuda) == 77
    assert calls == ["init", "reset", "wait", "read"]
    server_training.wait_for(CPU)
    assert len(calls) == 4
