"""What a federated continual learning method is: settings, and pure steps over explicit state.

A method holds settings and no state. The server's knowledge and the clients' memories are values that these
functions take and return, so that caching, resuming and running elsewhere need nothing from a method.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from fclmodels.backbones.network import Network
from fclmodels.data.batches import Batch
from fclmodels.data.splits import Rows
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.cohort import Cohort
from fclmodels.federation.local import LocalTraining
from fclmodels.federation.messages import Part, Payload, Reply
from fclmodels.federation.networks import Networks
from fclmodels.federation.prediction import Columns, Prediction
from fclmodels.federation.replies import Replies
from fclmodels.federation.run import Run
from fclmodels.federation.server import Server
from fclmodels.federation.soundness import MOST_SAMPLES
from fclmodels.settings import Settings as BaseSettings
from fclmodels.state import Tree

if TYPE_CHECKING:
    from fclmodels.numerics.relevance import Router

Memory = dict[str, Tree]
Predictor = Callable[[Tensor], Prediction]


class Method:
    name: ClassVar[str]
    paper: ClassVar[str]

    class Settings(BaseSettings):
        """A method's own block in params.yaml."""

    def __init__(self, settings: BaseSettings, run: Run) -> None:
        self.settings = settings
        rule = run.params.federation.aggregation
        if rule != "mean" and (instead := self.instead_of_a_mean):
            raise UserError(f"federation.aggregation: {rule} is for updates that are averaged; {self.name} {instead}.")
        self.run = run
        self.networks = Networks(run.device, self.prepare)

    def advice(self) -> list[str]:
        """What a person should know of these settings before a run."""
        return []

    def remarks(self, knowledge: Tree) -> list[str]:
        """What a person should know of what the server knows after a task; a line stays as it is in later tasks."""
        return []

    @property
    def needs_each(self) -> str | None:
        """Why the server needs single replies, with what would be right in its place; None: sums are enough."""
        return None

    @property
    def without_bound(self) -> str | None:
        """What noise cannot cover of all that clients send, with what would be right; None: it covers everything."""
        return None

    # On the server.

    def updated(self, task: int) -> dict[str, Tensor]:
        """The outline of a client's update."""
        return {n: p.to("meta") for n, p in self.trainable(self.networks.of(self.run.spec(task + 1)), task).items()}

    def sends(self, task: int, round: int) -> dict[str, dict[str, Part]]:
        """Outlines of the parts of a client's answers, by question; of other questions no form is known."""
        return {}

    def largest_weight(self, task: int) -> float:
        """The most that a client may count in a mean."""
        return 1.0 if self.run.params.federation.weighting == "uniform" else MOST_SAMPLES

    @property
    def instead_of_a_mean(self) -> str | None:
        """What the server makes of the clients' updates, where that is no mean: no robust rule can take its place."""
        return None

    def setup(self) -> Server:
        """The model before the first task, and what the server knows then."""
        raise NotImplementedError

    def start_task(self, server: Server, task: int) -> Server:
        """Before the task's first round: the head grows by the task's new classes."""
        raise NotImplementedError

    def payload(self, server: Server) -> Payload:
        """What every client of a round downloads."""
        raise NotImplementedError

    def aggregate(self, server: Server, replies: Replies) -> Server:
        """The server after a round."""
        raise NotImplementedError

    def server_lr(self, task: int) -> float:
        """eta_g, the share of the average update that the server applies in a task."""
        return self.run.server_lr(task)

    def admissible(self, server: Server, changes: dict[str, Tensor]) -> dict[str, Tensor]:
        """P: what the method lets through of changes of weights, by name, while it learns server.task."""
        return changes

    def anchor_weight(self, server: Server) -> float:
        """lambda, where the server makes (W + lambda W*) / (1 + lambda) of the model of each round; 0: it does not."""
        return 0.0

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        """After the task's last round, with as many exchanges (`cohort.ask`) as the method needs."""
        return server

    def columns(self, server: Server) -> Columns:
        """Which class and task each logit of the predictor stands for."""
        return Columns.of(server.spec, self.run.device)

    def predictor(self, server: Server) -> Predictor:
        """A function from inputs [B, C, H, W] to a Prediction, with the network set up once."""
        raise NotImplementedError

    def model(self, server: Server) -> dict[str, Tensor]:
        """Every tensor of the network, for whoever keeps or serves it: what never travels too."""
        return server.weights

    def earlier_models(self, server: Server) -> list[dict[str, Tensor]]:
        """Where each task has a model of its own: those of the tasks before the last."""
        return []

    def router(self, server: Server) -> "Router | None":
        """What a served model needs to predict tasks from features by itself, where the method does so."""
        return None

    # Who takes part, with which samples. Centralised references look beyond one client's rows here, and only here.

    def participants(self, task: int) -> tuple[int, ...]:
        """The clients that may be sampled in a task."""
        return self.run.splits.clients_with(task)

    def sampled(self, task: int) -> int:
        """How many clients a round of a task samples."""
        able = len(self.participants(task))
        return min(able, self.run.params.federation.clients_per_round or able)

    def rows(self, task: int, client: int) -> Rows:
        """A client's train rows in a task."""
        return self.run.splits.rows(task, "train", client)

    def local_steps(self, task: int) -> int:
        """Those of the client that takes most of them in a round."""
        federation = self.run.params.federation
        most = max(len(self.rows(task, client)) for client in self.participants(task))
        return federation.local_epochs * math.ceil(most / federation.batch_size)

    # Where training is centralised: bytes of raw samples that each client hands over for a task. No message travels.
    pooled_bytes: Callable[[int], dict[int, int]] | None = None

    # On a client: in any process, with its own data and memory only.

    def train(self, client: Client, payload: Payload) -> tuple[Reply, Memory]:
        """One round of local training."""
        raise NotImplementedError

    def answer(self, client: Client, question: str, payload: Payload) -> tuple[Reply, Memory]:
        """The answer to a question that finish_task asks."""
        raise NotImplementedError

    @property
    def personal(self) -> bool:
        """Whether something of the model stays with each client, so that evaluation has to take place there."""
        return False

    def client_predictor(self, client: Client, payload: Payload) -> Predictor:
        """The predictor with what stays personal; only asked for where `personal`."""
        raise NotImplementedError

    # Hooks of the local training loop (federation/local.py), and of a network when it is built.

    step: Callable[[LocalTraining, dict[str, Tensor]], dict[str, Tensor]] | None = None

    def trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        """The parameters that local training moves, by name."""
        raise NotImplementedError

    def loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        """The loss of a batch, to be differentiated."""
        raise NotImplementedError

    def gradient(self, training: LocalTraining) -> None:
        """After the backward pass; may change gradients in place."""

    def after(self, training: LocalTraining) -> None:
        """After each step; may change the parameters in place."""

    def prepare(self, network: nn.Module) -> None:
        """Once after a network is built."""
