"""What prompts cost a client, in one run: an epoch with kept queries against one that asks the frozen network for them.

    python bench/prompts.py [fed-dualp fed-l2p pip-dualp] [--repeats 5]

epoch: a client's 256 images of 32 px on a vision transformer of 6 layers of width 192, in seconds of one thread.
memory: the peak of anonymous memory of a round of 10 and of 100 clients with 32 images each, each in its own process.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from extraction import Peak, alone
from local_loop import Work, make_splits

from fclmodels import params, plugins
from fclmodels.federation import malloc
from fclmodels.federation.checkpoints import Checkpoints
from fclmodels.federation.client import Client
from fclmodels.federation.executor import Serial
from fclmodels.federation.rounds import Position, one_round, open_ledger
from fclmodels.federation.run import Run
from fclmodels.listener import Listener
from fclmodels.state import write_json

VIT = {"backbone": "vit", "patch": 4, "width": 192, "depth": 6, "attention_heads": 3, "mlp_width": 768}
CLIENTS = (10, 100)


def method_on(name: str, clients: int, samples: int, folder: Path) -> Any:
    splits = make_splits(Work(clients, samples, 32, (3, 32, 32), VIT), folder)
    settings = {
        "model": VIT,
        "federation": {"batch_size": 32, "executor": "serial"},
        "optimizer": {"kind": "adam", "lr": 1e-3},
    }
    write_json(folder / "params.yaml", settings)
    read = params.load(folder / "params.yaml")
    return plugins.find("method", name)(params.method_settings(read, name), Run.on(read, splits, 0, folder))


def measure_epoch(name: str, repeats: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        method = method_on(name, 1, 256, Path(folder))
        server = method.start_task(method.setup(), 0)
        client, payload = Client(0, 0, 0, method.run, method.rows(0, 0), {}), method.payload(server)
        queries, seconds = method.queries, {"kept": [], "asked": []}
        for _ in range(1 + repeats):
            for side, told in (("kept", queries), ("asked", None)):
                method.queries = told
                training = method.prepared(client, payload)
                started = time.thread_time()
                training.run()
                seconds[side].append(time.thread_time() - started)
    # The first turn warms up.
    ratios = [kept / asked for kept, asked in zip(seconds["kept"][1:], seconds["asked"][1:], strict=True)]
    return f"{statistics.median(seconds['asked'][1:]):.2f} s asked, {statistics.median(ratios):.2f} of that kept"


def measure_memory(name: str, clients: int) -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        method = method_on(name, clients, 32, folder)
        start, checkpoints = Position(method.start_task(method.setup(), 0), {}, 0), Checkpoints(folder / "rounds")
        with Peak() as peak:
            one_round(method, start, 0, Serial(method, 1), checkpoints, open_ledger(method, checkpoints), Listener())
        checkpoints.close()
    return peak.above


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=["fed-dualp", "fed-l2p", "pip-dualp"])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    malloc.tune()
    torch.set_num_threads(1)
    for name in given.methods:
        memory = ", ".join(f"{alone(measure_memory, name, clients)} MB ({clients} clients)" for clients in CLIENTS)
        print(f"{name}: an epoch {measure_epoch(name, given.repeats)}; memory {memory}", flush=True)


if __name__ == "__main__":
    main()
