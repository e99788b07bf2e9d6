"""The transformer backbone against the library's own model with the same weights."""

import copy
import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close

from fclmodels.backbones.model.network import build_network, list_frozen
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.backbones.transformer import Transformer
from fclmodels.data.tokens import Tokenizer
from fclmodels.errors import UserError
from fclmodels.optional.transformers import import_transformers

TEXTS = [["the film was good"], ["the film was bad", "not a good plot ."], ["cold"]]
DISTIL = {
    "model_type": "distilbert",
    **{"vocab_size": 21, "dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 32},
}


@pytest.fixture(scope="module")
def theirs(encoder):
    """The library's model, with the weights that it drew itself."""
    library = import_transformers()
    torch.manual_seed(3)
    return library.AutoModel.from_config(library.AutoConfig.from_pretrained(encoder)).eval()


@pytest.fixture
def file(theirs, tmp_path):
    """Its weights as it would save them."""
    save_file(dict(theirs.state_dict()), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def backbone(folder, length=20, weights=None, seed=0, **settings):
    named = {"backbone": "transformer", "folder": str(folder), "weights": weights and str(weights), **settings}
    spec = ModelSpec(named, (2, length), "growing", ((0, 1),))
    return build_network(spec, torch.Generator().manual_seed(seed)).backbone.eval()


def tokens(folder, texts=TEXTS, length=20):
    tokenizer = Tokenizer(folder, length)
    return torch.from_numpy(np.stack([tokenizer(of) for of in texts]))


@torch.no_grad()
def last_states(model, folder, texts):
    """[tokens, F] of each text by itself, not padded."""
    own = import_transformers().AutoTokenizer.from_pretrained(folder)
    return [model(**own(*of, return_tensors="pt")).last_hidden_state[0] for of in texts]


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_features_are_those_of_the_librarys_model(encoder, theirs, file, pooling):
    states = last_states(theirs, encoder, TEXTS)
    expected = torch.stack([of.mean(0) if pooling == "mean" else of[0] for of in states])
    features = backbone(encoder, weights=file, pooling=pooling)(tokens(encoder))
    assert_close(features, expected, atol=1e-6, rtol=1e-5)
    assert (features[0] - features[1]).abs().max() > 1e-3


@torch.no_grad()
def test_an_encoder_without_token_types_is_built_too(encoder, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DISTIL))
    library = import_transformers()
    model = library.AutoModel.from_config(library.AutoConfig.from_pretrained(tmp_path)).eval()
    save_file({f"distilbert.{name}": tensor for name, tensor in model.state_dict().items()}, tmp_path / "w.safetensors")
    network = backbone(tmp_path, weights=tmp_path / "w.safetensors")
    assert network.blocks == ("embeddings", *(f"transformer.layer.{i}" for i in range(3)))
    own = import_transformers().AutoTokenizer.from_pretrained(encoder)
    states = [model(**own(*of, return_tensors="pt", return_token_type_ids=False)).last_hidden_state[0] for of in TEXTS]
    assert_close(network(tokens(encoder)), torch.stack([of.mean(0) for of in states]), atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_neither_padding_nor_the_other_texts_of_a_batch_change_features(encoder):
    network = backbone(encoder, length=32)
    together = network(tokens(encoder))
    assert_close(network(tokens(encoder, length=32)), together, atol=1e-6, rtol=1e-5)
    alone = torch.cat([network(tokens(encoder, [of])) for of in TEXTS])
    assert_close(alone, together, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_the_second_text_is_told_from_the_first(encoder):
    network = backbone(encoder)
    x = tokens(encoder)[1:2]
    as_one = torch.stack([x[:, 0], x[:, 1].clamp(max=1)], dim=1)
    assert (network(x) - network(as_one)).abs().max() > 1e-4


@torch.no_grad()
def test_a_copy_is_a_network_of_its_own(encoder):
    network = backbone(encoder)
    copied, before = copy.deepcopy(network), network(tokens(encoder))
    torch.nn.init.normal_(copied.embeddings.word_embeddings.weight)
    assert torch.equal(network(tokens(encoder)), before)
    assert not torch.equal(copied(tokens(encoder)), before)


def test_all_parameters_learn_and_stand_in_a_block(encoder):
    network = backbone(encoder)
    assert network.blocks == ("embeddings", "encoder.layer.0", "encoder.layer.1")
    assert all(name.startswith(network.blocks) for name, _ in network.named_parameters())
    network(tokens(encoder)).square().sum().backward()
    # All texts' keys shift by the same: the softmax over them does not feel a key's bias.
    assert [n for n, p in network.named_parameters() if not p.grad.any() and not n.endswith("key.bias")] == []


def test_frozen_and_fresh_blocks_are_layers(encoder, theirs, file):
    blocks = {"freeze": ["embeddings", "encoder.layer.0"], "fresh": ["encoder.layer.1"]}
    spec = ModelSpec(
        {"backbone": "transformer", "folder": str(encoder), "weights": str(file), **blocks}, (2, 20), "growing", ((0,),)
    )
    network = build_network(spec, torch.Generator().manual_seed(0))
    read = {f"backbone.{name}": tensor for name, tensor in theirs.state_dict().items() if "pooler" not in name}
    ours = {name: tensor for name, tensor in network.state_dict().items() if not name.startswith("heads")}
    assert ours.keys() == read.keys()
    assert list_frozen(spec, network) == {name for name in ours if "layer.1" not in name}
    weights = [name for name in ours if name.endswith("dense.weight")]
    assert {name for name in weights if torch.equal(ours[name], read[name])} == {n for n in weights if "layer.0" in n}
    with pytest.raises(UserError, match=r"^model.freeze: encoder.layer.2 is not a block of transformer. Did you mean"):
        build_network(
            ModelSpec({**spec.settings, "freeze": ["encoder.layer.2"]}, (2, 20), "growing", ((0,),)), torch.Generator()
        )


def test_the_seed_alone_decides_what_is_drawn(encoder):
    torch.manual_seed(0)
    first = backbone(encoder, seed=1).state_dict()
    torch.manual_seed(5)
    again, other = backbone(encoder, seed=1).state_dict(), backbone(encoder, seed=2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["encoder.layer.0.output.dense.weight"], other["encoder.layer.0.output.dense.weight"])


OLD_NAMES = {
    "with the prefix and the head of a language model": lambda w: (
        {f"bert.{name}": t for name, t in w.items()} | {"cls.predictions.bias": torch.zeros(21)}
    ),
    "with the positions that older versions saved": lambda w: w | {"embeddings.position_ids": torch.arange(32)[None]},
    "with the first names of layer norms": lambda w: {
        re.sub("LayerNorm.weight", "LayerNorm.gamma", re.sub("LayerNorm.bias", "LayerNorm.beta", name)): t
        for name, t in w.items()
    },
}


@torch.no_grad()
@pytest.mark.parametrize("renamed", OLD_NAMES.values(), ids=OLD_NAMES)
def test_files_of_other_models_and_versions_load(encoder, theirs, tmp_path, renamed):
    save_file(
        renamed({name: tensor.clone() for name, tensor in theirs.state_dict().items()}), tmp_path / "w.safetensors"
    )
    expected = torch.stack([of.mean(0) for of in last_states(theirs, encoder, TEXTS)])
    network = backbone(encoder, weights=tmp_path / "w.safetensors")
    assert_close(network(tokens(encoder)), expected, atol=1e-6, rtol=1e-5)


def test_a_file_without_some_of_the_encoder_is_refused(encoder, theirs, tmp_path):
    name = "encoder.layer.1.output.dense.bias"
    save_file({n: t for n, t in theirs.state_dict().items() if n != name}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=rf"^model.weights: .* does not fit this backbone: {name} is missing\."):
        backbone(encoder, weights=tmp_path / "w.safetensors")


def test_a_folder_that_makes_no_encoder_is_refused(encoder, tmp_path):
    with pytest.raises(UserError, match=r"^model.folder: .* holds no config.json. Name the folder of an encoder.$"):
        backbone(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(UserError, match=r"^model.folder: .*config.json makes no encoder \(.*nonesuch.*\).$"):
        backbone(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    with pytest.raises(UserError, match=r"^model.folder: .*config.json makes no encoder \(t5 is an encoder with a dec"):
        backbone(tmp_path)
    with pytest.raises(UserError, match=r"^data.length: 33 tokens are more than the 32 of "):
        backbone(encoder, length=33)


def test_what_it_depends_on_besides_settings(encoder, file, tmp_path):
    def depends_on(folder, **settings):
        return Transformer(Transformer.Settings(folder=folder, **settings)).list_dependencies()

    own = depends_on(encoder)
    assert own["transformers"] == import_transformers().__version__
    assert depends_on(encoder, weights=file).keys() - own.keys() == {"weights"}
    (tmp_path / "config.json").write_text((encoder / "config.json").read_text().replace("32", "64"))
    assert depends_on(tmp_path)["config"] != own["config"]


@pytest.mark.parametrize("name", ["cnn", "mlp", "resnet18"])
def test_backbones_refuse_what_they_do_not_read(encoder, name):
    with pytest.raises(UserError, match=rf"^model.backbone: {name} reads images, these samples are texts.$"):
        build_network(ModelSpec({"backbone": name}, (2, 20), "growing", ((0, 1),)), torch.Generator())
    images = ModelSpec({"backbone": "transformer", "folder": str(encoder)}, (3, 8, 8), "growing", ((0, 1),))
    with pytest.raises(UserError, match=r"^model.backbone: transformer reads texts, these samples are images.$"):
        build_network(images, torch.Generator())
