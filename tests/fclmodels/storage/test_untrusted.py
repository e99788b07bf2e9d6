"""What a file names stays below its root, and what is no picture, or a pixel bomb, is not decoded."""

import gzip
import json
import os
import resource
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image

from fclmodels.backbones.model.network import build_network
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.data.arrivals.arrival_folders import MARKER, ArrivedFolder, list_arrived
from fclmodels.data.prepare import prepare
from fclmodels.data.sources.idx import read_idx
from fclmodels.data.sources.image_folder import ImageFolder
from fclmodels.data.sources.image_table import ImageTable
from fclmodels.data.splits.split_reader import Splits, digest_splits, read_splits, refuse_unfit
from fclmodels.errors import UserError
from fclmodels.experiment.exported_model import ExportedModel
from fclmodels.federation.engine.checkpoints import Checkpoints, Position
from fclmodels.federation.server import Server
from fclmodels.settings.schema import ImageSettings
from fclmodels.storage import trees
from fclmodels.storage.sealed_json import write_json, write_sealed
from fclmodels.storage.untrusted import read_table, resolve_inside

LEADING_OUT = ["/etc/passwd", "../outside.png", "a/../../outside.png", "link.png", "linked/outside.png", "..", "a\0b"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with links out of it, beside a picture that is none of its business."""
    folder = tmp_path / "root"
    (folder / "a").mkdir(parents=True)
    Image.new("L", (4, 4), 3).save(tmp_path / "outside.png")
    Image.new("L", (4, 4), 5).save(folder / "a" / "inside.png")
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    (folder / "linked").symlink_to(tmp_path)
    (folder / "other.png").symlink_to("a/inside.png")
    return folder


@pytest.mark.parametrize("name", LEADING_OUT)
def test_a_path_that_leads_out_is_refused(name: str, root: Path) -> None:
    with pytest.raises(UserError, match="leads out of") as message:
        resolve_inside(root, name)
    assert "\n" not in str(message.value)


@pytest.mark.parametrize("name", ["a/inside.png", "a/../a/inside.png", "other.png", "not there yet"])
def test_a_path_below_its_root_is_that_path(name: str, root: Path) -> None:
    assert resolve_inside(root, name) == root / name


@pytest.mark.parametrize("name", LEADING_OUT[:5])
def test_a_table_reads_nothing_outside_of_its_root(name: str, root: Path, tmp_path: Path) -> None:
    pl.DataFrame({"path": ["a/inside.png", name], "label": ["x", "x"]}).write_parquet(root / "samples.parquet")
    with pytest.raises(UserError, match="leads out of") as message:
        prepare(ImageTable(ImageTable.Settings(source="image-table", root=root)), tmp_path / "prepared")
    assert "\n" not in str(message.value)
    assert not (tmp_path / "prepared").exists()


def test_what_arrives_holds_no_link_to_elsewhere(root: Path) -> None:
    (root / MARKER).touch()
    with pytest.raises(UserError, match="leads out of"):
        ArrivedFolder(1, root.name, root).make_source(ImageSettings())
    for link in ("link.png", "linked"):
        (root / link).unlink()
    ArrivedFolder(1, root.name, root).make_source(ImageSettings())
    (root.parent / "alias").symlink_to(root)
    assert [arrival.name for arrival in list_arrived(root.parent)] == ["root"]


@pytest.mark.parametrize("name", ["/etc/passwd", "../../../../outside", "../../../etc/passwd"])
@pytest.mark.parametrize("what", ["server", "memories", "late"])
def test_a_checkpoint_names_nothing_outside_of_its_home(what: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "checkpoints" / "key"
    checkpoints = Checkpoints(folder)
    spec = ModelSpec({"backbone": "mlp"}, (1, 2, 2), "growing", ((0, 1),))
    checkpoints.commit(Position(Server(spec, {"w": torch.ones(3)}), {}, 1))
    checkpoints.close()
    commit = json.loads((folder / "commit.json").read_text())
    commit[what] = {"server": name, "memories": {"0": name}, "late": {"0": [name, 0, 1]}}[what]
    del commit["seal"]
    write_sealed(folder / "commit.json", commit)
    opened = Checkpoints(folder)
    with pytest.raises(UserError, match="names no file of this run"):
        opened.load_latest()
    opened.close()


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG that says that it is so large, without the pixels for it."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    whole = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    parts = (struct.pack(">I", len(d)) + kind + d + struct.pack(">I", zlib.crc32(kind + d)) for kind, d in whole)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def tiff(width: int, height: int) -> bytes:
    tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8)]
    tags += [(277, 3, 1, 1), (278, 4, 1, height), (279, 4, 1, width * height % 2**32)]
    return (
        struct.pack("<2sHI", b"II", 42, 8)
        + struct.pack("<H", len(tags))
        + b"".join(struct.pack("<HHII", *tag) for tag in tags)
        + bytes(4)
    )


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n(x) print\n%%EOF\n"
BOMBS = {
    "a wide png": png(200_000, 50_000),
    "a png beyond Pillow's limit": png(2**31 - 1, 2**31 - 1),
    "a png just above ours": png(10_001, 10_000),
    "a tiff": tiff(60_000, 60_000),
    "a ppm": b"P5 99999 99999 255\n" + bytes(9),
    "a bmp": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 99, 0, 0, 54, 40, 60_000, 60_000, 1, 24, 0, 0, 1, 1, 0, 0),
    "a compressed text": png(4, 4, (b"zTXt", b"a\0\0" + zlib.compress(bytes(2**26)))),
    "many texts": png(4, 4, *[(b"zTXt", b"a%d\0\0" % i + zlib.compress(bytes(2**20 - 99))) for i in range(80)]),
    "a colour profile": png(4, 4, (b"iCCP", b"a\0\0" + zlib.compress(bytes(2**26)))),
    "a program": POSTSCRIPT,
}


@pytest.fixture(params=BOMBS)
def bomb(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "incoming" / "task" / "x"
    folder.mkdir(parents=True)
    (folder / "bomb.png").write_bytes(BOMBS[request.param])
    return folder / "bomb.png"


def peak() -> int:
    """The most memory so far, in kB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.fixture
def model() -> ExportedModel:
    """One that has not been opened: only its shape is asked for."""
    model = ExportedModel.__new__(ExportedModel)
    model.smaller = "resize"
    model.spec = ModelSpec({"backbone": "mlp"}, (1, 4, 4), "growing", ((0, 1),))
    return model


def test_a_bomb_is_refused_before_it_is_decoded(bomb: Path, tmp_path: Path, model: ExportedModel) -> None:
    """By a source, by what arrives, by the served model."""
    before = peak()
    folder = ImageFolder(ImageFolder.Settings(source="image-folder", root=bomb.parents[1]))
    for source in (folder, ArrivedFolder(1, "task", bomb.parents[1]).make_source(ImageSettings())):
        with pytest.raises(UserError, match=r"bomb\.png") as told:
            prepare(source, tmp_path / "prepared")
        assert "\n" not in str(told.value)
    with pytest.raises(UserError, match=r"bomb\.png cannot be read as an image") as told:
        model.read_images([bomb])
    assert "\n" not in str(told.value)
    assert peak() - before < 200_000


def test_the_small_ones_are_decoded(tmp_path: Path, model: ExportedModel) -> None:
    """So that the bombs are refused for what they are."""
    (tmp_path / "x.png").write_bytes(png(4, 4, (b"zTXt", b"a\0\0" + zlib.compress(bytes(999)))))
    assert model.read_images([tmp_path / "x.png"]).shape == (1, 1, 4, 4)


@pytest.mark.parametrize("name", ["x.png", "samples.parquet"])
def test_a_pipe_is_no_file(name: str, tmp_path: Path, model: ExportedModel) -> None:
    """To open one would wait for ever."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="no such file") if name == "x.png" else pytest.raises(OSError, match="no file"):
        model.read_images([tmp_path / name]) if name == "x.png" else read_table(tmp_path / name)


def test_a_table_of_too_many_values_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fclmodels.storage.parquet_check.MOST_VALUES", 4)
    pl.DataFrame({"a": [0] * 5}).write_parquet(tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="5 values are too many"):
        read_table(tmp_path / "x.parquet")


def test_the_name_of_a_table_is_no_pattern(tmp_path: Path) -> None:
    for name in ("a1.parquet", "a2.parquet"):
        pl.DataFrame({"a": [name]}).write_parquet(tmp_path / name)
    with pytest.raises((OSError, ValueError)):
        read_table(tmp_path / "a*.parquet")


def test_idx_values_are_not_unpacked_beyond_what_they_say(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "x.gz", "wb", compresslevel=1) as packed:
        packed.write(b"\0\0\x08\x01" + np.array([4], ">u4").tobytes())
        for _ in range(64):
            packed.write(bytes(2**21))
    before = peak()
    with pytest.raises(UserError, match="cut short or too long for its 4 values"):
        read_idx(tmp_path / "x")
    assert peak() - before < 100_000


def test_idx_values_take_no_room_before_they_are_there(tmp_path: Path) -> None:
    header = b"\0\0\x08\x01" + np.array([2**32 - 1], ">u4").tobytes()
    (tmp_path / "x").write_bytes(header + b"abc")
    (tmp_path / "y.gz").write_bytes(gzip.compress(header + b"abc"))
    (tmp_path / "z").write_bytes(b"\0\0\x08\x64" + np.ones(100, ">u4").tobytes() + b"a")
    before = peak()
    for name, message in {"x": "cut short or too long", "y": "cut short or too long", "z": "cannot be read"}.items():
        with pytest.raises(UserError, match=message):
            read_idx(tmp_path / name)
    assert peak() - before < 100_000


RESNET = {"backbone": "resnet18", "stem": "cifar", "width": 1}
VIT = {"backbone": "vit", "patch": 2, "width": 2, "depth": 1, "attention_heads": 1, "mlp_width": 2}
ADAPTER = {"kind": "l2p", "length": 1, "pool": 1}


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """A model folder of two tasks; each of its files can be given another content."""

    def write(made: ModelSpec, spec: ModelSpec | None = None, without: str = "", **other: Any) -> Path:
        weights = build_network(made, torch.Generator()).state_dict()
        trees.save(
            {n: w for n, w in weights.items() if not n.startswith(without or "-")}, tmp_path / "weights.safetensors"
        )
        write_json(tmp_path / "spec.json", (spec or made).to_json())
        tasks = [{"name": f"task {t}", "permutation": None} for t in range(2)]
        facts = {"method": "fedavg", "classes": ["a", "b"], "tasks": tasks, "mean": [0.5], "std": [0.5], "notes": []}
        for name in ("router", "earlier"):
            if name in other:
                trees.save(other.pop(name), tmp_path / f"{name}.safetensors")
        write_json(tmp_path / "serving.json", facts | other)
        return tmp_path

    return write


def spec_of(settings: dict[str, Any], adapter: dict[str, Any] | None = None, side: int = 4) -> ModelSpec:
    return ModelSpec(settings, (1, side, side), "growing", ((0,), (1,)), adapter)


MLP = spec_of({"backbone": "mlp", "hidden": 2})
ABSURD = {
    "wider": (MLP, spec_of({"backbone": "mlp", "hidden": 2**25}), ""),
    "wider, and the weights lack that": (MLP, spec_of({"backbone": "mlp", "hidden": 2**25}), "backbone"),
    "a head as wide as its features": (spec_of(RESNET), spec_of({**RESNET, "grid": 2**10}, side=2**13), ""),
    "the same, and no head": (spec_of(RESNET), spec_of({**RESNET, "grid": 2**10}, side=2**13), "heads"),
    "pixels": (spec_of(RESNET), spec_of(RESNET, side=2**20), ""),
    "layers without end": (spec_of(VIT), spec_of({**VIT, "depth": 2**40}), ""),
    "prompts": (spec_of(VIT, ADAPTER), spec_of(VIT, {**ADAPTER, "length": 1024, "pool": 10_000}), "backbone.prompts"),
    "under prompts": (spec_of(VIT, ADAPTER), spec_of({**VIT, "mlp_width": 2**33}, ADAPTER), "backbone.frozen"),
}


@pytest.mark.parametrize("what", ABSURD)
def test_a_spec_that_asks_for_more_than_its_weights_is_refused(
    what: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Before a network is made, be it that the weights lack what would be so large."""
    made, spec, without = ABSURD[what]
    ExportedModel(model_folder(made))
    before = peak()
    with pytest.raises(UserError, match=r"does not fit spec\.json|validation error|too large") as told:
        ExportedModel(model_folder(made, spec, without))
    assert "\n" not in str(told.value)
    assert peak() - before < 100_000


ROUTER = {"bases": [torch.ones(2, 1)] * 2, "references": torch.ones(1, 2, 2), "known": torch.ones(1, 2) > 0}
MISFITS: dict[str, dict[str, Any]] = {
    "no mean": {"mean": []},
    "a class in two lines": {"classes": ["a", "b\nc"]},
    "a deviation too many": {"std": [0.5, 0.5]},
    "a basis too few": {"router": ROUTER | {"bases": [torch.ones(2, 1)]}},
    "bases of other features": {"router": ROUTER | {"bases": [torch.ones(3, 1)] * 2}},
    "a flat basis": {"router": ROUTER | {"bases": [torch.ones(2)] * 2}},
    "bases of whole numbers": {"router": ROUTER | {"bases": [torch.ones(2, 1, dtype=torch.long)] * 2}},
    "a basis that is none": {"router": ROUTER | {"bases": [3, 4]}},
    "references of other tasks": {"router": ROUTER | {"references": torch.ones(1, 3, 3)}},
    "nobody's references": {"router": ROUTER | {"references": torch.ones(0, 2, 2), "known": torch.ones(0, 2) > 0}},
    "what is known of other tasks": {"router": ROUTER | {"known": torch.ones(1, 1) > 0}},
    "no router": {"router": [1]},
    "too many earlier models": {"earlier": {"models": [{}, {}]}},
    "earlier models of nothing": {"earlier": {"models": [{}]}},
    "earlier models that are none": {"earlier": {"models": [3]}},
}


@pytest.mark.parametrize("what", MISFITS)
def test_files_of_a_model_that_do_not_fit_each_other_are_refused(
    what: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """When the model is opened, not when it is asked."""
    ExportedModel(model_folder(MLP, router=ROUTER)).answer(np.zeros((2, 1, 4, 4), np.uint8))
    with pytest.raises(UserError, match="holds no model that can be read") as told:
        ExportedModel(model_folder(MLP, **MISFITS[what]))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "change", [{"clients": 2**63}, {"clients": 0}, {"mean": []}, {"std": [0.5, 0.5]}, {"prepared": "a\nb"}], ids=str
)
def test_facts_that_do_not_fit_the_splits_are_refused(
    change: dict[str, Any], write_splits_into: Callable[..., Splits], tmp_path: Path
) -> None:
    folder = write_splits_into(tmp_path).folder
    facts = json.loads((folder / "stream.json").read_text())
    facts |= change
    facts["digest"] = digest_splits(pl.read_parquet(folder / "manifest.parquet"), facts)
    (folder / "stream.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="cannot be read") as message:
        Splits.open(folder)
    assert "\n" not in str(message.value)


def test_a_manifest_has_no_empty_places(write_splits_into: Callable[..., Splits], tmp_path: Path) -> None:
    folder = write_splits_into(tmp_path).folder
    facts, manifest = read_splits(folder)
    for column in manifest.columns:
        with pytest.raises(ValueError, match="empty places"):
            refuse_unfit(manifest.with_columns(pl.lit(None, manifest[column].dtype).alias(column)), facts)


@pytest.mark.parametrize(
    "change", [{"weights": {"w": 3}}, {"weights": [1]}, {"task": "1"}, {"knowledge": 4}, {"more": 1}]
)
def test_what_is_no_server_is_no_state_of_a_run(change: dict[str, Any], tmp_path: Path) -> None:
    tree = Server(MLP, {"w": torch.ones(1)}).to_tree()
    with pytest.raises((ValueError, LookupError, TypeError, AttributeError)):
        Server.from_tree(tree | change)


def test_a_checkpoint_is_of_the_runs_model(tmp_path: Path) -> None:
    """Nothing is made of a state whose spec, or whose weights, are of another one."""
    wide = spec_of({"backbone": "mlp", "hidden": 2**25})
    weights = dict(build_network(MLP, torch.Generator()).state_dict())
    other = {
        "wide": Server(wide, weights),
        "fewer": Server(MLP, dict(list(weights.items())[1:])),
        "none": Server(MLP, {}),
    }
    for name, server in {"right": Server(MLP, weights), **other}.items():
        checkpoints = Checkpoints(tmp_path / "home" / "checkpoints" / name)
        checkpoints.commit(Position(server, {}, 1))
        if name == "right":
            assert checkpoints.load_for_model(MLP) is not None
        else:
            with pytest.raises(UserError, match="the state of another model"):
                checkpoints.load_for_model(MLP)
        checkpoints.close()
