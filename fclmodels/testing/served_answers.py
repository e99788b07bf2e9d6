"""Whether the model that a run exports answers as often right as the run's evaluation has counted."""

from pathlib import Path

import polars as pl
import torch

from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.exported_model import ExportedModel
from fclmodels.testing.plugin_declaration import require


def compare_with_evaluation(folder: Path, splits: Splits) -> None:
    """Raise AssertionError where the model in a run's folder is right on other numbers of test rows than the run says.

    With the task known, and as the method predicts it: then images of a task with permuted pixels come permuted.
    """
    model = ExportedModel(folder / "model")
    last = len(splits.tasks)
    counted = pl.read_parquet(folder / "accuracy.parquet").filter(pl.col("client").is_null(), pl.col("after") == last)
    for task in splits.tasks:
        rows = splits.select_test_rows(task.index)
        samples = splits.images[torch.from_numpy(rows.samples)]
        permuted = samples if task.permutation is None else model.order_pixels(samples, task.index + 1)
        for reading, number, shown in (
            ("task_aware", task.index + 1, samples),
            ("task_predicted", None, permuted),
        ):
            answers = model.answer(shown.numpy(), number)
            right = sum(splits.classes[label] == row["class"] for label, row in zip(rows.labels, answers, strict=True))
            (expected,) = counted.filter(pl.col("reading") == reading, pl.col("task") == task.index)["correct"]
            require(
                right == expected,
                f"{folder.name}: of task {task.index + 1} ({reading}) the exported model has {right} test rows right, "
                f"the evaluation counted {expected}",
            )
