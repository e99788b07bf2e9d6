"""RegMean: clients' weights are merged by least squares on their own layers' inputs (Jin et al., ICLR 2023).

FedAvg, but for the weights W of linear and convolutional layers (patches are a convolution's inputs). With
G_k = sum x x^T over a client's inputs on its own model after training, off-diagonal numbers times a share a,

    W = W' + (sum_k (W_k - W') G_k) (sum_k G_k)^+,

W' being the round's global weights, so that what no input reaches stays (ours). This is the W whose outputs are nearest
to the clients' own. Biases, norms and running statistics are averaged. Nothing in it is made against forgetting.
It was made to merge finished models once; here it takes the place of the mean in each round, as in the comparison of
LoRM's paper, with its share of 0.5. A layer sends d^2 numbers more than its update, d where it is wider than `widest`.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fclmodels.backbones.inputs.layer_capture import Layer, find_layers
from fclmodels.backbones.layers.norms import SharedPolicy
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Form
from fclmodels.federation.messages import Payload, make_outline
from fclmodels.federation.method import Obstacle
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.input_grams import sum_inputs
from fclmodels.methods.parts.whole_answers import refuse_server_lr
from fclmodels.numerics.regression_mean import damp, multiply, solve

BATCH = 64  # samples whose patches are in memory at a time


class RegMean(FedAvg):
    """FedAvg whose server merges layers' weights by least squares on the clients' inputs."""

    name = "regmean"
    paper = "Dataless Knowledge Fusion by Merging Weights of Language Models"

    class Settings(FedAvg.Settings):
        batch_norm: SharedPolicy = Field(
            "average", description="running statistics: average over clients; batch: none; frozen after task 1"
        )
        share: float = Field(0.5, ge=0, le=1, description="a, factor on off-diagonal numbers of G; 0: d numbers travel")
        widest: PositiveInt = Field(1024, le=8192, description="layers with wider inputs send the diagonal of G alone")

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        refuse_server_lr(run, "regmean solves for what clients learned, whole")

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        return Obstacle("divides by sums of inputs, which noise would distort", "Use fedavg")

    @property
    def obstacle_to_robust_rules(self) -> Obstacle | None:
        return Obstacle("adds up products with inputs", "Use mean")

    def find_merged(self, task: int) -> dict[str, Layer]:
        """Return the layers whose weights a task trains, by name."""
        network = self.networks.build(self.run.make_spec(task + 1))
        trained = self.select_trainable(network, task)
        layers = find_layers(network, self.run.splits.shape)
        return {name: layer for name, layer in layers.items() if layer.weight in trained}

    def is_diagonal(self, layer: Layer) -> bool:
        return self.settings.share == 0 or layer.width > self.settings.widest

    def make_update_form(self, task: int, round: int) -> Form:
        form, layers = super().make_update_form(task, round), self.find_merged(task)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, layer in layers.items():
            shapes[f"times.{name}"] = layer.outputs, layer.width
            shapes[f"gram.{name}"] = (layer.width,) if self.is_diagonal(layer) else (layer.width, layer.width)
        merged = {layer.weight for layer in layers.values()}
        averaged = {name: tensor for name, tensor in form["update"].tensors.items() if name not in merged}
        solved = make_outline("input-statistics", shapes, torch.float64)
        return {**form, "update": replace(form["update"], tensors=averaged), "solved": solved}

    def make_further_parts(self, training: LocalTraining, payload: Payload) -> Mapping[str, Mapping[str, Tensor]]:
        """Return products of what a client changed and its sums over inputs."""
        network, client, layers = training.network, training.client, self.find_merged(training.client.task)
        trained = {name: network.get_parameter(layer.weight).detach() for name, layer in layers.items()}
        grams = sum_inputs(
            network,
            self.run.batches.iterate_ordered(client.rows, BATCH),
            {name: layer.width for name, layer in layers.items()},
            diagonal=[name for name, layer in layers.items() if self.is_diagonal(layer)],
            convolutions={name: layer for name, layer in layers.items() if layer.taps is not None},
        )
        solved: dict[str, Tensor] = {}
        for name, layer in layers.items():
            gram = damp(grams[name], self.settings.share)
            change = layer.to_matrix(trained[name] - training.start[layer.weight]).cpu()
            solved |= {f"times.{name}": multiply(change, gram), f"gram.{name}": gram}
        return {"solved": solved}

    def aggregate(self, server: Server, replies: Replies) -> Server:
        server, sums = super().aggregate(server, replies), replies.sum("solved")
        weights = dict(server.weights)
        for name, layer in self.find_merged(server.task).items():
            W = weights[layer.weight].clone()
            live = layer.select_live(W)
            live += solve(sums[f"times.{name}"], sums[f"gram.{name}"]).view_as(live).to(W)
            weights[layer.weight] = W
        return replace(server, weights=weights)
