"""How the cost of a run grows: the tables of docs/scale.md, as Markdown.

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

from measuring import ANONYMOUS, cpu_of_tree, peak_of_tree
from watched import Watched
from works import WORKS, method_on, our_rounds, processes, run_on

from fclmodels.federation import evaluation, malloc

ROUNDS = 4
SMALL = "model.hidden=16"
HUNDRED = "federation.clients_per_round=100"


def line(label: str, watched: Watched) -> str:
    megabytes, told = peak_of_tree(watched.command, ANONYMOUS)
    first, *rest = json.loads(told.splitlines()[-1])
    return f"| {label} | {statistics.median(rest):.3f} | {first:.2f} | {megabytes:.0f} |"


def registered() -> Iterator[str]:
    for clients in (100, 1_000, 10_000, 100_000):
        yield line(f"{clients:,} registered, 100 a round", Watched("w1", clients, 5, ROUNDS, SMALL, HUNDRED))


def answering() -> Iterator[str]:
    for clients in (100, 400, 1_600, 6_400):
        yield line(f"{clients:,} answer", Watched("w1", clients, 5, ROUNDS, SMALL))


def samples() -> Iterator[str]:
    for count in (50, 200, 800, 3_200):
        yield line(f"{count:,} samples a client", Watched("w1", 10, count, ROUNDS))


def model() -> Iterator[str]:
    for hidden in (200, 800, 1_600, 3_200):
        numbers = 784 * hidden + 2 * hidden**2
        label = f"{numbers / 1e6:.1f} million numbers"
        yield line(label, Watched("w1", 10, 50, ROUNDS, f"model.hidden={hidden}"))


def workers() -> Iterator[str]:
    for count in (1, 2):
        yield line(f"{count} of one thread", Watched("w2", 10, 100, ROUNDS, f"federation.workers={count}"))


def tasks() -> Iterator[str]:
    """AlexNet, 10 clients of 100 samples and 200 test samples a task."""
    for count in (1, 2, 5, 10):
        with run_on(replace(WORKS["w2"], tasks=count)) as run:
            method = method_on(run, "fedavg")
            server = method.setup()
            for task in range(count):
                server = method.start_task(server, task)
            judged = seconds_of(lambda of=(method, server): evaluation.evaluate(*of))
            rounds = {}
            for name in ("fedavg", "fot", "er"):
                with closing(our_rounds(run, name, processes, count - 1)) as loop:
                    rounds[name] = seconds_of(lambda of=loop: next(of))
        yield f"| {count} | {judged:.3f} | {' | '.join(f'{taken:.3f}' for taken in rounds.values())} |"


def seconds_of(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(ROUNDS):
        before = cpu_of_tree()
        work()
        taken.append(cpu_of_tree() - before)
    return statistics.median(taken[1:])


PARTS = {part.__name__: part for part in (registered, answering, samples, model, workers, tasks)}

HEADS = {"tasks": ["tasks learned", "evaluation, CPU s", "fedavg", "fot", "er"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    malloc.tune()
    for part in parser.parse_args().parts:
        heads = HEADS.get(part, ["", "round, CPU s", "first, CPU s", "MB"])
        print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
        for row in PARTS[part]():
            print(row, flush=True)


if __name__ == "__main__":
    main()
