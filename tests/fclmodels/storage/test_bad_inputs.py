"""Every file format that is read, spoilt: what comes of it is a value, or a UserError of one line; nothing stays half.

Bytes are flipped, cut, doubled and put in; JSON gets other values in any place; Parquet tables get other columns. Where
a digest protects a file it is computed anew, as somebody would who means harm.
"""

import copy
import io
import json
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fclmodels.backbones.model.network import build_network
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.backbones.weights.weight_files import read_tensors
from fclmodels.backbones.weights.weights_import import read_source
from fclmodels.data.arrivals.arrival_folders import MARKER, ArrivedFolder
from fclmodels.data.arrivals.growing_stream import GrowingStream, assemble
from fclmodels.data.prepare import Prepared, digest, prepare
from fclmodels.data.sources.digits import Digits
from fclmodels.data.sources.idx import Idx
from fclmodels.data.sources.tsv import DataSetSettings, read_data_set
from fclmodels.data.splits.make_splits import write_splits
from fclmodels.data.splits.split_reader import Splits, digest_splits
from fclmodels.data.streams.arrival import Arrival
from fclmodels.errors import UserError
from fclmodels.experiment.exported_model import ExportedModel
from fclmodels.federation.engine.checkpoints import Checkpoints, Position
from fclmodels.federation.server import Server
from fclmodels.numerics.task_relevance import Router
from fclmodels.plugins import find
from fclmodels.report.read_runs import read_run
from fclmodels.settings import load
from fclmodels.settings.schema import ImageSettings
from fclmodels.storage import trees
from fclmodels.storage.digests import digest_file
from fclmodels.storage.object_store import Store
from fclmodels.storage.sealed_json import write_json, write_sealed
from fclmodels.storage.untrusted import FORMATS, parse_table

ROOT = Path(__file__).parents[3]
DAILY, NIGHTLY = 4, 200
ROOM, NO_MEMORY = 4 << 30, re.compile("MemoryError|bad_alloc|allocate memory|to allocate")

# What stands where something else is meant.
ODD = st.sampled_from(
    [
        None, True, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, float("nan"), float("inf"), -1e308, "", "a", "../../../etc/x",
        "/etc/passwd", "a\nb", "\0", "\ud800", "é" * 300, [], {}, [[]], [0], [-1], ["a"], {"a": 1}, {"tensor": "x"},
        {"json": []}, {"list": 3}, {"dict": []},
    ]
).map(copy.deepcopy)  # fmt: skip
INSERTED = st.binary(max_size=9) | st.sampled_from(
    [b"\xff" * 8, b"\0" * 8, b"\x7f\xff\xff\xff", b"{" * 3000, b"[" * 3000]
)


