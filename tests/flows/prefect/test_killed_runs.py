"""Runs of a schedule that were killed are ended by the next one, and no others."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.flow_engine import run_flow
from prefect.states import Completed, Pending, Running, Scheduled

from flows.prefect import killed_runs

TWO_O_CLOCK = datetime(2025, 3, 1, 2, tzinfo=UTC)  # the past: the engine would wait for a future start


@flow(name="nightly")
def nightly() -> list[str]:
    return killed_runs.end_killed_runs()


@pytest.fixture
def client(server: str) -> Any:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def deploy(client: SyncPrefectClient, request: pytest.FixtureRequest) -> Callable[[str], UUID]:
    """Return a function that deploys the flow under a name of the test's own."""
    return lambda name: client.create_deployment(client.create_flow(nightly), f"{request.node.name} {name}")


def make_due(client: SyncPrefectClient, deployment: UUID, day: int, state: Any = None) -> Any:
    """Return a run that was due on a day, in a state."""
    due = Scheduled(scheduled_time=TWO_O_CLOCK + timedelta(days=day))
    run = client.create_flow_run_from_deployment(deployment, state=due)
    if state is not None:
        client.set_flow_run_state(run.id, state, force=True)
    return run


def test_a_run_ends_those_that_were_due_before_it_and_never_ended(
    client: SyncPrefectClient, deploy: Callable[[str], UUID]
) -> None:
    ours, other = deploy("ours"), deploy("other")
    killed = [make_due(client, ours, 0, Running()), make_due(client, ours, 1, Pending())]
    spared = [
        make_due(client, ours, 0, Completed()),
        make_due(client, ours, 1),
        make_due(client, other, 1, Running()),
        make_due(client, ours, 3, Running()),
    ]
    before = [client.read_flow_run(run.id).state for run in spared]
    this = make_due(client, ours, 2)
    assert sorted(run_flow(nightly, this)) == sorted(run.name for run in killed)
    for run in killed:
        state = client.read_flow_run(run.id).state
        assert (state.type.value, state.message) == ("CRASHED", f"It was killed. {this.name} does its work.")
    assert [client.read_flow_run(run.id).state for run in spared] == before


def test_without_a_deployment_nothing_is_ended(client: SyncPrefectClient, deploy: Callable[[str], UUID]) -> None:
    running = make_due(client, deploy("ours"), 0, Running())
    assert nightly() == []
    assert client.read_flow_run(running.id).state.is_running()


def test_a_server_that_does_not_answer_stops_no_run(
    client: SyncPrefectClient, deploy: Callable[[str], UUID], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> Any:
        raise httpx.ConnectError("no answer")

    this = make_due(client, deploy("ours"), 0)
    monkeypatch.setattr(killed_runs, "get_client", refuse)
    assert run_flow(nightly, this) == []
