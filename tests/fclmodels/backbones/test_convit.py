"""ConViT: its answers against DyTox's release, where its heads look at first, and which images it refuses."""

import pytest
import torch
from numpy.testing import assert_allclose

from fclmodels.backbones.convit import Convit, GatedAttention, list_offsets
from fclmodels.errors import UserError
from fclmodels.testing.backbone_checks import check_backbone

# What forward_features of ConVit in the release's continual/convit.py returns for two 8 x 8 images, x = sin(0, 1, ...),
# with patches of 4, width 8, four heads, two layers below the class-attention block, in float64 and evaluation mode.
# Tensor k of ours in the order of names holds 0.4 cos((k + 1) i + k) at place i; theirs hold the same.
RELEASE = [
    [0.3962621844722816, -0.1459644073168021, -0.9612815085801104, -0.10102170448883176],
    [0.275551939473231, 0.33737374632720607, -0.746333354030635, -0.21223178912592056],
    [0.3968606878592056, -0.1486090502478862, -0.9618061129983566, -0.09407283923944469],
    [0.2757557678548908, 0.33739560538630414, -0.7476107910291645, -0.213118293474798],
]


def test_it_answers_as_the_release() -> None:
    net = Convit(Convit.Settings(patch=4, width=8, depth=2, attention_heads=4)).build((1, 8, 8)).double().eval()
    weights = net.state_dict()
    for k, name in enumerate(sorted(weights)):
        places = torch.arange(weights[name].numel(), dtype=torch.float64)
        weights[name] = (0.4 * torch.cos((k + 1) * places + k)).view(weights[name].shape)
    net.load_state_dict(weights)
    x = torch.sin(torch.arange(128, dtype=torch.float64)).view(2, 1, 8, 8)
    with torch.no_grad():
        assert_allclose(net(x).view(4, 4), RELEASE, atol=1e-12)


def test_heads_look_at_neighbours_at_first() -> None:
    """Nine heads, the gate open to place: each patch's most attended one is its neighbour at (i, j) - (1, 1)."""
    attention = GatedAttention(18, 9, (4, 5))
    by_place = attention.place(list_offsets((4, 5))).permute(2, 0, 1).softmax(-1)
    inner = 1 * 5 + 2  # a patch with all neighbours
    looked_at = by_place[:, inner].argmax(-1) - inner
    assert looked_at.tolist() == [5 * row + column for column in (-1, 0, 1) for row in (-1, 0, 1)]
    assert torch.equal(attention.value.weight, torch.eye(18))


@pytest.mark.slow
def test_it_keeps_what_every_backbone_keeps() -> None:
    check_backbone(Convit, "model.width=12", "model.depth=2", "model.attention_heads=4", "model.patch=8")


@pytest.mark.parametrize(
    ("settings", "line"),
    [({"patch": 3}, r"model\.patch: patches of 3.*8x8"), ({"width": 10}, r"model\.attention_heads: 12 heads do not")],
)
def test_what_does_not_fit_is_refused(settings: dict[str, int], line: str) -> None:
    with pytest.raises(UserError, match=line):
        Convit(Convit.Settings(**settings)).build((1, 8, 8))


def test_some_samples_leave_blocks_out_in_training() -> None:
    net = Convit(Convit.Settings(patch=4, width=8, depth=3, attention_heads=4, drop_path=0.5)).build((1, 8, 8))
    x = torch.randn(1, 1, 8, 8).expand(32, -1, -1, -1)
    assert len(net.train()(x).round(decimals=5).unique(dim=0)) > 4
    assert len(net.eval()(x).round(decimals=4).unique(dim=0)) == 1
