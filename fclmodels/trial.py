"""What a method is, from its own words, and what travels, from the ledger of a short trial on the embedded digits.

The trial has two tasks of two digits each, three clients and two rounds a task, on a small network.
"""

import inspect
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import polars as pl

from fclmodels import params as reading
from fclmodels.backbones.adapters import OnVit
from fclmodels.data.split import splits_of
from fclmodels.data.splits import Splits
from fclmodels.experiment import Experiment
from fclmodels.plugins import find

SETTINGS = """
data: {source: digits}
stream: {kind: class-incremental, tasks: 2, classes_per_task: 2}
partition: {kind: iid, clients: 3, train_share: 0.2}
model: {backbone: cnn}
federation: {rounds: 2, executor: serial}
device: cpu
"""
VIT = ("model.backbone=vit", "model.patch=2", "model.width=16", "model.depth=5", "model.attention_heads=2")
WAYS = {
    "sends in each round": ("up", False),
    "sends after a task": ("up", True),
    "receives in each round": ("down", False),
    "receives after a task": ("down", True),
}
WORDS = 240  # letters of a method's own text that a terminal shows

About = dict[str, Any]


def about(names: Sequence[str]) -> list[About]:
    """Of each method: name, what it does, paper, its module's text, and what its clients send, receive and keep."""
    kinds = [find("method", name) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        settings = home / "params.yaml"
        settings.write_text(SETTINGS)
        splits = Splits.open(splits_of(reading.load(settings), home))
        return [_words(kind) | _traffic(kind, settings, splits, home) for kind in kinds]


def lines(found: About) -> list[str]:
    """At most ten lines for a terminal."""
    told = [f"{found['name']}: {found['what']}", f"from: {found['paper']}"]
    told += [shorten(text, WORDS, placeholder=" ...") for text in found["text"][1:2]]
    traffic, network = found["traffic"], found["model_bytes"]
    for what in ("sends", "receives", "keeps"):
        ways = {way.removeprefix(what).strip(): parts for way, parts in traffic.items() if way.startswith(what)}
        parts = [f"{when} {', '.join(map(_part, of_way))}".strip() for when, of_way in ways.items() if of_way]
        told += [f"a client {what}: {'; '.join(parts)}"] if parts else []
    told.append(f"of that the server needs {_least(traffic)}; 100 % is the network of a short trial ({network} B)")
    if found["predicts_tasks"]:
        told.append("it predicts the task of a sample by itself")
    return [*told, f"settings: fcl params {found['name']}"]


def _words(kind: Any) -> About:
    """The module's text as paragraphs, without its title."""
    module = inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "")
    paragraphs = [" ".join(part.split()) for part in module.split("\n\n")]
    return {
        "name": kind.name,
        "what": inspect.cleandoc(kind.__doc__).partition("\n")[0],
        "paper": kind.paper,
        "words": module,
        "text": [shorten(part, 400, placeholder=" ...") for part in paragraphs if not part.startswith("knowledge:")],
    }


def _traffic(kind: Any, settings: Path, splits: Splits, home: Path) -> About:
    on_vit = issubclass(getattr(kind, "attaches", object), OnVit)
    params = reading.load(settings, VIT if on_vit else ())
    folder = home / kind.name / "run"
    with Experiment(params, kind.name, 0, splits, home / kind.name) as experiment:
        experiment.run(folder)
    ledger = pl.read_parquet(folder / "ledger.parquet").filter(pl.col("task") == 1)
    model = (folder / "model" / "weights.safetensors").stat().st_size
    ways = {way: ledger.filter(direction=d).filter((pl.col("round") < 0) == after) for way, (d, after) in WAYS.items()}
    ways["keeps"] = ledger.filter(direction="kept").group_by("client", "part", maintain_order=True).last()
    traffic = {way: _parts(rows, model) for way, rows in ways.items()}
    predicts = (folder / "confusion.parquet").exists()
    return {"traffic": traffic, "model_bytes": model, "predicts_tasks": predicts}


def _parts(rows: pl.DataFrame, model: int) -> list[dict[str, Any]]:
    """Each part with its kind, bytes of one client's message, share of the network's, and the least that is needed."""
    found = rows.group_by("part", "kind", "least", maintain_order=True).agg(pl.col("bytes").mean())
    return [row | {"share": row["bytes"] / model} for row in found.sort("part").to_dicts() if row["bytes"]]


def _part(row: dict[str, Any]) -> str:
    name = row["part"] if row["part"] == row["kind"] else f"{row['part']} ({row['kind']})"
    return f"{name} {100 * row['share']:.3g} %"


def _least(traffic: dict[str, list[dict[str, Any]]]) -> str:
    sent = [row for way in WAYS if way.startswith("sends") for row in traffic[way]]
    each = sorted({row["part"] for row in sent if row["least"] == "each"})
    if not sent:
        return "nothing: its clients send no message"
    return f"single replies of {', '.join(each)}, else sums" if each else "sums over clients alone"
