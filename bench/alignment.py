"""What gradient alignment costs a server, in one run: n displacements of 11 million numbers, spooled as replies are.

    python bench/alignment.py [10 100] [--repeats 5]

gram: the Gram matrix in chunks from the spooled files, against torch.mm on the stacked matrix, and how far each is from
double precision. combine: the weighted sum, against the same product. solve: the exact minimiser and the papers'
descent, on ten Gram matrices of clustered, conflicting vectors of very different norms. memory: the peak of anonymous
memory during gram and combine, in models, which the mapped files are not. One thread, as the server has.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fclmodels import state
from fclmodels.experiment import SERVER_THREADS
from fclmodels.federation import malloc
from fclmodels.numerics.alignment import by_descent, columns, combined, exact, gram, objective

# The tensors of ResNet-18 by size: 11 million numbers.
SHAPES = {
    "conv1.weight": (64, 3, 7, 7),
    **{f"layer1.{i}.weight": (64, 64, 3, 3) for i in range(4)},
    "layer2.0.weight": (128, 64, 3, 3),
    **{f"layer2.{i}.weight": (128, 128, 3, 3) for i in range(1, 4)},
    "layer3.0.weight": (256, 128, 3, 3),
    **{f"layer3.{i}.weight": (256, 256, 3, 3) for i in range(1, 4)},
    "layer4.0.weight": (512, 256, 3, 3),
    **{f"layer4.{i}.weight": (512, 512, 3, 3) for i in range(1, 4)},
    "heads.0.weight": (100, 512),
}
KAPPA = 0.5


def seconds(work: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def spooled(n: int, folder: Path) -> list[dict[str, Tensor]]:
    """Displacements that share a direction more or less, read back as the server reads them."""
    random = torch.Generator().manual_seed(n)
    common = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    for client in range(n):
        noise = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
        state.save({name: 1e-3 * (common[name] + 2 * noise[name]) for name in SHAPES}, folder / f"{client}.safetensors")
    return [state.load(folder / f"{client}.safetensors") for client in range(n)]


def anonymous() -> int:
    """Bytes of this process that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def peak(work: Callable[[], object]) -> int:
    """By how much anonymous memory grows at most while it works."""
    before, highest, over = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not over.wait(0.002):
            highest = max(highest, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    over.set()
    watcher.join()
    return highest - before


def hard(n: int, seed: int) -> Tensor:
    """The Gram matrix of vectors in five clusters with lengths over two orders of magnitude."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, 200, generator=random, dtype=torch.float64)
    V = centres[torch.arange(n) % 5] + 0.5 * torch.randn(n, 200, generator=random, dtype=torch.float64)
    V *= 10 ** (2 * torch.rand(n, 1, generator=random, dtype=torch.float64) - 1)
    return V @ V.T


def measure(n: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        vectors = spooled(n, Path(folder))
        names, weights = list(SHAPES), torch.rand(n, dtype=torch.float64)

        def combine() -> list[Tensor]:
            return [combined([vector[name] for vector in vectors], weights.tolist()) for name in names]

        size = sum(t.numel() for t in vectors[0].values())
        models = {
            "gram": peak(lambda: gram(columns(vectors, names))) / (4 * size),
            "combine": peak(combine) / (4 * size),
        }
        ours, summed = seconds(lambda: gram(columns(vectors, names)), repeats), seconds(combine, repeats)
        stacked = torch.stack([torch.cat([vector[name].flatten() for name in names]) for vector in vectors])
        plain, product = (
            seconds(lambda: stacked @ stacked.T, repeats),
            seconds(lambda: weights.float() @ stacked, repeats),
        )
        true = sum(part.double() @ part.double().T for part in stacked.split(2**18, dim=1))
        error = {
            "chunks": gram(columns(vectors, names)),
            "one product": (stacked @ stacked.T).double(),
        }
        told = ", ".join(
            f"{kind} {float(((G - true).abs() / true.abs().max()).max()):.1e}" for kind, G in error.items()
        )
    print(f"n = {n}, {size:,} numbers: gram {ours:.3f} s, {ours / plain:.2f} of torch.mm; error of {told}")
    print(f"  combine {summed:.3f} s, {summed / product:.2f} of torch.mm", end="; ")
    print("memory in models: " + ", ".join(f"{kind} {value:.2f}" for kind, value in models.items()))
    grams = [hard(n, seed) for seed in range(10)]
    for name, solve in (
        ("exact", lambda G: exact(G, KAPPA)),
        ("descent", lambda G: by_descent(G, KAPPA, rounds=100, lr=25, momentum=0.5, step_size=30)),
    ):
        each = [1000 * seconds(partial(solve, G), repeats) for G in grams]
        worse = [objective(G, solve(G), KAPPA) - objective(G, exact(G, KAPPA), KAPPA) for G in grams]
        share = max(w / float(G.diagonal().mean()) for w, G in zip(worse, grams, strict=True))
        print(
            f"  {name}: {statistics.median(each):.2f} ms, at most {max(each):.2f}; above exact by at most {share:.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", type=int, default=[10, 100])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    malloc.tune()
    torch.set_num_threads(SERVER_THREADS)
    for n in given.clients:
        measure(n, given.repeats)


if __name__ == "__main__":
    main()
