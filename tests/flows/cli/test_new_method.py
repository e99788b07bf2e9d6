"""`fcl new-method`: the files of a method, which pass the contract as they are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fclmodels.errors import UserError
from fclmodels.methods.fedavg import FedAvg
from flows.cli.new_method import insert_block, write_files

ROOT = Path(__file__).parents[3]


def test_a_new_methods_files_are_written_once(tmp_path: Path) -> None:
    for folder in ("fclmodels/methods", "tests/fclmodels/methods"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "params.yaml").write_text("# top\nmethods: # all\n  er: {}\n  fedavg:\n    mu: 1\n\nexperiment: {}\n")
    method, test, params = write_files("lean-avg", tmp_path)
    assert "class LeanAvg(FedAvg)" in method.read_text()
    assert "from fclmodels.methods.lean_avg import LeanAvg" in test.read_text()
    assert params.read_text().splitlines()[1:6] == [
        "methods: # all",
        "  er: {}",
        "  fedavg:",
        "    mu: 1",
        "  lean-avg: {}",
    ]
    for name in ("lean-avg", "fedavg", "Lean", "class", "a_b"):
        with pytest.raises(UserError):
            write_files(name, tmp_path)


def test_in_a_project_a_new_method_is_a_plugin_of_its_own(tmp_path: Path) -> None:
    method, test, params = write_files("lean-avg", tmp_path)
    assert method == tmp_path / "plugins" / "methods" / "lean_avg.py"
    assert "check_method(LeanAvg)" in test.read_text()
    assert params.read_text().endswith("methods:\n  lean-avg: {}\n")


@pytest.mark.parametrize(
    ("text", "with_block"),
    [
        ("methods:\n  a: {}\n  c:\n    x: 1\nlast: 1\n", "methods:\n  a: {}\n  b: {}\n  c:\n    x: 1\nlast: 1\n"),
        ("methods: # mine\nlast: 1\n", "methods: # mine\n  b: {}\nlast: 1\n"),
        ("methods: {} # mine\n", "methods: {b: {}} # mine\n"),
        ("methods: {a: {x: 1}}\n", "methods: {b: {}, a: {x: 1}}\n"),
        ("device: cpu", "device: cpu\n\nmethods:\n  b: {}\n"),
        ("", "\nmethods:\n  b: {}\n"),
    ],
)
def test_a_block_goes_in_by_name_however_the_others_are_written(text: str, with_block: str) -> None:
    assert insert_block(text, "b") == with_block
    assert yaml.safe_load(with_block)["methods"]["b"] == {}


@pytest.mark.slow
def test_a_new_method_passes_its_test_and_the_contract_as_it_is_written(tmp_path: Path) -> None:
    """In a copy of the project."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for file in tracked:
        if (
            file.startswith(("fclmodels/", "flows/", "tests/", "pyproject", "params", "docs/"))
            and (ROOT / file).exists()
        ):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def python(*arguments: str) -> None:
        end = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert end.returncode == 0, end.stdout[-3000:] + end.stderr[-3000:]

    python("-c", "from flows.cli.app import main; import sys; sys.argv = ['fcl', 'new-method', 'lean-avg']; main()")
    python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/fclmodels/methods/test_lean_avg.py")
    python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/fclmodels/methods/test_contract.py", "-k", "lean-avg")
    python(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/fclmodels/test_plugins.py",
        "tests/fclmodels/settings/test_load.py",
    )


def test_the_hooks_that_its_text_names_are_there(tmp_path: Path) -> None:
    method, _, _ = write_files("lean-avg", tmp_path)
    _, _, hooks = method.read_text().partition("# Other places to differ from FedAvg: ")
    named = set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", hooks.partition("an exchange of one's")[0])) - {"__init__"}
    assert {"compute_loss", "make_payload", "make_update_form"} <= named
    assert all(hasattr(FedAvg, name) for name in named)
