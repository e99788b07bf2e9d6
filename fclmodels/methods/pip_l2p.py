"""PIP-L2P: prototype injection (injected.py) with the prompts of Fed-L2P (fed_l2p.py)."""

from fclmodels.methods.fed_l2p import FedL2P
from fclmodels.methods.injected import Injected


class PipL2P(Injected, FedL2P):
    """Fed-L2P whose heads also learn from prototypes of classes that a client lacks."""

    name = "pip-l2p"
    paper = "PIP: Prototypes-Injected Prompt for Federated Class Incremental Learning"

    class Settings(FedL2P.Settings, Injected.Settings):  # defaults of the first go before those of the second
        pass

    settings: Settings
