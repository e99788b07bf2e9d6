"""Data sets of texts: what stands in the files, what is made of it, and what is refused by its line."""

import shutil

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from fclmodels.data.prepare import Prepared, prepare
from fclmodels.data.tokens import Tokenizer
from fclmodels.errors import UserError
from fclmodels.plugins import find

SENTENCES = {"name": "films", "train": "films.tsv", "text": ["sentence"]}
PAIRS = {"name": "pairs", "train": "pairs.tsv", "test": "held.tsv", "text": ["first", "second"], "label": "same"}


@pytest.fixture
def root(tmp_path):
    """Two data sets as GLUE has them: the byte-order mark and the unmatched quotes too."""
    files = {
        "films.tsv": 'sentence\tlabel\nthe film was good\tgood\nbad " plot\tbad\n\nnot good\tbad\n',
        "pairs.tsv": "\ufeffid\tfirst\tsecond\tsame\r\n7\tthe film\ta film\tyes\r\n8\twarm\tcold\tno\r\n",
        "held.tsv": 'id\tfirst\tsecond\tsame\n1\t"warm"\tnot cold\tyes',
    }
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode())
    return tmp_path


@pytest.fixture
def source(encoder, root):
    plugin = find("source", "tsv")

    def make(*parts, **settings):
        return plugin(plugin.Settings(**{"root": root, "tokenizer": encoder, "length": 12, "parts": parts} | settings))

    return make


def append(path, text):
    path.write_bytes(path.read_bytes() + text)


def test_each_sample_is_the_tokens_of_its_texts(source, encoder, tmp_path):
    prepared = prepare(source(SENTENCES, PAIRS), tmp_path / "prepared")
    tokenizer = Tokenizer(encoder, 12)
    texts = [
        *(["the film was good"], ['bad " plot'], ["not good"]),
        *(["the film", "a film"], ["warm", "cold"], ['"warm"', "not cold"]),
    ]
    assert_array_equal(prepared.array, np.stack([tokenizer(of) for of in texts]))
    assert prepared.array.dtype == np.int32
    table = prepared.samples
    assert table["origin"].to_list() == [
        f"{n}.tsv:{i}" for n, i in [("films", 2), ("films", 3), ("films", 5), ("pairs", 2), ("pairs", 3), ("held", 2)]
    ]
    assert table["official"].to_list() == [None, None, None, "train", "train", "test"]
    assert table["domain"].to_list() == [0, 0, 0, 1, 1, 1]
    assert prepared.meta.domains == ("films", "pairs")
    assert prepared.meta.tokenizer == tokenizer.digest


def test_each_data_set_has_labels_of_its_own_in_the_order_of_their_names(source):
    catalogue = source(SENTENCES, PAIRS).catalogue()
    assert catalogue.classes == ("films:bad", "films:good", "pairs:no", "pairs:yes")
    assert catalogue.samples["label"].to_list() == [1, 0, 0, 3, 2, 3]
    assert catalogue.own_label_spaces


def test_labels_may_be_shared_in_an_order_that_the_settings_give(source):
    catalogue = source(SENTENCES, PAIRS | {"labels": ["yes", "no"]}, label_space="shared").catalogue()
    assert catalogue.classes == ("bad/yes", "good/no")
    assert catalogue.samples["label"].to_list() == [1, 0, 0, 0, 1, 0]
    assert not catalogue.own_label_spaces


def test_one_data_set_alone_names_its_classes_plainly(source):
    catalogue = source(SENTENCES).catalogue()
    assert (catalogue.classes, catalogue.own_label_spaces) == (("bad", "good"), False)


def test_as_many_train_rows_are_used_as_are_asked_for(source):
    catalogue = source(PAIRS | {"rows": 1, "labels": ["no", "yes"]}).catalogue()
    assert catalogue.samples["origin"].to_list() == ["pairs.tsv:2", "held.tsv:2"]


BAD_ROWS = {
    b"alone\n": "films.tsv:6: 1 columns, not 2",
    b"a film\tgood\tindeed\n": "films.tsv:6: 3 columns, not 2",
    b" \tgood\n": "films.tsv:6: no text in column sentence",
    b"a film\t \n": "films.tsv:6: no label in column label",
    b"a \xff film\tgood\n": "films.tsv:6: not UTF-8",
    b"a film\tgodo\n": 'films.tsv:6: label "godo" is none of bad, good',
}


