"""`make`'s set-up, interrupted in the middle and repeated, and with another Python after one that failed.

The rules, the interpreter's venv and pip are the real ones. The packages stand in for ours: they lie in a folder that
pip takes in place of an index, so that nothing here needs the network.
"""

import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BACKEND = """
import os, pathlib, time, zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = pathlib.Path("name").read_text()
    if os.environ.get("SLOW") == name:
        pathlib.Path(os.environ["STARTED"]).touch()
        time.sleep(600)
    info = f"{name}-1.dist-info"
    with zipfile.ZipFile(f"{folder}/{name}-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}_module.py", "")
        facts = ("Metadata-Version: 2.1", f"Name: {name}", "Version: 1", "Provides-Extra: workflow", "")
        wheel.writestr(f"{info}/METADATA", "\\n".join(facts))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return f"{name}-1-py3-none-any.whl"

build_editable = build_wheel
"""
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "{0}"
version = "1"
optional-dependencies = {{workflow = []}}
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def write_project(name: str) -> dict[str, str]:
    """Return the files of a package that builds itself, for as long as $SLOW says its name."""
    return {"pyproject.toml": PROJECT.format(name), "backend.py": BACKEND, "name": name}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Write a checkout with our Makefile, whose lock has one package; pip finds that beside the checkout."""
    folder, index = tmp_path / "checkout", tmp_path / "index"
    folder.mkdir()
    index.mkdir()
    with tarfile.open(index / "needed-1.tar.gz", "w:gz") as archive:
        for file, text in write_project("needed").items():
            entry = tarfile.TarInfo(f"needed-1/{file}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    digest = hashlib.sha256((index / "needed-1.tar.gz").read_bytes()).hexdigest()
    shutil.copy(ROOT / "Makefile", folder)
    locks = {"requirements.lock": f"needed==1 --hash=sha256:{digest}\n", "constraints.txt": "needed==1\n"}
    for file, text in {**write_project("fclflow"), **locks}.items():
        (folder / file).write_text(text)
    return folder


def start_setup(checkout: Path, **variables: str) -> "subprocess.Popen[bytes]":
    own = ("PIP_", "PYTHON", "VIRTUAL_ENV")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    own_index = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(checkout.parent / "index")}
    with open(checkout.parent / "log", "ab") as log:
        return subprocess.Popen(
            ["make", ".venv/.ready", f"PYTHON={variables.pop('PYTHON', sys.executable)}"],
            cwd=checkout,
            env={**inherited, **own_index, "STARTED": str(checkout.parent / "started"), **variables},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def check_complete(checkout: Path) -> None:
    """Raise AssertionError where the set-up does not come through, or lacks a package."""
    assert start_setup(checkout).wait() == 0, (checkout.parent / "log").read_text()
    assert (checkout / ".venv" / ".ready").exists()
    imports = [checkout / ".venv" / "bin" / "python", "-c", "import needed_module, fclflow_module, ssl"]
    subprocess.run(imports, cwd=checkout.parent, check=True)


@pytest.mark.parametrize(("package", "end"), [("needed", signal.SIGINT), ("fclflow", signal.SIGKILL)])
def test_a_setup_that_ends_in_the_middle_is_repeated(checkout: Path, package: str, end: signal.Signals) -> None:
    """While what the lock names is built, and while the project itself is."""
    setup = start_setup(checkout, SLOW=package)
    deadline = time.monotonic() + 300
    while not (checkout.parent / "started").exists():
        assert setup.poll() is None, (checkout.parent / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(setup.pid, end)
    assert setup.wait() != 0
    assert not (checkout / ".venv" / ".ready").exists()
    check_complete(checkout)


def test_after_a_failed_setup_another_python_starts_anew(checkout: Path) -> None:
    """The first one's environment leads to an interpreter that is gone, and holds packages for it."""
    first = checkout.parent / "first" / "python3"
    first.parent.mkdir()
    first.symlink_to(sys.executable)
    lock = (checkout / "requirements.lock").read_text()
    (checkout / "requirements.lock").write_text(f"{lock}missing==1 --hash=sha256:{'0' * 64}\n")
    assert start_setup(checkout, PYTHON=str(first)).wait() != 0
    assert "No matching distribution found for missing==1" in (checkout.parent / "log").read_text()
    (checkout / "requirements.lock").write_text(lock)
    for name in ("python", "python3"):
        (checkout / ".venv" / "bin" / name).unlink(missing_ok=True)
        (checkout / ".venv" / "bin" / name).symlink_to(first)
    first.unlink()
    (checkout / ".venv" / "lib" / "left").touch()
    check_complete(checkout)
    assert not (checkout / ".venv" / "lib" / "left").exists()
