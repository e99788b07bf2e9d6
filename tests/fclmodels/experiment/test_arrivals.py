"""Every method on a stream that grows: each task from the newest state, on splits that knew no later one."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image

from fclmodels import metrics, plugins
from fclmodels.data.arrivals.arrival_folders import ArrivedFolder
from fclmodels.data.arrivals.growing_stream import GrowingStream, assemble
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.settings.schema import ImageSettings

OLD, NEW = ("a", "b"), ("c", "d")
STREAMS = {"the same classes again, then new ones": (OLD, OLD, NEW), "new classes, then old ones": (OLD, NEW, OLD)}


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Splits]]:
    """The splits of each stream as they were after its first, second and third task."""
    arrivals = {}
    for name, tasks in STREAMS.items():
        folder, random = tmp_path_factory.mktemp("stream"), np.random.default_rng(0)
        growing, iid = GrowingStream(folder / "stream"), plugins.find("partition", "iid")
        for number, classes in enumerate(tasks):
            for label in classes:
                place = folder / f"task {number}" / label
                place.mkdir(parents=True)
                for i in range(20):
                    pixels = random.integers(0, 60, (6, 6)) + 45 * "abcd".index(label)
                    Image.fromarray(pixels.astype(np.uint8)).save(place / f"{i}.png")
            arrival = ArrivedFolder(number, f"task {number}", folder / f"task {number}")
            growing.take_in(arrival, ImageSettings(), iid(iid.Settings(clients=2, val=0.2)))
        arrivals[name] = [Splits.open(assemble(growing.parts[:n], folder / f"{n}")) for n in (1, 2, 3)]
    return arrivals


def learned(experiments: Sequence[Experiment]) -> list[pl.DataFrame]:
    """Accuracy on val rows after each task, each learned by its own experiment from the state before."""
    state, tables = experiments[0].step("begin", None, 0).run()["objects"]["state"], []
    for task, experiment in enumerate(experiments):
        for stage in ("learn", "conclude"):
            state = experiment.step(stage, state, task).run()["objects"]["state"]
        judged = experiment.step("judge", state, task + 1).run()
        tables.append(experiment.store.get_table(judged["objects"]["val_accuracy"]))
    return tables


@pytest.mark.slow
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("method", plugins.load_all("method"))
def test_every_method_goes_on_from_the_newest_state(
    method: str, stream: str, streams: dict[str, list[Splits]], experiment_of: Callable[..., Experiment], tmp_path: Path
) -> None:
    experiments = [experiment_of(method=method, splits=one, home=tmp_path / "home") for one in streams[stream]]
    tables = learned(experiments)
    assert [table["task"].max() for table in tables] == [0, 1, 2]
    assert metrics.acc(metrics.accuracy_matrix(pl.concat(tables), "task_aware")) is not None
