"""Tokens to text while they come: the pieces are the text, and none has to be taken back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from minikv.model.detokenizer import IncrementalDetokenizer
from minikv.model.loader import load
from minikv.model.tiny import tiny_tokenizer

TINY = tiny_tokenizer()
# All of Unicode, with what takes several tokens well represented.
TEXT = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("aé日🎉👨‍👩‍👧🏽🇪🇺\ufffd"))
)
SETTINGS = settings(max_examples=150, deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def smollm2_tokenizer():
    return load("smollm2", dtype="float32").tokenizer


def stream(tokenizer, token_ids, stop=()):
    """(pieces, detokenizer) as the engine makes them: one token at a time."""
    detokenizer, pieces = IncrementalDetokenizer(tokenizer, stop), []
    for token_id in token_ids:
        if detokenizer.append([token_id]):
            break
        pieces.append(detokenizer.next_piece(final=False))
    if not detokenizer.stopped:
        detokenizer.finish()
    pieces.append(detokenizer.next_piece(final=True))
    return pieces, detokenizer


def check_pieces(tokenizer, token_ids):
    pieces, detokenizer = stream(tokenizer, token_ids)
    expected = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces) == detokenizer.text == expected


@SETTINGS
@given(TEXT)
def test_tiny_pieces_are_the_text(text):
    token_ids = TINY(text)["input_ids"]
    check_pieces(TINY, token_ids)
    assert "".join(stream(TINY, token_ids)[0]) == text


@SETTINGS
@given(st.lists(st.integers(0, 258), max_size=40))
def test_tiny_pieces_of_any_tokens_are_their_text(token_ids):
    """Bytes that are no UTF-8 among them, and special tokens."""
    check_pieces(TINY, token_ids)


@pytest.mark.model
def test_smollm2_pieces_are_the_text(smollm2_tokenizer):
    @SETTINGS
    @given(TEXT)
    def check(text):
        check_pieces(smollm2_tokenizer, smollm2_tokenizer(text)["input_ids"])

    check()


@pytest.mark.model
def test_smollm2_pieces_of_any_tokens_are_their_text(smollm2_tokenizer):
    @SETTINGS
    @given(st.lists(st.integers(0, len(smollm2_tokenizer) - 1), max_size=30))
    def check(token_ids):
        check_pieces(smollm2_tokenizer, token_ids)

    check()


def test_pieces_of_a_tokenizer_whose_spaces_depend_on_the_neighbour():
    """As SentencePiece's: a leading space is dropped at the beginning, and only there."""
    vocab = {"▁Hello": 0, "▁wide": 1, "▁": 2, "world": 3, "!": 4, "<0xE2>": 5, "<unk>": 6}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    for token_ids in ([0, 1, 2, 3, 4], [3, 0, 0], [2, 2, 3], [4, 1]):
        check_pieces(tokenizer, token_ids)


def test_a_character_comes_when_it_is_whole():
    detokenizer, pieces = IncrementalDetokenizer(TINY), []
    for byte in "a🎉é".encode():
        detokenizer.append([byte])
        pieces.append(detokenizer.next_piece(final=False))
    assert pieces == ["a", "", "", "", "🎉", "", "é"]


def test_an_incomplete_character_comes_out_marked_at_the_end():
    pieces, detokenizer = stream(TINY, b"ab\xf0\x9f")
    assert "".join(pieces) == detokenizer.text == "ab\ufffd"


def test_several_tokens_at_once_are_as_one_by_one():
    detokenizer = IncrementalDetokenizer(TINY)
    detokenizer.append("Grüße 🎉".encode())
    assert detokenizer.text == "Grüße 🎉"


# -- stop strings -------------------------------------------------------------------------------


def cut(text, stops):
    """Before the stop string that is complete first; of those complete at once, the longest."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


@SETTINGS
@given(
    st.text("abcé🎉", max_size=30), st.lists(st.text("abcé🎉", min_size=1, max_size=4), max_size=3)
)
def test_the_text_ends_before_the_first_stop_string(text, stops):
    pieces, detokenizer = stream(TINY, text.encode(), stops)
    assert detokenizer.text == cut(text, stops)
    assert detokenizer.stopped == any(stop in text for stop in stops)
    assert "".join(pieces) == detokenizer.text  # nothing had to be taken back


@pytest.mark.model
def test_a_stop_string_within_or_across_tokens(smollm2_tokenizer):
    text = "The capital of France is Paris, and the capital of Spain is Madrid."
    token_ids = smollm2_tokenizer(text)["input_ids"]
    assert len(token_ids) < 20
    for start in range(len(text)):
        for length in (1, 2, 7):
            stop = text[start : start + length]
            pieces, detokenizer = stream(smollm2_tokenizer, token_ids, [stop])
            assert "".join(pieces) == detokenizer.text == text[: text.index(stop)]
            assert detokenizer.stopped


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none():
    detokenizer, pieces = IncrementalDetokenizer(TINY, ["END"]), []
    for byte in b"xENEND":
        detokenizer.append([byte])
        pieces.append(detokenizer.next_piece(final=False))
    assert pieces == ["x", "", "", "EN", "", ""]
    assert detokenizer.stopped
    assert detokenizer.text == "xEN"


def test_what_is_held_back_at_the_end_comes():
    pieces, _ = stream(TINY, b"xEN", ["END"])
    assert pieces == ["x", "", "", "EN"]


def test_nothing_is_taken_in_after_a_stop_string():
    detokenizer = IncrementalDetokenizer(TINY, ["b"])
    assert detokenizer.append(b"abc")
    assert detokenizer.append(b"defb")
    assert detokenizer.text == "a"
