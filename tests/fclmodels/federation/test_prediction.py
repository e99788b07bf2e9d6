"""Fitted heads: evaluated, exported and served like other predictors, with a router too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch import Tensor

from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.experiment.exported_model import ExportedModel
from fclmodels.federation.prediction import FittedHead
from fclmodels.numerics import fitted_heads
from fclmodels.storage import trees

FITS = ("nearest-mean", "ridge", "random-ridge", "gaussians")


@pytest.fixture(scope="module")
def splits(splits_of: Callable[..., Splits]) -> Splits:
    return splits_of()


@pytest.fixture(scope="module")
def run_of(
    toys: Path, new_experiment: Callable[..., Experiment], splits: Splits, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Experiment, Path]]:
    """A toy that fits a head has run with these settings: the experiment and its run folder."""
    experiments: dict[tuple[str, bool], tuple[Experiment, Path]] = {}

    def run(fit: str, routed: bool) -> tuple[Experiment, Path]:
        if (fit, routed) not in experiments:
            home = tmp_path_factory.mktemp(fit)
            own = f"methods.fitted-classes={{fit: {fit}, routed: {str(routed).lower()}}}"
            with new_experiment(own, method="fitted-classes", splits=splits, home=home) as experiment:
                experiment.run(home / "run")
            experiments[fit, routed] = experiment, home / "run"
        return experiments[fit, routed]

    return run


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("routed", [False, True])
def test_the_exported_model_answers_as_evaluation_counted(
    fit: str, routed: bool, run_of: Callable[..., tuple[Experiment, Path]], splits: Splits
) -> None:
    """Each test sample through the served model, with the task and without, or with the task that the router says."""
    experiment, folder = run_of(fit, routed)
    model = ExportedModel(folder / "model")
    assert (model.router is not None) == routed
    assert (folder / "model" / "fitted_head.safetensors").exists()
    accuracy = pl.read_parquet(folder / "accuracy.parquet").filter(pl.col("after") == 2, pl.col("client").is_null())
    for task in range(2):
        rows = splits.select_test_rows(task)
        raw = experiment.method.run.batches.read_raw(rows)
        names = [splits.classes[label] for label in rows.labels]
        for reading, known_task in (("task_aware", task + 1), ("task_predicted", None)):
            answers = model.answer(raw.inputs.numpy(), known_task)
            correct = sum(answer["class"] == name for answer, name in zip(answers, names, strict=True))
            row = accuracy.filter(reading=reading, task=task).select("correct", "total").row(0)
            assert row == (correct, len(rows)), (reading, task)


@pytest.mark.parametrize("routed", [False, True])
def test_a_router_tells_the_tasks_of_what_a_fitted_head_answers(
    routed: bool, run_of: Callable[..., tuple[Experiment, Path]]
) -> None:
    _, folder = run_of("ridge", routed)
    assert (folder / "confusion.parquet").exists() == routed


def test_the_head_is_ridges_on_all_samples_so_far(
    run_of: Callable[..., tuple[Experiment, Path]], splits: Splits
) -> None:
    """Of two tasks, each by the features of the model that the task ended with; here of the last task's share."""
    experiment, folder = run_of("ridge", False)
    first, last = (trees.load(folder / "knowledge" / f"task-0{task}.safetensors")["sums"]["gram"] for task in range(2))
    weights = trees.load(folder / "model" / "weights.safetensors")
    network = experiment.method.networks.load(experiment.method.run.make_spec(2), weights).eval()
    rows = splits.select_rows(1, "train")
    (batch,) = experiment.method.run.batches.iterate_ordered(rows, len(rows))
    with torch.no_grad():
        sums = fitted_heads.sum_products(network.backbone(batch.inputs), batch.labels, 4)
    torch.testing.assert_close(last - first, sums["gram"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"weight": torch.zeros(4, 5)}, "is of other classes or features"),
        ({"bias": torch.zeros(3)}, "do not fit each other"),
        ({"bias": torch.zeros(4, dtype=torch.int64)}, "are no floating point numbers"),
        ({"projection": torch.zeros(7, 12)}, "is of other classes or features"),
        ({"projection": torch.zeros(12, 7)}, "do not fit each other"),
        ({"more": torch.zeros(1)}, "unexpected keyword"),
    ],
)
def test_a_head_that_does_not_fit_its_model_is_one_line(
    change: dict[str, Tensor], why: str, run_of: Callable[..., tuple[Experiment, Path]], tmp_path: Path
) -> None:
    _, folder = run_of("ridge", False)
    model = tmp_path / "model"
    model.mkdir()
    for file in (folder / "model").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    head = trees.load(model / "fitted_head.safetensors")
    trees.save({**head, **change}, model / "fitted_head.safetensors")
    with pytest.raises(UserError, match=why) as raised:
        ExportedModel(model)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("projection", [False, True])
def test_logits_are_the_formula(projection: bool) -> None:
    random = torch.Generator().manual_seed(0)
    W, b, P, a = (torch.randn(*size, generator=random) for size in ((4, 7), (4,), (5, 7), (3, 5)))
    head = FittedHead(W, b, P) if projection else FittedHead(W[:, :5], b)
    features = (a @ P).clamp(min=0) if projection else a
    torch.testing.assert_close(head.compute_logits(a), features @ head.weight.T + b)
    assert head.sizes == (4, 5)
    again = FittedHead(**head.to_tree())
    assert torch.equal(again.compute_logits(a), head.compute_logits(a))


def test_while_a_task_is_learned_that_the_head_does_not_have_the_networks_own_answer(
    run_of: Callable[..., Any],
) -> None:
    experiment, _ = run_of("ridge", False)
    method = experiment.method
    server = method.start_task(method.create_server(), 0)
    assert method.find_head(server) is None
    inputs = torch.zeros(2, 1, 6, 6)
    with torch.no_grad():
        expected = method.networks.load(server.spec, server.weights).eval()(inputs)
        torch.testing.assert_close(method.make_predictor(server)(inputs).logits, expected)
