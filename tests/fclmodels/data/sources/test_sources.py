import bz2
import gzip
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.testing import assert_array_equal
from PIL import Image

from fclmodels.data.sources import torchvision_sets
from fclmodels.data.sources.base import Normalisation, list_arrays
from fclmodels.data.sources.idx import read_idx
from fclmodels.errors import UserError
from fclmodels.plugins import find, load_all


def source(name, root=Path("nowhere"), **settings):
    plugin = find("source", name)
    return plugin(plugin.Settings(source=name, root=root, **settings))


def pixels(catalogue, row):
    return np.asarray(catalogue.open(row))


def write_idx(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes((0, 0, 8, values.ndim)) + np.array(values.shape, ">u4").tobytes()
    with gzip.open(path, "wb") if path.suffix == ".gz" else open(path, "wb") as file:
        file.write(header + values.astype(np.uint8).tobytes())


def write_images(root, *paths, value=7, shape=(2, 2)):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full(shape, value, np.uint8)).save(root / path)


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def random_images(count, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def test_every_source_is_listed_with_a_line():
    listed = load_all("source")
    assert {"digits", "digits-domains", "image-folder", "idx", "sequence"} < set(listed)
    assert {"cifar10", "cifar100", "mnist", "fashion-mnist", "emnist", "svhn", "usps"} < set(listed)
    assert all(plugin.__doc__ and "\n" not in plugin.__doc__ for plugin in listed.values())


# digits


def test_digits_are_scikit_learns_stretched_to_bytes():
    from sklearn.datasets import load_digits

    catalogue, original = source("digits").catalogue(), load_digits()
    assert len(catalogue.samples) == 1797
    assert_array_equal(catalogue.samples["label"], original.target)
    for row in (0, 500, 1796):
        assert_array_equal(pixels(catalogue, row), np.round(original.images[row] / 16 * 255))
    assert catalogue.samples["official"].null_count() == 1797


def test_digits_domains_show_each_digit_four_times_in_one_group():
    catalogue, plain = source("digits-domains").catalogue(), source("digits").catalogue()
    assert catalogue.domains == ("clean", "inverted", "rotated", "noisy")
    count = len(plain.samples)
    assert_array_equal(catalogue.samples["domain"], np.repeat(range(4), count))
    assert_array_equal(catalogue.samples["group"], np.tile(range(count), 4))
    for row in (0, 3, 900):
        digit = pixels(plain, row)
        clean, inverted, rotated, noisy = (pixels(catalogue, row + domain * count) for domain in range(4))
        assert_array_equal(clean, digit)
        assert_array_equal(inverted, 255 - digit)
        assert_array_equal(rotated, digit.T[::-1])
        assert_array_equal(noisy[digit >= 128], digit[digit >= 128])
        assert len(np.unique(noisy[digit == 0])) > 10
        labels = catalogue.samples["label"][row::count]
        assert set(labels) == {plain.samples["label"][row]}


def test_the_noise_of_digits_domains_is_its_own_for_each_digit_and_the_same_each_time():
    one, two = source("digits-domains").catalogue(), source("digits-domains").catalogue()
    noisy = [pixels(one, row) for row in range(3 * 1797, 3 * 1797 + 20)]
    assert_array_equal(noisy, [pixels(two, row) for row in range(3 * 1797, 3 * 1797 + 20)])
    assert len({image[:, 0].tobytes() for image in noisy}) == 20


# idx


@given(values=arrays(np.uint8, array_shapes(max_dims=4, max_side=5)))
def test_idx_files_are_read_as_they_were_written(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("idx")
    write_idx(folder / "plain", values)
    write_idx(folder / "packed.gz", values)
    assert_array_equal(read_idx(folder / "plain"), values)
    assert_array_equal(read_idx(folder / "packed"), values)


def test_idx_pairs_become_official_splits_and_labels_are_the_numbers_in_the_files(tmp_path):
    train, test = random_images(3, 4, 5), random_images(2, 4, 5, seed=1)
    write_idx(tmp_path / "train-images-idx3-ubyte", train)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.array([7, 2, 9]))
    write_idx(tmp_path / "t10k-images-idx3-ubyte.gz", test)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.array([9, 2]))
    catalogue = source("idx", tmp_path).catalogue()
    assert catalogue.classes == ("2", "7", "9")
    assert catalogue.samples["label"].to_list() == [1, 0, 2, 2, 0]
    assert catalogue.samples["official"].to_list() == ["train"] * 3 + ["test"] * 2
    assert_array_equal([pixels(catalogue, row) for row in range(5)], np.concatenate([train, test]))


