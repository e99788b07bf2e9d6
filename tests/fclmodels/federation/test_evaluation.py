"""The accuracy table of a predictor whose every answer is known, counted again in plain Python."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from fclmodels.data.splits.split_reader import Splits
from fclmodels.federation import evaluation
from fclmodels.federation.prediction import Columns, Prediction
from fclmodels.federation.run_context import Run
from fclmodels.tables import ACCURACY, CONFUSION, HONEST, PAPER

Table = Counter[tuple[str, int, int | None, str]]
KEY = ["reading", "after", "task", "client"]


def coded(splits: Splits) -> Splits:
    """The same splits with images that name their sample: pixels 0 and 1 are its digits in base 256."""
    path = splits.folder / "../prepared/images.npy"
    images = np.load(path)
    number = np.arange(len(images))
    images[:] = 0
    images[:, 0, 0, 0], images[:, 0, 0, 1] = number // 256, number % 256
    np.save(path, images)
    return Splits.open(splits.folder)


def samples_of(inputs: Tensor) -> list[int]:
    pixels = ((inputs * 0.25 + 0.5) * 255).round().long()
    return (pixels[:, 0, 0, 0] * 256 + pixels[:, 0, 0, 1]).tolist()


@dataclass
class ByHand:
    """Fixed random logits [samples, columns], and scores of the tasks learned where asked for."""

    columns: Columns
    logits: np.ndarray
    scores: np.ndarray | None

    def __call__(self, inputs: Tensor) -> Prediction:
        samples = samples_of(inputs)
        scores = None if self.scores is None else torch.from_numpy(self.scores[samples])
        return Prediction(torch.from_numpy(self.logits[samples]), scores)


def by_hand(method: Any, learned: int, scored: bool = False) -> ByHand:
    splits, random = method.run.splits, np.random.default_rng(learned)
    columns = Columns.of(method.run.make_spec(max(learned, 1)), torch.device("cpu"))
    n = len(splits.images)
    scores = random.normal(size=(n, learned)) if scored and learned else None
    return ByHand(columns, random.normal(size=(n, len(columns.labels))), scores)


def table_of(run: Run, predictor: Any, learned: int, alone: bool = False) -> pl.DataFrame:
    rows = [run.splits.select_test_rows(task.index) for task in run.splits.tasks]
    return evaluation.read(run, predictor, predictor.columns, rows, learned, alone).accuracy


def counted(splits: Splits, predictor: ByHand, learned: int) -> dict[tuple, tuple[int, int]]:
    """(reading, after, task, client) -> (correct, total), one sample after another."""
    correct: Counter = Counter()
    total: Counter = Counter()
    labels, owners = predictor.columns.labels.tolist(), predictor.columns.owners.tolist()

    def of_task(task: int) -> list[int]:
        classes = splits.tasks[task].classes
        return [c for c, label in enumerate(labels) if label in classes and owners[c] in (task, -1)]

    manifest = pl.read_parquet(splits.folder / "manifest.parquet").filter(pl.col("split") == "test")
    for sample, label, task, client in manifest.select("sample", "label", "task", "client").iter_rows():
        logits = predictor.logits[sample]
        every = list(range(len(labels)))
        told = every if predictor.scores is None else of_task(int(predictor.scores[sample].argmax()))
        for reading, columns in (("task_aware", of_task(task)), ("task_agnostic", every), ("task_predicted", told)):
            if columns:
                right = labels[max(columns, key=lambda c: logits[c])] == label
                for who in {None, client if client >= 0 else None}:
                    correct[reading, learned, task, who] += right
                    total[reading, learned, task, who] += 1
    return {key: (correct[key], total[key]) for key in total}


def as_dict(table: pl.DataFrame) -> dict[tuple, tuple[int, int]]:
    assert table.schema == ACCURACY
    assert not table.select(KEY).is_duplicated().any()
    return {tuple(row[:4]): (row[4], row[5]) for row in table.select(*KEY, "correct", "total").iter_rows()}


WORLDS: dict[str, dict[str, Any]] = {
    "class-incremental": {},
    "class-incremental, a head a task": {"head": "per-task"},
    "domain-incremental": {"same_classes": True, "classes": 3},
    "domain-incremental, a head a task": {"same_classes": True, "classes": 3, "head": "per-task"},
    "shared test rows": {"shared_test": True},
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("scored", [False, True], ids=["no task scores", "task scores"])
def test_every_count_is_that_of_answers_looked_up_by_hand(
    world: dict[str, Any], scored: bool, own_splits: Callable, method_of: Callable
) -> None:
    splits = coded(own_splits(tasks=3, **world))
    method = method_of(splits=splits)
    for learned in range(4):
        predictor = by_hand(method, learned, scored)
        assert as_dict(table_of(method.run, predictor, learned)) == counted(splits, predictor, learned)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_batch_size_changes_no_count(size: int, own_splits: Callable, method_of: Callable) -> None:
    splits = coded(own_splits())
    method = method_of(type(method_of()), f"evaluation.batch_size={size}", splits=splits)
    predictor = by_hand(method, 2)
    assert as_dict(table_of(method.run, predictor, 2)) == counted(splits, predictor, 2)


@pytest.mark.parametrize("at_once", [2, 3])
def test_batches_side_by_side_are_answered_as_one_after_another(
    at_once: int, own_splits: Callable, method_of: Callable
) -> None:
    splits = coded(own_splits(tasks=3))
    method = method_of(type(method_of()), "evaluation.batch_size=3", splits=splits)
    predictor = by_hand(method, 2, scored=True)
    rows = [splits.select_test_rows(task) for task in range(3)]
    seen, together = 0, threading.Barrier(at_once, timeout=20)

    def side_by_side(inputs: Tensor) -> Prediction:
        nonlocal seen
        seen += 1
        if seen <= at_once:
            together.wait()  # breaks unless as many batches are under way
        return predictor(inputs)

    of_one, of_several = (
        evaluation.read(method.run, predict, predictor.columns, rows, 2, True, threads)
        for predict, threads in ((predictor, 1), (side_by_side, at_once))
    )
    assert all(one.equals(several) for one, several in zip(of_one, of_several, strict=True))


def test_a_mistake_beside_others_is_told(own_splits: Callable, method_of: Callable) -> None:
    method = method_of(splits=coded(own_splits()))
    rows = [method.run.splits.select_test_rows(task) for task in range(2)]
    with pytest.raises(ZeroDivisionError):
        evaluation.read(method.run, lambda _: Prediction(1 / 0), by_hand(method, 2).columns, rows, 2, False, 2)


def test_a_task_without_columns_is_never_right_and_has_no_task_aware_row(
    own_splits: Callable, method_of: Callable
) -> None:
    method = method_of(splits=coded(own_splits(tasks=3)))
    table = table_of(method.run, by_hand(method, 1), 1).filter(pl.col("client").is_null(), pl.col("task") > 0)
    assert set(table["reading"]) == {"task_agnostic", "task_predicted"}
    assert table["correct"].to_list() == [0] * 4
    assert table["total"].to_list() == [16] * 4


def test_clients_add_up_to_all(own_splits: Callable, method_of: Callable) -> None:
    method = method_of(splits=coded(own_splits()))
    table = table_of(method.run, by_hand(method, 2), 2)
    sums = (
        table.drop_nulls("client")
        .group_by("reading", "task")
        .agg(pl.col("correct", "total").sum())
        .sort("reading", "task")
    )
    of_all = (
        table.filter(pl.col("client").is_null()).select("reading", "task", "correct", "total").sort("reading", "task")
    )
    assert sums.equals(of_all)


@dataclass
class ByTheCompanyItKeeps:
    """Answers with the task that most of its batch is from: what a network normalised by the batch can do."""

    columns: Columns
    task_of: np.ndarray
    label_of: np.ndarray
    batches: list[list[int]]

    def __call__(self, inputs: Tensor) -> Prediction:
        samples = samples_of(inputs)
        self.batches.append(samples)
        task = Counter(self.task_of[samples].tolist()).most_common(1)[0][0]
        logits = torch.zeros(len(samples), len(self.columns.labels))
        logits[torch.arange(len(samples)), torch.from_numpy(self.label_of[samples] % 2 + 2 * task)] = 1
        return Prediction(logits)


def company(method: Any) -> ByTheCompanyItKeeps:
    manifest = pl.read_parquet(method.run.splits.folder / "manifest.parquet").sort("sample")
    columns = Columns.of(method.run.make_spec(3), torch.device("cpu"))
    return ByTheCompanyItKeeps(columns, manifest["task"].to_numpy(), manifest["label"].to_numpy(), [])


def accuracy(table: pl.DataFrame, reading: str) -> float:
    rows = table.filter(pl.col("reading") == reading, pl.col("client").is_null())
    return rows["correct"].sum() / rows["total"].sum()


def test_a_batch_tells_the_task_only_under_the_papers_name(own_splits: Callable, method_of: Callable) -> None:
    splits = coded(own_splits(tasks=3, test=16))
    method = method_of(type(method_of()), "evaluation.batch_size=16", splits=splits)
    predictor = company(method)
    table = table_of(method.run, predictor, 3, alone=True)
    assert accuracy(table, "paper_task_agnostic") == 1
    assert accuracy(table, "task_agnostic") < 0.6
    honest, paper = predictor.batches[:12], predictor.batches[12:]
    assert all(len({predictor.task_of[s] for s in batch}) >= 2 for batch in honest)
    assert all(len({predictor.task_of[s] for s in batch}) == 1 for batch in paper)
    assert sorted(chain(*honest)) == sorted(chain(*paper))


def test_the_mixed_batches_do_not_follow_the_order_of_the_manifest(own_splits: Callable, method_of: Callable) -> None:
    splits = coded(own_splits(tasks=3))
    path = splits.folder / "manifest.parquet"
    tables = []
    for seed in (None, 0, 1):
        if seed is not None:
            pl.read_parquet(path).sample(fraction=1, shuffle=True, seed=seed).write_parquet(path)
        method = method_of(type(method_of()), "evaluation.batch_size=16", splits=Splits.open(splits.folder))
        tables.append(table_of(method.run, company(method), 3, alone=True))
    assert tables[0].equals(tables[1])
    assert tables[0].equals(tables[2])


NORMS = {"batch": ("methods.fedavg.batch_norm=batch",), "batch-no-stats": ("model.norm=batch-no-stats",)}


@pytest.mark.parametrize("settings", NORMS.values(), ids=NORMS)
def test_a_network_that_depends_on_the_batch_is_read_twice(
    settings: tuple[str, ...], experiment_of: Callable, tmp_path: Path, splits_of: Callable
) -> None:
    experiment = experiment_of("model.backbone=resnet18", *settings, splits=splits_of(tasks=3))
    result = experiment.run(tmp_path / "run")
    honest, paper = set(HONEST), set(PAPER)
    assert set(result["metrics"]) == honest | paper
    table = pl.read_parquet(tmp_path / "run" / "accuracy.parquet")
    of_paper = table.filter(pl.col("reading").is_in(sorted(paper)))
    assert (of_paper["task"] < of_paper["after"]).all()
    assert set(of_paper["after"]) == {1, 2, 3}


def test_other_networks_have_no_papers_readings(experiment_of: Callable, tmp_path: Path) -> None:
    result = experiment_of("model.backbone=resnet18").run(tmp_path / "run")
    assert set(result["metrics"]) == set(HONEST)


@pytest.fixture
def pool(own_splits: Callable, reopened: Callable) -> Iterator[Splits]:
    """Two tasks with the same four classes, of which each client has two of its own in each; shared test rows."""
    splits = coded(own_splits(tasks=2, classes=4, same_classes=True, shared_test=True))
    file = splits.folder / "stream.json"
    facts = json.loads(file.read_text())
    for t, task in enumerate(facts["tasks"]):
        task["classes_by_client"] = {str(c): [(c + 2 * t) % 4, (c + 2 * t + 1) % 4] for c in range(4)}
    file.write_text(json.dumps(facts))
    return reopened(splits)


def test_in_a_task_pool_each_client_is_judged_by_its_own_classes(pool: Splits, method_of: Callable) -> None:
    method = method_of(splits=pool)
    predictor = by_hand(method, 2)
    table = table_of(method.run, predictor, 2)
    manifest = pl.read_parquet(pool.folder / "manifest.parquet").filter(pl.col("split") == "test")
    for client in range(4):
        for task in range(2):
            classes = pool.tasks[task].list_classes(client)
            rows = manifest.filter(pl.col("task") == task, pl.col("label").is_in(classes))
            logits = predictor.logits[rows["sample"].to_numpy()]
            aware = np.array(classes)[logits[:, classes].argmax(1)]
            mine = table.filter(pl.col("client") == client, pl.col("task") == task, pl.col("reading") == "task_aware")
            assert mine["total"].item() == len(rows)
            assert mine["correct"].item() == (aware == rows["label"].to_numpy()).sum()


def test_what_clients_count_comes_together(own_splits: Callable, method_of: Callable) -> None:
    """encode and gather: the same table as when the server counts."""
    splits = coded(own_splits(tasks=3))
    method = method_of(splits=splits)
    predictor = by_hand(method, 2)
    here = table_of(method.run, predictor, 2)
    theirs = {}
    for client in range(splits.clients):
        rows = [splits.select_test_rows(task.index, client) for task in splits.tasks]
        theirs[client] = evaluation.encode(
            evaluation.read(method.run, predictor, predictor.columns, rows, 2, alone=False)
        )
    assert as_dict(evaluation.gather(theirs).accuracy) == as_dict(here)


def test_a_client_without_test_rows_is_judged_by_none(
    own_splits: Callable, experiment_of: Callable, reopened: Callable, tmp_path: Path
) -> None:
    """Where models are personal, clients evaluate; one may have no test row at all, or none of a learned task."""
    splits = own_splits()
    path = splits.folder / "manifest.parquet"
    gone = (pl.col("split") == "test") & ((pl.col("client") == 1) | ((pl.col("client") == 2) & (pl.col("task") == 0)))
    pl.read_parquet(path).filter(~gone).write_parquet(path)
    experiment = experiment_of("model.backbone=resnet18", "methods.fedavg.batch_norm=local", splits=reopened(splits))
    experiment.run(tmp_path / "run")
    table = pl.read_parquet(tmp_path / "run" / "accuracy.parquet").filter(pl.col("after") == 1, pl.col("task") == 0)
    assert set(table["client"]) == {None, 0, 3}


@dataclass
class Together:
    """Fixed random logits and scores as `ByHand` has them; a batch has the mean of its samples' scores."""

    alone: ByHand
    batches: list[list[int]]

    @property
    def columns(self) -> Columns:
        return self.alone.columns

    def __call__(self, inputs: Tensor) -> Prediction:
        self.batches.append(samples_of(inputs))
        prediction = self.alone(inputs)
        assert prediction.task_scores is not None
        return Prediction(prediction.logits, prediction.task_scores, prediction.task_scores.mean(0))

    def told(self, batches: Sequence[list[int]]) -> dict[int, int]:
        """sample -> the task that its batch was taken for."""
        assert self.alone.scores is not None
        return {sample: int(self.alone.scores[batch].mean(0).argmax()) for batch in batches for sample in batch}


