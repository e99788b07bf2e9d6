"""GPM+FL: Gradient Projection Memory (Saha et al. 2021) in every client by itself, averaged by FedAvg (FOT, F.2).

After each task a client extends the bases in its own memory by what the global model's layers see of its images, and
keeps its later steps clear of them. Nothing but FedAvg's parts travels, so that a run has no knowledge folder.
"""

from dataclasses import replace

from pydantic import Field, PositiveInt

from fclmodels.federation.client import Client
from fclmodels.federation.cohort import Cohort
from fclmodels.federation.messages import Payload, Reply
from fclmodels.federation.server import Server
from fclmodels.methods.base import Memory
from fclmodels.methods.projected import Projected
from fclmodels.methods.subspaces import Bases
from fclmodels.numerics.subspace import extend, total_energy


class Gpm(Projected):
    """Each client protects what it saw itself: local bases, local projection, plain averaging."""

    name = "gpm"
    paper = "Gradient Projection Memory for Continual Learning"

    class Settings(Projected.Settings):
        threshold: float = Field(0.97, gt=0, le=1, description="share of a layer's input energy that its basis keeps")
        threshold_step: float = Field(0.003, ge=0, le=1, description="the threshold rises by this with each task")
        samples: PositiveInt | None = Field(125, description="images a client looks at to find a basis; null: all")
        patches: PositiveInt | None = Field(
            None, description="random columns of each layer's input that a client takes; null: all"
        )

    settings: Settings

    def advice(self) -> list[str]:
        if not self.run.params.monitors.used_share:
            return []
        return ["monitors.used_share: gpm's bases stay with its clients, so there is nothing to show of them."]

    def setup(self) -> Server:
        """The server knows no bases."""
        return replace(super().setup(), knowledge={"bases": {}, "ranks": {}})

    def spans(self, client: Client, payload: Payload) -> dict[str, Bases]:
        return {"bases": client.memory.get("bases", {}), "complements": {}}

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask("bases", self.payload(server))
        return server

    def answer(self, client: Client, question: str, payload: Payload) -> tuple[Reply, Memory]:
        """Algorithm 2's update of the memory; the answer itself is empty."""
        network = self.networks.load(self.run.spec(client.task + 1), payload["weights"].tensors)
        layers = self.layers(network)
        bases = dict(client.memory.get("bases", {}))
        for name, seen in self.observe(client, network, layers).items():
            basis = bases.get(name, layers[name].module.weight.detach().new_zeros(layers[name].width, 0))
            U, sigma = seen.principal(basis)
            energy = seen.energy()
            q = seen.energy(basis) / energy if energy else 0.0
            bases[name] = extend(basis, U[:, : total_energy(sigma, q, self.threshold(client.task))])
        return Reply({}), {**client.memory, "bases": bases}
