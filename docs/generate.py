"""Pages of the site that come from the code when it is built: methods, settings, commands. A hook of mkdocs."""

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from html import escape
from itertools import groupby
from pathlib import Path
from textwrap import dedent
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # the code of this tree, wherever another one is installed

import measured  # noqa: E402
from mkdocs.config.defaults import MkDocsConfig  # noqa: E402
from mkdocs.structure.files import File, Files  # noqa: E402
from typer.main import get_command  # noqa: E402

from fclmodels.errors import format_value  # noqa: E402
from fclmodels.experiment.method_card import WAYS, MethodCard, describe_methods  # noqa: E402
from fclmodels.plugins import find, load_all  # noqa: E402
from fclmodels.report.labels import METRICS, READINGS  # noqa: E402
from fclmodels.report.paper_figures import Figure, list_figures  # noqa: E402
from fclmodels.settings.describe import Setting, explain  # noqa: E402
from fclmodels.settings.load import load_preset  # noqa: E402
from fclmodels.settings.preset import find_unit  # noqa: E402
from fclmodels.settings.schema import CHOICES  # noqa: E402
from flows.cli.app import app  # noqa: E402

METHODS = "Methods"
SHOWN = ("fclmodels.methods.", "fclmodels.numerics.")
OF_ALL = ("fclmodels.methods.fedavg", "fclmodels.methods.parts.trained_network")  # modules behind every method


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace `...` in the navigation by the pages of all methods."""
    assert config.nav is not None
    (entry,) = [part for part in config.nav if isinstance(part, dict) and METHODS in part]
    entry[METHODS] = [part for part in entry[METHODS] if part != "..."]
    entry[METHODS] += [{name: f"methods/{name}.md"} for name in load_all("method")]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, text in pages():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Keep a figure and its spread on one line."""
    return markdown.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}")


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the Markdown of every generated page."""
    cards = describe_methods(list(load_all("method")))
    yield "methods/index.md", methods_index(cards)
    for card in cards:
        yield f"methods/{card['name']}.md", method_page(card)
    yield "reference/settings.md", settings_page()
    yield "reference/commands.md", commands_page()


def methods_index(cards: list[MethodCard]) -> str:
    rows = [(f"[{m['name']}]({m['name']}.md)", m["what"], m["paper"]) for m in cards]
    return "\n".join(["# Methods", "", *table(("method", "what it does", "paper"), rows), ""])


def method_page(card: MethodCard) -> str:
    """Return the page of a method: its equations, settings, messages and results."""
    name, kind = card["name"], find("method", card["name"])
    lines = [f"# {name}", "", card["what"], "", f"From: {card['paper']}. In the terminal: `fcl explain {name}`.", ""]
    lines += ["## What it is", "", *prose(card["words"])]
    if sections := list(parts(kind)):
        lines += ["## What it is made of", "", *(line for section in sections for line in section)]
    settings = [replace(s, path=s.path.removeprefix(f"methods.{name}.")) for s in explain(name)]
    lines += ["## Settings", "", f"In `params.yaml` under `methods.{name}`.", "", *settings_table(settings), ""]
    lines += ["## What travels", "", *traffic(card), ""]
    lines += ["## Results here", "", *results(kind), "## The papers' figures", "", *figures(name), ""]
    return "\n".join(lines)


def prose(words: str) -> Iterator[str]:
    """Yield a docstring as paragraphs of HTML: in Markdown its formulas would lose their signs."""
    for part in map(escape, re.split(r"\n\s*\n", words)):
        html = re.sub("`([^`]+)`", r"<code>\1</code>", part)
        yield f"<pre><code>{dedent(part)}</code></pre>" if part.startswith(" ") else f"<p>{html}</p>"
        yield ""


def parts(kind: Any) -> Iterator[list[str]]:
    """Yield the docstrings of the modules that a method is made of: its bases, parts and mathematics."""
    waiting = [cls.__module__ for cls in kind.__mro__ if cls.__module__.startswith("fclmodels.methods.")]
    names: dict[str, None] = {}
    while waiting:
        name = waiting.pop(0)
        if name not in names:
            names[name] = None
            values = vars(sys.modules[name]).values() if name.startswith("fclmodels.methods.") else ()
            used = {getattr(value, "__module__", None) or "" for value in values}
            waiting += sorted(module for module in used if module.startswith(SHOWN))
    for name in names:
        if name not in (kind.__module__, *OF_ALL):
            yield part(name, sys.modules[name])
    if attached := getattr(kind, "attaches", None):
        yield part(attached.__module__, attached)


def part(module: str, documented: Any) -> list[str]:
    return [f"`{module.replace('.', '/')}.py`", "", *prose(inspect.cleandoc(documented.__doc__ or ""))]


def traffic(card: MethodCard) -> Iterator[str]:
    yield (
        "In the second task of a short trial: two tasks of two digits, three clients, two rounds. 100 % is all of the "
        f"trial's network, {card['model_bytes']} bytes. *sum*: the server needs only the sum over clients; *each*: it "
        "needs single replies."
    )
    yield ""
    rows = [
        (f"a client {way}", part["part"], part["kind"], f"{100 * part['share']:.3g} %", part["least"].replace("-", ""))
        for way in (*WAYS, "keeps")
        for part in card["traffic"][way]
    ]
    yield from table(("when", "part", "kind", "size", "least"), rows)


def results(kind: Any) -> Iterator[str]:
    """Yield the method's rows of the results pages, with the paper's figures beside them."""
    methods = load_all("method")
    beside = {name for name, other in methods.items() if extends(kind, other)}
    tables = list(measured.select_tables(kind.name, beside, methods))
    if not tables:
        yield "No results page has a row of it."
        yield ""
        return
    others = " and ".join(sorted(beside - {kind.name})) or "no other method"
    yield (
        f"Its rows of the [results](../results.md) pages, beside {others}; columns and rows that begin with *paper* "
        "are the paper's own. The linked pages say what was run smaller than in the paper, and with which seeds."
    )
    yield ""
    for place, of_place in groupby(tables, lambda one: (one.headings[1:] or one.headings, f"{one.page}#{one.anchor}")):
        yield f"[{': '.join(place[0])}](../results/{place[1].removesuffix('#')})"
        for one in of_place:
            yield from ["", one.caption, "", *table(one.header, one.rows)]
        yield ""


def extends(kind: Any, other: Any) -> bool:
    """Return whether a method is another one with something more: by its class, or by its settings."""
    return issubclass(kind, other) or ("Settings" in vars(other) and other.Settings in kind.Settings.__mro__)


def figures(name: str) -> Iterator[str]:
    """Yield the papers' figures of a method, from the presets."""
    rows = []
    for file in sorted((HERE.parent / "presets").glob("*.yaml")):
        preset, _ = load_preset(file)
        for figure in list_figures(preset, name):
            where = ", ".join(f"{key}={value}" for key, value in figure.table.where.items())
            values = [format_figure(figure, name) for name in figure.values if not name.endswith("_std")]
            reading = READINGS[figure.table.reading].title if figure.table.reading else "–"
            rows.append((f"`{file.stem}`", figure.table.table, reading, where, ", ".join(values)))
    if rows:
        yield "In % where there is no unit, ± standard deviation. `fcl preset NAME` runs a setting; the figures stand"
        yield "beside runs with just that setting."
        yield ""
        yield from table(("preset", "table", "reading", "where", "figures"), rows)
    else:
        yield "No preset has a figure of it."


