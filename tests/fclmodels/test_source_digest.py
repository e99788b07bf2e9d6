"""Source digests: the code of a module and of what it imports, and nothing else."""

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
from fclmodels import source_digest
from fclmodels.source_digest import digest_sources, list_closure

ASK = """
import json
from fclmodels.source_digest import digest_sources
import fclmodels
methods = ("fedavg", "fedprox", "joint", "single_task")
print(json.dumps({m: digest_sources(f"fclmodels.methods.{m}") for m in methods} | {"file": fclmodels.__file__}))
"""


@pytest.fixture
def toys(tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """Writes modules that stand beside fclmodels' own."""
    fclmodels.__path__.append(str(tmp_path))

    def write(name: str, source: str) -> Path:
        (tmp_path / f"{name}.py").write_text(source)
        forget_sources()
        return tmp_path / f"{name}.py"

    yield write
    fclmodels.__path__.remove(str(tmp_path))
    forget_sources()


def forget_sources() -> None:
    """A process reads each module once."""
    for function in (source_digest._digest_code, source_digest._list_imports, source_digest._find_path):
        function.cache_clear()


def test_imports_at_the_top_are_followed_however_they_are_written(toys: Callable[[str, str], Path]) -> None:
    toys("toy_one", "import json\nfrom fclmodels.toy_two import x\nfrom . import toy_three\nimport torch.nn\n")
    toys("toy_two", "if True:\n    from fclmodels import toy_four\nx = 1\n")
    toys("toy_three", "from .toy_one import y\ntry:\n    import fclmodels.toy_five\nexcept ImportError:\n    pass\n")
    toys("toy_four", "x = 1\n")
    toys("toy_five", "x = 1\n")
    assert toys_in(list_closure(["fclmodels.toy_one"])) == {"one", "two", "three", "four", "five"}


def test_imports_inside_of_functions_for_types_alone_and_by_name_are_not(toys: Callable[[str, str], Path]) -> None:
    toys(
        "toy_one",
        "from typing import TYPE_CHECKING\nimport importlib\n"
        "if TYPE_CHECKING:\n    from fclmodels.toy_two import x\n"
        "def f():\n    from fclmodels.toy_three import x\n"
        "class A:\n    def g(self):\n        import fclmodels.toy_four\n"
        "importlib.import_module('fclmodels.toy_five')\n",
    )
    for name in ("two", "three", "four", "five"):
        toys(f"toy_{name}", "x = 1\n")
    assert toys_in(list_closure(["fclmodels.toy_one"])) == {"one"}


def toys_in(modules: set[str]) -> set[str]:
    return {name.removeprefix("fclmodels.toy_") for name in modules if "toy_" in name}


def test_an_empty_module_is_not_counted(toys: Callable[[str, str], Path]) -> None:
    toys("toy_one", "import fclmodels.toy_two\n")
    toys("toy_two", "\n")
    assert toys_in(list_closure(["fclmodels.toy_one"])) == {"one"}


def test_plugins_of_a_project_are_followed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "plugins" / "methods"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "mine.py").write_text("from plugins.methods.helper import x\nfrom fclmodels.errors import UserError\n")
    (package / "helper.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    reached = list_closure(["plugins.methods.mine"])
    assert reached == {"plugins.methods.mine", "plugins.methods.helper", "fclmodels.errors"}


def test_the_digest_is_that_of_the_code_in_the_closure(toys: Callable[[str, str], Path]) -> None:
    toys("toy_a", "from fclmodels.toy_b import x\n")
    toys("toy_b", "x = 1\n")
    toys("toy_c", "x = 1\n")
    assert digest_sources("fclmodels.toy_a") != digest_sources("fclmodels.toy_c")
    assert digest_sources("fclmodels.toy_c", "fclmodels.toy_b") == digest_sources("fclmodels.toy_b", "fclmodels.toy_c")


@pytest.mark.parametrize(
    ("edit", "changes"),
    [
        ("x = 1  # the first\n", False),
        ("# a title\n\n\nx = 1\n", False),
        ('"""A title."""\n\nx = 1\n', False),
        ("x = (1)\n", False),
        ("x = 2\n", True),
        ("x = 1\ny = 2\n", True),
        ("y = 1\n", True),
    ],
)
def test_only_code_counts(edit: str, changes: bool, toys: Callable[[str, str], Path]) -> None:
    assert (digest_of(edit, toys) != digest_of("x = 1\n", toys)) == changes


@pytest.mark.parametrize(
    "definition", ["def f():\n    {}return 1\n", "async def f():\n    {}return 1\n", "class A:\n    {}x = 1\n"]
)
def test_docstrings_of_functions_and_classes_do_not_count_but_their_other_texts_do(
    definition: str, toys: Callable[[str, str], Path]
) -> None:
    texts = ("", "'Say it.'\n    ", "y = 'text'\n    ")
    digests = [digest_of(definition.format(text), toys) for text in texts]
    assert digests[0] == digests[1] != digests[2]


def digest_of(source: str, toys: Callable[[str, str], Path]) -> str:
    """The digest of a module with this source."""
    toys("toy_text", source)
    return digest_sources("fclmodels.toy_text")


def test_a_method_stands_on_the_engine_and_on_no_other_method() -> None:
    found = list_closure(["fclmodels.methods.fedprox"])
    assert found >= {
        "fclmodels.methods.fedprox",
        "fclmodels.methods.fedavg",
        "fclmodels.federation.training.local_training",
        "fclmodels.data.batches",
        "fclmodels.data.augment",
        "fclmodels.backbones.model.heads",
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
            file.write("EDITED = 1\n")

    states = [digests()]
    for module in (
        "methods/fedprox.py",
        "methods/joint.py",
        "federation/training/local_training.py",
        "federation/executors/processes.py",
    ):
        edit(module)
        states.append(digests())
    changed = [{m for m in before if before[m] != after[m]} for before, after in pairwise(states)]
    assert changed == [{"fedprox"}, {"joint"}, {"fedavg", "fedprox", "joint", "single_task"}, set()]


def test_of_another_package_all_imports_are_followed_but_into_a_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package of a plugin: nobody says for it what settings switch on."""
    for package in ("toy_package", "toy_library"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "toy_library" / "tool.py").write_text("x = 1\n")
    (tmp_path / "toy_package" / "part.py").write_text("x = 1\n")
    (tmp_path / "toy_package" / "method.py").write_text(
        "import toy_library.tool\ndef f():\n    from toy_package.part import x\n    from fclmodels.metrics import y\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reached = list_closure(["toy_package.method"])
    assert {name for name in reached if "toy" in name} == {"toy_package.method", "toy_package.part"}
    assert "fclmodels.metrics" in reached
