"""FedOMG: gradient alignment of the clients' updates on the server (Nguyen et al. 2025), see gradient_alignment.py.

It does nothing against forgetting by itself: it is STAMP's alignment between clients alone, Table 2's ablation (1).
"""

from pydantic import Field
from torch import Tensor

from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Form
from fclmodels.federation.method import Obstacle
from fclmodels.federation.run_context import Run
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.gradient_alignment import AlignmentSettings, GradientAlignment, require_single_updates


class FedOMG(FedAvg):
    """FedAvg whose server looks for a direction that no client's update points against."""

    name = "fedomg"
    paper = "Federated Domain Generalization with Data-free On-server Gradient Matching"

    class Settings(AlignmentSettings, FedAvg.Settings):
        normalise: bool = Field(False, description="bring all updates to their mean length first, as STAMP does")

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.alignment = GradientAlignment(settings)

    @property
    def obstacle_to_sums(self) -> Obstacle | None:
        return Obstacle("methods.fedomg aligns single updates on the server", "Use another method")

    @property
    def obstacle_to_robust_rules(self) -> Obstacle | None:
        return Obstacle("aligns them", "Use mean")

    def make_update_form(self, task: int, round: int) -> Form:
        return require_single_updates(super().make_update_form(task, round))

    def combine(self, replies: Replies) -> dict[str, Tensor]:
        return self.alignment.combine(replies)
