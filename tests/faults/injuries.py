"""Kinds of faults. Each one injures a run of a fresh project, which `mend` then brings to its end.

A fault that this machine does not allow (no mounts) raises Impossible; one that came too late is tried again.
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
from workshop import METHODS, BrokenPromise, Command, Project, Server, Workshop, read_tracked

from flows.prefect.server import find_free_port

CLEAN_STOP = 5.0  # seconds
NOTICED = 2.0  # seconds in which a command sees that its Prefect server has died
REFUSALS = 6  # of one project at most, each followed by its remedy
TOO_LATE = 12  # times that a run may have ended before its fault came


class Impossible(Exception):  # noqa: N818
    """A fault that cannot be injected on this machine."""


class Scene:
    """One fault: a project and random moments."""

    def __init__(self, workshop: Workshop, chance: random.Random) -> None:
        self.workshop, self.chance = workshop, chance
        self.mended = ExitStack()  # undone after the project has been mended
        self.method = chance.choice(METHODS)
        self.project = workshop.create_project(self.method)
        self.stored_rounds: list[list[Any]] = []  # must not be trained again

    def draw_time(self, begin: float = 0.0, end: float = 0.95) -> float:
        return self.chance.uniform(begin, end) * self.workshop.seconds[self.method]

    def start_over(self) -> None:
        """Take a new project after a fault that came too late; the next one comes sooner, for runs are faster now."""
        self.workshop.seconds[self.method] *= 0.7
        shutil.rmtree(self.project.folder)
        self.project = self.workshop.create_project(self.method)

    def wait_for_steps(self, command: Command) -> int:
        """Wait until the run has done some steps, and a little longer; return their number."""
        steps, wait = self.chance.randrange(8), self.draw_time(0, 0.1)
        done = self.project.folder / ".fcl/store/done"
        while not command.has_ended and (len(list(done.glob("*.json"))) if done.exists() else 0) < steps:
            time.sleep(0.005)
        time.sleep(wait)
        return steps

    def wait_for(self, command: Command, pattern: str) -> None:
        """Wait until there is a file of this kind."""
        while not list(self.project.folder.glob(pattern)) and not command.has_ended:
            time.sleep(0.002)

    def interrupt(self, number: signal.Signals = signal.SIGKILL) -> Command:
        """Return a run that got a signal while it worked, half of the times after a round was checkpointed."""
        for _ in range(TOO_LATE):
            command, after_checkpoint = self.project.run(), self.chance.random() < 0.5
            if after_checkpoint:
                self.wait_for(command, ".fcl/checkpoints/*/commit.json")
            time.sleep(self.draw_time(0, 0.3 if after_checkpoint else 0.95))
            if not command.has_ended:
                command.send(number)
                return command
            self.start_over()
        raise BrokenPromise("the fault never came in time")

    def kill_with_file(self, pattern: str) -> Path:
        """Kill a run when there is a file of this kind, or a little later; return such a file."""
        for _ in range(TOO_LATE):
            command, wait = self.project.run(), self.draw_time(0, 0.3)
            self.wait_for(command, pattern)
            time.sleep(wait)
            command.kill()
            if files := sorted(self.project.folder.glob(pattern)):
                return self.chance.choice(files)
            self.start_over()
        raise BrokenPromise(f"no run had a file {pattern}")


# Damage of a file.


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


# Kinds. Each returns a description of what it did.


def kill_main(scene: Scene) -> str:
    scene.interrupt().wait()
    return f"killed, {check_stored_rounds(scene)}"


def kill_worker(scene: Scene) -> str:
    settings = ("federation.executor=processes",)
    for _ in range(TOO_LATE):
        command = scene.project.run(*settings)
        while not command.has_ended and not (workers := command.find_workers()):
            time.sleep(0.01)
        time.sleep(scene.chance.uniform(0, 3) * scene.workshop.seconds[scene.method])
        workers = command.find_workers()
        if workers:
            victim = scene.chance.choice(workers)
            victim.kill()
            if command.wait() != 0:
                raise BrokenPromise(f"a dead worker ended the run: {command.output[-500:]}")
            return f"worker {victim.pid} killed"
        command.wait()
        scene.start_over()
    raise BrokenPromise("no worker was there in time")


def kill_mlflow(scene: Scene) -> str:
    for _ in range(TOO_LATE):
        server = make_mlflow_server(scene.project)
        scene.mended.callback(server.kill)
        scene.project.settings = [f"tracking.uri={server.start().url}"]
        command = scene.project.run()
        steps = scene.wait_for_steps(command)
        server.kill()
        expected = scene.workshop.undisturbed[scene.method]["tracked"]
        if command.has_ended or read_tracked(scene.project.folder / "mlflow.db", scene.method) == expected:
            command.wait()
            scene.start_over()
            continue
        code = command.wait()
        messages = [line for line in command.output.splitlines() if server.url in line]
        if code not in (0, 2) or (code == 2 and steps) or len(messages) != 1 or "Traceback" in command.output:
            raise BrokenPromise(
                f"exit code {code} without MLflow, reported {len(messages)} times: {command.output[-500:]}"
            )
        server.start()
        return f"after {steps} steps, reported once, exit code {code}"
    raise BrokenPromise("the fault never came in time")


def kill_prefect(scene: Scene) -> str:
    """Kill the server that a command has started for its project."""
    for _ in range(TOO_LATE):
        command = scene.project.run_as_process()
        steps = scene.wait_for_steps(command)
        while not (family := find_prefect_server(scene.project.folder)) and not command.has_ended:
            time.sleep(0.01)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        killed = time.monotonic()
        code = command.wait()
        messages = [line for line in command.output.splitlines() if "Prefect" in line]
        if not messages and time.monotonic() - killed < NOTICED:  # the run was at its end
            scene.start_over()
            continue
        if code not in (0, 2) or (code == 2 and steps) or len(messages) != 1 or "Traceback" in command.output:
            raise BrokenPromise(
                f"exit code {code} without Prefect, reported {len(messages)} times: {command.output[-800:]}"
            )
        return f"after {steps} steps, reported once, exit code {code}"
    raise BrokenPromise("the fault never came in time")


def interrupt(scene: Scene) -> str:
    return _stop_cleanly(scene, signal.SIGINT, (130,))


def terminate(scene: Scene) -> str:
    return _stop_cleanly(scene, signal.SIGTERM, (143, -signal.SIGTERM))


def fill_disk(scene: Scene) -> str:
    """Leave room for a random share of what the run would write."""
    folder = scene.workshop.root / f"disk-{scene.project.folder.name}"
    scene.mended.enter_context(mount(folder, "-t", "tmpfs", "-o", "size=256m", "fcl"))
    scene.project = scene.workshop.create_project(scene.method, folder)
    room, filler = scene.chance.randrange(400_000), folder / "filler"
    filler.write_bytes(bytes(max(0, shutil.disk_usage(folder).free - room)))
    command = scene.project.run()
    code = command.wait()
    read_refusal(command, code)
    filler.unlink()
    return f"{room} bytes free, exit code {code}"


def make_read_only(scene: Scene) -> str:
    """Make the store, or all of .fcl, read-only at some moment."""
    place = scene.project.folder / scene.chance.choice([".fcl/store", ".fcl"])
    place.mkdir(parents=True, exist_ok=True)
    command = None
    wait = scene.draw_time(0, 0.8)
    if scene.chance.random() < 0.5:
        command = scene.project.run()
        time.sleep(wait)
    with mount(place, "--bind", str(place)):
        run_or_skip("mount", "-o", "remount,bind,ro", str(place))
        command = command or scene.project.run()
        code = command.wait()
        read_refusal(command, code)
    return f"{place.name} read-only, exit code {code}"


def damage_checkpoint(scene: Scene) -> str:
    return damage(scene.kill_with_file(".fcl/checkpoints/*/**/*.[sj]*"), scene.chance)


def damage_cache_entry(scene: Scene) -> str:
    kind = scene.chance.choice(["store/[0-9a-f][0-9a-f]/*", "store/done/*", "results/*"])
    if scene.chance.random() < 0.5:
        return damage(scene.kill_with_file(f".fcl/{kind}"), scene.chance)
    scene.workshop.expect_success(scene.project.run())
    return damage(scene.chance.choice(sorted(scene.project.folder.glob(f".fcl/{kind}"))), scene.chance)


def damage_manifest(scene: Scene) -> str:
    return _damage_data(scene, "splits/0", ["manifest.parquet", "stream.json", "made-from.json", "statistics.json"])


def damage_prepared(scene: Scene) -> str:
    return _damage_data(
        scene, "prepared", ["images.npy", "images.npy", "samples.parquet", "meta.json", "made-from.json"]
    )


def damage_run_folder(scene: Scene) -> str:
    """Damage a file of a run folder. A command that reads it then refuses, or prints the right result."""
    scene.workshop.expect_success(scene.project.run())
    (folder,) = scene.project.folder.glob("runs/*")
    file = scene.chance.choice([path for path in sorted(folder.rglob("*")) if path.is_file()])
    Image.new("L", (8, 8), 99).save(scene.project.folder / "image.png")
    run = str(folder.relative_to(scene.project.folder))
    commands = {"*.parquet": ["compare", run, "--json"], "model/*": ["predict", run, "image.png", "--json"]}
    expected = {}
    for pattern, words in commands.items():
        scene.workshop.expect_success(command := scene.project.fork(*words))
        expected[pattern] = command.output
    description, message = damage(file, scene.chance), ""
    for pattern, words in commands.items():
        command = scene.project.fork(*words)
        refusal = read_refusal(command, command.wait())
        is_read = file.relative_to(folder).match(pattern)
        if (file.name not in refusal) if refusal else (is_read or command.output != expected[pattern]):
            raise BrokenPromise(f"{description}; fcl {words[0]}: {command.output[-500:]}")
        message = refusal or message
    if message and scene.chance.random() < 0.5:
        follow_remedy(scene.project, message)
    return f"{description}; {'refused' if message else 'not read'}"


def jump_clock(scene: Scene) -> str:
    """Let the wall clock jump by up to ten years to and fro during the run, and change times of files between runs."""
    jumps = [scene.chance.uniform(-3e8, 3e8) for _ in range(3)]
    moments = sorted(scene.draw_time() for _ in jumps)
    command = scene.project.run(jumps=list(zip(moments, jumps, strict=True)))
    if scene.chance.random() < 0.5:
        time.sleep(scene.draw_time())
        command.kill()
    else:
        code = command.wait()
        if code:
            raise BrokenPromise(f"exit code {code}: {command.output[-500:]}")
    for file in (scene.project.folder / ".fcl").rglob("*"):
        if file.is_file() and not file.is_symlink():
            at = time.time() + scene.chance.choice(jumps)
            os.utime(file, (at, at))
    return f"jumps of {', '.join(f'{jump / 86400:.0f}' for jump in jumps)} days"


def start_two_runs(scene: Scene) -> str:
    """Start this command twice, or that of another method too, in one project; at times kill the first."""
    other = scene.chance.choice(METHODS)
    first = scene.project.run()
    time.sleep(scene.draw_time())
    second = scene.project.run(method=other)
    is_killed = scene.chance.random() < 0.5
    if is_killed:
        time.sleep(scene.draw_time(0, 0.5))
        first.kill()
    if (code := second.wait()) != 0 or (not is_killed and first.wait() != 0):
        raise BrokenPromise(f"exit code {code}: {first.output[-300:]} {second.output[-300:]}")
    refuse_difference(scene.project.read_results(other), scene.workshop.undisturbed[other])
    return f"{scene.method} and {other}, the first {'killed' if is_killed else 'ended'}"


KINDS: dict[str, Callable[[Scene], str]] = {
    "SIGKILL of the main process": kill_main,
    "SIGKILL of a worker": kill_worker,
    "SIGKILL of the MLflow server": kill_mlflow,
    "SIGKILL of the Prefect server": kill_prefect,
    "SIGINT": interrupt,
    "SIGTERM": terminate,
    "full disk": fill_disk,
    "read-only store": make_read_only,
    "damaged checkpoint": damage_checkpoint,
    "damaged cache entry": damage_cache_entry,
    "damaged manifest": damage_manifest,
    "damaged prepared data": damage_prepared,
    "damaged knowledge, run folder": damage_run_folder,
    "clock that jumps": jump_clock,
    "two runs in one folder": start_two_runs,
}


def mend(scene: Scene, refusals: list[str]) -> None:
    """Repeat the command until it succeeds, following the remedy of each refusal; BrokenPromise if that fails."""
    for _ in range(REFUSALS):
        command = scene.project.run()
        code = command.wait()
        if code == 0:
            break
        message = read_refusal(command, code)
        refusals.append(message)
        follow_remedy(scene.project, message)
    else:
        raise BrokenPromise(f"refuses again and again: {refusals[-1]}")
    refuse_difference(scene.project.read_results(), scene.workshop.undisturbed[scene.method])
    if scene.stored_rounds:
        scene.project.refuse_repeated(scene.stored_rounds)


def check_stored_rounds(scene: Scene) -> str:
    """Raise BrokenPromise unless a stopped run has stored each round that MLflow has, but for the last."""
    scene.stored_rounds, logged = scene.project.read_stored_rounds(), scene.project.count_logged_rounds()
    if len(scene.stored_rounds) < logged - 1:
        raise BrokenPromise(f"{logged} rounds were logged, and {len(scene.stored_rounds)} are stored")
    return f"{len(scene.stored_rounds)} rounds stored"


def refuse_difference(actual: object, expected: object, place: str = "") -> None:
    """Raise BrokenPromise with the first place in which two results differ."""
    if isinstance(actual, dict) and isinstance(expected, dict) and actual.keys() == expected.keys():
        for name in expected:
            refuse_difference(actual[name], expected[name], f"{place} {name}")
    elif isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        for number, item in enumerate(expected):
            refuse_difference(actual[number], item, f"{place} {number}")
    elif actual != expected:
        raise BrokenPromise(
            f"ended otherwise than an undisturbed run:{place}: {str(actual)[:300]}, not {str(expected)[:300]}"
        )


def read_refusal(command: Command, code: int) -> str:
    """Return the one line of a command that failed, "" for one that succeeded."""
    lines = [line for line in command.output.splitlines() if line.strip() and "stopped answering" not in line]
    if code == 0:
        return ""
    if code not in (1, 2) or len(lines) != 1:
        raise BrokenPromise(f"exit code {code}, and printed: {command.output[-1000:] or 'nothing'}")
    return lines[0]


def follow_remedy(project: Project, message: str) -> None:
    """Do what a refusal says would help."""
    folder = project.folder
    if match := re.search(r"Delete (\S+?)[.,]? ", f"{message} "):
        name = message.split()[0].rstrip(":") if match[1] == "it" else match[1]
        place = folder / name
        if not place.exists():
            raise BrokenPromise(f"names a missing file: {message}")
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    elif commands := re.findall(r"fcl (prepare|partition)", message):
        for words in commands:
            if project.fork(words, "-q").wait():
                raise BrokenPromise(f"the remedy fails: {message}")
    else:
        raise BrokenPromise(f"names no remedy: {message}")


def _stop_cleanly(scene: Scene, number: signal.Signals, codes: tuple[int, ...]) -> str:
    for _ in range(TOO_LATE):
        command = scene.interrupt(number)
        started = time.monotonic()
        code, seconds = command.wait(), time.monotonic() - started
        if code in codes and seconds <= CLEAN_STOP and "Traceback" not in command.output:
            return f"ended {seconds:.1f} s later, {check_stored_rounds(scene)}"
        if code != 0:
            raise BrokenPromise(f"exit code {code} after {seconds:.1f} s: {command.output[-500:]}")
        scene.start_over()  # it was at its end already
    raise BrokenPromise(f"ignores {number.name}")


def _damage_data(scene: Scene, folder: str, names: list[str]) -> str:
    if scene.chance.random() < 0.7:
        scene.interrupt().wait()
    return damage(scene.project.folder / "data" / folder / scene.chance.choice(names), scene.chance)


def make_mlflow_server(project: Project) -> Server:
    port = find_free_port()
    store, artifacts = f"sqlite:///{project.folder}/mlflow.db", str(project.folder / "mlartifacts")
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", store, "--artifacts-destination", artifacts]
    return Server(command, f"http://127.0.0.1:{port}", project.folder.parent / f"{project.folder.name}-mlflow.log")


def find_prefect_server(folder: Path) -> list[psutil.Process]:
    """Return the process of the project's own server, and its children."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if str(folder / ".fcl/prefect") in words and any(word.endswith("server.py") for word in words):
                return [process, *process.children(recursive=True)]
    return []


def run_or_skip(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise Impossible(f"{command[0]}: {ended.stderr.strip()}")


@contextmanager
def mount(folder: Path, *options: str) -> Iterator[None]:
    """Mount for the time of the block, in this process's own namespace (run.py)."""
    folder.mkdir(exist_ok=True)
    run_or_skip("mount", *options, str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
