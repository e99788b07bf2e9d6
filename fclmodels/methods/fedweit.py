"""FedWeIT: clients share a base, and borrow the sparse weights that others added for earlier tasks (Yoon et al. 2021).

For each convolution and linear layer of the backbone, client c and task t (decomposed_weights.py)

    theta = B * sigmoid(m_t) + A_t + sum_k alpha_k K_k,
    L = CE + decay/2 (|A_t|^2 + |m_t|^2; in the first task |B|^2 too) + l1 |A_t|_1 + l_mask |m_t|_1
           + drift/2 sum_{i<t} |(B - B_start) * sigmoid(m_i)|^2.

Biases, norms, their statistics and heads are of each task and stay with the client. After a round it sends the channels
of B with |m_t| above its quantile `sparsity`, after a task the entries of A_t above l1; B is averaged by channel over
those who sent it. Before a task's training it gets the K, others' A of earlier tasks. Nothing else travels.

As in the release A_i, i < t, do not move again, so that the drift term is about B alone and needs of all earlier tasks
only sum_i sigmoid(m_i)^2. Ours: that term is taken as an implicit step, which no weight makes diverge; K is of all
others' earlier tasks among the newest `borrow` of all clients (release: the last task's, a client's own too); a channel
that nobody sends stays as it was; all clients count alike in a channel, whatever `federation.weighting`. A_t starts at
B/3, m and alpha at random as in the release; biases, norms and heads as the seed draws them. While it trains, a client
holds at most `borrow` times a model's entries of K, 8 bytes each.

A task's own theta answers for its head, so the task must be given. The server's model is B with what the seed draws,
heads that nobody trained among it: what counts are the readings personal_*. knowledge: `added`, a list of {client,
task, tensors}. memory: `present`, and `tasks` {mask, own (A above l1), borrowed (sum_k alpha_k K_k), local} of each
past task.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt
from torch import Tensor
from torch.func import functional_call

from fclmodels.data.batches import Batch
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Answer, Exchange, Form, Memory
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.method import Obstacle
from fclmodels.federation.prediction import Prediction, Predictor
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.decomposed_weights import (
    DecomposedNetwork,
    Decomposition,
    Others,
    apply_mask,
    choose_channels,
    draw_present,
    list_decomposed,
)
from fclmodels.methods.parts.sparse_weights import (
    Sparse,
    add_entries,
    average_channels,
    fill_empty,
    fits_weights,
    pick_entries,
)
from fclmodels.methods.parts.whole_answers import refuse_late_answers
from fclmodels.settings.base import Settings as BaseSettings

Weights = dict[str, Tensor]


class FedWeit(FedAvg):
    """Clients train a masked shared base and sparse weights of their own, and borrow those of others' earlier tasks."""

    name = "fedweit"
    paper = "Federated Continual Learning with Weighted Inter-client Transfer"
    has_global_model = True
    needs_own_heads: ClassVar[bool] = True

    class Settings(BaseSettings):
        sparsity: float = Field(0.3, ge=0, lt=1, description="share of a layer's channels that a client does not send")
        l1: NonNegativeFloat = Field(
            1e-3, le=1e6, description="weight of |A|; entries up to it do not travel or answer"
        )
        l_mask: NonNegativeFloat = Field(0.0, le=1e6, description="weight of |m|")
        drift: NonNegativeFloat = Field(
            100.0, le=1e9, description="weight of the base's move under earlier tasks' masks"
        )
        decay: NonNegativeFloat = Field(
            1e-4, le=1e6, description="weight of |A|^2 / 2 and |m|^2 / 2, at first of |B|^2 / 2"
        )
        borrow: NonNegativeInt = Field(
            20,
            le=10_000,
            description="earlier tasks of clients, the newest, whose weights the others get (ours: a cap)",
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        if run.make_spec(1).head != "per-task":
            raise UserError("methods.fedweit: each of its tasks has a head of its own. Use model.head: per-task.")
        if find_kind(run.splits.shape) is TEXTS or run.params.model.freeze:
            raise UserError("methods.fedweit decomposes all layers for images. Use images, and no model.freeze.")
        refuse_late_answers(run, "fedweit averages channels over those who sent them in a round")
        super().__init__(settings, run, DecomposedNetwork(run, "local"))
        self.reveal = self.declare(Exchange("reveal", lambda: {}, self.end_task, self.make_added_form))

    @property
    def obstacle_to_robust_rules(self) -> Obstacle | None:
        return Obstacle("averages channels over those who sent them", "Use mean")

    # On the server.

    def make_own_payload(self, server: Server, client: int) -> Payload:
        """Return the K: what others added in earlier tasks."""
        added = [one for one in server.knowledge.get("added", []) if one["client"] != client]
        tensors = {f"{k}.{name}": tensor for k, one in enumerate(added) for name, tensor in one["tensors"].items()}
        return {"added": Part("sparse", tensors, once=True)} if added else {}

    def aggregate(self, server: Server, replies: Replies) -> Server:
        """Return the server with the mean of each channel over its senders, of which eta_g is taken."""
        parts = [Sparse.of_tensors(part) for _, part in replies.yield_each("base")]
        share = self.find_server_lr(server.task)
        moved = {
            name: server.weights[name].lerp(
                average_channels(
                    server.weights[name], [p.places[name] for p in parts], [p.values[name] for p in parts]
                ),
                share,
            )
            for name in parts[0].places
        }
        return replace(server, weights={**server.weights, **moved})

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        new = [
            {"client": client, "task": server.task, "tensors": tensors}
            for client, tensors in cohort.ask(self.reveal).yield_each("added")
            if fits_weights(tensors, server.weights)
        ]
        added = [*server.knowledge.get("added", []), *new][-self.settings.borrow or None :]
        return replace(server, knowledge={"added": added if self.settings.borrow else []})

    # What travels.

    def make_update_form(self, task: int, round: int) -> Form:
        return {"base": self.outline(task, True)}

    def make_added_form(self, task: int, round: int) -> Form:
        return {"added": self.outline(task, False)}

    def outline(self, task: int, rows: bool) -> Part:
        """Return the outline of some rows of each weight, or of some entries."""
        network = self.networks.build(self.run.make_spec(task + 1))
        shapes = {name: network.get_parameter(name).shape[1:] if rows else () for name in list_decomposed(network)}
        values = {name: torch.empty(0, *shape, device="meta") for name, shape in shapes.items()}
        places = {name: torch.empty(0, dtype=torch.int32, device="meta") for name in shapes}
        return Part("sparse", Sparse(places, values).to_tensors(), least="each")

    def report(self, training: LocalTraining, payload: Payload, loss: float) -> Answer:
        """Return the channels of B that count most in the client's task, and its memory."""
        of = training.find_added(Decomposition)
        assert of is not None
        places = {name: choose_channels(mask, self.settings.sparsity) for name, mask in of.mask.items()}
        values = {name: of.base[name].detach()[rows.long()] for name, rows in places.items()}
        tensors = Sparse(places, values).to_tensors()
        return Answer({"base": tensors}, self.remember(training), loss, len(training.client.rows))

    # On a client.

    def prepare_training(self, client: Client, payload: Payload) -> LocalTraining:
        spec, base = self.run.make_spec(client.task + 1), payload["weights"].tensors
        others = Others(unpack_added(payload))
        present = client.memory.get("present", {"task": -1})
        if present["task"] != client.task:
            drawn = draw_present(base, len(others.parts), client.make_generator("masks"))
            present = {**drawn, "start": base, "local": {}}
        network = self.networks.load(spec, {**base, **self.network.draw_undownloaded(spec), **present["local"]})
        self.set_modes(network, client.task)
        training = LocalTraining(self, client, network, base)
        past = [one["mask"] for one in client.memory.get("tasks", {}).values()]
        stiffness = {n: torch.stack([mask[n].sigmoid().square() for mask in past]).sum(0) for n in base if past}
        training.add(of := Decomposition(base, present, others, stiffness))
        local = {name: p for name, p in training.parameters.items() if name not in base}
        training.parameters = {**of.parameters(), **local}
        return training

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        of, network, task = training.find_added(Decomposition), training.network, training.client.task
        if of is None:
            return super().compute_loss(training, batch)
        weights = {name.removeprefix("backbone."): theta for name, theta in of.compose().items()}
        features = functional_call(network.backbone, weights, (batch.inputs,))
        return self.compute_cross_entropy(network, features, batch.labels, task) + self.measure_size(of, task)

    def measure_size(self, of: Decomposition, task: int) -> Tensor:
        """Return the terms of the loss that are about sizes."""
        s, own, mask, base = self.settings, of.own.values(), of.mask.values(), of.base.values()
        squared = [*own, *mask, *(base if task == 0 else ())]
        total = s.decay / 2 * torch.stack([w.square().sum() for w in squared]).sum()
        total = total + s.l1 * torch.stack([w.abs().sum() for w in own]).sum()
        return total + s.l_mask * torch.stack([w.abs().sum() for w in mask]).sum() if s.l_mask else total

    @torch.no_grad()
    def finish_step(self, training: LocalTraining) -> None:
        """Take the implicit step of the drift term: B - B_start shrinks by 1 / (1 + lr drift sum_i sigmoid(m_i)^2)."""
        of = training.find_added(Decomposition)
        if of is None:
            return
        for name, stiff in of.stiffness.items():
            share = 1 / (1 + training.lr * self.settings.drift * stiff)
            start, B = of.start[name], of.base[name]
            B.copy_(start + (B - start) * share.view(-1, *[1] * (B.ndim - 1)))

    def remember(self, training: LocalTraining) -> Memory:
        of, client = training.find_added(Decomposition), training.client
        assert of is not None
        own = f"heads.{client.task}."
        state = training.network.state_dict()
        local = {
            n: t.clone()
            for n, t in state.items()
            if n not in of.base and (n.startswith(own) or not n.startswith("heads."))
        }
        kinds = {"mask": of.mask, "own": of.own, "alpha": of.alpha}
        present = {kind: {n: p.detach().clone() for n, p in tensors.items()} for kind, tensors in kinds.items()}
        borrowed = {name: of.borrow(name).detach() for name in of.base} if of.others.parts else {}
        sums = pick_entries(borrowed, 0.0)
        facts = {"task": client.task, "start": of.start, "local": local, "borrowed": sums.to_tensors()}
        return {**client.memory, "present": {**present, **facts}}

    def end_task(self, client: Client, payload: Payload) -> Answer:
        """Return what the client has added for the task, nothing if it took no part; it remembers the task's theta."""
        memory = dict(client.memory)
        present: dict[str, Any] = memory.pop("present", {"task": -1})
        if present["task"] != client.task:
            return Answer({"added": fill_empty(self.outline(client.task, False))}, memory)
        own = pick_entries(present["own"], self.settings.l1)
        facts = {
            "mask": present["mask"],
            "own": own.to_tensors(),
            "borrowed": present["borrowed"],
            "local": present["local"],
        }
        return Answer(
            {"added": own.to_tensors()}, {**memory, "tasks": {**memory.get("tasks", {}), str(client.task): facts}}
        )

    def make_client_predictor(self, client: Client, payload: Payload) -> Predictor:
        spec = self.run.make_spec(client.task + 1)

        def predict(inputs: Tensor) -> Prediction:
            logits = []
            for task in range(client.task + 1):
                network = self.networks.load(spec, self.compose_task(client, payload, task)).eval()
                logits.append(network.heads[task](network.backbone(inputs)))
            return Prediction(torch.cat(logits, dim=1))

        return predict

    def compose_task(self, client: Client, payload: Payload, task: int) -> Weights:
        """Return the weights that answer for a task; of one that the client has not had, B and what the seed draws."""
        spec, base = self.run.make_spec(client.task + 1), payload["weights"].tensors
        weights = {**base, **self.network.draw_undownloaded(spec)}
        facts = client.memory.get("tasks", {}).get(str(task))
        if facts is None:
            return weights
        for name, mask in facts["mask"].items():
            weights[name] = apply_mask(base[name], mask)
            for part in (facts["own"], facts["borrowed"]):
                if part:
                    weights[name] = add_entries(weights[name], part[f"places.{name}"], part[f"values.{name}"])
        return {**weights, **facts["local"]}


def unpack_added(payload: Payload) -> list[Sparse]:
    """Return the K that a client was sent."""
    by_owner: dict[int, Weights] = {}
    for name, tensor in payload["added"].tensors.items() if "added" in payload else ():
        k, _, rest = name.partition(".")
        by_owner.setdefault(int(k), {})[rest] = tensor
    return [Sparse.of_tensors(tensors) for _, tensors in sorted(by_owner.items())]
