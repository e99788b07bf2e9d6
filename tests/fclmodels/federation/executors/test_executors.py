"""Where clients run changes nothing, and neither does a worker that dies."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fclmodels import machine
from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.executors import processes
from fclmodels.federation.executors.processes import share_workers
from fclmodels.settings.schema import Params

MakeExperiment = Callable[..., Experiment]
Remains = Callable[[Path], dict[str, Any]]

HARD = (
    "model.backbone=noisy",
    "methods.diary.batch_norm=local",
    "augment.crop_padding=1",
    "augment.flip=true",
    "augment.brightness=0.3",
    "optimizer.momentum=0.9",
)
UNEVEN = {
    (task, client): 1 + (7 * client + 3 * task) % 11 for task in range(2) for client in range(6) if task != client
}


def workers(number: int) -> tuple[str, ...]:
    return ("federation.executor=processes", f"federation.workers={number}")


def pids() -> set[int]:
    """This process's workers that are alive."""
    own = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    worker = b"process_worker"
    return {int(pid) for pid in own if worker in Path(f"/proc/{pid}/cmdline").read_bytes()}


@contextmanager
def leaving_no_worker() -> Iterator[None]:
    before = pids()
    yield
    assert pids() == before


@pytest.fixture(scope="module")
def uneven(splits_of: Callable[..., Splits], toys: Path) -> Splits:
    return splits_of(clients=6, train=UNEVEN)


