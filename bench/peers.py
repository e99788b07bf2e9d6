"""Other frameworks' FedAvg rounds against the bare loop, and ours in the same turns (fcl bench --peers).

pfl (Apple), two processes of one thread by torchrun; Flower's simulation, one CPU a client. Each has an environment of
its own below .fcl/peers, installed at first use, and the same samples, model, threads and tuned malloc. A
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
from measuring import Bench, Row, take_turns
from rounds import find_faster_loop, list_settings, open_loops
from workloads import WORKS, open_run, write_work_folder

HERE = Path(__file__).parent
FOLDER = HERE.parent / ".fcl" / "peers"
SHARED = ("numpy==2.4.6", "pydantic==2.14.3", "safetensors==0.8.0", f"torch=={torch.__version__.partition('+')[0]}")
ENVIRONMENTS = {"pfl": ("pfl==0.6.0",), "flower": ("flwr[simulation]==1.41.0",)}
READY = "the next round may begin"


def prepare_environment(peer: str) -> Path:
    """Return the Python of a peer's environment, and install that first where it is missing."""
    folder = FOLDER / peer
    marker = folder / "installed.json"
    packages = [*SHARED, *ENVIRONMENTS[peer]]
    if not marker.exists() or json.loads(marker.read_text()) != packages:
        _run_install([sys.executable, "-m", "venv", "--clear", str(folder)], peer)
        _run_install([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages], peer)
        marker.write_text(json.dumps(packages))
    return folder / "bin" / "python"


def _run_install(command: Sequence[str], peer: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{peer} cannot be installed: {(ended.stderr.strip().splitlines() or ['no reason'])[-1]}")


def build_command(peer: str, python: Path) -> list[str]:
    script = [str(HERE / f"peer_{peer}.py")]
    if peer == "pfl":
        return [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    return [str(python), *script]


def run_peer_rounds(peer: str, folder: Path) -> Iterator[None]:
    command = build_command(peer, prepare_environment(peer))
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
            _wait_until_ready(process.stdout, peer, Path(log.name))
            while True:
                process.stdin.write("go\n")
                process.stdin.flush()
                _wait_until_ready(process.stdout, peer, Path(log.name))
                yield
        finally:
            process.terminate()


def _wait_until_ready(output: Iterator[str], peer: str, log: Path) -> None:
    if not any(READY in line for line in output):
        raise RuntimeError(f"{peer} ended: {(log.read_text().strip().splitlines() or ['no reason'])[-1]}")


def measure_against(peer: str, name: str, turns: int) -> Iterator[Row]:
    """Measure one peer at a time: waiting ones use the processor, which slows two threads most."""
    work = WORKS[name]
    with open_run(work, list_settings(name)) as run, ExitStack() as opened:
        choice, loops = open_loops(name, run)
        loops[peer] = run_peer_rounds(peer, write_work_folder(work, run))
        sides = {side: partial(next, opened.enter_context(closing(loop))) for side, loop in loops.items()}
        seconds = take_turns(sides, turns)
    faster = find_faster_loop(seconds)
    what = f"a round, {choice.executor} with {choice.threads} threads; {peer} on two processes"
    yield Row(f"{name}-{peer}", what, seconds["ours"], seconds[peer], limit=1.0)
    yield Row(f"{name}-{peer}-bare", f"a round of {peer}, bare loop on {faster}", seconds[peer], seconds[faster])


BENCHES = [
    Bench(f"{name}-{peer}", partial(measure_against, peer, name), turns)
    for name, turns in (("w1", 9), ("w2", 9), ("w3", 5))
    for peer in ENVIRONMENTS
]
