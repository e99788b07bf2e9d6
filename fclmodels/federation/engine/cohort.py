"""A cohort: the clients of a task as the server sees them. It asks, they answer in time or late, bytes are counted."""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fclmodels.errors import UserError
from fclmodels.federation.engine.faults import Cause, Late, Turnout, keep
from fclmodels.federation.engine.replies import Replies, Rule
from fclmodels.federation.exchange import EVALUATIONS, TRAIN, Exchange
from fclmodels.federation.executors.base import ClientResult, Executor, Job, sort_largest_first
from fclmodels.federation.messages import Block, Payload, Reply
from fclmodels.federation.protection import inspection
from fclmodels.federation.protection.inspection import (
    WITHHELD,
    Finding,
    Refusal,
    ReplyDefect,
    ReplyForm,
    describe_form,
    list_entries,
)
from fclmodels.settings.federation import FederationSettings

if TYPE_CHECKING:
    from fclmodels.federation.engine.checkpoints import Checkpoints
    from fclmodels.federation.engine.ledger import Ledger
    from fclmodels.federation.training.server_training import ServerTraining, ServerWork

# Exchanges outside of rounds have numbers below 0: after a task's rounds -1, -2, ..., before them -1001, -1002, ...
AFTER_ROUNDS, BEFORE_ROUNDS = 0, 1000


