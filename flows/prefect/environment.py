"""Environment variables of Prefect, MLflow and their dependencies: where they write, and no telemetry.

They read these variables when they are imported, so `set_defaults` comes before; variables that the user has set stay.
"""

import os
from pathlib import Path


def find_project() -> Path:
    """Return the current folder, or that of the project where DVC runs an experiment in a temporary copy of it."""
    copies = (folder for folder in Path.cwd().parents if folder.parts[-3:] == (".dvc", "tmp", "exps"))
    return next((folder.parents[2] for folder in copies), Path())


HOME = find_project() / ".fcl"
TRACKING_PATHS = ("mlflow.db", "mlartifacts")  # where runs are tracked by default


def set_defaults(home: Path = HOME) -> None:
    """Set the variables that are not set, so that Prefect, MLflow and others write into `home`."""
    folder = home.resolve()
    for name in TRACKING_PATHS if find_project().is_absolute() else ():
        if not os.path.lexists(name):
            os.symlink(find_project() / name, name)
    (folder / "prefect").mkdir(parents=True, exist_ok=True)  # Prefect warns where its parent folder is missing
    defaults = {
        "DO_NOT_TRACK": "true",
        "GIT_PYTHON_REFRESH": "quiet",
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        # A tracking server that does not answer is reported within seconds, before any work.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
        "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # its exceptions are reported
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the server's address, which would stand between JSON
        "MPLCONFIGDIR": str(folder / "matplotlib"),
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # the flows print their own progress; the UI has the logs
        "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",  # else each event that the server refuses is printed
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # else a study that is interrupted warns of lost lines
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(folder / "results"),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # Many small writes lock SQLite, and a client that meets the lock waits for two seconds.
        "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "50",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "50",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "50",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_UI_API_URL": "/api",  # beside the pages, whatever port or tunnel shows them; else they ask port 4200
        "PREFECT_UI_STATIC_DIRECTORY": str(folder / "prefect" / "ui"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    for name in ("no_proxy", "NO_PROXY"):  # the servers are on this machine
        hosts = os.environ.get(name, "")
        os.environ[name] = ",".join(filter(None, [hosts, *{"127.0.0.1", "localhost"}.difference(hosts.split(","))]))
