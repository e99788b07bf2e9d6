"""Prefect tasks on steps of an experiment, cached by a key of content: settings, data, earlier state and source.

An outcome is a small JSON reference into the content-addressed store. The store decides: where it has lost an object,
Prefect's cached result is refreshed.
"""

from typing import Any, Protocol

from prefect import Task, task
from prefect.client.schemas.objects import State
from prefect.context import TaskRunContext

Outcome = dict[str, Any]


class CachedStep(Protocol):
    """A step whose outcome is in the store once it has run."""

    @property
    def key(self) -> str:
        """Digest of all that the outcome depends on."""
        ...

    def recall(self) -> Outcome | None:
        """Return the outcome, None where the store does not have all of it."""
        ...

    def run(self) -> Outcome:
        """Do the work and return the outcome."""
        ...


def get_step_key(context: TaskRunContext, arguments: dict[str, Any]) -> str:
    """Return Prefect's cache key of a step."""
    return arguments["step"].key


def step_task(name: str, description: str) -> Task[[CachedStep, str], Outcome]:
    """Make the Prefect task that runs one stage of an experiment's steps, cached by the step's key."""

    def run_step(step: CachedStep, label: str) -> Outcome:
        return step.recall() or step.run()

    return task(
        name=name,
        description=description,
        cache_key_fn=get_step_key,
        cache_result_in_memory=False,
        persist_result=True,
        result_serializer="json",
        task_run_name="{label}",
    )(run_step)


def run_cached(prefect_task: Task[[CachedStep, str], Outcome], step: CachedStep, label: str) -> Outcome:
    """Return the step's outcome, from Prefect's cache if that agrees with the store; else run the Prefect task anew."""
    recorded = step.recall()
    if recorded is not None:
        state: State[Outcome] = prefect_task(step, label, return_state=True)
        if state.is_completed() and state.result(raise_on_failure=False) == recorded:
            return recorded
    return prefect_task.with_options(refresh_cache=True)(step, label)
