"""The settings' experiments side by side on a Ray cluster, each as `fcl run` in a process of its own.

All nodes see the project's folder at the same path. If a node is lost, Ray starts its experiments again on another one,
where they resume from their checkpoints.
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
from fclmodels.federation.executors.ray.start import connect_cluster
from fclmodels.settings.load import load_params
from fclmodels.settings.schema import Params
from flows.cli.terminal import tell
from flows.prefect import environment, server


def run_experiments(params: Path, overrides: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Run all of them; return the run folders of those that succeeded, and an error line for each of the others."""
    settings = load_params(params, overrides)
    names = [f"{method}-{seed}" for method in settings.experiment.methods for seed in settings.experiment.seeds]
    options = [word for text in overrides for word in ("--set", text)]
    succeeded, failures = [], []
    with connect_cluster() as ray:
        refuse_local_servers(settings, {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]})
        environment.set_defaults()
        variables = {"PREFECT_API_URL": server.connect(environment.HOME), "PYTHONPATH": os.pathsep.join(sys.path)}
        remote = ray.remote(
            num_cpus=1 if settings.federation.threads == "auto" else settings.federation.threads,
            num_gpus=0 if settings.device == "cpu" else min(1, ray.cluster_resources().get("GPU", 0)),
            max_calls=1,  # a process for each
            runtime_env={"env_vars": variables},
        )(run_on_node)
        pending = {}
        for name in names:
            method, _, seed = name.rpartition("-")
            words = ["run", "-m", method, "-s", seed, "--out", f"runs/{name}", "--params", str(params), "--quiet"]
            words += [*options, "--set", "federation.executor=serial"]
            pending[remote.remote(json.dumps([str(Path.cwd()), words]))] = name
        while pending:
            (reference,), _ = ray.wait(list(pending))
            name, failure = pending.pop(reference), read_failure(ray, reference)
            if failure is None:
                succeeded.append(name)
            else:
                failures.append(f"{name}: {failure}")
            tell(f"{name}: {failure or 'done'} ({len(names) - len(pending)} of {len(names)})")
    return [Path("runs") / name for name in names if name in succeeded], failures


def read_failure(ray: Any, reference: Any) -> str | None:
    """Return the error line of an experiment that failed, None for one that succeeded."""
    try:
        code, errors = json.loads(ray.get(reference))
    except ray.exceptions.RayError as problem:
        return f"lost ({type(problem).__name__})"
    return None if code == 0 else errors.strip() or f"exit code {code}"


def run_on_node(order: str) -> str:
    """Run a command of `fcl` in the project's folder, on a node; as JSON: [folder, words] -> [exit code, stderr]."""
    from flows.cli.app import app, run_command_line

    folder, words = json.loads(order)
    errors = io.StringIO()
    try:
        os.chdir(folder)
    except OSError as problem:
        return json.dumps([2, f"{os.uname().nodename} has no folder {folder} ({problem.strerror}). Share it."])
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = run_command_line(app, words)
    return json.dumps([code, errors.getvalue()])


def refuse_local_servers(settings: Params, machines: set[str]) -> None:
    """Raise UserError where several machines would need this project's own Prefect server, or one SQLite file."""
    if len(machines) < 2:
        return
    if "PREFECT_API_URL" not in os.environ:
        raise UserError(
            f"the cluster has {len(machines)} machines, and the project's Prefect server is reachable from this one "
            "only. Start one that all reach (prefect server start --host ADDRESS) and set PREFECT_API_URL."
        )
    if not settings.tracking.uri.startswith(("http:", "https:")):
        raise UserError(
            f"tracking.uri: {settings.tracking.uri} is a file, and the cluster has {len(machines)} machines. "
            "Name an MLflow server that all reach."
        )
