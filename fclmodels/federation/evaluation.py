"""Evaluation: accuracy on every task, learned or not, in all readings, and a confusion table of predicted tasks.

task_aware: only columns of the sample's task may answer. task_agnostic: columns of all learned tasks. task_predicted:
columns of the task that the method predicts for each sample (of all learned tasks, where it predicts none).
Learned tasks are mixed in fixed batches, so that no batch tells which task it is from. Where a method can predict one
task for a whole batch, mixed_batch_task_predicted does so with these batches. Readings that depend on the batch are
taken a second time in batches of one task, under the name of the papers' protocol. Where clients have models of their
own beside the server's, these answer too, each on its own classes, in the readings personal_*.
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

from fclmodels.backbones.layers.norms import depends_on_batch
from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Rows
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Part, Payload, Reply
from fclmodels.federation.prediction import Columns, Prediction
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.randomness import make_generator
from fclmodels.tables import ACCURACY, CONFUSION, HONEST, MIXED_BATCH, PAPER, PERSONAL, READINGS

if TYPE_CHECKING:
    from fclmodels.federation.method import Method

SAMPLE_ANSWERS = pl.Schema(
    {"reading": pl.String, "task": pl.Int64, "client": pl.Int64, "right": pl.Boolean, "predicted": pl.Int64}
)
NO_TASK = -1  # the predicted task where a method predicts none

Predict = Callable[[Tensor], Prediction]


class Tables(NamedTuple):
    """The result of an evaluation."""

    accuracy: pl.DataFrame  # counts by task, over all clients and for each that has test rows of its own (ACCURACY)
    confusion: pl.DataFrame  # which task the method predicted, for the samples of each learned task (CONFUSION)


class BatchAnswers(NamedTuple):
    """How a batch of B samples is answered in one reading."""

    columns: Tensor  # [B], the column of the logits that answers a sample
    tasks: Tensor  # [B], the task predicted for it, or NO_TASK


def evaluate(method: "Method", server: Server, split: str = "test", at_once: int = 1) -> Tables:
    """Return both tables of a model that is the same for all clients, on the test rows or the val rows.

    at_once: batches that pass the network in parallel, with the same results as one by one.
    """
    run = method.run
    rows = [run.splits.select_held_out_rows(split, task.index) for task in run.splits.tasks]
    alone = depends_on_batch(method.networks.load(server.spec, server.weights))
    return read(run, method.make_predictor(server), method.list_columns(server), rows, server.task + 1, alone, at_once)


def evaluate_learned(method: "Method", server: Server) -> pl.DataFrame:
    """Return the accuracy table of the tasks up to the server's, in the readings of mixed batches: one pass."""
    run = method.run
    rows = [run.splits.select_test_rows(task) for task in range(server.task + 1)]
    answers = _answer_rows(run, method.make_predictor(server), method.list_columns(server), 1, shuffle_rows(rows))
    return _count_accuracy(answers.with_columns(after=pl.lit(server.task + 1)))


def evaluate_on_client(method: "Method", client: Client, payload: Payload, split: str) -> Reply:
    """Return the reply with both tables of a client's own model, on its own rows (or those that clients share)."""
    run = method.run
    rows = [run.splits.select_held_out_rows(split, task.index, client.index) for task in run.splits.tasks]
    if method.has_global_model:
        rows = [select_own_classes(run, task, client.index, of) for task, of in enumerate(rows)]
    server = Server(run.make_spec(client.task + 1), payload["weights"].tensors, client.task)
    alone = depends_on_batch(method.networks.build(server.spec))
    predictor = method.make_client_predictor(client, payload)
    tables = read(run, predictor, method.list_columns(server), rows, client.task + 1, alone)
    return Reply({"tables": Part("count", encode(tables), "each")})


def select_own_classes(run: Run, task: int, client: int, rows: Rows) -> Rows:
    """Return those of a task's rows whose class the client has in its train rows of the task."""
    own = run.splits.select_rows(task, "train", client).labels
    return rows.take(np.flatnonzero(np.isin(rows.labels, own)))


def put_beside(tables: Tables, personal: Tables) -> Tables:
    """Return the tables of the server's model, with the accuracy of the clients' own models under names of its own."""
    name = pl.col("reading")
    apart = personal.accuracy.filter(name.is_in(list(PERSONAL))).with_columns(name.replace(PERSONAL))
    return Tables(pl.concat([tables.accuracy, apart]), tables.confusion)


