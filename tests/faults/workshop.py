"""Tiny projects to break: `fcl` in forks of one process that has imported everything, and the results of a run.

The process of the workshop starts no thread and calls no library that does, so that its forks work.
"""

import atexit
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import polars as pl
import psutil

from fclmodels.storage.object_store import Store
from fclmodels.storage.sealed_json import read_sealed

PATIENCE = 120  # seconds, after which a command counts as hanging
OUT = Path("runs/run")
METHODS = ("fedprotip", "er")  # one with much knowledge, one whose clients have memories
SETTINGS = """
data: {source: digits}
stream: {kind: class-incremental, tasks: 2}
partition: {kind: iid, clients: 4, train_share: 0.25, test_share: 0.25}
model: {backbone: mlp, hidden: 16}
federation:
  rounds: 4
  executor: serial
  workers: 2
  threads: 1
  checkpoint_seconds: 0
  faults: {late: 0.3}
device: cpu
"""
Jump = tuple[float, float]  # of the clock: seconds after the start, size in seconds
VARYING = ("seconds", "timings", "peaks", "files", "seal")  # between equal runs


class BrokenPromise(Exception):  # noqa: N818
    """A run did not do what docs/reliability.md promises."""


class Command:
    """`fcl` at work in a project: a fork of this process, or a process of its own."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self.log = pid, log
        self.memory = 0  # bytes at most, set when it has ended
        self._status: int | None = None

    @property
    def has_ended(self) -> bool:
        if self._status is None:
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.memory = 1024 * used.ru_maxrss
                self._status = os.waitstatus_to_exitcode(status)
        return self._status is not None

    def wait(self, patience: float = PATIENCE) -> int:
        """Wait for the end; return the exit code, or minus the signal that ended it."""
        until = time.monotonic() + patience
        while not self.has_ended:
            if time.monotonic() > until:
                self.kill()
                raise BrokenPromise(f"hangs: {' '.join(self.output.split())[-300:]}")
            time.sleep(0.005)
        assert self._status is not None
        return self._status

    def send(self, number: signal.Signals) -> None:
        if not self.has_ended:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def find_workers(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.pid).children()
            return [child for child in children if "fclmodels.federation.executors.process_worker" in child.cmdline()]
        return []

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")


class Project:
    """A folder with settings, data and an empty MLflow store."""

    def __init__(self, folder: Path, method: str) -> None:
        self.folder, self.method = folder, method
        self.settings: list[str] = []
        self._logs = 0

    def run(self, *settings: str, method: str | None = None, jumps: Sequence[Jump] = ()) -> Command:
        """Start `fcl run` in a fork."""
        return self.fork(*self._make_words(settings, method), jumps=jumps)

    def fork(self, *words: str, jumps: Sequence[Jump] = ()) -> Command:
        log = self._create_log()
        if pid := os.fork():
            return Command(pid, log)
        _let_clock_jump(jumps)
        _become_command(self.folder, log, words)
        raise AssertionError

    def run_as_process(self, *settings: str, **variables: str) -> Command:
        """Start `fcl run` as a process of its own, on a Prefect server of its own."""
        log = self._create_log()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        with open(log, "w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "flows.cli.app", *self._make_words(settings, None)],
                cwd=self.folder,
                env=inherited | {"FCL_SERVER_IDLE_SECONDS": "2"} | variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        return Command(process.pid, log)

    def read_results(self, method: str | None = None) -> dict[str, Any]:
        """Return all results of a run without times: equal for equal runs."""
        method = method or self.method
        folder = self.folder / OUT.with_name(f"{OUT.name}-{method}")
        if not (folder / "result.json").is_file():
            raise BrokenPromise("succeeded without a result.json")
        result = {n: v for n, v in json.loads((folder / "result.json").read_text()).items() if n not in VARYING}
        for name in ("executor", "workers"):
            result["settings"]["federation"].pop(name)
        result["settings"].pop("tracking", None)
        files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
        digests = {
            str(p.relative_to(folder)): sha256(p.read_bytes()).hexdigest()
            for p in files
            if p.name not in ("result.json", "settings.json", "rounds.parquet")
        }
        return {"result": result, "files": digests, "tracked": read_tracked(self.folder / "mlflow.db", method)}

    def read_stored_rounds(self) -> list[list[Any]]:
        """Return task, round and seconds of each round in the store or in a checkpoint, which no run trains again."""

        def read_rows() -> list[list[Any]]:
            store = Store(self.folder / ".fcl/store")
            objects = [read_sealed(file)["objects"] for file in store.root.glob("done/*.json")]
            tables = [store.get_table(names["rounds"]) for names in objects if "rounds" in names]
            stored = [row for table in tables for row in table.to_dicts()]
            for commit in self.folder.glob(".fcl/checkpoints/*/commit.json"):
                length, _ = read_sealed(commit)["logs"]["rounds"]
                lines = (commit.parent / "rounds.jsonl").read_bytes()[:length].splitlines()
                stored += map(json.loads, lines)
            return [[row["task"], row["round"], row["seconds"]] for row in stored]

        return call_in_fork(read_rows)

    def refuse_repeated(self, stored: Sequence[list[Any]]) -> None:
        """Raise BrokenPromise unless the run's results have the stored rounds with the seconds that they took then."""
        file = self.folder / OUT.with_name(f"{OUT.name}-{self.method}") / "rounds.parquet"
        rows = call_in_fork(lambda: [list(row) for row in pl.read_parquet(file)["task", "round", "seconds"].rows()])
        if repeated := [row[:2] for row in stored if row not in rows]:
            raise BrokenPromise(f"task and round {repeated} were stored, and trained again")

    def count_logged_rounds(self) -> int:
        """Count the rounds that MLflow has."""
        with sqlite3.connect(f"file:{self.folder}/mlflow.db?mode=ro", uri=True) as store:
            query = "select count(*) from metrics m join tags t on t.run_uuid = m.run_uuid "
            query += "where m.key = 'train/loss' and t.key = 'method' and t.value = ?"
            (count,) = store.execute(query, (self.method,)).fetchone()
            return int(count)

    def _make_words(self, settings: Sequence[str], method: str | None) -> list[str]:
        method = method or self.method
        options = [word for setting in (*self.settings, *settings) for word in ("--set", setting)]
        return ["run", "-m", method, "-q", "--json", "--out", str(OUT.with_name(f"{OUT.name}-{method}")), *options]

    def _create_log(self) -> Path:
        self._logs += 1
        return self.folder.parent / f"{self.folder.name}-{self._logs}.log"


