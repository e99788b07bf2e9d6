"""Methods under secure aggregation: the server sees nothing single, and what it makes of the sums is as without."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from fclmodels import plugins
from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.engine.faults import draw_step_of_leaving
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.executors.base import ClientResult, Job
from fclmodels.federation.executors.client_work import Serial
from fclmodels.federation.messages import Part, Reply
from fclmodels.federation.protection import secure_aggregation
from fclmodels.numerics.fixed_point import choose_scale
from fclmodels.settings.federation import SecAggSettings

MakeExperiment = Callable[..., Experiment]
Remains = Callable[[Path], dict[str, Any]]

ON = "federation.secagg.on=true"
SUMS = {
    "fed-cil": ("methods.fed-cil.consolidation=0",),  # settings with which a method needs sums only
    "fedprotip": ("methods.fedprotip.exchange=sketch", "methods.fedprotip.tip_reference=mean"),
    "stamp": ("methods.stamp.spatio=false",),
    "sr-fdil": ("methods.sr-fdil.choice=uniform",),
    "glfc": ("methods.glfc.proxy=false",),
    "lga": ("methods.lga.proxy=false",),
    # Without the hinge: at its kink the encoding's rounding becomes a step of its own.
    "podnet": ("methods.podnet.nca=release",),
    "afc": ("methods.afc.nca=release",),
}
REFUSES = {"fedomg", "joint", "pilora", "fedas", "feddbe", "fedl2p-meta", "fedweit", "pfeddil"}
NAMED = ("fedavg", "fot", "fedprotip", "special", "pip-dualp")  # each with parts of its own kinds


def daily(name: str) -> pytest.MarkDecorator:
    """All that are named, this one every day."""
    slow = [pytest.param(other, marks=pytest.mark.slow) for other in NAMED if other != name]
    return pytest.mark.parametrize("name", [name, *slow])


def weights_of(experiment: Experiment, result: dict[str, Any]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = experiment.store.get(result["digests"]["state"])["server"]["weights"]
    return weights


def assert_close(one: Mapping[str, Tensor], other: Mapping[str, Tensor], atol: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(one[name].numpy(), other[name].numpy(), rtol=1e-4, atol=atol, err_msg=name)


# What the server sees


class Seen:
    """What clients of a run had in plain, and all that came out of the executor. It is the server's only source."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plain: list[dict[str, Part]] = []
        self.received: list[tuple[str, Reply]] = []
        self.sent: list[dict[str, Part]] = []
        mask, run = secure_aggregation.mask_reply, Serial.run

        def masked(reply: Reply, job: Job, me: int, settings: SecAggSettings) -> Reply:
            self.plain.append(dict(reply.parts))
            return mask(reply, job, me, settings)

        def spied(
            serial: Serial, job: Job, clients: Sequence[int], memories: Mapping[int, Path]
        ) -> Iterator[ClientResult]:
            self.sent.append(dict(job.payload))
            for answer in run(serial, job, clients, memories):
                self.received.append((job.question, answer.reply))
                yield answer

        monkeypatch.setattr(secure_aggregation, "mask_reply", masked)
        monkeypatch.setattr(Serial, "run", spied)

    @property
    def masked(self) -> list[dict[str, Part]]:
        return [dict(reply.parts) for question, reply in self.received if question not in secure_aggregation.STEPS]


