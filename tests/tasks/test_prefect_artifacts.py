"""Artifacts on Prefect's pages: none is published after the server was lost, and no time is lost on trying."""

import httpx

from tasks.prefect_artifacts import ArtifactPublisher


def test_a_lost_server_is_tried_once() -> None:
    calls = []

    def create(answers: bool) -> str:
        calls.append(answers)
        if not answers:
            raise httpx.ConnectError("lost")
        return "published"

    publisher = ArtifactPublisher()
    assert [publisher.publish(create, answers) for answers in (True, False, True)] == ["published", None, None]
    assert calls == [True, False]
