"""Keys of an experiment's steps: digests of all that a step's outcome depends on, and of nothing else.

Prefect's cache (tasks/caching.py) and the store go by these keys.
"""

from typing import TYPE_CHECKING, Any

import torch

from fclmodels import plugins
from fclmodels.federation import evaluation
from fclmodels.federation.engine import rounds
from fclmodels.federation.exchange import EVALUATIONS
from fclmodels.federation.executors import client_work
from fclmodels.settings import load as reading
from fclmodels.settings.federation import FederationSettings
from fclmodels.settings.schema import Params
from fclmodels.source_digest import digest_sources
from fclmodels.storage.digests import digest_json

if TYPE_CHECKING:
    from fclmodels.federation.method import Method

# Server mathematics has one fixed number of threads, whatever the clients have.
SERVER_THREADS = 1
MONITORS = "fclmodels.federation.monitors.watch"
# Settings that change no result of training.
BLOCKS_WITHOUT_EFFECT = ("data", "stream", "partition", "evaluation", "monitors", "device")
FEDERATION_WITHOUT_EFFECT = ("rounds", "rounds_scale", "executor", "workers", "threads", "checkpoint_seconds")


def identify(method: "Method") -> dict[str, Any]:
    """Return what all steps of a method's run depend on: settings, seed, splits, kind of device, code."""
    run, name = method.run, type(method).name
    settings = reading.collect_settings(run.params, name)
    for block in BLOCKS_WITHOUT_EFFECT:
        del settings[block]
    for setting in [*FEDERATION_WITHOUT_EFFECT, *list_blocks_that_are_off(run.params.federation)]:
        del settings["federation"][setting]
    return {
        "method": name,
        "settings": settings,
        "backbone": plugins.find("backbone", run.params.model.backbone)(run.params.model).list_dependencies(),
        **({"files": files} if (files := method.list_dependencies()) else {}),
        "server_threads": SERVER_THREADS,
        "seed": run.seed,
        "splits": run.splits.digest,
        "device": run.device.type,
        "torch": torch.__version__,
        "code": digest_sources(*list_modules(method)),
    }


def list_blocks_that_are_off(federation: FederationSettings) -> list[str]:
    """Return the blocks of settings that change no result, because what they are about is not on."""
    is_on = {
        "faults": federation.faults.on,
        "secagg": federation.secagg.on,
        "attack": federation.attack.kind != "none",
        "robust": federation.aggregation != "mean",
    }
    return [block for block, on in is_on.items() if not on]


def list_modules(method: "Method") -> list[str]:
    """Return the modules whose code, with what they import, makes a method's results under its settings."""
    params = method.run.params
    backbone = plugins.find("backbone", params.model.backbone).__module__
    return [
        *(type(method).__module__, backbone, rounds.__name__, client_work.__name__),
        *client_work.list_stage_modules(params.federation),
        *(module for module, is_on in list_optional_modules(params).items() if is_on),
    ]


def list_optional_modules(params: Params) -> dict[str, bool]:
    """Return the modules that are imported inside of functions, where settings ask for them, and whether they do."""
    return {
        "fclmodels.numerics.robust_means": params.federation.aggregation != "mean",
        "fclmodels.federation.training.frozen_activations": params.model.keep_frozen,
        "fclmodels.backbones.weights.weight_files": params.model.weights is not None,
        "fclmodels.backbones.weights.published_weights": params.model.weights is not None,
    }


def compute_step_key(
    method: "Method", identity: dict[str, Any], stage: str, state: str | None, task: int, threads: int
) -> str:
    """Return the key of a step from a state; for `evaluate` and `judge`, `task` is how many are learned."""
    params = method.run.params
    depends_on = {**identity, "threads": threads, "stage": stage, "state": state, "task": task}
    if stage == "learn":
        depends_on["rounds"] = method.run.count_rounds(task)
    monitors = params.monitors
    of_rounds = monitors.round_monitors and [*monitors.round_monitors, monitors.every, params.evaluation.batch_size]
    if watched := {"learn": of_rounds, "conclude": monitors.used_share}.get(stage):
        depends_on["monitors"] = [watched, digest_sources(MONITORS)]
    if stage in EVALUATIONS:
        depends_on["evaluation"] = params.evaluation.model_dump(mode="json")
        depends_on["code"] = [depends_on["code"], digest_sources(evaluation.__name__)]
    return digest_json(depends_on)
