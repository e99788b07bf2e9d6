"""Pages of the site that come from the code when it is built: methods, settings, commands. A hook of mkdocs."""

import re
import sys
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # the code of this tree, wherever another one is installed

from mkdocs.config.defaults import MkDocsConfig  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402
from typer.main import get_command  # noqa: E402

from fclmodels.errors import shown  # noqa: E402
from fclmodels.explain import Setting, explain  # noqa: E402
from fclmodels.params import preset_of  # noqa: E402
from fclmodels.plugins import all_of  # noqa: E402
from fclmodels.trial import WAYS, About, about  # noqa: E402
from flows.cli import app  # noqa: E402

BLOCK_OF = {"data": "source", "stream": "stream", "partition": "partition", "model": "backbone"}
METHODS = "Methods"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """In the place of `...` a page of each method."""
    assert config.nav is not None
    (entry,) = [part for part in config.nav if isinstance(part, dict) and METHODS in part]
    entry[METHODS] = [part for part in entry[METHODS] if part != "..."]
    entry[METHODS] += [{name: f"methods/{name}.md"} for name in all_of("method")]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in pages():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> Iterator[tuple[str, str]]:
    """Path and Markdown of every generated page."""
    found = about(list(all_of("method")))
    yield "methods/index.md", methods_index(found)
    for each in found:
        yield f"methods/{each['name']}.md", method_page(each)
    yield "reference/settings.md", settings_page()
    yield "reference/commands.md", commands_page()


def methods_index(found: list[About]) -> str:
    rows = [(f"[{m['name']}]({m['name']}.md)", m["what"], m["paper"]) for m in found]
    return "\n".join(["# Methods", "", *table(("method", "what it does", "paper"), rows), ""])


def method_page(found: About) -> str:
    """What a method is, its settings, what its clients send, and where its results are."""
    name = found["name"]
    lines = [f"# {name}", "", found["what"], "", f"From: {found['paper']}. In the terminal: `fcl explain {name}`.", ""]
    lines += ["## What it is", "", "```text", found["words"], "```", ""]
    settings = explain(name)
    lines += ["## Settings", "", f"In `params.yaml` under `methods.{name}`.", "", *settings_table(settings), ""]
    lines += ["## What travels", "", *traffic(found), ""]
    lines += ["## Results", "", *results(name), *figures(name), ""]
    return "\n".join(lines)


def traffic(found: About) -> Iterator[str]:
    yield (
        "In the second task of a short trial: two tasks of two digits, three clients, two rounds. 100 % is all of the "
        f"trial's network, {found['model_bytes']} bytes. *sum*: the server needs only the sum over clients; *each*: it "
        "needs single replies."
    )
    yield ""
    rows = [
        (f"a client {way}", part["part"], part["kind"], f"{100 * part['share']:.3g} %", part["least"].replace("-", ""))
        for way in (*WAYS, "keeps")
        for part in found["traffic"][way]
    ]
    yield from table(("when", "part", "kind", "size", "least"), rows)


def results(name: str) -> Iterator[str]:
    """The pages of results that name the method."""
    for page in sorted((HERE / "results").glob("*.md")):
        text = page.read_text()
        if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text, re.IGNORECASE):
            title = text.partition("\n")[0].removeprefix("# ")
            yield f"- [{title}](../results/{page.name})"
    yield ""


def figures(name: str) -> Iterator[str]:
    """What papers say of it, as the presets have it."""
    rows = []
    for file in sorted((HERE.parent / "presets").glob("*.yaml")):
        preset, _ = preset_of(file)
        for paper in preset.figures:
            values = dict(zip(paper.columns, paper.rows.get(name, ()), strict=False))
            where = ", ".join(f"{key}={value}" for key, value in paper.where.items())
            told = ", ".join(f"{key} {value:g}" for key, value in values.items())
            if values:
                rows.append((f"`{file.stem}`", paper.table, paper.reading.replace("_", "-"), where, told))
    if rows:
        yield "The papers' figures, in %; `fcl preset NAME` runs their setting and puts its own beside them."
        yield ""
        yield from table(("preset", "table", "reading", "where", "figures"), rows)


def settings_page() -> str:
    lines = ["# Settings", "", "All settings of `params.yaml`; the same as `fcl params`.", ""]
    block = ""
    rows: list[Setting] = []
    for setting in [*explain(), None]:
        of = setting.path.split(".")[0] if setting else ""
        if of != block:
            if rows:
                lines += [f"## {block}", "", *settings_table(rows), ""]
            block, rows = of, []
        if setting and of != "methods":
            rows.append(setting)
    lines += ["## methods", "", "Each method has settings of its own: [methods](../methods/index.md).", ""]
    return "\n".join(lines)


def settings_table(settings: Iterable[Setting]) -> list[str]:
    rows = [
        (
            code(s.path),
            code(s.type),
            code(s.default if isinstance(s.default, str) else shown(s.default)),
            s.description,
        )
        for s in settings
    ]
    of = [", ".join(s.kinds) for s in settings]
    if any(of) and len(set(of)) > 1:
        return table(("setting", "type", "default", "meaning", "of"), [(*r, k) for r, k in zip(rows, of, strict=True)])
    return table(("setting", "type", "default", "meaning"), rows)


def commands_page() -> str:
    lines = ["# Commands", "", app.info.epilog or "", ""]
    group: Any = get_command(app)
    context = group.make_context("fcl", [], resilient_parsing=True)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        lines += [f"## fcl {name}", "", *(command.help or "").splitlines(), ""]
        rows = []
        for option in command.params:
            options = ", ".join([*option.opts, *option.secondary_opts])
            words = options if option.param_type_name == "option" else option.name.upper()
            rows.append((code(words), getattr(option, "help", None) or ""))
        lines += [*table(("argument or option", "meaning"), rows), ""]
    return "\n".join(lines)


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    body = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *body] if body else ["None."]


def code(text: str) -> str:
    """Not between backticks: in a table they show the backslash before a bar."""
    return f"<code>{escape(text).replace('|', '&#124;')}</code>" if text else ""