@st.composite
def spoilt(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes with one to three changes."""
    for _ in range(draw(st.integers(1, 3))):
        place, how = draw(st.integers(0, len(content))), draw(st.sampled_from(["flip", "cut", "drop", "put", "double"]))
        length = draw(st.integers(1, 40))
        before, behind = content[:place], content[place:]
        if how == "flip" and behind:
            content = before + bytes([behind[0] ^ draw(st.integers(1, 255))]) + behind[1:]
        elif how == "cut":
            content = before
        elif how == "drop":
            content = before + behind[length:]
        elif how == "put":
            content = before + draw(INSERTED) + behind
        else:
            content = before + behind[:length] + behind
    return content


@st.composite
def changed(draw: st.DrawFn, tree: Any) -> Any:
    """A tree of JSON with another value, or none, in one to three places."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        node, key = {"": tree}, ""
        while isinstance(node[key], dict | list) and node[key] and draw(st.integers(0, 4)):
            node = node[key]
            key = draw(st.sampled_from([*node])) if isinstance(node, dict) else draw(st.integers(0, len(node) - 1))
        how = draw(st.sampled_from(["odd", "odd", "drop", "also"]))
        if how == "drop" and isinstance(node, dict) and key:
            del node[key]
        elif how == "also" and isinstance(node[key], dict):
            node[key]["also"] = draw(ODD)
        else:
            node[key] = draw(ODD)
            tree = node[key] if key == "" else tree
    return tree


@st.composite
def other_table(draw: st.DrawFn, table: pl.DataFrame) -> pl.DataFrame:
    """A table with a column that is gone, of another type, new, or has odd values."""
    name, how = (
        draw(st.sampled_from(table.columns)),
        draw(st.sampled_from(["drop", "cast", "new", "null", "value", "none"])),
    )
    if how == "drop":
        return table.drop(name)
    if how == "new":
        return table.with_columns(other=pl.lit(draw(st.sampled_from([1, "a", None, 0.5]))))
    if how == "none":
        return table.clear()
    if how == "null":
        return table.with_columns(pl.lit(None, table[name].dtype).alias(name))
    if how == "cast":
        return table.with_columns(
            pl.Series(name, draw(st.sampled_from([["x"], [b"\xff"], [1.5], [[1]], [{"a": 1}], [None]])) * len(table))
        )
    strange_values = (
        ["../../etc/passwd", "/etc/passwd", "a\nb", "\0"]
        if table[name].dtype == pl.String
        else [2**31 - 1, -(2**31), -1, 99]
    )
    values = table[name].to_list()
    values[draw(st.integers(0, len(values) - 1))] = draw(st.sampled_from(strange_values))
    try:
        return table.with_columns(pl.Series(name, values, table[name].dtype))
    except (TypeError, OverflowError, pl.exceptions.PolarsError):
        return table.drop(name)


def parquet(table: pl.DataFrame) -> bytes:
    buffer = io.BytesIO()
    table.write_parquet(buffer)
    return buffer.getvalue()


@dataclass(frozen=True)
class Format:
    """A folder that holds what is read, the files that are spoilt, how it is read, what makes digests right again."""

    folder: Path
    files: tuple[str, ...]
    read: Callable[[Path], object]
    mend: Callable[[Path], object] = lambda folder: None

    def spoil(self, folder: Path, draw: Callable[[st.SearchStrategy], Any]) -> None:
        shutil.copytree(self.folder, folder)
        file = folder / draw(st.sampled_from(self.files))
        content = file.read_bytes()
        kind = file.suffix if draw(st.integers(0, 3)) else ""
        if kind == ".json":
            file.write_text(json.dumps(draw(changed(json.loads(content)))))
        elif kind == ".parquet":
            file.write_bytes(parquet(draw(other_table(pl.read_parquet(content)))))
        elif kind == ".safetensors":
            tree = draw(changed(json.loads(metadata_of(content))))
            file.write_bytes(with_metadata(content, json.dumps(tree)))
        else:
            file.write_bytes(draw(spoilt(content)))
        try:
            self.mend(folder)
        except (Exception, pl.exceptions.PanicException):  # it is spoilt too far for that
            return


def metadata_of(content: bytes) -> str:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length])["__metadata__"]["fclflow"]


def with_metadata(content: bytes, text: str) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"]["fclflow"] = text
    written = json.dumps(header).encode()
    return len(written).to_bytes(8, "little") + written + content[8 + length :]


# The formats


def a_params_file(home: Path) -> Format:
    shutil.copy(ROOT / "params.yaml", home)
    return Format(home, ("params.yaml",), lambda folder: load.load_params(folder / "params.yaml"))


def a_preset(home: Path) -> Format:
    shutil.copy(ROOT / "presets" / "fot-pmnist-iid.yaml", home)
    return Format(
        home, ("fot-pmnist-iid.yaml",), lambda folder: load.load_params(folder / "fot-pmnist-iid.yaml", (), "fot")
    )


def some_splits(home: Path, write: Callable[..., Splits]) -> Format:
    write(home, tasks=2)

    def read(folder: Path) -> None:
        splits = Splits.open(folder / "splits")
        for task in splits.tasks:
            rows = splits.select_rows(task.index, "train")
            splits.images[torch.from_numpy(rows.samples)]
            splits.select_test_rows(task.index, 0)
            [splits.classes[label] for label in rows.labels]

    files = ("splits/stream.json", "splits/manifest.parquet", "prepared/meta.json", "prepared/images.npy")
    return Format(home, files, read, lambda folder: digested(folder / "splits"))


def digested(splits: Path) -> None:
    """The digest of these splits made anew."""
    facts = json.loads((splits / "stream.json").read_text())
    facts["digest"] = digest_splits(parse_table((splits / "manifest.parquet").read_bytes()), facts)
    (splits / "stream.json").write_text(json.dumps(facts))


