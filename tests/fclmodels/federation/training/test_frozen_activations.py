"""Kept activations of frozen blocks: the same results, computed once a task, and refused where they would be wrong."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.federation.training.frozen_activations import Activations, count_frozen_blocks
from fclmodels.methods.af_fcl import AfFcl
from fclmodels.methods.agem import Agem
from fclmodels.methods.er import Er
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.fedprotip import FedProTIP
from fclmodels.methods.fot import Fot
from fclmodels.methods.glfc_fot import GlfcFot
from fclmodels.methods.icarl import Icarl
from fclmodels.methods.joint import Joint
from fclmodels.methods.lwf import Lwf
from fclmodels.methods.scr import Scr
from fclmodels.methods.single_task import SingleTask
from fclmodels.methods.stamp import Stamp

FRZ = ("model.backbone=resnet18", "model.freeze=[conv1, bn1, layer1, layer2]")
VIT = (
    *("model.backbone=vit", "model.patch=3", "model.width=8", "model.depth=3", "model.attention_heads=2"),
    *("model.mlp_width=8", "model.freeze=[embed, layers.0, layers.1]"),
)
KEEP = "model.keep_frozen=true"


@pytest.fixture
def kept_of(method_of: Callable, tmp_path: Path) -> Callable:
    """A method of a run that has a folder, and keeps."""

    def make(kind: type[FedAvg] = FedAvg, *overrides: str, splits: Splits | None = None, **settings: Any) -> Any:
        method = method_of(kind, *overrides, KEEP, splits=splits, **settings)
        return kind(method.settings, replace(method.run, home=tmp_path / "home"))

    return make


@pytest.mark.parametrize(
    ("kind", "settings", "permuted"),
    [(FedAvg, FRZ, False), (FedProTIP, FRZ, False), (Agem, FRZ, True), (FedAvg, VIT, False)],
    ids=["fedavg", "fedprotip", "agem-permuted", "vit"],
)
def test_the_model_is_the_same(
    kind: type, settings: tuple, permuted: bool, kept_of: Any, method_of: Any, federate: Any, splits_of: Any
) -> None:
    """To rounding: with batch norm in training a batch of one sample would blow that up."""
    splits: Splits = splits_of(tasks=3, permuted=permuted, same_classes=permuted, train=9)
    settings = (*settings, "optimizer.lr=0.03")
    plain = federate(method_of(kind, *settings, splits=splits, batch_norm="frozen")).weights
    keeping = federate(kept_of(kind, *settings, splits=splits, batch_norm="frozen")).weights
    for name in plain:
        torch.testing.assert_close(plain[name], keeping[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "kind",
    [Er, Icarl, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (Lwf, Stamp, Joint, AfFcl, Fot, GlfcFot))],
)
def test_methods_with_losses_of_their_own_learn_the_same(
    kind: type[FedAvg], kept_of: Any, method_of: Any, federate: Any, splits_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first task on; their own samples, and old ones beside them, go through what is cached or computed."""
    settings = (*FRZ, "model.width=4", "model.norm=group", "model.freeze_after=0", "optimizer.lr=0.01")
    splits: Splits = splits_of(tasks=2, train=9)
    plain = federate(method_of(kind, *settings, splits=splits)).weights
    method, own, computed = kept_of(kind, *settings, splits=splits), [], []
    of, compute = Activations.gather_rows, Activations.compute
    monkeypatch.setattr(Activations, "gather_rows", lambda *args: (own.append(len(args[1].labels)), of(*args))[1])
    monkeypatch.setattr(Activations, "compute", lambda *args: (computed.append(len(args[1])), compute(*args))[1])
    keeping = federate(method).weights
    for name in plain:
        torch.testing.assert_close(plain[name], keeping[name], rtol=1e-4, atol=1e-5)
    assert sum(own) > 0
    assert (sum(computed) > 0) == (kind in (Er, Icarl, GlfcFot))


