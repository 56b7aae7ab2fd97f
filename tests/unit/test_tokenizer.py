"""Bytes as tokens: nothing of a text is lost, and nothing that a model says is an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch_titan.training.tokenizer import ByteTokenizer

ANY_TEXT = st.text(st.characters())  # lone surrogates too, unlike the default of st.text()


@pytest.fixture(scope="module")
def tokenizer():
    return ByteTokenizer.Config().build(tokenizer_path="./no/such/folder")  # as TorchTitan's trainer builds it


@given(text=ANY_TEXT, add_bos=st.booleans(), add_eos=st.booleans())
def test_decode_gives_back_every_text(tokenizer, text, add_bos, add_eos):
    assert tokenizer.decode(tokenizer.encode(text, add_bos=add_bos, add_eos=add_eos)) == text


@given(text=ANY_TEXT)
def test_ids_are_in_the_vocabulary(tokenizer, text):
    assert set(tokenizer.encode(text)) <= set(range(tokenizer.get_vocab_size()))


def test_ids_are_bytes_between_beginning_and_end(tokenizer):
    assert tokenizer.encode("h\u00e9") == [tokenizer.bos_id, 104, 195, 169, tokenizer.eos_id]
    assert tokenizer.encode("h\u00e9", add_bos=False, add_eos=False) == [104, 195, 169]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.get_vocab_size()) == (256, 257, 258)


@given(ids=st.lists(st.integers(0, 2047)))
def test_any_ids_of_a_model_can_be_decoded(tokenizer, ids):
    assert isinstance(tokenizer.decode(ids), str)


def test_ids_that_are_no_bytes_are_dropped(tokenizer):
    assert tokenizer.decode([104, 256, 257, 2047, 105]) == "hi"


def test_cut_characters_become_replacement_characters(tokenizer):
    assert tokenizer.decode([169, 104, 195]) == "\ufffdh\ufffd"
