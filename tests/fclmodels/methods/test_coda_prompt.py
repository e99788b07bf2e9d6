"""CODA-Prompt's pool and Fed-CPrompt's losses, against worked numbers; at its limit Fed-CPrompt is CODA-Prompt."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fclmodels.backbones.adapters.coda_prompts import mix_components, orthogonalise
from fclmodels.federation.exchange import TRAIN
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.coda_prompt import CodaPrompt
from fclmodels.methods.fed_cprompt import FedCPrompt, contrast_features, contrast_prompts
from fclmodels.storage import trees
from fclmodels.testing.tiny_splits import VIT

SMALL: dict[str, Any] = {"components": 2, "length": 2}


@pytest.fixture
def vit_of(method_of: Callable) -> Callable[..., Any]:
    return lambda kind, *overrides, **settings: method_of(kind, *VIT, *overrides, **{**SMALL, **settings})


@pytest.mark.parametrize(("softmax", "right"), [(False, [1, 2.683282]), (True, [0.995398, 2.993155])])
def test_a_prompt_of_worked_numbers(softmax: bool, right: list[float]) -> None:
    q, A = torch.tensor([[1.0, 2]]), torch.tensor([[1, 0.5], [-1, 1]])
    K, P = torch.tensor([[1.0, 1], [0, 2]]), torch.tensor([[[1.0, 0]], [[0, 3]]])
    prompt = mix_components(q, P, K, A.softmax(-1) if softmax else A)
    np.testing.assert_allclose(prompt, [[right]], atol=1e-6)


def test_components_start_orthogonal_while_there_is_room() -> None:
    random = torch.Generator().manual_seed(0)
    first = orthogonalise(torch.rand(3, 2, 8, generator=random), [])
    second = orthogonalise(torch.rand(3, 2, 8, generator=random), [first])
    both = torch.cat([first, second], 1)
    torch.testing.assert_close(both @ both.mT, torch.eye(4).expand(3, -1, -1), atol=1e-5, rtol=0)
    crowded = orthogonalise(torch.rand(3, 6, 8, generator=random), [first, second])
    torch.testing.assert_close(crowded.norm(dim=2), torch.ones(3, 6))
    torch.testing.assert_close(crowded[:, :4] @ both.mT, torch.zeros(3, 4, 4), atol=1e-5, rtol=0)


def test_prompts_join_keys_and_values_of_their_layers(vit_of: Callable) -> None:
    """The network by hand, a layer at a time, its first layer without prompts."""
    method = vit_of(CodaPrompt, prompt_layers=(1,))
    server = method.start_task(method.create_server(), 0)
    adapted: Any = method.networks.load(server.spec, server.weights).backbone
    x = torch.randn(3, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        q, own, frozen = adapted.query(x), adapted.prompts[0], adapted.frozen
        alpha = torch.cosine_similarity(q[:, None] * own.A[0], own.K[0][None], dim=-1)
        prompt = torch.einsum("bm,mld->bld", alpha, own.P[0])
        h = frozen.run_below(x, 1)
        layer = frozen.layers[1]
        qkv = layer.self_attention.in_proj(layer.ln_1(h))
        Q, K, V = qkv.chunk(3, -1)
        K, V = torch.cat([prompt[:, :1], K], 1), torch.cat([prompt[:, 1:], V], 1)
        heads = [t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (Q, K, V)]
        weights = (heads[0] @ heads[1].mT / 2).softmax(-1)
        h = h + layer.self_attention.out_proj((weights @ heads[2]).transpose(1, 2).flatten(2))
        h = h + layer.mlp(layer.ln_2(h))
        torch.testing.assert_close(adapted(x), frozen.norm(h)[:, 0], atol=1e-5, rtol=1e-4)


def test_a_task_trains_its_components_and_earlier_ones_stay(
    vit_of: Callable, federate: Callable, client_of: Callable
) -> None:
    method = vit_of(CodaPrompt)
    one, two = federate(method, 1).weights, federate(method, 2).weights
    first = [name for name in two if name.startswith("backbone.prompts.0.")]
    assert len(first) == 3
    assert all(torch.equal(one[name], two[name]) for name in first)
    server = method.start_task(federate(method, 1), 1)
    sent = method.exchanges[TRAIN].reply(client_of(method, 0, task=1), method.make_payload(server))[0].parts["update"]
    assert {name for name in sent.tensors if "prompts" in name} == {f"backbone.prompts.1.{part}" for part in "PKA"}
    earlier, new = (server.weights[f"backbone.prompts.{task}.K"] for task in range(2))
    assert (earlier.shape, new.shape) == ((2, 2, 8), (2, 2, 8))


def test_contrasts_of_worked_numbers() -> None:
    own, start = torch.tensor([1.0, 2, 2]), torch.tensor([1.0, 2, 1])
    earlier = torch.tensor([[0.0, 0, 0], [1, 0, 2]])
    assert [float(contrast_prompts(own, start, earlier, 1.0, margin)) for margin in (1.5, 0.5)] == [0.5, 0]
    f, near = torch.tensor([[0.1, 0.2], [0.3, -0.1]]), torch.tensor([[0.1, 0.19], [0.28, -0.1]])
    far = torch.tensor([[0, 0.5], [0.2, 0.3]])
    np.testing.assert_allclose(1000 * (f - near).square().sum(1), [0.1, 0.4], rtol=1e-4)
    np.testing.assert_allclose(10 * (f - far).square().sum(1), [1, 1.7], rtol=1e-4)
    assert contrast_features(f, near, far) == 0
    assert float(contrast_features(f, near, None)) == pytest.approx(0.5, rel=1e-4)


def test_without_its_loss_fed_cprompt_is_coda_prompt(vit_of: Callable, federate: Callable) -> None:
    plain, off, on = (
        trees.digest(federate(vit_of(kind, **settings)).weights)
        for kind, settings in ((CodaPrompt, {}), (FedCPrompt, {"lambda": 0}), (FedCPrompt, {"margin": 9.0}))
    )
    assert plain == off != on


@pytest.mark.parametrize("contrast", ["prompts", "release"])
def test_its_loss_is_of_the_models_that_it_names(contrast: str, vit_of: Callable, client_of: Callable) -> None:
    """Of the round's global model and earlier tasks, on a network that has moved by half."""
    method = vit_of(FedCPrompt, contrast=contrast, margin=9.0)
    plain = vit_of(CodaPrompt)
    server = method.start_task(method.start_task(method.create_server(), 0), 1)
    client = client_of(method, 0, task=1)
    training = method.prepare_training(client, method.make_payload(server))
    with torch.no_grad():
        training.parameters["backbone.prompts.1.P"].mul_(1.5)
    batch = next(next(client.yield_epochs()))
    of_plain = LocalTraining(plain, client, training.network, training.start)
    gained = (method.compute_loss(training, batch) - plain.compute_loss(of_plain, batch)).item()
    P = [server.weights[f"backbone.prompts.{task}.P"] for task in range(2)]
    if contrast == "prompts":
        right = max(0.0, float((0.5 * P[1]).norm() - (1.5 * P[1] - P[0]).norm() + 9))
    else:
        with torch.no_grad():
            f = training.network.backbone(batch.inputs)
            start = plain.networks.load(server.spec, server.weights).backbone(batch.inputs)
            before = method.start_task(method.create_server(), 0)
            last = plain.networks.load(before.spec, before.weights).backbone(batch.inputs)
            right = max(0.0, float(1000 * (f - start).square().sum() - 10 * (f - last).square().sum()) + 1)
    assert right > 0
    assert gained == pytest.approx(right, rel=1e-3)


def test_the_first_task_gains_nothing_from_prompts(vit_of: Callable, federate: Callable) -> None:
    one, other = (federate(vit_of(kind), 1).weights for kind in (CodaPrompt, FedCPrompt))
    assert trees.digest(one) == trees.digest(other)
