"""What is attached to a frozen backbone: which prompts, where they go, what moves, and how pools grow."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import normalize

from fclmodels.backbones.adapters.adapted import Adapted
from fclmodels.backbones.base import FeatureNet
from fclmodels.backbones.model.prompt_adapters import KINDS, adapt, grow_prompts, select
from fclmodels.backbones.resnet18 import ResNet18
from fclmodels.backbones.vit import Attached, Vit
from fclmodels.errors import UserError

L2P = {"kind": "l2p", "length": 2, "top_k": 2}
DUALP = {"kind": "dualp", "length": 3, "g_layers": [0], "e_layers": [1, 2]}
LORA = {"kind": "lora", "rank": 2, "scale": 0.5}
ALL = [{"kind": "none"}, L2P, DUALP, LORA]


def vit(depth: int = 3, seed: int = 0) -> FeatureNet:
    torch.manual_seed(seed)
    sizes = {"patch": 4, "width": 8, "depth": depth, "attention_heads": 2, "mlp_width": 16}
    return Vit(Vit.Settings(backbone="vit", **sizes)).build((1, 8, 8))


def adapted(adapter: dict[str, Any], tasks: int = 4) -> Any:
    """On a small vit; Any, because each kind has prompts of its own."""
    return adapt(vit(), adapter, tasks)


def images(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def state(net: nn.Module) -> dict[str, Tensor]:
    return {f"backbone.{name}": tensor.clone() for name, tensor in net.state_dict().items()}


def choosing(net: Any, x: Tensor, slots: list[int]) -> Any:
    """Keys such that sample i of x chooses slots[i]: orthogonal to the queries that do not want them."""
    weights = nn.functional.one_hot(torch.tensor(slots), len(net.prompts.keys)).double()
    net.prompts.keys.data = (normalize(net.query(x)).double().pinverse() @ weights).T.float()
    assert select(net.score_keys(x, None), 1, "sample").flatten().tolist() == slots
    return net


# Which prompts.

SCORES = torch.tensor([[0.9, 0.1, 0.5], [0.2, 0.8, 0.7], [0.6, 0.3, 0.4], [0.3, 0.3, 0.1]])


@pytest.mark.parametrize(
    ("top_k", "selection", "slots"),
    [
        (1, "sample", [[0], [1], [0], [0]]),
        (2, "sample", [[0, 2], [1, 2], [0, 2], [0, 1]]),
        (5, "sample", [[0, 2, 1], [1, 2, 0], [0, 2, 1], [0, 1, 2]]),
        (1, "batch", [[0]] * 4),
        (2, "batch", [[0, 2]] * 4),  # chosen by 3, 2 and 3 samples; of equal ones the first
    ],
)
def test_chosen_by_hand(top_k: int, selection: Any, slots: list[list[int]]) -> None:
    assert select(SCORES, top_k, selection).tolist() == slots


@given(
    scores=st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=9),
    top_k=st.integers(1, 4),
)
def test_a_batch_takes_what_most_of_it_choose(scores: list[list[int]], top_k: int) -> None:
    votes = Counter(slot for row in scores for slot in sorted(range(4), key=lambda s: -row[s])[:top_k])
    most = sorted(range(4), key=lambda slot: -votes[slot])[:top_k]
    assert select(torch.tensor(scores).float(), top_k, "batch").tolist() == [most] * len(scores)


def test_distance_is_that_of_eq_5_to_the_chosen_keys() -> None:
    """Keys of 0, 90 and 45 degrees in the plane of the first two axes, queries of 0 and 60 degrees, the best two."""
    net = adapted(L2P, tasks=3)
    plane = torch.zeros(5, 8)
    angles = torch.deg2rad(torch.tensor([0.0, 90, 45, 0, 60]))
    plane[:, 0], plane[:, 1] = angles.cos(), angles.sin()
    net.prompts.keys.data.copy_(plane[:3] * torch.tensor([[1.0], [7], [0.1]]))
    output = net.extract(images(2), queries=9 * plane[3:])
    expected = (1 - np.cos(np.deg2rad([[0, 45], [15, 30]]))).sum(1).mean()  # of 0: keys 0 and 45; of 60: 45 and 90
    assert output.distance.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("adapter", [L2P, {**DUALP, "top_k": 2}])
def test_predictions_do_not_depend_on_the_batch(adapter: dict[str, Any]) -> None:
    net, x = adapted(adapter), images(6)
    choosing(net, x, [0, 1, 2, 3, 1, 1])
    unequal = torch.rand(net.prompts.keys.shape, generator=torch.Generator().manual_seed(1))
    net.prompts.keys.data *= 1 + 0.1 * unequal  # so that of those behind no two are equally far
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    together = net(x)
    one_by_one = torch.cat([net(x[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(one_by_one, together, atol=1e-5, rtol=0)
    torch.testing.assert_close(net(x[order]), together[order], atol=1e-5, rtol=0)
    assert not net.depends_on_batch


@pytest.mark.parametrize("adapter", [{**L2P, "top_k": 1}, DUALP])
def test_the_papers_protocol_does_depend_on_the_batch(adapter: dict[str, Any]) -> None:
    net, x = adapted({**adapter, "selection": "batch"}), images(6)
    choosing(net, x, [0, 1, 2, 3, 1, 1])
    together, alone = net(x), torch.cat([net(x[i : i + 1]) for i in range(6)])
    differ = ((together - alone).abs().amax(1) > 1e-3).tolist()
    assert differ == [True, False, True, True, False, False]  # those that would not have chosen slot 1
    assert net.depends_on_batch


# Where they go.


def test_l2p_puts_them_before_the_positioned_tokens_and_averages_their_outputs() -> None:
    net, x = adapted({**L2P, "top_k": 1}), images(3)
    choosing(net, x, [2, 0, 2])
    for sample, slot in enumerate((2, 0, 2)):
        tokens = torch.cat([net.prompts.prompts[slot], net.frozen.embed(x)[sample]])
        expected = net.frozen.encode(tokens[None], read=2)[0].mean(0)
        torch.testing.assert_close(net(x)[sample], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(net.extract(x, task=1).features[sample], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("task", "slots"), [(None, (3, 0, 3)), (2, (2, 2, 2)), (5, (3, 0, 3))])
def test_dualp_takes_the_tasks_expert_or_the_one_that_the_key_finds(task: int | None, slots: tuple[int, ...]) -> None:
    """A pool of 4 has no slot for task 5, whose samples choose by their keys instead."""
    net, x = adapted({**DUALP, "pool": 4}, tasks=6), images(3)
    choosing(net, x, [3, 0, 3])
    general, experts = net.prompts.general, net.prompts.experts
    output = net.extract(x, task)
    for sample, slot in enumerate(slots):
        prefixes = {0: general[0], 1: experts[0, :, slot], 2: experts[1, :, slot]}
        attached = {layer: Attached(prefix=(p[0][None], p[1][None])) for layer, p in prefixes.items()}
        expected = net.frozen.encode(net.frozen.embed(x[sample : sample + 1]), attached)[0, 0]
        torch.testing.assert_close(output.features[sample], expected, atol=1e-5, rtol=0)
    cosines = [nn.functional.cosine_similarity(net.query(x)[i], net.prompts.keys[s], 0) for i, s in enumerate(slots)]
    assert output.distance.item() == pytest.approx(1 - torch.stack(cosines).mean().item(), abs=1e-6)


def test_tokens_enter_their_layer_and_go_no_further() -> None:
    """PIP eq. 2 at layers 0 to 2, by hand."""
    net, x = adapted({**DUALP, "enter": "tokens"}), images(3)
    general, experts = net.prompts.general, net.prompts.experts
    assert general.shape[1] == experts.shape[1] == 1
    h = net.frozen.embed(x)
    for index, layer in enumerate(net.frozen.layers):
        prompt = {0: general[0, 0], 1: experts[0, 0, 1], 2: experts[1, 0, 1]}.get(index)
        if prompt is None:
            h = layer(h, Attached(), h.shape[1])
        else:
            longer = torch.cat([prompt.expand(3, -1, -1), h], dim=1)
            h = layer(longer, Attached(), longer.shape[1])[:, len(prompt) :]
    torch.testing.assert_close(net.extract(x, task=1).features, net.frozen.norm(h)[:, 0], atol=1e-5, rtol=0)


def test_several_experts_come_one_after_the_other() -> None:
    net, x = adapted({**DUALP, "top_k": 2}, tasks=2), images(2)
    first, second = net.prompts.experts.unbind(2)
    output = net(x)
    for sample in range(2):
        attached = {0: Attached(prefix=(net.prompts.general[0, 0][None], net.prompts.general[0, 1][None]))}
        for index, layer in enumerate((1, 2)):
            p_K, p_V = torch.cat([first[index], second[index]], dim=1)[:, None]
            attached[layer] = Attached(prefix=(p_K, p_V))
        expected = net.frozen.encode(net.frozen.embed(x[sample : sample + 1]), attached)[0, 0]
        torch.testing.assert_close(output[sample], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("layers", [None, [2, 0]])
def test_lora_is_another_w_q_and_w_v(layers: list[int] | None) -> None:
    net, x = adapted({**LORA, "layers": layers}), images(3)
    before = net.query(x)
    torch.testing.assert_close(net(x), before, atol=1e-6, rtol=0)  # B is zero at first
    net.prompts.B.data.normal_()
    other = vit()
    for index, layer in enumerate([0, 1, 2] if layers is None else layers):
        W_Q, _, W_V = other.get_parameter(f"layers.{layer}.self_attention.in_proj.weight").data.chunk(3)
        for part, W in enumerate((W_Q, W_V)):
            W += 0.5 * net.prompts.B.data[index, part] @ net.prompts.A.data[index, part]
    torch.testing.assert_close(net(x), other(x), atol=1e-5, rtol=0)
    assert not torch.allclose(net(x), before, atol=1e-2)


@pytest.mark.parametrize("adapter", ALL)
def test_queries_are_the_frozen_features_and_given_ones_spare_a_pass(adapter: dict[str, Any]) -> None:
    net, x, passes = adapted(adapter), images(3), []
    queries = net.query(x)
    assert torch.equal(queries, vit().eval()(x))
    assert not queries.requires_grad
    expected = net.extract(x)
    net.frozen.norm.register_forward_hook(lambda *_: passes.append(1))
    output = net.extract(x, queries=queries)
    assert len(passes) == (0 if adapter["kind"] == "none" else 1)  # whose features they are
    assert torch.equal(output.features, expected.features)
    assert torch.equal(output.features, net(x))
    assert (output.distance is None) == (adapter["kind"] in ("none", "lora"))


@pytest.mark.parametrize(
    ("adapter", "first"),
    [(L2P, 0), (DUALP, 0), ({**DUALP, "g_layers": [2], "e_layers": [1]}, 1), (LORA, 0), ({**LORA, "layers": [2]}, 2)],
)
def test_what_enters_the_first_layer_with_something_attached_is_given_once_and_for_all(
    adapter: dict[str, Any], first: int
) -> None:
    """From there on features are the same, and no layer below is asked again."""
    net, x, passes = adapted(adapter), images(3), []
    if adapter["kind"] == "lora":
        net.prompts.B.data.normal_()
    by_hand = net.frozen.embed(x)
    for layer in net.frozen.layers[:first]:
        by_hand = layer(by_hand, Attached(), by_hand.shape[1])
    queries, below, expected = net.query(x), net.run_below(x), net.extract(x, task=1).features
    assert torch.equal(below, by_hand)
    assert not below.requires_grad
    assert below[0].numel() == net.numbers_per_sample
    for layer in net.frozen.layers:
        layer.register_forward_hook(lambda *_: passes.append(1))
    assert torch.equal(net.extract(x, 1, queries, below).features, expected)
    assert len(passes) == 3 - first


# What moves.


@pytest.mark.parametrize("adapter", [L2P, DUALP, LORA])
def test_a_step_moves_the_prompts_and_not_one_byte_of_the_backbone(adapter: dict[str, Any]) -> None:
    net = adapted(adapter).train()
    before = state(net)
    parameters = dict(net.named_parameters())
    assert {name for name, p in parameters.items() if p.requires_grad} == {n for n in parameters if "prompts." in n}
    optimiser = torch.optim.SGD(net.parameters(), lr=1.0, weight_decay=0.1)
    for _ in range(2):  # LoRA's A has no gradient while B is zero
        optimiser.zero_grad()
        output = net.extract(images(5), task=1)
        (output.features.square().sum() + (0 if output.distance is None else output.distance)).backward()
        optimiser.step()
    for name, parameter in parameters.items():
        assert (parameter.grad is not None and bool(parameter.grad.any())) == name.startswith("prompts."), name
    moved = {name for name, tensor in state(net).items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if name.startswith("backbone.prompts.")}


def test_only_the_tasks_expert_and_key_have_a_gradient() -> None:
    net = adapted(DUALP)
    output = net.extract(images(5), task=2)
    (output.features.square().sum() + output.distance).backward()
    assert net.prompts.experts.grad.abs().sum((0, 1, 3, 4)).gt(0).tolist() == [False, False, True, False]
    assert net.prompts.keys.grad.abs().sum(1).gt(0).tolist() == [False, False, True, False]
    assert net.prompts.general.grad.abs().sum((1, 2, 3)).gt(0).tolist() == [True]


def test_a_frozen_backbone_is_in_evaluation_mode_always() -> None:
    backbone = ResNet18(ResNet18.Settings(backbone="resnet18", width=2, stem="cifar")).build((3, 8, 8))
    net = adapt(backbone, {"kind": "none"}, 1)
    before = state(net)
    net.train()
    features = net(torch.randn(4, 3, 8, 8))
    assert net.training
    assert not any(module.training for module in net.frozen.modules())
    assert not features.requires_grad
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(net).items())  # batch statistics too


# How pools grow.


@pytest.mark.parametrize("adapter", [*ALL, {**L2P, "pool": 3}, {**DUALP, "pool": 3}])
def test_grown_to_n_tasks_it_has_the_shapes_of_one_built_for_n(adapter: dict[str, Any]) -> None:
    old, new = state(adapted(adapter, tasks=2)), state(adapted(adapter, tasks=5))
    grown = grow_prompts(old, adapter, 2, 5, torch.Generator())
    assert {name: w.shape for name, w in grown.items()} == {name: w.shape for name, w in new.items()}
    if adapter.get("pool") or adapter["kind"] in ("none", "lora"):
        assert all(grown[name] is w for name, w in old.items())


@pytest.mark.parametrize(("adapter", "part", "dimension"), [(L2P, "prompts", 0), (DUALP, "experts", 2)])
@pytest.mark.parametrize("start", ["previous", "fresh"])
def test_new_slots(adapter: dict[str, Any], part: str, dimension: int, start: str) -> None:
    old, generator = state(adapted(adapter, tasks=2)), torch.Generator().manual_seed(7)
    names = [f"backbone.prompts.{part}", "backbone.prompts.keys"]
    grown = grow_prompts(old, {**adapter, "start": start}, 2, 4, generator)
    prompts, keys = grown[names[0]].unbind(dimension), grown[names[1]].unbind()
    for name, axis in zip(names, (dimension, 0), strict=True):
        assert torch.equal(grown[name].narrow(axis, 0, 2), old[name])
    assert torch.equal(prompts[2], prompts[1]) == torch.equal(prompts[3], prompts[2]) == (start == "previous")
    assert all(slot.abs().max() <= 1 for slot in (*prompts, *keys))
    assert len({tuple(key.tolist()) for key in keys}) == 4
    # Two at once or one by one, the same; another seed, others.
    third = grow_prompts(old, {**adapter, "start": start}, 2, 3, generator)
    in_steps = grow_prompts(third, {**adapter, "start": start}, 3, 4, generator)
    assert all(torch.equal(in_steps[name], w) for name, w in grown.items())
    other = grow_prompts(old, {**adapter, "start": start}, 2, 4, torch.Generator().manual_seed(8))
    assert not torch.equal(other[names[1]], grown[names[1]])


# How much there is, and what is refused.


@pytest.mark.parametrize(
    ("adapter", "trained"),
    [
        ({"kind": "dualp"}, 15_360 + 230_400 + 7_680 + 76_900),
        ({"kind": "dualp", "pool": 10}, 330_340),
        ({"kind": "l2p"}, 38_400 + 7_680 + 76_900),
        ({"kind": "l2p", "pool": 10}, 122_980),
        ({"kind": "lora"}, 12 * 2 * 2 * 4 * 768 + 76_900),
        ({"kind": "none"}, 76_900),
    ],
)
def test_what_is_trained_on_vit_b_16_over_ten_tasks_of_ten_classes(adapter: dict[str, Any], trained: int) -> None:
    sizes = {"patch": 16, "width": 768, "depth": 12, "attention_heads": 12, "mlp_width": 3072}
    with torch.device("meta"):
        net = adapt(Vit(Vit.Settings(backbone="vit", **sizes)).build((3, 224, 224)), adapter, 10)
        head = nn.Linear(net.features, 100)
    prompts = [p.numel() for p in net.parameters() if p.requires_grad]
    assert sum(prompts) + sum(p.numel() for p in head.parameters()) == trained


@pytest.mark.parametrize(
    ("adapter", "line"),
    [
        ({**DUALP, "e_layers": [2, 3]}, "there is no layer 3, this vit has 0 to 2"),
        ({**DUALP, "g_layers": [7]}, "there is no layer 7, this vit has 0 to 2"),
        ({**DUALP, "g_layers": [2]}, "layer 2 is named twice"),
        ({**LORA, "layers": [0, 3]}, "^layers: there is no layer 3, this vit has 0 to 2"),
    ],
)
def test_layers_that_are_not_there_are_refused(adapter: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        adapted(adapter)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"none"}))
def test_only_a_vit_takes_prompts(kind: str) -> None:
    backbone = ResNet18(ResNet18.Settings(backbone="resnet18", width=2)).build((3, 32, 32))
    with pytest.raises(UserError, match=r"^model\.backbone: prompts .* Use model\.backbone: vit\."):
        adapt(backbone, {"kind": kind}, 1)


def test_the_same_seed_draws_the_same_prompts() -> None:
    def drawn(seed: int) -> Adapted:
        backbone = vit()
        torch.manual_seed(seed)
        return adapt(backbone, DUALP, 3)

    first, again, other = (state(drawn(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(again[name], w) for name, w in first.items())
    assert not torch.equal(other["backbone.prompts.keys"], first["backbone.prompts.keys"])
