"""What is refused, by itself and beside others. That honest replies of every method pass is in test_contract.py."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.checkpoints import Checkpoints
from fclmodels.federation.engine.ledger import make_ledger_table, open_ledger
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.engine.rounds import learn
from fclmodels.federation.exchange import TRAIN, Answer
from fclmodels.federation.executors.base import ClientResult, Job
from fclmodels.federation.executors.client_work import Serial
from fclmodels.federation.messages import Block, Part, Payload, Reply
from fclmodels.federation.protection import inspection
from fclmodels.federation.protection.inspection import Finding, ReplyDefect
from fclmodels.federation.protection.reply_checks import find_overlong_sketch, measure_length
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.numerics.prototypes import moments, weigh
from fclmodels.numerics.sketch import gaussian_sketch
from fclmodels.settings.federation import InspectionSettings
from fclmodels.tables import ROUNDS

MODEL = {"w": torch.zeros(3, 2), "b": torch.zeros(2)}
PAYLOAD = {"weights": Part("weights", MODEL)}
Parts = dict[str, Part]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def update(scale: float = 1.0, count: float = 2.0, **tensors: Tensor) -> Parts:
    given = {"w": drawn(3, 2) * scale * count, "b": drawn(2, seed=1) * scale * count, **tensors}
    return {
        "update": Part("update", given, over="weight"),
        "weight": Part("count", {"weight": torch.tensor(count, dtype=torch.float64)}),
    }


def part(kind: Any, **tensors: Tensor) -> Parts:
    return {"p": Part(kind, tensors)}


def weighted_loss(loss: float, samples: float) -> Parts:
    return {
        **update(),
        "p": replace(part("loss", loss=torch.tensor(loss), samples=torch.tensor(samples))["p"], over="weight"),
    }


def with_nan(tensor: Tensor, value: float = math.nan) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = value
    return tensor


Q = torch.linalg.qr(drawn(6, 3))[0]
# Of an input X = X* with E ||X* G||^2 = 50 for ten columns G, of three samples.
ENERGY = torch.tensor([5.0, 5.0, 3.0, 3.0], dtype=torch.float64)
MOMENTS = moments(drawn(40, 5), torch.arange(40) % 3, 4)


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        (update(), None),
        (update(b=with_nan(torch.ones(2))), ("update", "is not finite")),
        (update(b=with_nan(torch.ones(2), -math.inf)), ("update", "is not finite")),
        (update(c=torch.ones(2)), ("update", "c is not of the model")),
        ({**update(), "s": Part("statistics", {"c": torch.ones(2)}, over="weight")}, ("s", "c is not of the model")),
        ({**update(), "s": Part("statistics", {"b": -torch.ones(2)}, over="weight")}, None),
        (update(b=torch.ones(3)), ("update", "b is not of the model")),
        (update(b=torch.ones(2).double()), ("update", "b is not of the model")),
        (update(count=-2.0), ("update", "needs one number from 1e-09 to 1e+09 in weight")),
        (update(count=math.nan), ("update", "is not finite")),
        (update(count=0.0), ("update", "needs one number from 1e-09 to 1e+09 in weight")),
        (update(count=2e9), ("update", "needs one number from 1e-09 to 1e+09 in weight")),
        (update(0.0, 1e-300), ("update", "needs one number from 1e-09 to 1e+09 in weight")),
        ({"update": update()["update"]}, ("update", "needs one number from 1e-09 to 1e+09 in weight")),
        (part("basis", a=Q, b=Q[:, :0]), None),
        (part("basis", a=Q, b=1.01 * Q), ("p", "is not orthonormal")),
        (part("basis", a=torch.cat([Q, Q[:, :1]], 1)), ("p", "is not orthonormal")),
        (part("basis", a=drawn(3, 6)), ("p", "is not orthonormal")),
        (part("basis", a=drawn(3)), ("p", "is not orthonormal")),
        (part("directions", a=5 * Q), None),
        (part("sketch", a=drawn(4, 2)), None),
        (part("sketch", a=with_nan(drawn(4, 2))), ("p", "is not finite")),
        (part("prototype", **MOMENTS), None),
        (part("prototype", **weigh(MOMENTS, 7.0)), None),
        (part("prototype", sum=MOMENTS["sum"]), ("p", "has no counts")),
        (part("prototype", **{**MOMENTS, "weight": torch.ones(3)}), ("p", "has no row for each count")),
        (part("prototype", **{**MOMENTS, "weight": -MOMENTS["weight"]}), ("p", "has a negative count")),
        (part("prototype", **{**MOMENTS, "weight": torch.zeros(4)}), ("p", "has a sum of no samples")),
        (part("prototype", **{**MOMENTS, "square": MOMENTS["square"] + torch.tensor([[0], [0], [0], [1.0]])}),
         ("p", "has a sum of no samples")),
        (part("prototype", **{**MOMENTS, "square": 0.1 * MOMENTS["square"]}), ("p", "has a negative variance")),
        (part("reference", omega=-torch.ones(2, 2)), ("p", "is negative")),
        (part("reference", omega=torch.ones(2, 2), count=torch.tensor([0.0, 1.0])), None),
        (part("reference", omega=torch.ones(2, 2), count=torch.tensor([0.0, 1e9])), ("p", "counts more than once")),
        (part("statistics", loss=torch.tensor(-1.0), samples=torch.tensor(3.0)), ("p", "is negative")),
        (part("count", seen=torch.tensor([-1, 3])), ("p", "is negative")),
        (part("count", seen=torch.tensor(True)), ("p", "has numbers of torch.bool")),
        ({"p": Part("count", {"share": torch.tensor(-0.1)}, noise=1.0)}, None),
        (part("count", seen=torch.tensor(2**60)), ("p", "is above 1e+15")),
        (part("prototype", **weigh(MOMENTS, 1e16)), ("p", "has a count above 1e+15")),
        (part("loss", loss=torch.tensor(4.0), samples=torch.tensor(2.0)), None),
        (part("loss", loss=torch.tensor(0.0), samples=torch.tensor(0.0)), None),
        (part("loss", loss=torch.tensor(-1.0), samples=torch.tensor(3.0)), ("p", "is negative")),
        (part("loss", loss=torch.tensor(1.0), samples=torch.tensor(0.0)), ("p", "is not of 1 to 1e+09 samples")),
        (part("loss", loss=torch.tensor(1.0), samples=torch.tensor(1e10)), ("p", "is not of 1 to 1e+09 samples")),
        (part("loss", loss=torch.tensor(1.0)), ("p", "is not one loss and a number of samples")),
        (weighted_loss(3.0, 2.0), None),
        (weighted_loss(0.0, 1e9), ("p", "counts otherwise than the client's weight")),
        (weighted_loss(-1.0, 2.0), ("p", "is negative")),
        (part("energy", a=ENERGY), None),
        (part("energy", a=-ENERGY), ("p", "is negative")),
        (part("energy", a=ENERGY[:3]), ("p", "has not four numbers for each layer")),
        (part("energy", a=ENERGY * torch.tensor([1, 9, 1, 1])), ("p", "has more outside of a basis than in all")),
        (part("energy", a=ENERGY * torch.tensor([1, 1, 9, 1])), ("p", "has more outside of a basis than in all")),
        (part("energy", a=ENERGY * torch.tensor([1, 1, 1, 1e9])), ("p", "is of more than 1e+09 samples")),
        ({**part("energy", a=ENERGY), "s": Part("sketch", {"a": drawn(5, 10)})}, None),
        ({**part("energy", a=ENERGY), "s": Part("sketch", {"a": 4 * drawn(5, 10)})},
         ("s", "is longer than its energy says")),
    ],
)  # fmt: skip
def test_a_reply_by_itself(parts: Parts, fault: tuple[str, str] | None) -> None:
    assert inspection.inspect_reply(Reply(parts), PAYLOAD).defect == (fault and ReplyDefect(*fault))


def test_where_all_weigh_alike_nobody_counts_for_more() -> None:
    looks = [inspection.inspect_reply(Reply(update(count=count)), PAYLOAD, most=1.0) for count in (1.0, 1.5)]
    assert [seen.defect and seen.defect.why for seen in looks] == [None, "needs one number from 1e-09 to 1 in weight"]


@pytest.mark.parametrize(
    ("parts", "fine"),
    [
        ({"q": Part("basis", {"a": Q, "b": Q[:, :1]})}, True),
        ({"q": Part("basis", {"a": Q}), "r": Part("directions", {"b": 2 * Q})}, True),
        ({"n": Part("count", {"n": torch.tensor(1)})}, True),
        ({"q": Part("basis", {"a": Q})}, False),
        ({"q": Part("basis", {"a": Q, "b": Q, "c": Q})}, False),
        ({"q": Part("basis", {"a": Q, "b": torch.eye(7)})}, False),
        ({"q": Part("sketch", {"a": Q, "b": Q.double()})}, False),
    ],
)
def test_what_is_found_beside_bases_is_of_their_layers(parts: Parts, fine: bool) -> None:
    asked = {"bases": Part("basis", {"a": Q[:, :1], "b": Q[:, :0]})}
    expected = None if fine else ReplyDefect("q", "is not of the layers that have bases")
    assert inspection.inspect_reply(Reply(parts), asked).defect == expected


@pytest.mark.parametrize(
    ("loss", "samples", "why"),
    [
        (math.nan, 1, "is not finite"),
        (1e308, 1, "is above 3.4e+38, or not of 0 to 1e+09 samples"),
        (1.0, -1, "is above 3.4e+38, or not of 0 to 1e+09 samples"),
        (1.0, 10**400, "is above 3.4e+38, or not of 0 to 1e+09 samples"),
    ],
)
def test_what_is_for_the_log_alone_stops_no_run(loss: float, samples: int, why: str) -> None:
    assert inspection.inspect_reply(Reply(update(), loss=loss, samples=samples), PAYLOAD).defect == ("loss", why)


@given(seed=st.integers(0, 999), width=st.integers(1, 40), rank=st.integers(1, 6))
def test_a_sketch_is_hardly_ever_longer_than_its_bound(seed: int, width: int, rank: int) -> None:
    """The fewer directions an input has, the more the length of its sketch is a matter of luck."""
    random = torch.Generator().manual_seed(seed)
    X = torch.randn(8, rank, generator=random)
    energy = torch.tensor([X.square().sum(), X.square().sum(), 1, 1], dtype=torch.float64)
    sketch = gaussian_sketch(X, width, random)
    assert not find_overlong_sketch({"e": Part("energy", {"a": energy}), "s": Part("sketch", {"a": sketch})})
    far = {
        "e": Part("energy", {"a": energy}),
        "s": Part("sketch", {"a": sketch * (20 / sketch.norm()) * X.norm() * width}),
    }
    assert find_overlong_sketch(far) == "s"


def test_an_update_is_as_long_as_the_mean_displacement_however_many_samples_it_is_of() -> None:
    looks = [inspection.inspect_reply(Reply(update(count=count)), PAYLOAD) for count in (1.0, 1000.0)]
    expected = torch.cat([drawn(3, 2).flatten(), drawn(2, seed=1)]).norm().item()
    assert [seen.sizes["update"] for seen in looks] == [pytest.approx([expected])] * 2


@given(seed=st.integers(0, 99), samples=st.integers(1, 30), scale=st.floats(1e-3, 1e3))
def test_moments_of_real_samples_pass(seed: int, samples: int, scale: float) -> None:
    """One sample, or many equal ones, have a variance of 0 but for rounding."""
    features = scale * (1 + drawn(1, 4, seed=seed).expand(samples, 4))
    found = moments(features, torch.zeros(samples, dtype=torch.int64), 2)
    assert inspection.inspect_reply(Reply(part("prototype", **found)), {}).defect is None


KINDS = ("update", "sketch", "basis", "directions", "prototype", "reference", "count", "statistics", "energy", "loss")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.complex64, torch.int64, torch.uint8, torch.bool)
TENSORS = st.builds(
    lambda shape, dtype, value: torch.full(shape, 1).to(dtype) * value,
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.sampled_from((0, 1, -1, math.nan, math.inf, 1e300)),
)
NAMES = st.sampled_from(("w", "b", "weight", "sum", "square", "../../w"))


@given(
    st.dictionaries(
        NAMES,
        st.builds(Part, st.sampled_from(KINDS), st.dictionaries(NAMES, TENSORS, max_size=3), over=NAMES | st.just("")),
    )
)
def test_whatever_a_client_sends_it_is_the_replys_fault_and_not_the_servers(parts: Parts) -> None:
    seen = {
        1: inspection.inspect_reply(Reply(parts), PAYLOAD),
        **{n: inspection.inspect_reply(Reply(update()), PAYLOAD) for n in (2, 3)},
    }
    assert inspection.find_defects(seen, InspectionSettings()).keys() == {1}


# Beside others


def looks_of(*replies: Parts) -> dict[int, Finding]:
    return {client: inspection.inspect_reply(Reply(parts), PAYLOAD) for client, parts in enumerate(replies)}


@pytest.mark.parametrize(
    "other",
    [
        {},
        {**update(), "more": Part("count", {"n": torch.tensor(1)})},
        {**update(), "update": Part("update", {"w": drawn(3, 2)}, over="weight")},
        {**update(), "update": replace(update()["update"], least="each")},
        {**update(), "update": replace(update()["update"], over="")},
    ],
)
def test_the_form_is_what_most_replies_have(other: Parts) -> None:
    found = inspection.find_defects(looks_of(update(), other, update()), InspectionSettings())
    if not other:
        assert found == {1: ReplyDefect("reply", "is withheld")}
        return
    assert [(client, fault.why) for client, fault in found.items()] == [(1, "has another form than most")]
    assert found[1].part in ("more", "update", "weight")


MORE = {**update(), **part("count", n=torch.tensor(1))}
PART = {**update(), "update": Part("update", {"w": drawn(3, 2)}, over="weight")}


@pytest.mark.parametrize(
    ("replies", "refused"),
    [
        ([update()], {}),
        ([PART], {0: "has another form than the method's"}),
        ([PART, PART, update()], dict.fromkeys((0, 1), "has another form than most")),
        ([PART, update()], {0: "has another form than most"}),
        ([PART, update(), PART, update()], {0: "has another form than most", 2: "has another form than most"}),
        ([PART, MORE], {0: "has another form than most"}),
        ([update(), MORE], dict.fromkeys((0, 1), "has another form than as many others")),
    ],
)
def test_what_the_method_declares_needs_no_majority(replies: list[Parts], refused: dict[int, str]) -> None:
    def fits(form: inspection.ReplyForm) -> bool:
        return inspection.list_entries(inspection.describe_form(update())) <= inspection.list_entries(form)

    found = inspection.find_defects(looks_of(*replies), InspectionSettings(), fits)
    assert {client: fault.why for client, fault in found.items()} == refused


def statistics(scale: float) -> Parts:
    return {**update(), "s": Part("statistics", {"b": scale * 2 * torch.ones(2)}, over="weight")}


def reference(scale: float) -> Parts:
    return part("reference", omega=scale * torch.ones(2, 2), count=torch.ones(2))


def energy(scale: float) -> Parts:
    """Of two layers, the smaller one far out."""
    return part("energy", a=1e6 * ENERGY, b=ENERGY * torch.tensor([scale**2, 0, 1, 1]))


def prototype(scale: float) -> Parts:
    """One class of many samples, one of few, which is far out."""
    labels, sizes = torch.arange(40) % 20 == 0, torch.where(torch.arange(40) % 20 == 0, scale, 1.0)
    return part("prototype", **moments(drawn(40, 5) * sizes[:, None], labels.long(), 3))


def val_loss(scale: float) -> Parts:
    return part("loss", loss=torch.tensor(6.0 * scale - 3), samples=torch.tensor(3.0))


@pytest.mark.parametrize("parts", [statistics, reference, energy, prototype, val_loss])
def test_what_is_alike_among_honest_clients_is_held_to_the_median(parts: Callable[[float], Parts]) -> None:
    looks = looks_of(parts(1), parts(2), parts(20), parts(1e4), parts(0.1 if parts is not val_loss else 0.6))
    assert not [seen.defect for seen in looks.values() if seen.defect]
    found = inspection.find_defects(looks, InspectionSettings(largest=30.0))
    assert list(found) == [3]
    assert "times as long as the median" in found[3].why
    assert not inspection.find_defects(looks, InspectionSettings(largest=None))


def test_those_who_still_learn_are_not_held_to_those_who_have_nothing_more_to_learn(
    method_of: Callable, tmp_path: Path
) -> None:
    """Most clients of a round with tiny updates: an update is held to the longest median of the task so far."""
    looks = looks_of(*[update(1e-5)] * 3, update(1.0), update(100.0))
    bound = InspectionSettings(largest=30.0)
    assert list(inspection.find_defects(looks, bound)) == [3, 4]
    assert list(inspection.find_defects(looks, bound, usual_length=looks[3].sizes["update"][0])) == [4]

    lengths = [[1.0, 1.1, 1.2, 1.3], [1e-5, 1e-5, 1e-5, 1.0], [1e-5, 1e-5, 1e-5, 100.0]]

    class Satisfied(FedAvg):
        def train(self, client: Client, payload: Payload) -> Answer:
            answer = super().train(client, payload)
            update = answer.tensors["update"]
            factor = lengths[client.round][client.index] * client.weight / measure_length(update)
            return with_update(answer, {name: tensor * factor for name, tensor in update.items()})

    method = method_of(Satisfied, "federation.rounds=3")
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    learn(
        method,
        method.create_server(),
        {},
        0,
        Serial(method, 1),
        checkpoints,
        open_ledger(method, checkpoints.ledger),
        Listener(),
    )
    rows = checkpoints.rounds.read_rows()
    assert [row["refused"] for row in rows] == [0, 0, 1]
    assert [row["median"] for row in rows] == [1.1, 1e-5, 1e-5]
    checkpoints.close()
    again = Checkpoints(tmp_path / "checkpoints")
    position = again.load_latest()
    assert position is not None
    assert position.usual_length == 1.1
    again.close()


def test_bases_of_any_number_of_columns_have_one_form() -> None:
    looks = looks_of(part("basis", a=Q), part("basis", a=Q[:, :1]), part("basis", a=torch.linalg.qr(drawn(5, 3))[0]))
    assert list(inspection.find_defects(looks, InspectionSettings())) == [2]


def test_far_longer_than_the_median_is_refused_and_what_fails_otherwise_moves_no_median() -> None:
    broken = update(1e30, b=with_nan(torch.ones(2)))
    looks = looks_of(update(1), update(2), update(2), broken, update(19.9), update(21))
    found = inspection.find_defects(looks, InspectionSettings(largest=10.0))
    assert list(found) == [3, 5]
    assert found[5] == ("update", "is 10.5 times as long as the median")
    assert list(inspection.find_defects(looks, InspectionSettings(largest=None))) == [3]


@given(lengths=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9), bad=st.lists(st.floats(1e-30, 1e30), max_size=8))
def test_fewer_than_half_bad_replies_get_nothing_through_that_is_far_longer_than_an_honest_one(
    lengths: list[float], bad: list[float]
) -> None:
    bad = bad[: len(lengths) - 1]
    looks = {client: Finding(None, sizes={"p": [1.0, size]}) for client, size in enumerate([*lengths, *bad])}
    found = inspection.find_defects(looks, InspectionSettings(largest=5.0))
    taken = [looks[client].sizes["p"][1] for client in looks.keys() - found.keys()]
    assert max(taken, default=0) <= 5 * max(lengths)


# In a run


def with_update(answer: Answer, update: Mapping[str, Tensor]) -> Answer:
    return answer._replace(tensors={**answer.tensors, "update": update})


def broken(answer: Answer) -> Answer:
    return with_update(answer, {name: with_nan(tensor) for name, tensor in answer.tensors["update"].items()})


class Malicious(FedAvg):
    """Client 1 sends what is no update in each round."""

    def train(self, client: Client, payload: Payload) -> Answer:
        answer = super().train(client, payload)
        return broken(answer) if client.index == 1 else answer


class Heard(Listener):
    def __init__(self) -> None:
        self.lines: list[tuple[int, int, int, str]] = []

    def on_refusal(self, *line: Any) -> None:
        self.lines.append(line)


@pytest.fixture
def learned(tmp_path: Path) -> Callable[..., tuple[Server, pl.DataFrame, pl.DataFrame, Heard]]:
    def learn_first(method: FedAvg, server: Server | None = None, executor: Serial | None = None) -> Any:
        heard = Heard()
        with closing(Checkpoints(tmp_path / f"{len(list(tmp_path.iterdir()))}")) as checkpoints:
            position = learn(
                method,
                server or method.create_server(),
                {},
                0,
                executor or Serial(method, 1),
                checkpoints,
                open_ledger(method, checkpoints.ledger),
                heard,
            )
            tables = pl.DataFrame(checkpoints.rounds.read_rows(), schema=ROUNDS), make_ledger_table(checkpoints.ledger)
        return position.server, *tables, heard

    return learn_first


def test_who_is_refused_costs_bytes_is_noted_and_after_a_while_set_aside(
    method_of: Callable, learned: Callable
) -> None:
    server, rounds, ledger, heard = learned(
        method_of(Malicious, "federation.rounds=4", "federation.inspection.patience=2")
    )
    assert server.refused == {"1": 2}
    assert rounds["refused"].to_list() == [1, 1, 0, 0]
    assert rounds["clients"].to_list() == [4, 4, 3, 3]
    assert rounds["answers"].to_list() == [3, 3, 3, 3]
    noted = ledger.filter(direction="refused")
    assert noted.select("round", "client", "part", "bytes").rows() == [(0, 1, "update", 0), (1, 1, "update", 0)]
    assert ledger.filter(direction="up", part="update", client=1)["round"].to_list() == [0, 1]
    assert heard.lines == [(0, n, 1, "update is not finite") for n in (0, 1)]


def test_the_others_go_on_as_if_it_were_not_there(
    method_of: Callable, learned: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = learned(method_of(Malicious, "federation.rounds=3"))[0]
    honest = method_of(FedAvg, "federation.rounds=3")
    monkeypatch.setattr(honest, "list_participants", lambda task: (0, 2, 3))
    alone = learned(honest)[0]
    assert all(torch.equal(refusing.weights[name], tensor) for name, tensor in alone.weights.items())


def test_under_secure_aggregation_a_client_looks_at_its_own_reply_and_withholds_it(
    method_of: Callable, learned: Callable
) -> None:
    ends = [
        learned(method_of(Malicious, "federation.rounds=4", *more)) for more in ((), ("federation.secagg.on=true",))
    ]
    (plain, _, _, _), (masked, rounds, ledger, heard) = ends
    assert masked.refused == plain.refused == {"1": 3}
    assert rounds["refused"].to_list() == [1, 1, 1, 0]
    assert heard.lines == [(0, n, 1, "reply is withheld") for n in range(3)]
    assert ledger.filter(pl.col("client") == 1, pl.col("part") == "update", direction="up").is_empty()
    for name, tensor in plain.weights.items():
        torch.testing.assert_close(masked.weights[name], tensor, atol=1e-5, rtol=1e-5)


class Leaving(Serial):
    """Client 0's answers to a question lack a part, or hold something else in its place."""

    def __init__(self, method: FedAvg, question: str, change: Callable[[Parts], Parts]) -> None:
        super().__init__(method, 1)
        self.question, self.change = question, change

    def run(self, job: Job, clients: Sequence[int], memories: Mapping[int, Path]) -> Iterator[ClientResult]:
        for answer in super().run(job, clients, memories):
            if answer.client == 0 and job.question == self.question:
                answer = replace(answer, reply=replace(answer.reply, parts=self.change(answer.reply.parts)))
            yield answer


