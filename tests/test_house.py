"""The rules of the house that a machine can check: the tree, names, docstrings, one name a class."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("fclmodels", "flows", "tasks")
FILES = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
PLUGINS = {f"fclmodels/{name}" for name in ("backbones", "methods", "data/sources", "data/streams", "data/partitions")}
# Each file there stands by itself: docs/architecture.md says why.
MANY_FILES = {"fclmodels/numerics", "fclmodels/methods/parts", "flows/cli"}
RIDDLES = ("found", "told", "known", "kept", "held", "heard", "said", "asked", "given", "taken", "wanted", "odd")


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for file in FILES:
        yield file.relative_to(ROOT), ast.parse(file.read_text())


def identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the names that a module itself gives: to functions, classes, parameters, variables, fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno


def docstrings() -> Iterator[tuple[str, str]]:
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                yield f"{file}:{node.lineno}", text


@pytest.mark.parametrize("folder", sorted({file.parent.relative_to(ROOT) for file in FILES}, key=str), ids=str)
def test_a_package_has_at_most_eight_files_beside_its_folders(folder: Path) -> None:
    files = [file for file in (ROOT / folder).glob("*.py") if file.name != "__init__.py"]
    assert len(files) <= 8 or folder.as_posix() in PLUGINS | MANY_FILES


def test_the_tree_on_the_page_is_the_tree() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    shown = set(re.findall(r"(\w+)/", page.partition("## The tree")[2].partition("## The way")[0]))
    folders = {folder for file in FILES for folder in file.parent.relative_to(ROOT).parts}
    assert folders <= shown


def test_names_are_no_riddles() -> None:
    riddles = [f"{file}:{line} {name}" for file, tree in trees() for name, line in identifiers(tree) if name in RIDDLES]
    assert not riddles


def test_docstrings_begin_with_what_is_done_and_not_with_what() -> None:
    """Fewer than 20 in the whole code may begin so (house.md: 166 of them did)."""
    beginnings = [place for place, text in docstrings() if re.match(r"(What|Of|As) ", text)]
    assert len(beginnings) < 20, beginnings


def test_a_class_name_is_there_once() -> None:
    names = Counter(
        node.name
        for _, tree in trees()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name: count for name, count in names.items() if count > 1}


def test_every_test_file_stands_where_its_module_does() -> None:
    """tests/fclmodels/a/test_b.py is about fclmodels/a/b.py, or about the package fclmodels/a as a whole."""
    folders = {file.parent.relative_to(ROOT / "tests") for file in (ROOT / "tests").rglob("test_*.py")}
    mirrored = {folder for folder in folders if folder.parts and folder.parts[0] in PACKAGES}
    assert all((ROOT / folder).is_dir() for folder in mirrored)
