"""Flow runs of a schedule whose process was killed: the server shows them as running until another run ends them."""

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import StateType
from prefect.context import FlowRunContext
from prefect.states import Crashed


def end_killed_runs() -> list[str]:
    """End the runs of this flow run's deployment that were due before it and never ended; return their names.

    To be called by the one run that holds the stream's lock. A run that still waits for the lock corrects its state
    when it ends. Without an answer of the server nothing is ended: the next run tries again.
    """
    context = FlowRunContext.get()
    this = context.flow_run if context else None
    if this is None or this.deployment_id is None:
        return []
    unfinished = filters.FlowRunFilter(
        deployment_id=filters.FlowRunFilterDeploymentId(any_=[this.deployment_id]),
        state=filters.FlowRunFilterState(
            type=filters.FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING])
        ),
        expected_start_time=filters.FlowRunFilterExpectedStartTime(before_=this.expected_start_time),
    )
    try:
        with get_client(sync_client=True) as client:
            killed = [run for run in client.read_flow_runs(flow_run_filter=unfinished) if run.id != this.id]
            for run in killed:
                client.set_flow_run_state(run.id, Crashed(message=f"It was killed. {this.name} does its work."))
    except httpx.HTTPError:
        return []
    return [run.name for run in killed]
