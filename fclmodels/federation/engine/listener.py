"""Events of a run, for progress bars and servers, which override what they show; this listener ignores them all."""

from typing import Any


class Listener:
    """The functions that a run calls at its events."""

    def on_task_start(self, task: int, rounds: int) -> None:
        """Handle that the federated training of a task begins, or goes on."""

    def on_client_done(self, task: int, round: int, done: int, of: int) -> None:
        """Handle that one more client of the round has answered."""

    def on_server_step(self, task: int, work: str, done: int, of: int) -> None:
        """Handle that the server has finished one more step of its own training."""

    def on_refusal(self, task: int, round: int, client: int, why: str) -> None:
        """Handle that a client's reply is not used; rounds below 0 are exchanges outside of rounds."""

    def on_round_done(self, row: dict[str, Any]) -> None:
        """Handle that a round is over; the row goes into rounds.parquet."""
