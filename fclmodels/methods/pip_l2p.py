"""PIP-L2P: prototype injection with the prompts of Fed-L2P (PIP, Algorithm 1); its three parts as in pip_dualp.py."""

from typing import ClassVar

from fclmodels.methods.fed_l2p import PROFILES, FedL2P
from fclmodels.methods.parts.injected_prompts import InjectedPrompts
from fclmodels.methods.parts.prototype_injection import INJECTION_PROFILES
from fclmodels.settings.base import Profiles


class PipL2P(InjectedPrompts):
    """Fed-L2P whose heads also learn from prototypes of classes that a client lacks."""

    name = "pip-l2p"
    paper = "PIP: Prototypes-Injected Prompt for Federated Class Incremental Learning"
    attaches = FedL2P.attaches

    class Settings(FedL2P.Settings, InjectedPrompts.Settings):  # defaults of the first go before those of the second
        profiles: ClassVar[Profiles] = {name: {**PROFILES[name], **INJECTION_PROFILES[name]} for name in PROFILES}

    settings: Settings
