"""Attacks against defences: two bad clients of ten, the embedded digits in two tasks of five classes, as Markdown.

    fcl pretrain --out data/pretrained/letters     # for pip-dualp
    python bench/attacks.py [--out tries/attacks] [--workers 2] [--methods fedavg fot] [--seeds 0 1 2]

For each method the accuracy with the task given, attack by defence; then how many test images with the backdoor's patch
are taken for the attackers' label; then attacks on what methods send beside updates, also on permuted pixels; last the
baselines, with the first seed alone. Runs are folders below --out, as those of study.py, and not done again.
"""

import argparse
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from study import Job, Row, Study, do, finished, jobs, metric, splits_of, spread

from fclmodels.data.splits import Splits
from fclmodels.federation.attacks import patched, target
from fclmodels.report.runs import read_run
from fclmodels.served import Model

DIGITS = [
    "stream.tasks=2",
    "stream.classes_per_task=5",
    "partition.val=0",
    "model={backbone: cnn, width: 8}",
    "federation.rounds=6",
    "optimizer.lr=0.1",
]
# Each task needs layers of its own, so that it matters which directions are left for them.
PERMUTED = [
    "stream.kind=permuted-pixels",
    "stream.tasks=3",
    "partition.val=0",
    "model={backbone: mlp, hidden: 100, dropout: [0, 0]}",
    "federation.rounds=10",
    "optimizer.lr=0.1",
]
VIT = [
    "model={backbone: vit, patch: 2, width: 64, depth: 4, attention_heads: 4, mlp_width: 128, loss_over: task}",
    "model.weights=data/pretrained/letters/weights.safetensors",
    "methods.pip-dualp.e_layers=[2,3]",
    "optimizer={kind: adam, lr: 0.01}",
]
METHODS = {
    "fedavg": (DIGITS, "fedavg", []),
    "fot": (DIGITS, "fot", []),
    "fedprotip": (DIGITS, "fedprotip", []),
    "special": (DIGITS, "special", []),
    "stamp": (DIGITS, "stamp", []),
    "stamp, averaged": (DIGITS, "stamp", ["methods.stamp.spatio=false"]),
    "special, lambda 1": (DIGITS, "special", ["methods.special.lambda=1"]),
    "fedavg, permuted": (PERMUTED, "fedavg", []),
    "fot, permuted": (PERMUTED, "fot", []),
    "fedprotip, permuted": (PERMUTED, "fedprotip", []),
    "pip-dualp": (DIGITS, "pip-dualp", VIT),
}
FROZEN = [one for one in VIT if not one.startswith("methods.")]
ON_VIT = ("fed-l2p", "pip-l2p", "linear-probe", "lora", "nearest-prototype")
PLAIN = ("fedprox", "ema", "prox-anchor", "special-c", "ewc", "lwf", "flwf-2t", "er", "agem", "gpm", "single-task")
BASELINES = {
    **{name: [] for name in (*PLAIN, "fedomg")},
    **dict.fromkeys(ON_VIT, FROZEN),
    "fed-dualp": [*FROZEN, "methods.fed-dualp.e_layers=[2,3]"],
}
# Each attack against each defence; the others are for attacks on what is sent besides.
CROSSED = ["fedavg", "fot", "fedprotip", "special", "stamp", "stamp, averaged", "pip-dualp"]
ATTACKS = {
    "none": [],
    "label flip": ["label-flip"],
    "sign flip x 5": ["sign-flip", "strength=5"],
    "scaled x 10": ["scaled", "strength=10"],
    "scaled x 100": ["scaled", "strength=100"],
    "noise x 10": ["noise", "strength=10"],
    "claim x 10": ["claim", "strength=10"],
    "backdoor": ["backdoor"],
}
DEFENCES = {
    "none": ["federation.inspection.check=false"],
    "checks": [],
    **{
        rule: [f"federation.aggregation={rule}"] for rule in ("clipped", "median", "trimmed-mean", "krum", "multi-krum")
    },
}
FIRST = {f"{attack}, first task": [*ATTACKS[attack], "tasks=1"] for attack in ("label flip", "sign flip x 5")}
SKETCHES = {"basis x 1": ["basis", "strength=1"], "basis x 10": ["basis", "strength=10"]}
# On what a method sends beside updates, and whether poison of the first task outlives it.
DOORS = {
    "fedavg": FIRST,
    "fot": {**SKETCHES, **FIRST},
    "fedprotip": {"basis": ["basis"], "reference": ["reference"], **FIRST},
    "special": FIRST,
    "stamp": FIRST,
    "pip-dualp": {
        "prototype x 1": ["prototype", "strength=1"],
        "prototype x 10": ["prototype", "strength=10"],
        **FIRST,
    },
    "special, lambda 1": FIRST,
    "fot, permuted": SKETCHES,
    "fedprotip, permuted": {"basis": ["basis"]},
}
BESIDE = ("none", "label flip", "sign flip x 5")
TOLD = ("acc", "learning_acc", "task_agnostic.acc", "task_predicted.acc")

Runs = dict[tuple[str, str, str], list[Job]]  # of a method, an attack and a defence, one for each seed


def attacking(attack: list[str]) -> list[str]:
    return [f"federation.attack.{one}" for one in (f"kind={attack[0]}", *attack[1:])] if attack else []


