"""Re-Fed: clients replay the samples that were hardest for a surrogate between local and global (Li et al., CVPR 2024).

When a task has ended, a client trains a personal surrogate v (surrogate.py) on what it has stored and the task's rows,
and scores each sample x while it passes,

    I(x) = sum_{p=1..s} ||grad l(v; x)|| / p,

the norm of its gradient over all trained parameters at the step of pass p that learns it. The `memory` samples that
score highest stay, whatever their class or task. From then on local epochs run over stored samples and new rows
together, by plain cross entropy; the server is FedAvg's, and no further message travels.

Known from transcriptions alone, which differ. Ours: the norm is not squared, v starts at w, the surrogate's gradient is
a batch's mean, no class has a quota, and FedAvg's weights stay the numbers of new rows. With room for all samples this
is replay of everything; in the first task it is FedAvg.
"""

from collections.abc import Collection, Iterator
from functools import partial

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fclmodels.backbones.inputs.sample_gradients import sample_gradient_norms
from fclmodels.backbones.layers.norms import use_statistics_of
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange
from fclmodels.federation.messages import Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.exemplar_memory import iterate_joined_epochs
from fclmodels.methods.parts.replay_memory import pack_samples, unpack_samples
from fclmodels.methods.parts.surrogate import Surrogate, SurrogateSettings, choose_rate


class ReFed(FedAvg):
    """Clients replay those of their samples that were hardest for a model between their own and the server's."""

    name = "re-fed"
    paper = "Towards Efficient Replay in Federated Incremental Learning"

    class Settings(SurrogateSettings, FedAvg.Settings):
        memory: PositiveInt = Field(
            1000, le=1_000_000, description="samples that a client keeps, of all tasks (authors: 300 to 2000)"
        )

    settings: Settings
    trains_earlier_heads = True

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        choose_rate(run, settings)
        self.store = self.declare(Exchange("remember", self.make_payload, self.store_hardest))

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask(self.store, server)
        return server

    def store_hardest(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with the samples of highest score; the answer itself is empty."""
        arriving, old = self.run.batches.read_raw(client.rows), unpack_samples(client.memory)
        samples = arriving if old is None else Batch.concatenate([old, arriving])
        scores = self.score(Surrogate(self, client, payload, self.settings), samples)
        hardest = scores.argsort(descending=True, stable=True)[: self.settings.memory].sort().values
        return Answer({}, {**client.memory, **pack_samples(samples.take(hardest))})

    def score(self, surrogate: Surrogate, samples: Batch) -> Tensor:
        """Return I(x) [n] of raw samples, which the surrogate learns meanwhile."""
        names = self.select_scored(surrogate.parameters)
        scores = torch.zeros(len(samples.labels), device=samples.labels.device)
        for number, places, batch in surrogate.iterate(samples):
            with use_statistics_of(surrogate.network, batch.inputs):
                losses = partial(surrogate.compute_losses, batch)
                norms = sample_gradient_norms(surrogate.network, names, len(places), losses)
            scores[places.to(scores.device)] += norms / number
            surrogate.step(batch)
        return scores.cpu()

    def select_scored(self, names: Collection[str]) -> Collection[str]:
        """Return which of the trained parameters count in a sample's gradient."""
        return names

    # On a client.

    def yield_epochs(self, training: LocalTraining) -> Iterator[Iterator[Batch]]:
        return iterate_joined_epochs(training.client, unpack_samples(training.client.memory))

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        if "samples" not in training.client.memory:
            return super().compute_loss(training, batch)
        features = training.compute_features(batch)
        return self.compute_cross_entropy_by_task(training.network, features, batch.labels, batch.tasks)
