"""`LLM`: what it promises to whoever calls it. That its tokens are right is test_identity.py's."""

import copy
import itertools
import random
import threading

import numpy as np
import pytest
import torch
from managers import ByHandManager, MinimalManager
from reference import greedy

from minikv.engine import LLM
from minikv.kv_cache.base import InvariantBroken, KVCacheManager, OutOfKVMemory
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.model.loader import Loaded, load
from minikv.model.tiny import tiny_model, tiny_tokenizer
from minikv.request import SamplingParams
from minikv.scheduler import Scheduler

MAX_MODEL_LEN = 128
EOS = 257  # tiny's


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32", device="cpu")


@pytest.fixture
def llm(tiny):
    return new_llm(tiny)


def new_llm(model, **options):
    if not {"kv_cache_manager", "scheduler"} & options.keys():
        options = {"num_gpu_blocks_override": 128, "max_model_len": MAX_MODEL_LEN} | options
    return LLM(model, **options)


def paged(model, num_blocks=64, block_size=4, **options):
    return LLM(model, kv_cache_manager=MinimalManager(num_blocks, block_size), **options)


def generate(llm, prompts, params=None):
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(llm, prompt, **params):
    """The tokens of one answer, everything else aside."""
    [output] = generate(llm, prompt, SamplingParams(**params))
    return output.outputs[0].token_ids


def drain(llm):
    """Steps to the end; the last output of each request."""
    last = {}
    while llm.has_unfinished_requests():
        last |= {output.request_id: output for output in llm.step()}
    return last


def state(llm):
    """All that a request can leave behind."""
    m, s = llm.manager, llm.scheduler
    return copy.copy(
        (
            dict(m.tables), dict(m.requests), m.num_free_blocks, list(s.waiting), list(s.running),
            dict(llm._desk.jobs), dict(llm._desk.samples), dict(llm._desk.held),
            len(llm.metrics.steps),
            [float(pool.abs().sum()) for pool in llm.runner.pools],
        )
    )  # fmt: skip


def assert_empty(llm):
    llm.manager.check()
    assert not llm.manager.tables
    assert not llm.manager.requests
    assert llm.manager.num_free_blocks == llm.manager.num_blocks
    assert not llm.scheduler.has_unfinished_requests
    assert not llm.has_unfinished_requests()
    assert not llm._desk.jobs
    assert not llm._desk.samples


def prompts_of(*lengths, seed=0):
    rnd = random.Random(seed)
    return [[rnd.randrange(256) for _ in range(n)] for n in lengths]


# -- prompts and outputs ------------------------------------------------------------------------


def test_outputs_come_in_the_prompts_order_whoever_ends_first(llm):
    lengths = [30, 2, 11, 5]
    params = [SamplingParams(max_tokens=n) for n in lengths]
    outputs = generate(llm, prompts_of(5, 9, 3, 7), params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    assert [o.prompt_token_ids for o in outputs] == prompts_of(5, 9, 3, 7)
    assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
    assert_empty(llm)


def test_a_prompt_may_be_text_tokens_an_array_or_a_chat(llm):
    params = SamplingParams(max_tokens=6)
    chat = [{"role": "user", "content": "Hi"}]
    forms = ["Hello", list(b"Hello"), tuple(b"Hello"), np.array(list(b"Hello")), chat]
    together = generate(llm, forms, params)
    assert [o.prompt for o in together] == ["Hello", None, None, None, "user: Hi\nassistant: "]
    assert [bytes(o.prompt_token_ids) for o in together] == [b"Hello"] * 4 + [
        b"user: Hi\nassistant: "
    ]
    for form, output in zip(forms, together, strict=True):
        [alone] = generate(llm, form, params)
        assert alone.prompt_token_ids == output.prompt_token_ids
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
    assert len({tuple(o.outputs[0].token_ids) for o in together[:4]}) == 1


def test_no_prompts_give_no_outputs(llm):
    assert generate(llm, []) == []
    assert not llm.metrics.steps


def test_the_text_is_the_tokens_text(llm):
    [output] = generate(llm, "Hello", SamplingParams(max_tokens=40))
    assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)


def test_an_output_is_a_snapshot(llm):
    for prompt in prompts_of(3, 40, 8):
        llm.add_request(prompt, SamplingParams(max_tokens=10, n=2, temperature=1.0))
    seen = []
    while llm.has_unfinished_requests():
        seen += [(output, copy.deepcopy(output)) for output in llm.step()]
    assert len(seen) > 20
    assert all(output == as_it_was for output, as_it_was in seen)
    seen[0][0].prompt_token_ids.append(1)
    seen[-1][0].outputs[0].token_ids.append(1)
    assert_empty(llm)


def test_step_returns_each_request_that_got_a_token_and_only_those(llm):
    llm.add_request([1, 2, 3], SamplingParams(max_tokens=3), "a")
    llm.add_request([4], SamplingParams(max_tokens=5), "b")
    ids = [[o.request_id for o in llm.step()] for _ in range(5)]
    assert ids == [["a", "b"]] * 3 + [["b"]] * 2
    assert not llm.has_unfinished_requests()
    assert llm.step() == []


def test_a_prompt_in_chunks_gives_no_output_before_its_first_token(tiny):
    llm = new_llm(tiny, max_num_batched_tokens=8)
    llm.add_request(*prompts_of(30), SamplingParams(max_tokens=2))
    assert [len(llm.step()) for _ in range(5)] == [0, 0, 0, 1, 1]


# -- random streams -----------------------------------------------------------------------------

RANDOM = SamplingParams(max_tokens=15, temperature=1.2, seed=5)


def test_samples_are_independent_and_reproducible(llm):
    params = SamplingParams(max_tokens=12, temperature=1.5, n=4, seed=3)
    [first] = generate(llm, "Hello", params)
    [again] = generate(llm, "Hello", params)
    texts = [o.token_ids for o in first.outputs]
    assert [o.index for o in first.outputs] == [0, 1, 2, 3]
    assert len(set(map(tuple, texts))) == 4
    assert [o.token_ids for o in again.outputs] == texts
    assert_empty(llm)


