"""What a server does beside the rounds: the evaluation after a task, adding up replies, a checkpoint."""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch
from measuring import Bench, Row, taking_turns
from works import WORKS, method_on, our_rounds, processes, run_on

from fclmodels.federation import evaluation
from fclmodels.federation.checkpoints import Checkpoints, Position
from fclmodels.federation.replies import TreeSum

EVALUATION, ROUNDS, TASKS = 0.10, 10, 5


def evaluated(name: str, turns: int) -> Iterator[Row]:
    """After the last of five tasks, each of ten rounds, with a test sample of each for five train samples; both on two
    cores."""
    with run_on(replace(WORKS[name], tasks=TASKS)) as run:
        method = method_on(run, "fedavg")
        server = method.setup()
        for task in range(TASKS):
            server = method.start_task(server, task)
        with closing(our_rounds(run, "fedavg", processes, TASKS - 1)) as rounds:
            sides = {
                "rounds": partial(next, rounds),
                "evaluation": lambda: evaluation.evaluate(method, server, at_once=2),
            }
            seconds = taking_turns(sides, turns)
    training = [ROUNDS * taken for taken in seconds["rounds"]]
    what = f"evaluation after task {TASKS}, its {ROUNDS} rounds"
    yield Row(f"{name}-evaluation", what, seconds["evaluation"], training, limit=EVALUATION)


def aggregated(name: str, turns: int) -> Iterator[Row]:
    """Replies of all clients into one sum, along the fixed tree and by plain addition."""
    work = WORKS[name]
    with run_on(work) as run:
        weights = method_on(run, "fedavg").setup().weights
    reply = {key: value for key, value in weights.items() if value.is_floating_point()}

    def tree() -> None:
        total = TreeSum(work.clients)
        for place in range(work.clients):
            total.add(place, reply)
        total.result()

    def plain() -> None:
        total = {key: torch.zeros_like(value) for key, value in reply.items()}
        for _ in range(work.clients):
            torch._foreach_add_(list(total.values()), list(reply.values()))

    seconds = taking_turns({"tree": tree, "plain": plain}, turns)
    yield Row(f"{name}-sum", "replies along the tree, plain addition", seconds["tree"], seconds["plain"])


def checkpointed(name: str, turns: int) -> Iterator[Row]:
    """A commit, and the same tensors by torch.save with fsync."""
    with run_on(WORKS[name]) as run:
        assert run.home is not None
        file, server = run.home / "plain.pt", method_on(run, "fedavg").setup()
        checkpoints = Checkpoints(run.home / "checkpoints")
        rounds = iter(range(10**6))

        def plain() -> None:
            with open(file, "wb") as opened:
                torch.save(server.weights, opened)
                opened.flush()
                os.fsync(opened.fileno())

        sides = {"commit": lambda: checkpoints.commit(Position(server, {}, next(rounds))), "plain": plain}
        seconds = taking_turns(sides, turns)
        checkpoints.close()
    yield Row(f"{name}-checkpoint", "a commit, torch.save with fsync", seconds["commit"], seconds["plain"])


BENCHES = [
    *(Bench(f"{name}-evaluation", partial(evaluated, name), 5) for name in ("w1", "w2", "w3")),
    *(Bench(f"{name}-sum", partial(aggregated, name), 15) for name in ("w1", "w2")),
    Bench("w3-checkpoint", partial(checkpointed, "w3"), 9),
]
