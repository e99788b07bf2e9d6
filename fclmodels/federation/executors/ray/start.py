"""The package Ray (extra `ray`) and a cluster: the one that RAY_ADDRESS names, or one that is this machine alone."""

import contextlib
import importlib
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from secrets import token_hex
from types import ModuleType

from fclmodels.errors import UserError
from fclmodels.federation.executors.auto_choice import count_cores

QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}
# At "0" 127.0.0.1 stays what it is, and a cluster there listens on the loopback interface alone; read by `import ray`.
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@contextlib.contextmanager
def connect_cluster(cpus: int | None = None) -> Iterator[ModuleType]:
    """Yield Ray, connected to the cluster of RAY_ADDRESS or to a new one on this machine, with so many CPUs or all."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        os.environ.setdefault(LOOPBACK, "0")
        os.environ.setdefault("RAY_AUTH_TOKEN", token_hex(32))
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Whatever QUIET says, Ray prints to stdout here which node was lost, with twenty lines of that node's log.
    vars(importlib.import_module("ray._private.worker"))["print_to_stdstream"] = lambda *_, **__: None
    with contextlib.ExitStack() as opened:
        if address is None:
            folder = tempfile.TemporaryDirectory(prefix="fcl-ray-", dir="/tmp", ignore_cleanup_errors=True)
            own = {"num_cpus": cpus or count_cores(), "_temp_dir": opened.enter_context(folder)}
            ray.init("local", include_dashboard=False, _node_ip_address="127.0.0.1", **own, **QUIET)
        else:
            join(ray, address)
        opened.callback(ray.shutdown)
        yield ray


def join(ray: ModuleType, address: str) -> None:
    """Connect to a cluster that runs; UserError where that fails."""
    refuse_silence(address)
    try:
        ray.init(address, **QUIET)
    except ConnectionError as problem:
        raise UserError(
            f"RAY_ADDRESS: {address}: {problem}. Where the cluster has a token, set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN or ~/.ray/auth_token."
        ) from problem


def refuse_silence(address: str) -> None:
    """Raise UserError where no cluster answers; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        if address.startswith("ray://"):
            raise ValueError("it is of a Ray client, which pickles all that it sends")
        if address != "auto":
            socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as problem:
        raise UserError(
            f"RAY_ADDRESS: no cluster answers at {address} ({problem}). It must be HOST:PORT, as `ray start --head` "
            "prints it, on a machine that belongs to the cluster; or unset it."
        ) from problem


def import_ray() -> ModuleType:
    """Return the package ray; UserError where it is not installed."""
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as problem:
        raise UserError("a cluster needs the package ray. Install it: pip install 'fclflow[ray]'.") from problem
