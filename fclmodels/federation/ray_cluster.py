"""Clients run on a Ray cluster, in long-lived actors of one thread each (or as set), each with its share of the GPUs.

The payload of a round is put into the object store once. Clients go out in chunks; an actor has the next chunk while
it works on one. Samples are memory-mapped where a node sees the splits' folder, and come from the object store where it
does not; what clients remember always travels. Actors look at replies and sum what the server needs as sums only, along
the tree that it would be summed along here, so that the bits are the same. Actors that are lost, alone or with their
node, are replaced as soon as the cluster has room, and their chunks run again, which cannot change the result.

Ray gets bytes, strings and numbers from us, which it carries raw or as msgpack: no message of ours is pickled. What it
pickles itself are the class `Host`, its exceptions and its records; without a token its ports let everyone in.
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

from fclmodels import state
from fclmodels.errors import UserError
from fclmodels.federation.executor import Answer, Job
from fclmodels.federation.inspection import Fault, Look, form_of
from fclmodels.federation.messages import Block, Reply, from_bytes, parts_from_tree, parts_to_tree, to_bytes
from fclmodels.federation.ray_host import Host, content
from fclmodels.federation.ray_start import cluster
from fclmodels.federation.secure import secrets_file
from fclmodels.federation.worker import set_up_of
from fclmodels.fingerprint import source_closure
from fclmodels.state import Tree

if TYPE_CHECKING:
    from fclmodels.methods.base import Method

CHUNKS = 4  # for each actor in an exchange: so many that none begins with much when the others are at the end
AHEAD = 2  # chunks that an actor has, so that it never waits for the next one
DEATHS_OF_ONE_CHUNK = 3
PATIENCE = 300.0  # seconds without any actor, where the cluster has no room for one


class Chunk(NamedTuple):
    """Clients that are a node of the tree over all of an exchange (replies.py), at its level and place."""

    level: int
    place: int
    clients: tuple[int, ...]


class RayCluster:
    def __init__(self, method: "Method", params_file: Path, workers: int | None, threads: int) -> None:
        self.method = method
        self._opened = contextlib.ExitStack()
        self.ray = self._opened.enter_context(cluster(threads * workers if workers else None))
        has = self.ray.cluster_resources()
        self._count = workers or max(1, int(has.get("CPU", 1)) // threads)
        self._set_up = json.dumps(
            set_up_of(method, threads)
            | {
                "params": {**json.loads(params_file.read_text()), "device": method.run.device.type},
                "beside": str(params_file.absolute()),  # where home is seen, this file is
                "code": source_closure(type(method).__module__),
                "folder": str(Path.cwd()),
            }
        )
        self._options = {
            "num_cpus": threads,
            "num_gpus": 0 if method.run.device.type == "cpu" else min(1.0, has.get("GPU", 0) / self._count),
            "scheduling_strategy": "SPREAD",
            "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
        }
        self._data: list[Any] = []
        self._actors: list[Actor] = []

    def run(self, job: Job, clients: Sequence[int], memories: Mapping[int, Path]) -> Iterator[Answer]:
        left, chunks = len(clients), chunks_of(clients, self._count)
        while len(self._actors) < min(self._count, len(chunks)):
            self._actors.append(self._started())
        begin = (
            json.dumps([job.question, job.task, job.round, job.asked, job.summed]),
            self.ray.put(to_bytes(parts_to_tree(job.payload))),
        )
        for actor in self._actors:
            actor.begun = False
        deaths = Counter[int | None]()
        try:
            while left:
                while chunks and (free := self._least_busy()):
                    free.give(chunks.popleft(), begin, lambda clients: _order(job, clients, memories))
                message, chunk = self._next_message(chunks, deaths)
                if chunk is not None:
                    left -= len(chunk.clients)
                    yield from _answers(message, chunk, job, memories)
        finally:
            if left:  # interrupted: what these actors still answer belongs to no one
                self._end_actors()

    def close(self) -> None:
        self._end_actors()
        self._data = []
        self._opened.close()

    def _started(self) -> "Actor":
        return Actor(self.ray, self.ray.remote(Host).options(**self._options).remote(), self._set_up)

    def _least_busy(self) -> "Actor | None":
        """Who gets the next chunk: so none has its second one before all have their first."""
        free = [actor for actor in self._actors if actor.ready and actor.chunks < AHEAD]
        return min(free, key=lambda actor: actor.chunks, default=None)

    def _end_actors(self) -> None:
        for actor in self._actors:
            actor.end()
        self._actors = []

    def _next_message(self, chunks: deque[Chunk], deaths: Counter[int | None]) -> tuple[Tree, Chunk | None]:
        """Of a chunk. Without one, an actor has got ready, or was lost and is replaced."""
        actor = self._next_to_answer()
        try:
            message, chunk = actor.answer()
        except self.ray.exceptions.RayError as problem:
            lost = actor.end()
            chunks.extendleft(reversed(lost))
            self._actors[self._actors.index(actor)] = self._started()
            if lost or not actor.ready:
                self._count_death(deaths, lost[0] if lost else None, problem)
            return {}, None
        if "needs data" in message:
            actor.call("fetch", *self._data_refs())
        elif chunk is None:
            actor.ready = True
        return message, chunk

    def _next_to_answer(self) -> "Actor":
        """An actor whose oldest call is done. Meanwhile Ray starts those for which it finds room."""
        calls = {actor.waiting[0][0]: actor for actor in self._actors if actor.waiting}
        while not (done := self.ray.wait(list(calls), timeout=PATIENCE)[0]):
            if not any(actor.ready for actor in self._actors):
                room = f"{self._options['num_cpus']} CPUs and {self._options['num_gpus']} GPUs"
                raise UserError(
                    f"federation.executor: ray: the cluster had no room for an actor ({room}) in {PATIENCE:.0f} s. "
                    "Add a node, or end what else runs there."
                )
        return calls[done[0]]

    def _data_refs(self) -> list[Any]:
        """All that splits are made of, in the object store from now on: name, content, name, content ..."""
        if not self._data:
            for name, content in self.method.run.splits.files().items():
                self._data += [name, self.ray.put(content)]
        return self._data

    def _count_death(self, deaths: Counter[int | None], chunk: Chunk | None, problem: Exception) -> None:
        """Actors that keep dying on the same clients, or before they have any, are an error."""
        place = chunk.place if chunk else None
        deaths[place] += 1
        if chunk and deaths[place] >= DEATHS_OF_ONE_CHUNK:
            whom = ", ".join(map(str, chunk.clients))
            raise RuntimeError(f"client {whom}: the actor died {deaths[place]} times ({type(problem).__name__})")
        if deaths[None] >= DEATHS_OF_ONE_CHUNK * self._count:
            raise RuntimeError(f"actors cannot be started: {problem}")


class Actor:
    """The main process's end of one actor; `waiting` holds its calls that are not answered, in order."""

    def __init__(self, ray: ModuleType, handle: Any, set_up: str) -> None:
        self.ray = ray
        self.handle = handle
        self.waiting: deque[tuple[Any, Chunk | None]] = deque()
        self.ready = self.begun = False
        self.call("set_up", set_up)

    @property
    def chunks(self) -> int:
        return sum(chunk is not None for _, chunk in self.waiting)

    def call(self, what: str, *arguments: Any, chunk: Chunk | None = None) -> None:
        self.waiting.append((getattr(self.handle, what).remote(*arguments), chunk))

    def give(self, chunk: Chunk, begin: tuple[str, Any], order: Callable[[Sequence[int]], bytes]) -> None:
        if not self.begun:
            self.call("begin", *begin)
            self.begun = True
        self.call("run", order(chunk.clients), chunk=chunk)

    def answer(self) -> tuple[Tree, Chunk | None]:
        """Of the oldest call. It stays in `waiting` where the actor was lost."""
        message = from_bytes(self.ray.get(self.waiting[0][0]))
        if "error" in message:
            raise (UserError if message["user"] else RuntimeError)(message["error"])
        return message, self.waiting.popleft()[1]

    def end(self) -> list[Chunk]:
        """At once; the chunks that are to be given to others."""
        self.ray.kill(self.handle)
        return [chunk for _, chunk in self.waiting if chunk is not None]


