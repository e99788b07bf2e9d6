"""Growth of a run's cost: the tables of docs/scale.md, as Markdown.

    python bench/scale.py [registered answering samples model workers tasks]

Seconds are the processor's, of all processes, so that other work on the machine tells little. Each line but those of
`tasks` is a process tree of its own with two one-thread workers: the median round after the first, the first, in which
workers start and open the data, and the most memory that no file holds, shared pages counted once.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

from child_run import ChildRun
from measuring import ANONYMOUS, measure_cpu_of_tree, measure_peak_of_tree
from workloads import WORKS, build_method, open_run, run_rounds, start_processes

from fclmodels.federation import evaluation
from fclmodels.federation.executors import glibc_malloc

ROUNDS = 4
SMALL = "model.hidden=16"
HUNDRED = "federation.clients_per_round=100"


def format_line(label: str, run: ChildRun) -> str:
    megabytes, output = measure_peak_of_tree(run.command, ANONYMOUS)
    first, *rest = json.loads(output.splitlines()[-1])
    return f"| {label} | {statistics.median(rest):.3f} | {first:.2f} | {megabytes:.0f} |"


def registered() -> Iterator[str]:
    for clients in (100, 1_000, 10_000, 100_000):
        yield format_line(f"{clients:,} registered, 100 a round", ChildRun("w1", clients, 5, ROUNDS, SMALL, HUNDRED))


def answering() -> Iterator[str]:
    for clients in (100, 400, 1_600, 6_400):
        yield format_line(f"{clients:,} answer", ChildRun("w1", clients, 5, ROUNDS, SMALL))


def samples() -> Iterator[str]:
    for count in (50, 200, 800, 3_200):
        yield format_line(f"{count:,} samples a client", ChildRun("w1", 10, count, ROUNDS))


def model() -> Iterator[str]:
    for hidden in (200, 800, 1_600, 3_200):
        numbers = 784 * hidden + 2 * hidden**2
        label = f"{numbers / 1e6:.1f} million numbers"
        yield format_line(label, ChildRun("w1", 10, 50, ROUNDS, f"model.hidden={hidden}"))


def workers() -> Iterator[str]:
    for count in (1, 2):
        yield format_line(f"{count} of one thread", ChildRun("w2", 10, 100, ROUNDS, f"federation.workers={count}"))


def tasks() -> Iterator[str]:
    """Measure AlexNet with 10 clients of 100 samples and 200 test samples a task."""
    for count in (1, 2, 5, 10):
        with open_run(replace(WORKS["w2"], tasks=count)) as run:
            method = build_method(run, "fedavg")
            server = method.create_server()
            for task in range(count):
                server = method.start_task(server, task)
            judged = measure_seconds(lambda of=(method, server): evaluation.evaluate(*of))
            rounds = {}
            for name in ("fedavg", "fot", "er"):
                with closing(run_rounds(run, name, start_processes, count - 1)) as loop:
                    rounds[name] = measure_seconds(lambda of=loop: next(of))
        yield f"| {count} | {judged:.3f} | {' | '.join(f'{seconds:.3f}' for seconds in rounds.values())} |"


def measure_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        before = measure_cpu_of_tree()
        work()
        seconds.append(measure_cpu_of_tree() - before)
    return statistics.median(seconds[1:])


PARTS = {part.__name__: part for part in (registered, answering, samples, model, workers, tasks)}

HEADS = {"tasks": ["tasks learned", "evaluation, CPU s", "fedavg", "fot", "er"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    glibc_malloc.tune()
    for part in parser.parse_args().parts:
        heads = HEADS.get(part, ["", "round, CPU s", "first, CPU s", "MB"])
        print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
        for row in PARTS[part]():
            print(row, flush=True)


if __name__ == "__main__":
    main()
