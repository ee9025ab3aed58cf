"""Beam search on shared blocks: the answers are those of transformers' own, in float32, whatever
the manager; and nothing is left behind, however it ends."""

import copy
import random
from typing import NamedTuple

import pytest
import torch
from cut_short import AtBytecode
from managers import MinimalManager
from reference import own_attention

from minikv import BeamSearchParams
from minikv.engine import LLM
from minikv.kv_cache.base import OutOfKVMemory
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.model.loader import load
from minikv.observe.steps import record
from minikv.request import SamplingParams

TOO_CLOSE = 1e-4  # sums of log-probabilities nearer than this may swap places by rounding alone
MANAGERS = {
    "paged": lambda B=4: PagedKVCacheManager(4096 // B, B),
    "prefix": lambda B=4: PrefixCachingKVCacheManager(4096 // B, B),
    "contiguous": lambda B=4: ContiguousKVCacheManager(4096 // B, B, max_model_len=128),
    "of a learner": lambda B=4: MinimalManager(4096 // B, B),
}


# -- what transformers finds ----------------------------------------------------------------------


class Found(NamedTuple):
    """Answers, the best first: token ids, and scores as transformers ranks them. first_tie: the
    number of the first step where two beginnings come too close to say which of them goes on."""

    sequences: list[list[int]]
    scores: list[float]
    first_tie: int | None


def transformers_finds(model, prompt, params, eos=()):
    """eos: all token ids that end an answer."""
    width, ties, step, choose = params.beam_width, [], 0, model._get_top_k_continuations

    def watched(*args, accumulated_log_probs, **options):
        nonlocal step
        best = accumulated_log_probs[0].topk(min(4 * width + 4, accumulated_log_probs.numel()))
        vocab_size = accumulated_log_probs.shape[1] // width
        goes_on = [int(place) % vocab_size not in eos for place in best.indices]
        for scores in (best.values, best.values[torch.tensor(goes_on)]):
            if len(scores) > width and scores[width - 1] - scores[width] < TOO_CLOSE:
                ties.append(step)
        step += 1
        return choose(*args, accumulated_log_probs=accumulated_log_probs, **options)

    model._get_top_k_continuations = watched
    try:
        with own_attention(model), torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=int),
                do_sample=False,
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=params.max_tokens,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                eos_token_id=sorted(eos) or -1,
                pad_token_id=-1,
                return_dict_in_generate=True,
                output_scores=True,
            )
    finally:
        del model._get_top_k_continuations
    sequences = [[t for t in tokens if t >= 0] for tokens in out.sequences.tolist()]
    scores = out.sequences_scores.tolist() if width > 1 else None
    return Found(sequences, scores, ties[0] if ties else None)


class Tally:
    """As reference.Comparison: where rounding may decide, the comparison stops, and is counted."""

    num_compared = num_stopped = num_tokens = 0
    largest_difference = 0.0

    def check(self, llm, prompt, params, eos=()):
        found = transformers_finds(llm.model, prompt, params, eos)
        self.num_compared += 1
        if found.first_tie is not None:
            self.num_stopped += 1
            if found.first_tie == 0:
                return
            params = BeamSearchParams(**vars(params) | {"max_tokens": found.first_tie})
            found = transformers_finds(llm.model, prompt, params, eos)
        [output] = llm.beam_search([prompt], params)
        self.num_tokens += params.max_tokens
        got = [each.tokens for each in output.sequences]
        outputs = [tokens[len(prompt) :] for tokens in got]
        for each, tokens in zip(output.sequences, outputs, strict=True):
            assert each.finish_reason == ("stop" if tokens[-1] in eos else "length")
        if found.scores is None:
            assert got == found.sequences
            return
        ranks = [
            each.cum_logprob / len(tokens) ** params.length_penalty
            for each, tokens in zip(output.sequences, outputs, strict=True)
        ]
        assert ranks == sorted(ranks, reverse=True)
        close = 2 * TOO_CLOSE * max(1.0, params.max_tokens**-params.length_penalty)
        for tokens, mine, theirs in zip(got, ranks, found.scores, strict=True):
            self.largest_difference = max(self.largest_difference, abs(mine - theirs))
            assert mine == pytest.approx(theirs, abs=close)
            # equal but for neighbours that are too close
            at = found.sequences.index(tokens) if tokens in found.sequences else None
            assert at is not None and abs(found.scores[at] - mine) < close, "not transformers'"

    def close(self, most_stops):
        print(f"\n{self.num_compared} searches equal, {self.num_stopped} of them up to a near tie; "
              f"scores differ by {self.largest_difference:.1e} at most")  # fmt: skip
        assert self.num_compared > 0
        assert self.num_stopped <= most_stops * self.num_compared


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32", device="cpu")


def ending(loaded, *eos):
    """The same model, in which these ordinary tokens end an answer. Returns (loaded, all eos)."""
    model = copy.copy(loaded.model)
    model.generation_config = copy.copy(model.generation_config)
    model.generation_config.eos_token_id = list(eos)
    return loaded._replace(model=model), {*eos, loaded.tokenizer.eos_token_id}


def prompts_of(seed, num_prompts, longest=40):
    rnd = random.Random(seed)
    return [
        [rnd.randrange(256) for _ in range(rnd.randint(1, longest))] for _ in range(num_prompts)
    ]


def assert_nothing_is_held(llm):
    manager = llm.manager
    manager.check()
    assert not manager.tables and not manager.requests
    assert manager.num_free_blocks == manager.num_blocks and list(manager.copies()) == []


@pytest.mark.parametrize("name", MANAGERS)
def test_it_finds_what_transformers_finds(tiny, name):
    """Over 20 prompts in all, with widths, block sizes and lengths of their own."""
    tally, rnd = Tally(), random.Random(name)
    for prompt in prompts_of(name, 7):
        block_size = rnd.choice([1, 3, 4, 16])
        llm = LLM(tiny, kv_cache_manager=MANAGERS[name](block_size), check_every_step=True)
        penalty = rnd.choice([1.0, 0.0, 2.0, -1.0])
        params = BeamSearchParams(rnd.randint(1, 6), rnd.randint(2, 14), length_penalty=penalty)
        tally.check(llm, prompt, params, {257})
        assert_nothing_is_held(llm)
    tally.close(most_stops=0.2)


@pytest.mark.parametrize("early_stopping", [False, True])
def test_end_tokens_end_answers_as_in_transformers(tiny, early_stopping):
    tally, num_early, num_late = Tally(), 0, 0
    for i, prompt in enumerate(prompts_of(early_stopping, 8)):
        loaded, eos = ending(tiny, *random.Random(i).sample(range(256), 24))
        llm = LLM(loaded, kv_cache_manager=MANAGERS["paged"](), check_every_step=True)
        for penalty in (1.0, -0.5):
            params = BeamSearchParams(3, 12, length_penalty=penalty, early_stopping=early_stopping)
            tally.check(llm, prompt, params, eos)
        [output] = llm.beam_search(prompt, params)
        lengths = [len(each.tokens) - len(prompt) for each in output.sequences]
        num_early += max(lengths) < 12
        num_late += max(lengths) == 12
        [ignoring] = llm.beam_search(prompt, BeamSearchParams(3, 12, ignore_eos=True))
        assert {len(each.tokens) - len(prompt) for each in ignoring.sequences} == {12}
        assert_nothing_is_held(llm)
    tally.close(most_stops=0.2)
    assert num_early > 2 and num_late + num_early == 8


@pytest.mark.parametrize("name", MANAGERS)
def test_a_prompt_longer_than_a_step_is_computed_in_pieces(tiny, name):
    [prompt] = prompts_of(5, 1, longest=1)
    prompt = prompt * 30
    params = BeamSearchParams(5, 9)
    whole = LLM(tiny, kv_cache_manager=MANAGERS[name]()).beam_search(prompt, params)
    pieces = LLM(tiny, kv_cache_manager=MANAGERS[name](), max_num_batched_tokens=4, max_num_seqs=2)
    num_tokens, run = [], pieces.runner.run
    pieces.runner.run = lambda scheduled, *rest: (
        num_tokens.append(sum(n for _, n in scheduled)) or run(scheduled, *rest)
    )
    [output] = pieces.beam_search(prompt, params)
    assert max(num_tokens) == 4
    assert [s.tokens for s in output.sequences] == [s.tokens for s in whole[0].sequences]
    assert_nothing_is_held(pieces)


def test_beams_share_blocks_and_a_learners_manager_recomputes(tiny):
    """The most blocks that five beams hold at once, and the tokens that are computed."""
    prompt, params = [7] * 41, BeamSearchParams(5, 8)
    most, computed = {}, {}
    for name in MANAGERS:
        llm = LLM(tiny, kv_cache_manager=MANAGERS[name]())
        in_use, num_tokens, run = [], [], llm.runner.run

        def watched(scheduled, *rest, llm=llm, in_use=in_use, num_tokens=num_tokens, run=run):
            in_use.append(llm.manager.num_blocks - llm.manager.num_free_blocks)
            num_tokens.append(sum(n for _, n in scheduled))
            return run(scheduled, *rest)

        llm.runner.run = watched
        llm.beam_search(prompt, params)
        most[name], computed[name] = max(in_use), sum(num_tokens)
    assert computed["paged"] == computed["prefix"] == 41 + 5 * 7  # the last token never runs
    assert computed["of a learner"] > 41 + 5 * 7 < computed["contiguous"]
    # 10 full blocks of the prompt once; then each of 5 beams its own copy of the last, and a next
    assert 10 < most["paged"] <= 10 + 2 * 5 and most["prefix"] == most["paged"]
    assert most["of a learner"] == 5 * 12


def test_a_prompt_is_found_in_the_prefix_cache_and_put_there(tiny):
    llm = LLM(tiny, kv_cache_manager=MANAGERS["prefix"](), check_every_step=True)
    prompt, params = list(range(30)), BeamSearchParams(3, 6)
    num_tokens, run = [], llm.runner.run
    llm.runner.run = lambda scheduled, *rest: (
        num_tokens.append(sum(n for _, n in scheduled)) or run(scheduled, *rest)
    )
    first, second = llm.beam_search([prompt, prompt], params)
    assert [s.tokens for s in first.sequences] == [s.tokens for s in second.sequences]
    assert num_tokens[0] == 30 and num_tokens[6] == 30 - 28
    [output] = llm.generate(prompt, SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.num_cached_tokens == 28
    llm.manager.check()


def test_salted_prompts_share_with_their_own_only(tiny):
    llm = LLM(tiny, kv_cache_manager=MANAGERS["prefix"]())
    prompt, params = list(range(30)), BeamSearchParams(2, 2)
    llm.beam_search(prompt, params, cache_salt="a")
    for salt, num_cached_tokens in ((None, 0), ("b", 0), ("a", 28)):
        [output] = llm.generate(
            prompt, SamplingParams(max_tokens=1), use_tqdm=False, cache_salt=salt
        )
        assert output.num_cached_tokens == num_cached_tokens


def test_recorded_steps_may_be_a_searchs(tiny):
    llm = LLM(tiny, num_gpu_blocks_override=100)
    recorder = record(llm.core)
    llm.beam_search([1, 2, 3], BeamSearchParams(2, 3))
    assert [len(step) for step in recorder.steps] == [1, 2, 2]


# -- what is asked for ----------------------------------------------------------------------------


def test_the_result_has_vllms_shape(tiny):
    llm = LLM(tiny, num_gpu_blocks_override=100)
    outputs = llm.beam_search(["Hello", [1, 2, 3]], BeamSearchParams(beam_width=3, max_tokens=4))
    assert [len(output.sequences) for output in outputs] == [3, 3]
    for prompt, output in zip(([*b"Hello"], [1, 2, 3]), outputs, strict=True):
        logprobs = [sequence.cum_logprob for sequence in output.sequences]
        assert logprobs == sorted(logprobs, reverse=True) and logprobs[0] < 0
        for sequence in output.sequences:
            assert sequence.tokens[:-4] == prompt and sequence.finish_reason == "length"
            assert sequence.text == tiny.tokenizer.decode(sequence.tokens)
    assert outputs[0].sequences[0].text.startswith("Hello")


def test_an_end_token_is_among_the_tokens_but_not_in_the_text(tiny):
    loaded, eos = ending(tiny, *range(0, 256, 3))
    [output] = LLM(loaded, num_gpu_blocks_override=100).beam_search("Hi", BeamSearchParams(4, 6))
    stopped = [each for each in output.sequences if each.finish_reason == "stop"]
    assert stopped
    for each in stopped:
        assert each.tokens[-1] in eos
        assert each.text == tiny.tokenizer.decode(each.tokens[:-1], skip_special_tokens=True)


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_one_beam_is_greedy(tiny, max_tokens):
    llm = LLM(tiny, num_gpu_blocks_override=100)
    for prompt in prompts_of(3, 3):
        [output] = llm.beam_search(prompt, BeamSearchParams(1, max_tokens))
        [greedy] = llm.generate(prompt, SamplingParams(max_tokens=max_tokens), use_tqdm=False)
        [only] = output.sequences
        assert only.tokens == prompt + greedy.outputs[0].token_ids


def test_one_token_takes_the_most_likely(tiny):
    llm = LLM(tiny, kv_cache_manager=MANAGERS["paged"]())
    tally = Tally()
    for prompt in prompts_of(4, 5):
        tally.check(llm, prompt, BeamSearchParams(5, 1), {257})
    tally.close(most_stops=0)


def test_more_beams_than_the_model_has_tokens(tiny):
    """One token gives as many answers as there are tokens; two give enough."""
    llm = LLM(tiny, kv_cache_manager=MANAGERS["paged"](), check_every_step=True)
    [output] = llm.beam_search([5, 6], BeamSearchParams(300, 1))
    assert sorted(each.tokens[-1] for each in output.sequences) == list(range(259))
    [output] = llm.beam_search([5, 6], BeamSearchParams(300, 2))
    answers = {tuple(each.tokens) for each in output.sequences}
    assert len(answers) == len(output.sequences) == 300
    tally = Tally()
    tally.check(llm, [5, 6], BeamSearchParams(300, 3, ignore_eos=True))
    assert_nothing_is_held(llm)


def test_max_model_len_ends_the_answers(tiny):
    llm = LLM(tiny, num_gpu_blocks_override=30, max_model_len=20)
    [output] = llm.beam_search([1] * 17, BeamSearchParams(2, 50))
    assert [len(each.tokens) for each in output.sequences] == [20, 20]
    [output] = llm.beam_search([1] * 19, BeamSearchParams(2, 50))
    assert [len(each.tokens) for each in output.sequences] == [20, 20]
    with pytest.raises(ValueError, match="the prompt has 20 tokens, but max_model_len is 20"):
        llm.beam_search([[1], [1] * 20], BeamSearchParams(2, 50))
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("options, message", [
    ({"beam_width": 0}, "beam_width is 0, but must be from 1 to 1024"),
    ({"beam_width": 1025}, "beam_width is 1025"),
    ({"beam_width": 2.0}, "beam_width must be a whole number"),
    ({"max_tokens": 0}, "max_tokens is 0, but must be at least 1"),
    ({"length_penalty": float("nan")}, "length_penalty is nan"),
    ({"length_penalty": 33}, "length_penalty is 33.0, but must be finite and at least -32"),
    ({"early_stopping": "never"}, "early_stopping must be True or False, not 'never'"),
    ({"ignore_eos": 1}, "ignore_eos must be True or False"),
])  # fmt: skip
def test_wrong_params_are_named(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | options)


def test_params_of_another_kind_are_refused(tiny):
    llm = LLM(tiny, num_gpu_blocks_override=30)
    with pytest.raises(TypeError, match="params must be a BeamSearchParams, not SamplingParams"):
        llm.beam_search("a", SamplingParams())
    assert llm.beam_search([], BeamSearchParams(2, 2)) == []


def test_an_extreme_length_penalty_is_a_number(tiny):
    llm = LLM(tiny, num_gpu_blocks_override=30)
    for penalty in (-32, 32):
        [output] = llm.beam_search("a", BeamSearchParams(2, 9, length_penalty=penalty))
        assert len(output.sequences) == 2


# -- no room, errors, interrupts, and who else is there -------------------------------------------

LONG = SamplingParams(max_tokens=30, ignore_eos=True)


def test_out_of_room_is_said_with_both_numbers_and_leaves_nothing(tiny):
    llm = LLM(tiny, num_gpu_blocks_override=8, block_size=4, max_model_len=32)
    message = r"beam \d of 6 at \d+ tokens: blocks of 4 tokens needed 1, free 0 of 8, held by .* 0"
    with pytest.raises(OutOfKVMemory, match=message):
        llm.beam_search([3] * 9, BeamSearchParams(6, 20))
    assert_nothing_is_held(llm)
    assert len(llm.beam_search([3] * 9, BeamSearchParams(2, 4))[0].sequences) == 2


def test_a_manager_without_fork_needs_a_place_for_each_beam(tiny):
    llm = LLM(tiny, kv_cache_manager=ContiguousKVCacheManager(24, 4, max_model_len=32))
    assert len(llm.beam_search([3] * 9, BeamSearchParams(3, 5))[0].sequences) == 3
    with pytest.raises(OutOfKVMemory, match=r"beam 4 of 4 at 10 tokens: .* needed 8, free 0 of 24"):
        llm.beam_search([3] * 9, BeamSearchParams(4, 5))
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("name", ["paged", "prefix"])
def test_requests_in_flight_keep_their_blocks_and_their_answers(tiny, name, batching):
    make = {"paged": PagedKVCacheManager, "prefix": PrefixCachingKVCacheManager}[name]
    alone = LLM(tiny, num_gpu_blocks_override=100)
    wanted = [o.outputs[0].token_ids for o in alone.generate(["ab", "abc"], LONG, use_tqdm=False)]
    found = alone.beam_search("Hello", BeamSearchParams(3, 6))
    llm = LLM(tiny, kv_cache_manager=make(40, 4), batching=batching, check_every_step=True)
    ids = [llm.add_request(text, LONG) for text in ("ab", "abc")]
    told = {}
    for i in range(40):
        for output in llm.step():
            told[output.request_id] = output
        if i in (2, 11, 20):
            tables = {name: list(table) for name, table in llm.manager.tables.items()}
            with pytest.raises(OutOfKVMemory, match=r"held by other requests [1-9]"):
                llm.beam_search([3] * 70, BeamSearchParams(12, 20))
            assert {name: list(table) for name, table in llm.manager.tables.items()} == tables
            searched = llm.beam_search("Hello", BeamSearchParams(3, 6))
            assert [s.tokens for s in searched[0].sequences] == [
                s.tokens for s in found[0].sequences
            ]
            assert {name: list(table) for name, table in llm.manager.tables.items()} == tables
    assert llm.scheduler.num_preemptions == 0 and not llm.has_unfinished_requests()
    assert [told[request_id].outputs[0].token_ids for request_id in ids] == wanted
    assert_nothing_is_held(llm)


def test_a_beam_takes_no_id_that_runs(tiny):
    llm = LLM(tiny, num_gpu_blocks_override=100)
    ids = [llm.add_request("ab", LONG, f"{i}.beam{j}") for i in (0, 1) for j in range(1, 4)]
    llm.step()
    llm.beam_search("Hello", BeamSearchParams(3, 6))
    assert set(llm.manager.tables) == set(ids)


def test_logits_that_are_not_finite_end_the_search(tiny):
    bad = 77
    model = copy.deepcopy(tiny.model)
    model.model.embed_tokens.weight[bad] = float("nan")
    llm = LLM(tiny._replace(model=model), kv_cache_manager=MANAGERS["paged"]())
    with pytest.raises(RuntimeError, match="not finite"):
        llm.beam_search([1, 2, bad], BeamSearchParams(2, 5))
    assert_nothing_is_held(llm)
    assert all(pool.isfinite().all() for pool in llm.runner.pools)
    # found among the beams: all 256 tokens are tried in the second step
    with pytest.raises(RuntimeError, match="not finite"):
        llm.beam_search([1, 2], BeamSearchParams(259, 3))
    assert_nothing_is_held(llm)
    assert all(pool.isfinite().all() for pool in llm.runner.pools)
    [output] = llm.beam_search([1, 2], BeamSearchParams(2, 2))
    [wanted] = LLM(tiny, num_gpu_blocks_override=50).beam_search([1, 2], BeamSearchParams(2, 2))
    assert [s.tokens for s in output.sequences] == [s.tokens for s in wanted.sequences]


FILES = ("engine/beam_search.py", "minikv/kv_cache/", "minikv/model/runner.py", "request.py")


def new_pool(make):
    return make(40, 4) if make is not ContiguousKVCacheManager else make(40, 4, max_model_len=32)


@pytest.mark.parametrize(
    "make", [PagedKVCacheManager, PrefixCachingKVCacheManager, ContiguousKVCacheManager]
)
def test_an_interrupt_at_any_point_leaves_nothing_and_harms_nobody(tiny, make):
    params, few = BeamSearchParams(3, 4), SamplingParams(max_tokens=5, ignore_eos=True)
    with AtBytecode(FILES, 1 << 60) as counter:
        llm = LLM(tiny, kv_cache_manager=new_pool(make))
        [wanted] = llm.beam_search([5] * 9, params)
    [greedy] = llm.generate("ab", few, use_tqdm=False)
    rnd, num_cut = random.Random(0), 0
    for _ in range(25):
        llm = LLM(tiny, kv_cache_manager=new_pool(make))
        llm.add_request("ab", few)
        llm.step()
        cutter = AtBytecode(FILES, rnd.randrange(counter.num))
        try:
            with cutter:
                llm.beam_search([5] * 9, params)
        except KeyboardInterrupt:
            num_cut += 1
        llm.manager.check()
        assert set(llm.manager.tables) <= {"0"}
        [output] = llm.beam_search([5] * 9, params)
        assert [s.tokens for s in output.sequences] == [s.tokens for s in wanted.sequences]
        told = []
        while llm.has_unfinished_requests():
            told += llm.step()
        assert told[-1].outputs[0].token_ids == greedy.outputs[0].token_ids
        assert_nothing_is_held(llm)
    assert num_cut > 12


@pytest.mark.parametrize("when", range(5))
def test_an_error_of_the_model_leaves_nothing(tiny, when):
    llm, calls = LLM(tiny, kv_cache_manager=MANAGERS["paged"]()), []

    def failing(*args, forward=llm.runner.forward):
        calls.append(1)
        if len(calls) == when + 1:
            raise RuntimeError("the model fails")
        return forward(*args)

    llm.runner.forward = failing
    with pytest.raises(RuntimeError, match="the model fails"):
        llm.beam_search([5] * 9, BeamSearchParams(3, 6))
    assert_nothing_is_held(llm)


# -- a real model ---------------------------------------------------------------------------------

TEXTS = (
    "Why is the sky blue? Answer in one sentence.",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "The first ten prime numbers are",
    "Translate to French: good morning",
    "Ünïcödé: 日本語の文章",
    "To be, or not to be, that is",
    "The capital of France is",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
)


@pytest.fixture(scope="module")
def smollm2():
    return load("smollm2", dtype="float32", device="cpu")


def compare(smollm2, texts, max_tokens, most_stops):
    tally = Tally()
    for i, text in enumerate(texts):
        llm = LLM(smollm2, kv_cache_manager=MANAGERS["prefix" if i % 2 else "paged"](16))
        params = BeamSearchParams(2 + i % 3, max_tokens, early_stopping=i % 3 == 0)
        tally.check(llm, smollm2.tokenizer(text)["input_ids"], params, {2})
        llm.manager.check()
        assert not llm.manager.tables
    tally.close(most_stops)


@pytest.mark.model
def test_smollm2_finds_what_transformers_finds(smollm2):
    compare(smollm2, TEXTS[:3], 4, most_stops=0.34)


@pytest.mark.long
@pytest.mark.model
def test_smollm2_finds_what_transformers_finds_at_length(smollm2):
    """Those, and as many that the model answers as a chat: its end token comes."""
    chats = [
        smollm2.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for text in TEXTS
    ]
    compare(smollm2, [*TEXTS, *chats], 24, most_stops=0.4)
