"""The clients of a task as the server sees them: it asks, they answer, and every byte is counted."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fclmodels.federation.checkpoints import Checkpoints
from fclmodels.federation.executor import Executor, Job, largest_first
from fclmodels.federation.ledger import Ledger
from fclmodels.federation.messages import Payload
from fclmodels.federation.replies import Replies


class Cohort:
    """The clients that may take part in a task. `memories` are theirs after all exchanges so far."""

    def __init__(
        self,
        executor: Executor,
        task: int,
        clients: Sequence[int],
        memories: Mapping[int, Path],
        ledger: Ledger,
        checkpoints: Checkpoints,
    ) -> None:
        self.executor = executor
        self.task = task
        self.clients = tuple(clients)
        self.memories = dict(memories)
        self.ledger = ledger
        self.spool = checkpoints.folder / "spool"
        self.scratch = checkpoints.memories
        self._exchanges = 0

    def ask(self, question: str, payload: Payload | None = None, clients: Sequence[int] | None = None) -> Replies:
        """Ask all clients, or some, at the end of a task."""
        self._exchanges += 1
        return self.exchange(question, -self._exchanges, payload or {}, self.clients if clients is None else clients)

    def exchange(
        self,
        question: str,
        round: int,
        payload: Payload,
        clients: Sequence[int],
        on_answer: Callable[[int], None] = lambda done: None,
    ) -> Replies:
        """Send the payload to the clients and gather their replies."""
        job = Job(question, self.task, round, payload, self.scratch)
        replies = Replies(
            largest_first(self.executor.method, self.task, clients), self.spool / f"{job.question}{job.round}"
        )
        self.ledger.sent(job, replies.clients)
        for done, answer in enumerate(self.executor.run(job, replies.clients, self.memories), start=1):
            replies.add(answer.client, answer.reply)
            self.ledger.received(job, answer)
            self._remember(answer.client, answer.memory)
            on_answer(done)
        return replies

    def close(self) -> None:
        """Drop what was spooled."""
        shutil.rmtree(self.spool, ignore_errors=True)

    def _remember(self, client: int, memory: Path | None) -> None:
        if memory is None:
            self.memories.pop(client, None)
        else:
            self.memories[client] = memory