def test_idx_without_test_files_has_no_official_split(tmp_path):
    write_idx(tmp_path / "x", random_images(2, 3, 3, 3))
    write_idx(tmp_path / "y", np.array([0, 1]))
    catalogue = source("idx", tmp_path, images="x", labels="y", test_images=None, test_labels=None).catalogue()
    assert catalogue.samples["official"].to_list() == [None, None]
    assert catalogue.open(0).mode == "RGB"


def unlabelled(root):
    return source("idx", root, images="x", labels="y", test_images=None, test_labels=None).catalogue()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "x is missing, and so is x.gz"),
        (b"", "x is not an idx file of unsigned bytes"),
        (b"\x89PNG", "x is not an idx file of unsigned bytes (it starts with 89 50 4e 47)"),
        (b"\0\0\x08\x03\0", "x cannot be read"),
        (
            b"\0\0\x08\x03" + b"\xff" * 12,
            "x says that it holds 4294967295 x 4294967295 x 4294967295 values. That is too",
        ),
        (b"\0\0\x08\x01" + b"\0\0\0\x03" + b"abcd", "x is cut short or too long for its 3 values"),
        (b"\0\0\x08\x01" + b"\0\0\0\x02" + b"ab", "x holds values of shape (2,)"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path, content, says):
    write_idx(tmp_path / "y", np.array([0, 1]))
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserError, match=re.escape(says)):
        unlabelled(tmp_path)


def test_a_packed_idx_file_that_is_cut_short_is_named(tmp_path):
    write_idx(tmp_path / "x.gz", random_images(2, 3, 3))
    cut(tmp_path / "x.gz")
    with pytest.raises(UserError, match=r"x.gz cannot be read .*Get the file again"):
        unlabelled(tmp_path)


def test_idx_images_and_labels_must_be_as_many(tmp_path):
    write_idx(tmp_path / "x", random_images(2, 3, 3))
    write_idx(tmp_path / "y", np.array([0, 1, 2]))
    with pytest.raises(UserError, match=r"y holds .3,. labels for the 2 images of x"):
        unlabelled(tmp_path)


def test_idx_test_images_need_their_labels(tmp_path):
    with pytest.raises(UserError, match=r"data\.test_images and data.test_labels go together"):
        source("idx", tmp_path, test_labels=None).catalogue()


# image-folder


def of(catalogue):
    """The rows of a catalogue in words."""
    columns = catalogue.samples.select("official", "domain", "label", "origin").rows()
    return [
        (split, catalogue.domains[domain], catalogue.classes[label], origin) for split, domain, label, origin in columns
    ]


def test_a_plain_tree_has_labels_in_the_order_of_class_names(tmp_path):
    write_images(tmp_path, "dog/2.png", "dog/1.png", "Zebra/a.png", "cat/deep/er/x.BMP")
    (tmp_path / "dog" / "notes.txt").write_text("not a sample")
    (tmp_path / ".cache").mkdir()
    catalogue = source("image-folder", tmp_path).catalogue()
    assert catalogue.classes == ("Zebra", "cat", "dog")
    assert of(catalogue) == [
        (None, "image-folder", "Zebra", "Zebra/a.png"),
        (None, "image-folder", "cat", "cat/deep/er/x.BMP"),
        (None, "image-folder", "dog", "dog/1.png"),
        (None, "image-folder", "dog", "dog/2.png"),
    ]
    assert_array_equal(pixels(catalogue, 2), np.full((2, 2), 7))


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_train_and_test_folders_are_the_official_split(tmp_path, held_out):
    write_images(tmp_path, "set/train/b/1.png", f"set/{held_out}/a/2.png", "set/train/a/3.png")
    assert of(source("image-folder", tmp_path, folder="set").catalogue()) == [
        ("train", "image-folder", "a", "train/a/3.png"),
        ("train", "image-folder", "b", "train/b/1.png"),
        ("test", "image-folder", "a", f"{held_out}/a/2.png"),
    ]