def test_sample_i_does_not_depend_on_n(llm):
    params = {"max_tokens": 12, "temperature": 1.5, "seed": 3}
    five = generate(llm, "Hello", SamplingParams(n=5, **params))[0].outputs
    two = generate(llm, "Hello", SamplingParams(n=2, **params))[0].outputs
    assert [o.token_ids for o in two] == [o.token_ids for o in five[:2]]
    assert tokens(llm, "Hello", **params) == five[0].token_ids


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 16])
def test_samples_are_the_same_however_many_run_at_once(tiny, max_num_seqs):
    params = SamplingParams(max_tokens=8, temperature=1.5, n=4, seed=3, stop_token_ids=[7])
    expected = generate(new_llm(tiny), "Hello", params)[0].outputs
    llm = paged(tiny, max_num_seqs=max_num_seqs)
    assert generate(llm, "Hello", params)[0].outputs == expected
    assert_empty(llm)


@pytest.mark.parametrize("num_neighbours", [1, 4, 15])
def test_tokens_do_not_depend_on_neighbours(tiny, num_neighbours):
    prompt, *others = prompts_of(20, *range(1, num_neighbours + 1))
    alone = generate(new_llm(tiny), [prompt], RANDOM)[0].outputs[0].token_ids
    params = [RANDOM] + [
        SamplingParams(max_tokens=3 + i, temperature=0.7) for i in range(num_neighbours)
    ]
    for budget in (16, 512):
        llm = paged(tiny, num_blocks=200, max_num_batched_tokens=budget)
        outputs = generate(llm, [prompt, *others], params)
        assert outputs[0].outputs[0].token_ids == alone


def test_tokens_do_not_depend_on_neighbours_that_come_and_are_aborted(tiny):
    prompt, *others = prompts_of(20, *range(3, 30, 3))
    alone = generate(new_llm(tiny), [prompt], RANDOM)[0].outputs[0].token_ids
    llm, rnd = paged(tiny, num_blocks=200), random.Random(0)
    llm.add_request(prompt, RANDOM, "mine")
    running, last = [], None
    while last is None or not last.finished:
        if others and rnd.random() < 0.7:
            running.append(llm.add_request(others.pop(), SamplingParams(temperature=1.0)))
        if running and rnd.random() < 0.4:
            assert llm.abort(running.pop(rnd.randrange(len(running))))
        last = next((o for o in llm.step() if o.request_id == "mine"), last)
    assert last.outputs[0].token_ids == alone
    for request_id in running:
        assert llm.abort(request_id)
    assert_empty(llm)


def test_a_random_stream_goes_on_where_it_was_after_a_preemption(tiny):
    prompts = prompts_of(9, 20, 14, 5)
    # Recomputing rounds differently, which may move a draw across an edge: few tokens, few edges.
    params = SamplingParams(max_tokens=25, temperature=1.2, top_k=4, n=2, seed=9)
    roomy = paged(tiny, num_blocks=200)
    expected = [[o.token_ids for o in out.outputs] for out in generate(roomy, prompts, params)]
    assert roomy.scheduler.num_preemptions == 0
    for num_blocks in (12, 20, 30):
        llm = paged(tiny, num_blocks=num_blocks)
        outputs = generate(llm, prompts, params)
        assert [[o.token_ids for o in out.outputs] for out in outputs] == expected
        assert llm.scheduler.num_preemptions > 0
        assert sum(m.num_preemptions for o in outputs for m in o.metrics) > 0
        assert_empty(llm)


def test_requests_without_a_seed_take_theirs_from_the_engines(tiny):
    params = SamplingParams(max_tokens=12, temperature=1.5)

    def run(seed):
        llm = new_llm(tiny, seed=seed)
        return [o.outputs[0].token_ids for o in generate(llm, ["Hello"] * 3, params)]

    first = run(0)
    assert run(0) == first
    assert len(set(map(tuple, first + run(1)))) == 6


def test_a_refused_request_shifts_nobodys_seed(tiny):
    params = SamplingParams(max_tokens=12, temperature=1.5)
    expected = generate(new_llm(tiny), "Hello", params)[0].outputs
    llm = new_llm(tiny)
    with pytest.raises(ValueError, match="empty"):
        llm.add_request("", params)
    assert generate(llm, "Hello", params)[0].outputs == expected


# -- where an output ends -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def story(tiny):
    """A greedy answer with runs of plain letters in it: (prompt, token ids, text)."""
    for seed in itertools.count():
        [prompt] = prompts_of(8, seed=seed)
        output = generate(new_llm(tiny), [prompt], SamplingParams(max_tokens=60))[0].outputs[0]
        runs = [run for run in letters(output.text) if output.text.index(run) > 10]
        if runs:
            return prompt, output.token_ids, output.text, runs[0]


def letters(text):
    """All 3-character runs of printable ASCII."""
    threes = (text[i : i + 3] for i in range(len(text) - 2))
    return [three for three in threes if three.isascii() and three.isprintable()]


def test_a_stop_string_over_several_tokens_ends_the_text_before_it(llm, story):
    prompt, token_ids, text, stop = story
    params = SamplingParams(max_tokens=60, stop=["never there", stop])
    [output] = generate(llm, [prompt], params)
    sample = output.outputs[0]
    assert sample.text == text[: text.index(stop)]
    assert sample.finish_reason == "stop"
    assert sample.token_ids == token_ids[: len(sample.token_ids)]
    assert llm.tokenizer.decode(sample.token_ids).endswith(stop)
    assert_empty(llm)


def test_a_stream_never_shows_any_of_a_stop_string(llm, story):
    prompt, _, text, stop = story
    params = SamplingParams(max_tokens=60, stop=stop)
    pieces = list(llm.stream(prompt, params))
    assert "".join(pieces) == text[: text.index(stop)]
    assert len(pieces) > 3


def test_text_held_back_for_a_stop_string_that_does_not_come_is_given_at_the_end(llm, story):
    prompt, token_ids, _, stop = story
    end = next(n for n in range(60) if llm.tokenizer.decode(token_ids[:n]).endswith(stop[:2]))
    pieces = list(llm.stream(prompt, SamplingParams(max_tokens=end, stop=stop[:2] + "☃")))
    assert "".join(pieces) == llm.tokenizer.decode(token_ids[:end])


