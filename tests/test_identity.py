"""One oracle: in float32, greedy output equals the dense cache's token for token, under every
manager, block size, chunk size, batch and preemption."""

import itertools
import random

import pytest
from managers import MinimalManager, RestlessManager
from reference import Comparison, greedy

from minikv.engine import LLM
from minikv.kv_cache.base import cdiv
from minikv.kv_cache.contiguous import RESERVE_POLICIES, ContiguousKVCacheManager
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.model.loader import load
from minikv.request import SamplingParams

MAX_MODEL_LEN = 128
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 31, 33, 48, 64, 65, 90, 3)
NUM_TOKENS = (20, 7, 33, 16, 17, 1, 24, 2, 30, 20, 12, 40)


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def answers(tiny):
    rnd = random.Random(0)
    prompts = [[rnd.randrange(256) for _ in range(n)] for n in PROMPT_LENGTHS]
    return [greedy(tiny.model, p, n) for p, n in zip(prompts, NUM_TOKENS, strict=True)]


@pytest.fixture(scope="module")
def comparison():
    comparison = Comparison()
    yield comparison
    comparison.close()


def serve(llm, answers, comparison, what=""):
    """Answers them all in one batch; afterwards nothing may be held."""
    params = [SamplingParams(max_tokens=len(a.output), ignore_eos=True) for a in answers]
    outputs = llm.generate([a.prompt for a in answers], params, use_tqdm=False)
    for answer, output in zip(answers, outputs, strict=True):
        comparison.check(output.outputs[0].token_ids, answer, f"{what}, request {output}")
    llm.manager.check()
    assert not llm.manager.tables
    assert llm.manager.num_free_blocks == llm.manager.num_blocks


def contiguous(block_size, num_slabs=16):
    num_blocks = cdiv(MAX_MODEL_LEN, block_size) * num_slabs
    return ContiguousKVCacheManager(num_blocks, block_size, max_model_len=MAX_MODEL_LEN)


def minimal(block_size, num_slots=2048):
    return MinimalManager(cdiv(num_slots, block_size), block_size)


BLOCK_SIZES = (1, 2, 3, 4, 7, 8, 16, 32, 64)
BUDGETS, BATCHES = (5, 16, 17, 64, 512), (1, 2, 5, 16)
CASES = list(zip(BLOCK_SIZES * 3, BUDGETS * 6, BATCHES * 7, strict=False))


@pytest.mark.parametrize(
    "block_size, budget, batch",
    [pytest.param(*case, marks=[pytest.mark.long] * (i % 3 > 0)) for i, case in enumerate(CASES)],
)
@pytest.mark.parametrize("make_manager", [contiguous, minimal])
def test_output_equals_the_dense_cache(
    tiny, answers, comparison, make_manager, block_size, budget, batch
):
    llm = LLM(
        tiny,
        kv_cache_manager=make_manager(block_size),
        max_num_batched_tokens=budget,
        max_num_seqs=batch,
    )
    serve(llm, answers, comparison)


@pytest.mark.parametrize("block_size", [1, 16])
def test_one_token_at_a_time_equals_the_dense_cache(tiny, answers, comparison, block_size):
    llm = LLM(tiny, kv_cache_manager=minimal(block_size), max_num_batched_tokens=1)
    serve(llm, answers[:5], comparison)
    assert {step.num_tokens for step in llm.metrics.steps} == {1}


@pytest.mark.parametrize("num_slots", [130, 180, 260])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_pool_too_small_for_all_equals_the_dense_cache(
    tiny, answers, comparison, block_size, num_slots
):
    llm = LLM(tiny, kv_cache_manager=minimal(block_size, num_slots), max_num_batched_tokens=40)
    serve(llm, answers, comparison)
    assert llm.scheduler.num_preemptions > 0


