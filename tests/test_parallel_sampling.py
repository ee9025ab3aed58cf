"""Samples of one prompt share its blocks: the tokens are those that each computes alone, and the
blocks saved are counted."""

import pytest

from minikv.engine import LLM
from minikv.kv_cache.base import cdiv
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.model.loader import load
from minikv.request import SamplingParams


class UnforkedPaged(PagedKVCacheManager):
    def fork(self, parent, child):
        return False


class UnforkedPrefix(PrefixCachingKVCacheManager):
    def fork(self, parent, child):
        return False


KINDS = {
    "paged": (PagedKVCacheManager, UnforkedPaged),
    "prefix": (PrefixCachingKVCacheManager, UnforkedPrefix),
}


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32", device="cpu")


def serve(tiny, manager, prompts, params, **limits):
    """Returns (token ids of all samples, for each step the blocks saved by sharing, llm)."""
    llm = LLM(tiny, kv_cache_manager=manager, check_every_step=True, **limits)
    saved, run = [], llm.runner.run

    def counted(scheduled, copies):
        tables = manager.tables.values()
        held = {block_id for table in tables for block_id in table}
        saved.append(sum(map(len, tables)) - len(held))
        return run(scheduled, copies)

    llm.runner.run = counted
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert not manager.tables and manager.num_free_blocks == manager.num_blocks
    return [[each.token_ids for each in output.outputs] for output in outputs], saved, llm


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("block_size, limits", [
    (16, {}), (4, {"max_num_batched_tokens": 7}), (1, {"max_num_seqs": 6}),
])  # fmt: skip
def test_four_samples_have_the_tokens_that_they_have_without_forks(tiny, name, block_size, limits):
    forking, unforked = KINDS[name]
    prompts = [[7] * 3, [8] * 16, list(range(33)), [1]]
    params = SamplingParams(n=4, max_tokens=9, temperature=1.3, seed=11)
    num_blocks = 640 // block_size
    got, saved, _ = serve(tiny, forking(num_blocks, block_size), prompts, params, **limits)
    wanted, unsaved, _ = serve(tiny, unforked(num_blocks, block_size), prompts, params, **limits)
    assert got == wanted
    assert all(len(set(map(tuple, samples))) == 4 for samples in got)
    assert max(saved) > 0
    assert max(unsaved) == 0 or name == "prefix"  # which finds the full blocks again


@pytest.mark.parametrize("num_blocks", [10, 13, 20])
@pytest.mark.parametrize("name", KINDS)
def test_nor_where_samples_have_to_step_back(tiny, name, num_blocks):
    forking, unforked = KINDS[name]
    prompts, params = [[7] * 9, [8] * 6], SamplingParams(
        n=4, max_tokens=14, temperature=1.3, seed=11
    )  # fmt: skip
    got, _, llm = serve(tiny, forking(num_blocks, 4), prompts, params, max_model_len=40)
    wanted, _, _ = serve(tiny, unforked(200, 4), prompts, params, max_model_len=40)
    assert got == wanted
    assert llm.scheduler.num_preemptions > 0


@pytest.mark.parametrize("num_prompt_tokens", [3, 16, 17, 33, 40])
@pytest.mark.parametrize("name", KINDS)
def test_the_blocks_saved_are_the_prompts_full_ones_less_its_last_token(
    tiny, name, num_prompt_tokens
):
    """Three samples more, each without the blocks that its first num_prompt_tokens - 1 tokens
    fill; the tail is another's until it is written to, which is at once."""
    manager = KINDS[name][0](100, 16)
    params = SamplingParams(n=4, max_tokens=30, temperature=1.0, seed=1, ignore_eos=True)
    _, saved, llm = serve(tiny, manager, [list(range(num_prompt_tokens))], params)
    num_shared = (num_prompt_tokens - 1) // 16
    assert saved == [0] + [3 * num_shared] * 29 + [2 * num_shared]  # the first ends a step sooner
    most = max(step.num_blocks_in_use for step in llm.metrics.steps)
    whole = cdiv(num_prompt_tokens + 29, 16)
    assert most <= 4 * whole - 3 * num_shared
