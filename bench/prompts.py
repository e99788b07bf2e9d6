"""What prompts cost a client, in one run: an epoch with kept queries against two passes for each batch.

    python bench/prompts.py [fed-dualp fed-l2p pip-dualp] [--repeats 5] [--side 32] [--images 256] [--set KEY=VALUE ...]

epoch: a client's images on a vision transformer, 6 layers of width 192, patches of 4 px, in CPU seconds of one thread.
With --side 56 there are 197 tokens an image, as ViT-B/16 has of 224 px. What is kept are queries and, where the lowest
layers have no prompts, the tokens above those. Asked: the frozen network sees each batch first, for its queries. Plain:
so, and the last layer makes something of all tokens, as the papers' code does, not only of those that are read.
memory: the peak of anonymous memory of a round of 10 and of 100 clients with 32 images each, each in its own process.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from extraction import Peak, alone
from local_loop import Work, make_splits
from torch import Tensor

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


def method_on(
    name: str, clients: int, samples: int, folder: Path, side: int = 32, overrides: Sequence[str] = ()
) -> Any:
    splits = make_splits(Work(clients, samples, 32, (3, side, side), VIT), folder)
    settings = {
        "model": VIT,
        "federation": {"batch_size": 32, "executor": "serial"},
        "optimizer": {"kind": "adam", "lr": 1e-3},
    }
    write_json(folder / "params.yaml", settings)
    read = params.load(folder / "params.yaml", overrides)
    return plugins.find("method", name)(params.method_settings(read, name), Run.on(read, splits, 0, folder))


def measure_epoch(name: str, given: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as folder:
        method = method_on(name, 1, given.images, Path(folder), given.side, given.set)
        server = method.start_task(method.setup(), 0)
        client, payload = Client(0, 0, 0, method.run, method.rows(0, 0), {}), method.payload(server)
        kept, asked = (method.queries, method.below), (None, None)
        encode = method.frozen.encode
        sides = {"kept": (kept, encode), "asked": (asked, encode), "plain": (asked, all_tokens(encode))}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(1 + given.repeats):
            for side, (known, way) in sides.items():
                (method.queries, method.below), method.frozen.encode = known, way
                training = method.prepared(client, payload)
                started = time.thread_time()
                training.run()
                seconds[side].append(time.thread_time() - started)
    # The first turn warms up.
    pairs = {side: zip(seconds["kept"][1:], seconds[side][1:], strict=True) for side in ("plain", "asked")}
    ratios = {side: statistics.median(one / other for one, other in of) for side, of in pairs.items()}
    told = ", ".join(f"{ratio:.2f} of {side}" for side, ratio in ratios.items())
    return f"{statistics.median(seconds['kept'][1:]):.2f} s kept, {told}"


def all_tokens(encode: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of which as many are given back as are read."""

    def plain(tokens: Tensor, attached: Mapping = {}, first: int = 0, read: int = 1) -> Tensor:
        return encode(tokens, attached, first, tokens.shape[1])[:, :read]

    return plain


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
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--set", nargs="+", default=[])
    parser.add_argument("--no-memory", action="store_true")
    given = parser.parse_args()
    malloc.tune()
    torch.set_num_threads(1)
    for name in given.methods:
        print(f"{name}: an epoch {measure_epoch(name, given)}", flush=True)
        for clients in () if given.no_memory else CLIENTS:
            print(f"{name}: a round of {clients} clients, {alone(measure_memory, name, clients)} MB", flush=True)


if __name__ == "__main__":
    main()
