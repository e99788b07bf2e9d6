"""The manifest: what holds for every stream with every partition, and what is refused before anything is written."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fclmodels.data.partitions.base import Partition
from fclmodels.data.prepare import Meta
from fclmodels.data.sources.base import Normalisation
from fclmodels.data.splits.make_splits import FILES, write_splits
from fclmodels.data.splits.split_reader import Splits
from fclmodels.data.streams.base import Stream
from fclmodels.errors import UserError
from fclmodels.plugins import find

SCHEMA = {
    "sample": pl.UInt32,
    "label": pl.Int32,
    "domain": pl.Int16,
    "official": pl.String,
    "origin": pl.String,
    "group": pl.UInt32,
}
Rows = list[tuple[int, int, str | None, int | None]]  # label, domain, official, group

PLAIN: Rows = [(c, 0, None, None) for _ in range(30) for c in range(6)]
OFFICIAL: Rows = [(c, 0, "test" if i < 5 else "train", None) for i in range(30) for c in range(6)]
GROUPED: Rows = [(i % 6, d, None, i) for d in range(3) for i in range(120)]


def prepare(
    folder: Path, rows: Rows, own_label_spaces: bool = False, normalisations: tuple[Normalisation, ...] | None = None
) -> Path:
    """A prepared folder with a row for each sample, all of them one black pixel."""
    folder.mkdir(parents=True)
    label, domain, official, group = zip(*rows, strict=True)
    columns = {
        "sample": range(len(rows)),
        "label": label,
        "domain": domain,
        "official": official,
        "origin": [f"x:{i}" for i in range(len(rows))],
        "group": group,
    }
    pl.DataFrame(columns, schema=SCHEMA).write_parquet(folder / "samples.parquet")
    np.save(folder / "images.npy", np.zeros((len(rows), 1, 1, 1), np.uint8))
    meta = Meta(
        source="toy",
        classes=tuple(f"c{i}" for i in range(max(label) + 1)),
        domains=tuple(f"d{i}" for i in range(max(domain) + 1)),
        shape=(1, 1, 1),
        own_label_spaces=own_label_spaces,
        mean=(0.5,),
        std=(0.25,),
        normalisations=normalisations,
        skipped=0,
        digest="of the toy",
    )
    (folder / "meta.json").write_text(meta.model_dump_json())
    return folder


def stream(kind: str, **settings: object) -> Stream:
    plugin = find("stream", kind)
    return plugin(plugin.Settings(kind=kind, **settings))


def partition(kind: str, clients: int = 4, **settings: object) -> Partition:
    plugin = find("partition", kind)
    return plugin(plugin.Settings(kind=kind, clients=clients, **settings))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("prepared")
    return {
        "plain": prepare(folder / "plain", PLAIN),
        "official": prepare(folder / "official", OFFICIAL),
        "grouped": prepare(folder / "grouped", GROUPED),
        "sets": prepare(
            folder / "sets", [(c + 3 * d, d, None, None) for _ in range(30) for d in (0, 1) for c in range(3)], True
        ),
    }


def test_a_task_has_the_mean_and_std_of_its_data_set(tmp_path: Path) -> None:
    """None where all sets have the same; a task that mixes sets with different ones is refused."""
    apart = (Normalisation((0.1,), (0.2,)), Normalisation((0.3,), (0.4,)))
    rows = [(c, d, None, None) for _ in range(30) for d in (0, 1) for c in range(4)]
    folder = prepare(tmp_path / "prepared", rows, normalisations=apart)
    out = write_splits(
        folder, stream("domain-incremental", domains=["d1", "d0"]), partition("iid"), tmp_path / "splits"
    )
    assert [(task.mean, task.std) for task in Splits.open(out).tasks] == [((0.3,), (0.4,)), ((0.1,), (0.2,))]
    with pytest.raises(UserError, match=r"task 1 \(c0, c1\) mixes data sets with different mean or std"):
        write_splits(folder, stream("class-incremental", tasks=2), partition("iid"), tmp_path / "splits")
    alike = prepare(tmp_path / "alike", rows)
    out = write_splits(alike, stream("domain-incremental"), partition("iid"), tmp_path / "splits")
    assert {(task.mean, task.std) for task in Splits.open(out).tasks} == {(None, None)}


@pytest.fixture(scope="module")
def made(prepared: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """Splits the named data and returns the manifest and stream.json."""
    out = tmp_path_factory.mktemp("out") / "splits"

    def make(source: str, stream: Stream, partition: Partition) -> tuple[pl.DataFrame, dict]:
        write_splits(prepared[source], stream, partition, out)
        return pl.read_parquet(out / "manifest.parquet"), json.loads((out / "stream.json").read_text())

    return make


STREAMS = [
    ("plain", "class-incremental", {"tasks": 3}),
    ("official", "task-incremental", {"tasks": 3, "class_order": "shuffled"}),
    ("plain", "permuted-pixels", {"tasks": 3}),
    ("plain", "overlapping-classes", {"classes_per_task": 4, "overlap": 2}),
    ("plain", "overlapping-classes", {"classes_per_task": 4, "overlap": 2, "samples": "repeated"}),
    ("official", "task-pool", {"tasks": 3, "classes_per_task": 2}),
    ("grouped", "domain-incremental", {}),
    ("grouped", "class-incremental", {"tasks": 2}),
    ("sets", "datasets", {}),
]
PARTITIONS = [
    ("iid", {}),
    ("iid", {"task_share": 0.5, "seed": 3}),
    ("dirichlet", {"alpha": 0.1, "val": 0.3}),
    ("shards", {"shards": 3}),
    ("class-share", {"eta": 0.7}),
    ("class-share", {"eta": 0.7, "samples": "shared", "val": 0.25}),
]
# in a task pool every client has all classes that the stream gives it, in all tasks
OF_POOLS = {"dirichlet": {"min_per_class": 1}, "shards": {"shards": 24}, "class-share": {"eta": 1}}


@pytest.mark.parametrize(("kind", "options"), PARTITIONS)
@pytest.mark.parametrize(("source", "tasks", "how"), STREAMS)
def test_what_holds_for_every_manifest(
    made: Callable, prepared: dict, source: str, tasks: str, how: dict, kind: str, options: dict
) -> None:
    if tasks == "task-pool":
        options = OF_POOLS.get(kind, {}) | {key: value for key, value in options.items() if key in ("val", "samples")}
    manifest, facts = made(source, stream(tasks, **how), partition(kind, **options))
    table = pl.read_parquet(prepared[source] / "samples.parquet")
    shared = options.get("samples") == "shared"

    assert manifest.equals(manifest.sort("task", "client", "split", "sample"))
    assert manifest.n_unique(["task", "client", "sample"]) == len(manifest)
    assert manifest.group_by("sample").agg(pl.col("split").n_unique())["split"].max() == 1
    if not shared:
        assert manifest.n_unique(["task", "sample"]) == len(manifest)
    assert (manifest.filter(pl.col("split") != "test")["client"] >= 0).all()
    assert ((manifest.filter(pl.col("split") == "test")["client"] == -1) == shared).all()

    joined = manifest.join(table, on="sample", suffix="_told")
    assert [f"c{c}" for c in joined["label_told"]] == [facts["classes"][label] for label in joined["label"]]
    assert joined["domain"].equals(joined["domain_told"], check_names=False)
    assert (joined["official"] == joined["split"].replace("val", "train")).drop_nulls().all()
    groups = joined.drop_nulls("group")
    assert (groups.group_by("group").agg(pl.col("split").n_unique())["split"] == 1).all()

    labels_so_far: list[int] = []
    for t, task in enumerate(facts["tasks"]):
        rows = manifest.filter(task=t)
        trained, tested = (set(rows.filter(split=part)["label"]) for part in ("train", "test"))
        assert trained == set(task["classes"])
        assert tested == trained or (tasks == "task-pool" and tested <= trained)
        labels_so_far += [label for label in task["classes"] if label not in labels_so_far]
    assert labels_so_far == list(range(len(facts["classes"])))


@given(st.integers(0, 2**31), st.integers(1, 12), st.sampled_from(["iid", "dirichlet"]), st.floats(0, 0.8))
@settings(max_examples=25, deadline=None)
def test_each_train_sample_of_a_task_goes_to_one_client(
    made: Callable, seed: int, clients: int, kind: str, val: float
) -> None:
    manifest, _ = made(
        "official", stream("class-incremental", tasks=2, seed=seed), partition(kind, clients, seed=seed, val=val)
    )
    trained = [i for i, row in enumerate(OFFICIAL) if row[2] == "train"]
    assert sorted(manifest.filter(pl.col("split") != "test")["sample"]) == trained
    assert manifest.filter(split="train").n_unique(["task", "client"]) == 2 * clients


def test_labels_are_numbered_by_first_appearance(made: Callable) -> None:
    _, facts = made("plain", stream("class-incremental", classes=[["c4", "c1"], ["c5"], ["c0"]]), partition("iid"))
    assert facts["classes"] == ["c4", "c1", "c5", "c0"]
    assert [task["classes"] for task in facts["tasks"]] == [[0, 1], [2], [3]]
    _, facts = made("plain", stream("overlapping-classes", classes_per_task=4, overlap=2), partition("iid"))
    assert [task["classes"] for task in facts["tasks"]] == [[0, 1, 2, 3], [2, 3, 4, 5]]


def test_clients_of_the_task_pool_have_their_own_classes(made: Callable) -> None:
    for options in ({"kind": "dirichlet", "min_per_class": 1}, {"kind": "class-share", "eta": 1, "samples": "shared"}):
        manifest, facts = made("official", stream("task-pool", tasks=3), partition(**options))
        for t, task in enumerate(facts["tasks"]):
            for client, classes in task["classes_by_client"].items():
                rows = manifest.filter(pl.col("split") != "test", task=t, client=int(client))
                assert set(rows["label"]) == set(classes)
                if options["kind"] == "class-share":
                    assert len(rows) == 25 * len(classes)
    owners = made("official", stream("task-pool", tasks=3), partition("iid"))[0]
    assert owners.n_unique("sample") == len(owners) == len(OFFICIAL)


def test_only_some_clients_see_a_task_and_share_all_of_it(made: Callable) -> None:
    manifest, _ = made("official", stream("class-incremental", tasks=3), partition("iid", 10, task_share=0.6, val=0))
    sizes = manifest.filter(split="train").group_by("task", "client").len()
    assert sizes.group_by("task").len()["len"].to_list() == [6, 6, 6]
    assert sizes.group_by("task").agg(pl.col("len").sum())["len"].to_list() == [50, 50, 50]
    assert len({frozenset(part["client"]) for _, part in sizes.group_by("task")}) > 1


def test_clients_keep_their_images_under_all_permutations(made: Callable) -> None:
    manifest, _ = made("plain", stream("permuted-pixels", tasks=3), partition("dirichlet"))
    one, two = (manifest.filter(task=t).drop("task") for t in (0, 2))
    assert one.equals(two)


def test_images_dealt_for_each_task_go_to_other_clients_and_keep_their_side(made: Callable) -> None:
    dealt = stream("permuted-pixels", tasks=3, dealt="each-task")
    manifest, _ = made("plain", dealt, partition("dirichlet", val=0.2))
    one, two = (manifest.filter(task=t).drop("task") for t in (0, 2))
    assert one["sample"].sort().equals(two["sample"].sort())
    assert not one.equals(two)
    # val rows are for choosing: no other client may train on them in another task
    assert manifest.group_by("sample").agg(pl.col("split").n_unique())["split"].to_list() == [1] * one.height


def test_test_rows_have_the_class_proportions_of_the_train_rows(made: Callable) -> None:
    manifest, _ = made("official", stream("class-incremental", tasks=2), partition("dirichlet", 5, alpha=0.3, val=0))
    counts = manifest.group_by("label", "client").agg(
        train=(pl.col("split") == "train").sum(), test=(pl.col("split") == "test").sum()
    )
    assert (counts["test"] - counts["train"] * 5 / 25).abs().max() < 1
    assert counts["test"].sum() == 30


def test_no_val_rows_where_none_are_asked_for(made: Callable) -> None:
    manifest, _ = made("plain", stream("class-incremental", tasks=2), partition("iid", val=0))
    assert set(manifest["split"]) == {"train", "test"}


def test_more_val_moves_rows_and_changes_nothing_else(made: Callable) -> None:
    less, more = (
        made("plain", stream("class-incremental", tasks=2), partition("dirichlet", val=val))[0] for val in (0, 0.4)
    )
    sides = pl.col("split").replace({"val": "train"})
    order = ["task", "client", "split", "sample"]
    assert less.with_columns(sides).sort(order).equals(more.with_columns(sides).sort(order))


@pytest.mark.parametrize(("kind", "share"), [("train", 0.4), ("test", 0.6)])
@pytest.mark.parametrize(("source", "tasks", "how"), [one for one in STREAMS if one[0] != "grouped"])
def test_a_smaller_study_has_a_share_of_each_class_on_one_side(
    source: str, tasks: str, how: dict, kind: str, share: float, made: Callable
) -> None:
    def samples(**smaller: float) -> tuple[pl.Series, pl.DataFrame]:
        dealt = partition("class-share", eta=1, val=0, clients=3, **smaller)
        manifest, _ = made(source, stream(tasks, **how), dealt)
        of_each = manifest.filter(split=kind).unique("sample").group_by("label").len().sort("label")["len"]
        return of_each, manifest.filter(pl.col("split") != kind)

    (whole, other_side), (part, other_side_too) = samples(), samples(**{f"{kind}_share": share})
    assert part.sum() < whole.sum()
    assert (part - share * whole).abs().max() <= 1.0001
    assert other_side.equals(other_side_too)


@pytest.mark.parametrize(("source", "tasks", "how"), STREAMS)
def test_the_same_settings_make_the_same_splits_and_a_seed_others(
    made: Callable, source: str, tasks: str, how: dict
) -> None:
    (first, facts), (again, same), (_, other) = (
        made(source, stream(tasks, **how), partition("dirichlet", min_per_class=1, seed=seed)) for seed in (0, 0, 1)
    )
    assert first.equals(again)
    assert facts == same
    assert facts["digest"] != other["digest"]


@pytest.mark.parametrize(("tasks", "how"), [(tasks, how) for source, tasks, how in STREAMS if source == "official"])
def test_train_and_val_do_not_depend_on_the_test_rows(tmp_path: Path, tasks: str, how: dict) -> None:
    """Other test rows, fewer of them and of other classes: what is trained on stays as it is."""
    trained = [row for row in OFFICIAL if row[2] == "train"]
    many = [row for row in OFFICIAL if row[2] == "test"]
    few = [(c, 0, "test", None) for c in (5, 4, 4, 3, 2, 1, 0, 0, 0)]
    failures = []
    for name, tested in (("many", many), ("few", few)):
        out = write_splits(
            prepare(tmp_path / name, trained + tested),
            stream(tasks, **how),
            partition("dirichlet", min_per_class=1, train_share=0.7),
            tmp_path / f"{name}-out",
        )
        failures.append(pl.read_parquet(out / "manifest.parquet").filter(pl.col("split") != "test"))
    assert failures[0].equals(failures[1])


def test_what_is_written_can_be_opened(prepared: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = write_splits(prepared["official"], stream("task-pool", tasks=2), partition("iid", val=0.2), Path("a/splits"))
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    assert [path.name for path in Path("a").iterdir()] == ["splits"]
    opened = Splits.open(out)
    assert (opened.clients, opened.head, len(opened.tasks)) == (4, "growing", 2)
    assert len(opened.images) == len(OFFICIAL)
    assert not Path(json.loads((out / "stream.json").read_text())["prepared"]).is_absolute()
    statistics = pl.read_csv(out / "statistics.csv")
    scalars = json.loads((out / "statistics.json").read_text())
    assert statistics.filter(split="val")["samples"].sum() == scalars["samples"]["val"] > 0


def test_old_splits_are_replaced_and_what_else_is_there_stays(prepared: dict, tmp_path: Path) -> None:
    out = tmp_path / "splits"
    write_splits(prepared["plain"], stream("class-incremental", tasks=2), partition("iid"), out)
    (out / "notes.txt").write_text("mine")
    shutil.copytree(out, tmp_path / ".splits.partial")  # as a killed run leaves it
    write_splits(prepared["plain"], stream("class-incremental", tasks=3), partition("iid"), out)
    assert len(Splits.open(out).tasks) == 3
    assert (out / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["splits"]


def test_splits_that_were_written_in_part_are_not_opened(
    prepared: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, replace, moved = tmp_path / "splits", os.replace, []

    def stop_after_two(source: Path, target: Path) -> None:
        if len(moved) == 2:
            raise OSError("stopped")
        moved.append(target)
        replace(source, target)

    write_splits(prepared["plain"], stream("class-incremental", tasks=2), partition("iid"), out)
    monkeypatch.setattr(os, "replace", stop_after_two)
    with pytest.raises(OSError, match="stopped"):
        write_splits(prepared["plain"], stream("class-incremental", tasks=3), partition("iid"), out)
    with pytest.raises(UserError, match="missing"):
        Splits.open(out)
    assert [path.name for path in tmp_path.iterdir()] == ["splits"]


LONE: Rows = [*PLAIN, (6, 0, None, None)]
UNTAUGHT: Rows = [*OFFICIAL, (6, 0, "test", None)]
UNTESTED: Rows = [(c, 0, "train", None) for c in (0, 1) for _ in range(20)]
REFUSED = [
    (
        PLAIN,
        "class-incremental",
        {"tasks": 3},
        {"clients": 50},
        "partition: 50 clients cannot share task 0 (c0, c1): it has 48 training samples. Use fewer",
    ),
    (
        PLAIN,
        "class-incremental",
        {"tasks": 3},
        {"test": 0.01},
        "partition.test: 0.01 of the 30 samples of c0 in task 0 (c0, c1) leaves none to test. Use a larger",
    ),
    (
        PLAIN,
        "class-incremental",
        {"tasks": 3},
        {"test": 0.99},
        "partition.test: 0.99 of the 30 samples of c0 in task 0 (c0, c1) leaves none to train. Use a smaller",
    ),
    (LONE, "class-incremental", {"tasks": 3}, {}, "of the 1 samples of c6 in task 2 (c5, c6) leaves none to test"),
    (UNTAUGHT, "class-incremental", {"tasks": 3}, {}, "data: c6 in task 2 (c5, c6) has no training samples"),
    (UNTESTED, "class-incremental", {"tasks": 2}, {}, "data: task 0 (c0) has no test samples"),
    (PLAIN, "task-pool", {"tasks": 3}, {"task_share": 0.5}, "partition.task_share: clients with tasks of their own"),
    (PLAIN, "task-pool", {"tasks": 3}, {"clients": 70}, "partition: client 0 gets no sample of c"),
    (PLAIN, "domain-incremental", {}, {}, "needs a source with several domains"),
]


@pytest.mark.parametrize(("rows", "tasks", "how", "options", "message"), REFUSED)
def test_impossible_requests_leave_everything_as_it_was(
    tmp_path: Path, rows: Rows, tasks: str, how: dict, options: dict, message: str
) -> None:
    folder, out = prepare(tmp_path / "prepared", rows), tmp_path / "splits"
    out.mkdir()
    (out / "stream.json").write_text("old")
    with pytest.raises(UserError) as refusal:
        write_splits(folder, stream(tasks, **how), partition("iid", **options), out)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prepared", "splits"]
    assert [path.read_text() for path in out.iterdir()] == ["old"]


def test_folders_that_are_none_are_refused(prepared: dict, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        write_splits(prepared["plain"], stream("class-incremental", tasks=2), partition("iid"), tmp_path / "file")
    with pytest.raises(UserError, match="fcl prepare"):
        write_splits(tmp_path / "nowhere", stream("class-incremental", tasks=2), partition("iid"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_many_clients_and_samples_take_seconds(tmp_path: Path) -> None:
    """60,000 samples, 1,000 clients, 10 tasks: about 0.2 s; a loop over clients or samples would take minutes."""
    rows: Rows = [(i % 100, 0, None, None) for i in range(60_000)]
    folder = prepare(tmp_path / "prepared", rows)
    out = write_splits(folder, stream("class-incremental", tasks=10), partition("dirichlet", 1000), tmp_path / "out")
    assert pl.read_csv(out / "statistics.csv").filter(split="train").n_unique(["task", "client"]) == 10_000
