"""Other frameworks' FedAvg rounds against the bare loop, and ours in the same turns (fcl bench --peers).

pfl (Apple), two processes of one thread by torchrun; Flower's simulation, one CPU a client. Each has an environment of
its own below .fcl/peers, made when it is first asked for, and the same samples, model, threads and tuned malloc. A
round of theirs begins when this process says so (peer_pfl.py, peer_flower.py).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import torch
from measuring import Bench, Row, taking_turns
from rounds import ours_and_bare, settings_of, yardstick
from works import WORKS, handed_over, run_on

HERE = Path(__file__).parent
FOLDER = HERE.parent / ".fcl" / "peers"
SHARED = ("numpy==2.4.6", "pydantic==2.14.3", "safetensors==0.8.0", f"torch=={torch.__version__.partition('+')[0]}")
ENVIRONMENTS = {"pfl": ("pfl==0.6.0",), "flower": ("flwr[simulation]==1.41.0",)}
READY = "the next round may begin"


def environment_of(peer: str) -> Path:
    """The Python of a peer's environment, which is made where it is not there yet."""
    folder = FOLDER / peer
    done = folder / "installed.json"
    packages = [*SHARED, *ENVIRONMENTS[peer]]
    if not done.exists() or json.loads(done.read_text()) != packages:
        _installed([sys.executable, "-m", "venv", "--clear", str(folder)], peer)
        _installed([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages], peer)
        done.write_text(json.dumps(packages))
    return folder / "bin" / "python"


def _installed(command: Sequence[str], peer: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{peer} cannot be installed: {(ended.stderr.strip().splitlines() or ['no reason'])[-1]}")


def command_of(peer: str, python: Path) -> list[str]:
    script = [str(HERE / f"peer_{peer}.py")]
    if peer == "pfl":
        return [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    return [str(python), *script]


def their_rounds(peer: str, folder: Path) -> Iterator[None]:
    command = command_of(peer, environment_of(peer))
    quiet = {"DO_NOT_TRACK": "1", "FLWR_TELEMETRY_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1"}
    tuned = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "-1"}
    environment = {**os.environ, **quiet, **tuned, "PYTHONPATH": f"{HERE.parent}:{HERE}", "FCL_BENCH_WORK": str(folder)}
    with (
        open(folder / f"{peer}.log", "w") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _until_ready(process.stdout, peer, Path(log.name))
            while True:
                process.stdin.write("go\n")
                process.stdin.flush()
                _until_ready(process.stdout, peer, Path(log.name))
                yield
        finally:
            process.terminate()


def _until_ready(told: Iterator[str], peer: str, log: Path) -> None:
    if not any(READY in line for line in told):
        raise RuntimeError(f"{peer} ended: {(log.read_text().strip().splitlines() or ['no reason'])[-1]}")


def against(peer: str, name: str, turns: int) -> Iterator[Row]:
    """One peer at a time: those that wait for their turn do not keep still, and two threads feel it most."""
    work = WORKS[name]
    with run_on(work, settings_of(name)) as run, ExitStack() as opened:
        choice, loops = ours_and_bare(name, run)
        loops[peer] = their_rounds(peer, handed_over(work, run))
        sides = {side: partial(next, opened.enter_context(closing(loop))) for side, loop in loops.items()}
        seconds = taking_turns(sides, turns)
    faster = yardstick(seconds)
    what = f"a round, {choice.executor} with {choice.threads} threads; {peer} on two processes"
    yield Row(f"{name}-{peer}", what, seconds["ours"], seconds[peer], limit=1.0)
    yield Row(f"{name}-{peer}-bare", f"a round of {peer}, bare loop on {faster}", seconds[peer], seconds[faster])


BENCHES = [
    Bench(f"{name}-{peer}", partial(against, peer, name), turns)
    for name, turns in (("w1", 9), ("w2", 9), ("w3", 5))
    for peer in ENVIRONMENTS
]
