"""The ranges, the pins and the wheel belong together, and a bare machine gets one clear line."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
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
PINS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
)


def brought_by(requirements: Iterable[Requirement]) -> set[str]:
    """The installed distributions that these requirements need, theirs included, and so on."""
    found: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name(r.name), extra) for r in requirements for extra in ("", *r.extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for needed in map(Requirement, metadata.requires(name) or []):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(needed.name), e) for e in ("", *needed.extras)]
    return {name for name, _ in found}


@pytest.mark.parametrize("requirement", ALL, ids=str)
def test_every_requirement_is_pinned_inside_its_range(requirement: Requirement) -> None:
    assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)])


def test_the_lock_has_a_hash_of_every_pinned_package_but_torch() -> None:
    """torch's file differs from index to index: of a GPU, of none."""
    entries = (ROOT / "requirements.lock").read_text().replace("\\\n", "").splitlines()
    locked = dict(re.fullmatch(r"(\S+)==(\S+)(?: +--hash=sha256:[0-9a-f]{64})+", line).groups() for line in entries)
    assert locked == {canonicalize_name(name): version for name, version in PINS.items() if name != "torch"}


def test_everything_that_the_requirements_bring_is_pinned() -> None:
    gpu_build = ("nvidia-", "cuda-", "triton")
    brought = {name for name in brought_by(ALL) if not name.startswith(gpu_build)}
    assert brought - {canonicalize_name(name) for name in PINS} == set()


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
import fclmodels, flows.cli
for module in pkgutil.walk_packages(fclmodels.__path__, "fclmodels."):
    importlib.import_module(module.name)
"""


def test_the_science_and_the_command_need_no_extra() -> None:
    base = brought_by(BASE)
    refused = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not base & {canonicalize_name(owner) for owner in owners} and module not in PACKAGES
    }
    assert {"mlflow", "prefect", "dvc", "pandas"} <= refused
    run = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS, *refused], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_without_python_make_says_so_in_one_line(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "requirements.lock"):
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


@pytest.mark.slow
def test_the_wheel_holds_the_packages_whole_and_the_licence(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ours = {str(file.relative_to(source)) for p in PACKAGES for file in (source / p).rglob("*") if file.is_file()}

    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    subprocess.run(build, check=True, capture_output=True)

    (wheel,) = tmp_path.glob("fclflow-*.whl")
    info = f"fclflow-{PROJECT['version']}.dist-info"
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in inside if not name.startswith(info)} == ours
    assert f"{info}/licenses/LICENSE" in inside
    assert metadata.PathDistribution(zipfile.Path(wheel, f"{info}/")).entry_points["fcl"].value == "flows.cli:main"
