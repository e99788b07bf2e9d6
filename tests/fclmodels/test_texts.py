"""Texts from their files to a federated model: a tiny encoder learns two toy data sets one after the other."""

import json
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from fclmodels.data.prepare import prepare
from fclmodels.data.splits.make_splits import write_splits
from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.run_context import Run
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.fot import Fot
from fclmodels.methods.scr import Scr
from fclmodels.plugins import find
from fclmodels.storage import trees

FILLERS = ("a", "the", "film", "plot", "was", "is", ",")
LEARNING = ("optimizer.kind=adamw", "optimizer.lr=0.003", "federation.local_epochs=4", "federation.batch_size=10")


def write_toys(root: Path, count: int = 160) -> None:
    """Sentences that are good or bad, and pairs whose second text is warm or cold, all among words without meaning."""
    random = np.random.default_rng(0)

    def among_fillers(word: str) -> str:
        words = [*random.choice(FILLERS, random.integers(1, 5)), word]
        return " ".join(random.permutation(words))

    rows = {"mood": [], "heat": []}
    for i in range(count):
        rows["mood"].append(f"{among_fillers('good' if i % 2 else 'bad')}\t{i % 2}")
        rows["heat"].append(f"{among_fillers('not')}\t{among_fillers('warm' if i % 2 else 'cold')}\t{i % 2}")
    (root / "mood.tsv").write_text("\n".join(["text\tlabel", *rows["mood"]]))
    (root / "heat.tsv").write_text("\n".join(["one\tother\tlabel", *rows["heat"]]))


@pytest.fixture(scope="module")
def toys(encoder, tmp_path_factory):
    """Splits of the two data sets over four clients, each a task with the same labels or with its own."""

    def make(label_space: str, kind: str = "", **stream: int) -> Splits:
        folder = tmp_path_factory.mktemp("texts")
        write_toys(folder)
        parts = (
            {"name": "mood", "train": "mood.tsv", "text": ["text"]},
            {"name": "heat", "train": "heat.tsv", "text": ["one", "other"]},
        )
        source, part = find("source", "tsv"), find("partition", "iid")
        settings = source.Settings(root=folder, tokenizer=encoder, length=20, parts=parts, label_space=label_space)
        prepare(source(settings), folder / "prepared")
        chosen = find("stream", kind or {"own": "datasets", "shared": "domain-incremental"}[label_space])
        partition = part(part.Settings(clients=4, test=0.25))
        return Splits.open(
            write_splits(folder / "prepared", chosen(chosen.Settings(**stream)), partition, folder / "splits")
        )

    return make


def chosen_model(encoder: Path) -> tuple[str, ...]:
    return ("model.backbone=transformer", f"model.folder={encoder}")


def accuracies(folder: Path) -> dict[int, float]:
    """Of each task at the end, task known."""
    table = pl.read_parquet(folder / "accuracy.parquet").filter(
        pl.col("reading") == "task_aware", pl.col("after") == 2, pl.col("client").is_null()
    )
    return {row["task"]: row["correct"] / row["total"] for row in table.iter_rows(named=True)}


def test_token_ids_reach_the_network_as_they_were_prepared(toys, params_of, encoder):
    splits = toys("own")
    run = Run.on(params_of(*chosen_model(encoder)), splits, seed=0)
    rows = splits.select_rows(1, "train", 2)
    prepared = np.load(splits.folder / "../prepared/tokens.npy")
    (batch,) = run.batches.iterate_ordered(rows, 1000)
    assert batch.inputs.dtype == torch.int32
    np.testing.assert_array_equal(batch.inputs, prepared[rows.samples])
    (shuffled,) = run.batches.iterate_shuffled(rows, 1000, torch.Generator())
    assert sorted(shuffled.inputs.flatten(1).tolist()) == sorted(batch.inputs.flatten(1).tolist())
    assert not torch.equal(shuffled.inputs, batch.inputs)


@pytest.mark.parametrize("label_space", ["own", "shared"])
def test_two_tasks_are_learned_one_after_the_other(toys, experiment_of, encoder, tmp_path, label_space):
    splits = toys(label_space)
    assert splits.head == {"own": "per-task", "shared": "growing"}[label_space]
    experiment = experiment_of(*LEARNING, *chosen_model(encoder), "federation.rounds=4", splits=splits)
    experiment.run(tmp_path / "run")
    of = accuracies(tmp_path / "run")
    assert of[1] > 0.9  # of 40 samples in two classes: two standard deviations above chance would be 0.66
    assert of[0] > 0.8


