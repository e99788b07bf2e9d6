"""Bad clients in a run: who they are, what they change, what checks and robust rules make of it, and the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.client import Client
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.exchange import Answer
from fclmodels.federation.messages import Part, Payload, Reply
from fclmodels.federation.protection import attacks, inspection
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg
from fclmodels.plugins import find, load_all
from fclmodels.storage import trees
from fclmodels.testing.method_trial import find_needed_settings

MakeExperiment = Callable[..., Experiment]
Remains = Callable[[Path], dict[str, Any]]
SCALED = ("federation.attack.kind=scaled", "federation.attack.strength=1000", "federation.attack.share=0.25")
RULES = ("clipped", "median", "trimmed-mean", "krum", "multi-krum")


@pytest.fixture(scope="module")
def five(splits_of: Callable[..., Splits], toys: Path) -> Splits:
    return splits_of(clients=5, train={(task, client): 2 + client for task in (0, 1) for client in range(5)})


def of_kind(kind: str, *more: str) -> tuple[str, ...]:
    return (f"federation.attack.kind={kind}", "federation.attack.share=0.5", *more)


def test_who_is_bad_follows_the_seed_and_is_the_share_of_all(method_of: Callable, splits_of: Callable) -> None:
    splits = splits_of(clients=10)
    drawn = [attacks.draw_bad_clients(method_of(FedAvg, *SCALED, splits=splits, seed=seed)) for seed in range(20)]
    assert {len(set(bad)) for bad in drawn} == {3}
    assert len(set(map(tuple, drawn))) > 10
    assert drawn[0] == attacks.draw_bad_clients(method_of(FedAvg, *SCALED, splits=splits, seed=0))
    assert attacks.draw_bad_clients(method_of(FedAvg, splits=splits)) == []


def test_labels_become_the_tasks_next_and_samples_stay(method_of: Callable, client_of: Callable) -> None:
    for kind in attacks.FLIPPED:
        client = client_of(method_of(FedAvg, *of_kind(kind)), 0, 1)
        rows = attacks.poison_client(client).rows
        assert rows.samples.tolist() == client.rows.samples.tolist()
        assert [{2: 3, 3: 2}[label] for label in client.rows.labels.tolist()] == rows.labels.tolist()


def test_a_backdoor_is_a_bright_corner_with_the_tasks_first_label(method_of: Callable, client_of: Callable) -> None:
    honest = client_of(method_of(FedAvg, *of_kind("backdoor")), 0, 1)
    bad = attacks.poison_client(honest)
    before, after = honest.run.batches.read_raw(honest.rows), bad.run.batches.read_raw(bad.rows)
    hit = torch.from_numpy(bad.rows.samples % 2 == 0)
    assert 0 < hit.sum() < len(hit)
    assert after.labels[hit].eq(2).all()
    assert torch.equal(after.labels[~hit], before.labels[~hit])
    assert after.inputs[hit][..., -1, -1].eq(255).all()
    assert torch.equal(after.inputs[hit][..., :-1], before.inputs[hit][..., :-1])
    assert torch.equal(after.inputs[~hit], before.inputs[~hit])


BASIS = torch.eye(4)[:, :2]


@pytest.mark.parametrize(
    ("kind", "part", "expected"),
    [
        ("sign-flip", "update", {"t": -10 * BASIS}),
        ("scaled", "update", {"t": 10 * BASIS}),
        ("basis", "basis", {"t": torch.eye(4)}),
        ("prototype", "prototype", {"t": 10 * BASIS.roll(1, 0)}),
        ("reference", "reference", {"t": BASIS.flip(1)}),
        ("claim", "count", {"t": BASIS}),  # no weight of anything
        ("sign-flip", "basis", {"t": BASIS}),
        ("label-flip", "update", {"t": BASIS}),
    ],
)
def test_only_its_part_is_altered(
    kind: str, part: Any, expected: dict[str, torch.Tensor], method_of: Callable, client_of: Callable
) -> None:
    client = client_of(method_of(FedAvg, *of_kind(kind)), 0)
    found = attacks.alter_reply(Reply({"p": Part(part, {"t": BASIS})}), client).parts["p"].tensors
    assert torch.equal(found["t"], expected["t"])


def test_a_false_sketch_passes_with_energies_to_match(method_of: Callable, client_of: Callable) -> None:
    method = method_of(find("method", "fot"), *of_kind("basis", "federation.attack.strength=7"))
    server = method.start_task(method.create_server(), 0)
    client = client_of(method, 0)
    honest = method.gpse.reply(client, method.gpse.payload(server))[0]
    bad = attacks.alter_reply(honest, client)
    assert inspection.inspect_reply(bad, {}).defect is None
    for layer, sketch in honest.parts["sketch"].tensors.items():
        found = bad.parts["sketch"].tensors[layer]
        assert found.norm() == pytest.approx(7 * sketch.norm().item(), rel=1e-4)
        assert (found * sketch).sum().abs() < found.norm() * sketch.norm() / 2


def test_noise_has_the_updates_length_times_the_strength_and_a_claim_leaves_the_mean(
    method_of: Callable, client_of: Callable
) -> None:
    count = Part("count", {"weight": torch.tensor(3.0)})
    reply = Reply({"u": Part("update", {"t": BASIS}, over="n"), "n": count})
    for kind, length in (("noise", 10 * BASIS.norm()), ("claim", 10 * BASIS.norm())):
        found = attacks.alter_reply(reply, client_of(method_of(FedAvg, *of_kind(kind)), 0)).parts
        assert found["u"].tensors["t"].norm().item() == pytest.approx(length.item())
        assert found["n"].tensors["weight"].item() == (30 if kind == "claim" else 3)


# In a run


class Stops(Listener):
    def __init__(self, nth: int) -> None:
        self.left = nth

    def on_client_done(self, task: int, round: int, done: int, of: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


REFUSING = (*SCALED, "federation.rounds=4", "federation.checkpoint_seconds=0")


@pytest.fixture
def refusing(five: Splits, experiment_of: MakeExperiment, remains: Remains, tmp_path: Path) -> dict[str, Any]:
    """What is left of a run whose bad clients are refused."""
    experiment_of(*REFUSING, method="diary", splits=five).run(tmp_path / "run")
    return remains(tmp_path / "run")


def test_who_is_refused_three_times_is_set_aside_in_later_tasks_too_and_interruptions_change_nothing(
    five: Splits, refusing: dict[str, Any], experiment_of: MakeExperiment, remains: Remains, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    for nth in (9, 8):  # in the second round, with one refusal of each committed, and in the third one after that
        with pytest.raises(KeyboardInterrupt):
            experiment_of(*REFUSING, method="diary", splits=five, home=home, listener=Stops(nth)).run(tmp_path / "cut")
    result = experiment_of(*REFUSING, method="diary", splits=five, home=home).run(tmp_path / "cut")
    assert remains(tmp_path / "cut") == refusing
    bad = result["attack"]["clients"]
    assert len(bad) == 2
    assert result["refused"] == {str(client): 3 for client in bad}
    rounds = pl.read_parquet(tmp_path / "cut" / "rounds.parquet")
    counts = [rounds[name].to_list() for name in ("clients", "answers", "refused")]
    assert counts == [[5, 5, 5, 3, 3, 3, 3, 3], [3] * 8, [2, 2, 2, 0, 0, 0, 0, 0]]


@pytest.mark.slow
def test_workers_refuse_the_same(
    five: Splits, refusing: dict[str, Any], experiment_of: MakeExperiment, remains: Remains, tmp_path: Path
) -> None:
    workers = ("federation.executor=processes", "federation.workers=2")
    experiment_of(*REFUSING, *workers, method="diary", splits=five).run(tmp_path / "workers")
    assert remains(tmp_path / "workers") == refusing


def test_the_rules_hold_where_the_mean_is_carried_away(
    method_of: Callable, federate: Callable[..., Server], splits_of: Callable[..., Splits]
) -> None:
    """Two of ten send noise of twenty times their update's length, which is not long enough to be refused."""
    splits, evil = splits_of(clients=10, tasks=1), ("federation.attack.kind=noise", "federation.attack.strength=20")

    def model(*settings: str) -> torch.Tensor:
        weights = federate(method_of(FedAvg, *settings, splits=splits)).weights
        return torch.cat([tensor.flatten() for tensor in weights.values()])

    honest = model()
    carried = (model(*evil) - honest).norm()
    for rule in RULES:
        assert (model(*evil, f"federation.aggregation={rule}") - honest).norm() < carried / 3, rule


