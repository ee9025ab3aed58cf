"""The text side of `LLM`: where an answer ends, what its text is, and who is told of it."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minikv.engine import LLM
from minikv.model.job import Sample, eos_token_ids
from minikv.model.loader import Loaded, load
from minikv.model.tiny import EOS, tiny_tokenizer
from minikv.request import Request, SamplingParams

MAX_MODEL_LEN = 128


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32", device="cpu")


def new_llm(tiny, tokenizer=None, **options):
    loaded = Loaded(tiny.model, tokenizer or tiny_tokenizer(), tiny.spec)
    return LLM(loaded, num_gpu_blocks_override=64, max_model_len=MAX_MODEL_LEN, **options)


def forced(llm, *answers):
    """Every request samples these tokens instead, by its id: 0, 1, ..."""
    run = llm.runner.run

    def forced_run(scheduled, copies):
        run(scheduled, copies)
        return [
            answers[int(entry.request.request_id)][entry.request.num_output_tokens]
            for entry in scheduled
        ]

    llm.runner.run = forced_run
    return llm


def generate(llm, prompts, **params):
    return llm.generate(prompts, SamplingParams(**params), use_tqdm=False)


def only(outputs):
    [output] = outputs
    [sample] = output.outputs
    return sample.text, sample.finish_reason


def assert_empty(llm):
    llm.manager.check()
    assert not llm.manager.tables
    assert not llm.scheduler.has_unfinished_requests
    assert not llm.has_unfinished_requests()
    assert not (llm._jobs or llm._samples or llm._held)


# -- where an answer ends -----------------------------------------------------------------------


def names(eos_token_id, **others):
    return SimpleNamespace(eos_token_id=eos_token_id, **others)


@pytest.mark.parametrize("generation, config, tokenizer, expected", [
    (0, 0, 2, {0, 2}),  # "<|endoftext|>" and "<|im_end|>"
    ([7, 8], 7, 9, {7, 8, 9}),
    (None, [4, 5], None, {4, 5}),
    (None, None, 3, {3}),
    (None, None, None, set()),
])  # fmt: skip
def test_an_answer_ends_at_the_end_tokens_of_all_three(generation, config, tokenizer, expected):
    text_config = names(config)
    model = SimpleNamespace(
        generation_config=names(generation),
        config=names(None, get_text_config=lambda decoder: text_config),
    )
    assert eos_token_ids(model, names(tokenizer)) == expected
    assert eos_token_ids(model, None) == expected - {tokenizer}
    assert eos_token_ids(object(), names(tokenizer)) == {tokenizer} - {None}


@pytest.mark.parametrize("where", ["generation_config", "config", "tokenizer"])
def test_an_end_token_that_only_one_of_them_names_ends_the_answer(tiny, monkeypatch, where):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<pad>" if where == "tokenizer" else None
    for other in ("generation_config", "config"):
        of_this = 258 if other == where else 0
        monkeypatch.setattr(getattr(tiny.model, other), "eos_token_id", of_this)
    llm = forced(new_llm(tiny, tokenizer), [*b"ab", 258, *b"<more>"])
    assert only(generate(llm, "x", max_tokens=6)) == ("ab", "stop")
    llm = forced(new_llm(tiny, tokenizer), [*b"ab", 258, *b"<more>"])
    assert only(generate(llm, "x", max_tokens=5, ignore_eos=True)) == ("ab<m", "length")


STOPS = [
    ("<eos>", [*b"ab", EOS, *b"cd"], "ab"),
    ("b<eos>", [*b"ab", EOS, *b"cd"], "a"),
    ("b<eos>c", [*b"ab", EOS, *b"cd"], "a"),
    ("<eos>cd", [*b"ab", EOS, *b"cd"], "ab"),
    ("<eos><pad>", [*b"ab", EOS, EOS, 258, *b"cd"], "ab"),
    ("bc", [*b"ab", EOS, *b"cd"], "a"),  # what is left out is not in the way
    ("<eos>", [*b"<eos>x"], ""),  # nor need it be one token
    ("é<eos>", ["é".encode()[0], EOS, "é".encode()[1], 258, *"é".encode(), EOS, 65], "é"),
]


@pytest.mark.parametrize("stop, answer, text", STOPS, ids=[s for s, *_ in STOPS])
def test_a_stop_string_with_special_tokens_ends_the_answer_there(tiny, stop, answer, text):
    """`<eos>` would end it anyway, so it is ignored here."""
    params = {"max_tokens": len(answer), "stop": ["never", stop], "ignore_eos": True}
    llm = forced(new_llm(tiny), answer, answer)
    assert only(generate(llm, "x", **params)) == (text, "stop")
    pieces = list(llm.stream("x", SamplingParams(**params)))
    assert "".join(pieces) == text  # nothing had to be taken back
    assert_empty(llm)


def test_what_a_special_token_might_have_ended_is_given_when_it_does_not_come(tiny):
    llm = forced(new_llm(tiny), [*b"abab", 258, *b"c"])
    stream = llm.stream("x", SamplingParams(max_tokens=6, stop="b<eos>", ignore_eos=True))
    assert list(stream) == ["a", "ba", "bc"]


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("stop", ["\ufffd", "b\ufffd"])
def test_a_stop_string_found_when_the_last_half_character_comes_out(tiny, stop, batching):
    llm = forced(new_llm(tiny, batching=batching), b"ab\xf0\x9f", b"ab\xf0\x9f")
    params = {"max_tokens": 4, "stop": stop}
    assert only(generate(llm, "x", **params)) == ("ab\ufffd".partition(stop)[0], "stop")
    assert "".join(llm.stream("x", SamplingParams(**params))) == "ab\ufffd".partition(stop)[0]


def test_a_sample_says_at_once_that_its_last_half_character_ended_it():
    """The engine looks at a request that has ended twice in a step; once must do."""
    request = Request("x", [1], max_tokens=3)
    sample = Sample(request, tiny_tokenizer(), ["\ufffd"])
    for token in b"a\xf0\x9f":
        request.append(token)
    request.finish_reason = "length"
    assert sample.read_new_tokens()
    assert (sample.text, request.finish_reason, sample.end_reason) == ("a", "stop", "stop")


# -- a tokenizer that fails ---------------------------------------------------------------------


class Failing:
    """Tiny's tokenizer, which fails where the byte `!` is among the tokens."""

    def __init__(self, fault):
        self.tokenizer, self.fault = tiny_tokenizer(), fault

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, *args, **kwargs):
        return self.tokenizer(*args, **kwargs)

    def decode(self, token_ids, **kwargs):
        return self.fault() if ord("!") in token_ids else self.tokenizer.decode(token_ids, **kwargs)