def _order(job: Job, clients: Sequence[int], memories: Mapping[int, Path]) -> bytes:
    """Which clients to run, with the files of what they remember."""
    orders = []
    for client in clients:
        files = [path for path in (memories.get(client), secrets_file(job.scratch, client)) if path and path.exists()]
        memory = memories[client].name if client in memories else None
        orders.append({"client": client, "memory": memory, "files": {path.name: content(path) for path in files}})
    return to_bytes(orders)


def _answers(message: Tree, chunk: Chunk, job: Job, memories: Mapping[int, Path]) -> Iterator[Answer]:
    """Of the clients of a chunk; the last one brings what was summed over them."""
    for told in message["answers"]:
        reply = Reply(parts_from_tree(told["parts"]), **told["facts"])
        answer = Answer(told["client"], reply, _memory(told, job, memories.get(told["client"])), told["seconds"])
        if job.summed:
            look = Look(Fault(*told["fault"]) if told["fault"] else None, form_of(reply.parts), told["sizes"])
            last = told is message["answers"][-1] and message["sums"]
            block = Block(chunk.level, chunk.place, message["sums"]) if last else None
            answer = replace(answer, look=look, block=block)
        yield answer


def _memory(told: Tree, job: Job, before: Path | None) -> Path | None:
    """The file of what a client remembers from now on; all that it wrote lies in the job's scratch folder."""
    secrets = secrets_file(job.scratch, told["client"])
    if secrets.name not in told["files"]:
        secrets.unlink(missing_ok=True)
    for name, written in told["files"].items():
        with state.replacing(job.scratch / name) as temporary:
            temporary.write_bytes(state.as_bytes(written))
    if told["memory"] is None:
        return None
    return job.scratch / told["memory"] if told["memory"] in told["files"] else before


def chunks_of(clients: Sequence[int], actors: int) -> deque[Chunk]:
    """In their order, each of a power of two (but the last), so that its sum is a node of the tree over all."""
    level = int(math.log2(max(1, len(clients) / (actors * CHUNKS))))
    starts = range(0, len(clients), 2**level)
    return deque(Chunk(level, i >> level, tuple(clients[i : i + 2**level])) for i in starts)
