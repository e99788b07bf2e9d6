"""The experiments of the settings side by side on a Ray cluster, each as `fcl run` in a process of its own.

All nodes see the project's folder at the same path. What ran on a node that is lost is begun again elsewhere, and goes
on from its checkpoints.
"""

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fclmodels.errors import UserError
from fclmodels.federation.ray_start import cluster
from fclmodels.params import load
from fclmodels.settings import Params
from flows import environment, servers
from flows.terminal import tell


def run_all(params: Path, overrides: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The run folders of those that ended well, and what the others said."""
    settings = load(params, overrides)
    names = [f"{method}-{seed}" for method in settings.experiment.methods for seed in settings.experiment.seeds]
    given = [word for text in overrides for word in ("--set", text)]
    ended, failed = [], []
    with cluster() as ray:
        refuse_what_one_machine_has(settings, {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]})
        environment.settle()
        surroundings = {"PREFECT_API_URL": servers.connect(environment.HOME), "PYTHONPATH": os.pathsep.join(sys.path)}
        remote = ray.remote(
            num_cpus=1 if settings.federation.threads == "auto" else settings.federation.threads,
            num_gpus=0 if settings.device == "cpu" else min(1, ray.cluster_resources().get("GPU", 0)),
            max_calls=1,  # a process for each
            runtime_env={"env_vars": surroundings},
        )(on_node)
        waiting = {}
        for name in names:
            method, _, seed = name.rpartition("-")
            words = ["run", "-m", method, "-s", seed, "--out", f"runs/{name}", "--params", str(params), "--quiet"]
            words += [*given, "--set", "federation.executor=serial"]
            waiting[remote.remote(json.dumps([str(Path.cwd()), words]))] = name
        while waiting:
            (done,), _ = ray.wait(list(waiting))
            name, said = waiting.pop(done), said_by(ray, done)
            if said is None:
                ended.append(name)
            else:
                failed.append(f"{name}: {said}")
            tell(f"{name}: {'done' if said is None else said} ({len(names) - len(waiting)} of {len(names)})")
    return [Path("runs") / name for name in names if name in ended], failed


def said_by(ray: Any, reference: Any) -> str | None:
    """What an experiment said that did not end well."""
    try:
        code, said = json.loads(ray.get(reference))
    except ray.exceptions.RayError as problem:
        return f"lost ({type(problem).__name__})"
    return None if code == 0 else said.strip() or f"exit code {code}"


def on_node(words: str) -> str:
    """On a node: the exit code of a command of `fcl` in the project's folder, and what it said."""
    from flows import cli, ending, options  # noqa: F401  cli has the commands

    folder, command = json.loads(words)
    said = io.StringIO()
    try:
        os.chdir(folder)
    except OSError as problem:
        return json.dumps([2, f"{os.uname().nodename} does not see {folder} ({problem.strerror}). Share it."])
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = ending.end_well(options.app, command)
    return json.dumps([code, said.getvalue()])


def refuse_what_one_machine_has(settings: Params, machines: set[str]) -> None:
    """Of several machines: Prefect's server of this project and a SQLite file are on one."""
    if len(machines) < 2:
        return
    if "PREFECT_API_URL" not in os.environ:
        raise UserError(
            f"the cluster has {len(machines)} machines, and the project's Prefect server answers on this one only. "
            "Start one that all reach (prefect server start --host ADDRESS) and set PREFECT_API_URL."
        )
    if not settings.tracking.uri.startswith(("http:", "https:")):
        raise UserError(
            f"tracking.uri: {settings.tracking.uri} is a file, and the cluster has {len(machines)} machines. "
            "Name an MLflow server that all reach."
        )