@daily("fot")
def test_the_server_receives_nothing_in_plain(
    name: str, experiment_of: MakeExperiment, splits_of: Callable[..., Splits], tmp_path: Path, monkeypatch: Any
) -> None:
    """Of each number of each reply: what is received is another, and all of it together looks uniform. The rest are
    the protocol's own messages, of fixed sizes, and facts that tell nothing."""
    seen = Seen(monkeypatch)
    experiment_of(ON, *SUMS.get(name, ()), method=name, splits=splits_of(val=2)).run(tmp_path / "run")
    assert len(seen.masked) == len(seen.plain) > 0
    hidden = bytearray()
    for plain, masked in zip(seen.plain, seen.masked, strict=True):
        assert masked.keys() - {secure_aggregation.LOG} == plain.keys()
        for part in masked.values():
            assert part.least == "sum"
            hidden += b"".join(tensor.numpy().tobytes() for tensor in part.tensors.values())
        for part, clear in plain.items():
            typed = {n.rpartition(":")[0]: X for n, X in masked[part].tensors.items()}
            for tensor, X in clear.tensors.items():
                scale = choose_scale(1e9, 4) if X.is_floating_point() else 1
                assert typed[tensor].dtype == torch.int64
                assert not (typed[tensor] == (X.double() * scale).round().long()).any()
    for question, reply in seen.received:
        assert reply.facts["loss"] == reply.facts["samples"] == 0
        if question in secure_aggregation.STEPS:
            (part,) = reply.parts.values()
            width = dict(zip(secure_aggregation.STEPS, (64, 94, 33), strict=True))[question]
            assert part.tensors["bytes"].shape == (1 if question == secure_aggregation.KEYS else 4, width)
    counts = np.bincount(np.frombuffer(bytes(hidden), np.uint8), minlength=256)
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < chi2.isf(1e-9, 255)


