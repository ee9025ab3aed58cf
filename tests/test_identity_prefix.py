"""The oracle of test_identity.py where prompts share blocks: greedy tokens in float32 equal the
dense cache's, found or computed, and K and V that are found are those that would be computed."""

import random

import pytest
import torch
from random_models import VOCAB, random_model, spec_of
from reference import TOO_CLOSE, Comparison, greedy
from test_attention import FAMILIES

from minikv.engine import LLM
from minikv.kv_cache.eviction import EVICTION
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.kv_cache.radix import RadixKVCacheManager
from minikv.model.loader import Loaded, load
from minikv.request import SamplingParams

MAX_MODEL_LEN = 128
MANAGERS = (PrefixCachingKVCacheManager, RadixKVCacheManager)


@pytest.fixture(scope="module")
def comparison():
    comparison = Comparison()
    yield comparison
    comparison.close()


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32", device="cpu")


def prompts_that_share(seed, vocab, block_size=4):
    """Beginnings of several lengths, around a block's end, behind each a tail of its own; whole
    prompts again; and one that is another's answer to come."""
    rnd = random.Random(seed)
    header = [rnd.randrange(3, vocab) for _ in range(41)]
    prompts = []
    for length in (41, 40, 39, 17, 16, 1):
        tail = [rnd.randrange(3, vocab) for _ in range(rnd.choice([0, 1, 3, 9]))]
        prompts += [header[:length] + tail, [*header[:length], rnd.randrange(3, vocab)]]
    return [*prompts, header, header, header[:block_size]]


def decided(answers):
    """Without those that have a near tie: each is asked for many times, and compared each time."""
    kept = []
    for answer in answers:
        top = answer.decisions.topk(2).values
        if (top[:, 0] - top[:, 1] > TOO_CLOSE).all():
            kept.append(answer)
    assert len(kept) > len(answers) / 2
    return kept


def serve_twice(llm, answers, comparison, what):
    """Cold, then warm, in one batch each. Returns how many tokens were found the second time."""
    num_cached = []
    for turn in ("cold", "warm"):
        params = [SamplingParams(max_tokens=len(a.output), ignore_eos=True) for a in answers]
        outputs = llm.generate([a.prompt for a in answers], params, use_tqdm=False)
        for answer, output in zip(answers, outputs, strict=True):
            comparison.check(output.outputs[0].token_ids, answer, f"{what}, {turn}: {output}")
            assert output.num_cached_tokens < len(answer.prompt)
        num_cached.append(sum(output.num_cached_tokens for output in outputs))
        llm.manager.check()
        assert not llm.manager.tables
        assert llm.manager.num_free_blocks == llm.manager.num_blocks
    assert num_cached[1] > 0
    return num_cached


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_with_hits_and_without(family, manager, comparison):
    model = random_model(family, 0)
    own = "eager" if family == "Gemma2" else "sdpa"
    prompts = prompts_that_share(1, VOCAB)
    answers = decided([greedy(model, prompt, 9, implementation=own) for prompt in prompts])
    llm = LLM(
        Loaded(model, None, spec_of(model)),
        kv_cache_manager=manager(200, 4),
        max_num_batched_tokens=24,
        max_num_seqs=3,
        check_every_step=True,
    )
    cold, warm = serve_twice(llm, answers, comparison, family)
    assert warm > cold > 0


@pytest.fixture(scope="module")
def answers(tiny):
    return decided([greedy(tiny.model, prompt, 12) for prompt in prompts_that_share(2, 256)])


@pytest.mark.parametrize("eviction", EVICTION)
@pytest.mark.parametrize("block_size, num_blocks", [(1, 150), (4, 30), (16, 9), (3, 1000)])
def test_tiny_pools_every_order_and_evictions(
    tiny, answers, comparison, eviction, block_size, num_blocks
):
    """Some of these pools hold hardly one request: blocks are evicted, requests preempted."""
    manager = PrefixCachingKVCacheManager(num_blocks, block_size, eviction=eviction)
    llm = LLM(tiny, kv_cache_manager=manager, max_num_batched_tokens=20, check_every_step=True)
    serve_twice(llm, answers, comparison, f"{eviction} {block_size}")
    if num_blocks < 200:
        assert manager.num_evictions > 0


