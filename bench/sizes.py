"""Distances of honest clients from a round's median, in parts that federation.inspection compares and in others.

    fcl pretrain --out data/pretrained/letters     # for the methods on a frozen backbone
    python bench/sizes.py [--out tries/sizes]

Of each part the largest size in medians over a run's exchanges, one run for each stream and method, the embedded digits
with ten clients. Nobody is refused: federation.inspection.largest is null.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from attacks import FROZEN
from runs import ALONE, Job, make_splits

from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.protection import inspection
from fclmodels.federation.protection.reply_checks import measure_length

SETTINGS = ["partition.val=0", "model={backbone: cnn, width: 8}", "federation.rounds=3", "optimizer.lr=0.1"]
STREAMS = {
    "5 tasks, Dirichlet 0.1": ["stream.tasks=5", "stream.classes_per_task=2", "partition.alpha=0.1"],
    "2 tasks, Dirichlet 0.1": ["stream.tasks=2", "stream.classes_per_task=5", "partition.alpha=0.1"],
    "overlapping, Dirichlet 0.1": ["stream={kind: overlapping-classes, tasks: 3}", "partition.alpha=0.1"],
    "task pool": ["stream={kind: task-pool, tasks: 5}", "partition={kind: iid, clients: 10}"],
    "domains": ["data.source=digits-domains", "stream.kind=domain-incremental"],
}
METHODS = {
    "fedavg": [],
    "fedavg, resnet18": ["model={backbone: resnet18, width: 4, stem: cifar}"],
    "fot": [],
    "fot, threshold 0.999": ["methods.fot.threshold=0.999"],
    "fedprotip": [],
    "fedprotip, all directions": ["methods.fedprotip.tip_rank=null"],
    "special": ["methods.special.lambda=auto", "partition.val=0.1"],
    "nearest-prototype": FROZEN,
    "pip-l2p": FROZEN,
}
NOT_COMPARED = ("sketch", "directions", "statistics")


def find_largest(stream: str, method: str, out: Path) -> dict[str, float]:
    """Return the largest size of each part that one run sends, in medians."""
    largest: dict[str, float] = defaultdict(float)
    original_look, original_faults = inspection.inspect_reply, inspection.find_defects

    def measured(reply: Any, *more: Any) -> inspection.Finding:
        look = original_look(reply, *more)
        others = {
            n: [measure_length(p.tensors)] for n, p in reply.parts.items() if p.kind in NOT_COMPARED and not p.over
        }
        return replace(look, sizes={**look.sizes, **others})

    def compared(looks: dict[int, inspection.Finding], *more: Any) -> dict[int, inspection.ReplyDefect]:
        for name in {name for look in looks.values() for name in look.sizes}:
            for sizes in zip(
                *(look.sizes[name] for look in looks.values() if name in look.sizes),
                strict=True,
            ):
                largest[name] = max(largest[name], max(sizes) / (inspection.compute_median(sizes) or 1.0))
        return original_faults(looks, *more)

    name = method.partition(",")[0]
    settings = [*SETTINGS, *STREAMS[stream], *ALONE, "federation.inspection.largest=null", *METHODS[method]]
    job = Job(params=Path("params.yaml"), settings=settings, method=name, seed=0, out=out)
    with patch.multiple(inspection, look=measured, find_defects=compared), TemporaryDirectory() as folder:
        splits = Splits.open(make_splits(job.load(), out))
        with Experiment(job.load(), name, 0, splits, Path(folder) / "home") as experiment:
            experiment.run(Path(folder) / "run")
    return largest


def format_table(out: Path) -> Iterator[str]:
    yield "| | | " + " | ".join(STREAMS) + " |\n" + "|---" * (len(STREAMS) + 2) + "|"
    for method in METHODS:
        of_streams = [find_largest(stream, method, out) for stream in STREAMS]
        for part in dict.fromkeys(part for largest in of_streams for part in largest):
            yield (
                f"| {method} | {part} | " + " | ".join(f"{largest.get(part, 1):.3g}" for largest in of_streams) + " |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tries/sizes"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for line in format_table(options.out):
        print(line, flush=True)


if __name__ == "__main__":
    main()