def test_a_class_may_be_called_train(tmp_path):
    write_images(tmp_path, "bus/1.png", "train/1.png")
    assert source("image-folder", tmp_path).catalogue().classes == ("bus", "train")


def test_domains_stand_above_classes(tmp_path):
    write_images(tmp_path, "sketch/dog/1.png", "photo/dog/2.png", "photo/cat/3.png")
    catalogue = source("image-folder", tmp_path, domains=True).catalogue()
    assert (catalogue.domains, catalogue.classes) == (("photo", "sketch"), ("cat", "dog"))
    assert of(catalogue) == [
        (None, "photo", "cat", "photo/cat/3.png"),
        (None, "photo", "dog", "photo/dog/2.png"),
        (None, "sketch", "dog", "sketch/dog/1.png"),
    ]


def test_domains_may_have_an_official_split_above_them(tmp_path):
    write_images(tmp_path, "train/photo/dog/1.png", "test/photo/dog/2.png", "test/sketch/dog/3.png")
    rows = of(source("image-folder", tmp_path, domains=True).catalogue())
    assert [row[:2] for row in rows] == [("train", "photo"), ("test", "photo"), ("test", "sketch")]


def test_a_file_name_that_is_no_utf8_can_be_a_sample(tmp_path):
    write_images(tmp_path, "a/1.png")
    os.rename(tmp_path / "a/1.png", os.fsencode(tmp_path) + b"/a/\xff.png")
    catalogue = source("image-folder", tmp_path).catalogue()
    assert catalogue.samples["origin"].to_list() == ["a/\ufffd.png"]
    assert_array_equal(pixels(catalogue, 0), np.full((2, 2), 7))


def test_impossible_trees_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"data\.folder: .*/none is not a folder"):
        source("image-folder", tmp_path, folder="none").catalogue()
    with pytest.raises(UserError, match="holds no images in class folders"):
        source("image-folder", tmp_path).catalogue()
    write_images(tmp_path, "train/a/1.png", "test/a/1.png", "val/a/1.png")
    with pytest.raises(UserError, match=r"holds test, train, val\. Right: train and test, or train and val alone"):
        source("image-folder", tmp_path).catalogue()


# torchvision's


def test_mnist_and_emnist_are_read_where_torchvision_puts_them(tmp_path):
    train, test = random_images(3, 4, 4), random_images(2, 4, 4, seed=1)
    for prefix, first in (("MNIST/raw/", 0), ("EMNIST/raw/emnist-letters-", 1)):
        for split, other, images, labels in (("train", "train", train, [0, 9, 4]), ("t10k", "test", test, [9, 1])):
            name = split if first == 0 else other
            write_idx(tmp_path / f"{prefix}{name}-images-idx3-ubyte", images)
            write_idx(tmp_path / f"{prefix}{name}-labels-idx1-ubyte", np.array(labels) + first)

    mnist = source("mnist", tmp_path).catalogue()
    assert mnist.classes == tuple("0123456789")
    assert mnist.samples["label"].to_list() == [0, 9, 4, 9, 1]
    assert mnist.samples["official"].to_list() == ["train"] * 3 + ["test"] * 2
    assert_array_equal([pixels(mnist, row) for row in range(5)], np.concatenate([train, test]))

    letters = source("emnist", tmp_path, split="letters").catalogue()
    assert letters.classes == tuple("abcdefghijklmnopqrstuvwxyz")
    assert letters.samples["label"].to_list() == [0, 9, 4, 9, 1]
    assert_array_equal(pixels(letters, 4), test[1].T)


