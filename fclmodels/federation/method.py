"""The contract of a federated continual learning method: settings, and pure steps over explicit state.

A method holds settings and no state. The server's knowledge and the clients' memories are values that these
functions take and return, so that caching, resuming and running elsewhere need nothing from a method.
A task ends with `finish_task`, which the step "conclude" calls: it asks clients questions, and makes knowledge of the
answers that their replies bring.
FedAvg (methods/fedavg.py) has every step that is only declared here; other methods override what they do differently.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fclmodels.backbones.model.network import Network, NetworkCache
from fclmodels.data.batches import Batch
from fclmodels.data.splits.split_reader import Rows
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Exchange
from fclmodels.federation.messages import Payload
from fclmodels.federation.prediction import Columns, FittedHead, OwnModel, Predictor
from fclmodels.federation.protection.reply_checks import MOST_SAMPLES
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.auxiliary_networks import Auxiliary, AuxiliaryNetworks
from fclmodels.federation.training.local_training import LocalTraining, ParameterGroup
from fclmodels.settings.base import Settings as BaseSettings
from fclmodels.storage.trees import Tree

if TYPE_CHECKING:
    from fclmodels.numerics.task_relevance import Router


class Obstacle(NamedTuple):
    """A reason why a method cannot run under a setting, and what would be right."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.reason}. {self.remedy}."


