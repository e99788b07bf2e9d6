"""Small runs are told from large ones by shapes alone, and the network that the run goes on to use stays as it is."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fclmodels import plugins
from fclmodels.experiment.costs.small_runs import is_small, measure_shapes
from fclmodels.experiment.experiment import Experiment


def test_small_runs_are_known_by_their_shapes(experiment_of: Callable[..., Experiment]) -> None:
    assert is_small(experiment_of())
    assert not is_small(experiment_of("federation.rounds=100000000"))
    assert not is_small(experiment_of("model.hidden=9000"))


@pytest.mark.parametrize("method", sorted(plugins.load_all("method")))
def test_to_look_at_a_network_changes_nothing_of_it(method: str, experiment_of: Callable[..., Experiment]) -> None:
    run = experiment_of(method=method)
    network = run.method.networks.build(run.method.run.make_spec(1))
    before = [(tensor.clone(), network.training) for tensor in network.state_dict().values()]
    state = torch.get_rng_state()
    is_small(run)
    assert torch.get_rng_state().equal(state)
    assert run.method.networks.build(run.method.run.make_spec(1)) is network
    for (tensor, mode), other in zip(before, network.state_dict().values(), strict=True):
        assert tensor.equal(other)
        assert mode == network.training


def test_shapes_are_those_on_paper() -> None:
    """A convolution of 2 filters 3 x 3 over 3 channels of 4 x 4 pixels, padded, then 32 to 5."""
    network = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5))
    shapes = measure_shapes(network, torch.zeros(1, 3, 4, 4))
    assert (shapes.activations, shapes.widest) == (32 + 5, 32)
    assert shapes.multiplications == 32 * 27 + 5 * 32
    assert not network[0]._forward_hooks
