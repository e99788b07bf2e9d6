"""A data set -> prepared arrays -> splits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow

import tasks.data
from fclmodels.settings.load import load_params

PARAMS = Path("params.yaml")


@flow(name="prepare", flow_run_name="prepare {out}")
def prepare(out: Path = tasks.data.PREPARED, params: Path = PARAMS, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Decode the source of the settings into a folder; return its description."""
    return tasks.data.prepare(load_params(params, overrides), out)


@flow(name="partition", flow_run_name="partition {out}")
def partition(
    seed: int,
    out: Path,
    prepared: Path = tasks.data.PREPARED,
    params: Path = PARAMS,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Assign the prepared samples to tasks, clients and splits for runs with a seed; return their statistics."""
    return tasks.data.partition(load_params(params, overrides, seed=seed), prepared, out)
