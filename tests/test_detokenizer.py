"""Tokens to text while they come: the pieces are the text, and none has to be taken back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from minikv.engine import detokenizer as module
from minikv.engine.detokenizer import IncrementalDetokenizer
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


def stream(tokenizer, token_ids, stop=(), prompt=()):
    """(pieces, detokenizer) as the engine makes them: one token at a time."""
    detokenizer, pieces = IncrementalDetokenizer(tokenizer, stop, prompt), []
    for token_id in token_ids:
        if detokenizer.append([token_id]):
            break
        pieces.append(detokenizer.next_piece(final=False))
    detokenizer.finish()
    pieces.append(detokenizer.next_piece(final=True))
    return pieces, detokenizer


def decode(tokenizer, token_ids):
    """At once; no spaces are taken away before a full stop or comma."""
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def check_pieces(tokenizer, token_ids, prompt=()):
    """The text is what the tokens add to the prompt's; of a character that begins in the prompt
    they add all."""
    pieces, detokenizer = stream(tokenizer, token_ids, prompt=prompt)
    before, whole = decode(tokenizer, prompt), decode(tokenizer, [*prompt, *token_ids])
    shared = max(n for n in range(len(before) + 1) if whole.startswith(before[:n]))
    expected = whole[shared:]
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


# -- random vocabularies ------------------------------------------------------------------------

PIECES = st.lists(
    st.text(st.sampled_from("ab.,'n▁ é日#\ufffd🎉"), min_size=1, max_size=3), min_size=4, max_size=8
)
BYTES = st.lists(st.binary(min_size=1, max_size=3), min_size=4, max_size=8)
BYTE_OF = {byte: token for token, byte in TINY.get_vocab().items() if byte < 256}
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in (*"a🎉日\n".encode(), 0xFF)]


def bpe(pieces, decoder):
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    return backend


def unigram(pieces, decoder):
    backend = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    backend.decoder = decoder
    return backend


def word_piece(pieces, clean_up):
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordPiece(vocab, unk_token=pieces[0]))
    backend.decoder = decoders.WordPiece("##", clean_up)
    return backend


def llama_2():
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])


def some_with(before, after):
    """Some pieces with one of these before or after them; no two are the same."""
    affixes = st.lists(st.booleans(), min_size=8, max_size=8)
    return st.builds(
        lambda pieces, with_affix: unique(
            before + piece + after if affixed else piece
            for piece, affixed in zip(pieces, with_affix, strict=False)
        ),
        PIECES, affixes,
    )  # fmt: skip


def unique(pieces):
    return list(dict.fromkeys(pieces))


BACKENDS = {
    "BPE, bytes": st.builds(
        lambda texts: bpe(
            unique("".join(BYTE_OF[byte] for byte in text) for text in texts), decoders.ByteLevel()
        ),
        BYTES,
    ),
    "BPE, suffix": st.builds(
        lambda pieces: bpe(pieces, decoders.BPEDecoder("</w>")), some_with("", "</w>")
    ),
    "BPE, plain": st.builds(lambda pieces: bpe(unique(pieces), None), PIECES),
    "BPE, Llama 2": st.builds(lambda pieces: bpe(unique(pieces + BYTE_TOKENS), llama_2()), PIECES),
    "Unigram": st.builds(
        lambda pieces, scheme: unigram(unique(pieces), decoders.Metaspace(prepend_scheme=scheme)),
        PIECES, st.sampled_from(["always", "first", "never"]),
    ),
    "Unigram, bytes": st.builds(
        lambda pieces: unigram(
            unique(pieces + BYTE_TOKENS),
            decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        ),
        PIECES,
    ),
    "WordPiece": st.builds(word_piece, some_with("##", ""), st.booleans()),
}  # fmt: skip


@pytest.mark.parametrize("tail", [1, module.TAIL])
@pytest.mark.parametrize("kind", BACKENDS)
def test_pieces_of_any_tokens_of_any_vocabulary_are_their_text(kind, tail, monkeypatch):
    """Special and other added tokens among them, and ids that only the model knows."""
    monkeypatch.setattr(module, "TAIL", tail)

    @settings(SETTINGS, max_examples=120)
    @given(st.data(), BACKENDS[kind], st.booleans())
    def check(data, backend, clean_up):
        backend.add_tokens([AddedToken("[x y]", special=False), AddedToken("▁.", special=False)])
        backend.add_special_tokens(["<s>", "</s>"])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            eos_token="</s>",
            clean_up_tokenization_spaces=clean_up,
            clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
        )
        ids = st.lists(st.integers(0, backend.get_vocab_size()), max_size=14)
        check_pieces(tokenizer, data.draw(ids), data.draw(st.just([]) | ids))

    check()


def test_spaces_are_not_cleaned_up():
    backend = unigram(["<unk>", "▁", ".", "▁x"], decoders.Metaspace())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", clean_up_tokenization_spaces=True
    )
    pieces, _ = stream(tokenizer, [1, 1, 2, 3])
    assert "".join(pieces) == " . x"


def test_a_run_of_bytes_is_shown_as_it_ends_but_searched_as_it_comes():
    """`\\n` is a byte in Llama 2's vocabulary: a stop string of it must not cost a token more."""
    backend = bpe(["a", *BYTE_TOKENS], llama_2())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    newline, no_utf8 = tokenizer.convert_tokens_to_ids(["<0x0A>", "<0xFF>"])
    assert stream(tokenizer, [0, newline, 0])[0] == ["a", "", "\na", ""]
    assert stream(tokenizer, [0, newline, no_utf8, 0])[0] == ["a", "", "", "\ufffd\ufffda", ""]
    pieces, detokenizer = stream(tokenizer, [0, newline, 0], ["\n"])
    assert (pieces, detokenizer.stopped) == (["a", ""], True)


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
