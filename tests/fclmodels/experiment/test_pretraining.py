"""Pretraining: that it learns, is repeatable, and that what it leaves says on what it was trained."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from fclmodels.backbones.model.network import build_network
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.data.prepare import Prepared, prepare
from fclmodels.data.sources.base import Source, list_arrays, make_table
from fclmodels.data.sources.letters import LETTERS
from fclmodels.errors import UserError
from fclmodels.experiment import pretraining
from fclmodels.experiment.pretraining import Pretraining, compute_half_cosine, refuse_foreign, split_samples, train
from fclmodels.plugins import find
from fclmodels.randomness import make_generator
from fclmodels.settings.pretrain import load_pretrain_params
from fclmodels.settings.schema import ImageSettings
from fclmodels.storage import trees
from fclmodels.storage.object_store import Store

SETTINGS = """
data: {source: letters, samples: 12}
model: {backbone: cnn, width: 8, features: 32}
optimizer: {lr: 0.01}
pretrain: {epochs: 8, batch_size: 32, threads: 1}
"""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("settings") / "params.yaml"
    path.write_text(SETTINGS)
    return path


@pytest.fixture(scope="module")
def letters(file, tmp_path_factory):
    source = find("source", "letters")
    return prepare(source(load_pretrain_params(file).data), tmp_path_factory.mktemp("letters") / "prepared")


@pytest.fixture
def training(file, letters, tmp_path):
    """A training with these overrides, and a store of its own."""
    store = Store(tmp_path / "store")
    return lambda *overrides, of=letters: Pretraining(
        load_pretrain_params(file, overrides), of, store, CPU, lambda line: None
    )


def by_hand(folder: Path, official, groups=None) -> Prepared:
    """Prepared images of two classes in turn, with these official splits and groups."""
    count = len(official)

    class ByHand(Source):
        name = "by-hand"

        def catalogue(self):
            images = np.random.default_rng(0).integers(0, 256, (count, 8, 8), dtype=np.uint8)
            catalogue = list_arrays(self.name, ("a", "b"), {None: (images, np.arange(count) % 2)})
            samples = make_table(np.arange(count) % 2, catalogue.samples["origin"], official=official, group=groups)
            return type(catalogue)(catalogue.classes, catalogue.domains, samples, catalogue.open)

    return prepare(ByHand(ImageSettings(source="by-hand")), folder / "by-hand")


def test_it_learns_letters_far_beyond_chance_and_tells_each_epoch(file, letters):
    lines = []
    trained = train(load_pretrain_params(file), letters, CPU, lines.append)
    assert trained.accuracy > 10 / len(LETTERS)
    assert trained.losses[-1] < 0.7 * trained.losses[0]
    assert (trained.train, trained.held_out) == (29 * 11, 29)
    assert lines[0] == f"epoch 1 of 8: loss {trained.losses[0]:.3f}"
    assert len(lines) == 8


def test_a_seed_gives_the_same_weights_and_another_gives_others(file, letters):
    digests = [
        trees.digest(
            train(
                load_pretrain_params(file, ["pretrain.epochs=1", f"pretrain.seed={seed}"]), letters, CPU, print
            ).weights
        )
        for seed in (0, 0, 1)
    ]
    assert digests[0] == digests[1] != digests[2]


def test_one_step_is_adamws(file, letters):
    """AdamW's first step: w (1 - lr decay) - lr g / (|g| + eps), so no more than lr away from the decayed weight."""
    lr, decay = 0.01, 0.5
    params = load_pretrain_params(
        file, ["pretrain.epochs=1", "pretrain.batch_size=1000", f"optimizer.weight_decay={decay}"]
    )
    spec = ModelSpec(params.model.model_dump(mode="json"), (1, 8, 8), "growing", (tuple(range(29)),))
    before = build_network(spec, make_generator(0, "init")).backbone.state_dict()
    after = train(params, letters, CPU, print).weights
    steps = torch.cat([(after[n] - before[n] * (1 - lr * decay)).abs().flatten() for n in before])
    assert steps.max() <= lr * 1.001
    assert (steps > 0.999 * lr).float().mean() > 0.5


def test_the_rate_falls_as_half_a_cosine():
    assert [compute_half_cosine(x) for x in (0, 0.5, 1)] == pytest.approx([1, 0.5, 0])
    assert compute_half_cosine(1 / 3) == pytest.approx(0.75)


