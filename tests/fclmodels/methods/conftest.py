"""Short ways for tests of methods that learn something at the end of each task."""

from collections.abc import Callable
from typing import Any

import pytest

from fclmodels.federation.cohort import Cohort
from fclmodels.federation.server import Server


@pytest.fixture
def after_each_task(federate: Callable[..., Server]) -> Callable[[Any], list[Server]]:
    """The servers that a method ends its tasks with, of one federation over all of them."""

    def servers_of(method: Any) -> list[Server]:
        servers, finish_task = [], method.finish_task

        def finish(server: Server, cohort: Cohort) -> Server:
            servers.append(finish_task(server, cohort))
            return servers[-1]

        method.finish_task = finish
        federate(method)
        method.finish_task = finish_task
        return servers

    return servers_of
