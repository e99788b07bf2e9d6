"""Cost of gradient subspaces: a projected training step against a plain one, on one thread.

Random bases fill 20 and 60 % of what each layer's input can span, in all layers below the head. `dense` is the plain
way at 20 %, (G Phi) Phi^T on every gradient with all taps of the kernels.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from measuring import Bench, Row, take_turns
from torch import Tensor
from torch.nn.functional import cross_entropy
from workloads import RGB, SHARE, WORKS, draw_basis

from fclmodels.backbones.inputs.gradient_projection import Projection, split_by_width
from fclmodels.backbones.inputs.layer_capture import Layer, find_layers
from fclmodels.backbones.model.network import Network, build_network
from fclmodels.backbones.model.spec import ModelSpec

SHARES = (SHARE, 0.6)


def training_step(network: Network, batch_size: int) -> Callable[[Callable[[dict[str, Tensor]], None]], None]:
    """Return a function that takes one SGD step, after a change of its gradients by its argument."""
    inputs, labels = torch.randn(batch_size, *RGB), torch.randint(10, (batch_size,))
    optimiser = torch.optim.SGD(network.parameters(), 0.01, fused=True)

    def step(change: Callable[[dict[str, Tensor]], None]) -> None:
        optimiser.zero_grad()
        cross_entropy(network(inputs), labels).backward()
        change({name: p.grad for name, p in network.named_parameters() if p.grad is not None})
        optimiser.step()

    return step


def dense(layers: dict[str, Layer]) -> Callable[[dict[str, Tensor]], None]:
    """Return a function that makes all layers' gradients G - (G Phi) Phi^T."""
    widths = {layer.weight: layer.module.weight[0].numel() for layer in layers.values()}
    bases = {name: draw_basis(width) for name, width in widths.items()}

    def change(gradients: dict[str, Tensor]) -> None:
        for name, Phi in bases.items():
            G = gradients[name].flatten(1)
            G.sub_((G @ Phi) @ Phi.T)

    return change


def steps(name: str, turns: int) -> Iterator[Row]:
    torch.manual_seed(0)
    work = WORKS[name]
    network = build_network(ModelSpec(work.model, RGB, "growing", (tuple(range(10)),)), torch.Generator())
    network.train()
    layers = {key: layer for key, layer in find_layers(network, RGB).items() if key.startswith("backbone.")}
    step = training_step(network, work.batch)

    def projected(share: float) -> Callable[[], None]:
        bases = {key: draw_basis(layer.width, share) for key, layer in layers.items()}
        projection = Projection(layers, *split_by_width(bases))

        def run() -> None:
            with projection.project_in_backward(network, work.batch):
                step(projection.project_gradients)

        return run

    all_taps = dense(layers)
    sides: dict[str, Callable[[], None]] = {
        "plain": lambda: step(lambda gradients: None),
        **{f"{share:.0%}": projected(share) for share in SHARES},
        "dense": lambda: step(all_taps),
    }
    seconds = take_turns(sides, turns)
    for side in list(sides)[1:]:
        yield Row(f"{name}-step-{side}", "a projected step, a plain one", seconds[side], seconds["plain"])


BENCHES = [Bench(f"{name}-step", partial(steps, name), 25) for name in ("w2", "w3")]
