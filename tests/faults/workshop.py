"""Tiny projects to break: `fcl` in forks of one process that has imported everything, and what a run leaves behind.

The process of the workshop starts no thread and asks no library of those that do, so that its forks are sound.
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

from fclmodels.sealed import read_sealed
from fclmodels.store import Store

PATIENCE = 120  # seconds, after which a command hangs
OUT = Path("runs/run")
METHODS = ("fedprotip", "er")  # the one has much knowledge, with the other clients remember
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
Jump = tuple[float, float]  # of the clock: after so many seconds, by so many
UNLIKE = ("seconds", "timings", "files", "seal")  # of equal runs


class Lost(Exception):  # noqa: N818
    """A promise was broken."""


class Command:
    """`fcl` at work in a project: a fork of this process, or a process of its own."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self.log = pid, log
        self.memory = 0  # bytes that it held at most, once it has ended
        self._status: int | None = None

    @property
    def ended(self) -> bool:
        if self._status is None:
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.memory = 1024 * used.ru_maxrss
                self._status = os.waitstatus_to_exitcode(status)
        return self._status is not None

    def end(self, patience: float = PATIENCE) -> int:
        """Its exit code, or minus the signal that ended it."""
        until = time.monotonic() + patience
        while not self.ended:
            if time.monotonic() > until:
                self.kill()
                raise Lost(f"hangs: {' '.join(self.said.split())[-300:]}")
            time.sleep(0.005)
        assert self._status is not None
        return self._status

    def send(self, number: signal.Signals) -> None:
        if not self.ended:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.end()

    def workers(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.pid).children()
            return [child for child in children if "fclmodels.federation.worker" in child.cmdline()]
        return []

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")


