"""TARGET with LODE: TARGET whose new samples also learn, with little weight, to be told from old ones.

FedProTIP (Table 5) combines the two and does not say how. This is the least that does so, and ours: TARGET's cross
entropy over the task's classes is LODE's intra (lode.py), to which (rho / t) inter is added, t the number of earlier
tasks, inter = lse(z) - lse(z_new). So a client descends

    (rho / t) inter + intra + kd H        as in target.py, nothing halved

Whether FedProTIP's images also count by a cross entropy with the teacher's classes is unknown: here they do not. With
rho 0 it is TARGET. Where the present task has all classes so far inter is 0, and heads of the tasks' own are refused.
"""

from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fclmodels.backbones.model.network import Network
from fclmodels.backbones.model.spec import get_task_columns
from fclmodels.errors import UserError
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.lode import decouple
from fclmodels.methods.parts.data_free_synthesis import Synthesis
from fclmodels.methods.parts.distillation import Teacher
from fclmodels.methods.parts.synthetic_replay import SyntheticReplay
from fclmodels.methods.target import Target, TargetSynthesis, imitate


class TargetLode(SyntheticReplay):
    """TARGET, whose clients also learn to tell new classes from old ones, with less weight than from another."""

    name = "target-lode"
    paper = "TARGET, with Loss Decoupling for Task-Agnostic Continual Learning, as compared in FedProTIP"

    class Settings(Target.Settings):
        rho: NonNegativeFloat = Field(
            0.05, le=1e6, description="weight of new against old classes, over the number of earlier tasks (ours)"
        )

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        if run.make_spec(1).head != "growing":
            raise UserError("methods.target-lode: it weighs new classes against old ones. Use model.head: growing.")

    @property
    def replays(self) -> bool:
        return self.settings.kd > 0

    @property
    def synthesis(self) -> type[Synthesis]:
        return TargetSynthesis

    def make_synthesis(self, server: Server, teacher: Network, student: Network) -> Synthesis:
        return TargetSynthesis(self.run, self.settings, teacher, student)

    def imitate(self, training: LocalTraining, inputs: Tensor, teacher: Teacher) -> Tensor:
        return imitate(training, inputs, teacher, self.settings)

    def learn(self, training: LocalTraining, features: Tensor, labels: Tensor) -> Tensor:
        intra = super().learn(training, features, labels)
        network, task = training.network, training.client.task
        if task == 0 or not self.settings.rho:
            return intra
        logits = network.compute_logits(features)
        inter, _ = decouple(logits, labels, get_task_columns(network.spec, task, logits.device))
        return intra + self.settings.rho / task * inter