@pytest.mark.parametrize("kind", [PagedKVCacheManager, *MANAGERS])
@pytest.mark.parametrize("num_prompt_tokens", [3, 15, 16, 17, 32])
def test_forked_samples_equal_samples_that_share_nothing(tiny, kind, num_prompt_tokens):
    """The tail of a prompt is shared by four, whole or not, and each goes on in a copy of it."""
    prompt = [7 + i % 5 for i in range(num_prompt_tokens)]
    params = SamplingParams(max_tokens=20, temperature=1.2, n=4, seed=1)
    alone = LLM(tiny, kv_cache_manager="contiguous").generate(prompt, params, use_tqdm=False)
    manager, num_copies = kind(64, 16), 0
    drain = manager.copies

    def counted():
        nonlocal num_copies
        copies = drain()
        num_copies += len(copies)
        return copies

    manager.copies = counted
    forked = LLM(tiny, kv_cache_manager=manager, check_every_step=True).generate(
        prompt, params, use_tqdm=False
    )
    got = [sample.token_ids for sample in forked[0].outputs]
    assert got == [sample.token_ids for sample in alone[0].outputs]
    assert len(set(map(tuple, got))) == 4
    # All but the last to write copy the tail; of a prompt that ends with its block, the parent
    # goes on in the next block, and each child computes the last token in a copy of its own.
    assert num_copies == (0 if num_prompt_tokens == 17 else 3)


@pytest.mark.parametrize("kind", MANAGERS)
def test_salted_and_aborted_and_preempted_neighbours_change_no_token(
    tiny, answers, comparison, kind
):
    manager = kind(24, 4)
    llm = LLM(tiny, kv_cache_manager=manager, max_num_batched_tokens=20, check_every_step=True)
    rnd = random.Random(3)
    done = {}
    for turn in range(3):
        for i, answer in enumerate(answers):
            params = SamplingParams(max_tokens=len(answer.output), ignore_eos=True)
            salt = [None, "red", "blue"][(turn + i) % 3]
            llm.add_request(answer.prompt, params, f"{turn}.{i}", cache_salt=salt)
        while llm.has_unfinished_requests():
            for output in llm.step():
                if output.finished and output.outputs[0].finish_reason == "length":
                    done[output.request_id] = output
            if rnd.random() < 0.05 and llm.scheduler.running:
                llm.abort(rnd.choice(llm.scheduler.running).request_id)
    assert len(done) > 30 and llm.scheduler.num_preemptions > 0
    assert any(output.num_cached_tokens for output in done.values())
    for name, output in done.items():
        answer = answers[int(name.partition(".")[2])]
        comparison.check(output.outputs[0].token_ids, answer, name)


def test_found_keys_and_values_are_those_that_would_be_computed(tiny):
    """Bitwise, within one shape of a batch: the header's blocks are read before they are needed
    again, and computed anew in an engine that has seen nothing."""
    prompt = [(7 * i) % 250 for i in range(40)]
    params = SamplingParams(max_tokens=1)
    kept = []
    for _ in range(2):
        llm = LLM(tiny, block_size=4, num_gpu_blocks_override=40)
        llm.generate(prompt, params, use_tqdm=False)
        request = llm.scheduler  # nothing runs any more: blocks are found by their keys
        assert not request.running
        cached = llm.manager.block_pool.cached_blocks.values()
        ids = torch.tensor(sorted(block.block_id for block in cached))
        assert len(ids) == 10
        kept.append([pool[:, ids].clone() for pool in llm.runner.pools])
        before = [each.clone() for each in kept[-1]]
        llm.generate([*prompt[:36], 1, 2, 3], SamplingParams(max_tokens=8), use_tqdm=False)
        for pool, each in zip(llm.runner.pools, before, strict=True):
            assert torch.equal(pool[:, ids], each), "a published block has changed"
    for a, b in zip(*kept, strict=True):
        assert torch.equal(a, b)


def test_the_salt_is_checked_and_the_cache_reset(tiny):
    llm = LLM(tiny)
    prompt = list(range(40))
    for salt in (1, "", b"x"):
        with pytest.raises(TypeError, match="cache_salt must be a string"):
            llm.add_request(prompt, cache_salt=salt)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    hits = []
    for salt in (None, None, "red", "red"):
        [output] = llm.generate([prompt], params, use_tqdm=False, cache_salt=salt)
        hits.append(output.num_cached_tokens)
    assert hits == [0, 32, 0, 32]
    llm.add_request(prompt, params)
    llm.step()
    assert llm.reset_prefix_cache() is False
    while llm.has_unfinished_requests():
        llm.step()
    assert llm.reset_prefix_cache() is True
    [output] = llm.generate([prompt], params, use_tqdm=False)
    assert output.num_cached_tokens == 0
