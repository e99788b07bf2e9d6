"""The executor `ray`: clients run on a cluster, in actors of one thread each (or as set), each with its share of GPUs.

The payload of a round is put into the object store once. Clients go out in chunks; an actor has the next chunk while
it works on one. Samples are memory-mapped where a node sees the splits' folder, and come from the object store where it
does not; clients' memories always travel. Actors inspect replies and sum the parts that the server needs as sums only,
along the same tree as here, so that the bits are the same. Actors that are lost, alone or with their node, are replaced
as soon as the cluster has room, and their chunks run again, which cannot change the result.

Ray gets bytes, strings and numbers from us, which it sends raw or as msgpack: no message of ours is pickled. It pickles
the class `Host`, its own exceptions and its records; without a token its ports let everyone in.
"""

import contextlib
import json
import math
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from fclmodels import machine
from fclmodels.errors import UserError
from fclmodels.federation.executors.base import ClientResult, Job
from fclmodels.federation.executors.process_worker import convert_job_to_tree, digest_code, set_up_of
from fclmodels.federation.executors.ray.actor import Host, read_content
from fclmodels.federation.executors.ray.start import connect_cluster
from fclmodels.federation.messages import Block, Reply, convert_tree_to_parts, from_bytes, to_bytes
from fclmodels.federation.protection.inspection import Finding, ReplyDefect, describe_form
from fclmodels.federation.protection.secure_aggregation import find_secrets_file
from fclmodels.plugins import find, is_of_project
from fclmodels.settings.schema import CHOICES
from fclmodels.storage import trees
from fclmodels.storage.files import replace_file
from fclmodels.storage.trees import Tree

if TYPE_CHECKING:
    from fclmodels.federation.method import Method

CHUNKS = 4  # for each actor in an exchange, so that none begins with many clients when the others are ready
AHEAD = 2  # chunks that an actor has at a time, so that it never waits for the next one
DEATHS_OF_ONE_CHUNK = 3
PATIENCE = 300.0  # seconds without any actor, where the cluster has no room for one


class Chunk(NamedTuple):
    """Clients that are a node of the tree over all clients of an exchange (replies.py)."""

    level: int  # it has 2**level clients; the last chunk may have fewer
    place: int  # of the node in its level
    clients: tuple[int, ...]


