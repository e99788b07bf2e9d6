"""`fcl ui`: MLflow's pages on 127.0.0.1, and Prefect's beside them."""

import ctypes
import os
import signal
import subprocess
import sys
import time

from fclmodels.errors import UserError
from flows import environment, servers

START_TIMEOUT = 60.0
LOG = "mlflow-server.log"


def serve(tracking_uri: str, port: int) -> None:
    """Until Ctrl-C. Both servers end with this process."""
    if tracking_uri.startswith("http"):
        raise UserError(f"tracking.uri: {tracking_uri} is a server already. Open it in a browser.")
    environment.settle()
    import mlflow  # noqa: F401  says at once that it is missing

    prefect = servers.connect(environment.HOME)
    port = port or servers.free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with open(environment.HOME / LOG, "wb") as output:
        # The address of a database may hold a password, which everybody would see in a list of processes.
        quiet = {**os.environ, "MLFLOW_BACKEND_STORE_URI": tracking_uri, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        server = subprocess.Popen(
            command, env=quiet, stdout=output, stderr=output, start_new_session=True, preexec_fn=_end_with_parent
        )
    try:
        _wait(server, port)
        servers.wait(prefect, environment.HOME)
        print(
            f"MLflow   http://127.0.0.1:{port}\nPrefect  {prefect.removesuffix('/api')}\nCtrl-C stops them.", flush=True
        )
        while server.poll() is None:  # not wait(): Polars has set up SIGINT so that it does not interrupt system calls
            time.sleep(0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.terminate()
        server.wait()


def _end_with_parent() -> None:
    """On Linux a process can ask for a signal when its parent dies, however it dies."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGTERM)


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + START_TIMEOUT
    while not servers.healthy(f"http://127.0.0.1:{port}"):
        if server.poll() is not None or time.monotonic() > end:
            raise UserError(f"MLflow's server did not come up on port {port}. Its log: {environment.HOME / LOG}")
        time.sleep(0.1)