class Method:
    name: ClassVar[str]
    paper: ClassVar[str]
    # Whether training brings all samples to one place, as references do that are no federated methods.
    is_centralised: ClassVar[bool] = False

    class Settings(BaseSettings):
        """A method's own block in params.yaml."""

    def __init__(self, settings: BaseSettings, run: Run) -> None:
        self.settings = settings
        self.run = run
        self.exchanges: dict[str, Exchange] = {}
        self.networks = NetworkCache(run.device, self.prepare_network)
        self.auxiliaries = AuxiliaryNetworks(self.list_auxiliary_networks(), run.seed, run.device)
        rule = run.params.federation.aggregation
        if rule != "mean" and (obstacle := self.obstacle_to_robust_rules):
            raise UserError(f"federation.aggregation: {rule} is for updates that are averaged; {self.name} {obstacle}")

    def declare(self, exchange: Exchange) -> Exchange:
        """Register an exchange, so that clients can answer it and replies are checked by its form; return it."""
        self.exchanges[exchange.name] = exchange
        return exchange

    def list_auxiliary_networks(self) -> list[Auxiliary]:
        """Return the networks that the method has beside the model."""
        return []

    # Before a run.

    def list_advice(self) -> list[str]:
        """Return lines about these settings for a person to read before a run."""
        return []

    def list_remarks(self, knowledge: Tree) -> list[str]:
        """Return lines about the server's knowledge after a task; a line stays as it is in later tasks."""
        return []

    def list_dependencies(self) -> dict[str, str]:
        """Return what results depend on besides settings, samples and code: digests of files."""
        return {}

    @property
    def obstacle_to_sums(self) -> Obstacle | None:
        """The reason why the server needs single replies, so that secure aggregation is not possible."""
        return None

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        """The reason why noise cannot cover all that clients send."""
        return None

    @property
    def obstacle_to_robust_rules(self) -> Obstacle | None:
        """Why no robust rule can take the mean's place: the server does something else with the clients' updates."""
        return None

    # On the server.

    create_server: Callable[[], Server]  # the model before the first task, and the knowledge then
    start_task: Callable[[Server, int], Server]  # before the task's first round: the head grows by its new classes
    make_payload: Callable[[Server], Payload]  # what every client of a round downloads
    aggregate: Callable[[Server, Replies], Server]  # the server after a round
    # from inputs [B, C, H, W] to a Prediction, with the network set up once
    make_predictor: Callable[[Server], Predictor]

    def make_own_payload(self, server: Server, client: int) -> Payload:
        """Return further parts that one client of a round downloads."""
        return {}

    def bound_client_weight(self, task: int) -> float:
        """Return the most that a client may count in a mean."""
        return 1.0 if self.run.params.federation.weighting == "uniform" else MOST_SAMPLES

    def find_server_lr(self, task: int) -> float:
        """Return eta_g, the share of the average update that the server applies in a task."""
        return self.run.find_server_lr(task)

    def admit_changes(self, server: Server, changes: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return P, the part of changes of weights, by name, that is let through while server.task is learned."""
        return changes

    def find_anchor_weight(self, server: Server) -> float:
        """Return lambda where the server makes (W + lambda W*) / (1 + lambda) of each round's model, else 0."""
        return 0.0

    def begin_task(self, server: Server, cohort: Cohort) -> Server:
        """Return the server before the first round, after `start_task`, with exchanges and training of its own.

        `make_payload` must not need it: to choose an executor, one round's training is measured without.
        """
        return server

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        """Return the server after the last round, with exchanges (`cohort.ask`) and training (`cohort.train`)."""
        return server

    def list_columns(self, server: Server) -> Columns:
        """Return which class and task each logit of the predictor stands for."""
        return Columns.of(server.spec, self.run.device)

    def list_all_weights(self, server: Server) -> dict[str, Tensor]:
        """Return every tensor of the network, for whoever keeps or serves it: also those that never travel."""
        return server.weights

    def serve(self, server: Server) -> Server:
        """Return the server's model as it is exported, with every tensor; its predictions are the same."""
        return replace(server, weights=self.list_all_weights(server))

    def list_earlier_models(self, server: Server) -> list[dict[str, Tensor]]:
        """Return the models of the tasks before the last, where each task has a model of its own."""
        return []

    def make_router(self, server: Server) -> "Router | None":
        """Return the router, where the method predicts tasks from features."""
        return None

    def find_head(self, server: Server) -> FittedHead | None:
        """Return the head that the server has fitted to features, which answers in place of the network's heads."""
        return None

    def make_own_model(self, server: Server) -> OwnModel | None:
        """Return the model that answers in place of backbone and heads, where the method has one."""
        return None

    @staticmethod
    def build_own_model(spec: Mapping[str, Any]) -> nn.Module:
        """Return the module of such a model from its spec: from inputs to logits [B, columns]."""
        raise NotImplementedError

    # Who takes part, with which samples. Centralised references look beyond one client's rows here, and only here.

    def list_participants(self, task: int) -> tuple[int, ...]:
        """Return the clients that may be sampled in a task."""
        return self.run.splits.list_clients(task)

    def choose_clients(
        self, server: Server, round: int, available: tuple[int, ...], count: int, random: torch.Generator
    ) -> Collection[int]:
        """Return the clients of a round of server.task: `count` of those available, uniformly, without replacement."""
        order = torch.randperm(len(available), generator=random)
        return [available[i] for i in order[:count].tolist()]

    def count_sampled_clients(self, task: int) -> int:
        """Return how many clients a round of a task samples."""
        able = len(self.list_participants(task))
        return min(able, self.run.params.federation.clients_per_round or able)

    def select_rows(self, task: int, client: int) -> Rows:
        """Return a client's train rows in a task."""
        return self.run.splits.select_rows(task, "train", client)

    def count_local_steps(self, task: int) -> int:
        """Return the local steps in a round of the client that takes most of them."""
        federation = self.run.params.federation
        most = max(len(self.select_rows(task, client)) for client in self.list_participants(task))
        return federation.local_epochs * math.ceil(most / federation.batch_size)

    def count_pooled_bytes(self, task: int) -> dict[int, int]:
        """Return the bytes of raw samples that each client hands over for a task, where training is centralised."""
        return {}

    # On a client: in any process, with its own data and memory only.

    # With what stays with the client; only where `is_personal`.
    make_client_predictor: Callable[[Client, Payload], Predictor]

    @property
    def is_personal(self) -> bool:
        """Return whether a part of the model stays with each client, so that evaluation has to take place there."""
        return False

    # Whether, where `is_personal`, the server's model answers too: clients' own then have readings apart, personal_*.
    has_global_model: ClassVar[bool] = False

    # Hooks of the local training loop (training/local_training.py), and of a network when it is built.

    select_trainable: Callable[[Network, int], dict[str, nn.Parameter]]  # what a task's local training moves
    freezes: Callable[[int], bool]  # whether what settings freeze is frozen in a task
    set_modes: Callable[[Network, int], None]  # training mode, but for what is frozen in a task
    compute_loss: Callable[[LocalTraining, Batch], Tensor]  # of a batch, to be differentiated
    step: Callable[[LocalTraining, dict[str, Tensor]], dict[str, Tensor]] | None = None

    # Whether a step reads its batch by `training.compute_features`, which knows the cache of frozen blocks.
    uses_frozen_activations: ClassVar[bool] = False

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        """Give a client's training what it needs besides the network (`training.add`)."""

    def group_parameters(self, training: LocalTraining) -> list[ParameterGroup]:
        """Return which parameters are trained by which settings; those in no group by the run's."""
        return []

    # Whether optimisers go on in a client's next round of the same task, or start anew in each round.
    keeps_optimisers: ClassVar[bool] = False

    def yield_epochs(self, training: LocalTraining) -> Iterator[Iterator[Batch]]:
        """Return the round's local epochs."""
        return training.client.yield_epochs()

    def change_gradients(self, training: LocalTraining) -> None:
        """Change gradients in place, after the backward pass."""

    def finish_step(self, training: LocalTraining) -> None:
        """Change the parameters in place, after each step."""

    def finish_training(self, training: LocalTraining) -> None:
        """Change the parameters in place, after the last step."""

    def prepare_network(self, network: nn.Module) -> None:
        """Change a network in place, once, after it is built."""
