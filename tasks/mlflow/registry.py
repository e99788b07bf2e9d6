"""MLflow's registry: one model for each stream, a version for each task learned, and aliases champion and challenger.

A version is identified by its tag `fcl.key` and created once. The tag `gate` is written last: until a version has it,
aliases and announcements are repeated, in the order of the tasks.
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

from fclmodels.experiment.gate import Verdict
from tasks.prefect_artifacts import ARTIFACTS

CHAMPION, CHALLENGER = "champion", "challenger"
KEY, TASKS, GATE = "fcl.key", "tasks", "gate"  # tags


def has_verdict(client: MlflowClient, model: str, key: str) -> bool:
    """Return whether the registry has the version of this key with the gate's verdict."""
    version = _find_version(client, model, key)
    return version is not None and GATE in version.tags


def get_aliased_versions(client: MlflowClient, model: str) -> dict[str, ModelVersion]:
    """Return the versions that are champion and challenger, as far as there are any."""
    if not client.search_registered_models(f"name = '{model}'"):
        return {}
    aliases = client.get_registered_model(model).aliases
    return {name: client.get_model_version(model, aliases[name]) for name in (CHAMPION, CHALLENGER) if name in aliases}


@task(name="register", task_run_name="register {model}, {tasks} tasks", cache_policy=NO_CACHE)
def register(
    client: MlflowClient, model: str, tasks: int, key: str, run_id: str, tags: dict[str, str], verdict: Verdict
) -> dict[str, str]:
    """Register the run's model as a version of the stream's, with aliases; return its alias, number and the reasons."""
    with suppress(MlflowException):  # it exists
        client.create_registered_model(model)
    tags = {**tags, KEY: key, TASKS: str(tasks)}
    version = _find_version(client, model, key) or _create_version(client, model, run_id, tags)
    number = str(version.version)
    client.set_registered_model_alias(model, f"task-{tasks:02d}", number)
    reasons = [*verdict.reasons, *_compare_with_champion(client, model, tasks)]
    alias = CHALLENGER if reasons else CHAMPION
    client.set_registered_model_alias(model, alias, number)
    announce(model, alias, f"version {number}, {tasks} tasks", reasons or ["it is within all limits of the gate"])
    client.set_model_version_tag(model, number, GATE, "; ".join([alias, *reasons]))
    return {"became": alias, "version": number, "why": "; ".join(reasons)}


def announce(stream: str, event: str, title: str, reasons: Sequence[str]) -> None:
    """Publish a Prefect artifact and emit an event on a task: champion, challenger or set aside, with the reasons."""
    text = "\n".join([f"**{event}**: {title}", "", *(f"- {reason}" for reason in reasons)])
    ARTIFACTS.publish(create_markdown_artifact, text, key=f"stream-{stream}", description=f"{event}: {title}")
    resource = {"prefect.resource.id": f"fcl.stream.{stream}", "prefect.resource.name": stream}
    payload: dict[str, Any] = {"about": title, "reasons": list(reasons)}
    emit_event(event=f"fcl.stream.{event}", resource=resource, payload=payload)


def _find_version(client: MlflowClient, model: str, key: str) -> ModelVersion | None:
    versions = client.search_model_versions(f"name = '{model}'")
    return next((version for version in versions if version.tags.get(KEY) == key), None)


def _create_version(client: MlflowClient, model: str, run_id: str, tags: dict[str, str]) -> ModelVersion:
    outputs = client.get_run(run_id).outputs
    assert outputs is not None
    logged = outputs.model_outputs[-1]
    return client.create_model_version(model, f"models:/{logged.model_id}", run_id, tags=tags, model_id=logged.model_id)


def _compare_with_champion(client: MlflowClient, model: str, tasks: int) -> list[str]:
    """Return the reasons not to replace a champion that knows more tasks, as after a stream was learned anew."""
    if CHAMPION not in client.get_registered_model(model).aliases:
        return []
    champion_tasks = int(client.get_model_version_by_alias(model, CHAMPION).tags[TASKS])
    return [f"it knows {tasks} tasks, the champion {champion_tasks}"] if champion_tasks > tasks else []
