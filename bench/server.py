"""Cost of a server beside the rounds: the evaluation after a task, sums of replies, a checkpoint."""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch
from measuring import Bench, Row, take_turns
from workloads import WORKS, build_method, open_run, run_rounds, start_processes

from fclmodels.federation import evaluation
from fclmodels.federation.engine.checkpoints import Checkpoints, Position
from fclmodels.federation.engine.replies import TreeSum

EVALUATION, ROUNDS, TASKS = 0.10, 10, 5


def measure_evaluation(name: str, turns: int) -> Iterator[Row]:
    """Measure evaluation after the last of five tasks against its ten rounds, both on two cores.

    There is a test sample for five train samples.
    """
    with open_run(replace(WORKS[name], tasks=TASKS)) as run:
        method = build_method(run, "fedavg")
        server = method.create_server()
        for task in range(TASKS):
            server = method.start_task(server, task)
        with closing(run_rounds(run, "fedavg", start_processes, TASKS - 1)) as rounds:
            sides = {
                "rounds": partial(next, rounds),
                "evaluation": lambda: evaluation.evaluate(method, server, at_once=2),
            }
            seconds = take_turns(sides, turns)
    training = [ROUNDS * seconds_of_round for seconds_of_round in seconds["rounds"]]
    what = f"evaluation after task {TASKS}, its {ROUNDS} rounds"
    yield Row(f"{name}-evaluation", what, seconds["evaluation"], training, limit=EVALUATION)


def measure_sum(name: str, turns: int) -> Iterator[Row]:
    """Measure the sum of all clients' replies, along the fixed tree and by plain addition."""
    work = WORKS[name]
    with open_run(work) as run:
        weights = build_method(run, "fedavg").create_server().weights
    reply = {key: value for key, value in weights.items() if value.is_floating_point()}

    def tree() -> None:
        total = TreeSum(work.clients)
        for place in range(work.clients):
            total.add(place, reply)
        total.compute_sum()

    def plain() -> None:
        total = {key: torch.zeros_like(value) for key, value in reply.items()}
        for _ in range(work.clients):
            torch._foreach_add_(list(total.values()), list(reply.values()))

    seconds = take_turns({"tree": tree, "plain": plain}, turns)
    yield Row(f"{name}-sum", "replies along the tree, plain addition", seconds["tree"], seconds["plain"])


def measure_checkpoint(name: str, turns: int) -> Iterator[Row]:
    """Measure a commit, and the same tensors by torch.save with fsync."""
    with open_run(WORKS[name]) as run:
        assert run.home is not None
        file, server = run.home / "plain.pt", build_method(run, "fedavg").create_server()
        checkpoints = Checkpoints(run.home / "checkpoints")
        rounds = iter(range(10**6))

        def plain() -> None:
            with open(file, "wb") as opened:
                torch.save(server.weights, opened)
                opened.flush()
                os.fsync(opened.fileno())

        sides = {"commit": lambda: checkpoints.commit(Position(server, {}, next(rounds))), "plain": plain}
        seconds = take_turns(sides, turns)
        checkpoints.close()
    yield Row(f"{name}-checkpoint", "a commit, torch.save with fsync", seconds["commit"], seconds["plain"])


BENCHES = [
    *(Bench(f"{name}-evaluation", partial(measure_evaluation, name), 5) for name in ("w1", "w2", "w3")),
    *(Bench(f"{name}-sum", partial(measure_sum, name), 15) for name in ("w1", "w2")),
    Bench("w3-checkpoint", partial(measure_checkpoint, "w3"), 9),
]