class Refusing:
    """Says None at the calls in `refuse`, counted from 0; not to the only one there is, since
    the scheduler takes that for a manager that has lost its blocks."""

    refuse, num_calls = (), 0

    def allocate_slots(self, request, num_new_tokens, **extra):
        self.num_calls += 1
        if self.num_calls - 1 in self.refuse and self.tables:
            return None
        return super().allocate_slots(request, num_new_tokens, **extra)


class RefusingMinimal(Refusing, MinimalManager):
    pass


class RefusingContiguous(Refusing, ContiguousKVCacheManager):
    pass


def refusing(kind, calls):
    if kind is RefusingMinimal:
        manager = kind(64, 4)
    else:
        manager = kind(128, 4, max_model_len=MAX_MODEL_LEN)
    manager.refuse = calls
    return manager


@pytest.mark.parametrize("kind", [RefusingMinimal, RefusingContiguous])
def test_a_refusal_at_any_call_changes_no_token(tiny, answers, comparison, kind):
    chosen = [answers[1], answers[3], answers[5]]
    llm = LLM(tiny, kv_cache_manager=refusing(kind, ()), max_num_batched_tokens=20)
    serve(llm, chosen, comparison)
    num_calls, num_preemptions = llm.manager.num_calls, 0
    for k in range(num_calls):
        llm = LLM(tiny, kv_cache_manager=refusing(kind, {k}), max_num_batched_tokens=20)
        serve(llm, chosen, comparison, f"refused at call {k}")
        num_preemptions += llm.scheduler.num_preemptions
    assert num_preemptions > num_calls // 2


def test_refusals_in_a_row_change_no_token(tiny, answers, comparison):
    rnd, num_preemptions = random.Random(0), 0
    for _ in range(12):
        calls = set(rnd.sample(range(120), 40))
        llm = LLM(tiny, kv_cache_manager=refusing(RefusingMinimal, calls), max_num_seqs=4)
        serve(llm, answers[:6], comparison, f"refused at {sorted(calls)}")
        num_preemptions += llm.scheduler.num_preemptions
    assert num_preemptions > 100


@pytest.mark.parametrize("seed", range(6))
def test_blocks_that_move_at_every_step_change_no_token(tiny, answers, comparison, seed):
    """Copies in chains and cycles, and tables that change after they were returned."""
    manager = RestlessManager(60, 8, random.Random(seed))
    llm = LLM(tiny, kv_cache_manager=manager, max_num_batched_tokens=40)
    num_copies, run = 0, llm.runner.run

    def counted(scheduled, copies):
        nonlocal num_copies
        num_copies += len(copies)
        return run(scheduled, copies)

    llm.runner.run = counted
    serve(llm, answers, comparison)
    assert num_copies > 100


