"""Twenty faults, and a stream of a few arrivals with faults. run.py and soak.py do the same at length every night."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def run_script(name: str, *options: str) -> "subprocess.CompletedProcess[str]":
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    return subprocess.run(
        [sys.executable, str(HERE / name), *options],
        env=inherited | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


SPOOL = """
import os, sys, torch
from pathlib import Path
from fclmodels.federation.engine import replies
from fclmodels.federation.messages import Part, Reply
replies.IN_MEMORY = 0
stored = replies.Replies([0], Path(sys.argv[1]))
try:
    stored.add(0, Reply({"basis": Part("basis", {"b": torch.ones(10**6)}, "each")}))
except OSError as problem:
    sys.exit(str(problem))
"""


def test_replies_on_a_real_disk_without_room_are_an_error_and_no_signal(tmp_path: Path) -> None:
    namespace = ["unshare", "--mount", "--map-root-user"]
    mount = 'mount -t tmpfs -o size=1m fcl "$1"'
    if shutil.which("unshare") is None or subprocess.call([*namespace, "sh", "-c", mount, "sh", str(tmp_path)]):
        pytest.skip("nothing can be mounted here")
    words = [*namespace, "sh", "-c", f'{mount} && exec "$2" -c "$3" "$1"', "sh", str(tmp_path), sys.executable, SPOOL]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended
    assert f"No space left on device: '{tmp_path}/0'" in ended.stderr


def test_after_each_of_twenty_faults_a_run_comes_to_its_right_end(tmp_path: Path) -> None:
    ended = run_script("run.py", "--faults", "20", "--json", str(tmp_path / "outcomes.json"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    outcomes = json.loads((tmp_path / "outcomes.json").read_text())
    assert sum(outcome["became"] != "skipped" for outcome in outcomes) == 20
    for outcome in outcomes:
        if outcome["became"] == "skipped":
            warnings.warn(f"{outcome['kind']} could not be injected: {outcome['what']}", stacklevel=1)


def test_a_stream_learns_each_arrival_once_whatever_happens() -> None:
    ended = run_script("soak.py", "--arrivals", "4")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "nothing lost, nothing doubled" in ended.stdout
