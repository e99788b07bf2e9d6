"""The expected costs of a run beside those of the run itself, within a factor of 1.5, for every method."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
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
from fclmodels.settings.load import collect_settings
from fclmodels.storage.sealed_json import write_json

FACTOR = 1.5
DAILY = ("fedavg", "er", "fot", "pip-dualp")
WITH_WORKERS = ("fedavg", "fot", "icarl", "stamp", "pip-dualp")  # which take seconds to start
OURS = sorted(plugins.load_all("method"))
EACH = [pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in OURS]
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
def splits(splits_of: Callable[..., Splits]) -> Splits:
    return splits_of(tasks=5, clients=6, train=12)


def order_trial(run: Experiment, folder: Path, executor: str = "serial") -> dict[str, Any]:
    """Return the order of a trial in a folder, as its process reads it."""
    name = type(run.method).name
    folder.mkdir()
    write_json(folder / "params.yaml", collect_settings(run.params, name))
    facts = {"folder": str(folder), "splits": str(run.splits.folder), "method": name, "seed": run.seed}
    return facts | {"executor": executor, "threads": 1, "memory": None}


@pytest.mark.parametrize("method", EACH)
def test_bytes_and_disk_are_as_expected(
    method: str, splits: Splits, experiment_of: Callable[..., Experiment], tmp_path: Path
) -> None:
    run = experiment_of(*ROUNDS, method=method, splits=splits)
    expected = extrapolate(measure(order_trial(run, tmp_path / "trial")), run.method, run.choice)
    result = run.run(tmp_path / "run")
    stored = sum(file.stat().st_size for file in (run.home / "store").rglob("*") if file.is_file())
    kept = result["bytes_kept"] / splits.clients
    luck = 2 if method == "rgo-approx" else 1  # two clients in five store something, by a draw for each task
    for ours, theirs, factor in (
        (expected.bytes_up, result["bytes_up"], FACTOR),
        (expected.bytes_down, result["bytes_down"], FACTOR),
        (expected.client_memory, kept, luck * FACTOR),
    ):
        assert ours == theirs or theirs / factor < ours < theirs * factor
    assert stored / FACTOR < expected.disk + 2**17  # tables of a run this small are as large as its models


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "method"), [*(("serial", name) for name in OURS), *(("processes", name) for name in WITH_WORKERS)]
)
def test_memory_is_as_expected(
    method: str,
    executor: str,
    splits_of: Callable[..., Splits],
    new_experiment: Callable[..., Experiment],
    tmp_path: Path,
) -> None:
    """With a network of 12 MB, or a transformer."""
    splits = splits_of(tasks=4, clients=3, train=16, shape=(3, 24, 24))
    on_transformer = getattr(plugins.find("method", method), "attaches", Adapted).needs_transformer
    has_hidden = not on_transformer and method != "dytox"  # whose backbone is a convit
    wide = ("model.hidden=1024",) if has_hidden else ()
    settings = (*SHORT, *wide, f"federation.executor={executor}")
    with new_experiment(*settings, method=method, splits=splits, home=tmp_path / "home") as run:
        expected = estimate_run(run)
        order = order_trial(run, tmp_path / "whole", executor)
        workers = min(2, run.method.sample_size(0)) if executor == "processes" else 0
    code = (
        "import json, sys; from pathlib import Path; from fclmodels import machine;"
        "from fclmodels.data.splits.split_reader import Splits; from fclmodels.settings.load import load_params;"
        "from fclmodels.experiment.experiment import Experiment; order = json.loads(sys.argv[1]);"
        "folder = Path(order['folder']); held = machine.read_status('VmRSS');"
        "splits = Splits.open(Path(order['splits'])); params = load_params(folder / 'params.yaml');\n"
        "with Experiment(params, order['method'], 0, splits, folder / 'home') as run:\n"
        "    run.run(folder / 'run')\n"
        "    print(json.dumps([machine.read_peak_memory() - held, machine.read_peak_memory_of_children()]))"
    )
    whole = subprocess.run([sys.executable, "-c", code, json.dumps(order)], capture_output=True, text=True, check=True)
    main, worker = json.loads(whole.stdout.splitlines()[-1])
    held = machine.read_status("VmRSS") or 0
    assert (held + main) / FACTOR < expected.main_bytes < (held + main) * FACTOR
    assert expected.workers == workers
    assert worker / FACTOR < expected.worker_bytes < worker * FACTOR or expected.workers == 0


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
