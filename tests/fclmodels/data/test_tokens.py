"""Tokens against what the tokenizer itself makes of the same texts."""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from fclmodels.data.tokens import Tokenizer
from fclmodels.errors import UserError
from fclmodels.optional import transformers

PIECES = ["the", "film", "films", "GOOD", "bad,", "Zürich", "\u00a0", '"']
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=9).map(" ".join)


@pytest.fixture(scope="module")
def own(encoder):
    return transformers.import_transformers().AutoTokenizer.from_pretrained(encoder)


@settings(max_examples=30)
@given(texts=st.lists(TEXTS, min_size=1, max_size=2), length=st.integers(8, 20))
def test_texts_and_pairs_are_encoded_as_by_the_tokenizers_own_call(encoder, own, texts, length):
    expected = own(*texts, padding="max_length", truncation=True, max_length=length)
    ids, which = Tokenizer(encoder, length)(texts)
    assert ids.dtype == which.dtype == np.int32
    assert_array_equal(ids, expected["input_ids"])
    assert_array_equal(which > 0, expected["attention_mask"])
    assert_array_equal(which[which > 0] - 1, np.array(expected["token_type_ids"])[which > 0])


def test_a_pair_by_hand(encoder):
    words = (encoder / "vocab.txt").read_text().split()
    ids, which = Tokenizer(encoder, 10)(["The film", "was unseen ."])
    assert " ".join(words[i] for i in ids) == "[CLS] the film [SEP] was [UNK] . [SEP] [PAD] [PAD]"
    assert which.tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 0, 0]


def test_threads_do_not_disturb_each_other(encoder):
    tokenizer = Tokenizer(encoder, 12)
    texts = [["the " * (i % 12), "bad film"][: 1 + i % 2] for i in range(300)]
    with ThreadPoolExecutor(8) as threads:
        assert_array_equal(np.stack([*threads.map(tokenizer, texts)]), np.stack([*map(tokenizer, texts)]))


def test_the_digest_is_that_of_the_rules_and_of_no_file(encoder, own, tmp_path):
    first = Tokenizer(encoder, 12).digest
    assert Tokenizer(encoder, 20).digest == first
    own.save_pretrained(tmp_path / "other files")
    assert Tokenizer(tmp_path / "other files", 12).digest == first
    shutil.copytree(encoder, tmp_path / "more words")
    with open(tmp_path / "more words" / "vocab.txt", "a") as vocabulary:
        vocabulary.write("\nwords")
    assert Tokenizer(tmp_path / "more words", 12).digest != first


def test_what_holds_no_tokenizer_is_refused(encoder, tmp_path):
    with pytest.raises(UserError, match=r"^data.tokenizer: .*/none is not a folder. Name the one that holds tokenizer"):
        Tokenizer(tmp_path / "none", 12)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(UserError, match=r"^data.tokenizer: .* holds no tokenizer that can be read \(.+\).$"):
        Tokenizer(tmp_path, 12)


def test_without_the_extra_one_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    transformers.import_transformers.cache_clear()
    with pytest.raises(
        UserError, match=r"^texts need the package transformers. Install it: pip install 'fclflow\[text\]'.$"
    ):
        Tokenizer(tmp_path, 12)
