"""Methods with a pair of low-rank factors a task: what trains, what travels, what is served; O-LoRA."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from fclmodels.backbones.adapters.low_rank import LowRank, find_maps, name_factor
from fclmodels.backbones.model.network import FROZEN, build_network
from fclmodels.errors import UserError
from fclmodels.experiment.exported_model import ExportedModel
from fclmodels.federation.exchange import TRAIN
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.lora import Lora
from fclmodels.methods.o_lora import OLora
from fclmodels.numerics.low_rank_overlap import measure_overlap
from fclmodels.storage import trees
from fclmodels.testing.tiny_splits import VIT

ALL = ("query", "key", "value", "output", "perceptron-in", "perceptron-out")
FIRST, SECOND = torch.tensor([[1.0, 0, 2], [0, 1, -1]]), torch.tensor([[1.0, -1, 0], [2, 0, 1]])


@pytest.fixture
def vit_of(method_of: Callable) -> Callable[..., Any]:
    return lambda kind, *overrides, **settings: method_of(kind, *VIT, *overrides, **settings)


def randomise(network: Any, seed: int = 0) -> None:
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.backbone.prompts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) / 4)


def test_the_overlap_of_worked_numbers() -> None:
    assert measure_overlap(FIRST, SECOND).item() == 7
    assert (FIRST @ SECOND.T).square().sum() == 19  # which the paper prints


def test_all_six_maps_change_as_they_would_by_hand(vit_of: Callable) -> None:
    """W + scale sum_t B_t A_t, rows of queries, keys and values below each other; nothing at first."""
    method = vit_of(OLora, rank=2, targets=ALL, scale=3.0, layers=(1,))
    network: Any = build_network(method.run.make_spec(2), method.run.make_generator("init"))
    x = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(network.backbone(x), network.backbone.frozen(x))
        randomise(network)
        merged = network.backbone.merge()
    prompts = {name: p.detach().numpy() for name, p in network.named_parameters()}
    for index, of in enumerate(network.backbone.maps):
        change = sum(prompts[name_factor(t, index, "B")] @ prompts[name_factor(t, index, "A")] for t in range(2))
        W = network.backbone.frozen.get_parameter(f"{of.layer}.weight").numpy()[of.rows]
        np.testing.assert_allclose(merged[f"{of.layer}.weight"][of.rows].numpy(), W + 3 * change, atol=1e-5)
    places = [(of.layer, of.start) for of in network.backbone.maps]
    attention = "layers.1.self_attention.in_proj"
    assert places[:3] == [(attention, 0), (attention, 8), (attention, 16)]
    assert [layer for layer, _ in places[3:]] == [
        "layers.1.self_attention.out_proj",
        "layers.1.mlp.0",
        "layers.1.mlp.2",
    ]


def test_the_first_task_is_loras(vit_of: Callable, client_of: Callable) -> None:
    """With the same factors: the same features and gradients, though LoRA adds to activations and this to weights."""
    mine, plain = vit_of(OLora, rank=2, scale=2.0), vit_of(Lora, rank=2, scale=2.0)
    servers = [m.start_task(m.create_server(), 0) for m in (mine, plain)]
    random = torch.Generator().manual_seed(3)
    A, B = torch.randn(2, 2, 2, 8, generator=random), torch.randn(2, 2, 8, 2, generator=random)
    servers[1].weights.update({"backbone.prompts.A": A, "backbone.prompts.B": B})
    for layer in range(2):
        for place in range(2):
            servers[0].weights[name_factor(0, 2 * layer + place, "A")] = A[layer, place]
            servers[0].weights[name_factor(0, 2 * layer + place, "B")] = B[layer, place]
    gradients = []
    for method, server in zip((mine, plain), servers, strict=True):
        client = client_of(method, 0)
        training = LocalTraining(method, client, method.networks.load(server.spec, server.weights), server.weights)
        loss = method.compute_loss(training, next(next(client.yield_epochs())))
        gradients.append((loss.detach(), training.compute_gradients(loss)))
    torch.testing.assert_close(gradients[0][0], gradients[1][0])
    of_B = gradients[1][1]["backbone.prompts.B"]
    torch.testing.assert_close(gradients[0][1][name_factor(0, 3, "B")], of_B[1, 1], atol=1e-5, rtol=1e-4)


def test_its_loss_gains_overlap_and_lengths(vit_of: Callable, client_of: Callable) -> None:
    plain, full = (vit_of(OLora, rank=2, orthogonal=w, length=v) for w, v in ((0, 0), (0.5, 0.25)))
    server = plain.start_task(plain.start_task(plain.create_server(), 0), 1)
    losses = []
    for method in (plain, full):
        client = client_of(method, 0, task=1)
        network = method.networks.load(server.spec, server.weights)
        randomise(network)
        training = LocalTraining(method, client, network, server.weights)
        losses.append(method.compute_loss(training, next(next(client.yield_epochs()))).item())
    prompts = {n: p.detach().numpy() for n, p in network.named_parameters() if ".prompts." in n}
    more = 0.0
    for index in range(4):
        old, A, B = (prompts[name_factor(*of)] for of in ((0, index, "A"), (1, index, "A"), (1, index, "B")))
        more += 0.5 * np.abs(old @ A.T).sum() + 0.25 * (np.linalg.norm(A) + np.linalg.norm(B))
    assert losses[1] - losses[0] == pytest.approx(more, rel=1e-4)


def test_a_task_trains_its_own_pair_and_downloads_the_others_once(
    vit_of: Callable, federate: Callable, client_of: Callable, experiment_of: Callable, tmp_path: Path
) -> None:
    method = vit_of(OLora, rank=2)
    one, two = federate(method, 1).weights, federate(method, 2).weights
    first = [name for name in two if name.startswith("backbone.prompts.0.")]
    assert all(torch.equal(one[name], two[name]) for name in first)
    server = method.start_task(federate(method, 1), 1)
    payload = method.make_payload(server)
    assert set(payload["fixed"].tensors) == set(first)
    assert payload["fixed"].once
    sent = method.exchanges[TRAIN].reply(client_of(method, 0, task=1), payload)[0].parts["update"].tensors
    assert {name.split(".")[2] for name in sent if "prompts" in name} == {"1"}
    assert not any(name.startswith(FROZEN) for name in (*sent, *payload["weights"].tensors))
    experiment_of(*VIT, "federation.rounds=3", method="o-lora").run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet").filter(task=1, part="fixed", client=1)
    assert (ledger["bytes"] > 0).sum() == 1


@pytest.mark.parametrize("method", ["o-lora", "inflora", "lorm", "pilora"])
def test_a_served_model_has_them_merged(method: str, experiment_of: Callable, tmp_path: Path) -> None:
    """It is the plain backbone, with the predictions of the model that was learned."""
    experiment = experiment_of(*VIT, f"methods.{method}.targets=[query, perceptron-in]", method=method)
    experiment.run(tmp_path / "run")
    weights = trees.load(tmp_path / "run" / "model" / "weights.safetensors")
    assert not any("prompts" in name or "frozen" in name for name in weights)
    model = ExportedModel(tmp_path / "run" / "model")
    splits = experiment.method.run.splits
    table = pl.read_parquet(tmp_path / "run" / "accuracy.parquet").filter(
        pl.col("reading") == "task_aware", pl.col("after") == 2, pl.col("client").is_null()
    )
    for task in range(2):
        rows = splits.select_test_rows(task)
        names = [splits.classes[label] for label in rows.labels]
        answers = model.answer(experiment.method.run.batches.read_raw(rows).inputs.numpy(), task + 1)
        correct = sum(answer["class"] == name for answer, name in zip(answers, names, strict=True))
        assert correct == table.filter(pl.col("task") == task)["correct"].item()


def test_maps_that_are_not_there_are_refused(vit_of: Callable, method_of: Callable) -> None:
    with pytest.raises(UserError, match=r"layers: there is no layer 2, this network has 0 to 1"):
        vit_of(OLora, layers=(2,)).create_server()
    with pytest.raises(UserError, match=r"Use model\.backbone: vit"):
        method_of(OLora).create_server()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"layers": (1, 1)}, r"layers: layer 1 is named twice"),
        ({"targets": ("query", "query")}, r"targets: query is named twice"),
        ({"targets": ("attention-in", "query")}, r"targets: query is .* a part of attention-in"),
        ({"targets": ("value", "attention-in")}, r"targets: attention-in is named twice, or"),
    ],
)
def test_a_map_that_is_named_twice_is_refused(settings: dict[str, Any], why: str, vit_of: Callable) -> None:
    with pytest.raises(UserError, match=why):
        vit_of(OLora, **settings).create_server()


def test_an_encoder_of_texts_has_the_same_maps(encoder: Path) -> None:
    from fclmodels.backbones.transformer import Transformer

    frozen = Transformer(Transformer.Settings(backbone="transformer", folder=encoder)).build((2, 8))
    maps = list(find_maps(frozen, LowRank.Settings(targets=ALL)))
    assert list(find_maps(frozen, LowRank.Settings(targets=("attention-in", *ALL[3:])))) == maps
    layers = len(maps) // 6
    assert [(of.out, of.inputs) for of in maps[:6]] == [(16, 16)] * 4 + [(32, 16), (16, 32)]
    adapted: Any = LowRank(frozen, LowRank.Settings(targets=ALL), 1)
    x = torch.randint(1, 5, (3, 2, 8)).int()
    x[:, 1] = 1
    with torch.no_grad():
        before = adapted(x)
        randomise(type("Network", (), {"backbone": adapted}))
        assert not torch.allclose(adapted(x), before)
    assert layers >= 1
