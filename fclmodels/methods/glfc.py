"""GLFC: gradient compensation, relation distillation and a proxy server that chooses the teacher (Dong et al. 2022).

A client trains on the union of its rows and exemplars. With g_i = |s(z_y) - 1| and w_i = g_i over the mean of g among
the batch's samples of earlier tasks, or of the present one (gradient_compensation.py), it descends

    L = (L_GC + L_RD) / 2     L_GC = mean of w_i BCE(z_i, one-hot)     L_RD = mean of BCE(z_i, y_i)

and L_GC alone, with w_i = 1, in the first task (eq. 4 to 7). y_i is one-hot with s(z*) in the old columns, z* the
logits of the teacher, which the proxy server chooses (proxy_server.py); the paper has a KL there, the release a binary
cross entropy. Answers are the largest logit.

The task's boundaries are given; under `signal: entropy` a client notices one where its mean entropy on the model that
it is sent is by more than 1.2 above that on the last task's final model (the release: on the last round's). A client
that does not notice sends no gradient and loses the last task's exemplars, as in the release. With three classes or
fewer no entropy is above ln 3 = 1.1, and the first task is never noticed.

knowledge: `anchor`, the teacher; `proxy` and `best` of proxy_server.py.
"""

import torch
from torch import Tensor

from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Exchange, Memory
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.proxy_server import ProxyServer, ProxySettings
from fclmodels.methods.parts.rehearsal import LastModel, Rehearsed, find_targets
from fclmodels.numerics.gradient_compensation import compensate, measure_gaps, weigh_cross_entropy


class Glfc(Rehearsed):
    """Clients let old and new classes pull alike; a proxy server picks the old model that they distil."""

    name = "glfc"
    paper = "Federated Class-Incremental Learning"

    class Settings(Rehearsed.Settings, ProxySettings):
        pass

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.proxy = ProxyServer(settings, run, self.name, self.prepare_training, self.load_final)
        self.show = Exchange("show", self.make_payload, self.proxy.show_prototypes, self.proxy.make_form)
        if settings.proxy:
            self.declare(self.show)

    def enter_task(self, server: Server, last: Server) -> Server:
        return self.proxy.choose_teacher(server, last)

    def begin_task(self, server: Server, cohort: Cohort) -> Server:
        return self.proxy.rebuild(server, cohort, self.show)

    def aggregate(self, server: Server, replies: Replies) -> Server:
        return self.proxy.hold_best(super().aggregate(server, replies), self.judge)

    def judge(self, server: Server) -> float:
        """Return the share of the proxy server's images that the model answers right."""
        network = self.networks.load(server.spec, server.weights).eval()
        images = server.knowledge["proxy"]
        return self.proxy.measure(network, self.proxy.embed_images(network, images), images)

    def note(self, client: Client, network: Network, memory: Memory) -> Memory:
        return self.proxy.note_entropy(client, network, memory)

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        teacher, (logits, labels) = training.find_added(LastModel), self.score(training, batch)
        gaps, task = measure_gaps(logits, labels), training.client.task
        weights = compensate(gaps, batch.tasks < task) if task else torch.ones_like(gaps)
        right = weigh_cross_entropy(logits, find_targets(None, logits, labels, batch.inputs), weights)
        if teacher is None:
            return right
        return (right + weigh_cross_entropy(logits, find_targets(teacher, logits, labels, batch.inputs))) / 2
