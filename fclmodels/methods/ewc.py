"""EWC+FL: elastic weight consolidation in every client by itself, averaged by FedAvg (FOT, F.2).

After a task a client computes the diagonal F of the Fisher matrix of its samples at the global model W*, and from then
on a spring as stiff as F pulls each weight to W*. Its local objective gains (Kirkpatrick et al. 2017, eq. 3)

    lambda / 2 * sum_t sum_j F_tj (w_j - W*_tj)^2

with the factor 1/2, and F the mean over samples. FOT's coefficients are 40 (PMNIST), 20 (CIFAR-100), 1 (5-Datasets)
and 0.01 (mini-ImageNet); it does not say whether its penalty has the 1/2. The springs of all tasks add up to one, of
stiffness sum_t F_t about the mean of W*_t weighted by F_t, so a client remembers only that: `fisher` and `centre`, two
numbers a weight for any number of tasks. `online` lets the older ones fade and has the latest W* as centre (Schwarz et
al. 2018, section 4): F <- gamma F + F_t, without their normalisation. Neither leaves the client.
"""

from functools import partial
from typing import Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator
from torch import Tensor

from fclmodels.backbones.inputs.sample_gradients import sum_squared_gradients
from fclmodels.backbones.layers.norms import use_statistics_of
from fclmodels.backbones.model.network import Network
from fclmodels.backbones.model.spec import to_local_labels
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange
from fclmodels.federation.messages import Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.springs import add_spring_forces, extend_rows

BATCH = 64  # samples whose activations are in memory at a time
Tensors = dict[str, Tensor]


class Ewc(FedAvg):
    """Each client keeps the weights that are important for its own earlier samples near their earlier values."""

    name = "ewc"
    paper = "Overcoming catastrophic forgetting in neural networks"

    class Settings(FedAvg.Settings):
        lam: NonNegativeFloat = Field(
            1.0,
            le=1e9,
            alias="lambda",
            description="weight of the penalty lambda/2 F (w - W*)^2; where lr lambda F exceeds 2, steps diverge",
        )
        penalty: Literal["separate", "online"] = Field(
            "separate", description="each task's Fisher about its own W*, or a fading sum of them about the latest W*"
        )
        gamma: float = Field(
            0.95, ge=0, le=1, description="share of the running Fisher that a further task leaves (online only)"
        )
        labels: Literal["model", "data"] = Field(
            "model", description="labels of the Fisher: those that the model expects, or the data's (the empirical one)"
        )
        samples: PositiveInt | None = Field(
            None, description="samples of a task that a client takes its Fisher of; null: all"
        )

        @model_validator(mode="after")
        def _only_a_running_fisher_fades(self) -> "Ewc.Settings":
            if self.penalty == "separate" and self.gamma != type(self).model_fields["gamma"].default:
                raise ValueError("gamma needs penalty: online.")
            return self

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.take_fisher = self.declare(Exchange("remember", self.make_payload, self.add_springs))

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask(self.take_fisher, server)
        return server

    def add_springs(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with the springs of the task that has ended; the answer itself is empty."""
        weights = self.join_own_weights(client, payload)
        network = self.networks.load(self.run.make_spec(client.task + 1), weights)
        fisher = self.measure_fisher(client, network.eval())
        centre = {name: weights[name] for name in fisher}
        if "fisher" in client.memory:
            before = client.memory["fisher"], client.memory["centre"]
            if self.settings.penalty == "separate":
                fisher, centre = add_penalties(before, (fisher, centre))
            else:
                fisher = fade_fisher(before[0], fisher, self.settings.gamma)
        return Answer({}, {**client.memory, "fisher": fisher, "centre": centre})

    def measure_fisher(self, client: Client, network: Network) -> Tensors:
        """Return F of the client's samples, mean over them, for the parameters that later tasks move."""
        names = self.select_trainable(network, client.task + 1).keys()
        random = client.make_generator("fisher")
        rows = client.rows.draw_some(self.settings.samples, random)
        total = {name: torch.zeros_like(network.get_parameter(name)) for name in names}
        for batch in self.run.batches.iterate_ordered(rows, BATCH):
            scores = partial(self.draw_scores, network, client.task, batch, random)
            with use_statistics_of(network, batch.inputs):
                squares = sum_squared_gradients(network, names, len(batch.labels), scores)
            for name, square in squares.items():
                total[name].add_(square, alpha=1 / len(rows))
        return total

    def draw_scores(self, network: Network, task: int, batch: Batch, random: torch.Generator) -> Tensor:
        """Return scores [B] whose squared gradients are a sample's Fisher matrix.

        The score is log p of the true label, or sum_c +-sqrt(p_c) log p_c with random signs, whose squared gradient has
        the mean E_{y ~ p} (grad log p_y)^2.
        """
        over_seen = self.loss_is_over_seen(network.spec)
        log_p = network(batch.inputs, None if over_seen else task).log_softmax(1)
        if self.settings.labels == "data":
            columns = batch.labels if over_seen else to_local_labels(network.spec, task, batch.labels)
            return log_p.gather(1, columns[:, None])[:, 0]
        signs = torch.randint(2, log_p.shape, generator=random).to(log_p) * 2 - 1
        return (signs * (log_p.detach() / 2).exp() * log_p).sum(1)

    def change_gradients(self, training: LocalTraining) -> None:
        """Add lambda F (w - centre), for the rows of a head that were there when F was taken."""
        add_spring_forces(training, "fisher", "centre", self.settings.lam)


def add_penalties(before: tuple[Tensors, Tensors], after: tuple[Tensors, Tensors]) -> tuple[Tensors, Tensors]:
    """Return (F, centre) of two penalties F/2 (w - centre)^2 as one, which differs from their sum by a constant."""
    fishers, centres = {}, {}
    for name, fisher in after[0].items():
        old, old_centre = (extend_rows(part[name], len(fisher)) for part in before)
        fishers[name] = old + fisher
        # Where neither penalty has any stiffness, 0/0, any centre will do.
        share = (fisher / fishers[name]).nan_to_num(1.0)
        centres[name] = old_centre + share * (after[1][name] - old_centre)
    return fishers, centres


def fade_fisher(before: Tensors, after: Tensors, gamma: float) -> Tensors:
    """Return gamma F + F_t."""
    return {name: fisher + gamma * extend_rows(before[name], len(fisher)) for name, fisher in after.items()}
