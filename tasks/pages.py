"""What is only there for Prefect's pages: a run goes on where no server takes it any more."""

from collections.abc import Callable
from typing import Any

import httpx


class Pages:
    """Once a server has been asked in vain, which takes Prefect's client a minute, it is not asked again."""

    def __init__(self) -> None:
        self.lost = False

    def show(self, make: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """What `make` returns, such as an artifact's id; None where it could not be shown."""
        if self.lost:
            return None
        try:
            return make(*arguments, **more)
        except httpx.HTTPError:
            self.lost = True
            return None


PAGES = Pages()
