"""One Prefect server for a project: the first command that needs it starts it, the others use it.

Every command holds a shared lock on `lease` while it lives; the lock ends with the process however that ends. A server
whose lease nobody has held for IDLE seconds stops by itself. While a server may be used it holds `running`;
`server.json` has its address, and `start.lock` keeps two commands from starting one each. A command that sees the
server die starts another one at the same address, where Prefect's clients look for it for about a minute.
"""

import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

IDLE = float(os.environ.get("FCL_SERVER_IDLE_SECONDS", "60"))
START_TIMEOUT = 120.0
RESTARTS = 3
CREDENTIALS = ("PREFECT_API_AUTH_STRING", "PREFECT_API_KEY")

_leases: list[IO[bytes]] = []  # open for as long as this process lives


def connect(home: Path) -> str:
    """Return the API address of PREFECT_API_URL, or of the project's server, which is started if there is none.

    It may not answer yet (`wait_until_ready`). The project's server stays up while this process lives.
    """
    if external := os.environ.get("PREFECT_API_URL"):
        return external
    folder = home.resolve() / "prefect"
    folder.mkdir(parents=True, exist_ok=True)
    _take_lease(folder)
    with _hold_lock(folder / "start.lock"):
        url = find_running(home) or _start(folder)
    os.environ["PREFECT_API_URL"] = url
    return url


def find_running(home: Path) -> str | None:
    """Return the address of the project's server, None if none runs."""
    folder = home.resolve() / "prefect"
    try:
        with open(folder / "running", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return json.loads((folder / "server.json").read_text())["url"]


def wait_until_ready(url: str, home: Path, timeout: float = START_TIMEOUT) -> None:
    """Wait until the server answers; raise UserError at once for one that this project did not start."""
    end = time.monotonic() + timeout
    while not is_healthy(url):
        if find_running(home) != url or time.monotonic() > end:
            raise _make_no_answer_error(url, home)
        time.sleep(0.05)
    if not any(os.environ.get(name) for name in CREDENTIALS) and request_status(url, "admin/version") == 401:
        raise _make_user_error(f"PREFECT_API_URL: the server at {url} requires a password. Set {CREDENTIALS[0]}.")


def restart_if_dead(home: Path, on_first_death: Callable[[], None]) -> None:
    """Watch the project's server from a thread, and start another one, up to RESTARTS times, when it dies."""
    folder = home.resolve() / "prefect"

    def watch() -> None:
        for restart in range(RESTARTS):
            while find_running(home) is not None:
                time.sleep(1)
            if restart == 0:
                on_first_death()
            with suppress(OSError), _hold_lock(folder / "start.lock"):  # a full disk is reported by the run itself
                if find_running(home) is None:
                    _start(folder)

    threading.Thread(target=watch, daemon=True).start()


def is_healthy(url: str) -> bool:
    return request_status(url, "health") == 200


def request_status(url: str, page: str) -> int | None:
    """Request a page without credentials; return the HTTP status, None if the server does not answer."""
    address = urlsplit(url)
    connection_class = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    try:
        connection = connection_class(address.hostname or "", address.port, timeout=5)
        connection.request("GET", f"{address.path.rstrip('/')}/{page}")
        return connection.getresponse().status
    except (OSError, ValueError, http.client.HTTPException):
        return None


def choose_port(record: Path) -> int:
    """Return the port of the address in this file, where browsers know the pages, if it is free; else a free one."""
    try:
        port = urlsplit(json.loads(record.read_text())["url"]).port
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
        return int(port)
    except (OSError, ValueError, LookupError, TypeError):  # no record, a damaged one, a port in use
        return find_free_port()


def record_address(record: Path, url: str) -> None:
    """Write the address of a server to this file, for `choose_port`."""
    from fclmodels.storage.files import replace_file  # here, because the server runs this file by itself

    with replace_file(record) as temporary:
        temporary.write_text(json.dumps({"url": url}))


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _make_user_error(text: str) -> Exception:
    from fclmodels.errors import UserError  # here, because the server runs this file by itself, without the packages

    return UserError(text)


def _make_no_answer_error(url: str, home: Path) -> Exception:
    file = home / "prefect" / "server.json"
    if file.exists() and json.loads(file.read_text())["url"] == url:
        return _make_user_error(f"The Prefect server at {url} did not start. Its log: {file.with_name('server.log')}")
    return _make_user_error(f"PREFECT_API_URL: no Prefect server answers at {url}. Start it, or unset the variable.")


def _take_lease(folder: Path) -> None:
    lease = open(folder / "lease", "ab")  # noqa: SIM115  stays open
    fcntl.flock(lease, fcntl.LOCK_SH)
    _leases.append(lease)


def _start(folder: Path) -> str:
    """Start a detached server, on the port of the last one if that is free; return its address.

    It inherits the lock on `running`, so the lock is never free in between.
    """
    port = choose_port(folder / "server.json")
    url = f"http://127.0.0.1:{port}/api"
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    with open(folder / "running", "ab") as lock, open(folder / "server.log", "wb") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record_address(folder / "server.json", url)
        subprocess.Popen(
            [sys.executable, "-P", __file__, str(folder), str(port), str(lock.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=[lock.fileno()],
        )
    return url


@contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    with open(path, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _stop_when_idle(folder: Path, running_lock: int) -> None:
    """Watch the lease from inside the server's process, and end it when nobody has held the lease for IDLE seconds."""
    idle_since = time.monotonic()
    with open(folder / "lease", "ab") as lease:
        while True:
            time.sleep(min(1.0, IDLE / 4))
            try:
                fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                idle_since = time.monotonic()
                continue
            if time.monotonic() - idle_since > IDLE:
                os.close(running_lock)  # from here on a command starts a new server
                break
            fcntl.flock(lease, fcntl.LOCK_UN)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)
    os._exit(1)


def _serve(folder: Path, port: int, running_lock: int) -> None:
    threading.Thread(target=_stop_when_idle, args=(folder, running_lock), daemon=True).start()
    from prefect.cli import app

    sys.argv = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    app()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
