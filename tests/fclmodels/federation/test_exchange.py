"""An exchange: a reply holds what its form names, as the kinds that it says, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import TRAIN, Answer, Exchange, Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg

MEAN, SECRET = torch.tensor([1.0, 2.0]), torch.tensor([3.0])


def exchange_of(tensors: dict[str, dict[str, Tensor]], form: Form) -> Exchange:
    return Exchange("moments", dict, lambda client, payload: Answer(tensors, {"exchanges": 1}, 0.5, 7), lambda *_: form)


@pytest.fixture
def client(method_of: Callable, client_of: Callable) -> Client:
    return client_of(method_of(), 2, task=1, round=3)


def test_a_reply_holds_the_tensors_that_the_form_names_as_it_says(client: Client) -> None:
    """Kind, weight, bound and what the server needs are the form's; what a part holds besides stays with the client."""
    form = {
        "mean": Part("prototype", {"mean": torch.empty(2, device="meta")}, "each", over="weight", bound=1.5),
        "weight": make_outline("count", {"weight": ()}),
    }
    tensors = {"mean": {"mean": MEAN, "secret": SECRET}, "weight": {"weight": torch.tensor(4.0)}}
    reply, memory = exchange_of(tensors, form).reply(client, {})
    mean, weight = reply.parts["mean"], reply.parts["weight"]
    assert list(reply.parts) == list(form)
    assert (mean.kind, mean.least, mean.over, mean.bound) == ("prototype", "each", "weight", 1.5)
    assert (weight.kind, weight.least, weight.over, weight.bound) == ("count", "sum", "", None)
    assert list(mean.tensors) == ["mean"]
    assert mean.tensors["mean"] is MEAN
    assert (reply.loss, reply.samples, reply.base_round) == (0.5, 7, 3)
    assert memory == {"exchanges": 1}


def test_a_part_that_the_form_does_not_declare_is_refused(client: Client) -> None:
    exchange = exchange_of({"mean": {"mean": MEAN}, "secret": {"secret": SECRET}}, {"mean": make_outline("loss", {})})
    with pytest.raises(ValueError, match=r"^moments: the form does not declare secret, which the answer holds$"):
        exchange.reply(client, {})


@pytest.mark.parametrize("tensors", [{}, {"mean": {}}, {"mean": {"secret": SECRET}}])
def test_what_the_form_declares_has_to_be_there(tensors: dict[str, dict[str, Tensor]], client: Client) -> None:
    with pytest.raises(KeyError, match="mean"):
        exchange_of(tensors, {"mean": make_outline("prototype", {"mean": (2,)})}).reply(client, {})


def test_without_a_form_nothing_is_sent(client: Client) -> None:
    exchange = Exchange("remember", dict, lambda client, payload: Answer({}, {**client.memory, "new": MEAN}))
    reply, memory = exchange.reply(client, {})
    assert reply.parts == {}
    assert memory == {"new": MEAN}


def test_the_form_is_asked_for_the_clients_task_and_round(method_of: Callable, client_of: Callable) -> None:
    """Before the first round, and after the last, a round is below 0, and a reply counts as one of round 0."""
    positions: list[tuple[int, int]] = []

    def note(task: int, round: int) -> Form:
        positions.append((task, round))
        return {}

    exchange = Exchange("moments", dict, lambda client, payload: Answer({}, {}), note)
    replies = [exchange.reply(client_of(method_of(), 0, 1, round), {})[0] for round in (0, 2, -1)]
    assert positions == [(1, 0), (1, 2), (1, -1)]
    assert [reply.base_round for reply in replies] == [0, 2, 0]


class Poll(FedAvg):
    """Asks clients for their number of samples in units that it tells them."""

    def __init__(self, settings: FedAvg.Settings, run: Run) -> None:
        super().__init__(settings, run)
        form = {"count": make_outline("count", {"count": ()}, torch.float64)}
        self.poll = self.declare(Exchange("poll", self.unit_payload, self.count_rows, lambda task, round: form))
        self.totals: list[float] = []

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        self.totals += [self.total(cohort.ask(self.poll, 2.0)), self.total(cohort.ask(self.poll, 4.0, clients=(1, 3)))]
        return server

    def total(self, replies: Replies) -> float:
        return replies.sum("count")["count"].item()

    def unit_payload(self, unit: float) -> Payload:
        return {"unit": Part("count", {"unit": torch.tensor(unit, dtype=torch.float64)})}

    def count_rows(self, client: Client, payload: Payload) -> Answer:
        return Answer({"count": {"count": len(client.rows) / payload["unit"].tensors["unit"]}}, client.memory)


def test_asked_through_the_cohort_the_payload_is_made_of_what_the_question_is_about(
    method_of: Callable, federate: Callable
) -> None:
    """By all clients of the task, or by some. Each has 8 samples."""
    method = method_of(Poll)
    federate(method, 1)
    assert set(method.exchanges) == {TRAIN, "poll"}
    assert method.totals == [4 * 8 / 2, 2 * 8 / 4]


class Chatty(FedAvg):
    """Sends a client's labels beside its update, and does not say so."""

    def make_further_parts(self, training: Any, payload: Payload) -> dict[str, dict[str, Tensor]]:
        return {"labels": {"labels": torch.from_numpy(training.client.rows.labels)}}


def test_a_method_that_sends_what_it_does_not_declare_does_not_run(method_of: Callable, federate: Callable) -> None:
    with pytest.raises(ValueError, match=r"^train: the form does not declare labels, which the answer holds$"):
        federate(method_of(Chatty))