def test_an_average_that_is_sent_down_tells_no_more_than_the_sum(
    experiment_of: MakeExperiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No single encoded number of a client's update goes down to others either: what is sent is the model alone, and
    the protocol's messages."""
    seen = Seen(monkeypatch)
    experiment_of(ON).run(tmp_path / "run")
    names = {name for payload in seen.sent for name in payload}
    protocol = {secure_aggregation.KEYS, secure_aggregation.SHARERS, secure_aggregation.SURVIVORS}
    assert names == {"weights", "0", "1", "2", "3", *protocol}


# The same result


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_round_is_off_by_half_a_step_a_client_at_most(
    weighting: str, experiment_of: MakeExperiment, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    """n / (2 scale) over the sum of weights, at a limit so high that this is far above rounding."""
    sizes = {(0, client): 4 + 4 * client for client in range(4)}
    settings = (f"federation.weighting={weighting}", "federation.rounds=1", "federation.secagg.limit=1e12")
    found = {}
    for name in ("false", "true"):
        experiment = experiment_of(*settings, f"federation.secagg.on={name}", splits=splits_of(tasks=1, train=sizes))
        found[name] = weights_of(experiment, experiment.run(tmp_path / name))
    total = sum(sizes.values()) if weighting == "samples" else 4
    bound, scale = 4 / (2 * choose_scale(1e12, 4)) / total, choose_scale(1e12, 4)
    off = {name: (found["true"][name] - W).abs().max().item() for name, W in found["false"].items()}
    assert max(off.values()) <= bound + 2e-7  # the model's own rounding
    assert (weighting == "samples") or max(off.values()) > 1e-3 / scale


@daily("fedprotip")
def test_named_methods_end_as_without_it(
    name: str, experiment_of: MakeExperiment, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    ends_as_without_it(name, experiment_of, splits_of(val=2), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(plugins.load_all("method").keys() - set(NAMED) - REFUSES))
def test_every_other_method_ends_as_without_it_(
    name: str, experiment_of: MakeExperiment, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    """Whatever is added later has to do this or to refuse."""
    ends_as_without_it(name, experiment_of, splits_of(val=2), tmp_path)


def ends_as_without_it(name: str, experiment_of: MakeExperiment, splits: Splits, folder: Path) -> None:
    ends = []
    for settings in ((), (ON,)):
        experiment = experiment_of(*settings, *SUMS.get(name, ()), method=name, splits=splits)
        result = experiment.run(folder / f"run{len(ends)}")
        ends.append((weights_of(experiment, result), result))
    assert_close(ends[0][0], ends[1][0])
    for reading, metrics in ends[0][1]["metrics"].items():
        assert metrics == ends[1][1]["metrics"][reading], reading
    losses = [pl.read_parquet(folder / f"run{i}" / "rounds.parquet")["loss"].drop_nulls().to_list() for i in (0, 1)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_without_those_that_are_missing_it_ends_as_the_plain_round_does(
    experiment_of: MakeExperiment, splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    """Clients leave before each of the steps, or are lost with a masked reply; 4 of 6 answers are needed to unmask."""
    rates = ("missing=0.3", "crash=0.1", "out_of_memory=0.1", "least=4")
    settings = ("federation.rounds=5", *(f"federation.faults.{rate}" for rate in rates))
    splits, found = splits_of(clients=6), []
    for some in ((), (ON,)):
        experiment = experiment_of(*settings, *some, splits=splits)
        found.append((weights_of(experiment, experiment.run(tmp_path / f"{len(found)}")), experiment))
    assert_close(found[0][0], found[1][0])
    columns = ("answers", "missing", "lost")
    tables = [pl.read_parquet(tmp_path / f"{i}" / "rounds.parquet").select(columns) for i in (0, 1)]
    assert tables[0].equals(tables[1])
    assert tables[0]["missing"].sum() > 5
    assert tables[0]["lost"].sum() > 2
    ledger = pl.read_parquet(tmp_path / "1" / "ledger.parquet").filter(direction="up")
    steps = [*secure_aggregation.STEPS[:2], "update", secure_aggregation.REVEALED]
    took = [ledger.filter(pl.col("part") == part, pl.col("round") >= 0).height for part in steps]
    assert took[0] > took[1] > took[2] == took[3] == tables[0]["answers"].sum()
    run = found[0][1].method.run
    assert {draw_step_of_leaving(run, 0, round, client) for round in range(5) for client in range(6)} == {0, 1, 2}


# The same bits again


class Stops(Listener):
    def on_client_done(self, task: int, round: int, done: int, of: int) -> None:
        if (task, round, done) == (1, 1, 2):
            raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["fot", pytest.param("fedprotip", marks=pytest.mark.slow)])
def test_keys_differ_and_results_do_not(
    name: str, experiment_of: MakeExperiment, remains: Remains, tmp_path: Path
) -> None:
    """Two runs, one of them stopped between masked replies: the same bits, the same bytes in the ledger."""
    settings = (ON, *SUMS.get(name, ()), "federation.faults.missing=0.2", "federation.checkpoint_seconds=0")
    experiment_of(*settings, method=name).run(tmp_path / "one")
    with pytest.raises(KeyboardInterrupt):
        experiment_of(*settings, method=name, home=tmp_path / "home", listener=Stops()).run(tmp_path / "two")
    experiment_of(*settings, method=name, home=tmp_path / "home").run(tmp_path / "two")
    assert remains(tmp_path / "one") == remains(tmp_path / "two")
    assert not list(tmp_path.rglob("secagg-*"))


@pytest.mark.slow
def test_workers_mask_as_well(experiment_of: MakeExperiment, remains: Remains, tmp_path: Path) -> None:
    workers = ("federation.executor=processes", "federation.workers=2")
    experiment_of(ON, method="fot").run(tmp_path / "one")
    experiment_of(ON, *workers, method="fot").run(tmp_path / "two")
    assert remains(tmp_path / "one") == remains(tmp_path / "two")


# Costs


def test_the_ledger_counts_the_protocols_own_bytes(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    """Of four clients, with their numbers of 4 bytes: keys of 32 + 32, sealed shares of 12 + 66 + 16, shares of 33."""
    model = 36 * 12 + 12 + 2 * (12 * 12 + 12) + 13 * 2
    experiment_of(ON, "federation.rounds=1").run(tmp_path / "run")
    ledger = pl.read_parquet(tmp_path / "run" / "ledger.parquet").filter(task=0, round=0, client=1)
    rows = ledger.filter(pl.col("direction") != "kept").select("direction", "part", "kind", "least", "bytes").rows()
    everyone = 4 * 4
    assert set(rows) == {
        ("up", secure_aggregation.KEYS, "protocol", "each", 4 + 64),
        ("down", secure_aggregation.KEYS, "protocol", "-", 4 * (4 + 64)),
        ("up", secure_aggregation.SHARES, "protocol", "each", 4 * (4 + 94)),
        ("down", "weights", "weights", "-", 4 * model),
        ("down", secure_aggregation.SHARERS, "protocol", "-", everyone),
        ("up", "update", "update", "sum", 8 * model),
        ("up", "weight", "count", "sum", 8),
        ("up", secure_aggregation.LOG, "count", "sum", 16),
        ("down", secure_aggregation.SHARES, "protocol", "-", 4 * (4 + 94)),
        ("down", secure_aggregation.SURVIVORS, "protocol", "-", everyone),
        ("up", secure_aggregation.REVEALED, "protocol", "each", 4 * (4 + 33)),
    }


# Refusals


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("stamp", (), r"methods\.stamp\.spatio aligns single updates"),
        ("fedomg", (), r"methods\.fedomg aligns single updates"),
        ("fedprotip", (), r"methods\.fedprotip\.exchange: bases .* exchange: sketch"),
        ("fedprotip", SUMS["fedprotip"][:1], r"methods\.fedprotip\.tip_reference: each .* tip_reference: mean"),
        ("fedprotip", (*SUMS["fedprotip"], "methods.fedprotip.tip_voters=1"), r"methods\.fedprotip\.tip_voters: 1"),
        ("joint", (), r"methods\.joint brings all samples to one place"),
        ("fedavg", ("methods.fedavg.batch_norm=local",), r"methods\.fedavg keeps parts of the model with its clients"),
        ("fedavg", ("federation.aggregation=median",), r"federation\.aggregation: median compares single replies"),
        ("fedavg", ("federation.clients_per_round=1",), r"a round of task 0 has one client"),
    ],
)
def test_what_needs_single_replies_refuses_before_the_run(
    name: str, settings: tuple[str, ...], told: str, experiment_of: MakeExperiment
) -> None:
    experiment_of(*settings, method=name)
    with pytest.raises(UserError, match=rf"^federation\.secagg: {told}") as error:
        experiment_of(ON, *settings, method=name)
    assert "\n" not in str(error.value)


def test_late_replies_have_no_place(params_of: Callable) -> None:
    with pytest.raises(UserError, match=r"federation\.faults\.late does not go with federation\.secagg\.on"):
        params_of(ON, "federation.faults.late=0.1")


def test_bad_clients_are_masked_as_others_are_and_nothing_is_inspected(
    experiment_of: MakeExperiment, tmp_path: Path
) -> None:
    evil = ("federation.attack.kind=scaled", "federation.attack.strength=50", "federation.inspection.largest=2")
    ends = []
    for settings in (("federation.inspection.check=false",), (ON,)):
        experiment = experiment_of(*evil, *settings)
        ends.append(experiment.run(tmp_path / f"run{len(ends)}"))
        assert "refused" not in ends[-1]
        ends[-1]["weights"] = weights_of(experiment, ends[-1])
    assert_close(ends[0]["weights"], ends[1]["weights"], atol=1e-4)


def test_too_few_to_unmask_end_the_run_in_one_line(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    experiment = experiment_of(ON, "federation.secagg.threshold=1", "federation.faults.missing=0.95")
    with pytest.raises(UserError, match=r"never 4 answered\. .*, or federation\.secagg\.threshold\.$"):
        experiment.run(tmp_path / "run")


def test_what_does_not_fit_is_refused_by_the_client(experiment_of: MakeExperiment, tmp_path: Path) -> None:
    """Each client counts for its 8 samples."""
    with pytest.raises(UserError, match=r" samples: 8 is not within \+-7\. Raise federation\.secagg\.limit"):
        experiment_of(ON, "federation.secagg.limit=7").run(tmp_path / "run")


def test_a_part_for_single_replies_is_not_let_out(tmp_path: Path) -> None:
    reply = Reply({"basis": Part("basis", {"a": torch.zeros(1)}, "each")})
    with pytest.raises(UserError, match="basis is for single replies"):
        secure_aggregation.mask_reply(reply, Job("ask", 0, -1, {}, tmp_path), 0, SecAggSettings())


def test_single_replies_cannot_be_asked_for(tmp_path: Path) -> None:
    sums = secure_aggregation.Sums(Replies([0, 1], tmp_path), {"update": {"w": torch.ones(1)}})
    assert sums.sum("update")["w"] == 1
    with pytest.raises(UserError, match="update is asked for of single clients"):
        sums.yield_each("update")