def test_they_are_computed_once_a_task_by_each_client(
    kept_of: Any, federate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = kept_of(FedAvg, *FRZ, "federation.rounds=3")
    network = method.networks.load(method.run.make_spec(1), method.create_server().weights)
    up_to, asked = type(network.backbone).run_first, []

    def counted(backbone: Any, x: torch.Tensor, blocks: int) -> torch.Tensor:
        asked.append((len(x), blocks))
        return up_to(backbone, x, blocks)

    monkeypatch.setattr(type(network.backbone), "run_first", counted)
    federate(method)
    clients = method.list_participants(1)
    assert asked == [(len(method.select_rows(1, client)), 4) for client in clients]
    assert len(list((tmp_path / "home" / "activations").iterdir())) == len(clients)


@pytest.mark.parametrize("kind", [FedAvg, FedProTIP, Joint, SingleTask])  # FedProTIP: batch_norm: frozen, later
def test_pretrained_blocks_are_frozen_from_the_start(kind: type[FedAvg], method_of: Any, federate: Any) -> None:
    """Weights and running statistics of the first task too; the others are trained."""
    method = method_of(kind, *FRZ, "model.freeze_after=0")
    before, after = method.create_server().weights, federate(method, tasks=1).weights
    frozen = tuple(f"backbone.{block}." for block in ("conv1", "bn1", "layer1", "layer2"))
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if name.startswith(frozen)} <= still
    assert {name for name in still if not name.startswith(frozen)} <= {
        n for n in before if n.endswith("batches_tracked")
    }


def test_the_first_task_is_fedavgs_where_statistics_freeze_later(method_of: Any, federate: Any) -> None:
    """`batch_norm: frozen` fixes the statistics of other blocks after the first task only, to the bit."""
    methods = (method_of(kind, *FRZ, "model.freeze_after=0") for kind in (FedAvg, FedProTIP))
    plain, projected = (federate(method, tasks=1).weights for method in methods)
    assert all(torch.equal(plain[name], projected[name]) for name in plain if name.startswith("backbone."))


def test_what_changes_is_not_still(method_of: Any) -> None:
    """Blocks are counted up to the first one that a step or a mode can change."""
    method = method_of(FedAvg, "model.backbone=resnet18", "model.freeze=[conv1, bn1, layer1]")
    network = method.networks.load(method.run.make_spec(1), method.create_server().weights)

    def counted(task: int) -> int:
        method.set_modes(network, task)
        return count_frozen_blocks(network, method.select_trainable(network, task))

    assert (counted(0), counted(1)) == (0, 3)
    network.backbone.bn1.train()
    assert count_frozen_blocks(network, ()) == 1
    network.eval()
    assert count_frozen_blocks(network, ()) == len(network.backbone.blocks)
    assert count_frozen_blocks(network, ("backbone.layer2.0.conv1.weight", "heads.0.weight")) == 3


def refused() -> Iterator[tuple]:
    layer1 = "model.freeze=[conv1, layer1]"
    yield FedAvg, (), {}, "nothing is frozen here"
    yield FedAvg, (*FRZ, "augment.flip=true"), {}, "augment changes the samples"
    yield FedAvg, ("model.freeze=[fc1]",), {}, "mlp cannot be entered between two blocks"
    yield Scr, FRZ, {}, "scr needs samples from the first block on"
    yield Joint, (*FRZ, "model.freeze_after=1"), {}, "nothing is frozen here"
    yield FedAvg, (FRZ[0], layer1), {}, "layer1 is frozen, but bn1 is trained. Freeze all blocks from the first one on"
    yield FedAvg, FRZ, {"batch_norm": "batch"}, "bn1 is frozen, but bn1 normalises by each batch"


@pytest.mark.parametrize(("kind", "overrides", "settings", "said"), list(refused()))
def test_refused_where_they_would_be_wrong(
    kind: type, overrides: tuple, settings: dict, said: str, kept_of: Any
) -> None:
    with pytest.raises(UserError, match=f"^model.keep_frozen: .*{said}"):
        kept_of(kind, *overrides, **settings).create_server()


def test_a_run_without_a_folder_keeps_nothing(method_of: Any) -> None:
    with pytest.raises(UserError, match="has no folder to keep them in"):
        method_of(FedAvg, *FRZ, KEEP).create_server()
