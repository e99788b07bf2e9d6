"""A project's own method and backbone, with an installed fclflow: listed, run in worker processes and on Ray, stale."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Tool = Callable[..., str]

SETTINGS = """
stream: {kind: class-incremental, tasks: 2}
partition: {kind: iid, clients: 4, train_share: 0.2}
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


@pytest.fixture
def home(tool: Tool, tmp_path: Path) -> Path:
    """A project with a method and a backbone of its own."""
    (tmp_path / "params.yaml").write_text(SETTINGS)
    backbones = tmp_path / "plugins" / "backbones"
    backbones.mkdir(parents=True)
    (backbones / "tiny_net.py").write_text(BACKBONE)
    (backbones / "parts.py").write_text(PART)
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
    for kind, name, file in (("methods", "lean-avg", "lean_avg.py"), ("backbones", "tiny-net", "tiny_net.py")):
        rows = {row["name"]: row for row in json.loads(tool(home, "fcl", "list", kind, "--json"))}
        assert rows[name]["from"] == f"plugins/{kind}/{file}"
    tool(home, "fcl", "run", "-m", "lean-avg", "-q")
    assert show_state(tool, home) == ("done", None, "8 of 8 cached")

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
