"""Checks of `fcl doctor`: versions, machine, disk, and whether the servers answer."""

import ipaddress
import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from fclmodels.errors import hide_passwords
from fclmodels.federation.executors import glibc_malloc
from flows.prefect import environment, server

SCIENCE = ("torch", "torchvision", "numpy", "polars", "pydantic", "safetensors")
MLFLOW_PAGE = "api/2.0/mlflow/experiments/search?max_results=1"
WORKFLOW = ("prefect", "fastapi", "mlflow", "dvc")


def check_installation(tracking_uri: str) -> Iterator[dict[str, str]]:
    """Yield a row for each check: its subject, its value, and whether that is ok, a WARNING or a PROBLEM."""
    import torch

    yield make_row("python", platform.python_version())
    yield make_row("fclflow", find_version("fclflow") or "not installed, runs from its folder")
    remedies = dict.fromkeys(SCIENCE, "pip install fclflow") | dict.fromkeys(
        WORKFLOW, "pip install 'fclflow[workflow]'"
    )
    for name, remedy in remedies.items():
        version = find_version(name)
        yield make_row(name, version or f"missing: {remedy}", version is not None)
    yield make_row("torchvision loads", *_check_torchvision())
    yield make_row("cores", str(len(os.sched_getaffinity(0))))
    yield make_row("torch threads", str(torch.get_num_threads()))
    yield make_row("device", torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu (torch sees no GPU)")
    yield make_row("malloc", "tuned" if glibc_malloc.tune() else "not tuned: no glibc, training is 15 to 40 % slower")
    yield make_row("folder", str(Path.cwd()), os.access(Path.cwd(), os.W_OK))
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    yield make_row("disk", f"{free:.1f} GB free", free > 1)
    yield make_row("Prefect server", *_check_prefect())
    yield make_row("MLflow store", hide_passwords(tracking_uri))
    prefect_url = os.environ.get("PREFECT_API_URL", "")
    yield from _warn_of_open_servers({prefect_url: "admin/version", tracking_uri: MLFLOW_PAGE})


def make_row(what: str, value: str, is_ok: bool = True) -> dict[str, str]:
    return {"what": what, "found": value, "state": "ok" if is_ok else "PROBLEM"}


def find_version(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _warn_of_open_servers(pages: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yield a row for each server that other machines reach and that shows its page without a password."""
    for url, page in pages.items():
        if url.startswith("http") and _is_exposed(url) and server.request_status(url, page) == 200:
            warning = f"{hide_passwords(url)} answers other machines without a password: see docs/deploy.md"
            yield {"what": "open server", "found": warning, "state": "WARNING"}


def _is_exposed(url: str) -> bool:
    """Return whether an address is on another machine, or on a port on which this one listens to all machines."""
    address = urlsplit(url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        return not ipaddress.ip_address(address.hostname or "").is_loopback or _listens_to_all(port)
    except ValueError:
        return address.hostname != "localhost" or _listens_to_all(port)


def _listens_to_all(port: int) -> bool:
    """Return whether a socket listens on this port of all interfaces, by Linux's tables.

    There 0A is the state of a socket that listens, 00... the address of all interfaces.
    """
    tables = [path for path in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if path.exists()]
    sockets = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    local = [socket[1].split(":") for socket in sockets if socket[3] == "0A"]
    return any(int(at, 16) == port and not int(address, 16) for address, at in local)


def _check_torchvision() -> tuple[str, bool]:
    from fclmodels.optional.torchvision import import_torchvision

    try:
        return f"yes, {import_torchvision().__version__}", True
    except Exception as problem:  # a broken build may raise anything
        return f"no: {problem}", False


def _check_prefect() -> tuple[str, bool]:
    if external := os.environ.get("PREFECT_API_URL"):
        up = server.is_healthy(external)
        return f"{external} (PREFECT_API_URL){'' if up else ' does not answer'}", up
    url = server.find_running(environment.HOME)
    return f"{url}, the project's own" if url else "none runs; the first command that needs it starts it", True