def prepared_data(home: Path) -> Format:
    few = Digits(ImageSettings())
    catalogue = few.catalogue()
    few.catalogue = lambda: type(catalogue)(**{**vars(catalogue), "samples": catalogue.samples[:40]})  # type: ignore[method-assign]
    prepare(few, home / "data")
    files = ("data/meta.json", "data/samples.parquet", "data/images.npy")

    def read(folder: Path) -> None:
        Prepared.open(folder / "data").verify()
        stream = Arrival(Arrival.Settings(kind=Arrival.name, task="x", owners="drawn"))
        partition = find("partition", "iid")
        write_splits(folder / "data", stream, partition(partition.Settings(clients=2)), folder / "splits")

    def mend(folder: Path) -> None:
        prepared = Prepared.open(folder / "data")
        prepared.meta.__dict__["digest"] = digest(prepared.meta, prepared.array, prepared.samples)
        (folder / "data" / "meta.json").write_text(prepared.meta.model_dump_json())

    return Format(home, files, read, mend)


def a_tree(home: Path) -> Format:
    trees.save({"a": torch.ones(2, 3), "b": [torch.zeros(1), {"c": "text"}, 3]}, home / "x.safetensors")
    return Format(
        home,
        ("x.safetensors",),
        lambda folder: (trees.load(folder / "x.safetensors"), trees.load_shapes(folder / "x.safetensors")),
    )


def resealed(file: Path) -> dict[str, Any]:
    """What a sealed file holds, its seal made anew."""
    content = json.loads(file.read_text())
    content.pop("seal", None)
    write_sealed(file, content)
    return content


def a_store(home: Path) -> Format:
    store = Store(home)
    digests = {"state": store.put({"w": torch.ones(3)}), "rounds": store.put_table(pl.DataFrame({"a": [1]}))}
    store.record("key", {"objects": digests, "stage": "learn", "task": 0, "seconds": 1.0})

    def read(folder: Path) -> None:
        store = Store(folder)
        store.recall("key")
        store.get(digests["state"])
        store.get_table(digests["rounds"])

    files = ("done/key.json", *(f"{digest[:2]}/{digest}" for digest in digests.values()))
    return Format(home, files, read, lambda folder: resealed(folder / "done" / "key.json"))


def checkpoints_of_a_task(home: Path) -> Format:
    spec = ModelSpec({"backbone": "mlp"}, (1, 2, 2), "growing", ((0, 1), (2,)))
    checkpoints = Checkpoints(home / "checkpoints" / "key")
    trees.save({"seen": torch.tensor(1)}, checkpoints.memories / "5")
    checkpoints.rounds.append({"round": 0})
    checkpoints.commit(Position(Server(spec, {"w": torch.ones(3)}), {5: checkpoints.memories / "5"}, 1))
    checkpoints.close()

    def read(folder: Path) -> None:
        opened = Checkpoints(folder / "checkpoints" / "key")
        try:
            position = opened.load_latest()
            opened.rounds.read_rows()
            for file in position.memories.values() if position else ():
                assert file.is_relative_to(folder)
                trees.load(file)
        finally:
            opened.close()

    def mend(folder: Path) -> None:
        file = folder / "checkpoints" / "key" / "commit.json"
        commit = resealed(file)
        commit["digests"] = {name: digest_file(file.parent / name) for name in commit["digests"]}
        write_sealed(file, commit)

    files = ("commit.json", "server-1.safetensors", "memories/5", "rounds.jsonl")
    return Format(home, tuple(f"checkpoints/key/{name}" for name in files), read, mend)


def a_run_folder(home: Path) -> Format:
    accuracy = {"reading": ["task_aware"] * 2, "after": [1, 2], "task": [0, 0], "client": [None, None]}
    counts = {"correct": [3, 4], "total": [5, 5]}
    pl.DataFrame(accuracy | counts).write_parquet(home / "accuracy.parquet")
    pl.DataFrame({"task": [0], "round": [0], "step": [1], "loss": [0.5], "seconds": [1.0]}).write_parquet(
        home / "rounds.parquet"
    )
    words = {name: ["x"] for name in ("direction", "part", "kind", "least")}
    pl.DataFrame({"task": [0], "round": [0], "client": [0], **words, "bytes": [3]}).write_parquet(
        home / "ledger.parquet"
    )
    result = {
        "format": 1,
        "method": "fedavg",
        "seed": 0,
        "metrics": {"task_aware": {"acc": 0.5}},
        "settings": {"a": {"b": 1}},
    }
    more = {"digests": {"splits": "ab"}, "versions": {}, "seconds": 1.0, "bytes_up": 1, "bytes_down": 1}
    write_json(home / "result.json", result | more)
    return Format(home, ("result.json", "accuracy.parquet", "rounds.parquet", "ledger.parquet"), read_run)


