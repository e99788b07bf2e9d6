"""All benchmarks of this folder as ratios to a yardstick that takes turns with us in one process tree.

    make bench
    fcl bench [NAMES] [--json] [--peers] [--turns N] [--out FILE]

A name is a benchmark's or a kind's; --list shows them. Each benchmark is a process of its own. Its rows (ratio, median
of the turns' ratios, with their quartiles) go into a Parquet file with facts of the machine as soon as they are
measured; with --out a run goes on with a file that is there, and what it has is not measured again.
bench/compare.py shows two such files side by side.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import polars as pl
from measuring import Bench, Row, describe_machine

HERE = Path(__file__).parent
RESULTS = HERE / "results"
KINDS = (
    "rounds",
    "methods",
    "anchor",
    "subspace",
    "extraction",
    "prompts",
    "server",
    "starting",
    "memory",
    "steps",
    "ray_executor",
)
PEERS = "peers"
COSTS = "costs"  # a benchmark of each method: measured where it is named
MOST_SECONDS = 900  # of one benchmark
HEADER = "| row | ratio | quartiles | limit | ours | yardstick | what |\n|---|---|---|---|---|---|---|"
SCHEMA = pl.Schema(
    {
        "benchmark": pl.String, "kind": pl.String, "row": pl.String, "what": pl.String, "unit": pl.String,
        "ratio": pl.Float64, "low": pl.Float64, "high": pl.Float64, "limit": pl.Float64, "kept": pl.Boolean,
        "ours": pl.List(pl.Float64), "yardstick": pl.List(pl.Float64), "problem": pl.String,
        "date": pl.String, "cpu": pl.String, "cores": pl.Int64, "threads": pl.Int64, "torch": pl.String,
        "python": pl.String, "commit": pl.String,
    }
)  # fmt: skip


def list_benchmarks(kinds: Sequence[str]) -> dict[str, tuple[str, Bench]]:
    """Return every benchmark by name, with its kind."""
    return {bench.name: (kind, bench) for kind in kinds for bench in import_module(kind).BENCHES}


def select_benchmarks(names: Sequence[str], benchmarks: dict[str, tuple[str, Bench]]) -> list[str]:
    for name in names:
        if name not in benchmarks and name not in {kind for kind, _ in benchmarks.values()}:
            sys.exit(f"{name} is no benchmark, nor a kind of them: fcl bench --list")
    chosen = {name for name, (kind, _) in benchmarks.items() if name in names or kind in names}
    return [name for name, (kind, _) in benchmarks.items() if (name in chosen if names else kind != COSTS)]


def measure(bench: Bench, turns: int | None) -> None:
    """Run a benchmark in this process, and print its rows as JSON, each on a line."""
    import torch

    from fclmodels.federation.executors import glibc_malloc

    glibc_malloc.tune()
    torch.set_num_threads(1)
    for row in bench.measure(turns or bench.turns):
        print(json.dumps(asdict(row)), flush=True)


def run_benchmark(name: str, kind: str, turns: int | None) -> list[dict[str, Any]]:
    """Run a benchmark in a process of its own; returns rows of the table, one of them for an error."""
    command = [sys.executable, __file__, "--measure", name, *(["--turns", str(turns)] if turns else [])]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        ended = subprocess.CompletedProcess(command, 1, "", f"it took more than {MOST_SECONDS} s")
    rows = [build_row(Row(**json.loads(line))) for line in ended.stdout.splitlines() if line.startswith("{")]
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"it ended with {ended.returncode}"]
        rows.append({"row": name, "problem": lines[-1]})
    facts = {"date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "threads": 1, **describe_machine()}
    return build_table({"benchmark": name, "kind": kind, **row, **facts} for row in rows).to_dicts()


def build_row(row: Row) -> dict[str, Any]:
    low, high = row.spread
    facts = asdict(row)
    return {
        "row": facts.pop("name"),
        **facts,
        "ratio": row.ratio,
        "low": low,
        "high": high,
        "kept": row.is_within_limit,
    }


def build_table(rows: Iterable[dict[str, Any]]) -> pl.DataFrame:
    return pl.DataFrame([{name: row.get(name) for name in SCHEMA} for row in rows], schema=SCHEMA)


def format_line(row: dict[str, Any]) -> str:
    """Return a row of the table as Markdown."""
    if row["problem"] is not None:
        return f"| {row['row']} | | | | | | {row['problem']} |"
    verdict = "" if row["limit"] is None else f"{row['limit']:.2f}{'' if row['kept'] else ', missed'}"
    medians = " | ".join(f"{pl.Series(row[side]).median():.3g}" for side in ("ours", "yardstick"))
    spread = f"{row['low']:.3f}-{row['high']:.3f}"
    return f"| {row['row']} | {row['ratio']:.3f} | {spread} | {verdict} | {medians} {row['unit']} | {row['what']} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAMES", help="benchmarks or kinds [default: all]")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--peers", action="store_true", help="other frameworks too, each in an environment of its own")
    parser.add_argument("--turns", type=int, help="of each side [default: each benchmark's]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the Parquet file [default: a new one in results]")
    parser.add_argument("--list", action="store_true", help="only list the names")
    parser.add_argument("--measure", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args()
    benchmarks = list_benchmarks([*KINDS, COSTS, *[PEERS] * (options.peers or options.measure is not None)])
    if options.measure:
        return measure(benchmarks[options.measure][1], options.turns)
    names = select_benchmarks(options.names, benchmarks)
    if options.list:
        return print("\n".join(f"{benchmarks[name][0]:<12}{name}" for name in names))
    out = options.out or RESULTS / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.parquet"
    rows = pl.read_parquet(out).to_dicts() if out.exists() else []
    finished = {row["benchmark"] for row in rows} - {row["benchmark"] for row in rows if row["problem"] is not None}
    if not options.json:
        print(HEADER, flush=True)
    for name in names:
        if name not in finished:
            rows = [row for row in rows if row["benchmark"] != name] + run_benchmark(
                name, benchmarks[name][0], options.turns
            )
            write_results(build_table(rows), out)
        if not options.json:
            print("\n".join(format_line(row) for row in rows if row["benchmark"] == name), flush=True)
    if options.json:
        print(json.dumps([row for row in rows if row["benchmark"] in names]))
    print(out, file=sys.stderr)
    return None


def write_results(content: pl.DataFrame, out: Path) -> None:
    """Write the file completely or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    content.write_parquet(partial)
    partial.replace(out)


if __name__ == "__main__":
    main()
