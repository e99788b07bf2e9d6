"""What a run tells whoever watches it. This one keeps silent; progress bars and servers override it."""

from typing import Any


class Listener:
    def task_started(self, task: int, rounds: int) -> None:
        """The federated training of a task begins, or goes on."""

    def client_done(self, task: int, round: int, done: int, of: int) -> None:
        """One more client of the round has answered."""

    def refused(self, task: int, round: int, client: int, why: str) -> None:
        """A client's reply is not used; rounds below 0 are the exchanges at the end of a task."""

    def round_done(self, row: dict[str, Any]) -> None:
        """A round is over; the row is the one that rounds.parquet gets."""
