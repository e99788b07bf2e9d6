"""Where Prefect, MLflow and what they bring write, and that nothing phones home.

They read these variables when they are imported, so `settle` comes before; what a user has set stands.
"""

import os
from pathlib import Path


def project() -> Path:
    """This folder; but that of the project where DVC runs an experiment in a copy, which goes with all but its outs."""
    copies = (folder for folder in Path.cwd().parents if folder.parts[-3:] == (".dvc", "tmp", "exps"))
    return next((folder.parents[2] for folder in copies), Path())


HOME = project() / ".fcl"
TRACKED = ("mlflow.db", "mlartifacts")  # where runs are tracked by default


def settle(home: Path = HOME) -> None:
    folder = home.resolve()
    for name in TRACKED if project().is_absolute() else ():
        if not os.path.lexists(name):
            os.symlink(project() / name, name)
    (folder / "prefect").mkdir(parents=True, exist_ok=True)  # Prefect warns where even the folder above is missing
    defaults = {
        "DO_NOT_TRACK": "true",
        "GIT_PYTHON_REFRESH": "quiet",
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        # A tracking server that does not answer is told of within seconds, before any work.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
        "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # what it raises is told
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # a server's; there may be JSON
        "MPLCONFIGDIR": str(folder / "matplotlib"),
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # the flows tell what happens; the UI has the logs
        "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",  # else each event that a server does not take is printed
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(folder / "results"),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # Many small writes lock SQLite, and a client that meets the lock waits for two seconds.
        "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "50",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "50",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "50",
        "PREFECT_UI_STATIC_DIRECTORY": str(folder / "prefect" / "ui"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    for name in ("no_proxy", "NO_PROXY"):  # the servers are on this machine
        known = os.environ.get(name, "")
        os.environ[name] = ",".join(filter(None, [known, *{"127.0.0.1", "localhost"}.difference(known.split(","))]))
