"""Cost of gradient alignment for a server, in one run: n displacements of 11 million numbers, in files as replies are.

    python bench/alignment.py [10 100] [--repeats 5]

gram: the Gram matrix in chunks from the files, against torch.mm on the stacked matrix, and how far each is from
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
from measuring import Peak, measure_anonymous, run_alone
from torch import Tensor

from fclmodels.experiment.step_keys import SERVER_THREADS
from fclmodels.federation.executors import glibc_malloc
from fclmodels.numerics.alignment import combine, gram, iterate_columns, objective, solve_by_descent, solve_exactly
from fclmodels.storage import trees

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


def measure_seconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def write_displacements(n: int, folder: Path) -> None:
    """Write displacements that partly share a direction."""
    random = torch.Generator().manual_seed(n)
    common = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    for client in range(n):
        noise = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
        trees.save({name: 1e-3 * (common[name] + 2 * noise[name]) for name in SHAPES}, folder / f"{client}.safetensors")


def load_displacements(folder: Path, n: int) -> list[dict[str, Tensor]]:
    """Load displacements as the server does, mapped to memory."""
    return [trees.load(folder / f"{client}.safetensors") for client in range(n)]


def compute_gram(vectors: list[dict[str, Tensor]]) -> Tensor:
    return gram(iterate_columns(vectors, list(SHAPES)))


def combine_displacements(vectors: list[dict[str, Tensor]]) -> list[Tensor]:
    weights = torch.rand(len(vectors), dtype=torch.float64).tolist()
    return [combine([vector[name] for vector in vectors], weights) for name in SHAPES]


def measure_memory(work: Callable[[list[dict[str, Tensor]]], object], folder: Path, n: int) -> int:
    """Return the most MB that work on the displacements' files takes."""
    torch.set_num_threads(SERVER_THREADS)
    vectors = load_displacements(folder, n)
    with Peak(measure_anonymous) as peak:
        work(vectors)
    return peak.above


def build_hard_gram(n: int, seed: int) -> Tensor:
    """Return the Gram matrix [n, n] of vectors in five clusters with lengths over two orders of magnitude."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, 200, generator=random, dtype=torch.float64)
    V = centres[torch.arange(n) % 5] + 0.5 * torch.randn(n, 200, generator=random, dtype=torch.float64)
    V *= 10 ** (2 * torch.rand(n, 1, generator=random, dtype=torch.float64) - 1)
    return V @ V.T


def measure(n: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_displacements(n, Path(folder))
        vectors, weights = load_displacements(Path(folder), n), torch.rand(n)
        size = sum(t.numel() for t in vectors[0].values())
        works = {"gram": compute_gram, "combine": combine_displacements}
        models = {
            name: run_alone(measure_memory, work, Path(folder), n) * 2**20 / (4 * size) for name, work in works.items()
        }
        ours, summed = (measure_seconds(partial(work, vectors), repeats) for work in works.values())
        stacked = torch.stack([torch.cat([vector[name].flatten() for name in SHAPES]) for vector in vectors])
        plain, product = (
            measure_seconds(lambda: stacked @ stacked.T, repeats),
            measure_seconds(lambda: weights @ stacked, repeats),
        )
        true = sum(part.double() @ part.double().T for part in stacked.split(2**18, dim=1))
        error = {
            "chunks": compute_gram(vectors),
            "one product": (stacked @ stacked.T).double(),
        }
        errors = ", ".join(
            f"{kind} {float(((G - true).abs() / true.abs().max()).max()):.1e}" for kind, G in error.items()
        )
    print(f"n = {n}, {size:,} numbers: gram {ours:.3f} s, {ours / plain:.2f} of torch.mm; error of {errors}")
    print(f"  combine {summed:.3f} s, {summed / product:.2f} of torch.mm", end="; ")
    print("memory in models: " + ", ".join(f"{kind} {value:.2f}" for kind, value in models.items()))
    grams = [build_hard_gram(n, seed) for seed in range(10)]
    for name, solve in (
        ("exact", lambda G: solve_exactly(G, KAPPA)),
        ("descent", lambda G: solve_by_descent(G, KAPPA, rounds=100, lr=25, momentum=0.5, step_size=30)),
    ):
        each = [1000 * measure_seconds(partial(solve, G), repeats) for G in grams]
        worse = [objective(G, solve(G), KAPPA) - objective(G, solve_exactly(G, KAPPA), KAPPA) for G in grams]
        share = max(w / float(G.diagonal().mean()) for w, G in zip(worse, grams, strict=True))
        print(
            f"  {name}: {statistics.median(each):.2f} ms, at most {max(each):.2f}; above exact by at most {share:.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", type=int, default=[10, 100])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    glibc_malloc.tune()
    torch.set_num_threads(SERVER_THREADS)
    for n in options.clients:
        measure(n, options.repeats)


if __name__ == "__main__":
    main()
