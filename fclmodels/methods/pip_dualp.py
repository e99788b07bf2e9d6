"""PIP-DualP: prototype injection (injected.py) with the prompts of Fed-DualP (fed_dualp.py)."""

from fclmodels.methods.fed_dualp import FedDualP
from fclmodels.methods.injected import Injected


class PipDualP(Injected, FedDualP):
    """Fed-DualP whose heads also learn from prototypes of classes that a client lacks."""

    name = "pip-dualp"
    paper = "PIP: Prototypes-Injected Prompt for Federated Class Incremental Learning"

    class Settings(FedDualP.Settings, Injected.Settings):  # defaults of the first go before those of the second
        pass

    settings: Settings
