"""How many patched test images are taken for the attackers' label, in a study's runs that are done, as Markdown.

    python bench/backdoor.py bench/studies/attacks.yaml [--out tries/attacks]

Of each task's test images that are not of its first class, the task given: the share that gets that class's label with
the patch, and without it. Runs that had no backdoor say what the patch does by itself.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import yaml
from study import Study, finished, jobs, splits_of, spread

from fclmodels.data.splits import Splits
from fclmodels.federation.attacks import patched, target
from fclmodels.served import Model


def taken(model: Model, splits: Splits, patch: bool) -> float:
    """The mean over tasks."""
    shares = []
    for task in splits.tasks:
        rows = splits.test_rows(task.index)
        wanted = target(task.classes)
        images = splits.images[torch.from_numpy(rows.samples[rows.labels != wanted])]
        answers = model.answer((patched(images) if patch else images).numpy(), task.index + 1)
        shares.append(np.mean([answer["class"] == splits.classes[wanted] for answer in answers]))
    return float(np.mean(shares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    study = Study.model_validate(yaml.safe_load(given.study.read_text()))
    out = given.out or Path("tries") / given.study.stem
    print("| | with the patch | without |\n|---|---|---|")
    for label, row in study.rows.items():
        if not any(kind in label for kind in ("none", "backdoor")):
            continue
        done = [job for job in jobs(study, row, [], row.seeds or study.seeds, False, out) if finished(job)]
        if done:
            models = [(Model(job.folder / "model"), Splits.open(splits_of(job.load(), out))) for job in done]
            cells = [spread([taken(*one, patch) for one in models]) for patch in (True, False)]
            print(f"| {label} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
