"""The ranges and the pins belong together, and a bare machine gets one clear line."""

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("flows", "tasks", "fclmodels")
BASE = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = {name: [*map(Requirement, lines)] for name, lines in PROJECT["optional-dependencies"].items()}
ALL = BASE + [requirement for extra in EXTRAS.values() for requirement in extra]
PYTHONS = ("3.11.0", "3.11.3", "3.11.5", "3.12.0", "3.13.0")  # the oldest, and those at which packages differ
NO_HASH = re.compile(r"torch|triton|nvidia-.*|cuda-.*")  # their files differ from index to index: of a GPU, of none


def read_pins(file: str, python: str) -> dict[str, str]:
    """Return the versions that a lock has for a Python on Linux, by name."""
    text = re.sub(r" *\\\n *--hash=sha256:[0-9a-f]{64}", "", (ROOT / file).read_text())
    lines = [Requirement(line) for line in text.splitlines() if not line.startswith("#")]
    fitting = [line for line in lines if line.marker is None or line.marker.evaluate(environment_of(python))]
    pins = {canonicalize_name(line.name): str(line.specifier).removeprefix("==") for line in fitting}
    assert len(pins) == len(fitting), f"{file} has two versions of a package for Python {python}"
    return pins


def environment_of(python: str, extra: str = "") -> dict[str, str]:
    return {"python_full_version": python, "python_version": python.rpartition(".")[0], "extra": extra}


@functools.cache
def read_requirements(name: str) -> list[Requirement]:
    return [Requirement(line) for line in metadata.requires(name) or []]


def brought_by(requirements: Iterable[Requirement], python: str | None = None) -> dict[str, list[Requirement]]:
    """Return what these requirements need on a Python, theirs included, and so on: each with who asks for what.

    Of a package that is not installed here, because another Python needs it, the own requirements are not read.
    """
    asked: dict[str, list[Requirement]] = {}
    waiting = [*requirements]
    done: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        asked.setdefault(name, []).append(requirement)
        for extra in {"", *requirement.extras} - {e for n, e in done if n == name}:
            done.add((name, extra))
            environment = environment_of(python, extra) if python else {"extra": extra}
            with suppress(metadata.PackageNotFoundError):
                theirs = read_requirements(name)
                waiting += [r for r in theirs if r.marker is None or r.marker.evaluate(environment)]
    return asked


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(
    ("file", "requirements"),
    [
        ("constraints.txt", ALL),
        ("requirements.lock", BASE + EXTRAS["workflow"]),
        ("requirements-develop.lock", ALL),
    ],
    ids=["constraints", "run", "develop"],
)
def test_a_lock_resolves_the_requirements_on_every_python(
    file: str, requirements: list[Requirement], python: str
) -> None:
    pins = read_pins(file, python)
    asked = {name: who for name, who in brought_by(requirements, python).items() if not NO_HASH.fullmatch(name)}
    assert asked.keys() - pins.keys() == set()
    misfits = [str(r) for name, who in asked.items() for r in who if not r.specifier.contains(pins[name], True)]
    assert misfits == []
    assert pins.items() <= read_pins("constraints.txt", python).items()


@pytest.mark.slow
@pytest.mark.skipif("FCL_TESTS_MAY_DOWNLOAD" not in os.environ, reason="asks a package index")
@pytest.mark.parametrize("python", ["3.12", "3.13"])
def test_pip_resolves_to_the_lock_on_another_python(python: str, tmp_path: Path) -> None:
    """By that Python's own pip, which installs nothing; torch's build and what it brings is the index's."""
    other = shutil.which(f"python{python}")
    if other is None:
        pytest.skip(f"python{python} is not installed")
    version = subprocess.run([other, "-c", "import platform; print(platform.python_version())"], capture_output=True)
    pip = [other, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "report.json"]
    command = [*pip, "--constraint", ROOT / "constraints.txt", f"{ROOT}[workflow]"]
    resolved = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert resolved.returncode == 0, resolved.stderr
    packages = [entry["metadata"] for entry in json.loads((tmp_path / "report.json").read_text())["install"]]
    pins = {canonicalize_name(package["name"]): package["version"] for package in packages}
    ours = {name: pin for name, pin in pins.items() if name != "fclflow" and not NO_HASH.fullmatch(name)}
    assert ours == read_pins("requirements.lock", version.stdout.decode().strip())


@pytest.mark.parametrize("file", ["requirements.lock", "requirements-develop.lock"])
def test_a_lock_has_a_hash_of_every_package(file: str) -> None:
    entries = (ROOT / file).read_text().replace("\\\n", "").splitlines()
    assert entries
    assert [e for e in entries if not re.fullmatch(r"\S+==\S+( ; .*?)?(?: +--hash=sha256:[0-9a-f]{64})+", e)] == []
    assert not any(NO_HASH.fullmatch(e.partition("==")[0]) for e in entries)


def test_the_demo_sets_up_none_of_what_development_needs() -> None:
    run, develop = (read_pins(file, "3.11.0") for file in ("requirements.lock", "requirements-develop.lock"))
    assert develop.keys() - run.keys() >= {"ray", "transformers", "mkdocs-material", "selenium", "mypy", "pytest"}
    make = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo: \$\(READY\)", make, re.MULTILINE)


def imported(package: str) -> set[str]:
    """The top-level modules that a package's files import, at their head or within a function."""
    nodes = (node for file in (ROOT / package).rglob("*.py") for node in ast.walk(ast.parse(file.read_text())))
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def test_what_the_packages_import_is_required_by_name() -> None:
    owners = metadata.packages_distributions()
    foreign = set().union(*map(imported, PACKAGES)) - {*PACKAGES, *sys.stdlib_module_names}
    required = {canonicalize_name(r.name) for r in BASE + EXTRAS["workflow"]} | {"pydantic-core"}  # a part of pydantic
    assert {name for name in foreign if not required & {canonicalize_name(o) for o in owners.get(name, [])}} == set()


WITHOUT_EXTRAS = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"{name} comes with an extra only", name=name)

refused = set(sys.argv[1:])
sys.meta_path.insert(0, Refuse())
import fclmodels, flows.cli.app
for module in pkgutil.walk_packages(fclmodels.__path__, "fclmodels."):
    importlib.import_module(module.name)
"""


def test_the_science_and_the_command_need_no_extra() -> None:
    base = brought_by(BASE).keys()
    refused = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not base & {canonicalize_name(owner) for owner in owners} and module not in PACKAGES
    }
    assert {"mlflow", "prefect", "dvc", "pandas"} <= refused
    run = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS, *refused], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_without_python_make_says_so_in_one_line(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "requirements.lock", "requirements-develop.lock"):
        shutil.copy(ROOT / name, tmp_path)
    make = shutil.which("make")
    assert make
    run = subprocess.run([make, "demo"], cwd=tmp_path, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.splitlines()[0].startswith("fclflow needs Python 3.11 or newer")
    assert len(run.stderr.splitlines()) == 2  # the other is make's own
    assert not (tmp_path / ".venv").exists()


def test_the_changelog_tells_of_this_version() -> None:
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    assert headings[0].startswith(f"## [{PROJECT['version']}]")
