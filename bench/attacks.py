"""Attacks against defences: two bad clients of ten, the embedded digits in two tasks of five classes, as Markdown.

    fcl pretrain --out data/pretrained/letters     # for pip-dualp
    python bench/attacks.py [--out tries/attacks] [--workers 2] [--methods fedavg fot] [--seeds 0 1 2]

For each method the accuracy with the task given, attack by defence; then how many test images with the backdoor's patch
are taken for the attackers' label; then attacks on what methods send beside updates, also on permuted pixels; last the
baselines, with the first seed alone. Runs are folders below --out, and are not run again.
"""

import argparse
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from runs import ALONE, Job, find_metric, format_spread, is_finished, make_splits, run_jobs

from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.exported_model import ExportedModel
from fclmodels.federation.protection.attacks import patch_images, target
from fclmodels.report.read_runs import read_run

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
# Methods with each attack against each defence; the others are for attacks on other parts than updates.
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
# Attacks on parts beside updates, and in the first task alone: whether its poison lasts.
EXTRA_ATTACKS = {
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
COMMON_ATTACKS = ("none", "label flip", "sign flip x 5")
METRICS = ("acc", "learning_acc", "task_agnostic.acc", "task_predicted.acc")

Runs = dict[tuple[str, str, str], list[Job]]  # of a method, an attack and a defence, one for each seed


def attack_settings(attack: list[str]) -> list[str]:
    return [f"federation.attack.{one}" for one in (f"kind={attack[0]}", *attack[1:])] if attack else []


def combine(methods: list[str]) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield method, attack, defence, and the settings of the last two; aligned updates have no robust rule."""
    for method in methods:
        rules = ["none", "checks"] if method == "stamp" else list(DEFENCES)
        for attack, of_attack in ATTACKS.items():
            for defence in rules:
                # Bits are the same with and without checks that refuse nobody.
                if method in CROSSED and (defence != "none" or attack == "scaled x 100"):
                    yield method, attack, defence, [*attack_settings(of_attack), *DEFENCES[defence]]
        common = {name: ATTACKS[name] for name in COMMON_ATTACKS[:2]}
        for attack, of_attack in {**common, **EXTRA_ATTACKS.get(method, {})}.items():
            for defence in ("checks", "median") if method in CROSSED and method != "stamp" else ("checks",):
                yield method, attack, defence, [*attack_settings(of_attack), *DEFENCES[defence]]


def combine_baselines() -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield the same for the baselines, with attacks on the parts that each sends."""
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
                yield method, attack, defence, [*attack_settings(of_attack), *DEFENCES[defence]]


def list_runs(methods: list[str], seeds: list[int], out: Path) -> Runs:
    jobs_by_row = {}
    methods_by_label = {**METHODS, **{name: (DIGITS, name, settings) for name, settings in BASELINES.items()}}
    for method, attack, defence, settings in [*combine(methods), *combine_baselines()]:
        shared, name, own = methods_by_label[method]
        some = seeds[:1] if method in BASELINES else seeds
        of_row = {"settings": [*shared, *ALONE, *own, *settings], "method": name, "out": out}
        jobs_by_row[method, attack, defence] = [Job(params="params.yaml", seed=seed, **of_row) for seed in some]
    return jobs_by_row


def format_cell(runs: list[Job], name: str = "acc") -> str:
    finished_jobs = list(filter(is_finished, runs))
    cell_text = (
        format_spread([find_metric(read_run(job.folder).result.metrics, "task_aware", name) for job in finished_jobs])
        if finished_jobs
        else ""
    )
    early = f"{len(runs) - len(finished_jobs)} of {len(runs)} ended early" if len(finished_jobs) < len(runs) else ""
    return ", ".join(filter(None, (cell_text, early)))


def share_with_target(job: Job, patch: bool) -> float:
    """Return the share of test images of other classes that get the label of the task's first class (task-aware)."""
    model, splits, shares = ExportedModel(job.folder / "model"), Splits.open(make_splits(job.load(), job.out)), []
    for task in splits.tasks:
        rows = splits.select_test_rows(task.index)
        list_runs = target(task.classes)
        images = splits.images[torch.from_numpy(rows.samples[rows.labels != list_runs])]
        answers = model.answer((patch_images(images) if patch else images).numpy(), task.index + 1)
        shares.append(np.mean([answer["class"] == splits.classes[list_runs] for answer in answers]))
    return float(np.mean(shares))


def format_tables(methods: list[str], runs: Runs) -> Iterator[str]:
    header = "| | " + " | ".join(DEFENCES) + " |\n" + "|---" * (len(DEFENCES) + 1) + "|"
    crossed = [method for method in methods if method in CROSSED]
    for method in crossed:
        yield "\n" + header
        for attack in ATTACKS:
            cells = (format_cell(runs.get((method, attack, defence), [])) for defence in DEFENCES)
            yield f"| {method}, {attack} | " + " | ".join(cells) + " |"
    yield "\n" + header
    for method in crossed:
        for attack in ("none", "backdoor"):
            jobs_by_row = (list(filter(is_finished, runs.get((method, attack, defence), []))) for defence in DEFENCES)
            cells = (format_spread([share_with_target(job, True) for job in of]) if of else "" for of in jobs_by_row)
            yield f"| {method}, {attack} | " + " | ".join(cells) + " |"
    yield "\n| | defence | " + " | ".join(METRICS) + " |\n" + "|---" * (len(METRICS) + 2) + "|"
    for method in methods:
        for attack in (*COMMON_ATTACKS, *EXTRA_ATTACKS.get(method, {})):
            for defence in ("checks", "median"):
                if of := runs.get((method, attack, defence)):
                    yield (
                        f"| {method}, {attack} | {defence} | "
                        + " | ".join(format_cell(of, name) for name in METRICS)
                        + " |"
                    )


def format_baselines(runs: Runs) -> Iterator[str]:
    columns = list(dict.fromkeys((attack, defence) for _, attack, defence, _ in combine_baselines()))
    yield "\n| | " + " | ".join(f"{attack}, {defence}" for attack, defence in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for method in BASELINES:
        yield f"| {method} | " + " | ".join(format_cell(runs.get((method, *column), [])) for column in columns) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tries/attacks"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    runs = list_runs(options.methods, options.seeds, options.out)
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        run_jobs(pool, [job for of_row in runs.values() for job in of_row])
    print("\n".join([*format_tables(options.methods, runs), *format_baselines(runs)]))


if __name__ == "__main__":
    main()
