"""Fed-DualP (PIP section 3.2): general prompts for all tasks and an expert prompt a task, as prefixes (eq. 3).

In training the task is known and its expert is used; later each sample's is the one with the nearest key.
"""

from fclmodels.backbones.model.prompt_adapters import DualP
from fclmodels.methods.parts.fed_prompts import FedPrompts
from fclmodels.settings.base import Profiles

PROFILES: Profiles = {
    "paper": {"pool": None, "enter": "prefix"},
    "release": {
        "pool": 10,
        "selection": "batch",
        "enter": "keys-values",
        "start": "each-round",
        "head": "task-end",
    },
}


class FedDualP(FedPrompts):
    """Averages general and expert prompts, keys and the head of a frozen transformer (DualPrompt)."""

    name = "fed-dualp"
    paper = "PIP: Prototypes-Injected Prompt for Federated Class Incremental Learning"
    attaches = DualP

    class Settings(FedPrompts.Settings, DualP.Settings):
        profiles = PROFILES

    settings: Settings