class Claims(FedAvg):
    """Client 1 sends nothing, and says that it is of this many samples."""

    samples = 0.0

    def train(self, client: Client, payload: Payload) -> Answer:
        answer = super().train(client, payload)
        if client.index != 1:
            return answer
        nothing = {name: torch.zeros_like(tensor) for name, tensor in answer.tensors["update"].items()}
        weight = {"weight": torch.tensor(self.samples, dtype=torch.float64)}
        return answer._replace(tensors={**answer.tensors, "update": nothing, "weight": weight})


@pytest.mark.parametrize("rule", ["mean", *RULES])
@pytest.mark.parametrize("samples", [1e300, 1e-300])
def test_an_absurd_number_of_samples_is_as_no_reply(
    rule: str, samples: float, method_of: Callable, federate: Callable, splits_of: Callable, monkeypatch: Any
) -> None:
    splits = splits_of(clients=6, tasks=1)
    settings = (f"federation.aggregation={rule}", "federation.robust.bad=0.1")
    claiming = method_of(Claims, *settings, splits=splits)
    claiming.samples = samples
    honest = method_of(FedAvg, *settings, splits=splits)
    monkeypatch.setattr(honest, "list_participants", lambda task: (0, 2, 3, 4, 5))
    assert trees.digest(federate(claiming).weights) == trees.digest(federate(honest).weights)


