"""No page mentions what does not exist: commands, options, settings, files, make targets. And generated pages hold."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from fclmodels.explain import explain
from fclmodels.plugins import all_of
from flows.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@cache
def commands() -> dict[str, set[str]]:
    """Each command's options."""
    group: Any = get_command(app)
    context = group.make_context("fcl", [], resilient_parsing=True)
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {
        name: {"--help"} | {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        for name, command in found.items()
    }


def told(page: Path) -> Iterator[list[str]]:
    """The words of each `fcl ...` in code, on a line or in a sentence; a line that ends in \\ goes on."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()] + re.findall(r"`(fcl [^`]*)`", text)
    for line in lines:
        for part in re.split(r"&&|;|\|", line):
            words = shlex.split(part.partition(" #")[0], comments=False) if part.strip().startswith("fcl ") else []
            if words:
                yield words


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_options_and_settings_are_there(page: Path) -> None:
    settings = {row.path for row in explain()}
    for words in told(page):
        options = [word.partition("=")[0] for word in words if word.startswith("-")]
        if not words[1].startswith("-"):
            assert words[1] in commands(), words
            assert set(options) <= commands()[words[1]], words
        for option, value in pairwise(words):
            if option == "--set" and not value.startswith("KEY"):
                assert value.partition("=")[0] in settings, words
            if option in ("--method", "-m") and value not in ("METHOD", "lean-avg", "my-method"):
                assert value in all_of("method"), words


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_and_targets_are_there(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    for path in re.findall(r"`((?:flows|tasks|fclmodels|tests|presets|docs|bench)/[\w/.-]+\.\w+)`", text):
        assert (ROOT / path).exists() or "lean_avg" in path or "NAME" in path, path
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        made = re.search(r"(methods|reference)/[\w-]+\.md$", link)  # by docs/generate.py
        assert made or (page.parent / link).exists(), link


@pytest.fixture(scope="module")
def generate() -> Any:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_pages_have_every_setting_and_every_command(generate: Any) -> None:
    settings, page = generate.settings_page(), generate.commands_page()
    for row in explain():
        assert f"<code>{row.path}</code>" in settings or row.path.startswith("methods."), row.path
    for name, options in commands().items():
        assert f"## fcl {name}\n" in page
        assert all(option in page for option in options - {"--help"})


def test_a_methods_page_says_what_it_is_what_is_set_what_travels_and_where_results_are(generate: Any) -> None:
    (found,) = generate.about(["fot"])
    page = generate.method_page(found)
    setting = "<code>methods.fot.threshold</code>"
    for told in ("Federated Orthogonal Training", setting, "| sketch |", "subspaces.md", "Table 1"):
        assert told in page
