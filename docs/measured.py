"""A method's rows in the tables of the results pages, beside those of the methods that it extends.

A row belongs to a method if its label begins with the method's name, however it is spelt (A-GEM, nearest prototype), or
with the label of a row in one of the studies that the page names (bench/studies). "paper: FOT" is the paper's own row.
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
    """A table of a results page and its place there."""

    page: str  # the file below results/
    headings: tuple[str, ...]  # the headings above it, the page's title first
    anchor: str  # of the last of them; empty for the title
    caption: str  # the sentence before it, if it ends in a colon
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def label(self) -> int:
        """Index of the column that holds the rows' labels."""
        names = [cell.lower() for cell in self.header]
        return names.index("method") if "method" in names else 0


def read_tables(text: str, page: str) -> Iterator[Table]:
    """Yield the tables of a page in Markdown, each with its place."""
    headings: list[str] = []
    anchors: set[str] = set()
    anchor = caption = ""
    for block in split_blocks(text):
        lines = block.splitlines()
        if heading := re.match(r"(#+) (.*)", block):
            level, title = len(heading[1]), heading[2]
            headings[level - 1 :] = [title]
            slug = unique(slugify(re.sub("[*`]", "", title), "-"), anchors)
            anchor, caption = slug if level > 1 else "", ""
        elif len(lines) > 1 and re.fullmatch(r"[|\s:-]+", lines[1]):
            header, _, *rows = map(split_cells, lines)
            yield Table(page, tuple(headings), anchor, caption, header, tuple(rows))
        elif not block.startswith("```"):
            caption = re.split(r"(?<=[.:]) (?=[A-Z`])", " ".join(lines))[-1] if block.endswith(":") else ""


def split_blocks(text: str) -> Iterator[str]:
    """Yield the parts of a page between blank lines and headings; a fenced block of code stays in one part."""
    for part in re.split(r"^(```.*?^```)$", text, flags=re.DOTALL | re.MULTILINE):
        if part.startswith("```"):
            yield part
        else:
            spaced = re.sub(r"^(#+ .*)$", r"\n\1\n", part, flags=re.MULTILINE)
            yield from filter(None, re.split(r"\n(?:\s*\n)+", spaced.strip("\n")))


def split_cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1])


def find_method(label: str, patterns: Mapping[str, str]) -> str | None:
    """Return the method of the longest pattern that a row's label begins with; None if there is none."""
    label = re.sub(r"^paper: |[*`]", "", label)
    matches = [match for pattern in patterns if (match := re.match(pattern, label, re.IGNORECASE))]
    return patterns[max(matches, key=lambda match: match.end()).re.pattern] if matches else None


def label_patterns(text: str, methods: Collection[str]) -> dict[str, str]:
    """Return methods by patterns of their labels: methods' names, and the rows of the studies that a page names."""
    files = [STUDIES / f"{name}.yaml" for name in sorted(set(re.findall(r"bench/studies/([\w-]+)\.yaml", text)))]
    studies = [yaml.safe_load(file.read_text())["rows"] for file in files]
    names = {"[- ]?".join(map(re.escape, method.replace("-", ""))): method for method in methods}
    rows = {re.escape(label): row["method"] for study in studies for label, row in study.items()}
    return {f"{pattern}(?![\\w-])": method for pattern, method in (names | rows).items()}


def select_tables(method: str, beside: Collection[str], methods: Collection[str]) -> Iterator[Table]:
    """Yield the tables with a row of the method, reduced to its rows and those of `beside`, without empty columns."""
    for file in sorted(RESULTS.glob("*.md")):
        text = file.read_text()
        patterns = label_patterns(text, methods)
        for table in read_tables(text, file.name):
            names = [find_method(row[table.label], patterns) for row in table.rows]
            if method in names:
                rows = [row for row, name in zip(table.rows, names, strict=True) if name in beside or name == method]
                filled = [i for i in range(len(table.header)) if any(row[i] for row in rows)]
                header, *rows = [tuple(line[i] for i in filled) for line in (table.header, *rows)]
                yield table._replace(header=header, rows=tuple(rows))
