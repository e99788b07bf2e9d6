"""Starts a flow from the command line: surroundings, the server, and meanwhile what takes seconds to import."""

import gc
import signal
from importlib import import_module
from typing import Any

from fclmodels.federation import malloc
from flows import environment, servers


def start(module: str, flow: str, **arguments: Any) -> Any:
    """The result of a flow, run on the project's Prefect server."""
    malloc.tune()
    environment.settle()
    url = servers.connect(environment.HOME)
    # An interrupt in the middle of an import can leave a half-made package behind: it waits until the imports are done.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        entry = getattr(import_module(module), flow)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    servers.wait(url, environment.HOME)
    gc.freeze()  # what was imported stays: looking through it again, at the latest at exit, takes a second
    gc.enable()
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    # The thread of the heartbeat ends a flow run a second late, and no setting from outside can switch it off.
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        return entry(**arguments)