def test_a_stop_string_in_the_last_allowed_token_is_why_it_ends(llm, story):
    prompt, token_ids, text, stop = story
    end = next(n for n in range(60) if stop in llm.tokenizer.decode(token_ids[:n]))
    [output] = generate(llm, [prompt], SamplingParams(max_tokens=end, stop=stop))
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text == text[: text.index(stop)]


def test_a_stop_token_ends_the_output_and_stays_out_of_the_text(llm, story):
    prompt, token_ids, _, _ = story
    params = SamplingParams(max_tokens=60, stop_token_ids=[token_ids[7], 999])
    [output] = generate(llm, [prompt], params)
    sample, end = output.outputs[0], token_ids.index(token_ids[7]) + 1
    assert sample.token_ids == token_ids[:end]
    assert sample.text == llm.tokenizer.decode(token_ids[: end - 1])
    assert sample.finish_reason == "stop"
    assert "".join(llm.stream(prompt, params)) == sample.text


@pytest.mark.parametrize("as_list", [False, True])
def test_the_models_end_token_ends_the_output_unless_ignored(tiny, story, monkeypatch, as_list):
    prompt, token_ids, _, _ = story
    eos = [EOS, token_ids[5]] if as_list else token_ids[5]
    monkeypatch.setattr(tiny.model.generation_config, "eos_token_id", eos)
    llm, end = new_llm(tiny), token_ids.index(token_ids[5]) + 1
    [output] = generate(llm, [prompt], SamplingParams(max_tokens=60))
    assert output.outputs[0].token_ids == token_ids[:end]
    assert output.outputs[0].finish_reason == "stop"
    assert tokens(llm, [prompt], max_tokens=60, ignore_eos=True) == token_ids


@pytest.mark.parametrize("num_prompt_tokens, num_output_tokens", [(100, 28), (127, 1), (1, 127)])
def test_the_model_length_ends_an_output(llm, num_prompt_tokens, num_output_tokens):
    [output] = generate(llm, prompts_of(num_prompt_tokens), SamplingParams(max_tokens=1000))
    assert len(output.outputs[0].token_ids) == num_output_tokens
    assert output.outputs[0].finish_reason == "length"
    assert_empty(llm)


@pytest.mark.model
def test_smollm2_stops_within_a_token_and_at_its_end_token():
    llm = LLM("smollm2", dtype="float32", num_gpu_blocks_override=16, max_model_len=256)
    ask = [{"role": "user", "content": "What is the capital of France? One word."}]
    params = SamplingParams(max_tokens=30)
    [whole] = generate(llm, [ask], params)
    assert whole.outputs[0].finish_reason == "stop"
    text = whole.outputs[0].text
    assert "Paris" in text
    assert "<|im_end|>" not in text
    [cut] = generate(llm, [ask], SamplingParams(max_tokens=30, stop="ari"))
    assert cut.outputs[0].text == text[: text.index("ari")]
    assert (
        "".join(llm.stream(ask, SamplingParams(max_tokens=30, stop="ari"))) == cut.outputs[0].text
    )


# -- refusals -----------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("prompt, params, error, message", [
    ("", None, ValueError, "empty"),
    ([], None, ValueError, "empty"),
    ([1] * 128, None, ValueError, "128 tokens.*max_model_len is 128"),
    ([1] * 300, None, ValueError, "300 tokens.*max_model_len is 128"),
    ([5, 259], None, ValueError, "token id 259.*259"),
    ([5, -1], None, ValueError, "token id is -1"),
    ([5, 1.5], None, TypeError, "token id .*1.5"),
    (7, None, TypeError, "int"),
    (None, None, TypeError, "NoneType"),
    ([{"role": "user"}], None, ValueError, "'content'"),
    ([CHAT[0], "Hi"], None, ValueError, "'Hi'"),
    ("Hi", {"max_tokens": 3}, TypeError, "SamplingParams"),
])  # fmt: skip
def test_what_cannot_be_served_is_refused_and_changes_nothing(llm, prompt, params, error, message):
    llm.add_request("running", SamplingParams(max_tokens=9), "first")
    llm.step()
    before = state(llm)
    with pytest.raises(error, match=message):
        llm.add_request(prompt, params)
    assert state(llm) == before
    with pytest.raises(error, match=message):
        generate(llm, ["fine", prompt], params)
    assert state(llm) == before
    if prompt != []:
        with pytest.raises(error, match=message):
            llm.stream(prompt, params)
        assert state(llm) == before
    [first] = drain(llm).values()
    assert first.outputs[0].token_ids == tokens(llm, "running", max_tokens=9)


def test_a_prompt_and_max_tokens_that_never_fit_name_both_numbers(tiny):
    llm = paged(tiny, num_blocks=5, block_size=4, max_model_len=20)
    assert len(tokens(llm, [1] * 12, max_tokens=8)) == 8

    class Smaller(MinimalManager):
        def fits_ever(self, request):
            return request.max_kv_tokens <= 8

    llm = LLM(tiny, kv_cache_manager=Smaller(8, 4))
    before = state(llm)
    with pytest.raises(OutOfKVMemory, match=r"12 tokens and max_tokens is 9.*20 slots.*32"):
        llm.add_request([1] * 12, SamplingParams(max_tokens=9))
    assert state(llm) == before
    assert len(tokens(llm, [1] * 4, max_tokens=5)) == 5


def test_a_request_id_is_taken_while_it_runs(llm):
    llm.add_request("a", SamplingParams(max_tokens=3, n=2), "x")
    before = state(llm)
    for request_id in ("x", "x.1"):
        with pytest.raises(ValueError, match=f"'{request_id}' is taken"):
            llm.add_request("b", None, request_id)
    with pytest.raises(TypeError, match="request_id"):
        llm.add_request("b", None, 3)
    assert state(llm) == before
    drain(llm)
    assert llm.add_request("b", SamplingParams(max_tokens=1), "x") == "x"
    drain(llm)
    assert_empty(llm)


def test_a_request_id_is_taken_while_its_last_output_waits(llm):
    llm.add_request("a", SamplingParams(max_tokens=1), "x")
    generate(llm, "b", SamplingParams(max_tokens=3))
    with pytest.raises(ValueError, match="'x' is taken"):
        llm.add_request("c", None, "x")
    [output] = llm.step()
    assert output.request_id == "x"
    assert output.finished


