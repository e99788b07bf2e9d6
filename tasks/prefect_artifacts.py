"""Publishing of artifacts on Prefect's pages, without which a run goes on if the server is lost."""

from collections.abc import Callable
from typing import Any

import httpx


class ArtifactPublisher:
    """Publishes artifacts until the server is lost: each further try would cost Prefect's client a minute."""

    def __init__(self) -> None:
        self.is_server_lost = False

    def publish(self, create: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        """Call one of Prefect's functions and return its result, such as an id; None if the server is lost."""
        if self.is_server_lost:
            return None
        try:
            return create(*positional, **named)
        except httpx.HTTPError:
            self.is_server_lost = True
            return None


ARTIFACTS = ArtifactPublisher()