def format_figure(figure: Figure, name: str) -> str:
    """Return a figure of a paper's table with its quantity and unit; in % without one."""
    title = METRICS[name].title if name in METRICS else name.replace("_", " ")
    unit = find_unit(name) or ""
    return f"{title} {figure.text(name)}{'' if unit == '%' else ' ' + unit}".rstrip()


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
    rows = []
    for s in settings:
        default = s.default if isinstance(s.default, str) else format_value(s.default)
        rows.append((code(s.path), escape(s.allowed), code(default), escape(s.description), of(s)))
    header = ("setting", "it is", "default", "meaning", "of")
    return table(header, rows) if any(row[-1] for row in rows) else table(header[:-1], [row[:-1] for row in rows])


def of(setting: Setting) -> str:
    """Return the plugins that have a setting, if not all of its block do."""
    block = setting.path.split(".")[0]
    if not setting.kinds or block not in CHOICES:
        return ""
    others = [name for name in load_all(CHOICES[block][0]) if name not in setting.kinds]
    return ", ".join(setting.kinds) if len(setting.kinds) <= len(others) else f"all but {', '.join(others)}"


def commands_page() -> str:
    group: Any = get_command(app)
    context = group.make_context("fcl", [], resilient_parsing=True)
    lines = ["# Commands", "", app.info.epilog or "", "", *parameters(group)]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        usage = " ".join(["fcl", name, *filter(None, map(needed, command.params)), "[options]"])
        lines += ["", f"## fcl {name}", "", *(command.help or "").splitlines(), "", f"`{usage}`", ""]
        lines += parameters(command)
    return "\n".join([*lines, ""])


def needed(parameter: Any) -> str:
    """Return a parameter as the command's usage shows it; empty for an option that is not required."""
    name = parameter.name.upper() + "..." * (parameter.nargs < 0)
    if parameter.param_type_name == "option":
        return f"{parameter.opts[0]} {name}" if parameter.required else ""
    return name if parameter.required else f"[{name}]"


def parameters(command: Any) -> list[str]:
    rows = []
    for each in command.params:
        words = ", ".join([*each.opts, *each.secondary_opts]) if each.param_type_name == "option" else needed(each)
        default = "" if each.default in (None, [], ()) or isinstance(each.default, bool) else str(each.default)
        rows.append((code(words), code(default), getattr(each, "help", None) or ""))
    return table(("argument or option", "default", "meaning"), rows)


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    body = ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *body] if body else ["None."]


def code(text: str) -> str:
    """Return text as HTML code: in a table, backticks show the backslash before a bar."""
    return f"<code>{escape(text).replace('|', '&#124;')}</code>" if text else ""
