"""No page, command or comment mentions what does not exist: commands, options, settings, presets, files, make targets.

And generated pages hold. Links and their sections inside docs/ are checked by `mkdocs build --strict` (make lint).
"""

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from fclmodels.experiment.method_card import describe_methods
from fclmodels.plugins import load_all
from fclmodels.settings import load as reading
from fclmodels.settings.describe import explain
from fclmodels.study.plan import check_plan, load_study
from flows.cli.app import app

ROOT = Path(__file__).parents[1]
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "bench/README.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FOLDERS = ("flows", "tasks", "fclmodels", "tests", "bench", "docs", "presets", "pretrain")
FILES = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()]
WRITTEN = [*ROOT.glob("*.*"), ROOT / "Makefile", *(file for file in FILES if "tests" not in file.parts)]
SOURCES = [
    file for file in WRITTEN if file.suffix in (".py", ".md", ".yaml", ".toml", ".j2") or file.name == "Makefile"
]
METHODS = list(load_all("method"))
PARTS = re.DOTALL | re.MULTILINE
EXAMPLES = ("lean_avg", "tiny_net", "NAME", "bytes.yaml", "small.yaml", "chosen.yaml")  # of what a reader writes


@pytest.fixture(autouse=True)
def own_plugins(request: pytest.FixtureRequest) -> None:
    """The plugins that a page has its reader write are there, in the current folder."""
    page = getattr(request.node, "callspec", None) and request.node.callspec.params.get("page")
    files = re.findall(r"^`plugins/([\w/]+\.py)`:\n\n```python\n(.*?)^```", page.read_text() if page else "", PARTS)
    for file, text in files:
        request.getfixturevalue("write_plugin")(file, text)


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


def told(page: Path, start: str = "fcl ") -> Iterator[list[str]]:
    """The words of each `fcl ...` in code, on a line or in a sentence; a line that ends in \\ goes on."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    for line in [line for block in blocks for line in block.splitlines()] + spans:
        for part in re.split(r"&&|;|\|", line):
            words = shlex.split(part.partition(" #")[0], comments=False) if part.strip().startswith(start) else []
            if words:
                yield words


def after(words: list[str], *options: str) -> list[str]:
    """What is given to these options."""
    return [value for option, value in pairwise(words) if option in options]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_options_and_settings_are_there(page: Path) -> None:
    paths = {row.path for row in explain()}
    for words in told(page):
        options = {word.partition("=")[0] for word in words if word.startswith("-")}
        if not words[1].startswith("-"):
            assert words[1] in commands(), words
            assert options <= commands()[words[1]], words
        assert {value.partition("=")[0] for value in after(words, "--set")} - {"KEY"} <= paths, words
        methods = {name for value in after(words, "--method", "-m", "--methods") for name in value.split(",")}
        assert methods - {"METHOD", "lean-avg", "my-method"} <= set(load_all("method")), words
        presets = {*after(words, "--preset", "preset")} - {"NAME"}
        assert all((ROOT / "presets" / f"{name}.yaml").exists() for name in presets), words


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_values_of_settings_are_right(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command sets, over the settings that it starts from; and whole blocks of YAML."""
    for words in told(page):
        presets = [f"presets/{name}.yaml" for name in after(words, "--preset", "preset")]
        file = ROOT / [*after(words, "--params"), *presets, "params.yaml"][0]
        given = [value for value in after(words, "--set") if not value.startswith("KEY")]
        for study in filter(Path.exists, [ROOT / name for name in words[2:3] if words[1] == "study"]):
            monkeypatch.chdir(ROOT)
            check_plan(load_study(study, given).select_rows(after(words, "--row")))
            given = []
        if given and file.exists():
            reading.load_params(file, given)
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        (tmp_path / "params.yaml").write_text(block)
        if block.startswith("params:"):
            monkeypatch.chdir(ROOT)
            check_plan(load_study(tmp_path / "params.yaml"))
        else:
            reading.load_params(tmp_path / "params.yaml")


