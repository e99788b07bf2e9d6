"""FedCIL's consolidation: the server trains its AC-GAN on images of the clients' generators, after each round.

In each step every client's generator draws a batch of its classes, of which as many are picked as a batch has, each
class as likely as another. The steps are (L_D(x) + L_D(x_)) / 2 and L_G as a client's, x of generators of this task, x_
of earlier ones, and draws of all clients' classes so far. No real sample is there, so that running statistics stay.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fclmodels.federation.run_context import Run
from fclmodels.federation.training.optimisers import Optimiser, make_optimiser
from fclmodels.methods.parts.ac_gan import AcGan, step_generator
from fclmodels.methods.parts.label_sets import draw_uniformly
from fclmodels.randomness import seed_torch


class ClientGenerator(NamedTuple):
    """A client's generator, and which columns it draws [columns]: 1, else 0."""

    state: dict[str, Tensor]
    columns: Tensor


class Moment(NamedTuple):
    """How many steps, and in which task and round."""

    steps: int
    task: int
    round: int


def consolidate(
    run: Run,
    gan: AcGan,
    of_critic: Sequence[nn.Parameter],
    generator_optimiser: Optimiser,
    sources: Sequence[ClientGenerator],
    earlier: Sequence[ClientGenerator],
    load: Callable[[dict[str, Tensor]], nn.Module],
    columns: Tensor,
    moment: Moment,
) -> None:
    """Train the pair in place; load: makes a generator of a state; columns: of all clients so far."""
    size = run.params.federation.batch_size
    critic = make_optimiser(run.params.optimizer, list(of_critic), moment.round)
    with seed_torch(run.seed, "consolidation", moment.task, moment.round, device=run.device):
        for _ in range(moment.steps):
            losses = [
                gan.measure_samples(gan.normalise(pixels), of, columns)
                for group in (sources, earlier)
                for pixels, of in draw_balanced(group, load, size, columns.device)
            ]
            critic.zero_grad()
            torch.stack(losses).mean().backward()
            critic.step()
            step_generator(gan, generator_optimiser, columns, size)


@torch.no_grad()
def draw_balanced(
    sources: Sequence[ClientGenerator], load: Callable[[dict[str, Tensor]], nn.Module], size: int, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Return so many images and their columns, each column as likely as another; nothing where nobody has any."""
    images, columns = [], []
    for state, present in sources:
        able = present.nonzero().flatten().to(device)
        if len(able):
            columns.append(draw_uniformly(able, size))
            images.append(load(state)(columns[-1]))
    if not images:
        return []
    of = torch.cat(columns)
    chosen = draw_uniformly(of.unique(), size)
    places = (of == chosen[:, None]).float().multinomial(1)[:, 0]
    return [(torch.cat(images)[places], chosen)]