def test_own_ids_avoid_those_in_use(llm):
    llm.add_request("a", None, "0")
    llm.add_request("a", None, "1.1")
    ids = [llm.add_request("b", SamplingParams(n=2)) for _ in range(3)]
    assert len({"0", "1", *ids}) == 5
    for request_id in ["0", "1.1", *ids]:
        assert llm.abort(request_id)
    assert_empty(llm)


@pytest.mark.parametrize("params, message", [
    ({"max_tokens": 0}, "max_tokens is 0"), ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"), ({"max_tokens": None}, "max_tokens"),
    ({"temperature": -1}, "temperature is -1"), ({"temperature": float("nan")}, "is nan"),
    ({"temperature": float("inf")}, "temperature is inf"), ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p is 0"), ({"top_p": 1.1}, "top_p is 1.1"),
    ({"top_p": float("nan")}, "top_p is nan"), ({"top_k": -2}, "top_k is -2"),
    ({"n": 0}, "n is 0"), ({"seed": -1}, "seed is -1"), ({"seed": 2**64}, "seed is 184467440737"),
    ({"stop": [""]}, "non-empty"), ({"stop": "a\ud83d"}, "half of a character"),
    ({"stop": [3]}, "stop holds 3"), ({"stop": 3}, "stop must be"),
    ({"stop_token_ids": [-1]}, "stop_token_ids is -1"), ({"stop_token_ids": 3}, "must be a list"),
    ({"ignore_eos": 1}, "ignore_eos"),
])  # fmt: skip
def test_sampling_params_name_what_is_wrong(params, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(**params)


@pytest.mark.parametrize("options, message", [
    ({"block_size": 0}, "block_size is 0"),
    ({"block_size": 1.5}, "block_size"),
    ({"num_gpu_blocks_override": -1}, "num_gpu_blocks_override is -1"),
    ({"max_num_seqs": 0}, "max_num_seqs is 0"),
    ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
    ({"max_model_len": 1}, "max_model_len is 1"),
    ({"max_model_len": 4096}, "4096.*2048"),
    ({"max_model_len": 100, "num_gpu_blocks_override": 2}, "100.*32"),
    ({"seed": -1}, "seed is -1"),
    ({"report_every": -1}, "report_every is -1"),
    ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan"),
    ({"gpu_memory_utilization": 0}, "gpu_memory_utilization is 0"),
    ({"dtype": "float32"}, "loaded already"),
    ({"kv_cache_manager": lambda: 3}, "no KVCacheManager"),
])  # fmt: skip
def test_the_engines_options_name_what_is_wrong(tiny, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        LLM(tiny, **options)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="did you mean 'smollm2'"):
        LLM("smolm2")
    with pytest.raises(ValueError, match="float7"):
        LLM("tiny", dtype="float7")
    with pytest.raises(TypeError):
        LLM("tiny", block_sise=3)


def test_params_and_prompts_must_be_as_many(llm):
    with pytest.raises(ValueError, match="3 sampling_params for 2 prompts"):
        generate(llm, ["a", "b"], [SamplingParams()] * 3)


# -- numbers that are none ----------------------------------------------------------------------

BAD = 200  # the token whose embedding is NaN


@pytest.fixture(scope="module")
def poisoned():
    """A model that returns NaN for every prompt with the token BAD in it. No greedy output has
    it: its row of the head is zero."""
    model = tiny_model()
    model.lm_head.weight[BAD] = 0
    loaded = Loaded(model, tiny_tokenizer(), load("tiny", dtype="float32").spec)
    LLM(loaded, num_gpu_blocks_override=16, max_model_len=32)  # adopted while it is healthy
    return loaded


@pytest.fixture(params=["contiguous", "paged"])
def bad_llm(request, poisoned, monkeypatch):
    llm = new_llm(poisoned) if request.param == "contiguous" else paged(poisoned, num_blocks=24)
    llm.healthy = [[t % 200 for t in prompt] for prompt in prompts_of(9, 30, 1)]
    llm.expected = [greedy(poisoned.model, p, 10).output for p in llm.healthy]
    weight = poisoned.model.model.embed_tokens.weight
    row = weight[BAD].clone()
    weight[BAD] = float("nan")
    yield llm
    weight[BAD] = row


@pytest.mark.parametrize("at", [0, 5, 11])
@pytest.mark.parametrize("budget", [4, 512])
def test_nan_ends_its_request_and_harms_nobody(bad_llm, at, budget):
    llm = bad_llm
    llm.scheduler.max_num_batched_tokens = budget
    prompt = [1] * at + [BAD] + [1] * (11 - at)
    prompts, params = [llm.healthy[0], prompt, *llm.healthy[1:]], SamplingParams(max_tokens=10)
    outputs = generate(llm, prompts, params)
    bad = outputs.pop(1)
    assert bad.finished
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].token_ids == []
    assert "not finite" in bad.error
    assert [o.outputs[0].token_ids for o in outputs] == llm.expected
    assert all(o.error is None for o in outputs)
    assert_empty(llm)
    assert all(pool.isfinite().all() for pool in llm.runner.pools)

    for prompt, expected in zip(llm.healthy, llm.expected, strict=True):  # into the same blocks
        assert tokens(llm, [prompt], max_tokens=10) == expected


@pytest.mark.parametrize("backend", ["gather", "online"])
def test_nan_harms_nobody_though_its_step_is_cut_short(poisoned, monkeypatch, backend):
    llm = LLM(
        poisoned,
        num_gpu_blocks_override=4,
        block_size=4,
        max_model_len=16,
        attention_backend=backend,
    )
    prompt = list(range(7))
    expected = tokens(llm, [prompt], max_tokens=4)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        weight = poisoned.model.model.embed_tokens.weight
        patch.setattr(weight, "data", weight.data.clone())
        weight[BAD] = float("nan")
        patch.setattr("minikv.model.runner.sample", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, [[BAD] * 8])
    assert tokens(llm, [prompt], max_tokens=4) == expected  # into the same blocks
    assert all(pool.isfinite().all() for pool in llm.runner.pools)


def test_nan_ends_all_samples_of_its_prompt(bad_llm):
    [output] = generate(bad_llm, [[1, BAD]], SamplingParams(n=3, temperature=1.0))
    assert [o.finish_reason for o in output.outputs] == ["error"] * 3
    assert output.finished
    assert_empty(bad_llm)