def combinations(methods: list[str]) -> Iterator[tuple[str, str, str, list[str]]]:
    """Method, attack, defence, and the settings of the last two; aligned updates have no robust rule."""
    for method in methods:
        rules = ["none", "checks"] if method == "stamp" else list(DEFENCES)
        for attack, of_attack in ATTACKS.items():
            for defence in rules:
                # Bits are the same with and without checks that refuse nobody.
                if method in CROSSED and (defence != "none" or attack == "scaled x 100"):
                    yield method, attack, defence, [*attacking(of_attack), *DEFENCES[defence]]
        for attack, of_attack in {**{name: ATTACKS[name] for name in BESIDE[:2]}, **DOORS.get(method, {})}.items():
            for defence in ("checks", "median") if method in CROSSED and method != "stamp" else ("checks",):
                yield method, attack, defence, [*attacking(of_attack), *DEFENCES[defence]]


def of_baselines() -> Iterator[tuple[str, str, str, list[str]]]:
    """The same, of what each of them sends."""
    updates = {name: ATTACKS[name] for name in ("none", "label flip", "sign flip x 5", "claim x 10")}
    prototypes = {"prototype x 10": ["prototype", "strength=10"]}
    further = {
        "pip-l2p": {**updates, **prototypes},
        "nearest-prototype": {"none": [], "label flip": ATTACKS["label flip"], **prototypes},
    }
    for method in BASELINES:
        rules = ("checks",) if method in ("fedomg", "nearest-prototype") else ("checks", "multi-krum")
        for attack, of_attack in further.get(method, updates).items():
            for defence in rules:
                yield method, attack, defence, [*attacking(of_attack), *DEFENCES[defence]]


def wanted(methods: list[str], seeds: list[int], out: Path) -> Runs:
    found = {}
    known = {**METHODS, **{name: (DIGITS, name, settings) for name, settings in BASELINES.items()}}
    for method, attack, defence, settings in [*combinations(methods), *of_baselines()]:
        shared, name, own = known[method]
        some = seeds[:1] if method in BASELINES else seeds
        study = Study(params="params.yaml", set=shared, seeds=some, metrics=[], rows={})
        found[method, attack, defence] = jobs(study, Row(method=name, set=[*own, *settings]), [], some, False, out)
    return found


def cell(runs: list[Job], name: str = "acc") -> str:
    done = list(filter(finished, runs))
    told = spread([metric(read_run(job.folder).result.metrics, "task_aware", name) for job in done]) if done else ""
    early = f"{len(runs) - len(done)} of {len(runs)} ended early" if len(done) < len(runs) else ""
    return ", ".join(filter(None, (told, early)))


def taken(job: Job, patch: bool) -> float:
    """Of test images that are not of a task's first class, the task given, the share that gets that class's label."""
    model, splits, shares = Model(job.folder / "model"), Splits.open(splits_of(job.load(), job.out)), []
    for task in splits.tasks:
        rows = splits.test_rows(task.index)
        wanted = target(task.classes)
        images = splits.images[torch.from_numpy(rows.samples[rows.labels != wanted])]
        answers = model.answer((patched(images) if patch else images).numpy(), task.index + 1)
        shares.append(np.mean([answer["class"] == splits.classes[wanted] for answer in answers]))
    return float(np.mean(shares))


def tables(methods: list[str], runs: Runs) -> Iterator[str]:
    header = "| | " + " | ".join(DEFENCES) + " |\n" + "|---" * (len(DEFENCES) + 1) + "|"
    crossed = [method for method in methods if method in CROSSED]
    for method in crossed:
        yield "\n" + header
        for attack in ATTACKS:
            cells = (cell(runs.get((method, attack, defence), [])) for defence in DEFENCES)
            yield f"| {method}, {attack} | " + " | ".join(cells) + " |"
    yield "\n" + header
    for method in crossed:
        for attack in ("none", "backdoor"):
            found = (list(filter(finished, runs.get((method, attack, defence), []))) for defence in DEFENCES)
            cells = (spread([taken(job, True) for job in of]) if of else "" for of in found)
            yield f"| {method}, {attack} | " + " | ".join(cells) + " |"
    yield "\n| | defence | " + " | ".join(TOLD) + " |\n" + "|---" * (len(TOLD) + 2) + "|"
    for method in methods:
        for attack in (*BESIDE, *DOORS.get(method, {})):
            for defence in ("checks", "median"):
                if of := runs.get((method, attack, defence)):
                    yield f"| {method}, {attack} | {defence} | " + " | ".join(cell(of, name) for name in TOLD) + " |"


def table_of_baselines(runs: Runs) -> Iterator[str]:
    columns = list(dict.fromkeys((attack, defence) for _, attack, defence, _ in of_baselines()))
    yield "\n| | " + " | ".join(f"{attack}, {defence}" for attack, defence in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for method in BASELINES:
        yield f"| {method} | " + " | ".join(cell(runs.get((method, *column), [])) for column in columns) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tries/attacks"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    given = parser.parse_args()
    runs = wanted(given.methods, given.seeds, given.out)
    with ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn")) as pool:
        do(pool, [job for of_row in runs.values() for job in of_row])
    print("\n".join([*tables(given.methods, runs), *table_of_baselines(runs)]))


if __name__ == "__main__":
    main()