def call_in_fork(function: Callable[[], Any]) -> Any:
    """Return the result, as JSON, of a function that may start threads."""
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        with open(reader) as pipe:
            text = pipe.read()
        os.waitpid(pid, 0)
        return json.loads(text)
    try:
        with open(writer, "w") as pipe:
            json.dump(function(), pipe)
    finally:
        os._exit(0)


def _let_clock_jump(jumps: Sequence[Jump]) -> None:
    """Let Python's `time` jump in this process."""
    real, started = time.time, time.monotonic()

    def get_time() -> float:
        now = time.monotonic() - started
        return real() + sum(by for after, by in jumps if now >= after)

    if jumps:
        time.time = get_time
        time.time_ns = lambda: int(get_time() * 1e9)


def _become_command(folder: Path, log: Path, words: Sequence[str]) -> None:
    """Run the command in this fork, and end as the interpreter would."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    code = 1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is off in what a shell starts in the background
    try:
        from prefect.settings import PREFECT_HOME, PREFECT_RESULTS_LOCAL_STORAGE_PATH, temporary_settings

        from flows.cli.app import app, run_command_line

        os.chdir(folder)
        settings = {
            PREFECT_HOME: folder / ".fcl/prefect",
            PREFECT_RESULTS_LOCAL_STORAGE_PATH: folder / ".fcl/results",
        }
        with temporary_settings(settings):
            code = run_command_line(app, words)
    except KeyboardInterrupt:  # before the command has begun
        code = 130
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def read_tracked(database: Path, method: str) -> list[dict[str, Any]]:
    """Return MLflow's content of a method's runs, read from its database."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as store:

        def select(query: str, *values: str) -> list[tuple[Any, ...]]:
            return store.execute(query, values).fetchall()

        runs = select("select run_uuid from tags where key = 'method' and value = ?", method)
        return [
            {
                "status": select("select status from runs where run_uuid = ?", run),
                "metrics": select(
                    "select key, step, value from metrics "
                    "where run_uuid = ? and key not like '%seconds%' and key not like '%peak_%' order by key, step",
                    run,
                ),
                "models": select("select status from logged_models where source_run_id = ?", run),
                "data": select("select count(*) from inputs where destination_id = ? and source_type = 'DATASET'", run),
                "artifacts": list_artifacts(database.parent / "mlartifacts", run),
            }
            for (run,) in runs
        ]