def test_nan_raises_in_a_stream(bad_llm):
    with pytest.raises(RuntimeError, match="not finite"):
        list(bad_llm.stream([1, BAD]))
    assert_empty(bad_llm)


def test_nan_in_a_later_step_keeps_the_tokens_before_it(bad_llm):
    """The third token is forced to be the bad one."""
    prompt, run, num_calls = bad_llm.healthy[0], bad_llm.runner.run, itertools.count()

    def forced(scheduled, copies):
        sampled = run(scheduled, copies)
        return [BAD] if next(num_calls) == 2 else sampled

    bad_llm.runner.run = forced
    [output] = generate(bad_llm, [prompt], SamplingParams(max_tokens=10))
    assert output.outputs[0].token_ids == [*bad_llm.expected[0][:2], BAD]
    assert output.outputs[0].finish_reason == "error"
    assert all(pool.isfinite().all() for pool in bad_llm.runner.pools)
    assert_empty(bad_llm)


# -- ending early -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", [new_llm, paged])
def test_an_abort_at_any_step_returns_every_block(tiny, kind, n):
    params = SamplingParams(max_tokens=4, temperature=1.0, n=n)
    for num_steps in range(30):
        llm = kind(tiny, max_num_batched_tokens=7, max_num_seqs=2)
        llm.add_request(*prompts_of(20), params, "a")
        for _ in range(num_steps):
            llm.step()
        if not llm.has_unfinished_requests():
            assert num_steps > 5
            assert not llm.abort("a")
            return
        assert llm.abort("a")
        assert_empty(llm)
        assert not llm.abort("a")
        assert llm.step() == []
    raise AssertionError("it never ended")


def test_an_abort_leaves_the_others_as_they_were(llm):
    expected = tokens(llm, "Hello", max_tokens=8)
    for num_steps in range(6):
        llm.add_request("Hello", SamplingParams(max_tokens=8), "a")
        llm.add_request("World", SamplingParams(max_tokens=20, n=2, temperature=1.0), "b")
        last = {}
        for _ in range(num_steps):
            last |= {o.request_id: o for o in llm.step()}
        llm.abort("b")
        last |= drain(llm)
        assert last["a"].outputs[0].token_ids == expected
        assert_empty(llm)


def test_an_unknown_id_aborts_nothing(llm):
    assert not llm.abort("nobody")


@pytest.mark.parametrize("num_pieces", [0, 1, 4])
def test_a_stream_that_is_left_early_leaves_nothing(llm, num_pieces):
    stream = llm.stream("Hello", SamplingParams(max_tokens=50))
    for _ in range(num_pieces):
        next(stream)
    stream.close()
    assert_empty(llm)


def test_a_stream_left_by_break_or_error_leaves_nothing(llm):
    for _ in llm.stream("Hello", SamplingParams(max_tokens=50)):
        break
    assert_empty(llm)


@pytest.mark.parametrize("kind", [new_llm, paged])
def test_an_interrupted_generate_leaves_nothing_and_the_engine_goes_on(tiny, kind):
    expected = tokens(kind(tiny), "Hello", max_tokens=8)
    for k in range(8):
        llm, num_calls = kind(tiny), itertools.count()
        run = llm.runner.run

        def interrupted(scheduled, copies, run=run, num_calls=num_calls, k=k):
            if next(num_calls) == k:
                raise KeyboardInterrupt
            return run(scheduled, copies)

        llm.runner.run = interrupted
        llm.add_request("Hello", SamplingParams(max_tokens=8), "mine")
        with pytest.raises(KeyboardInterrupt):
            generate(llm, ["World", "Hello"], SamplingParams(max_tokens=30, n=2, temperature=1.0))
        assert set(llm._desk.jobs) | set(llm._desk.held) == {"mine"}
        assert drain(llm)["mine"].outputs[0].token_ids == expected
        assert_empty(llm)
        assert tokens(llm, "Hello", max_tokens=8) == expected


# -- several callers ----------------------------------------------------------------------------


def test_requests_added_before_generate_go_on_beside_it_and_are_told_by_step(llm):
    expected = tokens(llm, "Hello", max_tokens=4), tokens(llm, "World", max_tokens=12)
    llm.add_request("Hello", SamplingParams(max_tokens=4), "short")
    llm.add_request("World", SamplingParams(max_tokens=12), "long")
    [output] = generate(llm, "between", SamplingParams(max_tokens=6))
    assert output.prompt == "between"
    assert llm.has_unfinished_requests()
    told = {o.request_id: o for o in llm.step()}
    assert told["short"].finished
    assert told["short"].outputs[0].token_ids == expected[0]
    assert not told["long"].finished
    assert drain(llm)["long"].outputs[0].token_ids == expected[1]
    assert_empty(llm)


def test_an_output_that_waits_can_still_be_aborted(llm):
    llm.add_request("Hello", SamplingParams(max_tokens=4), "short")
    generate(llm, "between", SamplingParams(max_tokens=6))
    llm.abort("short")
    assert not llm.has_unfinished_requests()
    assert llm.step() == []


def test_two_streams_and_steps_in_turn_each_get_all_their_text(llm):
    params = SamplingParams(max_tokens=20)
    expected = [generate(llm, p, params)[0].outputs[0].text for p in ("Hello", "World", "third")]
    llm.add_request("third", params, "third")
    streams = [llm.stream("Hello", params), llm.stream("World", params)]
    texts, last, live = ["", ""], {}, [0, 1]
    while live:
        for i in list(live):
            piece = next(streams[i], None)
            if piece is None:
                live.remove(i)
            else:
                texts[i] += piece
        last |= {o.request_id: o for o in llm.step()}
    last |= drain(llm)
    assert texts == expected[:2]
    assert last["third"].outputs[0].text == expected[2]
    assert_empty(llm)


def test_a_stream_whose_error_came_in_anothers_step_raises(bad_llm):
    stream = bad_llm.stream(bad_llm.healthy[0])
    next(stream)
    run, bad_llm.runner.run = bad_llm.runner.run, lambda scheduled, copies: [None]
    [output] = bad_llm.step()
    bad_llm.runner.run = run
    assert output.outputs[0].finish_reason == "error"
    with pytest.raises(RuntimeError, match="not finite"):
        list(stream)
    assert_empty(bad_llm)


