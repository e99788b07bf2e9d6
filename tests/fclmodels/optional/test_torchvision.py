import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fclmodels.optional import torchvision

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fresh(monkeypatch):
    """The guard as in a process that has not imported torchvision, with a stand-in to import."""
    declared = []
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(torchvision, "_declare_operators", lambda: declared.append(True))
    monkeypatch.setattr(torchvision.importlib, "import_module", lambda name: ModuleType(name))
    torchvision.import_torchvision.cache_clear()
    yield declared
    torchvision.import_torchvision.cache_clear()


def install(monkeypatch, folder, load):
    """A torchvision whose extension loads as `load` does."""
    (folder / "_C.so").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(torchvision.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch.ops, "load_library", load)


def test_operators_are_declared_where_the_extension_does_not_load(fresh, monkeypatch, tmp_path):
    def cannot(path):
        raise OSError("libcudart.so.13: cannot open shared object file")

    install(monkeypatch, tmp_path, cannot)
    assert torchvision.import_torchvision().__name__ == "torchvision"
    assert fresh == [True]


def test_nothing_is_declared_where_the_extension_loads(fresh, monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, lambda path: None)
    torchvision.import_torchvision()
    assert fresh == []


def test_nothing_is_declared_where_torchvision_is_there_already(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    torchvision.import_torchvision()
    assert fresh == []


def test_the_installed_torchvision_works():
    """In a process of its own: what other tests import must not help."""
    program = """
import torch
from fclmodels.optional.torchvision import import_torchvision
assert import_torchvision() is import_torchvision()
print(import_torchvision().transforms.functional.hflip(torch.arange(3).view(1, 1, 3)).tolist())
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (process.stdout, process.stderr) == ("[[[2, 1, 0]]]\n", "")


def test_no_other_file_imports_torchvision():
    files = [path for package in ("fclmodels", "tasks", "flows") for path in (ROOT / package).rglob("*.py")]
    importing = re.compile(r"^\s*(import torchvision\b|from torchvision\b)", re.MULTILINE)
    assert [str(path) for path in files if importing.search(path.read_text())] == []
    assert "fclmodels/optional/torchvision.py" in {str(path.relative_to(ROOT)) for path in files}
