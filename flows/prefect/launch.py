"""Running of a flow from the command line: environment, Prefect server and, while that starts, the slow imports."""

import gc
import logging
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from importlib import import_module
from typing import Any

from fclmodels.federation.executors import glibc_malloc
from flows.cli.terminal import tell
from flows.prefect import environment, server


def run_flow(module: str, flow: str, **arguments: Any) -> Any:
    """Run a flow on the project's Prefect server, or that of PREFECT_API_URL; return its result."""
    glibc_malloc.tune()
    environment.set_defaults()
    is_external = "PREFECT_API_URL" in os.environ
    url = server.connect(environment.HOME)
    # An interrupt in the middle of an import can leave a half-imported package behind, so it waits for their end.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        entry = getattr(import_module(module), flow)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    server.wait_until_ready(url, environment.HOME)
    if not is_external:
        server.restart_if_dead(environment.HOME, lambda: tell("Prefect's server has died and is replaced by another"))
    gc.freeze()  # a collection of what was imported, at the latest at exit, takes a second and frees nothing
    gc.enable()
    return _call_despite_lost_server(url if is_external else None, entry, **arguments)


def _call_despite_lost_server(url: str | None, entry: Callable[..., Any], **arguments: Any) -> Any:
    """Return the flow's result, even if the external server at `url` is lost before the end is reported to it."""
    from prefect import Flow
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    results = []
    # The heartbeat's thread ends a flow run a second late, and no environment variable can switch it off.
    with ExitStack() as settings:
        settings.enter_context(temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}))

        if isinstance(entry, Flow):
            function = entry.fn

            @wraps(function)
            def store_result(*positional: Any, **named: Any) -> Any:
                results.append(function(*positional, **named))
                if url is not None and not server.is_healthy(url):
                    # Else Prefect tries for two minutes to send the last state, and prints each event that it lost.
                    settings.enter_context(temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}))
                    logging.raiseExceptions = False
                    logging.disable()
                return results[-1]

            entry.fn = store_result
            settings.callback(setattr, entry, "fn", function)
        try:
            return entry(**arguments)
        except Exception:
            if not results or url is None or server.is_healthy(url):
                raise
            tell(f"PREFECT_API_URL: {url} stopped answering. The run is complete, but its pages do not show the end.")
            return results[-1]
