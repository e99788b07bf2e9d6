"""Kinds of faults. Each one injures a run of a fresh project and leaves it to `mend` to bring that to its end.

A fault that a kind cannot inject here (no mounts) raises Impossible; one that came too late is tried again.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from PIL import Image
from workshop import METHODS, Command, Lost, Project, Server, Workshop, tracked

from flows.servers import free_port

CLEAN_STOP = 5.0  # seconds
NOTICED = 2.0  # seconds in which a command sees that its Prefect server has died
REFUSALS = 6  # of one project, each followed by its way out
TOO_LATE = 12  # times that a run may have ended before its fault came


class Impossible(Exception):  # noqa: N818
    """This machine lets nobody inject it."""


class Scene:
    """One fault: a project, and the moments at which things happen to it."""

    def __init__(self, workshop: Workshop, chance: random.Random) -> None:
        self.workshop, self.chance = workshop, chance
        self.mended = ExitStack()  # what is undone when the project is whole again
        self.method = chance.choice(METHODS)
        self.project = workshop.project(self.method)
        self.kept: list[list[Any]] = []  # rounds that must not be trained again

    def some_time(self, begin: float = 0.0, end: float = 0.95) -> float:
        return self.chance.uniform(begin, end) * self.workshop.seconds[self.method]

    def anew(self) -> None:
        """The fault came too late: the next one is to come sooner, for the machine has become faster."""
        self.workshop.seconds[self.method] *= 0.7
        shutil.rmtree(self.project.folder)
        self.project = self.workshop.project(self.method)

    def wait_for_steps(self, command: Command) -> int:
        """Until the run has done a number of steps, and a little longer; how many."""
        wanted, wait = self.chance.randrange(8), self.some_time(0, 0.1)
        done = self.project.folder / ".fcl/store/done"
        while not command.ended and (len(list(done.glob("*.json"))) if done.exists() else 0) < wanted:
            time.sleep(0.005)
        time.sleep(wait)
        return wanted

    def wait_for(self, command: Command, pattern: str) -> None:
        """Until there is a file of this kind."""
        while not list(self.project.folder.glob(pattern)) and not command.ended:
            time.sleep(0.002)

    def interrupted(self, number: signal.Signals = signal.SIGKILL) -> Command:
        """A run that got a signal while it was at work, half of the times when a round was kept."""
        for _ in range(TOO_LATE):
            command, kept = self.project.run(), self.chance.random() < 0.5
            if kept:
                self.wait_for(command, ".fcl/checkpoints/*/commit.json")
            time.sleep(self.some_time(0, 0.3 if kept else 0.95))
            if not command.ended:
                command.send(number)
                return command
            self.anew()
        raise Lost("never came in time")

    def stopped_at(self, pattern: str) -> Path:
        """A file of a run that was killed as soon as there was one of this kind, some of them later."""
        for _ in range(TOO_LATE):
            command, wait = self.project.run(), self.some_time(0, 0.3)
            self.wait_for(command, pattern)
            time.sleep(wait)
            command.kill()
            if found := sorted(self.project.folder.glob(pattern)):
                return self.chance.choice(found)
            self.anew()
        raise Lost(f"never left {pattern}")


# What is done to a file.


def damage(file: Path, chance: random.Random) -> str:
    content = bytearray(file.read_bytes())
    if content and chance.random() < 0.4:
        length = chance.randrange(len(content))
        os.truncate(file, length)
        return f"{file}: cut to {length} of {len(content)} bytes"
    content = content or bytearray(1)
    place, bit = chance.randrange(len(content)), chance.randrange(8)
    content[place] ^= 1 << bit
    mode = file.stat().st_mode
    file.chmod(0o644)
    file.write_bytes(content)
    file.chmod(mode)
    return f"{file}: bit {bit} of byte {place}"


# Kinds. Each returns what it did.


def kill_main(scene: Scene) -> str:
    scene.interrupted().end()
    return f"killed, {kept_rounds(scene)}"


def kill_worker(scene: Scene) -> str:
    settings = ("federation.executor=processes",)
    for _ in range(TOO_LATE):
        command = scene.project.run(*settings)
        while not command.ended and not (workers := command.workers()):
            time.sleep(0.01)
        time.sleep(scene.chance.uniform(0, 3) * scene.workshop.seconds[scene.method])
        workers = command.workers()
        if workers:
            victim = scene.chance.choice(workers)
            victim.kill()
            if command.end() != 0:
                raise Lost(f"a dead worker ended the run: {command.said[-500:]}")
            return f"worker {victim.pid} killed"
        command.end()
        scene.anew()
    raise Lost("never had a worker")


def kill_mlflow(scene: Scene) -> str:
    for _ in range(TOO_LATE):
        server = mlflow_server(scene.project)
        scene.mended.callback(server.kill)
        scene.project.settings = [f"tracking.uri={server.start().url}"]
        command = scene.project.run()
        steps = scene.wait_for_steps(command)
        server.kill()
        right = scene.workshop.undisturbed[scene.method]["tracked"]
        if command.ended or tracked(scene.project.folder / "mlflow.db", scene.method) == right:
            command.end()
            scene.anew()
            continue
        code = command.end()
        told = [line for line in command.said.splitlines() if server.url in line]
        if code not in (0, 2) or (code == 2 and steps) or len(told) != 1 or "Traceback" in command.said:
            raise Lost(f"exit code {code} without MLflow, told {len(told)} times: {command.said[-500:]}")
        server.start()
        return f"after {steps} steps, told once, exit code {code}"
    raise Lost("never came in time")


def kill_prefect(scene: Scene) -> str:
    """The server that a command has started for its project."""
    for _ in range(TOO_LATE):
        command = scene.project.real()
        steps = scene.wait_for_steps(command)
        while not (family := prefect_server(scene.project.folder)) and not command.ended:
            time.sleep(0.01)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        killed = time.monotonic()
        code = command.end()
        told = [line for line in command.said.splitlines() if "Prefect" in line]
        if not told and time.monotonic() - killed < NOTICED:  # the run was at its end
            scene.anew()
            continue
        if code not in (0, 2) or (code == 2 and steps) or len(told) != 1 or "Traceback" in command.said:
            raise Lost(f"exit code {code} without Prefect, told {len(told)} times: {command.said[-800:]}")
        return f"after {steps} steps, told once, exit code {code}"
    raise Lost("never came in time")


def interrupt(scene: Scene) -> str:
    return _stopped_cleanly(scene, signal.SIGINT, (130,))


def terminate(scene: Scene) -> str:
    return _stopped_cleanly(scene, signal.SIGTERM, (143, -signal.SIGTERM))


def full_disk(scene: Scene) -> str:
    """Room for a random share of what the run would write."""
    folder = scene.workshop.root / f"disk-{scene.project.folder.name}"
    scene.mended.enter_context(mounted(folder, "-t", "tmpfs", "-o", "size=256m", "fcl"))
    scene.project = scene.workshop.project(scene.method, folder)
    left, filler = scene.chance.randrange(400_000), folder / "filler"
    filler.write_bytes(bytes(max(0, shutil.disk_usage(folder).free - left)))
    command = scene.project.run()
    code = command.end()
    told_in_one_line(command, code)
    filler.unlink()
    return f"{left} bytes left, exit code {code}"


def read_only(scene: Scene) -> str:
    """The store, or all of .fcl, from some moment on."""
    place = scene.project.folder / scene.chance.choice([".fcl/store", ".fcl"])
    place.mkdir(parents=True, exist_ok=True)
    command = None
    wait = scene.some_time(0, 0.8)
    if scene.chance.random() < 0.5:
        command = scene.project.run()
        time.sleep(wait)
    with mounted(place, "--bind", str(place)):
        run_or_skip("mount", "-o", "remount,bind,ro", str(place))
        command = command or scene.project.run()
        code = command.end()
        told_in_one_line(command, code)
    return f"{place.name} read-only, exit code {code}"


def checkpoint(scene: Scene) -> str:
    return damage(scene.stopped_at(".fcl/checkpoints/*/**/*.[sj]*"), scene.chance)


def cache_entry(scene: Scene) -> str:
    kind = scene.chance.choice(["store/[0-9a-f][0-9a-f]/*", "store/done/*", "results/*"])
    if scene.chance.random() < 0.5:
        return damage(scene.stopped_at(f".fcl/{kind}"), scene.chance)
    scene.workshop.expect(scene.project.run())
    return damage(scene.chance.choice(sorted(scene.project.folder.glob(f".fcl/{kind}"))), scene.chance)


def manifest(scene: Scene) -> str:
    return _damaged_data(scene, "splits", ["manifest.parquet", "stream.json", "made-from.json", "statistics.json"])


def prepared(scene: Scene) -> str:
    return _damaged_data(
        scene, "prepared", ["images.npy", "images.npy", "samples.parquet", "meta.json", "made-from.json"]
    )


def knowledge(scene: Scene) -> str:
    """And whatever else lies in a run folder. Who reads it before the next run is refused, or hears what is right."""
    scene.workshop.expect(scene.project.run())
    (folder,) = scene.project.folder.glob("runs/*")
    file = scene.chance.choice([path for path in sorted(folder.rglob("*")) if path.is_file()])
    Image.new("L", (8, 8), 99).save(scene.project.folder / "image.png")
    run = str(folder.relative_to(scene.project.folder))
    asked = {"*.parquet": ["compare", run, "--json"], "model/*": ["predict", run, "image.png", "--json"]}
    right = {}
    for what, words in asked.items():
        scene.workshop.expect(command := scene.project.fork(*words))
        right[what] = command.said
    done, told = damage(file, scene.chance), ""
    for what, words in asked.items():
        command = scene.project.fork(*words)
        refused = told_in_one_line(command, command.end())
        read = file.relative_to(folder).match(what)
        if (file.name not in refused) if refused else (read or command.said != right[what]):
            raise Lost(f"{done}; fcl {words[0]}: {command.said[-500:]}")
        told = refused or told
    if told and scene.chance.random() < 0.5:
        follow_way_out(scene.project, told)
    return f"{done}; {'refused' if told else 'not read'}"


def clock(scene: Scene) -> str:
    """The wall clock jumps within the run, by up to ten years to and fro; and so do the times of files between runs."""
    jumps = [scene.chance.uniform(-3e8, 3e8) for _ in range(3)]
    moments = sorted(scene.some_time() for _ in jumps)
    command = scene.project.run(jumps=list(zip(moments, jumps, strict=True)))
    if scene.chance.random() < 0.5:
        time.sleep(scene.some_time())
        command.kill()
    else:
        code = command.end()
        if code:
            raise Lost(f"exit code {code}: {command.said[-500:]}")
    for file in (scene.project.folder / ".fcl").rglob("*"):
        if file.is_file() and not file.is_symlink():
            at = time.time() + scene.chance.choice(jumps)
            os.utime(file, (at, at))
    return f"jumps of {', '.join(f'{jump / 86400:.0f}' for jump in jumps)} days"


def two_runs(scene: Scene) -> str:
    """The same command, or another method's, in one project at once; at times the first is killed."""
    other = scene.chance.choice(METHODS)
    first = scene.project.run()
    time.sleep(scene.some_time())
    second = scene.project.run(method=other)
    killed = scene.chance.random() < 0.5
    if killed:
        time.sleep(scene.some_time(0, 0.5))
        first.kill()
    if (code := second.end()) != 0 or (not killed and first.end() != 0):
        raise Lost(f"exit code {code}: {first.said[-300:]} {second.said[-300:]}")
    refuse_other_end(scene.project.remains(other), scene.workshop.undisturbed[other])
    return f"{scene.method} and {other}, the first {'killed' if killed else 'ended'}"


