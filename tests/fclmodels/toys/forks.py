"""Runs experiments in forks of one process that has imported everything, so that a test can afford to kill many.

Reads orders as lines of JSON; answers each with the fork's process id and, when that has ended, with its status.
"""

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sitecustomize  # noqa: F401
import torch

from fclmodels.backbones import noisy
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment import run_folder
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation import evaluation
from fclmodels.federation.engine import rounds
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.federation.training.server_training import NetworkTraining
from fclmodels.methods import diary
from fclmodels.settings import load
from fclmodels.source_digest import digest_sources
from fclmodels.storage import files
from fclmodels.storage.object_store import Store

# Where a run can be made to die: just before or after such a call returns for the nth time.
POINTS = {
    "replace": (files.os, "replace"),
    "batch": (LocalTraining, "take_step"),
    "put": (Store, "put"),
    "record": (Store, "record"),
    "rmtree": (shutil, "rmtree"),
    "publish": (run_folder, "_write"),
    "step": (NetworkTraining, "step"),
}


class Reaper:
    """Counts the calls of a function, and kills this process before or after the nth."""

    def __init__(self, point: str, when: str, nth: int) -> None:
        owner, name = POINTS[point]
        self.function: Callable[..., Any] = getattr(owner, name)
        self.when, self.nth, self.calls = when, nth, 0
        setattr(owner, name, self.wrapper())

    def wrapper(self) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.die_if("before")
            result = self.function(*args, **kwargs)
            self.die_if("after")
            return result

        return wrapped

    def die_if(self, when: str) -> None:
        if (self.when, self.nth) == (when, self.calls):
            os.kill(os.getpid(), signal.SIGKILL)


def run(order: dict[str, Any]) -> None:
    reaper = Reaper(*order["die"]) if order["die"] else None
    settings = load.load_params(order["params"], order["overrides"])
    with Experiment(
        settings, order["method"], 0, Splits.open(Path(order["splits"])), Path(order["home"])
    ) as experiment:
        experiment.run(Path(order["folder"]))
    if reaper:
        Path(order["folder"], "calls").write_text(str(reaper.calls))


def main() -> None:
    torch.set_num_threads(1)
    # What every fork would otherwise import and read again.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    digest_sources(evaluation.__name__, rounds.__name__, noisy.__name__, diary.__name__)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                run(json.loads(line))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        print(child, flush=True)  # noqa: T201
        print(os.waitpid(child, 0)[1], flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
