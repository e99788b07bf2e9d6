"""The clients of a task as the server sees them: it asks, they answer, in time or late, and every byte is counted."""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fclmodels.errors import UserError
from fclmodels.federation import inspection
from fclmodels.federation.checkpoints import Checkpoints
from fclmodels.federation.executor import EVALUATIONS, TRAIN, Answer, Executor, Job, largest_first
from fclmodels.federation.faults import Late, Loss, Turnout, keep
from fclmodels.federation.inspection import WITHHELD, Fault, Form, Look, Refusal, form_of, shown
from fclmodels.federation.ledger import Ledger
from fclmodels.federation.messages import Block, Payload, Reply
from fclmodels.federation.replies import Replies, Rule
from fclmodels.federation.secure import Session
from fclmodels.numerics.robust import robust_mean
from fclmodels.settings import FederationSettings


class Cohort:
    """The clients that may take part in a task.

    memories: theirs after all exchanges so far. late: their replies to earlier rounds that have not arrived yet.
    aside: who is not asked any more. lost: who was lost in the last exchange, and why. refused: whose replies were, and
    why. median, farthest: of the updates of the last exchange that were taken the median length, and the longest in
    medians. usual_length: of updates in earlier rounds.
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
        aside: Collection[int] = (),
        usual_length: float = 0.0,
    ) -> None:
        self.executor = executor
        self.task = task
        self.clients = tuple(client for client in clients if client not in aside)
        self.aside = aside
        self.lost: dict[int, Loss] = {}
        self.refused: list[Refusal] = []
        self.median: float | None = None
        self.farthest: float | None = None
        self.usual_length = usual_length
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
        asked = [client for client in (self.clients if clients is None else clients) if client not in self.aside]
        return self.exchange(question, -self._exchanges, payload or {}, Turnout(dict.fromkeys(asked, 0)))

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
        job = Job(question, self.task, round, payload, self.scratch, len(turnout.delays))
        if question in EVALUATIONS or not self._settings.secagg.on:
            return self._exchanged(job, turnout, on_answer)
        session = Session(job, turnout, self._settings.secagg, self.executor, self.ledger)
        job = replace(job, payload={**payload, **session.payload})
        return session.sums(self._exchanged(job, turnout, on_answer))

    def close(self) -> None:
        """Drop what was spooled."""
        shutil.rmtree(self.spool, ignore_errors=True)

    def _exchanged(self, job: Job, turnout: Turnout, on_answer: Callable[[int], None]) -> Replies:
        for clients in (*turnout.called_off, tuple(turnout.delays)):
            self.ledger.sent(job, clients)
        begun = largest_first(self.executor.method, self.task, turnout.training)
        heard = set(turnout.in_time)
        in_time = [client for client in begun if client in heard]
        replies = Replies([*in_time, *turnout.weights], self.spool / f"{job.question}{job.round}", self._rule)
        job = replace(job, summed=self._sums_will_do(job) and begun == replies.clients)
        places = {client: place for place, client in enumerate(begun)}
        looks: dict[int, Look] = {}
        before = dict(self.memories)
        self.lost = dict(turnout.lost)
        for done, answer in enumerate(self.executor.run(job, begun, before), start=1):
            on_answer(done)
            if answer.reply.out_of_memory:
                self._refuse_lost_noise(answer.client, "was out of memory")
                self.lost[answer.client] = "out of memory"
                replies.drop(answer.client)
            if answer.client in self.lost:
                continue
            if delay := turnout.delays[answer.client]:
                self._hold_back(answer, job.round, delay)
            else:
                if job.summed and answer.look is None:
                    answer = self._summed(job, places[answer.client], looks, answer)
                self._take(job, replies, looks, answer.client, answer.reply, look=answer.look)
                if answer.block:
                    replies.add_block(answer.block)
            self.ledger.kept(job, answer.client, answer.memory)
            self._remember(answer.client, answer.memory)
        for client, why in self.lost.items():
            self.ledger.lost(job, client, why)
        self._deliver(job, turnout, replies, looks)
        self._refuse(job, replies, looks)
        if replies.in_blocks and replies.clients != begun:
            self._ask_again(job, replies, before)
        return replies

    def _summed(self, job: Job, place: int, looks: Mapping[int, Look], answer: Answer) -> Answer:
        """As from an executor that sums. Where replies differ or are wrong, some are refused and no sum is used."""
        look = self._seen(job, answer.reply)
        reply, sums = answer.reply.apart()
        alike = not look.fault and next(iter(looks.values()), look).form == look.form
        block = Block(0, place, sums) if alike else None
        return replace(answer, reply=reply, look=look, block=block)

    def _ask_again(self, job: Job, replies: Replies, memories: Mapping[int, Path]) -> None:
        """Without some of them the sums run along another tree: all that are left once more, one by one."""
        replies.drop_blocks()
        job, looks = replace(job, summed=False), dict[int, Look]()
        for answer in self.executor.run(job, replies.clients, memories):
            if answer.reply.out_of_memory:
                raise UserError(
                    f"client {answer.client} was out of memory when it had to answer again. Start it again."
                )
            replies.add(answer.client, answer.reply)
            self._look(job, looks, answer.client, answer.reply)
        self._refuse(job, replies, looks)

    def _hold_back(self, answer: Answer, round: int, delay: int) -> None:
        file = self._held_back / f"{answer.client}-{round}.safetensors"
        keep(answer.reply, file)
        self.late[answer.client] = Late(file, round, round + delay)

    def _deliver(self, job: Job, turnout: Turnout, replies: Replies, looks: dict[int, Look]) -> None:
        for client, late in turnout.arriving.items():
            reply = late.reply()
            if client in turnout.weights:
                self._take(job, replies, looks, client, reply, turnout.weights[client], late.base_round)
            else:
                self.ledger.received(job, client, reply, late.base_round)
            del self.late[client]

    def _take(
        self,
        job: Job,
        replies: Replies,
        looks: dict[int, Look],
        client: int,
        reply: Reply,
        weight: float = 1.0,
        base_round: int | None = None,
        look: Look | None = None,
    ) -> None:
        replies.add(client, reply, weight)
        self.ledger.received(job, client, reply, base_round)
        self._look(job, looks, client, reply, look)

    def _look(self, job: Job, looks: dict[int, Look], client: int, reply: Reply, look: Look | None = None) -> None:
        if not self._settings.inspection.check or job.question in EVALUATIONS:
            return
        if reply.withheld or (job.question == TRAIN and not reply.parts):
            look = Look(Fault("reply", WITHHELD))
        elif look is None and self._settings.sums_only:
            look = inspection.outline(reply)
        looks[client] = look or self._seen(job, reply)

    def _seen(self, job: Job, reply: Reply) -> Look:
        return inspection.look(reply, job.payload, self.executor.method.largest_weight(job.task))

    def _refuse(self, job: Job, replies: Replies, looks: Mapping[int, Look]) -> None:
        fits = partial(self._fits, job)
        faults = inspection.faults(looks, self._settings.inspection, fits, self.usual_length)
        for client, fault in faults.items():
            self._refuse_lost_noise(client, f"sent a reply whose {fault.part} {fault.why}")
            replies.drop(client)
            self.ledger.refused(job, client, fault.part)
            self.refused.append(Refusal(job.round, client, fault))
        self.median, self.farthest = inspection.median_length(looks, faults), inspection.farthest(looks, faults)

    def _fits(self, job: Job, form: Form) -> bool:
        """Whether it has all that the method declares."""
        declared = self.executor.method.sends(job.task, job.round).get(job.question, {})
        return shown(form_of(declared)) <= shown(form, self._settings.secagg.on)

    def _refuse_lost_noise(self, client: int, why: str) -> None:
        if self._settings.privacy.shared:
            raise UserError(
                f"federation.privacy: client {client} {why}, and its share of the noise is missing. "
                "Look at that client, or set federation.privacy.kind: local."
            )

    def _sums_will_do(self, job: Job) -> bool:
        """Whether nobody but the method needs a reply by itself."""
        settings = self._settings
        checked = settings.inspection.check and job.question not in EVALUATIONS
        return checked and self._rule is None and not settings.sums_only

    @property
    def _settings(self) -> FederationSettings:
        return self.executor.method.run.params.federation

    @property
    def _rule(self) -> Rule | None:
        """What takes the place of weighted means; training in one place has nothing to average."""
        kind, robust = self._settings.aggregation, self._settings.robust
        if kind == "mean" or self.executor.method.pooled_bytes is not None:
            return None
        return partial(robust_mean, kind, robust.bad, robust.clip)

    def _remember(self, client: int, memory: Path | None) -> None:
        if memory is None:
            self.memories.pop(client, None)
        else:
            self.memories[client] = memory
