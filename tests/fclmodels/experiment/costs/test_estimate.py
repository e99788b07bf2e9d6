"""The expected costs of a run beside those of the run itself, within a factor of 1.5, for every method."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from fclmodels import machine, plugins
from fclmodels.backbones.adapters.adapted import Adapted
from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment.costs import estimate as estimating
from fclmodels.experiment.costs import trial
from fclmodels.experiment.costs.estimate import (
    Estimate,
    describe,
    estimate_run,
    extrapolate,
    refuse_what_does_not_fit,
    tabulate,
)
from fclmodels.experiment.costs.trial import TooLarge, TrialFailedError, measure
from fclmodels.experiment.experiment import Experiment
from fclmodels.settings.load import collect_settings, load_params
from fclmodels.storage.sealed_json import write_json

FACTOR = 1.5
DAILY = ("fedavg", "er", "fot", "pip-dualp")
WITH_WORKERS = ("fedavg", "fot", "icarl", "stamp", "pip-dualp")  # which take seconds to start
OURS = sorted(plugins.load_all("method"))
ROUNDS = ("federation.rounds=3", "federation.clients_per_round=3")
SHORT = ("federation.batch_size=8", "federation.rounds=2", "federation.workers=2", "federation.threads=1")
COSTS = Estimate(
    bytes_up=2_000_000,
    bytes_down=3_000_000,
    round_up=20_000,
    round_down=30_000,
    main_bytes=500_000_000,
    worker_bytes=400_000_000,
    workers=2,
    client_memory=1000,
    disk=70_000_000,
    seconds=90.0,
)


@pytest.fixture(scope="module")
def run_alone() -> Iterator[Callable[..., Any]]:
    """A function that calls another in a process of its own, forked from one that has imported everything."""
    context = get_context("forkserver")
    context.set_forkserver_preload([trial.__name__])
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as processes:
        yield lambda function, *args: processes.submit(function, *args).result()


def order_trial(run: Experiment, folder: Path, executor: str = "serial") -> dict[str, Any]:
    """Return the order of a trial in a folder, as its process reads it."""
    name = type(run.method).name
    folder.mkdir()
    write_json(folder / "params.yaml", collect_settings(run.params, name))
    facts = {"folder": str(folder), "splits": str(run.splits.folder), "method": name, "seed": run.seed}
    return facts | {"executor": executor, "threads": 1, "memory": None}


def run_whole(order: dict[str, Any]) -> dict[str, Any]:
    """Return the result of the run that a trial's order is of, with the memory and the disk that it took."""
    folder, before = Path(order["folder"]), machine.read_status("VmRSS") or 0
    params, splits = load_params(folder / "params.yaml"), Splits.open(Path(order["splits"]))
    with Experiment(params, order["method"], order["seed"], splits, folder / "whole") as run:
        result = run.run(folder / "run")
        peaks = {"main": machine.read_peak_memory() - before, "worker": machine.read_peak_memory_of_children()}
    stored = sum(file.stat().st_size for file in (folder / "whole" / "store").rglob("*") if file.is_file())
    return {**result, **peaks, "stored": stored, "client": result["bytes_kept"] / splits.clients}


def is_close(expected: float, measured: float, factor: float = FACTOR) -> bool:
    return expected == measured or measured / factor < expected < measured * factor


def check_bytes_and_disk(expected: Estimate, whole: dict[str, Any], luck: float = 1.0) -> None:
    assert is_close(expected.bytes_up, whole["bytes_up"])
    assert is_close(expected.bytes_down, whole["bytes_down"])
    assert is_close(expected.client_memory, whole["client"], luck * FACTOR)
    assert whole["stored"] / (luck * FACTOR) < expected.disk + 2**17  # tables of a small run are as large as its models


