"""Output of the commands: tables or JSON on standard output, all else on standard error."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fclmodels.errors import hide_passwords

Row = dict[str, Any]
SHORT = 24  # characters of a cell, such as a mean with its interval


def print_rows(rows: Sequence[Row], as_json: bool) -> None:
    """Print the rows as a table or as a JSON list."""
    if as_json:
        print_json(rows)
    else:
        print_table(rows)


def print_table(rows: Sequence[Row], title: str | None = None) -> None:
    """Print the rows as a table whose columns are the keys of the first one.

    A column of single words or short cells is never wrapped: where the terminal is too narrow, lines run over its edge.
    """
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, value in rows[0].items() if rows else ():
        cells = ["" if row.get(name) is None else str(row[name]) for row in rows]
        is_short = all(" " not in cell or len(cell) <= SHORT for cell in [name, *cells])
        table.add_column(
            name,
            justify="right" if isinstance(value, int | float) else "left",
            no_wrap=is_short,
            min_width=max(map(len, [name, *cells])) if is_short else None,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console = Console(highlight=False, markup=False)
    if title:
        console.print(title, style="bold", soft_wrap=True)
    console.print(table, crop=False)


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=1, default=str))


def tell(text: str, quiet: bool = False) -> None:
    """Print a message without passwords on standard error, unless quiet."""
    if not quiet:
        print(hide_passwords(text), file=sys.stderr)


def format_percent(value: float | None, spread: float | None = None) -> str:
    """Return a share of 1 in percent, with its standard deviation if there is one."""
    if value is None:
        return "–"
    return f"{100 * value:.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")


def format_number(value: float | None) -> str:
    """Return the number with three significant digits."""
    return "–" if value is None else f"{value:.3g}"


def format_bytes(value: float | None) -> str:
    """Return a number of bytes with a readable unit."""
    if value is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
