"""Clients on a Ray cluster of two nodes end with the same bits as here, whatever dies; nothing of ours is pickled."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.engine.replies import TreeSum
from fclmodels.federation.executors.ray import cluster as ray_cluster
from fclmodels.federation.executors.ray.cluster import CHUNKS, RayCluster, split_into_chunks
from fclmodels.federation.executors.ray.start import connect_cluster, refuse_silence
from fclmodels.federation.messages import Block

MakeExperiment = Callable[..., Experiment]
Remains = Callable[[Path], dict[str, Any]]
OnRay = Callable[..., tuple[Experiment, RayCluster]]

ON_RAY = ("federation.executor=ray", "federation.workers=2")
HARD = (
    *("model.backbone=noisy", "methods.diary.batch_norm=local", "augment.crop_padding=1", "augment.flip=true"),
    *("optimizer.momentum=0.9",),
)
SECAGG = ("federation.secagg.on=true", "federation.faults.missing=0.2")
ATTACK = ("federation.attack.kind=scaled", "federation.attack.strength=1000", "federation.inspection.patience=null")
UNEVEN = {
    (task, client): 1 + (7 * client + 3 * task) % 11 for task in range(2) for client in range(18) if task != client
}


@pytest.fixture(scope="module")
def uneven(splits_of: Callable[..., Splits], toys: Path) -> Splits:
    """Of 18 clients on two actors: chunks of two."""
    return splits_of(clients=18, train=UNEVEN)


@pytest.fixture(scope="module")
def serially(
    uneven: Splits, new_experiment: MakeExperiment, remains: Remains, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """What remains of a run in one process."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}

    def run(*overrides: str, method: str) -> dict[str, Any]:
        if (method, *overrides) not in found:
            folder = tmp_path_factory.mktemp("serial")
            new_experiment(*overrides, method=method, splits=uneven, home=folder / "home").run(folder / "run")
            found[method, *overrides] = remains(folder / "run")
        return found[method, *overrides]

    return run


@pytest.fixture
def on_ray(two_nodes: object, uneven: Splits, experiment_of: MakeExperiment) -> OnRay:
    """An experiment on two actors, and its executor, which has not started them yet."""

    def make(*overrides: str, **further: Any) -> tuple[Experiment, RayCluster]:
        experiment = experiment_of(*overrides, *ON_RAY, splits=uneven, **further)
        assert isinstance(experiment.executor, RayCluster)
        return experiment, experiment.executor

    return make


@pytest.fixture
def ends_as_here(serially: Callable[..., dict[str, Any]], remains: Remains, tmp_path: Path) -> Callable[..., None]:
    """Runs an experiment, which must leave what one with these settings does that ran in this process."""

    def check(experiment: Experiment, *overrides: str) -> None:
        experiment.run(tmp_path / "run")
        assert remains(tmp_path / "run") == serially(*overrides, method=type(experiment.method).name)

    return check


class At(Listener):
    """Does something at these moments: (task, round, clients that have answered)."""

    def __init__(self, moments: dict[tuple[int, int, int], Callable[[], object]]) -> None:
        self.moments = moments

    def on_client_done(self, task: int, round: int, done: int, of: int) -> None:
        if moment := self.moments.pop((task, round, done), None):
            moment()


def all_ready(executor: RayCluster) -> None:
    starting = [actor.waiting[0][0] for actor in executor._actors if not actor.ready]
    executor.ray.wait(starting, num_returns=len(starting), timeout=60)


