"""How much of their input spaces the bases of protected layers span (FOT Table 3, Figure 7)."""

import polars as pl
from torch import Tensor

from fclmodels.federation.monitors.rows import make_row, make_table
from fclmodels.numerics.subspace import used_share


def measure_used_shares(bases: dict[str, Tensor], task: int) -> pl.DataFrame:
    """Return the rows used_share of each layer and of their mean; no rows where there are no bases."""
    shares: dict[str | None, float] = {layer: used_share(basis) for layer, basis in bases.items()}
    if shares:
        shares[None] = sum(shares.values()) / len(shares)
    return make_table([make_row("used_share", task, share, layer=layer) for layer, share in shares.items()])
