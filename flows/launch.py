"""Starts a flow from the command line: surroundings, the server, and meanwhile what takes seconds to import."""

import gc
import logging
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from importlib import import_module
from typing import Any

from fclmodels.federation import malloc
from flows import environment, servers
from flows.terminal import tell


def start(module: str, flow: str, **arguments: Any) -> Any:
    """The result of a flow, run on the project's Prefect server."""
    malloc.tune()
    environment.settle()
    given = "PREFECT_API_URL" in os.environ
    url = servers.connect(environment.HOME)
    # An interrupt in the middle of an import can leave a half-made package behind: it waits until the imports are done.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        entry = getattr(import_module(module), flow)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    servers.wait(url, environment.HOME)
    if not given:
        servers.keep_up(environment.HOME, lambda: tell("Prefect's server has died; another one takes its place"))
    gc.freeze()  # what was imported stays: looking through it again, at the latest at exit, takes a second
    gc.enable()
    return _even_without(url if given else None, entry, **arguments)


def _even_without(url: str | None, entry: Callable[..., Any], **arguments: Any) -> Any:
    """The flow's result, also where its run ended well and only the server at `url`, a given one, cannot be told so."""
    from prefect import Flow
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    results = []
    # The thread of the heartbeat ends a flow run a second late, and no setting from outside can switch it off.
    with ExitStack() as settings:
        settings.enter_context(temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}))

        if isinstance(entry, Flow):
            function = entry.fn

            @wraps(function)
            def noted(*given: Any, **more: Any) -> Any:
                results.append(function(*given, **more))
                if url is not None and not servers.healthy(url):
                    # Else Prefect tries for two minutes to tell the last state, and prints each event that it lost.
                    settings.enter_context(temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}))
                    logging.raiseExceptions = False
                    logging.disable()
                return results[-1]

            entry.fn = noted
            settings.callback(setattr, entry, "fn", function)
        try:
            return entry(**arguments)
        except Exception:
            if not results or url is None or servers.healthy(url):
                raise
            tell(f"PREFECT_API_URL: {url} stopped answering. The run went on, and its pages do not show the end.")
            return results[-1]
