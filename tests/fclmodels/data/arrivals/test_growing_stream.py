"""What arrives and how a stream grows by it: order, reasons to refuse, labels, clients, and that the past stays."""

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_array_equal
from PIL import Image

from fclmodels.data.arrivals import growing_stream
from fclmodels.data.arrivals.arrival_folders import MARKER, REASON, ArrivedFolder, list_arrived
from fclmodels.data.arrivals.growing_stream import GrowingStream, StreamPart, assemble, join_parts
from fclmodels.data.splits.dealing import deal
from fclmodels.data.splits.split_reader import Splits
from fclmodels.data.streams.arrival import Arrival
from fclmodels.data.streams.base import SampleTable
from fclmodels.errors import UserError
from fclmodels.plugins import find
from fclmodels.settings.schema import ImageSettings

CLIENTS = 3


def write_images(folder: Path, label: str, count: int, seed: int, side: int = 4) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    paths = [folder / f"{label}-{seed}-{i}.png" for i in range(count)]
    for path in paths:
        Image.fromarray(random.integers(0, 256, (side, side), np.uint8)).save(path)
    return paths


@pytest.fixture
def incoming(tmp_path: Path) -> Path:
    return tmp_path / "incoming"


@pytest.fixture
def drop(incoming: Path) -> Callable[..., ArrivedFolder]:
    """A tree of images by class, complete; each task's pixels are its own."""
    dropped: list[str] = []

    def make(name: str, classes: Iterable[str], count: int = 15, side: int = 4) -> ArrivedFolder:
        for number, label in enumerate(classes):
            write_images(incoming / name / label, label, count, seed=100 * len(dropped) + number, side=side)
        return complete(incoming / name, len(dropped))

    def complete(folder: Path, number: int) -> ArrivedFolder:
        dropped.append(folder.name)
        (folder / MARKER).touch()
        os.utime(folder / MARKER, ns=(number, number))
        return ArrivedFolder(number, folder.name, folder)

    return make


def write_table(folder: Path, rows: dict[str, list]) -> ArrivedFolder:
    pl.DataFrame(rows).write_parquet(folder / "samples.parquet")
    (folder / MARKER).touch()
    return ArrivedFolder(9, folder.name, folder)


@pytest.fixture
def tabled(incoming: Path) -> Callable[..., ArrivedFolder]:
    """A Parquet table of thirty images in two classes, clients 0 and 2; columns can be changed."""

    def make(name: str = "table", **columns: list) -> ArrivedFolder:
        paths = [path for c in "ab" for path in write_images(incoming / name / "images", c, 15, seed=ord(c))]
        clients = [0 if i % 2 else 2 for i in range(30)]
        rows = {"path": [f"images/{path.name}" for path in paths], "label": ["a"] * 15 + ["b"] * 15, "client": clients}
        return write_table(incoming / name, {n: c for n, c in (rows | columns).items() if c is not None})

    return make


@pytest.fixture
def stream(tmp_path: Path) -> GrowingStream:
    return GrowingStream(tmp_path / "streams" / "toys")


def take_in(stream: GrowingStream, arrival: ArrivedFolder, clients: int = CLIENTS, **images: object) -> StreamPart:
    part = find("partition", "dirichlet")
    return stream.take_in(arrival, ImageSettings(**images), part(part.Settings(clients=clients, alpha=1.0, val=0.2)))


def refusal(stream: GrowingStream, arrival: ArrivedFolder, **how: object) -> str:
    """Why it is not taken in; and nothing of it stays."""
    before = sorted(stream.folder.parent.rglob("*"))
    with pytest.raises(UserError) as caught:
        take_in(stream, arrival, **how)
    assert sorted(path for path in stream.folder.parent.rglob("*") if path != stream.folder.parent) == [
        path for path in before if path != stream.folder.parent
    ]
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What arrives


def test_tasks_are_taken_in_the_order_of_their_markers_once_they_are_complete(drop: Callable, incoming: Path) -> None:
    first, second, third = drop("zebras", "a"), drop("apes", "b"), drop("bees", "c")
    write_images(incoming / "half-copied" / "x", "x", 1, seed=0)
    assert list_arrived(incoming) == [first, second, third]
    second.set_aside("no apes")
    assert list_arrived(incoming) == [first, third]
    assert (second.folder / REASON).read_text().startswith("no apes\n")
    (second.folder / REASON).unlink()
    assert list_arrived(incoming) == [first, second, third]
    assert list_arrived(incoming / "nowhere") == []


# Reasons


def test_what_cannot_be_read_is_named(drop: Callable, stream: GrowingStream) -> None:
    arrival = drop("pets", ["cats", "dogs"])
    broken = next((arrival.folder / "cats").iterdir())
    broken.write_bytes(broken.read_bytes()[:40])
    assert f"unreadable images: 1 (cats/{broken.name}" in refusal(stream, arrival)
    take_in(stream, arrival, skip_bad=True)
    assert sum(len(part.prepared.array) for part in stream.parts) == 29