def test_forked_samples_read_their_own_copies(tiny):
    prompts = [[7] * n for n in (3, 17, 30)]
    params = SamplingParams(max_tokens=12, temperature=1.2, n=4, seed=1)
    plain = LLM(tiny, kv_cache_manager=minimal(4)).generate(prompts, params, use_tqdm=False)
    manager = RestlessManager(200, 4, random.Random(0))
    forked = LLM(tiny, kv_cache_manager=manager).generate(prompts, params, use_tqdm=False)
    for a, b in zip(plain, forked, strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
        assert len({tuple(o.token_ids) for o in a.outputs}) == 4


def test_a_reference_that_ends_by_itself_ends_the_request_too(tiny, answers):
    """An end token in the middle: both stop there."""
    answer = answers[2]
    stop = answer.output[9]
    end = answer.output.index(stop) + 1
    llm = LLM(tiny, kv_cache_manager=minimal(4))
    params = SamplingParams(max_tokens=33, stop_token_ids=[stop])
    [output] = llm.generate([answer.prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids == answer.output[:end]
    assert output.outputs[0].finish_reason == "stop"


# -- a real model ---------------------------------------------------------------------------------

TEXTS = (
    "Why is the sky blue? Answer in one sentence.",
    "def fibonacci(n):\n    ",
    "The first ten prime numbers are",
    "Once upon a time, in a village by the sea,",
    "Ünïcödé: 日本語の文章と絵文字 🎉🎈",
    "To be, or not to be, that is the question: " * 4,
)


@pytest.fixture(scope="module")
def smollm2():
    return load("smollm2", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def real_answers(smollm2):
    prompts = [smollm2.tokenizer(text)["input_ids"] for text in TEXTS]
    return [
        greedy(smollm2.model, p, n) for p, n in zip(prompts, (12, 16, 9, 16, 7, 3), strict=True)
    ]


@pytest.mark.model
@pytest.mark.parametrize("manager, limits", [
    (contiguous(16), {}),
    (contiguous(64, num_slabs=2), {"max_num_batched_tokens": 32}),
    (minimal(1), {"max_num_batched_tokens": 11, "max_num_seqs": 3}),
    (minimal(16, num_slots=128), {"max_num_batched_tokens": 64}),
    (refusing(RefusingMinimal, set(range(3, 90, 5))), {}),
], ids=["contiguous", "two slabs", "chunks", "small pool", "refusing"])  # fmt: skip
def test_smollm2_equals_the_dense_cache(smollm2, real_answers, comparison, manager, limits):
    serve(LLM(smollm2, kv_cache_manager=manager, **limits), real_answers, comparison)


# The three requests may need 36 slots: these pools have fewer, or room for two requests at once.
POOLS = {
    f"paged-{block_size}": lambda B=block_size: PagedKVCacheManager(max(2, 32 // B), B)
    for block_size in (1, 2, 16, 64, 256)
} | {
    f"contiguous-{reserve}": lambda reserve=reserve: ContiguousKVCacheManager(
        8 + 2 * (reserve == "pow2"), 4, max_model_len=16, reserve=reserve
    )
    for reserve in RESERVE_POLICIES
}


@pytest.mark.model
@pytest.mark.parametrize("pool", POOLS)
def test_no_manager_changes_a_token_of_smollm2(smollm2, real_answers, comparison, pool):
    """Prompts of 11, 7 and 6 tokens, in chunks, under pressure."""
    lengths = (5, 6, 4)
    answers = [
        answer._replace(output=answer.output[:n])
        for answer, n in zip(real_answers[:3], lengths, strict=True)
    ]
    llm = LLM(smollm2, kv_cache_manager=POOLS[pool](), max_num_batched_tokens=16)
    serve(llm, answers, comparison)
    most_at_once = max(step.num_seqs for step in llm.metrics.steps)
    assert llm.scheduler.num_preemptions > 0 or most_at_once == 2


# -- the comparison itself ------------------------------------------------------------------------


def test_the_comparison_sees_one_wrong_token(answers):
    answer = answers[0]
    for i in range(len(answer.output)):
        wrong = list(answer.output)
        wrong[i] = (wrong[i] + 1) % 256
        with pytest.raises(AssertionError):
            Comparison().check(wrong, answer)
    with pytest.raises(AssertionError):
        Comparison().check(answer.output[:-1], answer)


def test_the_comparison_stops_at_a_near_tie_and_counts_it(answers):
    answer = answers[0]
    logits = answer.logits.clone()
    first, second = logits[-3].topk(2).indices.tolist()
    logits[-3, second] = logits[-3, first] - 1e-4
    answer = answer._replace(logits=logits)
    comparison = Comparison()
    comparison.check([*answer.output[:-3], second, 1, 1], answer)
    assert (comparison.num_sequences, comparison.num_stopped) == (1, 1)
    with pytest.raises(AssertionError):
        comparison.close()


def test_the_cases_cover_what_they_claim():
    assert {case[0] for case in CASES} == set(BLOCK_SIZES)
    assert {case[1:] for case in CASES} >= set(itertools.product(BUDGETS, BATCHES))
