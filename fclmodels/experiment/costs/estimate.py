"""What a run will cost, from a trial of the same shapes: bytes, memory, disk, minutes; and whether that fits here."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fclmodels import machine
from fclmodels.errors import UserError
from fclmodels.experiment.costs.trial import TaskCosts, TooLarge, Traffic, Trial, run_trial
from fclmodels.federation.executors.auto_choice import Choice, count_most_batches
from fclmodels.report.formatting import format_bytes, format_duration
from fclmodels.storage.files import find_existing

if TYPE_CHECKING:
    from fclmodels.experiment.experiment import Experiment
    from fclmodels.federation.method import Method


@dataclass(frozen=True)
class Estimate:
    """The expected costs of a run."""

    bytes_up: int  # from all clients, in all
    bytes_down: int
    round_up: int  # in one of the last task's rounds
    round_down: int
    main_bytes: int  # memory of the main process
    worker_bytes: int  # memory of each worker; 0 where clients run in the main process
    workers: int
    client_memory: int  # bytes that a client stores at the end
    disk: int
    seconds: float

    @property
    def memory(self) -> int:
        """Memory of all processes together, in bytes."""
        return self.main_bytes + self.workers * self.worker_bytes


def estimate_run(run: "Experiment") -> Estimate:
    """Return the expected costs of an experiment; UserError where even a trial does not fit into memory."""
    free = machine.read_available_memory()
    try:
        trial = run_trial(run.params, run.splits, type(run.method).name, run.seed, run.choice, free)
    except TooLarge:
        remedy = advise_smaller(run)
        raise UserError(
            f"{run.label} does not fit into memory: {format_bytes(free or 0)} are free, and a trial of a few "
            f"samples took more. {remedy} fcl run --force runs it all the same."
        ) from None
    return extrapolate(trial, run.method, run.choice)


def extrapolate(trial: Trial, method: "Method", choice: Choice) -> Estimate:
    """Return the expected costs of a method's run with this choice of executor."""
    tasks = [extend(trial.tasks, task) for task in range(len(method.run.splits.tasks))]
    up, down = (
        [sum_traffic(method, task, getattr(costs, way)) for task, costs in enumerate(tasks)] for way in ("up", "down")
    )
    if method.is_centralised:
        up = [sum(method.count_pooled_bytes(task).values()) for task in range(len(tasks))]
    last = len(tasks) - 1
    sampled = method.count_sampled_clients(last)
    is_serial = choice.executor == "serial"
    workers = 0 if is_serial else min(choice.workers or 1, sampled)
    grown = max(0, tasks[-1].stored - trial.tasks[-1].stored)
    clients = max(len(method.list_participants(task)) for task in range(len(tasks)))
    stored = sum(costs.stored + clients * costs.memory for costs in tasks)
    spool = sampled * max(tasks[-1].up["later"], tasks[-1].up["after"])
    return Estimate(
        bytes_up=round(sum(up)),
        bytes_down=round(sum(down)),
        round_up=round(sampled * tasks[-1].up["later"]),
        round_down=round(sampled * tasks[-1].down["later"]),
        main_bytes=(machine.read_status("VmRSS") or 0) + trial.main_bytes + grown,
        worker_bytes=0 if is_serial else trial.worker_bytes + grown,
        workers=workers,
        client_memory=round(tasks[-1].memory),
        disk=round(trial.model_bytes + stored + spool),
        seconds=sum(predict_seconds(trial, tasks[task], method, task, max(workers, 1)) for task in range(len(tasks))),
    )


def extend(measured: Sequence[TaskCosts], task: int) -> TaskCosts:
    """Return the costs of a task: those of the trial, or beyond it what grew from its last task but one goes on."""
    if task < len(measured):
        return measured[task]
    before, last, steps = measured[-2], measured[-1], task - len(measured) + 1
    return TaskCosts(
        clients=last.clients,
        rows=last.rows,
        up={when: go_on(before.up[when], last.up[when], steps) for when in last.up},
        down={when: go_on(before.down[when], last.down[when], steps) for when in last.down},
        memory=go_on(before.memory, last.memory, steps),
        stored=round(go_on(before.stored, last.stored, steps)),
        seconds_a_row=last.seconds_a_row,
        conclude_seconds=go_on(before.conclude_seconds, last.conclude_seconds, steps),
    )


def go_on(before: float, last: float, steps: int) -> float:
    """Return a cost so many tasks after the last one, if it goes on to change as it did there."""
    return max(0.0, last + steps * (last - before))


