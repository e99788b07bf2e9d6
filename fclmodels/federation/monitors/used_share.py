"""How much of their input spaces the bases of protected layers span (FOT Table 3, Figure 7), and how features moved.

feature_drift: ||X_new - X_old|| / ||X_old|| of a task's features X between its begin and its end, over all clients that
move features (FedProTIP's TIP, `tip_later: drift`): what the accuracy of predicted tasks should be read beside.
"""

from typing import Any

import polars as pl
from torch import Tensor

from fclmodels.backbones.inputs.layer_names import find_module_name
from fclmodels.federation.monitors.rows import make_row, make_table
from fclmodels.numerics.subspace import used_share
from fclmodels.settings.schema import MonitorSettings


def measure_used_shares(bases: dict[str, Tensor], task: int) -> pl.DataFrame:
    """Return the rows used_share of each layer and of their mean; no rows where there are no bases.

    Of a grouped convolution it is the mean over its groups.
    """
    by_module: dict[str, list[float]] = {}
    for layer, basis in bases.items():
        by_module.setdefault(find_module_name(layer), []).append(used_share(basis))
    shares: dict[str | None, float] = {name: sum(of) / len(of) for name, of in by_module.items()}
    if shares:
        shares[None] = sum(shares.values()) / len(shares)
    return make_table([make_row("used_share", task, share, layer=layer) for layer, share in shares.items()])


def measure_subspaces(knowledge: dict[str, Any], task: int, monitors: MonitorSettings) -> pl.DataFrame:
    """Return the rows of what the server knows after a task, of those monitors that are on."""
    tables = [measure_used_shares(knowledge.get("bases", {}), task)] if monitors.used_share else []
    drift = (knowledge.get("tip", {}).get("drifts") or [None])[-1]  # None: not measured
    if monitors.drift and drift is not None:
        tables.append(make_table([make_row("feature_drift", task, drift)]))
    return pl.concat([make_table([]), *tables])