def a_model(home: Path) -> Format:
    network = build_network(
        ModelSpec({"backbone": "mlp", "hidden": 8}, (1, 4, 4), "growing", ((0, 1), (2,))), torch.Generator()
    )
    trees.save(dict(network.state_dict()), home / "weights.safetensors")
    write_json(home / "spec.json", network.spec.to_json())
    router = Router((torch.eye(8)[:, :3], torch.eye(8)[:, 3:5]), torch.eye(2)[None], torch.ones(1, 2, dtype=torch.bool))
    trees.save(router.to_tree(), home / "router.safetensors")
    tasks = [{"name": f"task {t}", "permutation": None} for t in range(2)]
    facts = {
        "method": "fedavg",
        "classes": ["ant", "bee", "cat"],
        "tasks": tasks,
        "mean": [0.5],
        "std": [0.25],
        "notes": [],
    }
    write_json(home / "serving.json", facts)

    def read(folder: Path) -> None:
        model = ExportedModel(folder)
        model.answer(np.zeros((2, *model.shape), np.uint8))

    return Format(home, ("spec.json", "serving.json", "weights.safetensors", "router.safetensors"), read)


def weights_of_others(home: Path) -> Format:
    torch.save({"w": torch.ones(3), "b": torch.zeros(2, 2)}, home / "w.pth")
    trees.save({"w": torch.ones(3)}, home / "w.safetensors")
    return Format(
        home, ("w.pth", "w.safetensors"), lambda f: [read_source(f / "w.pth"), read_tensors(f / "w.safetensors")]
    )


def layers_model(home: Path) -> Format:
    """Weights as TensorFlow.js has them, for `fcl weights import`."""
    entries = [{"name": "x", "shape": [2, 3], "dtype": "float32"}, {"name": "y", "shape": [1], "dtype": "float32"}]
    (home / "model.json").write_text(json.dumps({"weightsManifest": [{"paths": ["a", "b"], "weights": entries}]}))
    (home / "a").write_bytes(bytes(10))
    (home / "b").write_bytes(bytes(18))
    return Format(home, ("model.json", "a", "b"), read_source)


def idx_files(home: Path) -> Format:
    (home / "x").write_bytes(b"\0\0\x08\x03" + np.array([3, 4, 4], ">u4").tobytes() + bytes(48))
    (home / "y").write_bytes(b"\0\0\x08\x01" + np.array([3], ">u4").tobytes() + bytes(3))
    names = {"images": Path("x"), "labels": Path("y"), "test_images": None, "test_labels": None}
    return Format(home, ("x", "y"), lambda folder: Idx(Idx.Settings(source="idx", root=folder, **names)).catalogue())


def tsv_files(home: Path) -> Format:
    (home / "train.tsv").write_text("text\tlabel\ngood film\t1\nbad film\t0\n")
    part = DataSetSettings(name="x", train=Path("train.tsv"), text=("text",))
    return Format(home, ("train.tsv",), lambda folder: read_data_set(folder, part))


def pictures(home: Path) -> Format:
    for kind in FORMATS:
        Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(home / f"x.{kind}", kind)
    spec = build_network(ModelSpec({"backbone": "mlp", "hidden": 2}, (1, 4, 4), "growing", ((0,),)), torch.Generator())
    model = ExportedModel.__new__(ExportedModel)
    model.smaller = "resize"
    model.spec = spec.spec

    def read(folder: Path) -> None:
        for file in sorted(folder.iterdir()):
            assert model.read_images([file]).shape == (1, 1, 4, 4)

    return Format(home, tuple(f"x.{kind}" for kind in FORMATS), read)


def images_of(folder: Path, name: str, count: int) -> list[str]:
    (folder / name).mkdir(parents=True)
    pixels = np.random.default_rng(len(name) + ord(name[0])).integers(0, 255, (count, 4, 4), np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / name / f"{number}.png")
    return [f"{name}/{number}.png" for number in range(count)]