def told_by_hand(splits: Splits, predictor: Together, tasks: dict[int, int]) -> tuple[Counter, Counter]:
    """Right answers by task, and samples by (task, task taken for it), one sample after another."""
    right: Counter = Counter()
    taken: Counter = Counter()
    labels, owners = predictor.columns.labels.tolist(), predictor.columns.owners.tolist()
    manifest = pl.read_parquet(splits.folder / "manifest.parquet").filter(pl.col("sample").is_in(list(tasks)))
    for sample, label, task in manifest.select("sample", "label", "task").iter_rows():
        told = tasks[sample]
        may = [c for c, o in enumerate(owners) if o in (told, -1) and labels[c] in splits.tasks[told].classes]
        logits = predictor.alone.logits[sample]
        right[task] += labels[max(may, key=lambda c: logits[c])] == label
        taken[task, told] += 1
    return right, taken


@pytest.mark.parametrize("head", ["growing", "per-task"])
@pytest.mark.parametrize("alone", [False, True], ids=["each by itself", "logits depend on the batch"])
def test_a_batch_is_routed_as_a_whole_only_under_names_of_its_own(
    alone: bool, head: str, own_splits: Callable, method_of: Callable
) -> None:
    splits = coded(own_splits(tasks=3, head=head))
    method = method_of(type(method_of()), "evaluation.batch_size=7", splits=splits)
    predictor = Together(by_hand(method, 2, scored=True), [])
    rows = [splits.select_test_rows(task) for task in range(3)]
    tables = evaluation.read(method.run, predictor, predictor.columns, rows, 2, alone)
    by_itself = evaluation.read(method.run, predictor.alone, predictor.columns, rows, 2, alone)

    mixed, papers = predictor.batches[:5], predictor.batches[5:11]  # 2 tasks of 16 samples, in batches of at most 7
    assert all(len({sample in rows[0].samples for sample in batch}) == 1 for batch in papers)
    scores = predictor.alone.scores
    assert scores is not None
    each = {sample: int(scores[sample].argmax()) for batch in mixed for sample in batch}
    expected = {
        "task_predicted": each,
        "mixed_batch_task_predicted": predictor.told(mixed),
        "paper_task_predicted": predictor.told(papers),
    }
    assert len(set(expected["mixed_batch_task_predicted"].values())) == 2
    of_all = tables.accuracy.filter(pl.col("client").is_null(), pl.col("task") < 2)
    for reading, tasks in expected.items():
        right, taken = told_by_hand(splits, predictor, tasks)
        counts = of_all.filter(pl.col("reading") == reading)
        assert dict(counts.select("task", "correct").iter_rows()) == right
        assert counts["total"].to_list() == [16, 16]
        found = tables.confusion.filter(pl.col("reading") == reading, pl.col("after") == 2)
        assert {(task, told): n for task, told, n in found.select("task", "predicted", "count").iter_rows()} == taken
    assert set(tables.confusion["reading"]) == set(expected)

    others = {"paper_task_aware", "paper_task_agnostic"} if alone else set()
    assert set(tables.accuracy["reading"]) == {*HONEST, *expected} | others
    beside = pl.col("reading").is_in([*HONEST, *others])
    assert as_dict(tables.accuracy.filter(beside)) == as_dict(by_itself.accuracy.filter(beside))


