"""Backbone weights from files: what fits, and one clear line for all that does not."""

import pytest
import torch
from safetensors.torch import save_file

from fclmodels.backbones.model.network import build_network
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.errors import UserError

NARROW = {"backbone": "resnet18", "width": 2}
MLP = {"backbone": "mlp", "hidden": 4}


def network(shape=(3, 32, 32), **settings):
    spec = ModelSpec(settings if "backbone" in settings else NARROW | settings, shape, "growing", ((0, 1),))
    return build_network(spec, torch.Generator().manual_seed(0))


def other_weights():
    """Weights that no network starts from, in statistics and counters too."""
    return {name: tensor + 1 for name, tensor in network().backbone.state_dict().items()}


def save(weights, path):
    save_file(weights, path)
    return str(path)


def same(ours, theirs):
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_torchvision_file_fills_the_backbone_and_leaves_the_head(tmp_path):
    weights = other_weights()
    path = save(
        weights | {"fc.weight": torch.zeros(1000, 16), "fc.bias": torch.zeros(1000)}, tmp_path / "w.safetensors"
    )
    loaded = network(weights=path)
    assert same(loaded.backbone.state_dict(), weights)
    assert same(loaded.heads.state_dict(), network().heads.state_dict())


def test_what_a_run_left_behind_loads(tmp_path):
    weights = other_weights()
    run = {f"backbone.{name}": t for name, t in weights.items()} | {"heads.0.weight": torch.zeros(9, 16)}
    assert same(network(weights=save(run, tmp_path / "w.safetensors")).backbone.state_dict(), weights)


def test_layers_called_fc1_are_no_torchvision_head(tmp_path):
    weights = {name: tensor + 1 for name, tensor in network(**MLP).backbone.state_dict().items()}
    path = save(weights, tmp_path / "w.safetensors")
    assert same(network(**MLP, weights=path).backbone.state_dict(), weights)


def test_files_from_before_there_were_counters_load(tmp_path):
    weights = {name: t for name, t in other_weights().items() if not name.endswith("num_batches_tracked")}
    assert same(network(weights=save(weights, tmp_path / "w.safetensors")).backbone.state_dict(), weights)


def test_statistics_are_left_out_where_batch_norm_keeps_none(tmp_path):
    weights = other_weights()
    loaded = network(norm="batch-no-stats", weights=save(weights, tmp_path / "w.safetensors")).backbone.state_dict()
    assert set(loaded) == {n for n in weights if not n.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    assert same(weights, loaded)


MISFITS = {
    "cifar stem": (
        {"stem": "cifar"},
        lambda w: w,
        r"conv1.weight is 2x3x7x7 in the file and 2x3x3x3 here. conv1 follows model.stem \(imagenet 7x7, cifar 3x3\)",
    ),
    "grey images": ({"shape": (1, 32, 32)}, lambda w: w, r"2x3x7x7 in the file and 2x1x7x7 here. .*data.channels"),
    "width": ({"width": 4}, lambda w: w, r"conv1.weight is 2x3x7x7 .* 4x3x7x7 here \(and 99 more\)"),
    "group norm": ({"norm": "group"}, lambda w: w, r"bn1.num_batches_tracked is unknown \(and 59 more\)"),
    "missing": ({}, lambda w: {n: t for n, t in w.items() if n != "bn1.bias"}, r"bn1.bias is missing\."),
    "unknown": ({}, lambda w: w | {"layer5.weight": torch.zeros(1)}, r"layer5.weight is unknown\."),
    "statistics missing": (
        {},
        lambda w: {n: t for n, t in w.items() if "running" not in n},
        r"bn1.running_mean is missing \(and 39 more\)",
    ),
    "scalar": (
        {},
        lambda w: w | {"bn1.bias": torch.tensor(1.0)},
        r"bn1.bias is a single number in the file and 2 here",
    ),
    "empty": ({}, lambda w: {}, r"conv1.weight is missing"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_file_that_does_not_fit_is_refused_in_one_line(tmp_path, case):
    settings, change, message = MISFITS[case]
    path = save(change(other_weights()), tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=message) as refused:
        network(**settings, weights=path)
    assert str(refused.value).startswith(f"model.weights: {path} does not fit")
    assert "\n" not in str(refused.value)


UNREADABLE = {
    "absent": ("w.pth", None, "there is no file"),
    "folder": ("w.safetensors", "folder", "there is no file"),
    "other kind": ("w.zip", b"PK", "is no file of weights"),
    "pickle": ("w.pth", b"\x80\x02garbage", "no run reads"),
    "older pickle": ("w.pt", b"", "no run reads"),
    "damaged safetensors": ("w.safetensors", b"\xff" * 40, "cannot be read"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path, case):
    name, content, message = UNREADABLE[case]
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=f"^model.weights: {path} .*{message}|{message} {path}") as refused:
        network(weights=str(path))
    assert "\n" not in str(refused.value)


def test_fresh_blocks_keep_their_random_start_and_the_rest_is_read(tmp_path):
    imagenet_stem = {"stem": "imagenet", "backbone": "resnet18", "width": 2}
    weights = {name: tensor + 1 for name, tensor in network(**imagenet_stem).backbone.state_dict().items()}
    path = save(weights, tmp_path / "w.safetensors")
    own = {"stem": "cifar", "backbone": "resnet18", "width": 2, "fresh": ["conv1"]}
    drawn, loaded = network(**own).backbone.state_dict(), network(**own, weights=path).backbone.state_dict()
    assert torch.equal(loaded.pop("conv1.weight"), drawn["conv1.weight"])
    assert weights.pop("conv1.weight").shape[-1] == 7
    assert same(loaded, weights)


def test_a_fresh_block_that_is_none_is_named(tmp_path):
    with pytest.raises(UserError) as caught:
        network(fresh=["conv"], weights=save(other_weights(), tmp_path / "w.safetensors"))
    assert str(caught.value) == "model.fresh: conv is not a block of resnet18. Did you mean conv1?"
