"""Accuracy on every task, learned or not, in all readings, and which task was predicted for the samples of which.

task_aware: only the known task's columns may answer. task_agnostic: all learned tasks' columns. task_predicted:
the columns of the task that the method predicts for each sample (where a method predicts none, that is the task of
its answer). Learned tasks are mixed in fixed batches, so that no batch tells which task it is from. Where a method can
predict one task for a whole batch, mixed_batch_task_predicted does so with these batches. What depends on the batch
is read a second time in batches of one task, under the name of the papers' protocol.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl
import torch
from torch import Tensor

from fclmodels.backbones.norms import depends_on_batch
from fclmodels.data.batches import Batch
from fclmodels.data.splits import Rows
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Part, Payload, Reply
from fclmodels.federation.prediction import Columns, Prediction
from fclmodels.federation.run import Run
from fclmodels.federation.server import Server
from fclmodels.randomness import generator

if TYPE_CHECKING:
    from fclmodels.methods.base import Method

SCHEMA = pl.Schema(
    {
        "reading": pl.String,
        "after": pl.Int16,
        "task": pl.Int16,
        "client": pl.Int32,
        "correct": pl.Int64,
        "total": pl.Int64,
    }
)
CONFUSION = pl.Schema(
    {"reading": pl.String, "after": pl.Int16, "task": pl.Int16, "predicted": pl.Int16, "count": pl.Int64}
)
HONEST = ("task_aware", "task_agnostic", "task_predicted")
MIXED_BATCH = "mixed_batch_task_predicted"
PAPER = ("paper_task_aware", "paper_task_agnostic", "paper_task_predicted")
READINGS = (*HONEST, MIXED_BATCH, *PAPER)
ANSWERED = pl.Schema(
    {"reading": pl.String, "task": pl.Int64, "client": pl.Int64, "right": pl.Boolean, "predicted": pl.Int64}
)
UNTOLD = -1  # the predicted task where a method predicts none

Predict = Callable[[Tensor], Prediction]


class Tables(NamedTuple):
    """accuracy: counts by task, over all clients and for each that has test rows of its own (SCHEMA).
    confusion: which task the method predicted, for the samples of each learned task (CONFUSION)."""

    accuracy: pl.DataFrame
    confusion: pl.DataFrame


class Answer(NamedTuple):
    """Of each sample [B]: the column of the logits that answers it, and the task predicted for it."""

    columns: Tensor
    tasks: Tensor


def evaluate(method: "Method", server: Server, split: str = "test", at_once: int = 1) -> Tables:
    """Both tables of a model that is the same for all clients, on the test rows or the val rows.

    at_once: batches that pass the network side by side, each as it would by itself.
    """
    run = method.run
    rows = [run.splits.held_out_rows(split, task.index) for task in run.splits.tasks]
    alone = depends_on_batch(method.networks.load(server.spec, server.weights))
    return read(run, method.predictor(server), method.columns(server), rows, server.task + 1, alone, at_once)


def evaluate_learned(method: "Method", server: Server) -> pl.DataFrame:
    """The accuracy table of the tasks up to the server's, in the readings of mixed batches: one pass."""
    run = method.run
    rows = [run.splits.test_rows(task) for task in range(server.task + 1)]
    answered = _answered(run, method.predictor(server), method.columns(server), 1, shuffled(rows))
    return _accuracy(answered.with_columns(after=pl.lit(server.task + 1)))


def evaluate_on_client(method: "Method", client: Client, payload: Payload, split: str) -> Reply:
    """The same on one client, of its own model and on its own rows (all clients' where they share them)."""
    run = method.run
    rows = [run.splits.held_out_rows(split, task.index, client.index) for task in run.splits.tasks]
    server = Server(run.spec(client.task + 1), payload["weights"].tensors, client.task)
    alone = depends_on_batch(method.networks.load(server.spec, server.weights))
    tables = read(run, method.client_predictor(client, payload), method.columns(server), rows, client.task + 1, alone)
    return Reply({"tables": Part("count", encode(tables), "each")})