def test_other_shapes_than_the_streams_are_refused(drop: Callable, stream: GrowingStream) -> None:
    take_in(stream, drop("pets", ["cats", "dogs"]))
    message = refusal(stream, drop("cars", ["vans", "cabs"], side=5))
    assert message == "Its images are 1 x 5 x 5, those of the stream 1 x 4 x 4. Set data.size and data.channels."


def test_nearly_the_same_class_is_a_clash(drop: Callable, stream: GrowingStream) -> None:
    take_in(stream, drop("pets", ["cats", "dogs"]))
    assert refusal(stream, drop("more", ["Cats", "cows"])) == "Class Cats is nearly cats. Name them alike, or apart."


def test_one_image_under_two_labels_is_a_clash_with_any_earlier_task(drop: Callable, stream: GrowingStream) -> None:
    first = drop("pets", ["cats", "dogs"])
    take_in(stream, first)
    take_in(stream, drop("cars", ["vans", "cabs"]))
    third = drop("farm", ["cows", "pigs"])
    copied = first.folder / "cats" / "cats-0-3.png"
    shutil.copy(copied, third.folder / "pigs" / "one.png")
    message = refusal(stream, third)
    assert message.startswith("farm/pigs/one.png is pigs, and the same image is cats as pets/cats/cats-0-3.png.")
    (third.folder / "pigs" / "one.png").unlink()
    take_in(stream, third)


def test_the_same_image_of_the_same_class_may_come_again(drop: Callable, stream: GrowingStream) -> None:
    first = drop("pets", ["cats", "dogs"])
    take_in(stream, first)
    second = drop("more", ["cats", "cows"])
    shutil.copy(sorted((first.folder / "cats").iterdir())[3], second.folder / "cats" / "again.png")
    take_in(stream, second)
    assert len(stream.parts) == 2


def test_clients_without_anything_to_train_on_are_refused(drop: Callable, stream: GrowingStream) -> None:
    message = refusal(stream, drop("pets", ["cats", "dogs"], count=4), clients=9)
    assert "9 clients cannot share task 0 (pets): it has 6 training samples" in message


def test_a_task_that_the_gate_could_not_judge_is_refused(drop: Callable, stream: GrowingStream) -> None:
    message = refusal(stream, drop("pets", ["cats", "dogs"], count=3))
    assert message.startswith("partition.val leaves no sample to judge by")


def test_a_name_is_taken_once(drop: Callable, stream: GrowingStream, incoming: Path) -> None:
    first = drop("pets", ["cats", "dogs"])
    take_in(stream, first)
    assert stream.has(first)
    later = ArrivedFolder(77, "pets", incoming / "pets")
    assert not stream.has(later)
    assert refusal(stream, later) == "The stream has a task pets already. Give this one another name."


def test_what_a_stream_began_with_stays(drop: Callable, stream: GrowingStream) -> None:
    stream.refuse_other(ImageSettings(), 99)
    take_in(stream, drop("pets", ["cats", "dogs"]))
    stream.refuse_other(ImageSettings(), CLIENTS)
    with pytest.raises(UserError, match=r"^partition.clients is 4, and .*toys began with 3. Set it back, or begin"):
        stream.refuse_other(ImageSettings(), 4)
    with pytest.raises(UserError, match=r"^data.mean is \[0.4\], and .* began with \[0.5\]"):
        stream.refuse_other(ImageSettings(mean=(0.4,)), CLIENTS)


# Tables


def test_a_table_without_clients_is_dealt_like_a_tree(tabled: Callable, stream: GrowingStream) -> None:
    part = take_in(stream, tabled(client=None))
    assert set(part.manifest["client"]) == {0, 1, 2}
    assert part.facts["classes"] == ["a", "b"]


def test_clients_that_a_table_names_have_their_samples(tabled: Callable, stream: GrowingStream) -> None:
    arrival = tabled()
    part = take_in(stream, arrival)
    owners = dict(pl.read_parquet(arrival.folder / "samples.parquet").select("path", "client").iter_rows())
    given = {
        part.prepared.samples["origin"][row["sample"]]: row["client"] for row in part.manifest.iter_rows(named=True)
    }
    assert given == owners
    assert set(part.manifest["split"]) == {"train", "val", "test"}


WRONG = {
    "no label": ({"label": None}, "has no column label"),
    "empty": ({"label": ["a"] * 29 + [None]}, "label is empty in 1 rows"),
    "lists for labels": ({"label": [["a"]] * 30}, "path and label must be text"),
    "bytes for paths": ({"path": [b"\xff\xfe%d" % i for i in range(30)]}, "path and label must be text"),
    "text clients": ({"client": ["0"] * 30}, "client must be whole numbers from 0 on, not String"),
    "unknown client": ({"client": [0] * 29 + [7]}, "client 7 is none of the stream's. Right: 0 to 2"),
    "negative client": ({"client": [0] * 29 + [-1]}, "client -1 is none of the stream's"),
    "twice": (
        {"path": ["images/a-97-0.png"] * 16 + [f"images/b-98-{i}.png" for i in range(14)]},
        "lists images/a-97-0.png",
    ),
    "missing file": (
        {
            "path": ["images/gone.png"]
            + [f"images/a-97-{i}.png" for i in range(1, 15)]
            + [f"images/b-98-{i}.png" for i in range(15)]
        },
        "unreadable images: 1 (images/gone.png",
    ),
}