def none():
    return None


def keys():
    raise KeyError("added_tokens")


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("fault", [none, keys])
@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_text_that_cannot_be_made_ends_its_request_alone(tiny, fault, at, batching):
    bad = [*b"abcdef"]
    bad[at] = ord("!")
    llm = forced(new_llm(tiny, Failing(fault), batching=batching), b"uvwxyz", bad, b"UVWXYZ")
    outputs = generate(llm, ["x", "y", "z"], max_tokens=6)
    assert [o.outputs[0].text for o in outputs] == ["uvwxyz", "abcdef"[:at], "UVWXYZ"]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert "its text cannot be made" in outputs[1].error
    assert [o.error for o in (outputs[0], outputs[2])] == [None, None]
    assert len(outputs[1].outputs[0].token_ids) == at + 1
    assert_empty(llm)


def test_a_prompt_whose_text_cannot_be_made_ends_its_request_alone(tiny):
    llm = forced(new_llm(tiny, Failing(none)), b"uvw", b"abc")
    outputs = generate(llm, ["x!", "y"], max_tokens=3)
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length"]
    assert outputs[1].outputs[0].text == "abc"
    assert_empty(llm)


def test_a_stream_whose_text_cannot_be_made_raises(tiny):
    llm = forced(new_llm(tiny, Failing(none)), b"ab!c")
    stream = llm.stream("x", SamplingParams(max_tokens=4))
    assert [next(stream), next(stream)] == ["a", "b"]
    with pytest.raises(RuntimeError, match="its text cannot be made"):
        next(stream)
    assert_empty(llm)


class Cut(BaseException):
    pass


def test_a_reading_cut_short_anywhere_is_made_good(monkeypatch):
    """The tokens are the truth: what was read of them is read again, and nothing comes twice."""
    tokenizer, answer = tiny_tokenizer(), "aé<🎉".encode()
    decode, calls = tokenizer.decode, []
    for cut_at in range(100):

        def cut(token_ids, cut_at=cut_at, **kwargs):
            calls.append(0)
            if len(calls) == cut_at:
                raise Cut
            return decode(token_ids, **kwargs)

        monkeypatch.setattr(tokenizer, "decode", cut)
        calls.clear()
        request = Request("x", [1], max_tokens=len(answer))
        sample, pieces, was_cut = Sample(request, tokenizer, ()), [], False
        for i, token in enumerate(answer):
            request.append(token)
            request.finish_reason = "length" if i == len(answer) - 1 else None
            for _ in range(2):
                try:
                    sample.read_new_tokens()
                except Cut:
                    was_cut = True
            pieces.append(sample.detokenizer.next_piece(final=bool(request.finish_reason)))
        assert "".join(pieces) == sample.text == "aé<🎉"
        if cut_at and not was_cut:
            return
    raise AssertionError("it was cut every time")


# -- behind the prompt --------------------------------------------------------------------------


