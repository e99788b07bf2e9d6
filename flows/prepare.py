"""A data set -> prepared arrays -> splits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow

import tasks.data
from fclmodels.params import load

PARAMS = Path("params.yaml")


@flow(name="prepare")
def prepare(out: Path = tasks.data.PREPARED, params: Path = PARAMS, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Decode the source of the settings into a folder."""
    return tasks.data.prepare(load(params, overrides), out)


@flow(name="partition")
def partition(
    prepared: Path = tasks.data.PREPARED,
    out: Path = tasks.data.SPLITS,
    params: Path = PARAMS,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Give the prepared samples to tasks, clients and splits."""
    return tasks.data.partition(load(params, overrides), prepared, out)