def read(
    run: Run, predict: Predict, columns: Columns, rows: Sequence[Rows], learned: int, alone: bool, at_once: int = 1
) -> Tables:
    """Return both tables of a predictor on these rows, one entry a task; `alone`: its logits depend on the batch."""
    answer_rows = partial(_answer_rows, run, predict, columns, at_once)
    parts = []
    if learned:
        parts.append(answer_rows(shuffle_rows(rows[:learned])))
    # Readings by the papers' protocol, and which of the above each repeats.
    papers = dict(zip(PAPER, HONEST, strict=True)) if alone else {}
    if any(MIXED_BATCH in part["reading"] for part in parts):
        papers["paper_task_predicted"] = MIXED_BATCH
    for task in rows[:learned] if papers else []:
        part = answer_rows(shuffle_rows([task]))
        parts += [
            part.filter(pl.col("reading") == of).with_columns(reading=pl.lit(name)) for name, of in papers.items()
        ]
    if learned < len(rows):
        # Where logits depend on the batch, tasks to come are mixed with the learned ones, and filtered afterwards.
        to_come = answer_rows(shuffle_rows(rows if alone else rows[learned:]))
        parts.append(to_come.filter(pl.col("task") >= learned, pl.col("reading").is_in(HONEST)))
    answers = pl.concat(parts).with_columns(after=pl.lit(learned))
    return Tables(_count_accuracy(answers), _count_confusion(answers))


def shuffle_rows(rows: Sequence[Rows]) -> Rows:
    """Return all rows in an order that reveals neither task nor client; the same in every evaluation."""
    together = Rows.concatenate(rows)
    by_sample = np.lexsort((together.clients, together.samples, together.tasks))
    return together.take(by_sample[torch.randperm(len(together), generator=make_generator("evaluation")).numpy()])


def _answer_rows(run: Run, predict: Predict, columns: Columns, at_once: int, rows: Rows) -> pl.DataFrame:
    """Return for each reading and row whether the answer is right, and the task predicted (SAMPLE_ANSWERS)."""
    if not len(rows):
        return pl.DataFrame(schema=SAMPLE_ANSWERS)
    masks, mask_of_row = _make_task_masks(run, columns, rows)
    results = {reading: _make_wrong_answers(rows) for reading in HONEST}
    # A class without a column yet cannot be answered right: its samples need not pass the network.
    answerable = np.flatnonzero(np.isin(rows.labels, columns.labels.cpu().numpy()))
    size = run.params.evaluation.batch_size
    places = (answerable[start : start + size] for start in range(0, len(answerable), size))

    @torch.inference_mode()
    def answer_batch(batch: Batch, places: np.ndarray) -> None:
        prediction = predict(batch.inputs)
        for reading, answer in _answer_by_reading(prediction, columns, run, masks[mask_of_row[places]]).items():
            right, predicted = results.setdefault(reading, _make_wrong_answers(rows))
            right[places] = (columns.labels[answer.columns] == batch.labels).cpu().numpy()
            predicted[places] = answer.tasks.cpu().numpy()

    batches = zip(run.batches.iterate_ordered(rows.take(answerable), size), places, strict=True)
    map_side_by_side(answer_batch, batches, at_once)
    # A task none of whose classes has a column yet has no task-aware accuracy: no row, not 0.
    has_columns = masks.any(1)[mask_of_row].cpu().numpy()
    tables = []
    for reading, (right, predicted) in results.items():
        facts = {"task": rows.tasks, "client": rows.clients, "right": right, "predicted": predicted}
        table = pl.DataFrame(facts).select(pl.lit(reading).alias("reading"), pl.all())
        tables.append(table.filter(pl.Series(has_columns)) if reading == "task_aware" else table)
    return pl.concat(tables)


def map_side_by_side(work: Callable[..., None], items: Iterable[tuple], at_once: int) -> None:
    """Call `work` with each item, in `at_once` threads; no more than `at_once` items are in memory at a time."""
    items = iter(items)
    if at_once == 1:
        for item in items:
            work(*item)
        return
    with ThreadPoolExecutor(at_once) as threads:
        for now in iter(lambda: list(islice(items, at_once)), []):
            list(threads.map(lambda item: work(*item), now))


