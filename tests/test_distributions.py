"""A wheel and an sdist, each installed into an environment of its own, as pip and pipx do it, and used from there.

To download what the packages require would take minutes and the network. The environments hold links to the installed
packages that requirements.lock names, and no others; pip resolves the requirements against these.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
SOURCES = ("flows", "tasks", "fclmodels", "pyproject.toml", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Installed(NamedTuple):
    """An environment with fclflow; `fcl` is a link to its command, in a folder that has nothing else."""

    packages: Path
    fcl: Path


def link_packages(folder: Path) -> None:
    """Link what requirements.lock names, and torch, into this folder."""
    locked = re.findall(r"^([\w.-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    for name in {*locked, "torch"}:
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:  # for another Python
            continue
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(sysconfig.get_path("purelib")) / top)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both from a copy of the sources; return their folder."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    for kind in ("sdist", "wheel"):
        subprocess.run([sys.executable, "-c", BUILD.format(kind), folder], cwd=source, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def install(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Installed]:
    """Return a function that installs the distribution whose file's name ends so, with its extra `workflow`."""

    def make(suffix: str) -> Installed:
        (distribution,) = distributions.glob(f"*{suffix}")
        place = tmp_path_factory.mktemp("environment")
        python = place / "env" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "env"], check=True)
        (packages,) = (place / "env" / "lib").glob("python*/site-packages")
        link_packages(packages)
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-build-isolation"]
        installed = subprocess.run(
            [*pip, f"{distribution}[workflow]"],
            cwd=place,
            env=clean_environment(),
            text=True,
            capture_output=True,
            check=False,
        )
        assert installed.returncode == 0, installed.stdout + installed.stderr
        (place / "bin").mkdir()
        (place / "bin" / "fcl").symlink_to(place / "env" / "bin" / "fcl")
        return Installed(packages, place / "bin" / "fcl")

    return functools.cache(make)


def clean_environment() -> dict[str, str]:
    """Return an environment in which nothing leads to this checkout or to the tools of this Python."""
    own = ("PYTHON", "PREFECT_", "MLFLOW_", "PIP_", "VIRTUAL_ENV")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return inherited | {"PATH": "/usr/bin:/bin", "FCL_SERVER_IDLE_SECONDS": "3"}


def list_packages(folder: Path) -> dict[str, bytes]:
    """Return the content of each file of fclflow's packages that was installed here."""
    files = [file for name in SOURCES[:3] for file in (folder / name).rglob("*") if file.is_file()]
    return {str(f.relative_to(folder)): f.read_bytes() for f in files if "__pycache__" not in f.parts}


@pytest.mark.parametrize("suffix", [".whl", ".tar.gz"])
def test_a_distribution_installs_what_the_checkout_has(
    install: Callable[[str], Installed], suffix: str, tmp_path: Path
) -> None:
    installed = install(suffix)
    assert list_packages(installed.packages) == list_packages(ROOT)
    (licence,) = installed.packages.glob("fclflow-*.dist-info/licenses/LICENSE")
    assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()
    shown = subprocess.run([installed.fcl, "--version"], cwd=tmp_path, env=clean_environment(), capture_output=True)
    assert shown.stdout.decode() == f"fclflow {metadata.version('fclflow')}\n"


def test_with_the_wheel_alone_own_photographs_are_learned_and_compared(
    install: Callable[[str], Installed], tmp_path: Path
) -> None:
    """As after `pipx install`: there is a link to `fcl`, and no other command of the environment is on the PATH."""
    installed = install(".whl")
    random = np.random.default_rng(0)
    for brightness in (0, 60, 120, 180):
        (tmp_path / "photographs" / f"bright {brightness}").mkdir(parents=True)
        for number in range(20):
            pixels = (brightness + 60 * random.random((16, 16, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photographs" / f"bright {brightness}" / f"{number}.png")
    (tmp_path / "project").mkdir()

    def fcl(*words: str) -> str:
        ended = subprocess.run(
            [installed.fcl, *words],
            cwd=tmp_path / "project",
            env=clean_environment(),
            text=True,
            capture_output=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    fcl("init", "../photographs")
    short = ("--set", "federation.rounds=1")
    fcl("run", "-m", "fedavg", *short)
    fcl("run", "-m", "er", *short)
    assert re.search(r"^fedavg .*\ner ", fcl("compare"), re.MULTILINE)
