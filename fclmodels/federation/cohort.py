"""The clients of a task as the server sees them: it asks, they answer, in time or late, and every byte is counted."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fclmodels.federation.checkpoints import Checkpoints
from fclmodels.federation.executor import EVALUATIONS, Answer, Executor, Job, largest_first
from fclmodels.federation.faults import Late, Turnout, keep
from fclmodels.federation.ledger import Ledger
from fclmodels.federation.messages import Payload
from fclmodels.federation.replies import Replies
from fclmodels.federation.secure import Session


class Cohort:
    """The clients that may take part in a task.

    memories: theirs after all exchanges so far. late: their replies to earlier rounds that have not arrived yet.
    """

    def __init__(
        self,
        executor: Executor,
        task: int,
        clients: Sequence[int],
        memories: Mapping[int, Path],
        ledger: Ledger,
        checkpoints: Checkpoints,
        late: Mapping[int, Late] | None = None,
    ) -> None:
        self.executor = executor
        self.secagg = executor.method.run.params.federation.secagg
        self.task = task
        self.clients = tuple(clients)
        self.memories = dict(memories)
        self.late = dict(late or {})
        self.ledger = ledger
        self.spool = checkpoints.folder / "spool"
        self.scratch = checkpoints.memories
        self._held_back = checkpoints.late
        self._exchanges = 0

    def ask(self, question: str, payload: Payload | None = None, clients: Sequence[int] | None = None) -> Replies:
        """Ask all clients, or some, at the end of a task."""
        self._exchanges += 1
        everyone = Turnout(dict.fromkeys(self.clients if clients is None else clients, 0))
        return self.exchange(question, -self._exchanges, payload or {}, everyone)

    def exchange(
        self,
        question: str,
        round: int,
        payload: Payload,
        turnout: Turnout,
        on_answer: Callable[[int], None] = lambda done: None,
    ) -> Replies:
        """Send the payload to the clients, and gather the replies that come in time and those of before that are due.

        Replies of before stand behind the others, in order of clients: sums run along the same tree whenever they come.
        """
        job = Job(question, self.task, round, payload, self.scratch)
        if question in EVALUATIONS or not self.secagg.on:
            return self._exchanged(job, turnout, on_answer)
        session = Session(job, turnout, self.secagg, self.executor, self.ledger)
        job = replace(job, payload={**payload, **session.payload})
        return session.sums(self._exchanged(job, turnout, on_answer))

    def close(self) -> None:
        """Drop what was spooled."""
        shutil.rmtree(self.spool, ignore_errors=True)

    def _exchanged(self, job: Job, turnout: Turnout, on_answer: Callable[[int], None]) -> Replies:
        for clients in (*turnout.called_off, tuple(turnout.delays)):
            self.ledger.sent(job, clients)
        begun = largest_first(self.executor.method, self.task, turnout.training)
        in_time = [client for client in begun if turnout.delays[client] == 0]
        replies = Replies([*in_time, *turnout.weights], self.spool / f"{job.question}{job.round}")
        for done, answer in enumerate(self.executor.run(job, begun, self.memories), start=1):
            if delay := turnout.delays[answer.client]:
                self._hold_back(answer, job.round, delay)
            else:
                replies.add(answer.client, answer.reply)
                self.ledger.received(job, answer.client, answer.reply)
            self.ledger.kept(job, answer.client, answer.memory)
            self._remember(answer.client, answer.memory)
            on_answer(done)
        self._deliver(job, turnout, replies)
        return replies

    def _hold_back(self, answer: Answer, round: int, delay: int) -> None:
        file = self._held_back / f"{answer.client}-{round}.safetensors"
        keep(answer.reply, file)
        self.late[answer.client] = Late(file, round, round + delay)

    def _deliver(self, job: Job, turnout: Turnout, replies: Replies) -> None:
        for client, late in turnout.arriving.items():
            reply = late.reply()
            self.ledger.received(job, client, reply, late.base_round)
            if client in turnout.weights:
                replies.add(client, reply, turnout.weights[client])
            del self.late[client]

    def _remember(self, client: int, memory: Path | None) -> None:
        if memory is None:
            self.memories.pop(client, None)
        else:
            self.memories[client] = memory