def test_usps_is_read_and_a_file_that_is_cut_short_is_named(tmp_path):
    row = " ".join(f"{i}:{value}" for i, value in enumerate([-1.0, 1.0] * 128, start=1))
    for name in ("usps.bz2", "usps.t.bz2"):
        (tmp_path / name).write_bytes(bz2.compress(f"3 {row}\n10 {row}\n".encode()))
    catalogue = source("usps", tmp_path).catalogue()
    assert catalogue.samples["label"].to_list() == [2, 9, 2, 9]
    assert_array_equal(pixels(catalogue, 3), np.tile([0, 255], (16, 8)))
    cut(tmp_path / "usps.t.bz2")
    with pytest.raises(
        UserError, match=r"usps: neither found nor downloaded .*Put usps.bz2 and usps.t.bz2 of .* into "
    ):
        source("usps", tmp_path).catalogue()


class Opened:
    """A data set as torchvision's classes give it."""

    def __init__(self, root, download, train=None, split=None):
        test = split == "test" or train is False
        self.classes = ["a", "b"]
        self.data = random_images(3 + test, 4, 4, 3)
        self.targets = self.labels = [0, 1, 0, 1][: 3 + test]


class OpenedSvhn(Opened):
    def __init__(self, root, download, split):
        super().__init__(root, download, split=split)
        self.data = self.data.transpose(0, 3, 1, 2)


def install(monkeypatch, **datasets):
    monkeypatch.setattr(
        torchvision_sets, "import_torchvision", lambda: SimpleNamespace(datasets=SimpleNamespace(**datasets))
    )


@pytest.mark.parametrize(("name", "dataset"), [("cifar10", "CIFAR10"), ("cifar100", "CIFAR100"), ("svhn", "SVHN")])
def test_colour_sets_keep_their_official_split(monkeypatch, name, dataset):
    install(monkeypatch, **{dataset: OpenedSvhn if name == "svhn" else Opened})
    catalogue = source(name).catalogue()
    assert catalogue.samples["official"].to_list() == ["train"] * 3 + ["test"] * 4
    assert catalogue.samples["label"].to_list() == [0, 1, 0, 0, 1, 0, 1]
    assert_array_equal(pixels(catalogue, 4), random_images(4, 4, 4, 3)[1])
    assert len(catalogue.classes) == (10 if name == "svhn" else 2)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion-mnist", "emnist", "svhn", "usps"])
def test_without_a_network_the_error_says_where_to_put_the_files(monkeypatch, tmp_path, name):
    def unreachable(*_, **__):
        raise RuntimeError("Error downloading:\nTried a mirror, got:\n<urlopen error no route>\n")

    source_class = find("source", name)
    install(monkeypatch, **{source_class.dataset: unreachable})
    with pytest.raises(UserError) as refused:
        source(name, tmp_path).catalogue()
    text = str(refused.value)
    assert text.startswith(f"{name}: neither found nor downloaded (<urlopen error no route>). Put ")
    assert "http" in text
    assert text.endswith(f"into {tmp_path / source_class.folder}.")
    assert "\n" not in text


def test_without_a_network_no_folder_is_left_that_was_not_there(monkeypatch, tmp_path):
    def unreachable(root, **_):
        (root / "MNIST" / "raw").mkdir(parents=True)
        raise RuntimeError("no route")

    install(monkeypatch, MNIST=unreachable)
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="neither found nor downloaded"):
        source("mnist", tmp_path / "there" / "data" / "raw").catalogue()
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


# sequence


