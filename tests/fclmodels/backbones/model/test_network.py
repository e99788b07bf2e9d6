"""Building a network from its spec: seeds, frozen blocks, and what a spec may be."""

import json

import pytest
import torch

from fclmodels.backbones.model.network import build_network, build_skeleton, list_frozen
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.errors import UserError
from fclmodels.plugins import load_all

BACKBONES = ["alexnet", "cnn", "mlp", "resnet18"]


def spec_of(backbone="cnn", head="growing", tasks=((0, 1), (2, 3)), **settings):
    return ModelSpec({"backbone": backbone, **settings}, (3, 32, 32), head, tasks)


def state(spec, seed=0, seed_torch=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed_torch)
        return build_network(spec, torch.Generator().manual_seed(seed)).state_dict()


def same(ours, theirs):
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_registry_has_these():
    assert load_all("backbone").keys() >= set(BACKBONES)
    assert all(plugin.__doc__ and "\n" not in plugin.__doc__ for plugin in load_all("backbone").values())


@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_seed_alone_decides_the_weights(backbone):
    spec = spec_of(backbone)
    first = state(spec, seed_torch=1)
    assert same(first, state(spec, seed_torch=2))
    other = state(spec, seed=1)
    drawn = [n for n, t in first.items() if t.is_floating_point() and t.unique().numel() > 1]
    assert drawn
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


def test_neither_the_given_generator_nor_torchs_own_moves():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state(), torch.get_rng_state()
    network = build_network(spec_of(), generator)
    build_skeleton(spec_of())
    assert torch.equal(generator.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    torch.rand(3, generator=generator)
    assert same(network.state_dict(), build_network(spec_of(), generator).state_dict())


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_backbones_weights_do_not_depend_on_head_and_tasks(backbone):
    first, other = state(spec_of(backbone)), state(spec_of(backbone, "per-task", ((0,), (0, 1), (2,))))
    names = [name for name in first if name.startswith("backbone.")]
    assert all(torch.equal(first[name], other[name]) for name in names)


@pytest.mark.parametrize("head", ["growing", "per-task"])
def test_a_skeleton_takes_the_state_of_the_network(head):
    spec = spec_of(head=head)
    network, copy = build_network(spec, torch.Generator().manual_seed(7)), build_skeleton(spec)
    copy.load_state_dict(network.state_dict())
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(copy(x), network(x))
    assert torch.equal(copy(x, task=1), network.compute_logits(network.backbone(x), task=1))


def test_frozen_names_are_the_parameters_and_buffers_of_the_blocks():
    spec = spec_of("resnet18", width=2, freeze=["conv1", "bn1", "layer1"])
    network = build_network(spec, torch.Generator())
    expected = {f"backbone.{name}" for name in ("conv1.weight", *bn("bn1"))}
    for block in (0, 1):
        for number in (1, 2):
            expected |= {f"backbone.layer1.{block}.conv{number}.weight"}
            expected |= {f"backbone.layer1.{block}.{name}" for name in bn(f"bn{number}")}
    assert list_frozen(spec, network) == expected


def bn(name):
    return [f"{name}.{part}" for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]


def test_no_block_named_freezes_nothing_and_a_prefix_is_no_block():
    assert list_frozen(spec_of(), build_network(spec_of(), torch.Generator())) == set()
    with pytest.raises(UserError, match="conv"):
        build_network(spec_of(freeze=["conv"]), torch.Generator())


def test_an_unknown_block_is_refused_with_the_nearest_when_the_network_is_built():
    with pytest.raises(UserError, match=r"^model.freeze: layer5 is not a block of resnet18. Did you mean layer\d\?$"):
        build_network(spec_of("resnet18", width=1, freeze=["conv1", "layer5"]), torch.Generator())


def test_the_spec_survives_json():
    spec = spec_of("mlp", "per-task", ((1, 0), (2,)), dropout=[0.1, 0.2], freeze=["fc1"])
    again = ModelSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert same(state(again), state(spec))
    with pytest.raises(ValueError, match="format 2"):
        ModelSpec.from_json(spec.to_json() | {"format": 2})


@pytest.mark.parametrize(
    ("head", "tasks"),
    [("auto", ((0,),)), ("growing", ()), ("growing", ((0,), ())), ("growing", ((0, 0),)), ("growing", ((0,), (2,)))],
)
def test_a_spec_of_nothing_or_with_holes_is_refused(head, tasks):
    with pytest.raises(ValueError, match=r"head|task"):
        spec_of(head=head, tasks=tasks)
