"""MLflow's registry: one model a stream, a version for each task learned, and aliases that say which one to use.

A version is found again by its tags and never doubled. The tag `gate` is written last: until it is there, aliases and
announcements are made (again), in the order of the tasks.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from fclmodels.gate import Verdict
from tasks.pages import PAGES

CHAMPION, CHALLENGER = "champion", "challenger"
KEY, TASKS, GATE = "fcl.key", "tasks", "gate"  # tags


def gated(client: MlflowClient, model: str, key: str) -> bool:
    """Whether the registry has the version of this key, and the gate has spoken on it."""
    found = _version(client, model, key)
    return found is not None and GATE in found.tags


def by_alias(client: MlflowClient, model: str) -> dict[str, ModelVersion]:
    """The champion and the challenger, where there are these."""
    if not client.search_registered_models(f"name = '{model}'"):
        return {}
    aliases = client.get_registered_model(model).aliases
    return {name: client.get_model_version(model, aliases[name]) for name in (CHAMPION, CHALLENGER) if name in aliases}


@task(name="register", task_run_name="register {model}, {tasks} tasks", cache_policy=NO_CACHE)
def register(
    client: MlflowClient, model: str, tasks: int, key: str, run_id: str, tags: dict[str, str], verdict: Verdict
) -> dict[str, str]:
    """The run's model as a version of the stream's, with its aliases; what became of it, and why."""
    with suppress(MlflowException):  # it is there
        client.create_registered_model(model)
    found = _version(client, model, key) or _create(client, model, run_id, {**tags, KEY: key, TASKS: str(tasks)})
    number = str(found.version)
    client.set_registered_model_alias(model, f"task-{tasks:02d}", number)
    reasons = [*verdict.reasons, *_of_champion(client, model, tasks)]
    alias = CHALLENGER if reasons else CHAMPION
    client.set_registered_model_alias(model, alias, number)
    announce(model, alias, f"version {number}, {tasks} tasks", reasons or ["it keeps all limits of the gate"])
    client.set_model_version_tag(model, number, GATE, "; ".join([alias, *reasons]))
    return {"became": alias, "version": number, "why": "; ".join(reasons)}


def announce(stream: str, event: str, title: str, reasons: Sequence[str]) -> None:
    """A Prefect artifact and an event that say what became of a task, and why."""
    text = "\n".join([f"**{event}**: {title}", "", *(f"- {reason}" for reason in reasons)])
    PAGES.show(create_markdown_artifact, text, key=f"stream-{stream}", description=f"{event}: {title}")
    resource = {"prefect.resource.id": f"fcl.stream.{stream}", "prefect.resource.name": stream}
    payload: dict[str, Any] = {"about": title, "reasons": list(reasons)}
    emit_event(event=f"fcl.stream.{event}", resource=resource, payload=payload)


def _version(client: MlflowClient, model: str, key: str) -> ModelVersion | None:
    found = client.search_model_versions(f"name = '{model}'")
    return next((version for version in found if version.tags.get(KEY) == key), None)


def _create(client: MlflowClient, model: str, run_id: str, tags: dict[str, str]) -> ModelVersion:
    outputs = client.get_run(run_id).outputs
    assert outputs is not None
    logged = outputs.model_outputs[-1]
    return client.create_model_version(model, f"models:/{logged.model_id}", run_id, tags=tags, model_id=logged.model_id)


def _of_champion(client: MlflowClient, model: str, tasks: int) -> list[str]:
    """What holds a model back that knows fewer tasks, as where a stream is learned anew from its beginning."""
    if CHAMPION not in client.get_registered_model(model).aliases:
        return []
    known = int(client.get_model_version_by_alias(model, CHAMPION).tags[TASKS])
    return [f"it knows {tasks} tasks, the champion {known}"] if known > tasks else []
