"""A linear probe: the head alone is trained, on the features of the frozen backbone, and averaged (FedAvg)."""

from fclmodels.methods.frozen import Frozen


class LinearProbe(Frozen):
    """Trains the head alone on a frozen backbone's features."""

    name = "linear-probe"
    paper = "Communication-Efficient Learning of Deep Networks from Decentralized Data"
