"""A project's own plugins of each kind, with an installed fclflow: listed, run in workers and on Ray, stale."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fclmodels.data.splits.split_reader import Splits

Tool = Callable[..., str]

SETTINGS = """
data: {source: inverted-digits}
stream: {kind: last-first, tasks: 2}
partition: {kind: more-and-more, clients: 4, train_share: 0.2}
model: {backbone: tiny-net}
federation: {rounds: 2, executor: processes, workers: 2, threads: 1}
device: cpu
experiment: {methods: [lean-avg], seeds: [0]}
"""
BACKBONE = """
from math import prod
from torch import nn
from plugins.backbones.parts import Rectified
from fclmodels.backbones.base import Backbone, FeatureNet

class TinyNet(Backbone):
    \"\"\"One fully connected layer.\"\"\"
    name = "tiny-net"
    def build(self, shape):
        return TinyNetwork(prod(shape))

class TinyNetwork(FeatureNet):
    blocks = ("layer",)
    features = 16
    def __init__(self, inputs):
        super().__init__()
        self.layer = Rectified(inputs, 16)
    def forward(self, x):
        return self.layer(x.flatten(1))
"""
PART = """
from torch import nn

class Rectified(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()
"""
SOURCE = """
from fclmodels.data.sources.base import list_arrays
from fclmodels.data.sources.digits import DIGITS, Digits, read_digits

class InvertedDigits(Digits):
    \"\"\"The digits, dark on light.\"\"\"
    name = "inverted-digits"
    def catalogue(self):
        images, labels = read_digits()
        return list_arrays(self.name, DIGITS, {None: (255 - images, labels)})
"""
STREAM = """
from fclmodels.data.streams.base import PlannedTask, lay_out_for_all
from fclmodels.data.streams.class_incremental import ClassIncremental

class LastFirst(ClassIncremental):
    \"\"\"Two tasks, the last classes first.\"\"\"
    name = "last-first"
    def lay_out(self, samples, clients):
        half = len(samples.classes) // 2
        groups = [tuple(range(half, len(samples.classes))), tuple(range(half))]
        tasks = [PlannedTask(name, group) for name, group in zip(("last", "first"), groups)]
        return lay_out_for_all(tasks, [samples.find_rows(group) for group in groups], clients)
"""
PARTITION = """
import numpy as np
from fclmodels.data.partitions.base import Partition

class MoreAndMore(Partition):
    \"\"\"Each client has more than the one before.\"\"\"
    name = "more-and-more"
    def draw_counts(self, counts, clients, generator):
        ends = np.cumsum(np.arange(1, clients + 1)) / (clients * (clients + 1) / 2)
        places = np.rint(np.outer(np.r_[0, ends], counts)).astype(int)
        return np.diff(places, axis=0)
"""
FILES = {
    "sources/inverted_digits.py": SOURCE,
    "streams/last_first.py": STREAM,
    "partitions/more_and_more.py": PARTITION,
    "backbones/tiny_net.py": BACKBONE,
    "backbones/parts.py": PART,
}
OWN = {
    "methods": ("lean-avg", "lean_avg.py"),
    "backbones": ("tiny-net", "tiny_net.py"),
    "sources": ("inverted-digits", "inverted_digits.py"),
    "streams": ("last-first", "last_first.py"),
    "partitions": ("more-and-more", "more_and_more.py"),
}


@pytest.fixture
def home(tool: Tool, tmp_path: Path) -> Path:
    """A project with a plugin of its own of each kind."""
    (tmp_path / "params.yaml").write_text(SETTINGS)
    for name, text in FILES.items():
        file = tmp_path / "plugins" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    tool(tmp_path, "fcl", "new-method", "lean-avg")
    return tmp_path


def show_state(tool: Tool, home: Path) -> tuple[str, str | None, str]:
    rows = json.loads(tool(home, "fcl", "status", "--json"))
    (row,) = [row for row in rows if row["what"] == "runs/lean-avg-0"]
    return row["state"], row["why"], row["steps"]


def digest_models(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())["digests"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_own_plugins_run_in_worker_processes_and_an_edit_of_one_makes_its_results_stale(tool: Tool, home: Path) -> None:
    for kind, (name, file) in OWN.items():
        rows = {row["name"]: row for row in json.loads(tool(home, "fcl", "list", kind, "--json"))}
        assert rows[name]["from"] == f"plugins/{kind}/{file}"
    tool(home, "fcl", "run", "-m", "lean-avg", "-q")
    assert show_state(tool, home) == ("done", None, "8 of 8 cached")
    splits = Splits.open(next(home.rglob("stream.json")).parent)
    assert [task.name for task in splits.tasks] == ["last", "first"]
    sizes = [len(splits.select_rows(0, "train", client)) for client in range(4)]
    assert sizes == sorted(set(sizes))  # each has more than the one before
    assert splits.images[..., 0, 0].float().mean() > 200  # light corners

    method, part = home / "plugins" / "methods" / "lean_avg.py", home / "plugins" / "backbones" / "parts.py"
    method.write_text(method.read_text().replace("FedAvg whose clients", "Clients"))
    (method.parent / "another.py").write_text("x = 1\n")
    assert show_state(tool, home) == ("done", None, "8 of 8 cached")
    part.write_text(PART.replace("relu", "tanh"))
    state, why, steps = show_state(tool, home)
    assert (state, steps) == ("stale", "0 of 8 cached")
    assert "code" in str(why)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_own_plugins_run_on_ray_and_end_with_the_same_bits(tool: Tool, home: Path, two_nodes: object) -> None:
    run = ("fcl", "run", "-m", "lean-avg", "-q")
    tool(home, *run, "--set", "federation.executor=ray", "--out", "runs/on-ray", "--set", "tracking.experiment=ray")
    (home / ".fcl" / "store").rename(home / "store-of-ray")
    tool(home, *run, "--set", "federation.executor=serial", "--out", "runs/here")
    assert digest_models(home / "runs" / "on-ray") == digest_models(home / "runs" / "here")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_test_of_a_new_method_passes_as_it_is_written(home: Path) -> None:
    end = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert end.returncode == 0, end.stdout[-3000:]
    assert "3 passed" in end.stdout


def test_a_file_that_cannot_be_imported_is_a_line_below_the_list(
    fcl: Callable[..., int],
    write_plugin: Callable[[str, str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_plugin("partitions/halves.py", "x = y\n")
    write_plugin("partitions/thirds.py", 'class Thirds:\n    """In three."""\n    name = \'thirds\'\n')
    assert fcl("list", "partitions") == 0
    out, err = capsys.readouterr()
    assert err == "plugins/partitions/halves.py:1 cannot be imported: NameError: name 'y' is not defined\n"
    (line,) = [line for line in out.splitlines() if line.startswith("thirds")]
    assert line.split() == ["thirds", "plugins/partitions/thirds.py", "In", "three."]


def test_the_shell_completes_a_projects_own_methods(write_plugin: Callable[[str, str], Path]) -> None:
    from flows.cli.options import complete_methods

    write_plugin("methods/any_file.py", "class Mine:\n    name = 'fedmine'\n")
    assert {"fedmine", "fedprox"} <= set(complete_methods("fed"))