def test_a_stream_whose_steps_others_make_still_gives_all_its_text(llm):
    params = SamplingParams(max_tokens=20)
    expected = generate(llm, "Hello", params)[0].outputs[0].text
    stream = llm.stream("Hello", params)
    text = next(stream)
    drain(llm)
    assert text + "".join(stream) == expected


def test_a_stream_gives_whole_characters(llm, story):
    prompt, _, text, _ = story
    pieces = list(llm.stream(prompt, SamplingParams(max_tokens=60)))
    assert "".join(pieces) == text
    assert all(pieces)


def test_a_stream_has_one_sample(llm):
    with pytest.raises(ValueError, match="n is 2"):
        llm.stream("Hello", SamplingParams(n=2))


# -- managers and schedulers --------------------------------------------------------------------


@pytest.mark.parametrize(
    "manager",
    [
        MinimalManager,
        ByHandManager,
        ContiguousKVCacheManager,
        PagedKVCacheManager,
        lambda num_blocks, block_size: MinimalManager(num_blocks, block_size),
        lambda **sizes: ContiguousKVCacheManager(**sizes),
        "contiguous",
        "paged",
    ],
    ids=["minimal", "by hand", "slabs", "blocks", "function", "keywords", "contiguous", "paged"],
)
def test_a_manager_may_be_a_class_or_a_factory(tiny, llm, manager):
    other = LLM(
        tiny, kv_cache_manager=manager, num_gpu_blocks_override=40, block_size=4, max_model_len=64
    )
    assert (other.manager.num_blocks, other.manager.block_size) == (40, 4)
    assert tokens(other, "Hello", max_tokens=20) == tokens(llm, "Hello", max_tokens=20)
    if isinstance(manager, str):
        kind = {"contiguous": ContiguousKVCacheManager, "paged": PagedKVCacheManager}[manager]
        assert type(other.manager) is kind and other.manager.max_model_len == 64


def test_a_managers_own_sizes_win(tiny):
    llm = paged(tiny, num_blocks=9, block_size=3)
    assert llm.max_model_len == 27
    assert llm.runner.pools[0].shape == (2, 10, 2, 3, 48)
    contiguous = ContiguousKVCacheManager(12, 4, max_model_len=18)
    assert LLM(tiny, kv_cache_manager=contiguous).max_model_len == 18
    buddies = ContiguousKVCacheManager(12, 4, max_model_len=48, reserve="grow", fit="buddy")
    assert LLM(tiny, kv_cache_manager=buddies).max_model_len == 32  # its largest block, not 48


def test_a_scheduler_may_be_an_instance_or_a_factory(tiny):
    scheduler = Scheduler(MinimalManager(32, 4), max_num_seqs=2, max_num_batched_tokens=5)
    llm = LLM(tiny, scheduler=scheduler)
    assert llm.scheduler is scheduler
    assert llm.manager is scheduler.manager
    generate(llm, prompts_of(9, 9, 9), SamplingParams(max_tokens=5))
    assert max(step.num_tokens for step in llm.metrics.steps) == 5

    class Mine(Scheduler):
        pass

    for factory in (Mine, lambda manager, max_num_seqs: Mine(manager, max_num_seqs=max_num_seqs)):
        llm = new_llm(tiny, scheduler=factory, num_gpu_blocks_override=32, max_num_seqs=3)
        assert isinstance(llm.scheduler, Mine)
        assert llm.scheduler.max_num_seqs == 3


@pytest.mark.parametrize("options, message", [
    ({"kv_cache_manager": MinimalManager(8, 4), "block_size": 4}, "kv_cache_manager.*block_size"),
    ({"kv_cache_manager": MinimalManager(8, 4), "num_gpu_blocks_override": 8}, "num_gpu_blocks"),
    ({"scheduler": Scheduler(MinimalManager(8, 4)), "max_num_seqs": 4}, "scheduler.*max_num_seqs"),
    ({"scheduler": Scheduler(MinimalManager(8, 4)), "max_num_batched_tokens": 4}, "batched_tokens"),
    ({"scheduler": Scheduler(MinimalManager(8, 4)), "kv_cache_manager": MinimalManager}, "manager"),
    ({"scheduler": Scheduler(MinimalManager(8, 4)), "block_size": 4}, "block_size"),
])  # fmt: skip
def test_an_instance_and_a_value_that_it_decides_are_refused(tiny, options, message):
    with pytest.raises(ValueError, match=message + ".*both"):
        LLM(tiny, **options)


def test_a_manager_in_use_is_refused(tiny):
    manager = MinimalManager(8, 4)
    manager.tables["somebody"] = [0]
    with pytest.raises(ValueError, match="already holds"):
        LLM(tiny, kv_cache_manager=manager)


class TableTooShort(MinimalManager):
    """Forgets the block for the last token."""

    def allocate_slots(self, request, num_new_tokens):
        return super().allocate_slots(request, max(1, num_new_tokens - 4))


class BlockOutOfRange(MinimalManager):
    def allocate_slots(self, request, num_new_tokens):
        table = super().allocate_slots(request, num_new_tokens)
        return self.set_table(request, [*table[:-1], self.num_blocks])  # counts from 1


class NoTable(MinimalManager):
    """Returns a table that it never keeps."""

    def allocate_slots(self, request, num_new_tokens):
        return [0]


class Leaking(MinimalManager):
    def free(self, request):
        self.drop_table(request)


@pytest.mark.parametrize("manager, error, message", [
    (TableTooShort, InvariantBroken, r"'0' computes position 9, but .* 2 blocks, 8 slots"),
    (BlockOutOfRange, InvariantBroken, "'0' names blocks from .* to 8, but the pool has 0 to 7"),
    (NoTable, InvariantBroken, "'0' computes position 9, but its block table has 0 blocks"),
    (Leaking, OutOfKVMemory, "no room though nothing else runs.*Leaking"),
])  # fmt: skip
def test_a_broken_manager_is_told_so_in_words(tiny, manager, error, message):
    llm = LLM(tiny, kv_cache_manager=manager(8, 4))
    with pytest.raises(error, match=message):
        for _ in range(5):
            generate(llm, prompts_of(10), SamplingParams(max_tokens=3))
    assert not llm.has_unfinished_requests()
    assert not llm.scheduler.has_unfinished_requests