def sentencepiece_like(**options):
    """Words of the Llama 2 kind in the tokens from 0 on; bytes for all else."""
    pieces = ["<unk>", "▁France", "▁is", "▁Paris", "▁", ".", "The", "▁The", "▁capital", "▁of"]
    pieces += [f"<0x{byte:02X}>" for byte in range(128)]
    backend = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


@pytest.mark.parametrize("clean_up", [False, True])
def test_prompt_and_text_are_the_continuation(tiny, clean_up):
    tokenizer = sentencepiece_like(clean_up_tokenization_spaces=clean_up)
    llm = forced(new_llm(tiny, tokenizer), *[[3, 4, 5]] * 4)
    assert only(generate(llm, "The capital of France is", max_tokens=3)) == (" Paris .", "length")
    assert list(llm.stream("The capital", SamplingParams(max_tokens=3))) == [" Paris", " ", "."]
    assert only(generate(llm, "The", max_tokens=3, stop=" Paris")) == ("", "stop")
    assert list(llm.stream("The", SamplingParams(max_tokens=3, stop=" P"))) == []


def test_a_prompt_of_special_tokens_is_no_text(tiny):
    """The text then is at the very beginning, where such decoders drop the space."""
    tokenizer = sentencepiece_like()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    llm = forced(new_llm(tiny, tokenizer), [3, 5], [3, 5])
    assert only(generate(llm, [[tokenizer.bos_token_id] * 30], max_tokens=2))[0] == "Paris."
    assert only(generate(llm, [[tokenizer.bos_token_id] * 30 + [7]], max_tokens=2))[0] == " Paris."


def test_a_character_that_begins_in_the_prompt_is_the_outputs(tiny):
    llm = forced(new_llm(tiny), b"\x9f\x8e\x89!", b"\x9f\x8e\x89!")
    assert only(generate(llm, [[*b"ab", 0xF0]], max_tokens=4))[0] == "🎉!"
    assert only(generate(llm, [[*b"abcdefghijklmnop", 0xF0]], max_tokens=4))[0] == "🎉!"


# -- several callers ----------------------------------------------------------------------------


def test_two_streams_read_in_turn_leave_nothing(tiny):
    for lengths in ((3, 9), (9, 3), (5, 5)):
        llm = new_llm(tiny)
        streams = [llm.stream("ab", SamplingParams(max_tokens=n)) for n in lengths]
        expected = [o.outputs[0].text for n in lengths for o in generate(llm, "ab", max_tokens=n)]
        texts = ["", ""]
        while streams != [None, None]:
            for i in (0, 1):
                if streams[i] is not None and (piece := next(streams[i], None)) is not None:
                    texts[i] += piece
                else:
                    streams[i] = None
        assert texts == expected
        assert_empty(llm)


def test_a_generate_beside_an_open_stream_leaves_nothing(tiny):
    llm = new_llm(tiny)
    [whole] = generate(llm, "ab", max_tokens=4)
    stream = llm.stream("ab", SamplingParams(max_tokens=4))
    text = next(stream)
    generate(llm, "cd", max_tokens=20)
    assert not llm.has_unfinished_requests()  # though the stream has not been read to its end
    assert llm.step() == []
    assert text + "".join(stream) == whole.outputs[0].text
    assert_empty(llm)


def test_a_stream_closed_between_two_outputs_of_a_step_leaves_nothing(tiny):
    llm = new_llm(tiny)
    first, second = (llm.stream(text, SamplingParams(max_tokens=2)) for text in ("ab", "cd"))
    next(first)
    next(second)  # both have ended now, the second one's newest output last
    first.close()
    assert not llm.has_unfinished_requests()
    list(second)
    assert_empty(llm)


def test_an_id_taken_over_from_a_stream_that_has_ended_is_not_the_streams(tiny):
    llm = new_llm(tiny)
    stream = llm.stream("ab", SamplingParams(max_tokens=2))
    next(stream)
    generate(llm, "cd", max_tokens=9)
    llm.add_request("ef", SamplingParams(max_tokens=3), "0")  # the stream's, which is free now
    generate(llm, "cd", max_tokens=1)
    stream.close()
    told = []
    while llm.has_unfinished_requests():
        told += llm.step()
    assert [(o.request_id, o.finished) for o in told[-1:]] == [("0", True)]
    assert len(told[-1].outputs[0].token_ids) == 3
    assert_empty(llm)


# -- chat templates -----------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("template, said", [
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{{ messages + 1 }}", "TypeError"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{{ messages[0].content.foo.bar }}", "no attribute 'foo'"),
    ("{{ raise_exception('no system prompts') }}", "no system prompts"),
    ("{% if %}", "Expected an expression"),
])  # fmt: skip
def test_a_chat_template_that_fails_is_named(tiny, template, said):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    llm = new_llm(tiny, tokenizer)
    with pytest.raises(ValueError, match=f"tiny's chat template .*{said}"):
        llm.add_request(CHAT)
    assert_empty(llm)
