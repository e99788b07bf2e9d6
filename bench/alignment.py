"""What gradient alignment costs a server, in one run: n displacements of 11 million numbers, spooled as replies are.

    python bench/alignment.py [10 100] [--repeats 5]

gram: the Gram matrix in chunks from the spooled files, against torch.mm on the stacked matrix, and how far each is from
double precision. combine: the weighted sum, against the same product. solve: the exact minimiser and the papers'
descent, on ten Gram matrices of clustered, conflicting vectors of very different norms. memory: the peak of anonymous
memory during gram and combine, each in a process of its own, in models, which the mapped files are not. One thread, as
the server has.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measuring import Peak, alone, anonymous
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


def spool(n: int, folder: Path) -> None:
    """Displacements that share a direction more or less."""
    random = torch.Generator().manual_seed(n)
    common = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    for client in range(n):
        noise = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
        state.save({name: 1e-3 * (common[name] + 2 * noise[name]) for name in SHAPES}, folder / f"{client}.safetensors")


def read(folder: Path, n: int) -> list[dict[str, Tensor]]:
    """As the server reads them."""
    return [state.load(folder / f"{client}.safetensors") for client in range(n)]


def gram_of_spool(vectors: list[dict[str, Tensor]]) -> Tensor:
    return gram(columns(vectors, list(SHAPES)))


def sum_of_spool(vectors: list[dict[str, Tensor]]) -> list[Tensor]:
    weights = torch.rand(len(vectors), dtype=torch.float64).tolist()
    return [combined([vector[name] for vector in vectors], weights) for name in SHAPES]


def memory(work: Callable[[list[dict[str, Tensor]]], object], folder: Path, n: int) -> int:
    """The most MB that work on the spooled displacements takes."""
    torch.set_num_threads(SERVER_THREADS)
    vectors = read(folder, n)
    with Peak(anonymous) as peak:
        work(vectors)
    return peak.above


def hard(n: int, seed: int) -> Tensor:
    """The Gram matrix of vectors in five clusters with lengths over two orders of magnitude."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, 200, generator=random, dtype=torch.float64)
    V = centres[torch.arange(n) % 5] + 0.5 * torch.randn(n, 200, generator=random, dtype=torch.float64)
    V *= 10 ** (2 * torch.rand(n, 1, generator=random, dtype=torch.float64) - 1)
    return V @ V.T


def measure(n: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spool(n, Path(folder))
        vectors, weights = read(Path(folder), n), torch.rand(n)
        size = sum(t.numel() for t in vectors[0].values())
        works = {"gram": gram_of_spool, "combine": sum_of_spool}
        models = {name: alone(memory, work, Path(folder), n) * 2**20 / (4 * size) for name, work in works.items()}
        ours, summed = (seconds(partial(work, vectors), repeats) for work in works.values())
        stacked = torch.stack([torch.cat([vector[name].flatten() for name in SHAPES]) for vector in vectors])
        plain, product = (seconds(lambda: stacked @ stacked.T, repeats), seconds(lambda: weights @ stacked, repeats))
        true = sum(part.double() @ part.double().T for part in stacked.split(2**18, dim=1))
        error = {
            "chunks": gram_of_spool(vectors),
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