def test_a_learners_own_error_is_what_the_learner_sees(tiny):
    class NotWrittenYet(KVCacheManager):
        def allocate_slots(self, request, num_new_tokens):
            raise NotImplementedError("Exercise 4.2")

        def free(self, request):
            raise KeyError(request.request_id)

    llm = LLM(tiny, kv_cache_manager=NotWrittenYet(8, 4))
    with pytest.raises(NotImplementedError, match=r"Exercise 4\.2"):
        generate(llm, ["a", "b"])
    assert not llm.has_unfinished_requests()
    assert not llm.scheduler.has_unfinished_requests


def test_a_loaded_model_may_serve_one_engine_after_another(tiny):
    expected = tokens(new_llm(tiny), "Hello", max_tokens=9)
    assert tokens(paged(tiny), "Hello", max_tokens=9) == expected
    assert tokens(LLM("tiny", dtype="float32"), "Hello", max_tokens=9) == expected


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(tiny):
    llm = new_llm(Loaded(tiny.model, None, tiny.spec))
    expected = tokens(new_llm(tiny), list(b"Hello"), max_tokens=9)
    [output] = generate(llm, list(b"Hello"), SamplingParams(max_tokens=9))
    assert (output.outputs[0].token_ids, output.outputs[0].text) == (expected, "")
    for refused in (
        lambda: generate(llm, "Hello"),
        lambda: generate(llm, [CHAT]),
        lambda: generate(llm, [1, 2], SamplingParams(stop="x")),
        lambda: llm.stream([1, 2]),
    ):
        with pytest.raises(ValueError, match=r"no tokenizer|has none|no chat template"):
            refused()
    assert_empty(llm)


def test_the_default_pool_is_at_most_what_max_num_seqs_could_fill(tiny):
    llm = LLM(tiny, max_num_seqs=2, max_model_len=100)
    assert (llm.manager.num_blocks, llm.manager.block_size) == (2 * 7, 16)
    assert isinstance(llm.manager, PagedKVCacheManager)


def test_bfloat16_runs_and_its_linears_are_packed_or_left():
    llm = LLM("tiny", dtype="bfloat16", num_gpu_blocks_override=16, max_model_len=64)
    assert len(tokens(llm, "Hello", max_tokens=9)) == 9
    assert llm.runner.pools[0].dtype == torch.bfloat16
    assert llm.spec.kv_bytes_per_token * 16 * 17 == sum(p.nbytes for p in llm.runner.pools)


# -- metrics ------------------------------------------------------------------------------------


def test_times_of_a_request_are_those_of_its_steps(tiny):
    llm = new_llm(tiny, max_num_batched_tokens=8)
    [output] = generate(llm, prompts_of(20), SamplingParams(max_tokens=6))
    steps, [m] = llm.metrics.steps, output.metrics
    assert [step.num_tokens for step in steps] == [8, 8, 4] + [1] * 5
    assert m.first_scheduled_time == steps[0].start
    assert m.first_token_time == steps[2].end
    assert m.finish_time == steps[7].end
    assert m.ttft == m.first_token_time - m.arrival_time
    assert m.queue_time >= 0
    assert m.itl == [b.end - a.end for a, b in itertools.pairwise(steps[2:])]
    assert m.tpot == pytest.approx(sum(m.itl) / 5)
    assert m.latency == pytest.approx(m.ttft + sum(m.itl))
    assert m.num_output_tokens == 6


def test_a_preempted_request_has_one_time_for_each_token(tiny):
    llm = paged(tiny, num_blocks=12)
    outputs = generate(llm, prompts_of(9, 20, 14), SamplingParams(max_tokens=25))
    assert llm.scheduler.num_preemptions > 0
    for output in outputs:
        [m] = output.metrics
        assert len(m.itl) == 24
        assert sum(m.itl) == pytest.approx(m.finish_time - m.first_token_time)
    assert sum(o.metrics[0].num_preemptions for o in outputs) == llm.scheduler.num_preemptions
    ends = [step.end for step in llm.metrics.steps]
    assert ends == sorted(ends)
    assert all(step.start <= step.end for step in llm.metrics.steps)


def test_a_request_with_one_token_has_no_time_per_token(llm):
    [output] = generate(llm, "Hello", SamplingParams(max_tokens=1))
    assert output.metrics[0].tpot is None
    assert output.metrics[0].itl == []
    assert output.metrics[0].ttft == output.metrics[0].latency


def test_a_step_counts_its_tokens_requests_and_blocks(tiny):
    llm = paged(tiny, num_blocks=30, block_size=4)
    generate(llm, prompts_of(5, 8, 1), SamplingParams(max_tokens=2))
    counted = [(s.num_seqs, s.num_tokens, s.num_blocks_in_use) for s in llm.metrics.steps]
    assert counted == [(3, 14, 2 + 2 + 1), (3, 3, 2 + 3 + 1)]


@pytest.mark.parametrize("kind", [new_llm, paged])
def test_the_memory_report_adds_up_to_the_pool_at_every_step(tiny, kind):
    llm = kind(tiny, max_num_batched_tokens=16)
    for prompt in prompts_of(20, 3, 40):
        llm.add_request(prompt, SamplingParams(max_tokens=10))
    num_slots = llm.manager.num_blocks * llm.manager.block_size
    while llm.has_unfinished_requests():
        llm.step()
        report = llm.memory_report()
        assert report.total == num_slots
        assert min(report) >= 0
        assert report.live == sum(r.num_computed_tokens for r in llm.scheduler.running)
    report = llm.memory_report()  # all of it can be had, though some of it is remembered
    assert report.free + report.cached + report.external == num_slots


def test_a_report_is_kept_every_so_many_steps(tiny):
    llm = new_llm(tiny, report_every=3)
    generate(llm, "Hello", SamplingParams(max_tokens=10))
    assert [step for step, _ in llm.metrics.reports] == [2, 5, 8]
    assert [report.live for _, report in llm.metrics.reports] == [6, 9, 12]
    assert new_llm(tiny).metrics.reports == []