class Cohort:
    """The clients that may take part in a task."""

    def __init__(
        self,
        executor: Executor,
        task: int,
        clients: Sequence[int],
        memories: Mapping[int, Path],
        ledger: "Ledger",
        checkpoints: "Checkpoints",
        late: Mapping[int, Late] | None = None,
        aside: Collection[int] = (),
        usual_length: float = 0.0,
        first_exchange: int = AFTER_ROUNDS,
        server_training: "ServerTraining | None" = None,
    ) -> None:
        self.executor = executor
        self.task = task
        self.clients = tuple(client for client in clients if client not in aside)
        self.aside = aside  # clients that are not asked any more
        self.lost: dict[int, Cause] = {}  # clients that were lost in the last exchange, and why
        self.refused: list[Refusal] = []  # all refusals so far
        self.median: float | None = None  # of the lengths of the accepted updates of the last exchange
        self.farthest: float | None = None  # the longest of these updates, in medians
        self.usual_length = usual_length  # of updates in earlier rounds
        self.memories = dict(memories)  # the clients' memories after all exchanges so far
        self.late = dict(late or {})  # replies to earlier rounds that have not arrived yet
        self.ledger = ledger
        self.spool = checkpoints.folder / "spool"
        self.scratch = checkpoints.memories
        self._late_folder = checkpoints.late
        self._server_training = server_training
        self._exchanges = first_exchange

    def ask(
        self,
        exchange: Exchange,
        *about: Any,
        clients: Sequence[int] | None = None,
        own_payloads: Mapping[int, Payload] | None = None,
    ) -> Replies:
        """Return the answers of all clients, or of some, outside of rounds; `about` goes to the exchange's payload.

        own_payloads: what single clients download besides, by client.
        """
        return self.put_question(exchange.name, exchange.payload(*about), clients, own_payloads)

    def train(self, work: "ServerWork", steps: int) -> None:
        """Take steps of the server's own work, from its last checkpoint on."""
        assert self._server_training is not None, "the server trains before a task's rounds and after them"
        self._server_training.run(work, steps)

    @property
    def everyone(self) -> tuple[int, ...]:
        """All clients of the run, also those without data of the task."""
        everyone = range(self.executor.method.run.splits.clients)
        return tuple(client for client in everyone if client not in self.aside)

    def put_question(
        self,
        name: str,
        payload: Payload,
        clients: Sequence[int] | None = None,
        own_payloads: Mapping[int, Payload] | None = None,
    ) -> Replies:
        """Return the replies to a question by name, which may be one of the engine's own."""
        self._exchanges += 1
        able = [client for client in (self.clients if clients is None else clients) if client not in self.aside]
        turnout = Turnout(dict.fromkeys(able, 0))
        return self.exchange(name, -self._exchanges, payload, turnout, own_payloads=own_payloads)

    def exchange(
        self,
        question: str,
        round: int,
        payload: Payload,
        turnout: Turnout,
        on_answer: Callable[[int], None] = lambda count: None,
        own_payloads: Mapping[int, Payload] | None = None,
    ) -> Replies:
        """Send the payload to the clients; return the replies that come in time, and late ones that are due now.

        Late replies come after the others, in order of clients: sums run along the same tree whenever they arrive.
        """
        job = Job(
            question, self.task, round, payload, self.scratch, len(turnout.delays), own_payloads=own_payloads or {}
        )
        if question in EVALUATIONS or not self._settings.secagg.on:
            return self._gather(job, turnout, on_answer)
        from fclmodels.federation.protection.secure_aggregation import Session

        session = Session(job, turnout, self._settings.secagg, self.executor, self.ledger)
        job = replace(job, payload={**payload, **session.payload})
        return session.compute_sums(self._gather(job, turnout, on_answer))

    def close(self) -> None:
        """Delete the spool."""
        shutil.rmtree(self.spool, ignore_errors=True)

    def _gather(self, job: Job, turnout: Turnout, on_answer: Callable[[int], None]) -> Replies:
        for clients in (*turnout.called_off, tuple(turnout.delays)):
            self.ledger.note_payload(job, clients)
        order = sort_largest_first(self.executor.method, self.task, turnout.training)
        punctual = set(turnout.in_time)
        in_time = [client for client in order if client in punctual]
        replies = Replies([*in_time, *turnout.weights], self.spool / f"{job.question}{job.round}", self._rule)
        job = replace(job, summed=self._needs_sums_only(job) and order == replies.clients)
        places = {client: place for place, client in enumerate(order)}
        findings: dict[int, Finding] = {}
        before = dict(self.memories)
        self.lost = dict(turnout.lost)
        for count, answer in enumerate(self.executor.run(job, order, before), start=1):
            on_answer(count)
            if answer.reply.out_of_memory:
                self._refuse_lost_noise(answer.client, "was out of memory")
                self.lost[answer.client] = "out of memory"
                replies.drop(answer.client)
            if answer.client in self.lost:
                continue
            if delay := turnout.delays[answer.client]:
                self._hold_back(answer, job.round, delay)
            else:
                if job.summed and answer.finding is None:
                    answer = self._make_block(job, places[answer.client], findings, answer)
                self._take(job, replies, findings, answer.client, answer.reply, finding=answer.finding)
                if answer.block:
                    replies.add_block(answer.block)
            self.ledger.note_memory(job, answer.client, answer.memory)
            self._remember(answer.client, answer.memory)
        for client, why in self.lost.items():
            self.ledger.note_loss(job, client, why)
        self._deliver(job, turnout, replies, findings)
        self._refuse(job, replies, findings)
        if replies.in_blocks and replies.clients != order:
            self._ask_again(job, replies, before)
        return replies

    def _make_block(self, job: Job, place: int, findings: Mapping[int, Finding], answer: ClientResult) -> ClientResult:
        """Return a result as an executor that sums would; without a block where its reply is refused or differs."""
        finding = self._inspect(job, answer.client, answer.reply)
        reply, sums = answer.reply.set_apart()
        alike = not finding.defect and next(iter(findings.values()), finding).form == finding.form
        block = Block(0, place, sums) if alike else None
        return replace(answer, reply=reply, finding=finding, block=block)

    def _ask_again(self, job: Job, replies: Replies, memories: Mapping[int, Path]) -> None:
        """Get the replies of the remaining clients once more, one by one: without some the sums have another tree."""
        replies.drop_blocks()
        job, findings = replace(job, summed=False), dict[int, Finding]()
        for answer in self.executor.run(job, replies.clients, memories):
            if answer.reply.out_of_memory:
                raise UserError(
                    f"client {answer.client} was out of memory when it had to answer again. Start it again."
                )
            replies.add(answer.client, answer.reply)
            self._look(job, findings, answer.client, answer.reply)
        self._refuse(job, replies, findings)

    def _hold_back(self, answer: ClientResult, round: int, delay: int) -> None:
        """Keep a late reply in a file until it is due."""
        file = self._late_folder / f"{answer.client}-{round}.safetensors"
        keep(answer.reply, file)
        self.late[answer.client] = Late(file, round, round + delay)

    def _deliver(self, job: Job, turnout: Turnout, replies: Replies, findings: dict[int, Finding]) -> None:
        """Take the late replies that are due now; those without a weight only cost their bytes."""
        for client, late in turnout.arriving.items():
            reply = late.reply()
            if client in turnout.weights:
                self._take(job, replies, findings, client, reply, turnout.weights[client], late.base_round)
            else:
                self.ledger.note_reply(job, client, reply, late.base_round)
            del self.late[client]

    def _take(
        self,
        job: Job,
        replies: Replies,
        findings: dict[int, Finding],
        client: int,
        reply: Reply,
        weight: float = 1.0,
        base_round: int | None = None,
        finding: Finding | None = None,
    ) -> None:
        replies.add(client, reply, weight)
        self.ledger.note_reply(job, client, reply, base_round)
        self._look(job, findings, client, reply, finding)

    def _look(
        self, job: Job, findings: dict[int, Finding], client: int, reply: Reply, finding: Finding | None = None
    ) -> None:
        if not self._settings.inspection.check or job.question in EVALUATIONS:
            return
        if reply.withheld or (job.question == TRAIN and not reply.parts):
            finding = Finding(ReplyDefect("reply", WITHHELD))
        elif finding is None and self._settings.sums_only:
            finding = inspection.outline(reply)
        findings[client] = finding or self._inspect(job, client, reply)

    def _inspect(self, job: Job, client: int, reply: Reply) -> Finding:
        method = self.executor.method
        classes = method.run.splits.count_classes(job.task + 1)
        return inspection.inspect_reply(reply, job.join_payload(client), method.bound_client_weight(job.task), classes)

    def _refuse(self, job: Job, replies: Replies, findings: Mapping[int, Finding]) -> None:
        """Drop the replies with a defect, and measure the lengths of the others' updates."""
        fits = partial(self._fits, job)
        defects = inspection.find_defects(findings, self._settings.inspection, fits, self.usual_length)
        for client, defect in defects.items():
            self._refuse_lost_noise(client, f"sent a reply whose {defect.part} {defect.why}")
            replies.drop(client)
            self.ledger.note_refusal(job, client, defect.part)
            self.refused.append(Refusal(job.round, client, defect))
        self.median, self.farthest = (
            inspection.measure_median_length(findings, defects),
            inspection.measure_farthest(findings, defects),
        )

    def _fits(self, job: Job, form: ReplyForm) -> bool:
        """Return whether a reply's form has all that the method declares."""
        declared = self.executor.method.exchanges[job.question].form(job.task, job.round)
        return list_entries(describe_form(declared)) <= list_entries(form, self._settings.secagg.on)

    def _refuse_lost_noise(self, client: int, why: str) -> None:
        """Raise UserError where a client's reply cannot be used, and with it its share of the noise."""
        if self._settings.privacy.shared:
            raise UserError(
                f"federation.privacy: client {client} {why}, and its share of the noise is missing. "
                "Look at that client, or set federation.privacy.kind: local."
            )

    def _needs_sums_only(self, job: Job) -> bool:
        """Return whether nothing but the method needs a reply by itself."""
        settings = self._settings
        checks = settings.inspection.check and job.question not in EVALUATIONS
        return checks and self._rule is None and not settings.sums_only

    @property
    def _settings(self) -> FederationSettings:
        return self.executor.method.run.params.federation

    @property
    def _rule(self) -> Rule | None:
        """The robust rule that replaces weighted means; None in training in one place, which averages nothing."""
        kind, robust = self._settings.aggregation, self._settings.robust
        if kind == "mean" or self.executor.method.is_centralised:
            return None
        from fclmodels.numerics.robust_means import robust_mean

        return partial(robust_mean, kind, robust.bad, robust.clip)

    def _remember(self, client: int, memory: Path | None) -> None:
        if memory is None:
            self.memories.pop(client, None)
        else:
            self.memories[client] = memory
