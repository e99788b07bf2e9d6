"""Card of a method: its own description, and its traffic in a short trial on the embedded digits.

The trial has two tasks of two digits each, three clients and two rounds a task, on a small network; what the server
trains it trains for a few steps, which changes no message's size.
"""

import inspect
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import polars as pl

from fclmodels.backbones.adapters.adapted import Adapted
from fclmodels.data.splits.make_splits import make_splits
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.engine.cohort import BEFORE_ROUNDS
from fclmodels.federation.messages import Kind
from fclmodels.federation.protection.disclosures import DISCLOSURES
from fclmodels.plugins import find
from fclmodels.settings.load import load_params

SETTINGS = """
data: {source: digits}
stream: {kind: class-incremental, tasks: 2, classes_per_task: 2}
partition: {kind: iid, clients: 3, train_share: 0.2}
model: {backbone: cnn}
federation: {rounds: 2, executor: serial}
methods:
  {glfc: &few {inversion_steps: 2, iterates: 1}, lga: *few, target: &short {g_steps: 1, warmup: 1, student_steps: 1,
  width: 2}, target-lode: *short, lander: *short, mfcl: {steps: 2, batch: 16}, fed-cil: {consolidation: 1}}
device: cpu
"""
VIT = ("model.backbone=vit", "model.patch=2", "model.width=16", "model.depth=5", "model.attention_heads=2")
CONVIT = ("model.backbone=convit", "model.patch=2", "model.width=16", "model.attention_heads=4", "model.head=per-task")
TIMES = {  # of an exchange, by its number
    "before a task": pl.col("round") < -BEFORE_ROUNDS,
    "in each round": pl.col("round") >= 0,
    "after a task": pl.col("round").is_between(-BEFORE_ROUNDS, -1),
}
ONCE = "in the first task alone"  # parts that no later one has
WAYS = {
    f"{verb} {time}": (direction, time)
    for verb, direction in (("sends", "up"), ("receives", "down"))
    for time in ("in each round", "after a task", "before a task", ONCE)
}
MOST_LETTERS = 240  # of a method's own text that a terminal shows

MethodCard = dict[str, Any]


def describe_methods(names: Sequence[str]) -> list[MethodCard]:
    """Return of each method: name, summary, paper, its module's text, and what its clients send, receive and keep."""
    kinds = [find("method", name) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        settings = home / "params.yaml"
        settings.write_text(SETTINGS)
        splits = Splits.open(make_splits(load_params(settings), home))
        return [_describe(kind) | _measure_traffic(kind, settings, splits, home) for kind in kinds]


def format_card(card: MethodCard) -> list[str]:
    """Return at most ten lines for a terminal."""
    lines = [f"{card['name']}: {card['what']}", f"from: {card['paper']}"]
    lines += [shorten(text, MOST_LETTERS, placeholder=" ...") for text in card["text"][1:2]]
    traffic, network = card["traffic"], card["model_bytes"]
    for what in ("sends", "receives", "keeps"):
        ways = {way.removeprefix(what).strip(): parts for way, parts in traffic.items() if way.startswith(what)}
        parts = [f"{when} {', '.join(map(_format_part, of_way))}".strip() for when, of_way in ways.items() if of_way]
        lines += [f"a client {what}: {'; '.join(parts)}"] if parts else []
    needs = _describe_needs(traffic)
    lines.append(f"of that the server needs {needs}; 100 % is the network of a short trial ({network} B)")
    if kinds := _list_sent_kinds(traffic):
        lines.append("what it sends opens: " + "; ".join(f"{kind}, {DISCLOSURES[kind].opens}" for kind in kinds))
    if card["predicts_tasks"]:
        lines.append("it predicts the task of a sample by itself")
    return [*lines, f"settings: fcl params {card['name']}"]


def _describe(kind: Any) -> MethodCard:
    """Return the texts of the method's class and of its module, the latter in paragraphs too."""
    module = inspect.cleandoc(sys.modules[kind.__module__].__doc__ or "")
    paragraphs = [" ".join(part.split()) for part in module.split("\n\n")]
    return {
        "name": kind.name,
        "what": inspect.cleandoc(kind.__doc__).partition("\n")[0],
        "paper": kind.paper,
        "words": module,
        "text": [shorten(part, 400, placeholder=" ...") for part in paragraphs if not part.startswith("knowledge:")],
    }


def _measure_traffic(kind: Any, settings: Path, splits: Splits, home: Path) -> MethodCard:
    params = load_params(settings, _choose_network(kind))
    folder = home / kind.name / "run"
    with Experiment(params, kind.name, 0, splits, home / kind.name) as experiment:
        experiment.run(folder)
    whole = pl.read_parquet(folder / "ledger.parquet")
    first, ledger = whole.filter(pl.col("task") == 0), whole.filter(pl.col("task") == 1)
    first = first.join(ledger, on=["direction", "part"], how="anti")
    model = (folder / "model" / "weights.safetensors").stat().st_size
    ways = {
        way: (first if time == ONCE else ledger.filter(TIMES[time])).filter(direction=direction)
        for way, (direction, time) in WAYS.items()
    }
    ways["keeps"] = ledger.filter(direction="kept").group_by("client", "part", maintain_order=True).last()
    traffic = {way: _list_parts(rows, model) for way, rows in ways.items()}
    predicts = (folder / "confusion.parquet").exists()
    return {"traffic": traffic, "model_bytes": model, "predicts_tasks": predicts}


def _choose_network(kind: Any) -> tuple[str, ...]:
    """Return the settings of a network that a method can run on."""
    if getattr(kind, "needs_backbone", None) == "convit":
        return CONVIT
    if getattr(kind, "needs_own_heads", False):
        return ("model.head=per-task",)
    return VIT if getattr(kind, "attaches", Adapted).needs_transformer else ()


def _list_parts(rows: pl.DataFrame, model: int) -> list[dict[str, Any]]:
    """Return each part with its kind, bytes of one client's message, share of the network's, and the least needed."""
    parts = rows.group_by("part", "kind", "least", maintain_order=True).agg(pl.col("bytes").mean())
    return [row | {"share": row["bytes"] / model} for row in parts.sort("part").to_dicts() if row["bytes"]]


def _format_part(row: dict[str, Any]) -> str:
    name = row["part"] if row["part"] == row["kind"] else f"{row['part']} ({row['kind']})"
    return f"{name} {100 * row['share']:.3g} %"


def _list_sent_kinds(traffic: dict[str, list[dict[str, Any]]]) -> list[Kind]:
    """Return the kinds of what a client sends, in the order of DISCLOSURES."""
    kinds = {row["kind"] for way in WAYS if way.startswith("sends") for row in traffic[way]}
    return [kind for kind in DISCLOSURES if kind in kinds]


def _describe_needs(traffic: dict[str, list[dict[str, Any]]]) -> str:
    sent = [row for way in WAYS if way.startswith("sends") for row in traffic[way]]
    if not sent:
        return "nothing: its clients send no message"
    each, group = (sorted({row["part"] for row in sent if row["least"] == least}) for least in ("each", "group"))
    singles = [f"single replies of {', '.join(each)}"] if each else []
    groups = [f"sums over groups of clients of {', '.join(group)}"] if group else []
    return ", ".join([*singles, *groups, "else sums"]) if singles or groups else "sums over clients alone"
