"""Replay of the samples whose own gradients are the longest at a task's end.

knowledge: `lengths`, the sum of these lengths over all clients.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fclmodels.backbones.inputs.sample_gradients import sample_gradient_norms
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Payload, make_outline
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.replay_memory import descend_both, pack_samples, select_samples, start_replay
from fclmodels.settings.base import Settings as BaseSettings

MOST = 6


class LargestGradients(FedAvg):
    """FedAvg whose clients replay the samples with the longest gradients."""

    name = "largest-gradients"
    paper = "none"
    trains_earlier_heads = True

    def __init__(self, settings: BaseSettings, run: Run) -> None:
        super().__init__(settings, run)
        self.measure = self.declare(Exchange("measure", self.make_payload, self.store_largest, self.make_lengths_form))

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        return replace(server, knowledge=dict(cohort.ask(self.measure, server).sum("lengths")))

    def make_lengths_form(self, task: int, round: int) -> Form:
        return {"lengths": make_outline("statistics", {"lengths": ()})}

    def store_largest(self, client: Client, payload: Payload) -> Answer:
        network = self.networks.load(self.run.make_spec(client.task + 1), payload["weights"].tensors).eval()
        samples = select_samples(client, torch.arange(self.count_stored(client) + len(client.rows)))
        batch = self.run.batches.augment_raw(samples, self.run.batches.make_device_generator(torch.Generator()))
        names = [name for name, _ in network.named_parameters()]

        def compute_losses() -> Tensor:
            logits = network.compute_logits(network.backbone(batch.inputs))
            return cross_entropy(logits, batch.labels, reduction="none")

        norms = sample_gradient_norms(network, names, len(batch.labels), compute_losses)
        memory = {**client.memory, **pack_samples(samples.take(norms.topk(min(MOST, len(norms))).indices.cpu()))}
        return Answer({"lengths": {"lengths": norms.sum().cpu()}}, memory)

    def count_stored(self, client: Client) -> int:
        return len(client.memory["samples"]["labels"]) if "samples" in client.memory else 0

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        start_replay(training)

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        return descend_both(self, training, batch, self.compute_cross_entropy)
