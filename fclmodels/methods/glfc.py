"""GLFC: gradient compensation, relation distillation and a proxy server that chooses the teacher (Dong et al. 2022).

A client trains on the union of its rows and exemplars. With g_i = |s(z_y) - 1| and w_i = g_i over the mean of g among
the batch's samples of earlier tasks, or of the present one (gradient_compensation.py), it descends

    L = (L_GC + L_RD) / 2     L_GC = mean of w_i BCE(z_i, one-hot)     L_RD = mean of BCE(z_i, y_i)

and L_GC alone, with w_i = 1, in the first task (eq. 4 to 7). y_i is one-hot with s(z*) in the old columns, z* the
logits of the teacher, which the proxy server chooses (proxy_server.py); the paper has a KL there, the release a binary
cross entropy. Answers are the largest logit.

The task's boundaries are given; under `signal: entropy` a client notices one where its mean entropy on the model that
it is sent rises by more than 1.2. A client that does not notice sends no gradient and loses the last task's exemplars,
as in the release. With three classes or fewer no entropy is above ln 3 = 1.1, and the first task is never noticed.

knowledge: `anchor`, the teacher; `proxy` and `best` of proxy_server.py. memory: `samples`; `entropy` under `signal`.
"""

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Answer, Exchange, Memory
from fclmodels.federation.messages import Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.coreset_memory import EMBED
from fclmodels.methods.parts.proxy_server import ProxyServer, ProxySettings
from fclmodels.methods.parts.rehearsal import LastModel, Rehearsed, join_heads
from fclmodels.methods.parts.replay_memory import pack_samples, unpack_samples
from fclmodels.numerics.exemplar_losses import distil_targets
from fclmodels.numerics.gradient_compensation import compensate, measure_gaps, weigh_cross_entropy


class Entropy:
    """The entropy of a client's answers before a round, in one training."""

    def __init__(self, value: float) -> None:
        self.value = value


class Glfc(Rehearsed):
    """Clients let old and new classes pull alike; a proxy server picks the old model that they distil."""

    name = "glfc"
    paper = "Federated Class-Incremental Learning"

    class Settings(Rehearsed.Settings, ProxySettings):
        signal: Literal["boundary", "entropy"] = Field(
            "boundary", description="how a client notices a new task: it is told (ours), or by the rise of its entropy"
        )
        rise: PositiveFloat = Field(1.2, le=100, description="of the mean entropy that is a new task, in nats")

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.proxy = ProxyServer(settings, run, self.name)
        if settings.proxy:
            self.show = self.declare(Exchange("show", self.payload, self.show_prototypes, self.proxy.form))

    # On the server.

    def start_task(self, server: Server, task: int) -> Server:
        """Return the server whose teacher is the last task's best model, or its last one where none was measured."""
        best = server.knowledge.get("best", {}).get("weights", server.weights)
        started = super().start_task(replace(server, knowledge={}), task)
        knowledge = {**started.knowledge, **({"anchor": best} if task else {})}
        return replace(started, knowledge=knowledge | self.keep_over_tasks(server))

    def keep_over_tasks(self, server: Server) -> Memory:
        """Return what the proxy server goes on to need in a further task."""
        return {}

    def begin_task(self, server: Server, cohort: Cohort) -> Server:
        if not self.settings.proxy:
            return server
        return self.proxy.rebuild(server, cohort, cohort.ask(self.show, server))

    def aggregate(self, server: Server, replies: Replies) -> Server:
        moved = super().aggregate(server, replies)
        return self.proxy.hold_best(moved, self.judge(moved)) if "proxy" in moved.knowledge else moved

    def judge(self, server: Server) -> float:
        """Return the share of the proxy server's images that the model answers right."""
        network = self.networks.load(server.spec, server.weights).eval()
        images = server.knowledge["proxy"]
        return self.proxy.measure(network, self.proxy.embed_images(network, images), images)

    # On a client.

    def show_prototypes(self, client: Client, payload: Payload) -> Answer:
        """Return the gradients of the client's prototypes, and its memory after it has noticed the task or not."""
        if not self.notices_task(client, payload):
            network = self.networks.of(self.run.spec(client.task + 1))
            return Answer({"prototypes": self.proxy.make_gradients(network, None)}, forget_task(client))
        training = self.prepare_training(replace(client, round=0), payload)
        training.run()
        samples = self.run.batches.prepare_inputs(self.run.batches.read_raw(client.rows))
        return Answer({"prototypes": self.proxy.make_gradients(training.network, samples)}, client.memory)

    def notices_task(self, client: Client, payload: Payload) -> bool:
        """Return whether a client notices that a task has begun."""
        if self.settings.signal == "boundary":
            return True
        entropy = self.measure_entropy(client, self.load_final(client, payload))
        return entropy - client.memory.get("entropy", 0.0) > self.settings.rise

    @torch.no_grad()
    def measure_entropy(self, client: Client, network: Network) -> float:
        """Return the mean entropy of softmax over a client's rows of the task, in nats."""
        total = 0.0
        for batch in self.run.batches.iterate_ordered(client.rows, EMBED):
            log_p = join_heads(network, network.backbone(batch.inputs)).float().log_softmax(1)
            total -= float((log_p.exp() * log_p).sum())
        return total / len(client.rows)

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        super().start_training(training, payload)
        if self.settings.signal == "entropy":
            training.network.eval()
            training.add(Entropy(self.measure_entropy(training.client, training.network)))
            self.set_modes(training.network, training.client.task)

    def remember(self, training: LocalTraining) -> Memory:
        memory, entropy = super().remember(training), training.part(Entropy)
        return memory if entropy is None else {**memory, "entropy": entropy.value}

    def loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        teacher, (logits, labels) = training.part(LastModel), self.score(training, batch)
        columns = logits.shape[1]
        weights = self.weigh(measure_gaps(logits, labels), batch.tasks, training.client.task)
        right = weigh_cross_entropy(logits, distil_targets(labels, columns, labels[:0], None), weights)
        if teacher is None:
            return right
        answers = teacher.answer(batch.inputs)[1][:, teacher.old]
        return self.join(right, logits, distil_targets(labels, columns, teacher.old, answers), weights)

    def weigh(self, gaps: Tensor, tasks: Tensor, task: int) -> Tensor:
        """Return w [B] of samples of these tasks; in the first task 1, for nothing is to be compensated."""
        return compensate(gaps, tasks < task) if task else torch.ones_like(gaps)

    def join(self, right: Tensor, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the loss from L_GC and the targets of L_RD."""
        return (right + weigh_cross_entropy(logits, targets)) / 2


def forget_task(client: Client) -> Memory:
    """Return a client's memory without exemplars of the task before its present one."""
    samples = unpack_samples(client.memory)
    if samples is None:
        return client.memory
    stay = (samples.tasks != client.task - 1).nonzero().flatten()
    return {**client.memory, **pack_samples(samples.take(stay))}