KINDS: dict[str, Callable[[Scene], str]] = {
    "SIGKILL of the main process": kill_main,
    "SIGKILL of a worker": kill_worker,
    "SIGKILL of the MLflow server": kill_mlflow,
    "SIGKILL of the Prefect server": kill_prefect,
    "SIGINT": interrupt,
    "SIGTERM": terminate,
    "full disk": full_disk,
    "read-only store": read_only,
    "damaged checkpoint": checkpoint,
    "damaged cache entry": cache_entry,
    "damaged manifest": manifest,
    "damaged prepared data": prepared,
    "damaged knowledge, run folder": knowledge,
    "clock that jumps": clock,
    "two runs in one folder": two_runs,
}


def mend(scene: Scene, refusals: list[str]) -> None:
    """Give the same command until it comes through, following each refusal's way out; Lost where that does not help."""
    for _ in range(REFUSALS):
        command = scene.project.run()
        code = command.end()
        if code == 0:
            break
        told = told_in_one_line(command, code)
        refusals.append(told)
        follow_way_out(scene.project, told)
    else:
        raise Lost(f"refuses again and again: {refusals[-1]}")
    refuse_other_end(scene.project.remains(), scene.workshop.undisturbed[scene.method])
    if scene.kept:
        scene.project.refuse_repeated(scene.kept)


