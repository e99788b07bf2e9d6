"""`fcl ui`: MLflow's pages on 127.0.0.1, and Prefect's beside them."""

import os
import subprocess
import sys
import time

from fclmodels.errors import UserError
from fclmodels.machine import end_with_parent
from flows.prefect import environment
from flows.prefect import server as prefect_server

START_TIMEOUT = 60.0
LOG, RECORD = "mlflow-server.log", "mlflow-server.json"


def serve_pages(tracking_uri: str, port: int) -> None:
    """Serve both until Ctrl-C, MLflow's on this port or, if 0, on the last one. The servers end with this process."""
    if tracking_uri.startswith("http"):
        raise UserError(f"tracking.uri: {tracking_uri} is a server already. Open it in a browser.")
    environment.set_defaults()
    from mlflow import MlflowClient  # before all else, to report at once that it is missing

    from tasks.mlflow.saved_view import AS_CHARTS, list_addresses

    prefect = prefect_server.connect(environment.HOME)
    port = port or prefect_server.choose_port(environment.HOME / RECORD)
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with open(environment.HOME / LOG, "wb") as output:
        # Not as an argument: the address of a database may hold a password, and all users see arguments of processes.
        variables = {"MLFLOW_BACKEND_STORE_URI": tracking_uri, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        server = subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    try:
        _wait_for_mlflow(server, port)
        prefect_server.wait_until_ready(prefect, environment.HOME)
        mlflow = f"http://127.0.0.1:{port}"
        prefect_server.record_address(environment.HOME / RECORD, mlflow)
        addresses = list_addresses(MlflowClient(mlflow), mlflow)
        lines = [] if addresses else [f"MLflow   no runs yet  {mlflow}"]
        for name, address in addresses.items():
            lines += [f"MLflow   {name}  {address}", f"charts   {name}  {address}{AS_CHARTS}"]
        print(*lines, f"Prefect  {prefect.removesuffix('/api')}", "Ctrl-C stops them.", sep="\n", flush=True)
        while server.poll() is None:  # not wait(): Polars has set up SIGINT so that it does not interrupt system calls
            time.sleep(0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.terminate()
        server.wait()


def _wait_for_mlflow(server: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + START_TIMEOUT
    while not prefect_server.is_healthy(f"http://127.0.0.1:{port}"):
        if server.poll() is not None or time.monotonic() > end:
            raise UserError(f"MLflow's server did not start on port {port}. Its log: {environment.HOME / LOG}")
        time.sleep(0.1)
