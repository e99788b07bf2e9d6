"""One Prefect server for a project: the first command that needs it starts it, the others find it.

Every command holds a shared lock on `lease` while it lives, which ends with the process however that ends. A
server that has seen nobody hold it for IDLE seconds stops by itself. While a server may be used it holds
`running`; `server.json` says where it is, and `start.lock` keeps two commands from starting one each. A command that
sees the server die starts another one at the same address, where Prefect's clients look for it for about a minute.
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
    """The API address of the project's server, which may still be starting; it stays up while this process lives."""
    if given := os.environ.get("PREFECT_API_URL"):
        return given
    folder = home.resolve() / "prefect"
    folder.mkdir(parents=True, exist_ok=True)
    _take_lease(folder)
    with _locked(folder / "start.lock"):
        url = running(home) or _start(folder)
    os.environ["PREFECT_API_URL"] = url
    return url


def running(home: Path) -> str | None:
    """The address of the project's server if there is one."""
    folder = home.resolve() / "prefect"
    try:
        with open(folder / "running", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return json.loads((folder / "server.json").read_text())["url"]


def wait(url: str, home: Path, timeout: float = START_TIMEOUT) -> None:
    """Until the server answers. One that this project did not start gets no patience."""
    end = time.monotonic() + timeout
    while not healthy(url):
        if running(home) != url or time.monotonic() > end:
            raise _no_answer(url, home)
        time.sleep(0.05)
    if not any(os.environ.get(name) for name in CREDENTIALS) and status(url, "admin/version") == 401:
        raise _user_error(f"PREFECT_API_URL: the server at {url} wants a password. Set {CREDENTIALS[0]}.")


def keep_up(home: Path, if_dead: Callable[[], None]) -> None:
    """Start another server, some times, where the project's own has died while this process lives; say so once."""
    folder = home.resolve() / "prefect"

    def watch() -> None:
        for restart in range(RESTARTS):
            while running(home) is not None:
                time.sleep(1)
            if restart == 0:
                if_dead()
            with suppress(OSError), _locked(folder / "start.lock"):  # a full disk is told of by what needs it
                if running(home) is None:
                    _start(folder)

    threading.Thread(target=watch, daemon=True).start()


def healthy(url: str) -> bool:
    return status(url, "health") == 200


def status(url: str, page: str) -> int | None:
    """With what a server answers to a request without credentials, None where it does not."""
    address = urlsplit(url)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    try:
        connection = kind(address.hostname or "", address.port, timeout=5)
        connection.request("GET", f"{address.path.rstrip('/')}/{page}")
        return connection.getresponse().status
    except (OSError, ValueError, http.client.HTTPException):
        return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _user_error(text: str) -> Exception:
    from fclmodels.errors import UserError  # not above: the server itself runs this file without the packages

    return UserError(text)


def _no_answer(url: str, home: Path) -> Exception:
    known = home / "prefect" / "server.json"
    if known.exists() and json.loads(known.read_text())["url"] == url:
        return _user_error(f"The Prefect server at {url} did not come up. Its log: {known.with_name('server.log')}")
    return _user_error(f"PREFECT_API_URL: no Prefect server answers at {url}. Start it, or unset the variable.")


def _take_lease(folder: Path) -> None:
    lease = open(folder / "lease", "ab")  # noqa: SIM115  stays open
    fcntl.flock(lease, fcntl.LOCK_SH)
    _leases.append(lease)


def _start(folder: Path) -> str:
    """A detached server, where the last one was if that can be; it inherits the lock on `running`, so there is no
    moment without one."""
    port = _last_port(folder) or free_port()
    url = f"http://127.0.0.1:{port}/api"
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    with open(folder / "running", "ab") as lock, open(folder / "server.log", "wb") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        temporary = folder / ".server.json"
        temporary.write_text(json.dumps({"url": url}))
        os.replace(temporary, folder / "server.json")
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


def _last_port(folder: Path) -> int | None:
    """That of the server before, unless something else has taken it."""
    try:
        port = int(json.loads((folder / "server.json").read_text())["url"].split(":")[2].split("/")[0])
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
        return port
    except (OSError, ValueError, LookupError):
        return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _stop_when_idle(folder: Path, running_lock: int) -> None:
    """Watch the lease from inside the server's process, and end it when nobody has held it for long enough."""
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