def sum_traffic(method: "Method", task: int, of_client: Traffic) -> float:
    """Return the bytes of a task in one direction, of all clients.

    With n clients of which each of R rounds samples s, n (1 - (1 - s/n)^R) are expected to take part at least once.
    """
    clients, sampled = len(method.list_participants(task)), method.count_sampled_clients(task)
    rounds = method.run.count_rounds(task)
    ever = clients * (1 - (1 - sampled / clients) ** rounds)
    outside = clients * (of_client["before"] + of_client["after"])
    return outside + ever * of_client["first"] + (rounds * sampled - ever) * of_client["later"]


def predict_seconds(trial: Trial, costs: TaskCosts, method: "Method", task: int, workers: int) -> float:
    """Return the seconds of a task: its rounds, its end, and the evaluation of all tasks so far."""
    run, federation = method.run, method.run.params.federation
    clients = method.list_participants(task)
    rows = sorted((len(method.select_rows(task, client)) for client in clients), reverse=True)
    share = method.count_sampled_clients(task) / len(clients)
    a_round = count_most_batches(rows, workers) * share * federation.local_epochs * costs.seconds_a_row
    conclude = costs.conclude_seconds * sum(rows) / costs.rows / workers
    test_rows = sum(len(run.splits.select_test_rows(earlier)) for earlier in range(task + 1))
    return run.count_rounds(task) * a_round + conclude + test_rows * trial.seconds_a_test_row


def refuse_what_does_not_fit(estimate: Estimate, run: "Experiment") -> None:
    """Raise UserError, with a setting that would help, where a run needs more memory or disk than there is."""
    free, room = machine.read_available_memory(), shutil.disk_usage(find_existing(run.home)).free
    if free is not None and estimate.memory > free:
        fitting = int((free - estimate.main_bytes) // estimate.worker_bytes) if estimate.worker_bytes else 0
        remedy = f"Set federation.workers: {fitting}." if fitting > 0 else advise_smaller(run)
        raise UserError(
            f"{run.label} does not fit into memory: it takes about {format_bytes(estimate.memory)} "
            f"({describe_memory(estimate)}), and {format_bytes(free)} are free. {remedy} "
            "fcl run --force runs it all the same."
        )
    if estimate.disk > room:
        raise UserError(
            f"{run.label} does not fit on the disk of {run.home}: it takes about {format_bytes(estimate.disk)}, "
            f"and {format_bytes(room)} are free. Make room, or link {run.home} to a larger disk. "
            "fcl run --force runs it all the same."
        )


def advise_smaller(run: "Experiment") -> str:
    """Return the setting that makes a run's memory smaller: fewer samples at once, or a smaller model."""
    federation = run.params.federation
    if federation.batch_size > 8 and run.choice.executor == "serial":
        return f"Set federation.batch_size: {federation.batch_size // 4}, or a smaller model.backbone or data.size."
    return "Set a smaller model.backbone or data.size, or federation.executor: serial."


def describe(estimate: Estimate) -> str:
    """Return the expected costs in one line."""
    sent = f"{format_bytes(estimate.bytes_up)} up and {format_bytes(estimate.bytes_down)} down"
    a_round = f"{format_bytes(estimate.round_up)} and {format_bytes(estimate.round_down)} in a round"
    memory = f", {format_bytes(estimate.client_memory)} kept by a client" if estimate.client_memory else ""
    return (
        f"expected: {format_duration(estimate.seconds)}, {sent} ({a_round}){memory}, memory "
        f"{format_bytes(estimate.memory)} ({describe_memory(estimate)}), disk {format_bytes(estimate.disk)}"
    )


def tabulate(estimate: Estimate) -> list[dict[str, str]]:
    """Return the expected costs as rows of a table."""
    costs = {
        "time": format_duration(estimate.seconds),
        "clients send": f"{format_bytes(estimate.bytes_up)}, {format_bytes(estimate.round_up)} in a round",
        "clients receive": f"{format_bytes(estimate.bytes_down)}, {format_bytes(estimate.round_down)} in a round",
        "a client stores": format_bytes(estimate.client_memory),
        "memory": f"{format_bytes(estimate.memory)}: {describe_memory(estimate)}",
        "disk": format_bytes(estimate.disk),
    }
    return [{"what": what, "expected": cost} for what, cost in costs.items()]


def describe_memory(estimate: Estimate) -> str:
    """Return where a run's memory goes, in words."""
    main = f"{format_bytes(estimate.main_bytes)} in the main process"
    if not estimate.workers:
        return main
    return f"{main}, {format_bytes(estimate.worker_bytes)} in each of {estimate.workers} workers"