@pytest.mark.parametrize("method", ["ridge", "stsa"])
def test_closed_forms_answer_texts(toys, experiment_of, encoder, tmp_path, method):
    """On a tiny encoder as it is drawn, and on one that the first task trains; a later task forgets nothing."""
    learning = (*LEARNING, *chosen_model(encoder), "federation.rounds=4")
    experiment_of(*learning, method=method, splits=toys("own")).run(tmp_path / "run")
    assert min(accuracies(tmp_path / "run").values()) > {"ridge": 0.6, "stsa": 0.8}[method]


@pytest.mark.parametrize("method", ["o-lora", "inflora", "lorm", "pilora"])
def test_low_rank_factors_learn_texts_at_their_defaults(toys, params_of, encoder, tmp_path, method):
    """Two rounds, in which LoRM trains B, then A; what is served has changed maps."""
    params = params_of(*chosen_model(encoder), "federation.batch_size=20", "optimizer.lr=0.01")
    with Experiment(params, method, 0, toys("own"), tmp_path / "home") as experiment:
        experiment.run(tmp_path / "run")
        frozen = experiment.method.network.frozen.state_dict()
    served = trees.load(tmp_path / "run" / "model" / "weights.safetensors")
    changed = {name for name, w in frozen.items() if not torch.equal(served[f"backbone.{name}"], w)}
    assert any("attention" in name for name in changed)
    assert set(accuracies(tmp_path / "run")) == {0, 1}


def test_a_run_comes_out_the_same_again_with_dropout(toys, experiment_of, encoder, tmp_path):
    results, splits = [], toys("own")
    for number in range(2):
        experiment = experiment_of(*LEARNING, *chosen_model(encoder), "federation.rounds=1", splits=splits)
        results.append(experiment.run(tmp_path / f"run-{number}"))
    assert results[0]["digests"]["model"] == results[1]["digests"]["model"]


def test_frozen_layers_stay_after_the_first_task(toys, method_of, federate, encoder):
    frozen = ("embeddings", "encoder.layer.0")
    freeze = f"model.freeze={json.dumps(frozen)}"
    method = method_of(FedAvg, *LEARNING, *chosen_model(encoder), freeze, "federation.rounds=1", splits=toys("own"))
    first, last = (federate(method, tasks).weights for tasks in (1, 2))
    moved = {name for name, weight in first.items() if not torch.equal(weight, last[name])}
    blocks = tuple(f"backbone.{block}." for block in frozen)
    assert moved
    assert not any(name.startswith(blocks) for name in moved)
    assert any(name.startswith("backbone.encoder.layer.1.") for name in moved)


def test_another_config_is_another_experiment(toys, experiment_of, encoder, tmp_path):
    shutil.copytree(encoder, tmp_path / "encoder")
    splits = toys("own")

    def key() -> str:
        return experiment_of(*chosen_model(tmp_path / "encoder"), splits=splits).step("begin", None, 0).key

    before = key()
    assert key() == before
    config = json.loads((tmp_path / "encoder" / "config.json").read_text())
    (tmp_path / "encoder" / "config.json").write_text(json.dumps({**config, "hidden_dropout_prob": 0.5}))
    assert key() != before


def test_what_is_for_images_only_is_refused(toys, params_of, method_of, encoder):
    splits = toys("own")
    with pytest.raises(UserError, match=r"^augment: these samples are texts, which nothing here augments. Leave the"):
        Run.on(params_of(*chosen_model(encoder), "augment.flip=true"), splits, seed=0)
    with pytest.raises(UserError, match=r"^methods.fot finds bases from images, these samples are texts. Use another"):
        method_of(Fot, *chosen_model(encoder), splits=splits).create_server()
    with pytest.raises(
        UserError, match=r"^methods.scr alters images for second views, these samples are texts. Use er"
    ):
        method_of(Scr, *chosen_model(encoder), splits=splits)
    with pytest.raises(UserError, match=r"^stream.kind: permuted-pixels needs images, these samples are texts. Use an"):
        toys("own", "permuted-pixels", tasks=2)
