"""Training on the server, before a task's first round and after its last: the model becomes surer on noise.

A step draws from torch's global generator, and passes dropout and running statistics where the backbone has them.
"""

import os
import signal
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.server import Server
from fclmodels.federation.training.auxiliary_networks import copy_state
from fclmodels.federation.training.optimisers import make_optimiser
from fclmodels.federation.training.server_training import NetworkTraining
from fclmodels.methods.fedavg import FedAvg
from fclmodels.settings.schema import OptimizerSettings


class ServerStudent(FedAvg):
    """FedAvg whose server trains too."""

    name = "server-student"
    paper = "none"

    class Settings(FedAvg.Settings):
        steps: int = Field(6, description="steps before a task, and after it")
        dies: tuple[int, str, int] | None = Field(
            None, description="task, work and step before which the run dies once"
        )
        mark: Path = Field(Path("mark"), description="file that says that the one death has been")

    settings: Settings

    def begin_task(self, server: Server, cohort: Cohort) -> Server:
        return self.study(server, cohort, "before")

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        server = self.study(server, cohort, "after")
        return self.study(server, cohort, "after that")

    def study(self, server: Server, cohort: Cohort, name: str) -> Server:
        network = self.networks.load(server.spec, server.weights).train().requires_grad_(True)
        adam = make_optimiser(OptimizerSettings(kind="adam", lr=0.01), list(network.backbone.parameters()), 0)
        sgd = make_optimiser(OptimizerSettings(lr=0.01, momentum=0.9), list(network.heads.parameters()), 0)

        def loss(number: int) -> Tensor:
            self.meet_death(server.task, name, number)
            noise = torch.randn(4, *self.run.splits.shape, device=self.run.device)
            return torch.distributions.Categorical(logits=network(noise)).entropy().mean()

        cohort.train(NetworkTraining(name, {"network": network}, [adam, sgd], loss), self.settings.steps)
        return replace(server, weights=copy_state(network))

    def meet_death(self, task: int, name: str, number: int) -> None:
        if (task, name, number) == self.settings.dies and not self.settings.mark.exists():
            self.settings.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