def take_in(folder: Path) -> None:
    """An arrival becomes a part of the stream, or nothing of it stays."""
    stream, partition = GrowingStream(folder / "streams" / "x"), find("partition", "iid")
    settings = partition.Settings(clients=2, val=0.2)
    try:
        stream.take_in(ArrivedFolder(1, "task", folder / "incoming" / "task"), ImageSettings(), partition(settings))
    except UserError:
        assert not list((folder / "streams").rglob("*.*"))
        raise


def an_arriving_tree(home: Path) -> Format:
    files = [file for name in ("ant", "bee") for file in images_of(home / "incoming" / "task", name, 12)]
    (home / "incoming" / "task" / MARKER).touch()
    return Format(home, tuple(f"incoming/task/{file}" for file in files), take_in)


def an_arriving_table(home: Path) -> Format:
    task = home / "incoming" / "task"
    paths = [path for name in ("ant", "bee") for path in images_of(task, name, 12)]
    table = pl.DataFrame({"path": paths, "label": ["ant"] * 12 + ["bee"] * 12, "client": [0, 1] * 12})
    table.write_parquet(task / "samples.parquet")
    return Format(home, ("incoming/task/samples.parquet",), take_in)


def a_part_of_a_stream(home: Path) -> Format:
    an_arriving_table(home)
    take_in(home)
    names = ("stream.json", "manifest.parquet", "arrival.json", "meta.json", "images.npy", "samples.parquet")
    place = "streams/x/01-task"

    def read(folder: Path) -> None:
        stream = GrowingStream(folder / "streams" / "x")
        stream.has(ArrivedFolder(1, "task", folder / "incoming" / "task"))
        Splits.open(assemble(stream.parts, folder / "joined"))

    return Format(home, tuple(f"{place}/{name}" for name in names), read, lambda folder: digested(folder / place))


MAKERS: dict[str, Callable[..., Format]] = {
    "params.yaml": a_params_file,
    "a preset": a_preset,
    "manifest and facts of splits": some_splits,
    "prepared data": prepared_data,
    "safetensors": a_tree,
    "store and its records": a_store,
    "checkpoints": checkpoints_of_a_task,
    "result.json and tables of a run": a_run_folder,
    "a model folder": a_model,
    "weights from elsewhere": weights_of_others,
    "a model of TensorFlow.js": layers_model,
    "idx": idx_files,
    "tsv": tsv_files,
    "pictures": pictures,
    "an arriving tree": an_arriving_tree,
    "an arriving table": an_arriving_table,
    "a part of a stream": a_part_of_a_stream,
}


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory, write_splits_into: Callable[..., Splits]) -> dict[str, Format]:
    further = {"manifest and facts of splits": (write_splits_into,)}
    return {n: make(tmp_path_factory.mktemp("whole"), *further.get(n, ())) for n, make in MAKERS.items()}


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """What a file asks for in vain is told, where it would have had the machine end this process."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def tried(form: Format, scratch: Path, examples: int) -> tuple[int, int]:
    """How many spoilt ones were read, and how many of these were refused."""
    counts = [0, 0]

    @settings(max_examples=examples, deadline=None, suppress_health_check=[*HealthCheck])
    @given(st.data())
    def one_is_read_or_refused(data: st.DataObject) -> None:
        shutil.rmtree(scratch, ignore_errors=True)
        form.spoil(scratch, data.draw)
        counts[0] += 1
        lines, cause = ["a value"], ""
        try:
            form.read(scratch)
        except UserError as mistake:
            counts[1] += 1
            lines, cause = str(mistake).splitlines(), repr(mistake.__cause__)
        assert not NO_MEMORY.search(f"{lines} {cause}")
        # Of settings each mistake is told, each in a line that begins with its place.
        assert len(lines) == 1 or all(line.startswith(f"{scratch}/") for line in lines), lines

    one_is_read_or_refused()
    return counts[0], counts[1]


@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("name", MAKERS)
def test_a_spoilt_file_is_read_or_refused_in_one_line(name: str, formats: dict[str, Format], tmp_path: Path) -> None:
    formats[name].read(formats[name].folder) if name not in ("an arriving tree", "an arriving table") else None
    tried(formats[name], tmp_path / "spoilt", DAILY)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("name", MAKERS)
def test_many_spoilt_files_are_read_or_refused_in_one_line(
    name: str, formats: dict[str, Format], tmp_path: Path
) -> None:
    read, refused = tried(formats[name], tmp_path / "spoilt", NIGHTLY)
    sys.stdout.write(f"| {name} | {read} | {refused} |\n")