def _make_wrong_answers(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return, for all rows, that the answer is wrong and no task is predicted: to be filled in."""
    return np.zeros(len(rows), dtype=bool), np.full(len(rows), NO_TASK)


def _answer_by_reading(prediction: Prediction, columns: Columns, run: Run, of_task: Tensor) -> dict[str, BatchAnswers]:
    """Return the answers to a batch in each reading; of_task [B, C]: the columns of each sample's task."""
    logits = prediction.logits
    agnostic = logits.argmax(1)
    no_task = torch.full_like(agnostic, NO_TASK)
    aware = logits.masked_fill(~of_task, -torch.inf).argmax(1)
    answers = {
        "task_aware": BatchAnswers(aware, no_task),
        "task_agnostic": BatchAnswers(agnostic, no_task),
        "task_predicted": BatchAnswers(agnostic, no_task),
    }
    for reading, scores in (("task_predicted", prediction.task_scores), (MIXED_BATCH, prediction.batch_scores)):
        if scores is not None:
            masks = columns.mask_tasks(task.classes for task in run.splits.tasks[: scores.shape[-1]])
            predicted = scores.argmax(-1).expand(len(logits))
            may_answer = masks[predicted]
            if reading == "task_predicted" and prediction.not_routed is not None:
                may_answer = may_answer | prediction.not_routed[:, None]
                predicted = predicted.masked_fill(prediction.not_routed, NO_TASK)
            answers[reading] = BatchAnswers(logits.masked_fill(~may_answer, -torch.inf).argmax(1), predicted)
    return answers


def _count_accuracy(answers: pl.DataFrame) -> pl.DataFrame:
    """Return correct and total by task, over all clients and for each client that has test rows of its own."""
    counts = (pl.col("right").sum().alias("correct"), pl.len().alias("total"))
    of_all = answers.group_by("reading", "after", "task").agg(*counts, client=pl.lit(None, pl.Int64))
    of_each = answers.filter(pl.col("client") >= 0).group_by("reading", "after", "task", "client").agg(*counts)
    both = pl.concat([of_all.select(*ACCURACY).cast(ACCURACY), of_each.select(*ACCURACY).cast(ACCURACY)])
    return both.sort("reading", "client", "task")


def _count_confusion(answers: pl.DataFrame) -> pl.DataFrame:
    """Return how many samples of each learned task were predicted to be of which task; empty without predictions."""
    with_task = answers.filter(pl.col("predicted") != NO_TASK, pl.col("task") < pl.col("after"))
    counts = with_task.group_by("reading", "after", "task", "predicted").agg(pl.len().alias("count"))
    return counts.cast(CONFUSION).sort("reading", "task", "predicted")


def _make_task_masks(run: Run, columns: Columns, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return masks over columns [M, C], and which of them each row [n] has: its task's, or its client's own."""
    pooled = any(task.classes_by_client is not None for task in run.splits.tasks)
    keys = np.stack([rows.tasks, rows.clients if pooled else np.full_like(rows.tasks, -1)], axis=1)
    distinct, place = np.unique(keys, axis=0, return_inverse=True)
    masks = [
        columns.mask_task(int(task), run.splits.tasks[task].list_classes(int(client) if client >= 0 else None))
        for task, client in distinct
    ]
    return torch.stack(masks), torch.from_numpy(place.reshape(-1))


def encode(tables: Tables) -> dict[str, Tensor]:
    """Return a client's tables as int64 [rows, columns], to be sent: readings by number, no column `client`."""
    of_all = tables.accuracy.filter(pl.col("client").is_null()).drop("client")
    number = pl.col("reading").replace_strict(READINGS, range(len(READINGS)), return_dtype=pl.Int64)
    return {
        name: torch.from_numpy(table.with_columns(number).cast(pl.Int64).to_numpy().copy())
        for name, table in (("accuracy", of_all), ("confusion", tables.confusion))
    }


def gather(encoded: Mapping[int, Mapping[str, Tensor]]) -> Tables:
    """Return tables of the clients' counts: accuracy of each client and of all together, confusion of all together."""
    accuracy = pl.concat(
        [
            _decode(tables["accuracy"], ACCURACY).with_columns(client=pl.lit(client))
            for client, tables in encoded.items()
        ]
    )
    of_all = accuracy.group_by("reading", "after", "task").agg(pl.col("correct", "total").sum(), client=pl.lit(None))
    both = pl.concat([table.select(*ACCURACY).cast(ACCURACY) for table in (of_all, accuracy)])
    confusion = pl.concat([_decode(tables["confusion"], CONFUSION) for tables in encoded.values()])
    counts = confusion.group_by("reading", "after", "task", "predicted").agg(pl.col("count").sum())
    return Tables(both.sort("reading", "client", "task"), counts.cast(CONFUSION).sort("reading", "task", "predicted"))


def _decode(table: Tensor, schema: pl.Schema) -> pl.DataFrame:
    name = pl.col("reading").replace_strict(range(len(READINGS)), READINGS, return_dtype=pl.String)
    return pl.DataFrame(table.numpy(), schema=[column for column in schema if column != "client"]).with_columns(name)