class Project:
    """A folder with settings, data and an empty MLflow store."""

    def __init__(self, folder: Path, method: str) -> None:
        self.folder, self.method = folder, method
        self.settings: list[str] = []
        self._logs = 0

    def run(self, *settings: str, method: str | None = None, jumps: Sequence[Jump] = ()) -> Command:
        """`fcl run` in a fork."""
        return self.fork(*self._words(settings, method), jumps=jumps)

    def fork(self, *words: str, jumps: Sequence[Jump] = ()) -> Command:
        log = self._new_log()
        if pid := os.fork():
            return Command(pid, log)
        _let_the_clock_jump(jumps)
        _be(self.folder, log, words)
        raise AssertionError

    def real(self, *settings: str, **more: str) -> Command:
        """`fcl run` as a process of its own, on a Prefect server of its own."""
        log = self._new_log()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        with open(log, "w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "flows.cli", *self._words(settings, None)],
                cwd=self.folder,
                env=kept | {"FCL_SERVER_IDLE_SECONDS": "2"} | more,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        return Command(process.pid, log)

    def remains(self, method: str | None = None) -> dict[str, Any]:
        """All that a run leaves for people but times: equal for equal runs."""
        method = method or self.method
        folder = self.folder / OUT.with_name(f"{OUT.name}-{method}")
        if not (folder / "result.json").is_file():
            raise Lost("ended well, and left no result.json")
        result = {n: v for n, v in json.loads((folder / "result.json").read_text()).items() if n not in UNLIKE}
        for free in ("executor", "workers"):
            result["settings"]["federation"].pop(free)
        result["settings"].pop("tracking", None)
        files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
        told = {
            str(p.relative_to(folder)): sha256(p.read_bytes()).hexdigest()
            for p in files
            if p.name not in ("result.json", "settings.json", "rounds.parquet")
        }
        return {"result": result, "files": told, "tracked": tracked(self.folder / "mlflow.db", method)}

    def kept_rounds(self) -> list[list[Any]]:
        """Task, round and seconds of each round that the next run has not to train: in the store, or committed."""

        def rows() -> list[list[Any]]:
            store = Store(self.folder / ".fcl/store")
            named = [read_sealed(file)["objects"] for file in store.root.glob("done/*.json")]
            kept = [row for of in named if "rounds" in of for row in store.get_table(of["rounds"]).to_dicts()]
            for commit in self.folder.glob(".fcl/checkpoints/*/commit.json"):
                length, _ = read_sealed(commit)["logs"]["rounds"]
                lines = (commit.parent / "rounds.jsonl").read_bytes()[:length].splitlines()
                kept += map(json.loads, lines)
            return [[row["task"], row["round"], row["seconds"]] for row in kept]

        return in_a_fork(rows)

    def refuse_repeated(self, kept: Sequence[list[Any]]) -> None:
        """Rounds that were kept are in what the run left with the seconds that they took then; else Lost."""
        file = self.folder / OUT.with_name(f"{OUT.name}-{self.method}") / "rounds.parquet"
        found = in_a_fork(lambda: [list(row) for row in pl.read_parquet(file)["task", "round", "seconds"].rows()])
        if again := [row[:2] for row in kept if row not in found]:
            raise Lost(f"task and round {again} were kept, and trained again")

    def logged_rounds(self) -> int:
        """Rounds that MLflow has been told of."""
        with sqlite3.connect(f"file:{self.folder}/mlflow.db?mode=ro", uri=True) as store:
            query = "select count(*) from metrics m join tags t on t.run_uuid = m.run_uuid "
            query += "where m.key = 'train/loss' and t.key = 'method' and t.value = ?"
            (count,) = store.execute(query, (self.method,)).fetchone()
            return int(count)

    def _words(self, settings: Sequence[str], method: str | None) -> list[str]:
        method = method or self.method
        of_all = [word for one in (*self.settings, *settings) for word in ("--set", one)]
        return ["run", "-m", method, "-q", "--json", "--out", str(OUT.with_name(f"{OUT.name}-{method}")), *of_all]

    def _new_log(self) -> Path:
        self._logs += 1
        return self.folder.parent / f"{self.folder.name}-{self._logs}.log"


def in_a_fork(question: Callable[[], Any]) -> Any:
    """An answer of JSON, from a process that may start threads."""
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        with open(reader) as answer:
            told = answer.read()
        os.waitpid(pid, 0)
        return json.loads(told)
    try:
        with open(writer, "w") as answer:
            json.dump(question(), answer)
    finally:
        os._exit(0)


def _let_the_clock_jump(jumps: Sequence[Jump]) -> None:
    """In this process, for all that asks Python's `time`."""
    real, begun = time.time, time.monotonic()

    def jumping() -> float:
        now = time.monotonic() - begun
        return real() + sum(by for after, by in jumps if now >= after)

    if jumps:
        time.time = jumping
        time.time_ns = lambda: int(jumping() * 1e9)


def _be(folder: Path, log: Path, words: Sequence[str]) -> None:
    """A fork becomes the command, and ends as the interpreter would."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    code = 1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is off in what a shell starts in the background
    try:
        from prefect.settings import PREFECT_HOME, PREFECT_RESULTS_LOCAL_STORAGE_PATH, temporary_settings

        from flows.cli import app
        from flows.ending import end_well

        os.chdir(folder)
        own = {
            PREFECT_HOME: folder / ".fcl/prefect",
            PREFECT_RESULTS_LOCAL_STORAGE_PATH: folder / ".fcl/results",
        }
        with temporary_settings(own):
            code = end_well(app, words)
    except KeyboardInterrupt:  # before it has begun
        code = 130
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def tracked(database: Path, method: str) -> list[dict[str, Any]]:
    """What MLflow holds of a method, read past MLflow."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as store:

        def rows(query: str, *values: str) -> list[tuple[Any, ...]]:
            return store.execute(query, values).fetchall()

        runs = rows("select run_uuid from tags where key = 'method' and value = ?", method)
        return [
            {
                "status": rows("select status from runs where run_uuid = ?", run),
                "metrics": rows(
                    "select key, step, value from metrics "
                    "where run_uuid = ? and key not like '%seconds%' order by key, step",
                    run,
                ),
                "models": rows("select status from logged_models where source_run_id = ?", run),
                "data": rows("select count(*) from inputs where destination_id = ? and source_type = 'DATASET'", run),
                "artifacts": artifacts(database.parent / "mlartifacts", run),
            }
            for (run,) in runs
        ]


def artifacts(folder: Path, run: str) -> list[str]:
    found = [path for path in folder.glob(f"**/{run}/artifacts/**/*") if path.is_file()]
    return sorted(str(path).partition(f"{run}/artifacts/")[2] for path in found)


class Server:
    """A server on 127.0.0.1 in a process group of its own."""

    def __init__(self, command: Sequence[str], url: str, log: Path) -> None:
        self.command, self.url, self.log = command, url, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Server":
        from flows.servers import healthy

        with open(self.log, "ab") as file:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        until = time.monotonic() + PATIENCE
        while not healthy(self.url):
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
    """Where projects are made, beside one Prefect server for all; what undisturbed runs of each method leave."""

    def __init__(self, root: Path) -> None:
        from flows import environment, servers

        self.root = root
        environment.settle(root)
        port = servers.free_port()
        os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        self.prefect = Server(command, os.environ["PREFECT_API_URL"], root / "prefect-server.log")
        self.template = Project(root / "template", METHODS[0])
        self.undisturbed: dict[str, dict[str, Any]] = {}
        self.seconds: dict[str, float] = {}
        self._number = 0

    def open(self) -> None:
        self.prefect.start()
        import_all()
        self.template.folder.mkdir(parents=True)
        (self.template.folder / "params.yaml").write_text(SETTINGS)
        # A run of one round makes the data and MLflow's store, which takes seconds.
        for words in (["prepare", "-q"], ["partition", "-q"]):
            self.expect(self.template.fork(*words))
        self.expect(self.template.fork("run", "-m", "joint", "-q", "--set", "federation.rounds=1"))
        for left in ("runs", ".fcl/store", ".fcl/results", ".fcl/checkpoints", "mlartifacts"):
            shutil.rmtree(self.template.folder / left, ignore_errors=True)
        for method in METHODS:
            project = self.project(method)
            begun = time.monotonic()
            self.expect(project.run())
            self.seconds[method] = time.monotonic() - begun
            self.undisturbed[method] = project.remains()
            shutil.rmtree(project.folder)

    def close(self) -> None:
        self.prefect.kill()

    def project(self, method: str, folder: Path | None = None) -> Project:
        self._number += 1
        folder = folder or self.root / f"project-{self._number:03d}"
        shutil.copytree(self.template.folder, folder, dirs_exist_ok=True)
        # MLflow's artifacts are kept by an absolute address.
        with sqlite3.connect(folder / "mlflow.db") as store:
            here, there = (f"{place.resolve()}/mlartifacts" for place in (self.template.folder, folder))
            store.execute("update experiments set artifact_location = replace(artifact_location, ?, ?)", (here, there))
        return Project(folder, method)

    def expect(self, command: Command) -> None:
        if command.end() != 0:
            raise Lost(command.said)


def import_all() -> None:
    """What every fork would otherwise import, and read, again."""
    import torch

    import flows.experiment
    import flows.prepare
    import flows.stream  # noqa: F401
    import tasks.tracked_artifacts  # noqa: F401
    from fclmodels import plugins
    from fclmodels.federation import evaluation, rounds
    from fclmodels.fingerprint import source_closure

    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    for method in METHODS:
        source_closure(plugins.find("method", method).__module__, evaluation.__name__, rounds.__name__)
