"""What a run leaves behind: tables whose numbers are known, whole or not at all."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from fclmodels.backbones.model.network import build_skeleton
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.data.batches import Batches
from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment import run_folder
from fclmodels.experiment.experiment import Experiment
from fclmodels.experiment.exported_model import ExportedModel
from fclmodels.metrics import compute_metrics
from fclmodels.numerics.task_relevance import Router
from fclmodels.report.read_runs import read_run
from fclmodels.settings.schema import AugmentSettings
from fclmodels.storage import trees

MakeExperiment = Callable[..., Experiment]


@pytest.fixture
def run(experiment_of: MakeExperiment, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    settings = ("federation.rounds=[1, 2]", "federation.server_lr=0.5", "federation.server_lr_schedule='1/t'")
    result = experiment_of(*settings, seed=3).run(tmp_path / "runs" / "fedavg-3")
    return tmp_path / "runs" / "fedavg-3", result


def test_the_folder_holds_what_the_design_names(run: tuple[Path, dict[str, Any]]) -> None:
    folder, result = run
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert files == {
        *("result.json", "settings.json", "accuracy.parquet", "rounds.parquet", "ledger.parquet"),
        *("model/weights.safetensors", "model/spec.json", "model/serving.json"),
    }
    assert json.loads((folder / "result.json").read_text()) == result
    assert (result["label"], result["method"], result["seed"]) == ("fedavg-3", "fedavg", 3)
    assert [file.name for file in folder.parent.iterdir()] == ["fedavg-3"]


def test_rounds_are_numbered_within_the_task_and_over_the_run(run: tuple[Path, dict[str, Any]]) -> None:
    rounds = pl.read_parquet(run[0] / "rounds.parquet")
    assert rounds.select("task", "round", "step", "clients", "server_lr").rows() == [
        (0, 0, 0, 4, 0.5),
        (1, 0, 1, 4, 0.25),
        (1, 1, 2, 4, 0.25),
    ]
    assert (rounds["loss"] > 0).all()
    assert run[1]["timings"]["learn"] == pytest.approx(rounds["seconds"].sum())


def test_bytes_are_those_of_the_weights(run: tuple[Path, dict[str, Any]]) -> None:
    """mlp of 36-12-12-12 and a head of 2, then 4 rows; the update weighs what the weights do, and a weight 8 bytes."""
    backbone = 36 * 12 + 12 + 2 * (12 * 12 + 12)
    model = [4 * (backbone + 13 * rows) for rows in (2, 4, 4)]
    folder, result = run
    rounds = pl.read_parquet(folder / "rounds.parquet")
    assert rounds["bytes_down"].to_list() == [4 * size for size in model]
    assert rounds["bytes_up"].to_list() == [4 * (size + 8) for size in model]
    assert result["bytes_down"] == rounds["bytes_down"].sum()
    assert result["bytes_up"] == rounds["bytes_up"].sum()
    assert result["bytes_kept"] == 0
    assert result["client_bytes"] == {"model": model[-1], "buffers": 0, "memory": 0}
    assert result["peaks"]["server"] > 2**26  # torch alone
    assert result["peaks"]["worker"] is None  # clients trained in the server's process
    ledger = pl.read_parquet(folder / "ledger.parquet")
    assert ledger.group_by("direction", "part").agg(pl.len()).sort("part", "direction").rows() == [
        ("up", "update", 12),
        ("up", "weight", 12),
        ("down", "weights", 12),
    ]
    assert not ledger.select("task", "round", "client", "direction", "part").is_duplicated().any()


def test_metrics_are_those_of_the_accuracy_table(run: tuple[Path, dict[str, Any]]) -> None:
    table = pl.read_parquet(run[0] / "accuracy.parquet")
    assert compute_metrics(table) == run[1]["metrics"]
    assert set(table["after"]) == {0, 1, 2}
    assert not table.select("reading", "after", "task", "client").is_duplicated().any()


def test_the_saved_model_answers_as_the_table_says(
    run: tuple[Path, dict[str, Any]], splits_of: Callable[..., Splits]
) -> None:
    folder, splits = run[0], splits_of()
    spec = ModelSpec.from_json(json.loads((folder / "model" / "spec.json").read_text()))
    network = build_skeleton(spec)
    network.load_state_dict(trees.load(folder / "model" / "weights.safetensors"))
    rows = splits.select_rows(1, "test")
    (batch,) = Batches(splits, AugmentSettings(), torch.device("cpu")).iterate_ordered(rows, 1000)
    with torch.no_grad():
        right = (network.eval()(batch.inputs).argmax(1) == batch.labels).sum().item()
    table = pl.read_parquet(folder / "accuracy.parquet").filter(
        pl.col("reading") == "task_agnostic", pl.col("after") == 2, pl.col("task") == 1, pl.col("client").is_null()
    )
    assert table["correct"].item() == right
    assert table["total"].item() == len(rows)


def test_knowledge_is_kept_for_each_task(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    experiment_of(method="single-task").run(tmp_path / "run")
    assert len(trees.load(tmp_path / "run" / "knowledge" / "task-01.safetensors")["models"]) == 1


def test_knowledge_without_a_tensor_is_not_kept(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    experiment_of(method="gpm").run(tmp_path / "run")
    assert not (tmp_path / "run" / "knowledge").exists()


def test_a_method_that_predicts_tasks_leaves_its_router_and_what_it_took_for_what(
    toys: Path, experiment_of: MakeExperiment, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    """The saved network and router alone answer as the tables say."""
    folder = tmp_path / "run"
    experiment = experiment_of(method="signpost")
    result = experiment.run(folder)
    router = Router.from_tree(trees.load(folder / "model" / "router.safetensors"))
    spec = ModelSpec.from_json(json.loads((folder / "model" / "spec.json").read_text()))
    network = build_skeleton(spec)
    network.load_state_dict(trees.load(folder / "model" / "weights.safetensors"))
    splits = splits_of()
    right, count_by_pair = {}, {}
    for task in range(2):
        (batch,) = Batches(splits, AugmentSettings(), torch.device("cpu")).iterate_ordered(
            splits.select_rows(task, "test"), 1000
        )
        with torch.no_grad():
            features = network.eval().backbone(batch.inputs)
            predicted = router.score_samples(features).argmax(1)
            answers = torch.stack(
                [torch.tensor(c)[network.compute_logits(features, t).argmax(1)] for t, c in enumerate(spec.tasks)]
            )
        right[task] = int((answers.gather(0, predicted[None])[0] == batch.labels).sum())
        count_by_pair |= {(task, t): int((predicted == t).sum()) for t in range(2) if (predicted == t).any()}
    ours = (pl.col("reading") == "task_predicted", pl.col("after") == 2)
    accuracy = pl.read_parquet(folder / "accuracy.parquet").filter(*ours, pl.col("client").is_null())
    assert dict(accuracy.select("task", "correct").iter_rows()) == right
    confusion = pl.read_parquet(folder / "confusion.parquet")
    counts = confusion.filter(*ours).select("task", "predicted", "count").iter_rows()
    assert {(task, predicted): count for task, predicted, count in counts} == count_by_pair
    assert set(confusion["after"]) == {1, 2}
    assert len({predicted for _, predicted in count_by_pair}) == 2
    shares = [count_by_pair.get((task, task), 0) / 16 for task in range(2)]
    assert result["metrics"]["task_predicted"]["tip_acc"] == pytest.approx(sum(shares) / 2)
    assert {reading for reading, values in result["metrics"].items() if "tip_acc" in values} == set(
        confusion["reading"]
    )


def test_what_clients_predict_by_models_of_their_own_is_counted_too(
    toys: Path, experiment_of: MakeExperiment, tmp_path: Path
) -> None:
    personal = ("model.backbone=resnet18", "methods.signpost.batch_norm=local")
    experiment_of(*personal, method="signpost").run(tmp_path / "run")
    confusion = pl.read_parquet(tmp_path / "run" / "confusion.parquet").filter(pl.col("after") == 2)
    samples = confusion.group_by("reading", "task").agg(pl.col("count").sum())
    readings = {"task_predicted", "mixed_batch_task_predicted", "paper_task_predicted"}
    assert set(samples.iter_rows()) == {(reading, task, 16) for reading in readings for task in range(2)}


def test_memories_are_counted_once_for_each_client(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    experiment = experiment_of("model.backbone=resnet18", "methods.fedavg.batch_norm=local")
    result = experiment.run(tmp_path / "run")
    last = experiment.store.get(result["digests"]["state"])["memories"]
    assert len(last) == 4
    assert result["bytes_kept"] == sum(experiment.store.find_path(digest).stat().st_size for digest in last.values())


def test_settings_are_the_effective_ones(run: tuple[Path, dict[str, Any]]) -> None:
    settings = run[1]["settings"]
    assert settings["federation"]["server_lr"] == 0.5
    assert settings["federation"]["executor"] == "serial"
    assert settings["federation"]["threads"] == 1
    assert settings["optimizer"]["momentum"] == 0.0
    assert settings["methods"] == {"fedavg": {"batch_norm": "average"}}
    assert settings["device"] == "cpu"


def test_a_new_run_takes_the_old_ones_place(run: tuple[Path, dict[str, Any]], experiment_of: MakeExperiment) -> None:
    folder, first = run
    (folder / "plot.png").write_text("made from the old run")
    second = experiment_of("optimizer.lr=0.3").run(folder)
    assert json.loads((folder / "result.json").read_text()) == second != first
    assert not (folder / "plot.png").exists()
    assert [file.name for file in folder.parent.iterdir()] == ["fedavg-3"]


def test_a_run_that_cannot_be_written_leaves_the_old_one(
    run: tuple[Path, dict[str, Any]], experiment_of: MakeExperiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    folder, first = run
    monkeypatch.setattr(run_folder, "compute_metrics", full)
    with pytest.raises(OSError, match="No space"):
        experiment_of("optimizer.lr=0.3").run(folder)
    assert json.loads((folder / "result.json").read_text()) == first
    assert [file.name for file in folder.parent.iterdir()] == ["fedavg-3"]


def test_a_folder_with_other_things_in_it_is_not_replaced(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    """`--out .` must not cost anyone a home folder; and it is refused before the training, not after it."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "thesis", tmp_path / "file"):
        experiment = experiment_of(home=tmp_path / "home")
        with pytest.raises(UserError, match=str(folder)) as error:
            experiment.run(folder)
        assert "\n" not in str(error.value)
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"
    assert not (tmp_path / "home" / "store").exists()
    (tmp_path / "empty").mkdir()
    experiment_of().run(tmp_path / "empty")
    assert (tmp_path / "empty" / "result.json").exists()


