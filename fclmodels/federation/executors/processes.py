"""The executor `processes`: clients run in persistent worker processes of one thread each (or as set).

The payload is in shared memory, written once a round. A worker writes its reply into a shared buffer of its own and
goes on with the next client while the main process reads the reply; before it writes again it waits for a message that
the buffer is free. Control messages are JSON lines over a socket. A worker that dies is replaced and its client run
again, which cannot change the result.

Workers end with their executor. Where several runs follow one another in a process (`share_workers`), the next run's
executor sets up the last one's workers again, which spares it their start.
"""

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fclmodels import machine
from fclmodels.errors import UserError
from fclmodels.federation.executors.base import ClientResult, Job
from fclmodels.federation.executors.process_worker import convert_job_to_tree, set_up_of
from fclmodels.federation.messages import Reply, SharedBuffer, convert_tree_to_parts

if TYPE_CHECKING:
    from fclmodels.federation.method import Method

DEATHS_OF_ONE_CLIENT = 3


class SharedWorkers:
    """Workers that wait for the next executor, and the payload that all of them read."""

    def __init__(self) -> None:
        self.payload = SharedBuffer()
        self.idle: list[Worker] = []


_shared: ContextVar[SharedWorkers | None] = ContextVar("shared_workers", default=None)


@contextlib.contextmanager
def share_workers() -> Iterator[None]:
    """Let executors in this context leave their workers to those that come after them."""
    shared = SharedWorkers()
    token = _shared.set(shared)
    try:
        yield
    finally:
        _shared.reset(token)
        for worker in shared.idle:
            worker.stop()


class Processes:
    """The executor."""

    def __init__(self, method: "Method", params_file: Path, workers: int, threads: int) -> None:
        self.method = method
        self._shared = _shared.get()
        self.payload = self._shared.payload if self._shared else SharedBuffer()
        self._set_up = set_up_of(method, threads) | {"params": str(params_file.absolute())}
        self._count = workers
        self._workers: list[Worker] = []
        self._memory_kills = machine.count_memory_kills()

    def run(self, job: Job, clients: Sequence[int], memories: Mapping[int, Path]) -> Iterator[ClientResult]:
        message = {"job": self.payload.write(convert_job_to_tree(job))}
        orders = [{"client": c, "memory": str(memories[c].absolute()) if c in memories else None} for c in clients]
        deaths: dict[int, int] = {}
        busy, finished = 0, False
        try:
            with selectors.DefaultSelector() as selector:
                for worker in self._start_workers(min(self._count, len(clients))):
                    worker.send(message)
                    busy += worker.take(orders)
                    selector.register(worker.socket, selectors.EVENT_READ, worker)
                while busy:
                    for key, _ in selector.select():
                        worker = key.data
                        answer = worker.receive()
                        busy -= 1
                        if answer is None:
                            selector.unregister(worker.socket)
                            orders.insert(0, self._bury(worker, deaths))
                            worker.start()
                            worker.send(message)
                            selector.register(worker.socket, selectors.EVENT_READ, worker)
                        busy += worker.take(orders)
                        if answer is not None:
                            yield answer
                            worker.send({"taken": True})
            finished = True
        finally:
            if not finished:  # interrupted: nobody reads what these workers still answer
                self._stop_workers()

    def read_peak_memory(self) -> int | None:
        """Return the most bytes that a worker has held."""
        return max((worker.read_peak_memory() for worker in self._workers), default=None)

    def close(self) -> None:
        if self._shared:
            for worker in self._workers:
                worker.forget()
            self._shared.payload.empty()
            self._shared.idle += self._workers
            self._workers = []
        self._stop_workers()

    def _stop_workers(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def _start_workers(self, count: int) -> list["Worker"]:
        """Return so many workers; start those that do not run yet."""
        while len(self._workers) < count:
            idle = self._shared.idle if self._shared else []
            worker = idle.pop() if idle else Worker(self.payload)
            worker.set_up(self._set_up)
            self._workers.append(worker)
        return self._workers[:count]

    def _bury(self, worker: "Worker", deaths: dict[int, int]) -> dict[str, Any]:
        """Return a dead worker's order, to be run again; raise an error where workers keep dying on its client."""
        order, code = worker.order, worker.stop()
        assert order is not None
        client = order["client"]
        deaths[client] = deaths.get(client, 0) + 1
        if deaths[client] < DEATHS_OF_ONE_CLIENT:
            return order
        if machine.count_memory_kills() > self._memory_kills:
            raise UserError(
                f"client {client}: memory ran out, and its worker process was killed {deaths[client]} times. "
                f"Set fewer federation.workers (here {len(self._workers)}), or a smaller batch_size or model."
            )
        raise RuntimeError(f"client {client}: its worker process died {deaths[client]} times (exit code {code})")


class Worker:
    """The main process's end of one worker."""

    def __init__(self, payload: SharedBuffer) -> None:
        self._payload = payload
        self._reply = SharedBuffer()
        self._set_up: dict[str, Any] = {}
        self.order: dict[str, Any] | None = None
        self._start_process()

    def set_up(self, facts: dict[str, Any]) -> None:
        """Send the process the facts of a run."""
        self._set_up = facts
        self.send({"set_up": facts})

    def forget(self) -> None:
        """Let the process free what it has of its run."""
        self.send({"set_up": None})
        self._reply.empty()

    def start(self) -> None:
        """Start the process again, for the same run."""
        self._start_process()
        self.set_up(self._set_up)

    def _start_process(self) -> None:
        self.socket, theirs = socket.socketpair()
        descriptors = [theirs.fileno(), self._payload.descriptor, self._reply.descriptor]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fclmodels.federation.executors.process_worker", *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        theirs.close()
        self._lines = self.socket.makefile("rb")

    def read_peak_memory(self) -> int:
        """Return the most bytes that the process has held; 0 where it has ended."""
        return machine.read_status("VmHWM", self._process.pid) or 0

    def send(self, message: dict[str, Any]) -> None:
        # A worker that has died is noticed when its answer is read.
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def take(self, orders: list[dict[str, Any]]) -> int:
        """Send the next order, if there is one; return how many were sent."""
        self.order = orders.pop(0) if orders else None
        if self.order is None:
            return 0
        self.send(self.order)
        return 1

    def receive(self) -> ClientResult | None:
        """Return the answer to the order; None where the worker has died."""
        try:
            line = self._lines.readline()
        except ConnectionError:
            line = b""
        if not line:
            return None
        message = json.loads(line)
        if "error" in message:
            raise (UserError if message["user"] else RuntimeError)(message["error"])
        parts = convert_tree_to_parts(self._reply.read(message["size"]))
        memory = Path(message["memory"]) if message["memory"] else None
        return ClientResult(message["client"], Reply(parts, **message["facts"]), memory, message["seconds"])

    def stop(self) -> int:
        """Close the socket, at which the process ends; return its exit code."""
        self._lines.close()
        self.socket.close()
        try:
            return self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
