"""Prefect's cache, keyed by content: what settings, data, earlier states and source decide is not done twice.

An outcome is a small JSON reference into the content-addressed store, which has the last word: where it lost an
object, what Prefect remembers is refreshed.
"""

from collections.abc import Callable
from typing import Any

from prefect import Task, task
from prefect.context import TaskRunContext

from fclmodels.experiment import Step

Outcome = dict[str, Any]


def by_content(context: TaskRunContext, arguments: dict[str, Any]) -> str:
    return arguments["step"].key


def stored_task(name: str) -> Callable[[Callable[..., Outcome]], Task[..., Outcome]]:
    """A Prefect task on a step of an experiment (its argument `step`), cached by the step's key."""
    return task(
        cache_key_fn=by_content,
        cache_result_in_memory=False,
        persist_result=True,
        result_serializer="json",
        task_run_name=name,
    )


def through_store(stored: Task[..., Outcome], step: Step, **arguments: Any) -> Outcome:
    """The step's outcome: from Prefect's cache while that is what the store says, else done anew."""
    known = step.done()
    if known is not None:
        told = stored(step=step, **arguments, return_state=True)
        if told.is_completed() and told.result(raise_on_failure=False) == known:
            return known
    return stored.with_options(refresh_cache=True)(step=step, **arguments)
