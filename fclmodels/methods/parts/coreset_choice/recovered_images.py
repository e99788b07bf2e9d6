"""SRe2L's recovery (Yin et al. 2023): images made of noise that the model takes for its classes, not samples.

Adam moves all images of a client's task together down

    CE + r sum_l c_l (||mean_l - running mean_l|| + ||var_l - running var_l||)

over the inputs of each batch normalisation, c = 10 for the first and 1 for the others, the images rolled by up to 4
pixels in each step and held within the pixels' range; the rate falls along a cosine. Its last stage, soft labels of
mixed images, is a way to train on them and not of choosing: it is left out, and labels are hard. What is stored is
no sample, but it shows what the model knows of them. It needs running statistics.
"""

import math

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from fclmodels.backbones.inputs.batch_statistics import Captured, capture_statistics
from fclmodels.backbones.layers.norms import list_statistics
from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.methods.parts.coreset_choice.candidates import Candidates, measure_losses
from fclmodels.numerics.data_free import measure_statistics_gap
from fclmodels.settings.base import Settings as BaseSettings

FIRST_LAYER = 10.0  # weight of the first batch normalisation's statistics
ROLL = 4  # pixels
BETAS = (0.5, 0.9)


class Sre2lSettings(BaseSettings):
    steps: PositiveInt = Field(1000, le=1_000_000, description="steps of the images (the paper; ImageNet: 4000)")
    lr: PositiveFloat = Field(0.25, description="first rate of their Adam (the paper)")
    statistics: NonNegativeFloat = Field(0.01, description="r, weight of the statistics (the paper)")


def require_running_statistics(network: Network, method: str) -> None:
    """Raise UserError where a network has no running statistics from which images could be recovered."""
    if not list_statistics(network):
        raise UserError(
            f"methods.{method}.selection: sre2l recovers images from running statistics of batch normalisation, and "
            "this network has none. Use model.backbone: resnet18 with batch_norm: average, or selection: herding."
        )


def recover_images(candidates: Candidates, settings: Sre2lSettings) -> dict[int, Batch]:
    """Return images of each class of the task, as many as there is room for, in the form of stored samples."""
    client, shape = candidates.client, candidates.new.inputs.shape[1:]
    labels = torch.tensor([label for label, room in candidates.room.items() for _ in range(room)])
    random = client.make_generator("sre2l")
    images = torch.rand((len(labels), *shape), generator=random).to(client.run.device).requires_grad_()
    goal = Batch(images, labels.to(images.device), torch.full_like(labels, client.task).to(images.device))
    optimiser = torch.optim.Adam([images], settings.lr, BETAS)
    network = candidates.network
    with capture_statistics(network) as captured:
        for step in range(settings.steps):
            optimiser.param_groups[0]["lr"] = find_rate(settings, step)
            shifts = torch.randint(-ROLL, ROLL + 1, (2,), generator=random).tolist()
            captured.batch.clear()
            inputs = client.run.batches.normalise_pixels(images.roll(shifts, (2, 3)))
            loss = measure_losses(network, Batch(inputs, goal.labels, goal.tasks)).mean()
            loss = loss + settings.statistics * weigh_statistics(captured)
            (images.grad,) = torch.autograd.grad(loss, [images])
            optimiser.step()
            with torch.no_grad():
                images.clamp_(0, 1)
    made = (255 * images.detach()).round().to(torch.uint8)
    return {
        label: Batch(made, goal.labels, goal.tasks).take(labels.eq(label).nonzero().flatten())
        for label in candidates.room
    }


def find_rate(settings: Sre2lSettings, step: int) -> float:
    """Return lr (1 + cos(pi step / steps)) / 2."""
    return settings.lr * (1 + math.cos(math.pi * step / settings.steps)) / 2


def weigh_statistics(captured: Captured) -> Tensor:
    """Return sum_l c_l of the statistics' distances."""
    every = measure_statistics_gap(captured.batch, captured.running, None, 0.0)
    first = measure_statistics_gap(captured.batch[:1], captured.running[:1], None, 0.0)
    return every + (FIRST_LAYER - 1) * first