def test_parts_of_a_sequence_are_domains_with_classes_of_their_own(tmp_path):
    write_images(tmp_path, "one/train/x/1.png", "one/test/x/2.png", value=1)
    write_images(tmp_path, "two/y/1.png", "two/x/2.png", value=2, shape=(5, 5, 3))
    parts = [
        {"source": "digits-domains"},
        {"source": "image-folder", "folder": "one", "name": "one"},
        {"source": "image-folder", "folder": "two"},
        {"source": "digits-domains", "name": "again"},
    ]
    catalogue = source("sequence", tmp_path, parts=parts).catalogue()
    assert catalogue.own_label_spaces
    assert catalogue.domains == ("digits-domains", "one", "image-folder", "again")
    digits = [f"digits-domains:{digit}" for digit in range(10)]
    again = [f"again:{digit}" for digit in range(10)]
    assert catalogue.classes == (*digits, "one:x", "image-folder:x", "image-folder:y", *again)
    count = 4 * 1797
    assert of(catalogue)[count : count + 4] == [
        ("train", "one", "one:x", "one/train/x/1.png"),
        ("test", "one", "one:x", "one/test/x/2.png"),
        (None, "image-folder", "image-folder:x", "image-folder/x/2.png"),
        (None, "image-folder", "image-folder:y", "image-folder/y/1.png"),
    ]
    assert pixels(catalogue, count + 1).tolist() == [[1, 1], [1, 1]]
    assert catalogue.open(count + 2).size == (5, 5)
    assert_array_equal(pixels(catalogue, 5), pixels(catalogue, count + 4 + 5))
    groups = catalogue.samples["group"]
    assert groups[count : count + 4].null_count() == 4
    assert set(groups[:count]) & set(groups[count + 4 :]) == set()


def test_parts_have_their_own_mean_and_std_or_those_of_all(tmp_path):
    write_images(tmp_path, "one/x/1.png", "two/y/1.png", value=1)
    parts = [{"source": "image-folder", "folder": name, "name": name} for name in ("one", "two")]
    assert source("sequence", tmp_path, parts=parts).catalogue().normalisations is None
    parts[1] |= {"mean": [0.1], "std": [0.2]}
    normalisations = source("sequence", tmp_path, parts=parts, mean=[0.4]).catalogue().normalisations
    assert normalisations == (Normalisation((0.4,), (0.5,)), Normalisation((0.1,), (0.2,)))


def test_parts_that_share_their_labels_are_domains_of_the_same_classes(tmp_path):
    """By name, whatever number a part gives it."""
    write_images(tmp_path, "one/b/1.png", "one/a/2.png", value=1)
    folder = {"source": "image-folder", "folder": "one"}
    arrays = list_arrays("arrays", ("b", "a"), {None: (np.zeros((2, 4, 4), np.uint8), np.array([0, 1]))})
    made = source("sequence", tmp_path, label_space="shared", parts=[folder, folder | {"name": "again"}])
    made.parts[1].catalogue = lambda: arrays
    catalogue = made.catalogue()
    assert not catalogue.own_label_spaces
    assert (catalogue.classes, catalogue.domains) == (("a", "b"), ("image-folder", "again"))
    assert catalogue.samples.select("label", "domain").rows() == [(0, 0), (1, 0), (1, 1), (0, 1)]


def test_parts_with_different_classes_share_no_labels(tmp_path):
    write_images(tmp_path, "one/0/1.png", value=1)
    parts = [{"source": "digits"}, {"source": "image-folder", "folder": "one"}]
    with pytest.raises(UserError, match="label_space: shared needs the same classes in each part; 1 is not in both"):
        source("sequence", tmp_path, label_space="shared", parts=parts).catalogue()


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([], "data.parts is empty"),
        ([{"folder": "x"}], "data.parts.0 names no source"),
        ([{"source": "digits"}, {"source": "digit"}], "digit is not a source. Did you mean digits?"),
        ([{"source": "digits"}, {"source": "digits"}], "digits is there more than once"),
        ([{"source": "digits", "size": 8}], "data.parts.0: size is common to all parts"),
        ([{"source": "image-folder", "foldr": "x"}], r"data.parts.0.foldr: .*Did you mean folder\?"),
        ([{"source": "emnist", "split": "letter"}], "data.parts.0.split: Input should be 'balanced'"),
    ],
)
def test_impossible_sequences_are_refused(parts, says):
    with pytest.raises(UserError, match=says):
        source("sequence", parts=parts)
