"""Fed-L2P (PIP section 3.2): a pool of prompts, of which each sample's nearest are put before its tokens (eq. 2).

This is not FedL2P of meta-networks (Lee et al. 2023), which is `fedl2p-meta`.
"""

from pydantic import Field, NonNegativeFloat, PositiveInt

from fclmodels.backbones.model.prompt_adapters import L2P
from fclmodels.methods.parts.fed_prompts import FedPrompts
from fclmodels.settings.base import Profiles

PROFILES: Profiles = {
    "paper": {},
    "release": {"pool": 10, "selection": "batch", "head": "task-end"},
}


class FedL2P(FedPrompts):
    """Averages a pool of prompts, keys and head of a frozen transformer (Learning to Prompt); not fedl2p-meta."""

    name = "fed-l2p"
    paper = "PIP: Prototypes-Injected Prompt for Federated Class Incremental Learning"
    attaches = L2P

    class Settings(FedPrompts.Settings, L2P.Settings):
        pool: PositiveInt | None = Field(10, le=10_000, description="prompts; null: one a task, so that the pool grows")
        profiles = PROFILES
        matching: NonNegativeFloat = Field(0.1, le=1e6, description="lambda, weight of the key matching loss (eq. 5)")

    settings: Settings