def kept_rounds(scene: Scene) -> str:
    """After a run was stopped: each round that MLflow was told of is kept, but for one that was just being kept."""
    scene.kept, logged = scene.project.kept_rounds(), scene.project.logged_rounds()
    if len(scene.kept) < logged - 1:
        raise Lost(f"{logged} rounds were done, and {len(scene.kept)} are kept")
    return f"{len(scene.kept)} rounds kept"


def refuse_other_end(found: object, right: object, place: str = "") -> None:
    """Lost where two ends are not the same, with the first place in which they differ."""
    if isinstance(found, dict) and isinstance(right, dict) and found.keys() == right.keys():
        for name in right:
            refuse_other_end(found[name], right[name], f"{place} {name}")
    elif isinstance(found, list) and isinstance(right, list) and len(found) == len(right):
        for number, one in enumerate(right):
            refuse_other_end(found[number], one, f"{place} {number}")
    elif found != right:
        raise Lost(f"ended otherwise than an undisturbed run:{place}: {str(found)[:300]}, not {str(right)[:300]}")


def told_in_one_line(command: Command, code: int) -> str:
    """What a run that did not end well says."""
    lines = [line for line in command.said.splitlines() if line.strip() and "stopped answering" not in line]
    if code == 0:
        return ""
    if code not in (1, 2) or len(lines) != 1:
        raise Lost(f"exit code {code}, and said: {command.said[-1000:] or 'nothing'}")
    return lines[0]