def read(
    run: Run, predict: Predict, columns: Columns, rows: Sequence[Rows], learned: int, alone: bool, at_once: int = 1
) -> Tables:
    """All readings of one predictor on these test rows, one entry a task; `alone`: its logits depend on the batch."""
    answers_to = partial(_answered, run, predict, columns, at_once)
    parts = []
    if learned:
        parts.append(answers_to(shuffled(rows[:learned])))
    # By the papers' protocol: the reading, and which of the above it repeats.
    papers = dict(zip(PAPER, HONEST, strict=True)) if alone else {}
    if any(MIXED_BATCH in part["reading"] for part in parts):
        papers["paper_task_predicted"] = MIXED_BATCH
    for task in rows[:learned] if papers else []:
        part = answers_to(shuffled([task]))
        parts += [
            part.filter(pl.col("reading") == of).with_columns(reading=pl.lit(name)) for name, of in papers.items()
        ]
    if learned < len(rows):
        # Where logits depend on the batch, tasks to come are mixed with the learned ones too, and only then told apart.
        to_come = answers_to(shuffled(rows if alone else rows[learned:]))
        parts.append(to_come.filter(pl.col("task") >= learned, pl.col("reading").is_in(HONEST)))
    answered = pl.concat(parts).with_columns(after=pl.lit(learned))
    return Tables(_accuracy(answered), _confusion(answered))


def shuffled(rows: Sequence[Rows]) -> Rows:
    """All rows in an order that neither task nor client can be told from; the same in every evaluation."""
    together = Rows.concatenate(rows)
    by_sample = np.lexsort((together.clients, together.samples, together.tasks))
    return together.take(by_sample[torch.randperm(len(together), generator=generator("evaluation")).numpy()])


def _answered(run: Run, predict: Predict, columns: Columns, at_once: int, rows: Rows) -> pl.DataFrame:
    """For each reading and row (ANSWERED): whether it was answered right, and the task predicted for it."""
    if not len(rows):
        return pl.DataFrame(schema=ANSWERED)
    masks, mask_of_row = _task_masks(run, columns, rows)
    found = {reading: _unanswered(rows) for reading in HONEST}
    # What has no column yet cannot be answered right: it need not be computed.
    answerable = np.flatnonzero(np.isin(rows.labels, columns.labels.cpu().numpy()))
    size = run.params.evaluation.batch_size
    places = (answerable[start : start + size] for start in range(0, len(answerable), size))

    @torch.inference_mode()
    def answered(batch: Batch, places: np.ndarray) -> None:
        for reading, answer in _answers(predict(batch.inputs), columns, run, masks[mask_of_row[places]]).items():
            right, predicted = found.setdefault(reading, _unanswered(rows))
            right[places] = (columns.labels[answer.columns] == batch.labels).cpu().numpy()
            predicted[places] = answer.tasks.cpu().numpy()

    side_by_side(answered, zip(run.batches.ordered(rows.take(answerable), size), places, strict=True), at_once)
    # A task none of whose classes has a column yet cannot be answered when the task is given: no row, not 0.
    known = masks.any(1)[mask_of_row].cpu().numpy()
    tables = []
    for reading, (right, predicted) in found.items():
        facts = {"task": rows.tasks, "client": rows.clients, "right": right, "predicted": predicted}
        table = pl.DataFrame(facts).select(pl.lit(reading).alias("reading"), pl.all())
        tables.append(table.filter(pl.Series(known)) if reading == "task_aware" else table)
    return pl.concat(tables)


def side_by_side(work: Callable[..., None], items: Iterable[tuple], at_once: int) -> None:
    """Work on each item, in so many threads; no more items than these are there at a time."""
    items = iter(items)
    if at_once == 1:
        for item in items:
            work(*item)
        return
    with ThreadPoolExecutor(at_once) as threads:
        for now in iter(lambda: list(islice(items, at_once)), []):
            list(threads.map(lambda item: work(*item), now))