def test_a_progress_bar_is_shown_unless_unwanted(llm, capsys):
    llm.generate(["a", "b"], SamplingParams(max_tokens=2))
    assert "requests: 100%" in capsys.readouterr().err
    generate(llm, ["a", "b"], SamplingParams(max_tokens=2))
    assert capsys.readouterr().err == ""


# -- what a step that is cut short leaves behind ----------------------------------------------


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("method", ["free", "cache_blocks"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_is_cut_short_once_loses_nothing(tiny, batching, method, error):
    """Whenever the manager raises, the requests end as they would have, and are told of."""
    options = {"batching": batching, "max_model_len": 64, "max_num_seqs": 3}
    prompts, params = ["ab", "cde", "f"], SamplingParams(max_tokens=5, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in generate(new_llm(tiny, **options), prompts, params)]
    for fails_at in range(1, 6):
        llm = new_llm(tiny, **options)
        calls, original = itertools.count(1), getattr(llm.manager, method)

        def failing(request, calls=calls, original=original, fails_at=fails_at):
            if next(calls) == fails_at:
                raise error("once")
            return original(request)

        setattr(llm.manager, method, failing)
        ids, ended = [llm.add_request(prompt, params) for prompt in prompts], {}
        for _ in range(40):
            try:
                ended |= {o.request_id: o for o in llm.step() if o.finished}
            except error:
                continue
        assert not llm.has_unfinished_requests(), (fails_at, ended.keys())
        assert set(ended) == set(ids)
        for request_id, token_ids in zip(ids, expected, strict=True):
            output = ended[request_id].outputs[0]
            if output.finish_reason != "error":  # an interrupt between two queues loses a request
                assert output.token_ids == token_ids, fails_at


def test_static_batching_ends_at_a_stop_string(tiny):
    llm = new_llm(tiny, batching="static", max_model_len=64)
    [whole] = generate(llm, ["abc"], SamplingParams(max_tokens=20))
    stop = next(c for c in whole.outputs[0].text if c.isprintable() and c != "\ufffd")
    outputs = generate(llm, ["abc", "defg"], SamplingParams(max_tokens=20, stop=stop))
    assert outputs[0].outputs[0].finish_reason == "stop"
    assert outputs[0].outputs[0].text == whole.outputs[0].text.split(stop)[0]
    assert_empty(llm)


def test_a_second_thread_is_refused_while_requests_of_the_first_are_unfinished(tiny):
    llm, refused = new_llm(tiny), []
    request_id = llm.add_request("ab")

    def other():
        for call in (
            lambda: generate(llm, ["cd"]),
            llm.step,
            lambda: llm.add_request("cd"),
            lambda: llm.abort(request_id),
        ):
            with pytest.raises(RuntimeError, match="another thread") as caught:
                call()
            refused.append(caught.value)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(refused) == 4
    drain(llm)
    thread = threading.Thread(target=generate, args=(llm, ["cd"]))  # idle: anybody may have it
    thread.start()
    thread.join()
    assert_empty(llm)


def test_a_stream_that_cannot_start_leaves_others_alone(tiny):
    llm = new_llm(tiny)
    stream = llm.stream("a", SamplingParams(max_tokens=3))
    taken = llm.add_request("b", SamplingParams(max_tokens=3), request_id="0")
    with pytest.raises(ValueError, match="'0' is taken"):
        next(stream)
    assert drain(llm).keys() == {taken}


class Forgetful(KVCacheManager):
    def __init__(self, num_blocks, block_size):
        self.size = num_blocks * block_size


@pytest.mark.parametrize("options, error, message", [
    ({"kv_cache_manager": "page"}, ValueError, "known: prefix, radix, paged, contiguous"),
    ({"kv_cache_manager": 5}, TypeError, "kv_cache_manager is 5, which is no KVCacheManager"),
    ({"kv_cache_manager": dict}, TypeError, "is the class dict, which is no KVCacheManager"),
    ({"kv_cache_manager": Forgetful}, TypeError, r"must call super\(\).__init__"),
    ({"scheduler": "static"}, TypeError, "scheduler is 'static', which is no Scheduler"),
    ({"scheduler": lambda manager: None}, TypeError, "what scheduler made is None"),
    ({"batching": []}, ValueError, r"batching is \[\]; known: continuous, static"),
    ({"gpu_memory_utilization": "x"}, TypeError, "must be a number, not 'x'"),
    ({"num_gpu_blocks_override": 10**12}, OutOfKVMemory, "1,000,000,000,000 blocks of 16 tokens"),
    ({"block_size": 10**30}, OutOfKVMemory, "one block of 10+ tokens takes"),
])  # fmt: skip
def test_parts_and_sizes_that_cannot_be_are_refused_in_words(tiny, options, error, message):
    with pytest.raises(error, match=message):
        LLM(tiny, **options)


def test_a_list_of_arrays_is_a_list_of_prompts(llm):
    outputs = generate(llm, [np.array([1, 2]), np.array([3])], SamplingParams(max_tokens=1))
    assert [output.prompt_token_ids for output in outputs] == [[1, 2], [3]]


@pytest.mark.parametrize("prompt, error, message", [
    ("\ud800", ValueError, "not valid Unicode"),
    ([{"role": "user", "content": None}], TypeError, "are strings, but got"),
    ([{"role": 5, "content": "x"}], TypeError, "are strings, but got"),
    (np.ones((2, 2), int), ValueError, r"one dimension, not shape \(2, 2\)"),
])  # fmt: skip
def test_prompts_that_are_almost_right_are_refused_in_words(llm, prompt, error, message):
    with pytest.raises(error, match=message):
        llm.add_request(prompt)
    assert_empty(llm)


def test_checking_every_step_finds_a_block_that_is_held_twice(tiny):
    class Twice(MinimalManager):
        def allocate_slots(self, request, num_new_tokens):
            table = super().allocate_slots(request, num_new_tokens)
            first = next(iter(self.tables.values()))[0]
            return self.set_table(request, [first, *table[1:]])

    silent = LLM(tiny, kv_cache_manager=Twice(16, 4))
    generate(silent, ["abcd", "efgh"], SamplingParams(max_tokens=3))
    llm = LLM(tiny, kv_cache_manager=Twice(16, 4), check_every_step=True)
    with pytest.raises(InvariantBroken, match="held twice"):
        generate(llm, ["abcd", "efgh"], SamplingParams(max_tokens=3))