@pytest.mark.parametrize("file", sorted((ROOT / "bench" / "studies").glob("*.yaml")), ids=lambda file: file.stem)
def test_studies_are_right(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_plan(load_study(file))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_settings_in_sentences_are_there(page: Path) -> None:
    """`federation.rounds`, `federation.faults`, `model.head: per-task`, `lambda: auto`."""
    paths = {row.path for row in explain()}
    blocks = {path.rsplit(".", n)[0] for path in paths for n in (0, 1, 2)}
    names = {path.rpartition(".")[2] for path in paths}
    for span in re.findall(r"`([^`\n]+)`", page.read_text()):
        dotted = re.match(r"([a-z]+(?:\.[\w-]+)+)(?=[=:]|$)", span)
        if dotted and dotted[1].partition(".")[0] in blocks and not dotted[1].endswith(".parquet"):
            assert dotted[1] in blocks, span
        if alone := re.match(r"([a-z_]+): \S", span):
            assert alone[1] in names, span


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_targets_links_and_scripts_are_there(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        made = re.search(r"(methods|reference)/[\w-]+\.md$", link)  # by docs/generate.py
        assert made or (page.parent / link).exists(), link
    for _, script, *words in told(page, "python bench/"):
        code = (ROOT / script).read_text()
        assert all(f'"{word}"' in code for word in words if word.startswith("--")), words


def test_files_and_commands_that_are_named_anywhere_are_there() -> None:
    """In pages, comments, docstrings, help texts and errors: a path, or its end, and `fcl` with a command."""
    ends = "\n".join(f"/{file.relative_to(ROOT)}" for file in [*FILES, *WRITTEN]) + "\n"
    wrong = []
    for source in SOURCES:
        text = source.read_text()
        for path in re.findall(r"(?<![\w/.{}*<>-])((?:[\w-]+/)*[\w-]+\.(?:py|md|yaml|toml|j2|css|svg))\b", text):
            made = re.fullmatch(r"(methods/index|reference/\w+)\.md", path)  # by docs/generate.py
            if not made and f"/{path}\n" not in ends and not any(name in path for name in EXAMPLES):
                wrong.append((source, path))
        said = set(re.findall(r"(?:^|[`\"'(;&|:,]) *fcl ([a-z][\w-]*)", text, re.MULTILINE))
        wrong += [(source, f"fcl {word}") for word in said - set(commands())]
    assert not wrong


def test_the_readme_names_every_method() -> None:
    table = (ROOT / "README.md").read_text().partition("## Methods\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == set(METHODS)


def rows_of_the_threat_model() -> dict[str, str]:
    """What SECURITY.md says that each method's clients send."""
    text = (
        (ROOT / "SECURITY.md").read_text().partition("## What each method tells the server\n")[2].partition("\n## ")[0]
    )
    lines = [line.split("|") for line in text.splitlines() if line.startswith("| `")]
    return {name: f"{line[2]} {line[3]}" for line in lines for name in re.findall(r"`([\w-]+)`", line[1])}


def test_the_threat_model_names_every_method() -> None:
    assert set(rows_of_the_threat_model()) == set(METHODS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fot", "fedprotip", "stamp", "pip-dualp"])
def test_the_threat_model_has_the_parts_that_a_method_declares(name: str) -> None:
    (found,) = describe_methods([name])
    sent = [part for way, parts in found["traffic"].items() if way.startswith("sends") for part in parts]
    row = rows_of_the_threat_model()[name]
    for part in sent:
        (told,) = re.findall(rf"\b{part['part']}(?: \(([^)]*)\))?", row)
        assert ("each" in told) == (part["least"] == "each"), part


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


def test_a_methods_page_says_what_it_is_what_is_set_what_travels_and_what_it_reaches(generate: Any) -> None:
    sketch = {"part": "sketch", "kind": "sketch", "share": 5.66, "least": "sum"}
    ways = {way: [] for way in (*generate.WAYS, "keeps")} | {"sends after a task": [sketch]}
    words = sys.modules["fclmodels.methods.fot"].__doc__
    found = {"name": "fot", "what": "", "paper": "", "words": words, "traffic": ways, "model_bytes": 100}
    page = generate.method_page(found)
    result = "| non-IID | FOT | 0 | 84.35 | 2.12 | 86.25 | 85.21 | 1.97 |"
    for told in (
        "Federated Orthogonal Training",
        "(eq. 5 to 7;",
        "<code>threshold</code>",
        "| sketch | 566 % |",
        result,
    ):
        assert told in page
    assert "FOT eq. 4;" in page  # of its mathematics in fclmodels/numerics/subspace.py
    assert "| `fot-pmnist-noniid` | Table 1 | Task-aware |  | ACC 85.21 ± 0.13, FGT 1.97 ± 0.22 |" in page
    page = generate.method_page(found | {"name": "joint"})
    assert "No preset has a figure of it." in page
    page = generate.method_page(found | {"name": "pip-dualp"})
    assert "`fclmodels/numerics/prototypes.py`" in page  # the mathematics of one of its parts
    assert "beside fed-dualp and fedavg; columns and rows that begin" in page


RESULTS = """# Title

Text.

## What `x` is

```
# no heading
| no | table |
```

One seed. Accuracy of all:

| | ACC | MB | paper: ACC |
|---|---|---|---|
| FedAvg | 1.0 | | 3 |
| SPECIAL-C, seed 0 | 2.0 | | |
| ours | 4.0 | 7 | |

### What `x` is
| order | method | ACC |
|---|---|---|
| paper: 1 | A-GEM+FL | a \\| b |
"""


def test_tables_of_a_page_are_found_with_their_place(generate: Any) -> None:
    first, second = generate.measured.read_tables(RESULTS, "page.md")
    assert first.headings == ("Title", "What `x` is")
    assert (first.anchor, first.caption) == ("what-x-is", "Accuracy of all:")
    assert first.header == ("", "ACC", "MB", "paper: ACC")
    assert first.rows[1] == ("SPECIAL-C, seed 0", "2.0", "", "")
    assert (first.label, second.label) == (0, 1)
    assert second.headings == ("Title", "What `x` is", "What `x` is")
    assert (second.anchor, second.caption) == ("what-x-is_1", "")
    assert second.rows == (("paper: 1", "A-GEM+FL", "a \\| b"),)


def test_a_row_is_its_methods_by_how_its_label_begins(generate: Any) -> None:
    known = generate.measured.label_patterns(
        "By `bench/studies/special-pacs.yaml` and bench/studies/stamp-c2.yaml", METHODS
    )
    method_of = generate.measured.find_method
    said = {
        "FedAvg, 10 clients": "fedavg",
        "paper: FOT": "fot",
        "SPECIAL-C, seed 0": "special-c",
        "SPECIAL (auto)": "special",
        "FedProx, seed 0": "fedprox",
        "FedProx-to-anchor, seed 0": "prox-anchor",  # as the study calls it
        "ER, same bytes": "er",
        "full replay, 3 epochs": "er",
        "(1) + (3)": "stamp",
        "EMA": "ema",
        "**nearest prototype**": "nearest-prototype",
        "A-GEM+FL": "agem",
        "GPMs": None,
        "right after": None,
    }
    assert {label: method_of(label, known) for label in said} == said


def test_a_methods_rows_come_with_those_that_it_extends_and_empty_columns_go(
    generate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate.measured, "RESULTS", tmp_path)
    (tmp_path / "page.md").write_text(RESULTS)
    (table,) = generate.measured.select_tables("special-c", {"fedavg", "special-c"}, METHODS)
    assert table.header == ("", "ACC", "paper: ACC")
    assert table.rows == (("FedAvg", "1.0", "3"), ("SPECIAL-C, seed 0", "2.0", ""))
    assert not list(generate.measured.select_tables("fot", {"fedavg", "fot"}, METHODS))


def test_every_row_of_the_results_is_some_methods(generate: Any) -> None:
    """Or its table has none of them: a label that is misspelt would be missing on its method's page."""
    for page in sorted((ROOT / "docs" / "results").glob("*.md")):
        text = page.read_text()
        known = generate.measured.label_patterns(text, METHODS)
        for table in generate.measured.read_tables(text, page.name):
            of = {row[table.label]: generate.measured.find_method(row[table.label], known) for row in table.rows}
            assert all(of.values()) or not any(of.values()), of
            assert all(len(row) == len(table.header) for row in table.rows), table.headings