FLIPPED = ["result.json", "accuracy.parquet", "rounds.parquet", "ledger.parquet"]
OF_THE_MODEL = ["result.json", "model/weights.safetensors", "model/spec.json", "model/serving.json"]


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        *((name, read_run) for name in FLIPPED),
        *((name, lambda folder: ExportedModel(folder / "model")) for name in OF_THE_MODEL),
    ],
)
def test_a_flipped_bit_anywhere_is_refused_by_name(
    name: str, reader: Callable[[Path], object], run: tuple[Path, dict[str, Any]]
) -> None:
    """Also where the file could be read as other values."""
    folder = run[0]
    reader(folder)
    whole = (folder / name).read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 50)):
        (folder / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match=rf"{re.escape(str(folder / name))}.*make it again with fcl run"):
            reader(folder)


def test_a_client_keeps_model_buffers_and_memory_and_workers_have_peaks(
    experiment_of: MakeExperiment, tmp_path: Path
) -> None:
    settings = ("federation.executor=processes", "federation.workers=1", "model.backbone=resnet18", "model.width=2")
    with experiment_of(*settings, method="er") as experiment:
        result = experiment.run(tmp_path / "er-0")
    weights = load_file(tmp_path / "er-0" / "model" / "weights.safetensors")
    of_buffers = [w.nbytes for name, w in weights.items() if "running" in name or "num_batches" in name]
    ledger = pl.read_parquet(tmp_path / "er-0" / "ledger.parquet")
    assert result["client_bytes"] == {
        "model": sum(w.nbytes for w in weights.values()) - sum(of_buffers),
        "buffers": sum(of_buffers),
        "memory": ledger.filter(pl.col("direction") == "kept")["bytes"].max(),
    }
    assert result["client_bytes"]["buffers"] > 0
    assert 2**26 < result["peaks"]["worker"] < 2**33
