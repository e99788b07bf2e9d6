"""What `fcl doctor` looks at: the machine, the versions, and whether the servers and the disk are there."""

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from fclmodels.federation import malloc
from flows import environment, servers

SCIENCE = ("torch", "torchvision", "numpy", "polars", "pydantic", "safetensors")
WORKFLOW = ("prefect", "fastapi", "mlflow", "dvc")


def findings(tracking_uri: str) -> Iterator[dict[str, str]]:
    """Rows of what was looked at, what was found, and whether that is well."""
    import torch

    yield found("python", platform.python_version())
    yield found("fclflow", version("fclflow") or "not installed, runs from its folder")
    for name in SCIENCE:
        yield found(name, version(name) or "missing: pip install fclflow", version(name) is not None)
    for name in WORKFLOW:
        yield found(name, version(name) or "missing: pip install 'fclflow[workflow]'", version(name) is not None)
    yield found("torchvision loads", *_torchvision())
    yield found("cores", str(len(os.sched_getaffinity(0))))
    yield found("torch threads", str(torch.get_num_threads()))
    yield found("device", torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu (torch sees no GPU)")
    yield found("malloc", "tuned" if malloc.tune() else "not tuned: no glibc, training is 15 to 40 % slower")
    yield found("folder", str(Path.cwd()), os.access(Path.cwd(), os.W_OK))
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    yield found("disk", f"{free:.1f} GB free", free > 1)
    yield found("Prefect server", *_prefect())
    yield found("MLflow store", tracking_uri)


def found(what: str, value: str, well: bool = True) -> dict[str, str]:
    return {"what": what, "found": value, "state": "ok" if well else "PROBLEM"}


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torchvision() -> tuple[str, bool]:
    from fclmodels.torchvision_guard import torchvision

    try:
        return f"yes, {torchvision().__version__}", True
    except Exception as problem:  # a broken build may raise anything
        return f"no: {problem}", False


def _prefect() -> tuple[str, bool]:
    if given := os.environ.get("PREFECT_API_URL"):
        up = servers.healthy(given)
        return f"{given} (PREFECT_API_URL){'' if up else ' does not answer'}", up
    url = servers.running(environment.HOME)
    return f"{url}, the project's own" if url else "none runs; the first command that needs it starts it", True
