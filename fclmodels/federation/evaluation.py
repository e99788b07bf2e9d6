"""Accuracy on every task, learned or not, in all readings, from one pass over the test rows.

task_aware: only the known task's columns may answer. task_agnostic: all learned tasks' columns. task_predicted:
the columns of the task that the method predicts for each sample (where a method predicts none, that is the task of
its answer). Learned tasks are mixed in fixed batches, so that no batch tells which task it is from. A network whose
logits depend on the batch is read a second time in batches of one task, under the name of the papers' protocol.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import torch
from torch import Tensor

from fclmodels.backbones.norms import depends_on_batch
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
HONEST = ("task_aware", "task_agnostic", "task_predicted")
PAPER = ("paper_task_aware", "paper_task_agnostic", "paper_task_predicted")
READINGS = HONEST + PAPER


def evaluate(method: "Method", server: Server) -> pl.DataFrame:
    """The long accuracy table (schema above) of a model that is the same for all clients."""
    run = method.run
    rows = [run.splits.test_rows(task.index) for task in run.splits.tasks]
    alone = depends_on_batch(method.networks.load(server.spec, server.weights))
    return read(run, method.predictor(server), method.columns(server), rows, server.task + 1, alone)


def evaluate_on_client(method: "Method", client: Client, payload: Payload) -> Reply:
    """The same on one client, of its own model and on its own test rows (all clients' where they share them)."""
    run = method.run
    rows = [run.splits.test_rows(task.index, client.index) for task in run.splits.tasks]
    server = Server(run.spec(client.task + 1), payload["weights"].tensors, client.task)
    alone = depends_on_batch(method.networks.load(server.spec, server.weights))
    table = read(run, method.client_predictor(client, payload), method.columns(server), rows, client.task + 1, alone)
    return Reply({"accuracy": Part("count", {"table": encode(table, client.index)}, "each")})


def read(
    run: Run, predict: Callable[[Tensor], Prediction], columns: Columns, rows: Sequence[Rows], learned: int, alone: bool
) -> pl.DataFrame:
    """All readings of one predictor on these test rows, one entry a task."""
    tables = []
    if learned:
        tables.append(_count(run, predict, columns, shuffled(rows[:learned]), HONEST))
    if learned < len(rows):
        # Where logits depend on the batch, tasks to come are mixed with the learned ones too, and only then told apart.
        to_come = _count(run, predict, columns, shuffled(rows if alone else rows[learned:]), HONEST)
        tables.append(to_come.filter(pl.col("task") >= learned))
    if alone:
        tables += [_count(run, predict, columns, shuffled([task]), PAPER) for task in rows[:learned]]
    counted = [table.with_columns(after=pl.lit(learned, pl.Int16)).select(*SCHEMA).cast(SCHEMA) for table in tables]
    return pl.concat([pl.DataFrame(schema=SCHEMA), *counted])


def shuffled(rows: Sequence[Rows]) -> Rows:
    """All rows in an order that neither task nor client can be told from; the same in every evaluation."""
    together = Rows.concatenate(rows)
    by_sample = np.lexsort((together.clients, together.samples, together.tasks))
    return together.take(by_sample[torch.randperm(len(together), generator=generator("evaluation")).numpy()])


@torch.inference_mode()
def _count(
    run: Run, predict: Callable[[Tensor], Prediction], columns: Columns, rows: Rows, readings: Sequence[str]
) -> pl.DataFrame:
    """Correct and total by task, over all clients and for each client that has test rows of its own."""
    if not len(rows):
        return pl.DataFrame(schema=SCHEMA).drop("after")
    masks, mask_of_row = _task_masks(run, columns, rows)
    correct = np.zeros((len(readings), len(rows)), dtype=bool)
    # What has no column yet cannot be answered right: it need not be computed.
    answerable = np.flatnonzero(np.isin(rows.labels, columns.labels.cpu().numpy()))
    start = 0
    for batch in run.batches.ordered(rows.take(answerable), run.params.evaluation.batch_size):
        places = answerable[start : start + len(batch.labels)]
        start += len(batch.labels)
        answers = _answers(predict(batch.inputs), columns, run, masks[mask_of_row[places]])
        for reading, answer in enumerate(answers):
            correct[reading, places] = (columns.labels[answer] == batch.labels).cpu().numpy()
    known = masks.any(1)[mask_of_row].cpu().numpy()
    tables = []
    for name, right in zip(readings, correct, strict=True):
        table = pl.DataFrame({"task": rows.tasks, "client": rows.clients, "correct": right})
        # A task none of whose classes has a column yet cannot be answered when the task is given: no row, not 0.
        table = table.filter(pl.Series(known)) if name.endswith("aware") else table
        counts = (pl.col("correct").sum().cast(pl.Int64), pl.len().cast(pl.Int64).alias("total"))
        of_all = table.group_by("task").agg(pl.lit(None, pl.Int64).alias("client"), *counts)
        of_each = table.filter(pl.col("client") >= 0).group_by("task", "client").agg(*counts)
        both = pl.concat([of_all.select("task", "client", "correct", "total"), of_each])
        tables.append(both.sort("client", "task").with_columns(reading=pl.lit(name)))
    return pl.concat(tables)


def _answers(prediction: Prediction, columns: Columns, run: Run, of_task: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The column that answers each sample: task known, not known, predicted."""
    logits = prediction.logits
    aware = logits.masked_fill(~of_task, -torch.inf).argmax(1)
    agnostic = logits.argmax(1)
    if prediction.task_scores is None:
        return aware, agnostic, agnostic
    tasks = run.splits.tasks[: prediction.task_scores.shape[1]]
    masks = torch.stack([columns.of_task(task.index, task.classes) for task in tasks])
    predicted = masks[prediction.task_scores.argmax(1)]
    return aware, agnostic, logits.masked_fill(~predicted, -torch.inf).argmax(1)


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


def encode(table: pl.DataFrame, client: int) -> Tensor:
    """A client's rows for the way to the server: int64 [n, 5] of reading, after, task, correct, total."""
    of_all = table.filter(pl.col("client").is_null()).with_columns(
        reading=pl.col("reading").replace_strict({name: i for i, name in enumerate(READINGS)})
    )
    return torch.from_numpy(
        of_all.select("reading", "after", "task", "correct", "total").cast(pl.Int64).to_numpy().copy()
    )


def gather(tables: dict[int, Tensor]) -> pl.DataFrame:
    """The long accuracy table from what clients counted: theirs, and their sums."""
    frames = [
        pl.DataFrame(table.numpy(), schema=["reading", "after", "task", "correct", "total"]).with_columns(
            client=pl.lit(client)
        )
        for client, table in tables.items()
    ]
    each = pl.concat(frames).with_columns(
        reading=pl.col("reading").replace_strict(dict(enumerate(READINGS)), return_dtype=pl.String)
    )
    of_all = each.group_by("reading", "after", "task").agg(
        pl.col("correct").sum(), pl.col("total").sum(), client=pl.lit(None, pl.Int32)
    )
    return pl.concat([of_all.select(*SCHEMA).cast(SCHEMA), each.select(*SCHEMA).cast(SCHEMA)]).sort(
        "reading", "client", "task"
    )
