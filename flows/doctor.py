"""What `fcl doctor` looks at: the machine, the versions, and whether the servers and the disk are there."""

import ipaddress
import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from fclmodels.errors import without_passwords
from fclmodels.federation import malloc
from flows import environment, servers

SCIENCE = ("torch", "torchvision", "numpy", "polars", "pydantic", "safetensors")
MLFLOW_PAGE = "api/2.0/mlflow/experiments/search?max_results=1"
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
    yield found("MLflow store", without_passwords(tracking_uri))
    yield from _open({os.environ.get("PREFECT_API_URL", ""): "admin/version", tracking_uri: MLFLOW_PAGE})


def found(what: str, value: str, well: bool = True) -> dict[str, str]:
    return {"what": what, "found": value, "state": "ok" if well else "PROBLEM"}


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _open(pages: dict[str, str]) -> Iterator[dict[str, str]]:
    """The servers that other machines reach, and that show a page to whoever asks."""
    for url, page in pages.items():
        if url.startswith("http") and _exposed(url) and servers.status(url, page) == 200:
            told = f"{without_passwords(url)} answers other machines without a password: see docs/deploy.md"
            yield {"what": "open server", "found": told, "state": "WARNING"}


def _exposed(url: str) -> bool:
    """Whether an address leads to another machine, or to a port on which this one listens to all."""
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        return not ipaddress.ip_address(address.hostname or "").is_loopback or _listens_to_all(port)
    except ValueError:
        return address.hostname != "localhost" or _listens_to_all(port)


def _listens_to_all(port: int) -> bool:
    """As Linux has it: 0A is the state of a socket that listens, 00... the address of all interfaces."""
    tables = [path for path in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if path.exists()]
    sockets = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    local = [socket[1].split(":") for socket in sockets if socket[3] == "0A"]
    return any(int(at, 16) == port and not int(address, 16) for address, at in local)


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