@pytest.mark.parametrize("method", DAILY)
def test_bytes_and_disk_are_as_expected(
    method: str, splits_of: Callable[..., Splits], experiment_of: Callable[..., Experiment], tmp_path: Path
) -> None:
    run = experiment_of(*ROUNDS, method=method, splits=splits_of(tasks=5, clients=6, train=12))
    order = order_trial(run, tmp_path / "trial")
    check_bytes_and_disk(extrapolate(measure(order), run.method, run.choice), run_whole(order))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "method"), [*(("serial", name) for name in OURS), *(("processes", name) for name in WITH_WORKERS)]
)
def test_costs_are_as_expected(
    method: str,
    executor: str,
    run_alone: Callable[..., Any],
    splits_of: Callable[..., Splits],
    new_experiment: Callable[..., Experiment],
    tmp_path: Path,
) -> None:
    """With a network of 12 MB (3 MB under FedWeIT), or a transformer."""
    on_transformer = getattr(plugins.find("method", method), "attaches", Adapted).needs_transformer
    has_hidden = not on_transformer and method != "dytox"  # whose backbone is a convit
    width = 256 if method == "fedweit" else 1024  # whose clients' memories are many models, written again each round
    wide = (f"model.hidden={width}",) if has_hidden else ()
    settings = (*SHORT, *wide, f"federation.executor={executor}")
    splits = splits_of(tasks=4, clients=3, train=16, shape=(3, 24, 24))
    with new_experiment(*settings, method=method, splits=splits, home=tmp_path / "home") as run:
        order = order_trial(run, tmp_path / "trial", executor)
        expected = extrapolate(run_alone(measure, order), run.method, run.choice)
        workers = min(2, run.method.count_sampled_clients(0)) if executor == "processes" else 0
    whole = run_alone(run_whole, order)
    # Two clients in five store something, by a draw for each task; whether a stored model goes on is up to the samples.
    luck = 2 if method in ("rgo-approx", "pfeddil") else 1
    check_bytes_and_disk(expected, whole, luck)
    held = machine.read_status("VmRSS") or 0
    assert is_close(expected.main_bytes, held + whole["main"])
    assert expected.workers == workers
    assert is_close(expected.worker_bytes, whole["worker"])


def test_a_run_that_needs_more_memory_than_there_is_is_refused_by_its_trial(
    splits_of: Callable[..., Splits], experiment_of: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FOT's sketches of a layer of 4,096 inputs, with a tenth of a gigabyte."""
    monkeypatch.setattr(machine, "read_available_memory", lambda: 10**8)
    run = experiment_of("model.hidden=4096", method="fot", splits=splits_of(shape=(1, 64, 64)))
    with pytest.raises(UserError, match=r"fot-0 does not fit into memory: 100 MB are free, .*--force") as problem:
        estimate_run(run)
    assert "federation.batch_size" in str(problem.value) or "model.backbone" in str(problem.value)


def test_what_does_not_fit_is_refused_with_a_setting_that_would(
    experiment_of: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = experiment_of()
    monkeypatch.setattr(machine, "read_available_memory", lambda: 10**9)
    with pytest.raises(UserError, match=r"takes about 1.3 GB \(500 MB in the main .* Set federation.workers: 1\. "):
        refuse_what_does_not_fit(COSTS, run)
    refuse_what_does_not_fit(replace(COSTS, workers=1), run)
    with pytest.raises(UserError, match=r"Set a smaller model\.backbone"):
        refuse_what_does_not_fit(replace(COSTS, main_bytes=10**10), run)
    with pytest.raises(UserError, match="does not fit on the disk of"):
        refuse_what_does_not_fit(replace(COSTS, workers=0, disk=10**21), run)


def test_a_trial_that_is_killed_counts_as_too_large(
    experiment_of: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_in_nothing(*_: object) -> None:
        raise TooLarge

    monkeypatch.setattr(estimating, "run_trial", end_in_nothing)
    with pytest.raises(UserError, match="does not fit into memory"):
        estimate_run(experiment_of())


def test_a_trial_that_fails_says_why(experiment_of: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "collect_settings", lambda *_: {"optimizer": {"lr": -1}})
    with pytest.raises(TrialFailedError, match=r"the trial of its costs failed: .*lr"):
        estimate_run(experiment_of())


def test_costs_are_said_in_one_line_and_in_a_table() -> None:
    assert describe(COSTS) == (
        "expected: 90.0 s, 2 MB up and 3 MB down (20 kB and 30 kB in a round), 1 kB kept by a client, memory 1.3 GB "
        "(500 MB in the main process, 400 MB in each of 2 workers), disk 70 MB"
    )
    rows = {row["what"]: row["expected"] for row in tabulate(replace(COSTS, workers=0, worker_bytes=0))}
    assert rows["memory"] == "500 MB: 500 MB in the main process"
    assert rows["clients send"] == "2 MB, 20 kB in a round"