def _unanswered(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(len(rows), dtype=bool), np.full(len(rows), UNTOLD)


def _answers(prediction: Prediction, columns: Columns, run: Run, of_task: Tensor) -> dict[str, Answer]:
    """Of each sample of a batch: task known, not known, predicted, predicted for the whole batch where that is so."""
    logits = prediction.logits
    agnostic = logits.argmax(1)
    untold = torch.full_like(agnostic, UNTOLD)
    aware = logits.masked_fill(~of_task, -torch.inf).argmax(1)
    answers = {
        "task_aware": Answer(aware, untold),
        "task_agnostic": Answer(agnostic, untold),
        "task_predicted": Answer(agnostic, untold),
    }
    for reading, scores in (("task_predicted", prediction.task_scores), (MIXED_BATCH, prediction.batch_scores)):
        if scores is not None:
            masks = columns.of_tasks(task.classes for task in run.splits.tasks[: scores.shape[-1]])
            predicted = scores.argmax(-1).expand(len(logits))
            answers[reading] = Answer(logits.masked_fill(~masks[predicted], -torch.inf).argmax(1), predicted)
    return answers


def _accuracy(answered: pl.DataFrame) -> pl.DataFrame:
    """Correct and total by task, over all clients and for each client that has test rows of its own."""
    counts = (pl.col("right").sum().alias("correct"), pl.len().alias("total"))
    of_all = answered.group_by("reading", "after", "task").agg(*counts, client=pl.lit(None, pl.Int64))
    of_each = answered.filter(pl.col("client") >= 0).group_by("reading", "after", "task", "client").agg(*counts)
    both = pl.concat([of_all.select(*SCHEMA).cast(SCHEMA), of_each.select(*SCHEMA).cast(SCHEMA)])
    return both.sort("reading", "client", "task")


def _confusion(answered: pl.DataFrame) -> pl.DataFrame:
    """How many samples of each learned task were taken for one of which, where the method predicts tasks by itself."""
    told = answered.filter(pl.col("predicted") != UNTOLD, pl.col("task") < pl.col("after"))
    counts = told.group_by("reading", "after", "task", "predicted").agg(pl.len().alias("count"))
    return counts.cast(CONFUSION).sort("reading", "task", "predicted")


def _task_masks(run: Run, columns: Columns, rows: Rows) -> tuple[Tensor, Tensor]:
    """Masks over columns [M, C], and which of them holds for each row [n]: its task's, or its client's own."""
    pooled = any(task.classes_by_client is not None for task in run.splits.tasks)
    keys = np.stack([rows.tasks, rows.clients if pooled else np.full_like(rows.tasks, -1)], axis=1)
    distinct, place = np.unique(keys, axis=0, return_inverse=True)
    masks = [
        columns.of_task(int(task), run.splits.tasks[task].classes_of(int(client) if client >= 0 else None))
        for task, client in distinct
    ]
    return torch.stack(masks), torch.from_numpy(place.reshape(-1))


def encode(tables: Tables) -> dict[str, Tensor]:
    """A client's tables for the way to the server, as int64 [rows, columns]: readings by number, no column `client`."""
    of_all = tables.accuracy.filter(pl.col("client").is_null()).drop("client")
    number = pl.col("reading").replace_strict(READINGS, range(len(READINGS)), return_dtype=pl.Int64)
    return {
        name: torch.from_numpy(table.with_columns(number).cast(pl.Int64).to_numpy().copy())
        for name, table in (("accuracy", of_all), ("confusion", tables.confusion))
    }


def gather(encoded: Mapping[int, Mapping[str, Tensor]]) -> Tables:
    """The tables from what each client counted: accuracy theirs and of all together, confusion of all together."""
    accuracy = pl.concat(
        [_decoded(tables["accuracy"], SCHEMA).with_columns(client=pl.lit(client)) for client, tables in encoded.items()]
    )
    of_all = accuracy.group_by("reading", "after", "task").agg(pl.col("correct", "total").sum(), client=pl.lit(None))
    both = pl.concat([table.select(*SCHEMA).cast(SCHEMA) for table in (of_all, accuracy)])
    confusion = pl.concat([_decoded(tables["confusion"], CONFUSION) for tables in encoded.values()])
    counts = confusion.group_by("reading", "after", "task", "predicted").agg(pl.col("count").sum())
    return Tables(both.sort("reading", "client", "task"), counts.cast(CONFUSION).sort("reading", "task", "predicted"))


def _decoded(table: Tensor, schema: pl.Schema) -> pl.DataFrame:
    name = pl.col("reading").replace_strict(range(len(READINGS)), READINGS, return_dtype=pl.String)
    return pl.DataFrame(table.numpy(), schema=[column for column in schema if column != "client"]).with_columns(name)
