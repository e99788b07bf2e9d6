"""Prefect's pages: what cannot be shown is left out, and a server that is gone is asked once."""

import httpx

from tasks.pages import Pages


def test_a_server_that_is_gone_is_asked_once() -> None:
    asked = []

    def make(answers: bool) -> str:
        asked.append(answers)
        if not answers:
            raise httpx.ConnectError("gone")
        return "shown"

    pages = Pages()
    assert [pages.show(make, answers) for answers in (True, False, True)] == ["shown", None, None]
    assert asked == [True, False]
