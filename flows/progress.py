"""What a person sees of a run while it goes on: bars on a terminal, plain lines elsewhere, or nothing."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from fclmodels.listener import Listener

LINE_EVERY = 10.0  # seconds between plain lines within a task
READING = "task_agnostic"
Summary = dict[str, dict[str, float | None]]


class Silent(Listener):
    """Listens to the engine, and to the flow, which also knows what was found done."""

    def __init__(self, label: str, rounds: Sequence[int]) -> None:
        self.label = label
        self.rounds = rounds

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def task_learned(self, task: int, summary: Summary, again: bool) -> None:
        """A task is learned and evaluated; `again`: nothing had to be done for it."""

    def remark(self, text: str) -> None:
        """What the method has to say after a task."""

    def refused(self, task: int, round: int, client: int, why: str) -> None:
        when = f"round {round + 1}" if round >= 0 else "its end"
        self.remark(f"task {task + 1}, {when}: the reply of client {client} is refused: {why}")


class Lines(Silent):
    """One line a task, and one every few seconds within it."""

    def __init__(self, label: str, rounds: Sequence[int], console: Console) -> None:
        super().__init__(label, rounds)
        self.console = console
        self.last_line = time.monotonic()

    def round_done(self, row: dict[str, Any]) -> None:
        if time.monotonic() - self.last_line >= LINE_EVERY:
            place = (
                f"task {row['task'] + 1} of {len(self.rounds)}, round {row['round'] + 1} of {self.rounds[row['task']]}"
            )
            self.say(f"{place}, {loss_in(row)}{answers_in(row)}")

    def task_learned(self, task: int, summary: Summary, again: bool) -> None:
        known = " (known from before)" if again else ""
        self.say(f"task {task + 1} of {len(self.rounds)} learned, {accuracy_in(summary)}{known}")

    def remark(self, text: str) -> None:
        self.say(text)

    def say(self, text: str) -> None:
        self.console.print(f"{self.label}: {text}", highlight=False, soft_wrap=True)
        self.last_line = time.monotonic()


class Bars(Silent):
    """One bar over all rounds with the time that is left, one over the clients of the round."""

    def __init__(self, label: str, rounds: Sequence[int], console: Console) -> None:
        super().__init__(label, rounds)
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=9)),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self.over_rounds = self.bars.add_task(label, total=sum(rounds), note="")
        self.over_clients = self.bars.add_task("clients", total=None, visible=False, note="")
        self.notes = {"accuracy": "", "loss": "", "left": ""}
        self.measured = (0, 0.0)  # rounds done here, and their seconds

    def __enter__(self) -> "Bars":
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.update(self.over_clients, visible=False)
        self.bars.stop()

    def client_done(self, task: int, round: int, done: int, of: int) -> None:
        self.bars.update(self.over_clients, completed=done, total=of, visible=True)

    def round_done(self, row: dict[str, Any]) -> None:
        done = sum(self.rounds[: row["task"]]) + row["round"] + 1
        self.measured = (self.measured[0] + 1, self.measured[1] + row["seconds"])
        left = (sum(self.rounds) - done) * self.measured[1] / self.measured[0]
        self.show(
            done, row["task"], loss=loss_in(row) + answers_in(row), left=f"{left // 60:.0f}:{left % 60:02.0f} left"
        )

    def task_learned(self, task: int, summary: Summary, again: bool) -> None:
        self.show(sum(self.rounds[: task + 1]), task, accuracy=accuracy_in(summary))

    def remark(self, text: str) -> None:
        self.bars.console.print(f"{self.label}: {text}", highlight=False, soft_wrap=True)

    def show(self, done: int, task: int, **notes: str) -> None:
        self.notes |= notes
        note = ", ".join(filter(None, self.notes.values()))
        name = f"{self.label}: task {task + 1} of {len(self.rounds)}, rounds"
        self.bars.update(self.over_rounds, completed=done, description=name, note=note)


def watch(label: str, rounds: Sequence[int], quiet: bool) -> Silent:
    """What fits where standard error goes."""
    console = Console(stderr=True)
    if quiet:
        return Silent(label, rounds)
    return (Bars if console.is_terminal else Lines)(label, rounds, console)


def loss_in(row: dict[str, Any]) -> str:
    return "no loss told" if row["loss"] is None else f"loss {row['loss']:.3f}"


def answers_in(row: dict[str, Any]) -> str:
    """How many answers a round has, where federation.faults left them other than one of each client in time."""
    if row["answers"] == row["clients"] and not row["late"]:
        return ""
    late = f", {row['late']} late" if row["late"] else ""
    return f", {row['answers']} answers from {row['clients']} clients{late}"


def accuracy_in(summary: Summary) -> str:
    accuracy = summary.get(READING, {}).get("acc")
    return "accuracy unknown" if accuracy is None else f"accuracy {100 * accuracy:.1f} %"
