"""Source digests: a module and what it imports, nothing else. Edits are made in a copy of the package."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import fclmodels
from fclmodels.fingerprint import closure, source_closure

ASK = """
import json
from fclmodels.fingerprint import ROOT, source_closure
import fclmodels
methods = ("fedavg", "fedprox", "joint", "single_task")
print(json.dumps({m: source_closure(f"fclmodels.methods.{m}") for m in methods} | {"file": fclmodels.__file__}))
"""


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """Writes modules that stand beside fclmodels' own."""
    fclmodels.__path__.append(str(tmp_path))

    def write(name: str, source: str) -> Path:
        (tmp_path / f"{name}.py").write_text(source)
        return tmp_path / f"{name}.py"

    yield write
    fclmodels.__path__.remove(str(tmp_path))


def test_every_way_to_import_is_followed(toys: Callable[[str, str], Path]) -> None:
    toys("toy_one", "import json\nfrom fclmodels.toy_two import x\nfrom . import toy_three\nimport torch.nn\n")
    toys(
        "toy_two", "from fclmodels import toy_four\ndef f():\n    import fclmodels.toy_five as five\n    return five\n"
    )
    toys("toy_three", "from .toy_one import y\n")
    toys("toy_four", "import importlib\nimportlib.import_module('fclmodels.toy_six')\n")
    toys("toy_five", "")
    toys("toy_six", "")
    found = {name for name in closure(["fclmodels.toy_one"]) if "toy" in name}
    assert found == {f"fclmodels.toy_{n}" for n in ("one", "two", "three", "four", "five")}


def test_the_digest_is_that_of_the_sources_in_the_closure(toys: Callable[[str, str], Path]) -> None:
    toys("toy_a", "from fclmodels.toy_b import x\n")
    used, unused = toys("toy_b", "x = 1\n"), toys("toy_c", "x = 1\n")
    before = source_closure("fclmodels.toy_a")
    unused.write_text("x = 2\n")
    assert source_closure("fclmodels.toy_a") == before
    used.write_text("x = 2\n")
    assert source_closure("fclmodels.toy_a") != before
    assert source_closure("fclmodels.toy_a") != source_closure("fclmodels.toy_b")
    assert source_closure("fclmodels.toy_c", "fclmodels.toy_b") == source_closure("fclmodels.toy_b", "fclmodels.toy_c")


def test_a_method_stands_on_the_engine_and_on_no_other_method() -> None:
    found = closure(["fclmodels.methods.fedprox"])
    assert found >= {
        "fclmodels.methods.fedprox",
        "fclmodels.methods.fedavg",
        "fclmodels.federation.local",
        "fclmodels.data.batches",
        "fclmodels.data.augment",
        "fclmodels.backbones.heads",
        "fclmodels.randomness",
    }
    assert not found & {"fclmodels.methods.joint", "fclmodels.methods.single_task", "fclmodels.backbones.mlp"}


def test_editing_one_method_changes_its_own_digest_only(tmp_path: Path) -> None:
    shutil.copytree(
        Path(fclmodels.__file__).parent, tmp_path / "fclmodels", ignore=shutil.ignore_patterns("__pycache__")
    )

    def digests() -> dict[str, str]:
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        output = subprocess.run(
            [sys.executable, "-c", ASK], cwd=tmp_path, env=environment, capture_output=True, check=True
        )
        answer = json.loads(output.stdout)
        assert Path(answer.pop("file")).is_relative_to(tmp_path)
        return answer

    def edit(module: str) -> None:
        with open(tmp_path / "fclmodels" / module, "a") as file:
            file.write("# edited\n")

    states = [digests()]
    for module in ("methods/fedprox.py", "methods/joint.py", "federation/local.py", "federation/processes.py"):
        edit(module)
        states.append(digests())
    changed = [{m for m in before if before[m] != after[m]} for before, after in pairwise(states)]
    assert changed == [{"fedprox"}, {"joint"}, {"fedavg", "fedprox", "joint", "single_task"}, set()]
