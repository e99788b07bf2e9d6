"""What the pages of results say of a method: its rows of their tables, beside those of the methods that it extends.

A row is known by how its label begins: with the method's name, however it is spelt (A-GEM, nearest prototype), or with
the label of a row in one of the studies that the page names (bench/studies). "paper: FOT" is the paper's own row.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml
from markdown.extensions.toc import slugify, unique

RESULTS = Path(__file__).parent / "results"
STUDIES = Path(__file__).parents[1] / "bench" / "studies"


class Table(NamedTuple):
    page: str  # the file below results/
    headings: tuple[str, ...]  # those it stands under, the page's title first
    anchor: str  # of the last of them; empty for the title
    caption: str  # the sentence before it, if it ends in a colon
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def label(self) -> int:
        """The column that says what a row is."""
        names = [cell.lower() for cell in self.header]
        return names.index("method") if "method" in names else 0


def tables(text: str, page: str) -> Iterator[Table]:
    """The tables of a page in Markdown, each with its place."""
    headings: list[str] = []
    anchors: set[str] = set()
    anchor = caption = ""
    for block in blocks(text):
        lines = block.splitlines()
        if found := re.match(r"(#+) (.*)", block):
            level, title = len(found[1]), found[2]
            headings[level - 1 :] = [title]
            slug = unique(slugify(re.sub("[*`]", "", title), "-"), anchors)
            anchor, caption = slug if level > 1 else "", ""
        elif len(lines) > 1 and re.fullmatch(r"[|\s:-]+", lines[1]):
            header, _, *rows = map(cells, lines)
            yield Table(page, tuple(headings), anchor, caption, header, tuple(rows))
        elif not block.startswith("```"):
            caption = re.split(r"(?<=[.:]) (?=[A-Z`])", " ".join(lines))[-1] if block.endswith(":") else ""


def blocks(text: str) -> Iterator[str]:
    """What blank lines and headings part; code stays whole."""
    for part in re.split(r"^(```.*?^```)$", text, flags=re.DOTALL | re.MULTILINE):
        apart = part if part.startswith("```") else re.sub(r"^(#+ .*)$", r"\n\1\n", part, flags=re.MULTILINE)
        yield from [part] if part is apart else filter(None, re.split(r"\n(?:\s*\n)+", apart.strip("\n")))


def cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1])


def method_of(label: str, known: Mapping[str, str]) -> str | None:
    """The method that a row is of: of the patterns that its label begins with the longest."""
    label = re.sub(r"^paper: |[*`]", "", label)
    found = [match for pattern in known if (match := re.match(pattern, label, re.IGNORECASE))]
    return known[max(found, key=lambda match: match.end()).re.pattern] if found else None


def known_on(text: str, methods: Collection[str]) -> dict[str, str]:
    """Patterns of labels and their methods: methods' names, and the rows of the studies that a page names."""
    files = [STUDIES / f"{name}.yaml" for name in sorted(set(re.findall(r"bench/studies/([\w-]+)\.yaml", text)))]
    studies = [yaml.safe_load(file.read_text())["rows"] for file in files]
    spelt = {"[- ]?".join(map(re.escape, method.replace("-", ""))): method for method in methods}
    rows = {re.escape(label): row["method"] for study in studies for label, row in study.items()}
    return {f"{pattern}(?![\\w-])": method for pattern, method in (spelt | rows).items()}


def of(method: str, beside: Collection[str], methods: Collection[str]) -> Iterator[Table]:
    """The tables that have a row of the method, cut down to its rows and others', without columns that are empty."""
    for file in sorted(RESULTS.glob("*.md")):
        text = file.read_text()
        known = known_on(text, methods)
        for table in tables(text, file.name):
            found = [method_of(row[table.label], known) for row in table.rows]
            if method in found:
                rows = [row for row, name in zip(table.rows, found, strict=True) if name in beside or name == method]
                filled = [i for i in range(len(table.header)) if any(row[i] for row in rows)]
                header, *rows = [tuple(line[i] for i in filled) for line in (table.header, *rows)]
                yield table._replace(header=header, rows=tuple(rows))