@pytest.fixture(scope="module")
def serially(
    uneven: Splits, params_of: Callable[..., Params], remains: Remains, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("serial")
    Experiment(params_of(*HARD), "diary", 0, uneven, folder / "home").run(folder / "run")
    return remains(folder / "run")


class Killer(Listener):
    """Kills a worker at these moments: (task, round, clients that have answered)."""

    def __init__(self, *moments: tuple[int, int, int]) -> None:
        self.moments = set(moments)
        self.killed = 0

    def on_client_done(self, task: int, round: int, done: int, of: int) -> None:
        if (task, round, done) in self.moments:
            os.kill(max(pids()), signal.SIGKILL)
            self.killed += 1


MANY = [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]


@pytest.mark.parametrize("number", MANY)
def test_any_number_of_workers_gives_the_same_bits(
    number: int,
    serially: dict[str, Any],
    uneven: Splits,
    experiment_of: MakeExperiment,
    remains: Remains,
    tmp_path: Path,
) -> None:
    """Models, memories, knowledge, losses, accuracies and every row of the ledger; dropout and augmentation are on."""
    with leaving_no_worker(), experiment_of(*HARD, *workers(number), method="diary", splits=uneven) as experiment:
        experiment.run(tmp_path / "run")
        assert len(pids()) == number
    assert remains(tmp_path / "run") == serially


def test_runs_one_after_another_may_share_their_workers(
    serially: dict[str, Any], uneven: Splits, experiment_of: MakeExperiment, remains: Remains, tmp_path: Path
) -> None:
    """They end with the same bits as alone, after another method too, and where a waiting worker has died."""
    with leaving_no_worker(), share_workers():
        with experiment_of(*workers(2), method="fedavg", splits=uneven) as experiment:
            experiment.run(tmp_path / "before")
        waiting = pids()
        assert len(waiting) == 2
        with experiment_of(*HARD, *workers(2), method="diary", splits=uneven) as experiment:
            experiment.run(tmp_path / "run")
        assert pids() == waiting
        os.kill(max(waiting), signal.SIGKILL)
        with experiment_of(*HARD, *workers(2), method="diary", splits=uneven) as experiment:
            experiment.run(tmp_path / "again")
        assert len(pids()) == 2
        assert min(waiting) in pids()
    assert remains(tmp_path / "run") == remains(tmp_path / "again") == serially


@pytest.mark.slow
def test_a_shared_worker_gives_back_what_a_large_run_took(
    splits_of: Callable[..., Splits], experiment_of: MakeExperiment, tmp_path: Path
) -> None:
    """Before the next run begins; the next run's peak is its own."""

    def run(name: str, hidden: int) -> int:
        splits = splits_of(shape=(3, 32, 32))
        with experiment_of(*workers(1), f"model.hidden={hidden}", "federation.rounds=1", splits=splits) as experiment:
            experiment.run(tmp_path / name)
            return experiment.executor.read_peak_memory()

    with share_workers():
        alone = run("alone", 8)
    with share_workers():
        large = run("large", 3000)
        (worker,) = pids()
        idle = min(machine.read_status("VmRSS", worker) or 0 for _ in range(20) if time.sleep(0.1) is None)
        after = run("after", 8)
    assert large > alone + 4 * 3072 * 3000  # at least the first layer
    assert max(idle, after) < 1.15 * alone


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced_and_the_result_is_the_same(
    serially: dict[str, Any], uneven: Splits, experiment_of: MakeExperiment, remains: Remains, tmp_path: Path
) -> None:
    """Of two workers, one in the middle of a round and one at its very end, when it has nothing to do."""
    killer = Killer((0, 0, 1), (1, 0, 5))
    with (
        leaving_no_worker(),
        experiment_of(*HARD, *workers(2), method="diary", splits=uneven, listener=killer) as experiment,
    ):
        experiment.run(tmp_path / "run")
    assert killer.killed == 2
    assert remains(tmp_path / "run") == serially


@pytest.mark.slow
def test_a_client_whose_worker_dies_in_training_is_run_again(
    serially: dict[str, Any], uneven: Splits, experiment_of: MakeExperiment, remains: Remains, tmp_path: Path
) -> None:
    """By the one worker that is left to replace it."""
    trouble = ("methods.diary.trouble=one death", f"methods.diary.mark={tmp_path}/mark")
    with leaving_no_worker(), experiment_of(*HARD, *workers(1), *trouble, method="diary", splits=uneven) as experiment:
        experiment.run(tmp_path / "run")
    assert (tmp_path / "mark").exists()
    assert remains(tmp_path / "run") == serially


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_an_error_in_a_client_surfaces_with_its_traceback(
    executor: str, uneven: Splits, experiment_of: MakeExperiment, tmp_path: Path
) -> None:
    settings = (*HARD, *workers(1), f"federation.executor={executor}", "methods.diary.trouble=error")
    with (
        leaving_no_worker(),
        experiment_of(*settings, method="diary", splits=uneven) as experiment,
        pytest.raises((ValueError, RuntimeError), match="trouble in client 1") as error,
    ):
        experiment.run(tmp_path / "run")
    if executor == "processes":
        assert "meet_trouble" in str(error.value)
        assert "ValueError" in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_a_users_mistake_in_a_client_stays_one_line(
    executor: str, uneven: Splits, experiment_of: MakeExperiment, tmp_path: Path
) -> None:
    settings = (*HARD, *workers(1), f"federation.executor={executor}", "methods.diary.trouble=mistake")
    with (
        leaving_no_worker(),
        experiment_of(*settings, method="diary", splits=uneven) as experiment,
        pytest.raises(UserError) as error,
    ):
        experiment.run(tmp_path / "run")
    assert str(error.value) == "client 1 has no disk. Give it one."


@pytest.mark.slow
def test_a_client_that_kills_every_worker_is_named(
    uneven: Splits, experiment_of: MakeExperiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "DEATHS_OF_ONE_CLIENT", 2)
    settings = (*HARD, *workers(1), "methods.diary.trouble=death", f"methods.diary.mark={tmp_path}/mark")
    with (
        leaving_no_worker(),
        experiment_of(*settings, method="diary", splits=uneven) as experiment,
        pytest.raises(RuntimeError, match="client 1: its worker process died 2 times"),
    ):
        experiment.run(tmp_path / "run")


@pytest.mark.slow
def test_a_client_whose_workers_the_kernel_kills_for_memory_is_told_as_that(
    uneven: Splits, experiment_of: MakeExperiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the kernel's count of such kills shows: it grows with each look here."""
    monkeypatch.setattr(processes, "DEATHS_OF_ONE_CLIENT", 2)
    monkeypatch.setattr(processes.machine, "count_memory_kills", partial(next, count()))
    settings = (*HARD, *workers(1), "methods.diary.trouble=death", f"methods.diary.mark={tmp_path}/mark")
    with (
        leaving_no_worker(),
        experiment_of(*settings, method="diary", splits=uneven) as experiment,
        pytest.raises(UserError, match=r"client 1: memory ran out, .* Set fewer federation\.workers \(here 1\)"),
    ):
        experiment.run(tmp_path / "run")


MAIN = """
import os, sys
from pathlib import Path
from fclmodels.settings import load as params
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.engine.listener import Listener
class Tell(Listener):
    def on_client_done(self, *_):
        print(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text(), flush=True)
settings, splits, home = sys.argv[1:4]
settings, splits = params.load_params(settings, sys.argv[4:]), Splits.open(Path(splits))
with Experiment(settings, "fedavg", 0, splits, Path(home), Tell()) as experiment:
    experiment.run(Path(home) / "run")
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_workers_do_not_outlive_a_main_process_that_is_killed(
    uneven: Splits, params_file: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", MAIN, str(params_file), str(uneven.folder), str(tmp_path / "home"), *workers(2)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as main:
        assert main.stdout
        children = [int(pid) for pid in main.stdout.readline().split()]
        main.kill()
    assert len(children) == 2
    deadline = time.monotonic() + 20
    while any(map(alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, children))