def without(name: str) -> Callable[[Parts], Parts]:
    return lambda parts: {other: part for other, part in parts.items() if other != name}


def other(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Parts], Parts]:
    return lambda parts: {
        **parts,
        name: replace(parts[name], tensors={n: change(tensor) for n, tensor in parts[name].tensors.items()}),
    }


def head_alone(parts: Parts) -> Parts:
    head = {name: tensor for name, tensor in parts["update"].tensors.items() if name.startswith("heads.")}
    return {**parts, "update": replace(parts["update"], tensors=head)}


def test_a_lone_reply_has_the_form_of_the_model(
    method_of: Callable, learned: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client 0 sends the head alone: as the only one, and as the first of two."""
    method = method_of(FedAvg, "federation.rounds=1")
    partly = Leaving(method, TRAIN, head_alone)
    monkeypatch.setattr(method, "list_participants", lambda task: (0,))
    with pytest.raises(
        UserError, match="no reply of 1 can be used; client 0's reply has another form than the method's"
    ):
        learned(method, executor=partly)
    monkeypatch.setattr(method, "list_participants", lambda task: (0, 1))
    assert learned(method, executor=partly)[0].refused == {"0": 1}


LONE = {
    "no weight": ("fedavg", "train", lambda parts: {"update": replace(parts["update"], over="")}),
    "no over": ("fedavg", "train", lambda parts: {**parts, "update": replace(parts["update"], over="")}),
    "no update": ("fedavg", "train", without("update")),
    "another weight": ("fedavg", "train", lambda parts: {**parts, "weight": Part("count", {"n": torch.tensor(1.0)})}),
    "no sketch": ("fot", "gpse", without("sketch")),
    "a narrow sketch": ("fot", "gpse", other("sketch", lambda sketch: sketch[:, :1])),
    "no energy": ("fot", "gpse", without("energy")),
    "no columns": ("fedprotip", "bases", without("columns")),
    "no directions": ("fedprotip", "bases", without("directions")),
    "short spectra": ("fedprotip", "bases", other("spectra", lambda squares: squares[:1])),
    "no references": ("fedprotip", "references", without("references")),
    "references of another size": ("fedprotip", "references", other("references", lambda omega: omega[:0])),
}  # fmt: skip


@pytest.mark.parametrize("wrong", LONE)
def test_a_lone_reply_of_another_form_is_refused_like_any_other(
    wrong: str, experiment_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    name, question, change = LONE[wrong]
    heard = Heard()
    experiment = experiment_of(method=name, splits=splits_of(clients=1, tasks=1), listener=heard)
    experiment._executor = Leaving(experiment.method, question, change)
    with pytest.raises(UserError, match="no reply") as error:
        experiment.run(tmp_path / "run")
    assert "\n" not in str(error.value)
    assert {client for _, _, client, _ in heard.lines} == {0}


def test_where_clients_are_asked_one_by_one_the_others_are_heard(
    experiment_of: Callable, splits_of: Callable, tmp_path: Path
) -> None:
    heard = Heard()
    one_by_one = ("methods.fedprotip.profile=release", "methods.fedprotip.tip=false")
    experiment = experiment_of(*one_by_one, method="fedprotip", splits=splits_of(tasks=1), listener=heard)
    experiment._executor = Leaving(experiment.method, "bases", without("columns"))
    assert experiment.run(tmp_path / "run")["refused"] == {"0": 1}
    assert [line[2:] for line in heard.lines] == [(0, "reply has another form than the method's")]


class InBlocks(Serial):
    """Sums like the executor `ray`; whoever has to answer again sends NaN if it is client 2."""

    def run(self, job: Job, clients: Sequence[int], memories: Mapping[int, Path]) -> Iterator[ClientResult]:
        for place, answer in enumerate(super().run(job, clients, memories)):
            parts = answer.reply.parts
            if job.summed:
                seen = inspection.inspect_reply(answer.reply, job.payload)
                outlines = {name: found.to("meta") for name, found in parts.items()}
                block = None if seen.defect else Block(0, place, {name: found.tensors for name, found in parts.items()})
                yield replace(answer, reply=replace(answer.reply, parts=outlines), finding=seen, block=block)
                continue
            if answer.client == 2:
                broken = {name: with_nan(tensor) for name, tensor in parts["update"].tensors.items()}
                parts = {**parts, "update": replace(parts["update"], tensors=broken)}
            yield replace(answer, reply=replace(answer.reply, parts=parts))


def test_second_replies_are_looked_at_too(
    method_of: Callable, learned: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, heard = Checkpoints(tmp_path / "blocks"), Heard()
    method = method_of(Malicious, "federation.rounds=1")
    server = learn(
        method,
        method.create_server(),
        {},
        0,
        InBlocks(method, 1),
        checkpoints,
        open_ledger(method, checkpoints.ledger),
        heard,
    ).server
    assert heard.lines == [(0, 0, client, "update is not finite") for client in (1, 2)]
    table = make_ledger_table(checkpoints.ledger)
    assert table.filter(direction="refused")["client"].to_list() == [1, 2]
    assert table.filter(direction="up", part="update")["client"].to_list() == [0, 1, 2, 3]
    checkpoints.close()
    honest = method_of(FedAvg, "federation.rounds=1")
    monkeypatch.setattr(honest, "list_participants", lambda task: (0, 3))
    alone = learned(honest)[0]
    assert all(torch.equal(server.weights[name], tensor) for name, tensor in alone.weights.items())


class Diverging(FedAvg):
    """The last `broken` clients' updates are not finite."""

    broken = 0

    def train(self, client: Client, payload: Payload) -> Answer:
        answer = super().train(client, payload)
        return broken(answer) if client.index >= 4 - self.broken else answer


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (4, "round 0: no reply of 4 can be used; client 0's reply is withheld. .* whether training diverges"),
        (3, r"only 1 clients have sent masked replies that pass .* and 3 are needed"),
        (2, r"only 2 clients have sent masked replies that pass .* and 3 are needed"),
    ],
)
def test_too_many_withheld_replies_end_in_one_line(
    broken: int, told: str, method_of: Callable, learned: Callable
) -> None:
    method = method_of(Diverging, "federation.secagg.on=true", "federation.rounds=1")
    method.broken = broken
    with pytest.raises(UserError, match=told) as error:
        learned(method)
    assert "\n" not in str(error.value)