@pytest.mark.slow
def test_actors_and_nodes_that_are_lost_are_replaced_and_nothing_of_ours_is_pickled(
    two_nodes: Any,
    on_ray: OnRay,
    ends_as_here: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In one round a node and then the actor that is left, in the next an actor in the training of a client.

    Then a node that joined, once it is used. Ray says nothing of it between our lines.
    """
    from ray._private.serialization import SerializationContext
    from ray._private.state import actors

    def at_work() -> list[dict[str, Any]]:
        return [actors(actor.handle._actor_id.hex()) for actor in executor._actors if actor.begun]

    used: list[str] = []
    moments = {
        (0, 0, 3): two_nodes.kill,
        (0, 0, 7): lambda: os.kill(at_work()[0]["Pid"], signal.SIGKILL),
        (0, 1, 3): two_nodes.add,
        **dict.fromkeys(((1, 0, done) for done in range(3, 9)), lambda: all_ready(executor)),
        (1, 1, 3): lambda: used.extend(actor["Address"]["IPAddress"] for actor in at_work()) or two_nodes.kill(),
    }
    pickled: list[Any] = []
    for name in ("_serialize_to_pickle5", "_deserialize_pickle5_data"):
        monkeypatch.setattr(SerializationContext, name, lambda self, *what: pickled.append(what))
    levels: list[int] = []
    monkeypatch.setattr(ray_cluster, "Block", lambda level, *of: levels.append(level) or Block(level, *of))
    trouble = ("methods.diary.trouble=one death", f"methods.diary.mark={tmp_path}/mark")
    experiment, executor = on_ray(*HARD, *trouble, method="diary", listener=At(moments))
    ends_as_here(experiment, *HARD)
    assert not moments
    assert (tmp_path / "mark").exists()
    assert sorted(used) == ["127.0.0.2", "127.0.0.4"]
    assert len(executor._actors) == 2
    assert not pickled
    assert "raylet" not in "".join(capfd.readouterr())
    assert set(levels) == {1}
    two_nodes.add()


@pytest.mark.slow
@pytest.mark.parametrize(("method", "overrides"), [("fedavg", SECAGG), ("diary", ATTACK), ("pip-l2p", ())])
def test_nodes_that_share_no_files_end_with_the_same_bits(
    method: str,
    overrides: tuple[str, ...],
    on_ray: OnRay,
    ends_as_here: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Samples come from the object store, settings with the set-up, and what clients keep travels both ways.

    Under attack replies are refused, whose chunks' sums are of no use.
    """
    known = ray_cluster.set_up_of
    monkeypatch.setattr(ray_cluster, "set_up_of", lambda *given: known(*given) | {"splits": "/not/here", "home": ""})
    experiment, executor = on_ray(*overrides, method=method)
    experiment._workers_params.unlink()
    ends_as_here(experiment, *overrides)
    assert len(executor._data) == 8
    if overrides == ATTACK:
        assert pl.read_parquet(tmp_path / "run" / "rounds.parquet")["refused"].sum() > 0


@pytest.mark.slow
def test_two_clients_of_a_round_run_on_two_actors(on_ray: OnRay, tmp_path: Path) -> None:
    """Not one after another on the first: of those that are ready, the one with the fewest clients gets the next."""
    listener = At({(0, 0, 1): lambda: all_ready(executor)})
    experiment, executor = on_ray("federation.clients_per_round=2", method="fedavg", listener=listener)
    experiment.run(tmp_path / "run")
    assert [actor.begun for actor in executor._actors] == [True, True]


@pytest.mark.slow
def test_what_goes_wrong_on_an_actor_surfaces(on_ray: OnRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(*settings: str) -> pytest.ExceptionInfo[Exception]:
        experiment, _ = on_ray(*HARD, *settings, method="diary")
        with experiment, pytest.raises((UserError, RuntimeError)) as error:
            experiment.run(tmp_path / "run")
        return error

    assert str(problem("methods.diary.trouble=mistake").value) == "client 1 has no disk. Give it one."
    monkeypatch.setattr(ray_cluster, "DEATHS_OF_ONE_CHUNK", 1)
    deaths = problem("methods.diary.trouble=death", f"methods.diary.mark={tmp_path}/mark").value
    assert "the actor died 1 times" in str(deaths)
    assert "client" in str(deaths)
    monkeypatch.setattr(ray_cluster.machine, "count_memory_kills", partial(next, count()))
    settings = ("methods.diary.trouble=death", f"methods.diary.mark={tmp_path}/another mark")
    assert "memory ran out, and its actor was killed 1 times. Set fewer federation.workers" in str(problem(*settings))
    monkeypatch.setattr(ray_cluster, "PATIENCE", 2)
    assert "no room for an actor (2 CPUs" in str(problem("federation.threads=2").value)


@pytest.mark.slow
def test_a_cluster_of_its_own_ends_with_the_command_and_leaves_nothing(tmp_path: Path) -> None:
    program = """
import os, sys
from pathlib import Path
from fclmodels.federation.executors.ray.start import connect_cluster
with connect_cluster(1) as ray:
    print(ray.nodes()[0]["NodeManagerAddress"])
    print(*Path("/tmp").glob("fcl-ray-*"))
"""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path)}
    before = {*Path("/tmp").glob("fcl-ray-*")}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    address, folders = ran.stdout.splitlines()
    assert address == "127.0.0.1"  # then Ray listens there only
    own = {Path(name) for name in folders.split()} - before
    assert len(own) == 1
    assert not any(folder.exists() for folder in own)
    assert ran.stderr == ""
    assert not list(tmp_path.iterdir())


def test_chunks_are_nodes_of_the_tree_and_enough_for_every_actor() -> None:
    """The sum over blocks is, to the bit, the sum over clients, whoever answers first."""
    random = torch.Generator().manual_seed(0)
    for actors, n in product((1, 2, 7), (1, 2, 9, 64, 147)):
        values = torch.randn(n, 5, generator=random)
        chunks = split_into_chunks(range(n), actors)
        assert [client for chunk in chunks for client in chunk.clients] == list(range(n))
        assert len(chunks) >= min(n, CHUNKS * actors)
        whole, blocks = TreeSum(n), TreeSum(n)
        for client in range(n):
            whole.add(client, {"x": values[client]})
        for chunk in reversed(chunks):
            block = TreeSum(len(chunk.clients))
            for place, client in enumerate(chunk.clients):
                block.add(place, {"x": values[client]})
            blocks.add(chunk.place, block.compute_sum(), chunk.level)
        assert torch.equal(whole.compute_sum()["x"], blocks.compute_sum()["x"])


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'fclflow\[ray\]'"), connect_cluster():
        pass


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:10001", "here"])
def test_an_address_where_no_cluster_is_is_told_at_once(address: str) -> None:
    with pytest.raises(UserError, match=f"RAY_ADDRESS: no cluster answers at {address}"):
        refuse_silence(address)