class RayCluster:
    """The executor."""

    def __init__(self, method: "Method", params_file: Path, workers: int | None, threads: int) -> None:
        self.method = method
        self._opened = contextlib.ExitStack()
        self.ray = self._opened.enter_context(connect_cluster(threads * workers if workers else None))
        resources = self.ray.cluster_resources()
        self._memory_kills = machine.count_memory_kills()
        self._count = workers or max(1, int(resources.get("CPU", 1)) // threads)
        self._set_up = json.dumps(
            set_up_of(method, threads)
            | {
                "params": {**json.loads(params_file.read_text()), "device": method.run.device.type},
                "beside": str(params_file.absolute()),  # a node that sees this file sees the folder home too
                "code": digest_code(method),
                "folder": str(Path.cwd()),
                "needs_folder": needs_folder(method),
            }
        )
        self._options = {
            "num_cpus": threads,
            "num_gpus": 0 if method.run.device.type == "cpu" else min(1.0, resources.get("GPU", 0) / self._count),
            "scheduling_strategy": "SPREAD",
            "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
        }
        self._data: list[Any] = []
        self._actors: list[Actor] = []

    def run(self, job: Job, clients: Sequence[int], memories: Mapping[int, Path]) -> Iterator[ClientResult]:
        remaining, chunks = len(clients), split_into_chunks(clients, self._count)
        while len(self._actors) < min(self._count, len(chunks)):
            self._actors.append(self._start_actor())
        begin = self.ray.put(to_bytes(convert_job_to_tree(job)))
        for actor in self._actors:
            actor.begun = False
        deaths = Counter[int | None]()
        try:
            while remaining:
                while chunks and (free := self._choose_least_busy()):
                    free.give(chunks.popleft(), begin, lambda clients: _order(job, clients, memories))
                message, chunk = self._receive_message(chunks, deaths)
                if chunk is not None:
                    remaining -= len(chunk.clients)
                    yield from _yield_results(message, chunk, job, memories)
        finally:
            if remaining:  # interrupted: nobody reads what these actors still answer
                self._end_actors()

    def read_peak_memory(self) -> None:
        """Return None: no worker's process is this one's child."""

    def close(self) -> None:
        self._end_actors()
        self._data = []
        self._opened.close()

    def _start_actor(self) -> "Actor":
        """Start an actor."""
        return Actor(self.ray, self.ray.remote(Host).options(**self._options).remote(), self._set_up)

    def _choose_least_busy(self) -> "Actor | None":
        """Return the actor for the next chunk: none gets its second chunk before all have their first."""
        free = [actor for actor in self._actors if actor.ready and actor.chunks < AHEAD]
        return min(free, key=lambda actor: actor.chunks, default=None)

    def _end_actors(self) -> None:
        for actor in self._actors:
            actor.end()
        self._actors = []

    def _receive_message(self, chunks: deque[Chunk], deaths: Counter[int | None]) -> tuple[Tree, Chunk | None]:
        """Return answers and their chunk; no chunk where an actor has become ready, or was lost and replaced."""
        actor = self._wait_for_actor()
        try:
            message, chunk = actor.answer()
        except self.ray.exceptions.RayError as problem:
            lost = actor.end()
            chunks.extendleft(reversed(lost))
            self._actors[self._actors.index(actor)] = self._start_actor()
            if lost or not actor.ready:
                self._count_death(deaths, lost[0] if lost else None, problem)
            return {}, None
        if "needs data" in message:
            actor.call("fetch", *self._publish_data())
        elif chunk is None:
            actor.ready = True
        return message, chunk

    def _wait_for_actor(self) -> "Actor":
        """Return an actor whose oldest call has ended. Meanwhile Ray starts actors where it has room."""
        calls = {actor.waiting[0][0]: actor for actor in self._actors if actor.waiting}
        while not (finished := self.ray.wait(list(calls), timeout=PATIENCE)[0]):
            if not any(actor.ready for actor in self._actors):
                room = f"{self._options['num_cpus']} CPUs and {self._options['num_gpus']} GPUs"
                raise UserError(
                    f"federation.executor: ray: the cluster had no room for an actor ({room}) in {PATIENCE:.0f} s. "
                    "Add a node, or end what else runs there."
                )
        return calls[finished[0]]

    def _publish_data(self) -> list[Any]:
        """Return the splits' files, in the object store from now on: name, content, name, content ..."""
        if not self._data:
            for name, content in self.method.run.splits.read_files().items():
                self._data += [name, self.ray.put(content)]
        return self._data

    def _count_death(self, deaths: Counter[int | None], chunk: Chunk | None, problem: Exception) -> None:
        """Raise an error where actors keep dying on the same clients, or before they have any."""
        place = chunk.place if chunk else None
        deaths[place] += 1
        if chunk and deaths[place] >= DEATHS_OF_ONE_CHUNK:
            clients = ", ".join(map(str, chunk.clients))
            # Ray's own watch ends actors of a node that runs low; the kernel's kills are counted on this machine alone.
            by_ray = isinstance(problem, self.ray.exceptions.OutOfMemoryError)
            if by_ray or machine.count_memory_kills() > self._memory_kills:
                raise UserError(
                    f"client {clients}: memory ran out, and its actor was killed {deaths[place]} times. Set fewer "
                    "federation.workers, a smaller batch_size or a smaller model."
                )
            raise RuntimeError(f"client {clients}: the actor died {deaths[place]} times ({type(problem).__name__})")
        if deaths[None] >= DEATHS_OF_ONE_CHUNK * self._count:
            raise RuntimeError(f"actors cannot be started: {problem}")


class Actor:
    """The main process's end of one actor."""

    def __init__(self, ray: ModuleType, handle: Any, set_up: str) -> None:
        self.ray = ray
        self.handle = handle
        self.waiting: deque[tuple[Any, Chunk | None]] = deque()  # calls that are not answered yet, in order
        self.ready = self.begun = False
        self.call("set_up", set_up)

    @property
    def chunks(self) -> int:
        """The number of chunks that the actor has."""
        return sum(chunk is not None for _, chunk in self.waiting)

    def call(self, function: str, *arguments: Any, chunk: Chunk | None = None) -> None:
        """Call a function of the actor, without waiting for the answer."""
        self.waiting.append((getattr(self.handle, function).remote(*arguments), chunk))

    def give(self, chunk: Chunk, begin: Any, order: Callable[[Sequence[int]], bytes]) -> None:
        """Let the actor run a chunk, after it has begun with the job."""
        if not self.begun:
            self.call("begin", begin)
            self.begun = True
        self.call("run", order(chunk.clients), chunk=chunk)

    def answer(self) -> tuple[Tree, Chunk | None]:
        """Return the answer to the oldest call, which stays in `waiting` where the actor was lost."""
        message = from_bytes(self.ray.get(self.waiting[0][0]))
        if "error" in message:
            raise (UserError if message["user"] else RuntimeError)(message["error"])
        return message, self.waiting.popleft()[1]

    def end(self) -> list[Chunk]:
        """Kill the actor; return its chunks, which others must run."""
        self.ray.kill(self.handle)
        return [chunk for _, chunk in self.waiting if chunk is not None]


def needs_folder(method: "Method") -> bool:
    """Return whether one of the plugins that the settings name lies in the project's folder."""
    names = [(kind, getattr(getattr(method.run.params, block), key)) for block, (kind, key) in CHOICES.items()]
    return any(map(is_of_project, [type(method), *(find(kind, name) for kind, name in names)]))


def _order(job: Job, clients: Sequence[int], memories: Mapping[int, Path]) -> bytes:
    """Return an order to run clients, with the files of their memories."""
    orders = []
    for client in clients:
        files = [
            path for path in (memories.get(client), find_secrets_file(job.scratch, client)) if path and path.exists()
        ]
        memory = memories[client].name if client in memories else None
        orders.append({"client": client, "memory": memory, "files": {path.name: read_content(path) for path in files}})
    return to_bytes(orders)


def _yield_results(message: Tree, chunk: Chunk, job: Job, memories: Mapping[int, Path]) -> Iterator[ClientResult]:
    """Yield the results of a chunk's clients; the last one has the block of their sums."""
    for answer in message["answers"]:
        client, reply = answer["client"], Reply(convert_tree_to_parts(answer["parts"]), **answer["facts"])
        result = ClientResult(client, reply, _store_files(answer, job, memories.get(client)), answer["seconds"])
        if job.summed:
            finding = Finding(
                ReplyDefect(*answer["defect"]) if answer["defect"] else None,
                describe_form(reply.parts),
                answer["sizes"],
            )
            has_block = answer is message["answers"][-1] and message["sums"]
            block = Block(chunk.level, chunk.place, message["sums"]) if has_block else None
            result = replace(result, finding=finding, block=block)
        yield result


def _store_files(answer: Tree, job: Job, before: Path | None) -> Path | None:
    """Store a client's files in the job's scratch folder; return the file of its memory from now on."""
    secrets = find_secrets_file(job.scratch, answer["client"])
    if secrets.name not in answer["files"]:
        secrets.unlink(missing_ok=True)
    for name, data in answer["files"].items():
        with replace_file(job.scratch / name) as temporary:
            temporary.write_bytes(trees.view_bytes(data))
    if answer["memory"] is None:
        return None
    return job.scratch / answer["memory"] if answer["memory"] in answer["files"] else before


def split_into_chunks(clients: Sequence[int], actors: int) -> deque[Chunk]:
    """Return chunks of clients in their order, each of a power of two: its sum is a node of the tree over all."""
    level = int(math.log2(max(1, len(clients) / (actors * CHUNKS))))
    starts = range(0, len(clients), 2**level)
    return deque(Chunk(level, i >> level, tuple(clients[i : i + 2**level])) for i in starts)
