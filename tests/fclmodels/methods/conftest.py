"""Short ways for tests of methods that learn something at the end of each task, or bend local training."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fclmodels.backbones.model.network import Network
from fclmodels.data.batches import Batch
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.messages import Payload, Reply
from fclmodels.federation.method import Method
from fclmodels.federation.protection.secure_aggregation import decode_sum, encode_reply
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.surrogate import Surrogate, SurrogateBatch, SurrogateSettings
from fclmodels.settings.federation import SecAggSettings


class Scalar(Surrogate):
    """A model v x of loss (v x - y)^2 / 2, which sees all samples at once."""

    def __init__(self) -> None:
        self.network = nn.Linear(1, 1, bias=False)  # type: ignore[assignment]
        nn.init.constant_(self.network.weight, 0.2)  # type: ignore[arg-type]
        self.parameters = {"weight": self.network.weight}  # type: ignore[dict-item]
        self.origin = {"weight": torch.full((1, 1), 0.2)}
        self.settings, self.lr = SurrogateSettings(**{"lambda": 0.25, "passes": 2}), 0.1

    def iterate(self, samples: Batch) -> Iterator[SurrogateBatch]:
        for number in (1, 2):
            yield SurrogateBatch(number, torch.arange(len(samples.labels)), samples)

    def compute_losses(self, batch: Batch) -> Tensor:
        return (self.network(batch.inputs)[:, 0] - batch.labels).square() / 2


@pytest.fixture
def scalar_surrogate() -> tuple[Surrogate, Batch]:
    """Such a model from v = 0.2, lambda 0.25, rate 0.1, two passes; and three samples."""
    labels, tasks = torch.tensor([1, 1, -1]), torch.zeros(3, dtype=torch.int64)
    return Scalar(), Batch(torch.tensor([[1.0], [2.0], [1.0]]), labels, tasks)


@pytest.fixture
def after_each_task(federate: Callable[..., Server]) -> Callable[[Any], list[Server]]:
    """The servers that a method ends its tasks with, of one federation over all of them."""

    def servers_of(method: Any) -> list[Server]:
        servers, finish_task = [], method.finish_task

        def finish(server: Server, cohort: Cohort) -> Server:
            servers.append(finish_task(server, cohort))
            return servers[-1]

        method.finish_task = finish
        federate(method)
        method.finish_task = finish_task
        return servers

    return servers_of


@pytest.fixture
def training_on() -> Callable[..., LocalTraining]:
    """A client's training on a network that a test has changed after it was loaded."""

    def make(
        method: Method, client: Client, payload: Payload, network: Network, start: dict[str, Tensor]
    ) -> LocalTraining:
        training = LocalTraining(method, client, network, start)
        method.start_training(training, payload)
        return training

    return make


@pytest.fixture
def mask() -> Callable[[list[Reply]], Reply]:
    """One reply with the sum of several as secure aggregation reads it: of numbers in fixed point."""

    def add_up(replies: list[Reply]) -> Reply:
        settings, n = SecAggSettings(), len(replies)
        total, *others = (encode_reply(reply, settings, n) for reply in replies)
        for of_client in others:
            total = {part: {k: X + of_client[part][k] for k, X in codes.items()} for part, codes in total.items()}
        sums = decode_sum(total, settings, n)
        parts = {name: replace(part, tensors=sums[name]) for name, part in replies[0].parts.items()}
        return replace(replies[0], parts=parts)

    return add_up


@pytest.fixture(scope="session")
def mlp() -> SimpleNamespace:
    """The multi-layer perceptron without dropout in NumPy: features, and the logits of all heads side by side."""

    def features(weights: dict[str, Tensor], x: Tensor) -> np.ndarray:
        h = x.double().flatten(1).numpy()
        for layer in ("fc1", "fc2", "fc3"):
            w, b = (weights[f"backbone.{layer}.{part}"].double().numpy() for part in ("weight", "bias"))
            h = np.maximum(h @ w.T + b, 0)
        return h

    def logits(weights: dict[str, Tensor], x: Tensor) -> np.ndarray:
        h, heads = features(weights, x), sorted({n.split(".")[1] for n in weights if n.startswith("heads.")})
        of_heads = [[weights[f"heads.{head}.{part}"].double().numpy() for part in ("weight", "bias")] for head in heads]
        return np.concatenate([h @ w.T + b for w, b in of_heads], axis=1)

    return SimpleNamespace(compute_features=features, compute_logits=logits)