def test_a_loss_that_is_no_number_is_told_with_its_setting(file, letters):
    with pytest.raises(UserError, match=r"optimizer\.lr: the loss is (nan|inf) in epoch 1\. Use a smaller rate"):
        train(load_pretrain_params(file, ["optimizer.lr=1e25"]), letters, CPU, print)


# what is held out


def rows(samples):
    return set(samples.rows.tolist())


def test_a_share_of_each_class_is_held_out(file, letters):
    one, other = split_samples(letters, load_pretrain_params(file, ["pretrain.test=0.25"]).pretrain, CPU)
    in_held_out = letters.samples.filter(pl.col("sample").is_in(other.rows.tolist()))["label"].value_counts()["count"]
    assert in_held_out.to_list() == [3] * 29
    assert rows(one) | rows(other) == set(range(29 * 12))
    assert not rows(one) & rows(other)


def test_an_official_split_stands(file, tmp_path):
    prepared = by_hand(tmp_path, ["train"] * 6 + ["test"] * 4)
    one, other = split_samples(prepared, load_pretrain_params(file).pretrain, CPU)
    assert (rows(one), rows(other)) == (set(range(6)), {6, 7, 8, 9})


def test_pictures_of_one_thing_stay_on_one_side(file, tmp_path):
    prepared = by_hand(tmp_path, [None] * 20, groups=[i // 4 for i in range(20)])
    _, other = split_samples(prepared, load_pretrain_params(file, ["pretrain.test=0.4"]).pretrain, CPU)
    assert len(rows(other)) == 8
    assert {row // 4 * 4 + i for row in rows(other) for i in range(4)} == rows(other)


def test_a_share_that_holds_out_nothing_is_refused(file, tmp_path):
    with pytest.raises(UserError, match=r"pretrain\.test: 0\.1 of 4 samples leaves none on one side"):
        split_samples(by_hand(tmp_path, [None] * 4), load_pretrain_params(file).pretrain, CPU)


def test_texts_are_refused(file):
    texts = SimpleNamespace(meta=SimpleNamespace(shape=(2, 16), source="tsv"))
    with pytest.raises(UserError, match=r"data\.source: tsv holds texts; this trains on images"):
        split_samples(texts, load_pretrain_params(file).pretrain, CPU)


# what is left


def test_the_weights_are_read_by_model_weights(training, tmp_path):
    step = training("pretrain.epochs=1")
    outcome = step.run()
    step.publish(tmp_path / "out", outcome)
    settings = step.params.model.model_dump(mode="json") | {"weights": str(tmp_path / "out" / "weights.safetensors")}
    network = build_network(ModelSpec(settings, (1, 8, 8), "growing", ((0, 1),)), make_generator(9))
    trained = step.store.get(outcome["objects"]["weights"])
    assert {n: t.tolist() for n, t in network.backbone.state_dict().items()} == {
        n: t.tolist() for n, t in trained.items()
    }


def test_the_card_and_the_file_itself_name_the_data(training, letters, tmp_path):
    step = training("pretrain.epochs=1")
    card = step.publish(tmp_path / "out", step.run())
    assert card == json.loads((tmp_path / "out" / "card.json").read_text())
    assert (card["name"], card["source"], card["backbone"]) == ("cnn-letters", "letters", "cnn")
    assert card["classes"] == list(LETTERS)
    assert card["samples"] == {"train": 29 * 11, "held_out": 29}
    assert card["settings"]["data"]["samples"] == 12
    assert card["settings"]["pretrain"]["epochs"] == 1
    assert card["digests"]["prepared"] == letters.meta.digest
    assert card["digests"]["weights"] == trees.digest(load_file(tmp_path / "out" / "weights.safetensors"))
    description = card["description"]
    assert description.startswith("cnn pretrained on letters, 319 images of 1 x 8 x 8 in 29 classes (A, C, E, ")
    assert "not the ImageNet weights" in description
    assert "\n" not in description
    with safe_open(tmp_path / "out" / "weights.safetensors", "pt") as weights:
        assert weights.metadata() == {"description": description}


def test_a_folder_of_the_users_is_named(training, tmp_path):
    for number in range(40):
        (tmp_path / "pets" / f"breed-{number % 2}").mkdir(parents=True, exist_ok=True)
        grey = Image.fromarray(np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8))
        grey.save(tmp_path / "pets" / f"breed-{number % 2}" / f"{number}.png")
    overrides = ["data.source=image-folder", f"data.root={tmp_path}", "data.folder=pets", "pretrain.epochs=1"]
    plugin = find("source", "image-folder")
    settings = plugin.Settings(source="image-folder", root=tmp_path, folder=Path("pets"))
    step = training(*overrides, of=prepare(plugin(settings), tmp_path / "prepared"))
    description = step.build_card(step.run())["description"]
    assert description.startswith(
        f"cnn pretrained on image-folder {tmp_path}/pets, 36 images of 1 x 8 x 8 in 2 classes"
    )


def test_weights_that_went_on_from_others_say_so(training, tmp_path):
    step = training("pretrain.epochs=1")
    step.publish(tmp_path / "first", step.run())
    description = training(f"model.weights={tmp_path}/first/weights.safetensors").build_card(step.run())["description"]
    assert f"from the weights in {tmp_path}/first/weights.safetensors on" in description
    assert "nothing else" not in description


def test_what_is_not_of_the_training_does_not_change_its_key(training, file, tmp_path):
    key = training().key
    assert training("pretrain.name=abc", "tracking.uri=sqlite:///other.db").key == key
    others = [
        training("pretrain.seed=1"),
        training("model.width=9"),
        training("augment.flip=true"),
        training("optimizer.lr=1"),
        training(of=by_hand(tmp_path, [None] * 20)),
    ]
    assert len({key, *(other.key for other in others)}) == 6


def test_the_store_has_the_last_word_on_what_was_done(training):
    step = training("pretrain.epochs=1")
    assert step.recall() is None
    outcome = step.run()
    assert training("pretrain.epochs=1").recall() == outcome
    step.store.find_path(outcome["objects"]["weights"]).unlink()
    assert step.recall() is None


def test_a_folder_is_replaced_whole_or_stays(training, tmp_path, monkeypatch):
    step, out = training("pretrain.epochs=1"), tmp_path / "out"
    outcome = step.run()
    step.publish(out, outcome)
    (out / "old").touch()
    with monkeypatch.context() as patch:
        patch.setattr(pretraining, "write_json", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step.publish(out, outcome)
    assert (out / "old").exists()
    step.publish(out, outcome)
    assert sorted(path.name for path in out.iterdir()) == ["card.json", "weights.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]


def test_nothing_but_pretrained_weights_is_replaced(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds something other than pretrained weights"):
        refuse_foreign(tmp_path)
    with pytest.raises(UserError, match=r"thesis\.tex is not a folder that can be written to"):
        refuse_foreign(tmp_path / "thesis.tex" / "out")
    refuse_foreign(tmp_path / "new")


# settings


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.source=leters"],
            "--set data.source=leters: data.source: leters is not a source. Did you mean letters?",
        ),
        (["model.backbone=vitt"], "model.backbone: vitt is not a backbone. Did you mean vit?"),
        (["pretrain.epoch=3"], "pretrain.epoch is not a setting. Did you mean pretrain.epochs?"),
        (["pretrain.epochs=0"], "pretrain.epochs is 0; it must be greater than 0."),
        (["optimizer.kind=sgd"], "optimizer.kind is not a setting. Valid: lr, weight_decay."),
        (["federation.rounds=3"], "federation is not a setting."),
        (["devise=cpu"], "devise is not a setting. Did you mean device?"),
        (["data.sampels=3"], "data.sampels is not a setting. Did you mean data.samples?"),
        (["pretrain.name=a/b"], 'pretrain.name is "a/b"'),
    ],
)
def test_a_mistake_is_one_line_that_names_what_would_be_right(file, overrides, message):
    with pytest.raises(UserError) as caught:
        load_pretrain_params(file, overrides)
    (line,) = str(caught.value).splitlines()
    assert message in line


def test_nobody_trains_on_the_streams_data_by_leaving_them_out(tmp_path):
    (tmp_path / "params.yaml").write_text("model: {backbone: cnn}\n")
    with pytest.raises(UserError, match=r"params\.yaml: data\.source is not there"):
        load_pretrain_params(tmp_path / "params.yaml")


def test_the_settings_of_the_repository_are_a_small_vit_on_letters():
    params = load_pretrain_params(Path(__file__).parents[3] / "pretrain" / "params.yaml")
    assert params.name == "vit-letters"
    assert params.data.size == 8
    assert (
        load_pretrain_params(Path(__file__).parents[3] / "pretrain" / "params.yaml", ["pretrain.name=mine"]).name
        == "mine"
    )
