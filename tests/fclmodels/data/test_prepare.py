import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image

from fclmodels.data import prepare as module
from fclmodels.data.decoding import CHUNK, decode
from fclmodels.data.prepare import Prepared, prepare
from fclmodels.data.sources.base import Source, list_arrays
from fclmodels.errors import UserError
from fclmodels.plugins import find
from fclmodels.settings.schema import ImageSettings

ROOT = Path(__file__).parents[3]


class Arrays(Source):
    """Images made by the test: no official split, or half of them for testing."""

    name = "arrays"

    def __init__(self, images, labels, classes=("a", "b", "c"), official=False, **settings):
        super().__init__(ImageSettings(**settings))
        self.images, self.labels, self.classes, self.official = images, np.asarray(labels), classes, official

    def catalogue(self):
        half = len(self.labels) // 2
        halves = {"train": slice(None, half), "test": slice(half, None)} if self.official else {None: slice(None)}
        parts = {split: (self.images[rows], self.labels[rows]) for split, rows in halves.items()}
        return list_arrays(self.name, self.classes, parts)


def random_images(count, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def small(count=6, **settings):
    return Arrays(random_images(count, 4, 5, 3), np.arange(count) % 3, **settings)


def tree(root, **settings):
    plugin = find("source", "image-folder")
    return plugin(plugin.Settings(source="image-folder", root=root, **settings))


def save(path, shape=(4, 4), seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(random_images(1, *shape, seed=seed)[0]).save(path)


# what is written


def test_images_and_table_are_those_of_the_source(tmp_path):
    count = 2 * CHUNK + 3
    source = Arrays(
        random_images(count, 4, 5, 3), np.arange(count) % 3, official=True, mean=(0.5,), std=(0.1, 0.2, 0.3)
    )
    prepared = prepare(source, tmp_path / "prepared")
    assert_array_equal(prepared.array, source.images.transpose(0, 3, 1, 2))
    assert prepared.array.dtype == np.uint8
    assert prepared.samples.columns == ["sample", "label", "domain", "official", "origin", "group"]
    assert_array_equal(prepared.samples["sample"], np.arange(count))
    assert_array_equal(prepared.samples["label"], source.labels)
    assert prepared.samples["official"].to_list() == ["train"] * (count // 2) + ["test"] * (count - count // 2)
    assert prepared.samples["origin"][1] == "train:1"
    meta = json.loads((tmp_path / "prepared" / "meta.json").read_text())
    assert meta["digest"] == prepared.meta.digest
    assert (meta["source"], meta["classes"], meta["domains"]) == ("arrays", ["a", "b", "c"], ["arrays"])
    assert (meta["shape"], meta["mean"], meta["std"]) == ([3, 4, 5], [0.5] * 3, [0.1, 0.2, 0.3])
    assert (meta["format"], meta["own_label_spaces"], meta["skipped"]) == (1, False, 0)
    assert sorted(path.name for path in prepared.folder.iterdir()) == ["images.npy", "meta.json", "samples.parquet"]


def test_the_embedded_digits_are_prepared_as_they_are(tmp_path):
    plugin = find("source", "digits-domains")
    prepared = prepare(plugin(plugin.Settings(source="digits-domains")), tmp_path / "prepared")
    assert prepared.array.shape == (4 * 1797, 1, 8, 8)
    assert_array_equal(prepared.array[1797:3594], 255 - prepared.array[:1797])
    assert_array_equal(prepared.samples["group"], np.tile(np.arange(1797), 4))


def test_the_digest_is_the_same_for_the_same_content(tmp_path):
    once, again = prepare(small(), tmp_path / "once"), prepare(small(), tmp_path / "again")
    assert once.meta.digest == again.meta.digest
    again.verify()
    assert prepare(small(), tmp_path / "once").meta.digest == once.meta.digest


def test_the_digest_changes_with_each_part_of_the_content(tmp_path):
    images = random_images(6, 4, 5, 3)
    dotted = images.copy()
    dotted[3, 2, 1, 0] ^= 1
    labels = np.arange(6) % 3
    variants = [
        Arrays(images, labels),
        Arrays(dotted, labels),
        Arrays(images, labels[::-1]),
        Arrays(images, labels, classes=("a", "b", "d")),
        Arrays(images, labels, official=True),
        Arrays(images, labels, mean=(0.4,)),
        Arrays(images, labels, std=(0.4,)),
        Arrays(images[::-1], labels),
    ]
    digests = [prepare(source, tmp_path / str(i)).meta.digest for i, source in enumerate(variants)]
    assert len(set(digests)) == len(variants)


# pixels


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"])
@pytest.mark.parametrize("channels", [None, 1, 3])
def test_modes_become_grey_or_colour_as_pillow_converts_them(mode, channels):
    image = Image.fromarray(random_images(1, 6, 4, 3)[0]).convert(mode)
    grey = channels == 1 or (channels is None and mode in ("1", "L", "LA"))
    pixels = decode(image, None, channels)
    assert pixels.shape == ((1, 6, 4) if grey else (3, 6, 4))
    expected = np.asarray(image.convert("L" if grey else "RGB"))
    assert_array_equal(pixels, expected[None] if grey else np.moveaxis(expected, -1, 0))


def test_a_smaller_image_gets_a_black_border():
    """As 5-Datasets' images of 28 pixels; a larger one is resized, also where only one side is larger."""
    picture = np.full((28, 28), 7, np.uint8)
    padded = decode(Image.fromarray(picture), (32, 32), 3, "pad")
    assert_array_equal(padded, np.pad(np.broadcast_to(picture, (3, 28, 28)), ((0, 0), (2, 2), (2, 2))))
    for shape in ((40, 40), (28, 40)):
        larger = Image.fromarray(random_images(1, *shape, 3)[0])
        assert_array_equal(decode(larger, (32, 32), 3, "pad"), decode(larger, (32, 32), 3))


def test_images_are_squashed_to_the_size():
    picture = np.zeros((8, 4), np.uint8)
    picture[4:] = 200
    pixels = decode(Image.fromarray(picture), (4, 4), None)
    assert pixels.shape == (1, 4, 4)
    assert (pixels[0, 0] == 0).all()
    assert (pixels[0, 3] == 200).all()


@pytest.mark.parametrize("depth", [np.uint16, np.int32, np.float32])
def test_more_than_eight_bits_are_refused_rather_than_clipped(depth):
    with pytest.raises(ValueError, match="more than 8 bits"):
        decode(Image.fromarray(np.full((2, 2), 1000, depth)), None, None)


def test_absurd_dimensions_are_refused_before_decoding():
    with pytest.raises(ValueError, match="20000 x 20000 pixels are too many"):
        decode(SimpleNamespace(width=20000, height=20000), (32, 32), 3)


# what cannot be used


@pytest.fixture
def bad_tree(tmp_path):
    """Ten good pictures, and of everything bad something."""
    root = tmp_path / "raw"
    for name in ("ant", "cow", "dog"):
        for i in range(4):
            save(root / name / f"{i}.png", seed=i)
    (root / "bee").mkdir()
    save(root / "emu" / "only.png")
    (root / "emu" / "only.png").write_bytes(b"not a picture")
    os.truncate(root / "cow" / "0.png", (root / "cow" / "0.png").stat().st_size // 2 + 10)
    save(root / "cow" / "4.png", shape=(4, 6))
    save(root / "dog" / "4.png", shape=(4, 4, 3))
    save(root / "dog" / "5.png", shape=(9, 9, 3))
    return root


def test_all_that_is_bad_is_named_in_one_error_with_the_ways_out(bad_tree, tmp_path):
    with pytest.raises(UserError) as refused:
        prepare(tree(bad_tree), tmp_path / "prepared")
    text = re.sub(r"cow/0.png: [^,]*", "cow/0.png: WHY", str(refused.value))
    assert text == (
        "image-folder: "
        "unreadable images: 2 (cow/0.png: WHY, emu/only.png: not an image); "
        "images of another size than most: 2 (cow/4.png: 6 x 4, not 4 x 4, dog/5.png: 9 x 9, not 4 x 4); "
        "images with other channels than most: 2 (dog/4.png: 3, not 1, dog/5.png: 3, not 1); "
        "classes without images to train on: 2 (bee, emu), of 16 images. "
        "Set data.skip_bad: true to leave them out, or data.size to resize all images, "
        "or data.channels to make all grey (1) or coloured (3)."
    )
    assert list(tmp_path.iterdir()) == [bad_tree]


def test_what_is_bad_can_be_left_out_and_is_counted(bad_tree, tmp_path):
    prepared = prepare(tree(bad_tree, skip_bad=True), tmp_path / "prepared")
    assert prepared.meta.classes == ("ant", "cow", "dog")
    assert prepared.meta.skipped == 5
    assert prepared.samples["sample"].to_list() == list(range(11))
    assert prepared.samples["label"].to_list() == [0] * 4 + [1] * 3 + [2] * 4
    for image, origin in zip(prepared.array, prepared.samples["origin"], strict=True):
        assert_array_equal(image[0], np.asarray(Image.open(bad_tree / origin)))
    prepared.verify()


def test_size_and_channels_make_mixed_images_alike(bad_tree, tmp_path):
    for broken in ("cow/0.png", "emu", "bee"):
        path = bad_tree / broken
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(
        UserError, match=r"channels than most: 2 .* Set data\.skip_bad: true .*, or data\.channels"
    ) as message:
        prepare(tree(bad_tree, size=5), tmp_path / "prepared")
    assert "data.size" not in str(message.value)
    prepared = prepare(tree(bad_tree, size=5, channels=3), tmp_path / "prepared")
    assert prepared.array.shape == (14, 3, 5, 5)
    assert prepared.meta.skipped == 0


def test_many_bad_images_are_counted_and_the_first_named(tmp_path):
    for i in range(100, 160):
        save(tmp_path / "raw" / "a" / f"{i}.png")
    for i in range(100, 125):
        (tmp_path / "raw" / "a" / f"{i}.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"unreadable images: 25 \(a/100.png: .*, a/119.png: [^,]*, \.\.\.\)"):
        prepare(tree(tmp_path / "raw"), tmp_path / "prepared")


def test_skip_bad_does_not_leave_out_most_of_a_set(tmp_path):
    for i in range(9):
        save(tmp_path / "raw" / "a" / f"{i}.png", shape=(4 + i % 3, 4))
    with pytest.raises(UserError, match=r"another size than most: 6 .* Set data\.size to resize all images\.$"):
        prepare(tree(tmp_path / "raw", skip_bad=True), tmp_path / "prepared")


def test_a_class_that_is_only_in_the_test_set_is_named(tmp_path):
    for name in ("train/a/0.png", "train/b/0.png", "test/a/0.png", "test/images/0.png"):
        save(tmp_path / "raw" / name)
    with pytest.raises(UserError, match=r"classes without images to train on: 1 \(images\)"):
        prepare(tree(tmp_path / "raw"), tmp_path / "prepared")
    prepared = prepare(tree(tmp_path / "raw", skip_bad=True), tmp_path / "prepared")
    assert (prepared.meta.classes, len(prepared.samples), prepared.meta.skipped) == (("a", "b"), 3, 1)


def test_an_empty_domain_is_named_and_domains_are_numbered_anew_without_it(tmp_path):
    for name in ("art/a/0.png", "photo/a/0.png", "photo/a/1.png"):
        save(tmp_path / "raw" / name)
    (tmp_path / "raw" / "art" / "a" / "0.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"domains without images: 1 \(art\)"):
        prepare(tree(tmp_path / "raw", domains=True), tmp_path / "prepared")
    prepared = prepare(tree(tmp_path / "raw", domains=True, skip_bad=True), tmp_path / "prepared")
    assert (prepared.meta.domains, prepared.samples["domain"].to_list()) == (("photo",), [0, 0])


def test_a_decompression_bomb_is_one_more_unreadable_image(tmp_path):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    for i in range(3):
        save(tmp_path / "raw" / "a" / f"{i}.png")
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    (tmp_path / "raw" / "a" / "bomb.png").write_bytes(bomb)
    with pytest.raises(UserError, match=r"unreadable images: 1 \(a/bomb.png: .*3600000000 pixels.*\)"):
        prepare(tree(tmp_path / "raw"), tmp_path / "prepared")


def test_a_source_that_holds_nothing_usable_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no samples"):
        prepare(small(0), tmp_path / "prepared")
    (tmp_path / "raw" / "a").mkdir(parents=True)
    (tmp_path / "raw" / "a" / "0.png").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"none of 1 samples tried can be read \(a/0.png: not an image\)"):
        prepare(tree(tmp_path / "raw", skip_bad=True), tmp_path / "prepared")


@pytest.mark.parametrize("name", ["mean", "std"])
def test_normalisation_needs_a_number_for_each_channel(tmp_path, name):
    with pytest.raises(UserError, match=rf"data\.{name} has 2 numbers. Right: one for all channels, or 3, one each"):
        prepare(small(**{name: (0.1, 0.2)}), tmp_path / "prepared")


# the folder


def test_images_that_do_not_fit_on_the_disk_are_refused_before_any_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(100))
    with pytest.raises(UserError, match=r"6 images of 3 x 4 x 5 take 0\.0 GB, and 0\.0 GB are free. Set data\.size"):
        prepare(small(), tmp_path / "prepared")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [lambda path: save(path / "holiday.png"), lambda path: path.write_text("mine")])
def test_what_prepare_did_not_write_it_does_not_replace(tmp_path, make):
    make(tmp_path / "prepared")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"Name a"):
        prepare(small(), tmp_path / "prepared")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_name_with_a_line_end_is_told_in_one_line(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "tree" / name).mkdir(parents=True)
        (tmp_path / "tree" / name / "of\ntwo lines.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"of�two lines\.png: not an image") as message:
        prepare(tree(tmp_path, folder="tree"), tmp_path / "prepared")
    assert "\n" not in str(message.value)


def test_a_failure_leaves_the_former_folder_and_nothing_else(tmp_path, monkeypatch):
    former = prepare(small(), tmp_path / "prepared").meta.digest
    monkeypatch.setattr(module, "digest", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(small(9), tmp_path / "prepared")
    assert Prepared.open(tmp_path / "prepared").meta.digest == former
    assert [path.name for path in tmp_path.iterdir()] == ["prepared"]


def test_a_killed_run_leaves_the_former_folder_and_the_next_run_clears_up(tmp_path):
    former = prepare(small(), tmp_path / "prepared").meta.digest
    program = f"""
import os, signal, sys
from fclmodels.data import prepare
from fclmodels.data.sources.digits import Digits
prepare.digest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
prepare.prepare(Digits(Digits.Settings()), {str(tmp_path / "prepared")!r})
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert Prepared.open(tmp_path / "prepared").meta.digest == former
    assert len(list(tmp_path.iterdir())) == 2
    prepare(small(9), tmp_path / "prepared").verify()
    assert [path.name for path in tmp_path.iterdir()] == ["prepared"]


def shorten(path):
    os.truncate(path, path.stat().st_size - 9)


def edit(path, **facts):
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("meta.json", Path.unlink),
        ("meta.json", shorten),
        ("meta.json", lambda path: edit(path, format=2)),
        ("meta.json", lambda path: edit(path, surprise=1)),
        ("images.npy", Path.unlink),
        ("images.npy", shorten),
        ("images.npy", lambda path: path.write_bytes(b"")),
        ("images.npy", lambda path: np.save(path, np.zeros((5, 3, 4, 5), np.uint8))),
        ("images.npy", lambda path: np.save(path, np.zeros((6, 3, 4, 5)))),
        ("images.npy", lambda path: np.save(path, np.array([{}] * 6))),
        ("samples.parquet", Path.unlink),
        ("samples.parquet", shorten),
        ("samples.parquet", lambda path: pl.DataFrame({"sample": [1]}).write_parquet(path)),
        ("samples.parquet", lambda path: pl.read_parquet(path).with_columns(origin=pl.lit("a\nb")).write_parquet(path)),
    ],
)
def test_a_damaged_file_is_named_with_the_command_that_makes_it_again(tmp_path, name, damage):
    folder = prepare(small(), tmp_path / "prepared").folder
    damage(folder / name)
    with pytest.raises(UserError, match=rf"{folder / name} .*\. Make it again: fcl prepare\.$") as message:
        Prepared.open(folder)
    assert "\n" not in str(message.value)


def test_a_changed_pixel_is_found_by_verifying(tmp_path):
    prepared = prepare(small(), tmp_path / "prepared")
    with open(prepared.folder / "images.npy", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([prepared.array[-1, -1, -1, -1] ^ 1]))
    with pytest.raises(UserError, match=r"does not match its digest .* fcl prepare"):
        Prepared.open(prepared.folder).verify()


# real data


@pytest.fixture
def real():
    if "FCL_REALDATA" not in os.environ:
        pytest.skip("FCL_REALDATA does not name the folder of real data sets")
    return Path(os.environ["FCL_REALDATA"])


def channel_means(images):
    return images.mean(axis=(0, 2, 3), dtype=np.float64) / 255


@pytest.mark.realdata
def test_cifar100_has_the_mean_that_everyone_uses(real, tmp_path):
    prepared = prepare(tree(real, folder="cifar100"), tmp_path / "prepared")
    train = prepared.samples.filter(official="train")
    assert prepared.array.shape == (60_000, 3, 32, 32)
    assert set(train["label"].value_counts()["count"]) == {500}
    assert_allclose(channel_means(prepared.array[train["sample"]]), [0.5071, 0.4865, 0.4409], atol=2e-4)


@pytest.mark.realdata
def test_mnist_has_the_mean_that_everyone_uses(real, tmp_path):
    plugin = find("source", "mnist")
    prepared = prepare(plugin(plugin.Settings(source="mnist", root=real)), tmp_path / "prepared")
    train = prepared.samples.filter(official="train")
    assert prepared.array.shape == (70_000, 1, 28, 28)
    assert train["label"].value_counts().sort("label")["count"].to_list()[:2] == [5923, 6742]
    assert_allclose(channel_means(prepared.array[train["sample"]]), [0.1307], atol=1e-4)


@pytest.mark.realdata
def test_pacs_has_the_published_number_of_images_in_each_domain(real, tmp_path):
    prepared = prepare(tree(real, folder="pacs64", domains=True), tmp_path / "prepared")
    counts = prepared.samples["domain"].value_counts().sort("domain")["count"].to_list()
    assert dict(zip(prepared.meta.domains, counts, strict=True)) == {
        "art_painting": 2048,
        "cartoon": 2344,
        "photo": 1670,
        "sketch": 3929,
    }
    assert len(prepared.meta.classes) == 7