@pytest.mark.parametrize(("line", "message"), BAD_ROWS.items(), ids=BAD_ROWS.values())
def test_a_bad_row_is_named_by_its_line_and_can_be_left_out(source, root, line, message):
    before = prepare(source(SENTENCES), root / "before")
    append(root / "films.tsv", line)
    part = SENTENCES | {"labels": ["bad", "good"]}
    with pytest.raises(UserError) as refused:
        prepare(source(part), root / "prepared")
    ways = "Set data.skip_bad: true to leave them out."
    assert str(refused.value) == f"tsv: unreadable texts: 1 ({message}), of 4 texts. {ways}"
    prepared = prepare(source(part, skip_bad=True), root / "prepared")
    assert prepared.meta.skipped == 1
    assert prepared.meta.digest == before.meta.digest


REFUSED = {
    "no file": (SENTENCES | {"train": "film.tsv"}, r"/film.tsv cannot be read \(No such file.*\). Put the file there"),
    "no column": (
        SENTENCES | {"text": ["sentense"]},
        r"/films.tsv:1: there is no column sentense. Did you mean sentence",
    ),
    "no label": (PAIRS, r"/pairs.tsv:1: there is no column label. Valid: first, id, same, second."),
    "no row": (SENTENCES | {"train": "empty.tsv"}, r"/empty.tsv holds no row that can be used."),
    "three texts": (PAIRS | {"text": ["id", "first", "second"]}, r"^data.parts.0.text: .* at most 2 items"),
    "misspelt": (SENTENCES | {"tests": "held.tsv"}, r"^data.parts.0.tests: .*. Did you mean test\?"),
    "no name": ({"train": "films.tsv", "text": ["sentence"]}, r"^data.parts.0.name: Field required"),
}


@pytest.mark.parametrize(("part", "message"), REFUSED.values(), ids=REFUSED)
def test_a_mistake_is_told_in_one_line(source, root, part, message):
    (root / "empty.tsv").write_text("sentence\tlabel\n")
    with pytest.raises(UserError, match=message) as refused:
        source({k: v for k, v in part.items() if k != "label"}).catalogue()
    assert "\n" not in str(refused.value)


def test_parts_that_do_not_go_together_are_refused(source, root):
    with pytest.raises(UserError, match=r"^data.parts: films is there more than once. Give each a name of its own.$"):
        source(SENTENCES, SENTENCES)
    append(root / "films.tsv", b"a plot\tmixed\n")
    with pytest.raises(
        UserError, match=r"^data.label_space: shared needs as many labels in each part: films has 3, pa"
    ):
        source(SENTENCES, PAIRS, label_space="shared").catalogue()


def test_the_tokenizer_belongs_to_the_datas_identity(source, encoder, root):
    """Even where another one makes the same tokens of these texts."""
    first = prepare(source(SENTENCES), root / "prepared").meta.digest
    shutil.copytree(encoder, root / "other")
    append(root / "other" / "vocab.txt", b"\nwords")
    other = source(SENTENCES, tokenizer=root / "other")
    again = prepare(other, root / "again")
    assert_array_equal(again.array, Prepared.open(root / "prepared").array)
    assert again.meta.digest != first
    assert root / "other" in other.folders


def test_a_sequence_of_images_takes_no_texts(root):
    plugin = find("source", "sequence")
    with pytest.raises(UserError, match=r"^data.parts.0: tsv has no images. Use it as data.source"):
        plugin(plugin.Settings(root=root, parts=({"source": "tsv"},)))


def test_pixels_under_the_name_of_tokens_are_refused(source, root):
    folder = prepare(source(SENTENCES), root / "prepared").folder
    np.save(folder / "tokens.npy", np.zeros((3, 2, 12), np.uint8))
    with pytest.raises(UserError, match=r"tokens.npy holds uint8 \(3, 2, 12\), not int32 \(3, 2, 12\). Make it again"):
        Prepared.open(folder)