def test_answers_that_all_withhold_end_in_one_line(
    experiment_of: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = inspection.inspect_reply

    def strict(reply: Reply, payload: Payload, *limits: Any) -> Finding:
        return Finding(ReplyDefect("sketch", "is bad")) if "sketch" in reply.parts else looked(reply, payload, *limits)

    monkeypatch.setattr(inspection, "inspect_reply", strict)
    with pytest.raises(UserError, match="no reply can be used"):
        experiment_of("federation.secagg.on=true", method="fot").run(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "setting"),
    [("fot", "{}"), ("fedprotip", "{}"), ("fedprotip", "{exchange: sketch}"), ("fedprotip", "{profile: release}")],
)
def test_a_tasks_end_without_anyone_left_ends_in_one_line_too(
    name: str, setting: str, experiment_of: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = inspection.inspect_reply

    def strict(reply: Reply, payload: Payload, *limits: Any) -> Finding:
        return looked(reply, payload, *limits) if "update" in reply.parts else Finding(ReplyDefect("basis", "is bad"))

    monkeypatch.setattr(inspection, "inspect_reply", strict)
    heard = Heard()
    with pytest.raises(UserError, match="no reply can be used"):
        experiment_of(f"methods.{name}={setting}", method=name, listener=heard).run(tmp_path / "run")
    assert {why for *_, why in heard.lines} == {"basis is bad"}


def test_a_run_without_anyone_left_ends_in_one_line(method_of: Callable, learned: Callable) -> None:
    method = method_of(Malicious, "federation.inspection.patience=1")
    server = replace(method.create_server(), refused={"0": 1, "2": 4, "3": 1})
    with pytest.raises(UserError, match=r"task 0, round 0: training diverged \(client 1's update is not finite\)"):
        learned(method, server)
    with pytest.raises(UserError, match="task 0: all 4 clients that have its data are set aside"):
        learned(method, replace(server, refused=dict.fromkeys("0123", 1)))


def test_unchecked_a_single_reply_breaks_the_model(method_of: Callable, learned: Callable) -> None:
    with pytest.raises(UserError, match="training diverged"):
        learned(method_of(Malicious, "federation.inspection.check=false"))