def list_artifacts(folder: Path, run: str) -> list[str]:
    files = [path for path in folder.glob(f"**/{run}/artifacts/**/*") if path.is_file()]
    return sorted(str(path).partition(f"{run}/artifacts/")[2] for path in files)


class Server:
    """A server on 127.0.0.1 in a process group of its own."""

    def __init__(self, command: Sequence[str], url: str, log: Path) -> None:
        self.command, self.url, self.log = command, url, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Server":
        from flows.prefect.server import is_healthy

        with open(self.log, "ab") as file:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        until = time.monotonic() + PATIENCE
        while not is_healthy(self.url):
            assert time.monotonic() < until, self.log.read_text()[-2000:]
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            time.sleep(0.1)
        return self

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


class Workshop:
    """Makes projects, beside one Prefect server for all, and has the results of undisturbed runs of each method."""

    def __init__(self, root: Path) -> None:
        from flows.prefect import environment, server

        self.root = root
        environment.set_defaults(root)
        port = server.find_free_port()
        os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        self.prefect = Server(command, os.environ["PREFECT_API_URL"], root / "prefect-server.log")
        self.template = Project(root / "template", METHODS[0])
        self.undisturbed: dict[str, dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}
        self._number = 0

    def open(self) -> None:
        self.prefect.start()
        import_everything()
        self.template.folder.mkdir(parents=True)
        (self.template.folder / "params.yaml").write_text(SETTINGS)
        # A run of one round creates the data and MLflow's store, which takes seconds.
        for words in (["prepare", "-q"], ["partition", "-q"]):
            self.expect_success(self.template.fork(*words))
        self.expect_success(self.template.fork("run", "-m", "joint", "-q", "--set", "federation.rounds=1"))
        for name in ("runs", ".fcl/store", ".fcl/results", ".fcl/checkpoints", "mlartifacts"):
            shutil.rmtree(self.template.folder / name, ignore_errors=True)
        for method in METHODS:
            project = self.create_project(method)
            started = time.monotonic()
            self.expect_success(project.run())
            self.seconds[method] = time.monotonic() - started
            self.undisturbed[method] = project.read_results()
            shutil.rmtree(project.folder)

    def close(self) -> None:
        self.prefect.kill()

    def create_project(self, method: str, folder: Path | None = None) -> Project:
        self._number += 1
        folder = folder or self.root / f"project-{self._number:03d}"
        shutil.copytree(self.template.folder, folder, dirs_exist_ok=True)
        # MLflow has absolute addresses of artifacts.
        with sqlite3.connect(folder / "mlflow.db") as store:
            here, there = (f"{place.resolve()}/mlartifacts" for place in (self.template.folder, folder))
            store.execute("update experiments set artifact_location = replace(artifact_location, ?, ?)", (here, there))
        return Project(folder, method)

    def expect_success(self, command: Command) -> None:
        if command.wait() != 0:
            raise BrokenPromise(command.output)


def import_everything() -> None:
    """Import, and read, all that every fork would have to again."""
    import torch

    import flows.experiment
    import flows.prepare
    import flows.stream  # noqa: F401
    import tasks.mlflow.artifacts  # noqa: F401
    from fclmodels import plugins
    from fclmodels.federation import evaluation
    from fclmodels.federation.engine import rounds
    from fclmodels.source_digest import digest_sources

    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    for method in METHODS:
        digest_sources(plugins.find("method", method).__module__, evaluation.__name__, rounds.__name__)
