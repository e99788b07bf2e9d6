"""Re-Fed+: Re-Fed with scores from the last layer alone, as we read "lower cost" (Li et al., TPAMI 47(7), 2025).

The paper was not at hand and there is no code: what it changed in Re-Fed is unknown. Its abstract says that the cost is
lower. Our reading: a sample's score counts the gradient of the heads alone, which for a linear head under cross entropy
is

    ||grad l(v; x)|| = ||p - e_y|| sqrt(||f||^2 + 1)

of features f and probabilities p, and needs no backward pass through the backbone. All else is Re-Fed (re_fed.py).
"""

from collections.abc import Collection

from fclmodels.methods.re_fed import ReFed


class ReFedPlus(ReFed):
    """After Re-Fed+: Re-Fed whose scores look at the last layer alone, which is our reading of it."""

    name = "re-fed-plus"
    paper = "Re-Fed+: A Better Replay Strategy for Federated Incremental Learning"

    def select_scored(self, names: Collection[str]) -> Collection[str]:
        return [name for name in names if name.startswith("heads.")]