def test_readings_of_whole_batches_have_learned_tasks_only(own_splits: Callable, method_of: Callable) -> None:
    method = method_of(splits=coded(own_splits(tasks=3)))
    for learned in (1, 2):
        table = table_of(method.run, Together(by_hand(method, learned, scored=True), []), learned)
        whole = table.filter(pl.col("reading").is_in(["mixed_batch_task_predicted", "paper_task_predicted"]))
        assert set(whole["task"]) == set(range(learned))
        assert set(table["task"]) == {0, 1, 2}


def test_a_batch_of_one_is_routed_as_its_sample(own_splits: Callable, method_of: Callable) -> None:
    method = method_of(type(method_of()), "evaluation.batch_size=1", splits=coded(own_splits(tasks=3)))
    table = table_of(method.run, Together(by_hand(method, 3, scored=True), []), 3)
    counts = [
        table.filter(pl.col("reading") == reading).drop("reading").rows()
        for reading in ("task_predicted", "mixed_batch_task_predicted", "paper_task_predicted")
    ]
    assert counts[0] == counts[1] == counts[2]


def test_only_a_method_that_predicts_tasks_has_a_confusion_table(own_splits: Callable, method_of: Callable) -> None:
    splits = coded(own_splits(tasks=3))
    method = method_of(splits=splits)
    rows = [splits.select_test_rows(task) for task in range(3)]
    for learned, scored, readings in ((2, False, set()), (2, True, {"task_predicted"}), (0, True, set())):
        predictor = by_hand(method, learned, scored)
        confusion = evaluation.read(method.run, predictor, predictor.columns, rows, learned, alone=False).confusion
        assert confusion.schema == CONFUSION
        assert set(confusion["reading"]) == readings
        assert confusion["count"].sum() == len(readings) * sum(map(len, rows[:learned]))


