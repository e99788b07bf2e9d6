"""Tiny splits made by hand, and settings to match, on which a run takes a second."""

import hashlib
import json
import tempfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fclmodels.data.splits.split_reader import SCHEMA, Splits, digest_splits
from fclmodels.settings.load import load_params
from fclmodels.settings.schema import Params

SETTINGS = """
partition: {clients: 1000}
model: {backbone: mlp, hidden: 12, dropout: [0, 0], width: 2, stem: cifar}
federation: {rounds: 2, batch_size: 4, executor: serial, workers: 1}
optimizer: {lr: 0.1}
methods:
  {fed-cil: {width: 1, noise: 4, consolidation: 2}, mfcl: {steps: 2, batch: 8, noise: 4, width: 2, synthetic_batch: 4},
  glfc: &few {inversion_steps: 2, iterates: 1}, lga: *few, target: &small {pool: 12, batch: 8, g_steps: 2, warmup: 1,
  student_steps: 2, noise: 4, width: 2}, target-lode: *small, lander: *small}
device: cpu
"""
# For methods that attach something to the layers of a transformer, in place of the network above.
VIT = (
    *("model.backbone=vit", "model.patch=3", "model.width=8", "model.depth=2", "model.attention_heads=2"),
    "model.mlp_width=8",
)
# For a method whose tokens attend to its patches.
CONVIT = (
    *("model.backbone=convit", "model.patch=3", "model.width=8", "model.depth=1", "model.attention_heads=4"),
    *("model.mlp_ratio=2", "model.head=per-task"),
)


def load_tiny_params(*overrides: str, settings: str = SETTINGS) -> Params:
    """Return these settings after overrides such as "federation.rounds=3"."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(settings)
        file.flush()
        return load_params(file.name, overrides)


def write_splits(
    folder: Path,
    *,
    tasks: int = 2,
    classes: int = 2,
    clients: int = 4,
    train: int | Mapping[tuple[int, int], int] = 8,
    val: int = 0,
    test: int = 4,
    shared_test: bool = False,
    same_classes: bool = False,
    permuted: bool = False,
    head: str = "growing",
    shape: tuple[int, int, int] = (1, 6, 6),
    noise: int = 30,
    seed: int = 0,
) -> Splits:
    """Write prepared images and their splits; return these. `train`: samples of each (task, client), or of all.

    Each class is a random pattern with noise of that amplitude over it; a domain (one a task) shifts its brightness.
    """
    sizes = train if isinstance(train, Mapping) else dict.fromkeys(product(range(tasks), range(clients)), train)
    rows: list[tuple[int, int, int, int, int, str]] = []
    images: list[np.ndarray] = []
    patterns = np.random.default_rng(2 * seed).integers(40, 180, (tasks * classes, *shape))
    random = np.random.default_rng(2 * seed + 1)
    for task, client in product(range(tasks), range(clients)):
        test_owner = -1 if shared_test else client
        for split, count, owner in (
            ("train", sizes.get((task, client), 0), client),
            ("val", val, client),
            ("test", test, test_owner),
        ):
            for i in range(count if (task, client) in sizes or split == "test" else 0):
                kind = (i + client) % classes
                label = kind if same_classes else task * classes + kind
                rows.append((len(rows), label, task if same_classes else 0, task, owner, split))
                pattern = patterns[label] + 20 * task * same_classes
                images.append((pattern + random.integers(0, noise, shape)).clip(0, 255))
    prepared_digest = _write_prepared(folder / "prepared", np.array(images, np.uint8))
    manifest = pl.DataFrame(rows, schema=SCHEMA, orient="row").sort("task", "client", "split", "sample")
    facts: dict[str, Any] = {
        "format": 1,
        "kind": "by-hand",
        "tasks": [
            {
                "name": f"task {t}",
                "classes": list(range(classes)) if same_classes else list(range(t * classes, (t + 1) * classes)),
                "permutation": t if permuted and t else None,
                "classes_by_client": None,
            }
            for t in range(tasks)
        ],
        "classes": [f"class {c}" for c in range(classes if same_classes else tasks * classes)],
        "domains": [f"domain {t}" for t in range(tasks if same_classes else 1)],
        "clients": clients,
        "shape": list(shape),
        "mean": [0.5] * shape[0],
        "std": [0.25] * shape[0],
        "head": head,
        "prepared": "../prepared",
        "prepared_digest": prepared_digest,
    }
    facts["digest"] = digest_splits(manifest, facts)
    splits = folder / "splits"
    splits.mkdir()
    manifest.write_parquet(splits / "manifest.parquet")
    (splits / "stream.json").write_text(json.dumps(facts))
    return Splits.open(splits)


def _write_prepared(folder: Path, images: np.ndarray) -> str:
    """Write prepared images [N, C, H, W] and return their digest."""
    folder.mkdir(parents=True)
    np.save(folder / "images.npy", images)
    digest = hashlib.sha256(images.tobytes()).hexdigest()
    (folder / "meta.json").write_text(json.dumps({"format": 1, "digest": digest}))
    return digest