def follow_way_out(project: Project, told: str) -> None:
    """The way out that a refusal names."""
    folder = project.folder
    if found := re.search(r"Delete (\S+?)[.,]? ", f"{told} "):
        named = told.split()[0].rstrip(":") if found[1] == "it" else found[1]
        place = folder / named
        if not place.exists():
            raise Lost(f"names what is not there: {told}")
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    elif found := re.search(r"fcl prepare|fcl partition", told):
        for words in re.findall(r"fcl (prepare|partition)", told):
            if project.fork(words, "-q").end():
                raise Lost(f"the way out leads nowhere: {told}")
    else:
        raise Lost(f"names no way out: {told}")


def _stopped_cleanly(scene: Scene, number: signal.Signals, codes: tuple[int, ...]) -> str:
    for _ in range(TOO_LATE):
        command = scene.interrupted(number)
        begun = time.monotonic()
        code, took = command.end(), time.monotonic() - begun
        if code in codes and took <= CLEAN_STOP and "Traceback" not in command.said:
            return f"ended {took:.1f} s later, {kept_rounds(scene)}"
        if code != 0:
            raise Lost(f"exit code {code} after {took:.1f} s: {command.said[-500:]}")
        scene.anew()  # it was at its end already
    raise Lost(f"takes no notice of {number.name}")


def _damaged_data(scene: Scene, folder: str, names: list[str]) -> str:
    if scene.chance.random() < 0.7:
        scene.interrupted().end()
    return damage(scene.project.folder / "data" / folder / scene.chance.choice(names), scene.chance)


def mlflow_server(project: Project) -> Server:
    port = free_port()
    store, artifacts = f"sqlite:///{project.folder}/mlflow.db", str(project.folder / "mlartifacts")
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", store, "--artifacts-destination", artifacts]
    return Server(command, f"http://127.0.0.1:{port}", project.folder.parent / f"{project.folder.name}-mlflow.log")


def prefect_server(folder: Path) -> list[psutil.Process]:
    """The project's own, and what it has started."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if str(folder / ".fcl/prefect") in words and any(word.endswith("servers.py") for word in words):
                return [process, *process.children(recursive=True)]
    return []


def run_or_skip(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Impossible(f"{command[0]}: {done.stderr.strip()}")


@contextmanager
def mounted(folder: Path, *what: str) -> Iterator[None]:
    """A mount for the time of the block, in this process's own namespace (run.py)."""
    folder.mkdir(exist_ok=True)
    run_or_skip("mount", *what, str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