def test_confusions_that_clients_counted_add_up(own_splits: Callable, method_of: Callable) -> None:
    splits = coded(own_splits(tasks=3))
    method = method_of(splits=splits)
    predictor = by_hand(method, 2, scored=True)

    def tables(client: int | None) -> evaluation.Tables:
        rows = [splits.select_test_rows(task.index, client) for task in splits.tasks]
        return evaluation.read(method.run, predictor, predictor.columns, rows, 2, alone=False)

    theirs = {client: evaluation.encode(tables(client)) for client in range(splits.clients)}
    assert evaluation.gather(theirs).confusion.equals(tables(None).confusion)


def test_evaluation_does_not_touch_the_ambient_generator(own_splits: Callable, method_of: Callable) -> None:
    method = method_of(splits=coded(own_splits()))
    before = torch.random.get_rng_state()
    tables = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        tables.append(table_of(method.run, by_hand(method, 2), 2))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert tables[0].equals(tables[1])


def test_the_papers_batches_do_not_follow_clients(
    own_splits: Callable, method_of: Callable, reopened: Callable
) -> None:
    """Which client a test row is given to changes no batch: a batch of one client would tell its mix of labels."""
    tables = []
    splits = coded(own_splits(tasks=2))
    path = splits.folder / "manifest.parquet"
    for clients in (4, 1):
        owner = pl.when(pl.col("split") == "test").then(pl.col("client") % clients).otherwise(pl.col("client"))
        pl.read_parquet(path).with_columns(client=owner.cast(pl.Int32)).write_parquet(path)
        method = method_of(type(method_of()), "evaluation.batch_size=16", splits=reopened(splits))
        table = table_of(method.run, company(method), 2, alone=True)
        tables.append(table.filter(pl.col("client").is_null()).sort("reading", "task"))
    assert tables[0].equals(tables[1])
