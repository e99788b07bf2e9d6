"""Memory does not grow with the number of clients: neither with those that wait, nor with those that answer."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fclmodels.data.splits.split_reader import Splits

# A model of 1.4 MB, so that one copy for each client would show.
MODEL = ("model.hidden=400", "federation.rounds=1", "federation.batch_size=64")
MAIN = """
import json, resource, sys
from pathlib import Path
from fclmodels.settings import load as params
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.executors import glibc_malloc
glibc_malloc.tune()
settings, splits, home = sys.argv[1:4]
settings = params.load_params(settings, sys.argv[4:])
with Experiment(settings, "fedavg", 0, Splits.open(Path(splits)), Path(home)) as experiment:
    result = experiment.run(Path(home) / "run")
peak = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps({"megabytes": max(peak), "bytes_up": result["bytes_up"]}))
"""


@pytest.fixture
def measure(params_file: Path, splits_of: Callable[..., Splits], tmp_path: Path) -> Callable[..., dict[str, float]]:
    """Peak memory of a run with so many clients (main process or largest worker), and the bytes that came up."""

    def run(clients: int, *overrides: str) -> dict[str, float]:
        sizes = {(0, client): 1 + 7 * client % 5 for client in range(clients)}
        splits = splits_of(tasks=1, clients=clients, train=sizes, test=1)
        command = [sys.executable, "-c", MAIN, str(params_file), str(splits.folder), str(tmp_path / f"{clients}")]
        output = subprocess.run([*command, *MODEL, *overrides], capture_output=True, check=True, text=True).stdout
        return json.loads(output)

    return run


@pytest.mark.slow
def test_a_thousand_clients_of_which_twenty_are_sampled(measure: Callable[..., dict[str, float]]) -> None:
    few, many = (measure(clients, "federation.clients_per_round=20") for clients in (50, 1000))
    assert few["bytes_up"] == many["bytes_up"]
    assert many["megabytes"] < few["megabytes"] + 40


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_few_answers_are_held_in_memory(executor: str, measure: Callable[..., dict[str, float]]) -> None:
    """All take part: with one model kept for each, 600 clients would need 770 MB more than 50."""
    settings = (f"federation.executor={executor}", "federation.workers=2")
    few, many = (measure(clients, *settings) for clients in (50, 600))
    assert many["bytes_up"] == 12 * few["bytes_up"]
    assert many["megabytes"] < few["megabytes"] + 100
