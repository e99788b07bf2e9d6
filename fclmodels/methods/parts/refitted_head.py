"""A head that the server fits after each task to the Gaussians of all classes so far (ours, not in the PIP paper).

After a task's rounds each client sends sums of its features on the final prompts, as they are at inference: no task is
given. The head is the one that separates normal classes of one covariance (numerics/fitted_heads.py), which training on
ever more samples of these Gaussians comes to. Earlier classes' means follow the prompts: each moves by the drift of the
present samples' features near it, from the last task's prompts to these with the same prompts chosen (Yu et al. 2020,
semantic drift compensation).

knowledge: `classes`, {weight [C], means [C, F], scatter [F, F], prompts, head}: of all classes on these prompts.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fclmodels.backbones.model.network import NetworkCache
from fclmodels.backbones.model.prompt_adapters import shrink_prompts
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.federation.client import Client
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.prediction import FittedHead
from fclmodels.federation.server import Server
from fclmodels.methods.parts.frozen_backbone import FrozenBackbone
from fclmodels.methods.parts.trained_network import Weights
from fclmodels.numerics.fitted_heads import fit_discriminant, sum_drift, sum_products

PROMPTS, KEYS, HEADS = "backbone.prompts.", "backbone.prompts.keys", "heads."
LEAST = 1e-300  # of a sum of weights: a mean without samples near it stays


class RefittedHead:
    """Asks for sums after a task, moves earlier classes' means, and fits the head."""

    def __init__(self, backbone: FrozenBackbone, networks: NetworkCache) -> None:
        self.backbone = backbone
        self.networks = networks
        self.run = backbone.run
        self.exchange = Exchange("refit", self.make_payload, self.answer, self.make_form)

    # On the server.

    def make_payload(self, server: Server) -> Payload:
        """Return the model, and after the first task the last one's prompts with the means of its classes on them."""
        parts = {"weights": Part("weights", server.weights)}
        if (classes := server.knowledge.get("classes")) is not None:
            spread = classes["scatter"].trace() / classes["weight"].sum()
            parts["before"] = Part("weights", classes["prompts"])
            parts["means"] = Part("prototype", {"means": classes["means"].float(), "spread": spread.float()})
        return parts

    def refit(self, server: Server, replies: Replies) -> Server:
        """Return the server with the sums of all classes so far and the head that is fitted to them."""
        labels, F = torch.tensor(server.spec.tasks[server.task]), server.weights[f"{HEADS}0.weight"].shape[1]
        counts, cross = replies.sum("counts")["weight"], replies.sum("products")["cross"].T
        new_means = cross / torch.where(counts > 0, counts, torch.inf)[:, None]
        scatter = replies.sum("products")["gram"] - new_means.T @ cross
        weight = counts.new_zeros(server.spec.label_count)
        total = cross.new_zeros(len(weight), F)
        if (old := server.knowledge.get("classes")) is not None:
            drift = replies.sum("drift")
            moved = old["means"] + drift["sum"] / drift["weight"].clamp(min=LEAST)[:, None]
            weight[: len(moved)], total[: len(moved)] = old["weight"], old["weight"][:, None] * moved
            scatter = scatter + old["scatter"]
        weight, total = weight.index_add(0, labels, counts), total.index_add(0, labels, cross)
        means = total / torch.where(weight > 0, weight, torch.inf)[:, None]
        prompts = {name: tensor for name, tensor in server.weights.items() if name.startswith(PROMPTS)}
        head = fit_discriminant(weight, means, scatter)._asdict()
        classes = {"weight": weight, "means": means, "scatter": scatter, "prompts": prompts, "head": head}
        return replace(server, knowledge={**server.knowledge, "classes": classes})

    def find_head(self, server: Server) -> FittedHead | None:
        """Return the head; None while a task is learned whose classes it does not have."""
        head = server.knowledge.get("classes", {}).get("head")
        return None if head is None or len(head["bias"]) != server.spec.label_count else FittedHead(**head)

    # On a client.

    def make_form(self, task: int, round: int) -> Form:
        """Return the outlines of a client's sums of its classes, and of the drift near earlier classes' means."""
        spec = self.run.make_spec(task + 1)
        F, C = self.networks.build(spec).backbone.features, len(spec.tasks[task])
        parts = {
            "counts": make_outline("count", {"weight": (C,)}, torch.float64),
            "products": make_outline("class-statistics", {"gram": (F, F), "cross": (F, C)}, torch.float64),
        }
        if task > 0:
            K = self.run.make_spec(task).label_count
            parts["drift"] = make_outline("class-statistics", {"weight": (K,), "sum": (K, F)}, torch.float64)
        return parts

    @torch.no_grad()
    def answer(self, client: Client, payload: Payload) -> Answer:
        """Return the sums of a client's classes, and of the drift near the means of earlier ones."""
        spec, weights = self.run.make_spec(client.task + 1), payload["weights"].tensors
        order = torch.randperm(len(client.rows), generator=client.make_generator("refit")).numpy()
        local = {label: place for place, label in enumerate(spec.tasks[client.task])}
        labels = torch.tensor([local[label] for label in client.rows.labels[order].tolist()])
        features = self.compute_features(client, order, spec, weights)
        counts = labels.bincount(minlength=len(local)).double()
        parts = {"counts": {"weight": counts}, "products": sum_products(features, labels, len(local))}
        if "before" in payload:
            earlier, before = self.run.make_spec(client.task), payload["before"].tensors
            after = {**shrink_prompts(weights, self.backbone.adapter, client.task), KEYS: before[KEYS]}
            heads = {name: w[: earlier.label_count] for name, w in weights.items() if name.startswith(HEADS)}
            origin, end = (
                self.compute_features(client, order, earlier, {**prompts, **heads}) for prompts in (before, after)
            )
            earlier_classes = {name: tensor.double().cpu() for name, tensor in payload["means"].tensors.items()}
            parts["drift"] = sum_drift(earlier_classes["means"], earlier_classes["spread"], origin, end)
        return Answer(parts, client.memory)

    def compute_features(self, client: Client, order: np.ndarray, spec: ModelSpec, weights: Weights) -> Tensor:
        """Return the features [n, F] of a client's samples in this order, of which the network is told no task."""
        network = self.networks.load(spec, weights).eval()
        batches = self.run.batches.iterate_ordered(client.rows.take(order), self.run.params.federation.batch_size)
        return torch.cat([self.backbone.compute_features(network, batch, None).features.cpu() for batch in batches])
