"""GPM+FL: Gradient Projection Memory (Saha et al. 2021) in every client by itself, averaged by FedAvg (FOT, F.2).

After each task a client extends the bases in its own memory by the global model's layer inputs for its images, and its
later steps stay orthogonal to them. Nothing but FedAvg's parts travels, so that a run has no knowledge folder.
"""

from pydantic import Field, PositiveInt
from torch import Tensor, nn

from fclmodels.backbones.model.network import Network, compute_task_cross_entropy
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange
from fclmodels.federation.messages import Payload
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.local_projection import LocalProjection, ProjectionSettings
from fclmodels.methods.parts.protected_subspace import ProtectedSubspace, SubspaceSettings
from fclmodels.numerics.subspace import extend, rank_by_energy


class Gpm(FedAvg):
    """Each client protects what it saw itself: local bases, local projection, plain averaging."""

    name = "gpm"
    paper = "Gradient Projection Memory for Continual Learning"

    class Settings(ProjectionSettings, SubspaceSettings, FedAvg.Settings):
        threshold: float = Field(0.97, gt=0, le=1, description="share of a layer's input energy that its basis keeps")
        threshold_step: float = Field(0.003, ge=0, le=1, description="the threshold rises by this with each task")
        budget: float = Field(
            1.0, gt=0, le=1, description="largest share of a layer's free directions that one task may fill"
        )
        samples: PositiveInt | None = Field(125, description="images a client looks at to find a basis; null: all")
        patches: PositiveInt | None = Field(
            None, description="random columns of each layer's input that a client takes; null: all"
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.subspace = ProtectedSubspace(settings, run, self.name)
        self.projection = LocalProjection(settings, run, self.subspace)
        self.extension = self.declare(Exchange("bases", self.make_payload, self.extend_bases))
        self.projection.bend(self)

    def list_advice(self) -> list[str]:
        if not self.run.params.monitors.used_share:
            return []
        return ["monitors.used_share: gpm's bases stay with its clients, so there is nothing to show of them."]

    def create_server(self) -> Server:
        server = super().create_server()
        self.subspace.begin(self.networks.load(server.spec, server.weights))  # refuses what has no layers to protect
        return server

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        self.projection.start(training, {"bases": training.client.memory.get("bases", {}), "complements": {}})

    def select_trainable(self, network: Network, task: int) -> dict[str, nn.Parameter]:
        return self.projection.select_trainable(super().select_trainable(network, task), task)

    def compute_cross_entropy(self, network: Network, features: Tensor, labels: Tensor, task: int) -> Tensor:
        """Return it over the task's classes only, whatever `model.loss_over` says: the head's other rows are frozen."""
        return compute_task_cross_entropy(network, features, labels, task)

    def admit_changes(self, server: Server, changes: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return changes without frozen rows: of the spans, which differ by client, the server knows nothing."""
        network = self.networks.load(server.spec, server.weights)
        return self.projection.remove_frozen_rows(network, server.task, changes)

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask(self.extension, server)
        return server

    def extend_bases(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with larger bases (Algorithm 2); the answer itself is empty."""
        network = self.networks.load(self.run.make_spec(client.task + 1), payload["weights"].tensors)
        layers = self.subspace.list_layers(network)
        bases = dict(client.memory.get("bases", {}))
        for name, X in self.subspace.observe(client, network, layers).items():
            basis = bases.get(name, layers[name].module.weight.detach().new_zeros(layers[name].width, 0))
            U, sigma = X.decompose_principal(basis)
            energy = X.measure_energy()
            q = X.measure_energy(basis) / energy if energy else 0.0
            rank = rank_by_energy(sigma, q, self.subspace.find_threshold(client.task))
            bases[name] = extend(basis, U[:, : self.subspace.limit_rank(rank, basis)])
        return Answer({}, {**client.memory, "bases": bases})
