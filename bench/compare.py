"""Two runs of the benchmarks side by side.

    python bench/compare.py A.parquet B.parquet

Ratios to the yardstick with their quartiles, and B's over A's; a star where the quartiles do not meet. Facts of the
machine that differ come first. Without files: the two latest of bench/results.
"""

import argparse
import sys
from pathlib import Path

import polars as pl
from suite import RESULTS

FACTS = ("date", "cpu", "cores", "threads", "torch", "python", "commit")


def join_runs(a: pl.DataFrame, b: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of either run, in the order of A's, then those of B alone."""
    columns = ["row", "ratio", "low", "high"]
    order = pl.concat([a["row"], b["row"]]).unique(maintain_order=True).to_frame()
    both = order.join(a.select(columns), on="row", how="left").join(
        b.select(columns), on="row", how="left", suffix="_b"
    )
    apart = (pl.col("low") > pl.col("high_b")) | (pl.col("low_b") > pl.col("high"))
    return both.with_columns(change=pl.col("ratio_b") / pl.col("ratio"), apart=apart)


def list_differing_facts(a: pl.DataFrame, b: pl.DataFrame) -> dict[str, tuple[str, str]]:
    facts = {fact: tuple(", ".join(sorted(map(str, t[fact].unique()))) for t in (a, b)) for fact in FACTS}
    return {fact: (first, second) for fact, (first, second) in facts.items() if first != second}


def format_markdown(table: pl.DataFrame) -> str:
    lines = ["| row | A | B | B / A |", "|---|---|---|---|"]
    for row in table.iter_rows(named=True):
        sides = [
            "" if row["ratio" + s] is None else f"{row['ratio' + s]:.3f} ({row['low' + s]:.3f}-{row['high' + s]:.3f})"
            for s in ("", "_b")
        ]
        change = "" if row["change"] is None else f"{row['change']:.3f}{' *' if row['apart'] else ''}"
        lines.append(f"| {row['row']} | {' | '.join(sides)} | {change} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    files = options.files or sorted(RESULTS.glob("*.parquet"))[-2:]
    if len(files) != 2:
        sys.exit("Two files are compared: fcl bench writes one each time it runs.")
    a, b = (pl.read_parquet(file) for file in files)
    for fact, (first, second) in list_differing_facts(a, b).items():
        print(f"{fact}: {first} | {second}")
    print(format_markdown(join_runs(a, b)))


if __name__ == "__main__":
    main()