def test_who_is_set_aside_says_nothing_of_its_own_model(
    five: Splits, experiment_of: MakeExperiment, tmp_path: Path
) -> None:
    settings = (*SCALED, "federation.inspection.patience=1", "methods.fedavg.batch_norm=local")
    result = experiment_of(*settings, splits=five).run(tmp_path / "run")
    accuracy = pl.read_parquet(tmp_path / "run" / "accuracy.parquet").filter(pl.col("after") > 0)
    bad = set(result["attack"]["clients"])
    assert bad
    assert set(accuracy["client"].drop_nulls()) == set(range(5)) - bad


SUMMED = (
    *(("fedomg", "aligns them"), ("stamp", "aligns them"), ("nearest-prototype", "adds up counts")),
    *(
        ("pec", "averages a student"),
        ("ridge", "adds up products"),
        ("stsa", "adds up products"),
        ("lorm", "adds up products"),
        ("regmean", "adds up products"),
        ("fedweit", "averages channels"),
        ("fed-cil", "draws images with each client's generator"),
    ),
)


def test_rules_refuse_by_name_what_is_no_mean(method_of: Callable) -> None:
    for name, why in SUMMED:
        with pytest.raises(UserError, match=rf"federation\.aggregation: krum .*averaged; {name} {why}"):
            method_of(find("method", name), *find_needed_settings(find("method", name)), "federation.aggregation=krum")
    method_of(find("method", "stamp"), "federation.aggregation=krum", spatio=False)


def test_training_in_one_place_averages_nothing(method_of: Callable, federate: Callable[..., Server]) -> None:
    joint = find("method", "joint")
    servers = [federate(method_of(joint, *some), 1) for some in ((), ("federation.aggregation=median",))]
    assert trees.digest(servers[0].to_tree()) == trees.digest(servers[1].to_tree())


ON_DATA, ON_UPDATES = ["backdoor", "label-flip"], ["claim", "noise", "scaled", "sign-flip"]


@pytest.mark.parametrize(
    ("name", "settings", "further"),
    [
        ("fedavg", (), ON_UPDATES),
        ("stamp", (), ON_UPDATES),
        ("fot", (), [*ON_UPDATES, "basis"]),
        ("fot", ("methods.fot.gpse=local",), [*ON_UPDATES, "basis"]),
        ("fedprotip", (), [*ON_UPDATES, "basis", "reference"]),
        ("fedprotip", ("methods.fedprotip={tip: false, exchange: sketch}",), [*ON_UPDATES, "basis"]),
        ("pip-l2p", (), [*ON_UPDATES, "prototype"]),
        ("nearest-prototype", (), ["prototype"]),
    ],
)
def test_an_attack_on_what_a_method_does_not_send_is_refused_by_name(
    name: str, settings: tuple[str, ...], further: list[str], experiment_of: MakeExperiment
) -> None:
    fitting = sorted([*ON_DATA, *further])
    for kind in sorted({*ON_DATA, *(attack for attack, _ in attacks.ALTERATIONS), "claim"}):
        evil = (*of_kind(kind), *settings)
        if kind in fitting:
            experiment_of(*evil, method=name)
            continue
        expected = rf"^federation\.attack\.kind: {kind} .* methods\.{name} send\. Use one of {', '.join(fitting)}\.$"
        with pytest.raises(UserError, match=expected):
            experiment_of(*evil, method=name)


def test_where_no_client_trains_none_can_be_bad(experiment_of: MakeExperiment) -> None:
    with pytest.raises(UserError, match=r"^federation\.attack: methods\.joint brings all samples .*kind: none\.$"):
        experiment_of(*of_kind("label-flip"), method="joint")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["label-flip", "sign-flip", "backdoor", "basis", "prototype", "reference"])
@pytest.mark.parametrize("name", sorted(load_all("method")))
def test_every_method_ends_with_a_finite_model_whatever_bad_clients_do(
    name: str, kind: str, experiment_of: MakeExperiment, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    averaged = name not in dict(SUMMED)
    settings = (*of_kind(kind, "federation.attack.strength=2"), *(["federation.aggregation=median"] * averaged))
    try:
        experiment = experiment_of(*settings, method=name, splits=splits_of(clients=3, val=2))
    except UserError as refusal:
        assert str(refusal).startswith("federation.attack")  # noqa: PT017
        return
    result = experiment.run(tmp_path / "run")
    weights = experiment.store.get(result["digests"]["state"])["server"]["weights"]
    assert all(tensor.isfinite().all() for tensor in weights.values())