@pytest.mark.parametrize(("columns", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_table_is_told(columns: dict, message: str, tabled: Callable, stream: GrowingStream) -> None:
    assert message in refusal(stream, tabled(**columns))


def test_a_client_with_nothing_but_test_samples_is_refused(tmp_path: Path) -> None:
    test = np.array([True, False, False, True])
    samples = SampleTable(np.zeros(4, int), np.array([0, 0, 0, 1]), test, ("a",), ("0", "2"))
    layout = Arrival(Arrival.Settings(task="pets", owners="domains")).lay_out(samples, CLIENTS)
    iid = find("partition", "iid")
    with pytest.raises(UserError, match=r"^client 2 has no training samples in task 0 \(pets\)"):
        deal(layout, samples, iid(iid.Settings(clients=CLIENTS)))


# The stream


def test_the_past_stays_as_it_was_when_a_stream_grows(drop: Callable, stream: GrowingStream, tmp_path: Path) -> None:
    digests, samples_before = [], []
    for name, classes in {"pets": ["cats", "dogs"], "farm": ["cows", "cats"], "cars": ["vans"]}.items():
        take_in(stream, drop(name, classes))
        digests.append(join_parts(stream.parts)[1]["digest"])
        samples_before.append({path: path.read_bytes() for path in stream.folder.rglob("*") if path.is_file()})
    assert [part.folder.name for part in stream.parts] == ["01-pets", "02-farm", "03-cars"]
    assert len(set(digests)) == 3
    assert [join_parts(stream.parts[:n])[1]["digest"] for n in (1, 2, 3)] == digests
    for earlier in samples_before:
        assert {path: path.read_bytes() for path in earlier} == earlier


def test_labels_count_names_by_first_appearance_and_samples_keep_their_pixels(
    drop: Callable, stream: GrowingStream, tmp_path: Path
) -> None:
    arrivals = [drop("pets", ["dogs", "cats"]), drop("farm", ["pigs", "cats", "cows"])]
    for arrival in arrivals:
        take_in(stream, arrival)
    splits = Splits.open(assemble(stream.parts, tmp_path / "whole"))
    assert splits.classes == ("cats", "dogs", "cows", "pigs")
    assert [task.classes for task in splits.tasks] == [(0, 1), (0, 2, 3)]
    assert [task.name for task in splits.tasks] == ["pets", "farm"]
    for task, arrival in enumerate(arrivals):
        samples = set()
        for rows in (splits.select_rows(task, split) for split in ("train", "val", "test")):
            assert set(rows.tasks) == {task}
            images = splits.images[rows.samples].numpy()
            samples |= {
                (splits.classes[label], image.tobytes()) for label, image in zip(rows.labels, images, strict=True)
            }
        files = arrival.folder.rglob("*.png")
        assert samples == {(file.parent.name, np.asarray(Image.open(file)).tobytes()) for file in files}


def test_tasks_are_dealt_by_random_numbers_of_their_own(drop: Callable, stream: GrowingStream) -> None:
    for name in ("one", "two", "three"):
        take_in(stream, drop(name, [f"{name}-a", f"{name}-b"], count=40))
    sizes = [part.manifest.group_by("client").len().sort("client")["len"].to_list() for part in stream.parts]
    assert len({tuple(size) for size in sizes}) == 3


def test_only_the_newest_assembled_splits_stay(drop: Callable, stream: GrowingStream, tmp_path: Path) -> None:
    take_in(stream, drop("pets", ["cats", "dogs"]))
    first = assemble(stream.parts, tmp_path / "whole")
    assert assemble(stream.parts, tmp_path / "whole") == first
    take_in(stream, drop("cars", ["vans", "cabs"]))
    second = assemble(stream.parts, tmp_path / "whole")
    assert list((tmp_path / "whole").iterdir()) == [second]
    again = assemble(stream.parts[:1], tmp_path / "whole")
    assert again == first
    assert_array_equal(Splits.open(again).images, stream.parts[0].prepared.array)


@pytest.mark.parametrize("moment", ["prepare", "write_splits", "write_json"])
def test_a_kill_on_the_way_in_leaves_no_task(
    moment: str, drop: Callable, stream: GrowingStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_in(stream, drop("pets", ["cats", "dogs"]))
    arrival = drop("cars", ["vans", "cabs"])
    done = getattr(growing_stream, moment)

    def dies(*given: object) -> None:
        done(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(growing_stream, moment, dies)
        patch.setattr(growing_stream.shutil, "rmtree", lambda *_, **__: None)  # who is killed tidies nothing up
        with pytest.raises(KeyboardInterrupt):
            take_in(stream, arrival)
    assert [part.name for part in stream.parts] == ["pets"]
    take_in(stream, arrival)
    assert [part.name for part in stream.parts] == ["pets", "cars"]
    assert [path.name for path in stream.folder.parent.iterdir()] == [stream.folder.name]
