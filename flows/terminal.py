"""How the commands speak: tables or JSON on standard output, all else on standard error."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fclmodels.errors import without_passwords

Row = dict[str, Any]


def show(rows: Sequence[Row], as_json: bool, title: str | None = None) -> None:
    """The rows as a table whose columns are the keys of the first one, or as a JSON list.

    A column of single words is never broken: where the terminal is too narrow, lines run over its edge.
    """
    if as_json:
        show_json(rows)
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, value in rows[0].items() if rows else ():
        cells = ["" if row.get(name) is None else str(row[name]) for row in rows]
        words = not any(" " in cell for cell in cells)
        table.add_column(
            name,
            justify="right" if isinstance(value, int | float) else "left",
            no_wrap=words,
            min_width=max(map(len, [name, *cells])) if words else None,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console = Console(highlight=False, markup=False)
    if title:
        console.print(title, style="bold", soft_wrap=True)
    console.print(table, crop=False)


def show_json(content: Any) -> None:
    print(json.dumps(content, indent=1, default=str))


def tell(text: str, quiet: bool = False) -> None:
    if not quiet:
        print(without_passwords(text), file=sys.stderr)


def percent(value: float | None, spread: float | None = None) -> str:
    """A share of 1 as percent, with its standard deviation where there is one."""
    if value is None:
        return "–"
    return f"{100 * value:.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")


def number(value: float | None) -> str:
    """Three digits, where it is known."""
    return "–" if value is None else f"{value:.3g}"


def size(value: float | None) -> str:
    """Bytes for people."""
    if value is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
