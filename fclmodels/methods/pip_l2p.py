"""PIP-L2P: prototype injection with the prompts of Fed-L2P (PIP, Algorithm 1); its three parts as in pip_dualp.py."""

from fclmodels.methods.fed_l2p import FedL2P
from fclmodels.methods.parts.injected_prompts import InjectedPrompts


class PipL2P(InjectedPrompts):
    """Fed-L2P whose heads also learn from prototypes of classes that a client lacks."""

    name = "pip-l2p"
    paper = "PIP: Prototypes-Injected Prompt for Federated Class Incremental Learning"
    attaches = FedL2P.attaches

    class Settings(FedL2P.Settings, InjectedPrompts.Settings):  # defaults of the first go before those of the second
        pass

    settings: Settings
