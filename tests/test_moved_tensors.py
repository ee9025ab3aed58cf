"""Relocation and compaction on real tensors: what is read after a move is what was written before
it, bit for bit, and no token changes. Whatever lies where nobody reads is poisoned."""

import random

import pytest
import torch
from managers import RestlessManager
from reference import Comparison, greedy

from minikv.engine import LLM
from minikv.kv_cache.base import BlockCopy, KVCacheManager
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.model.loader import load
from minikv.model.runner import ModelRunner
from minikv.request import SamplingParams

POISON = 1e4  # not NaN: what a masked score multiplies by 0 has to be a number
PROMPT_LENGTHS = (3, 17, 1, 40, 9, 30, 22, 5)
NUM_TOKENS = (24, 20, 30, 12, 33, 16, 1, 28)

# reserve -> a pool in which requests step back or wait, and move where the policy moves at all
POOLS = {
    "max": {"num_blocks": 40, "block_size": 4},
    "pow2": {"num_blocks": 120, "block_size": 1},
    "double": {"num_blocks": 30, "block_size": 4},
    "exact": {"num_blocks": 25, "block_size": 4},
    "grow": {"num_blocks": 100, "block_size": 1},
}


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def answers(tiny):
    rnd = random.Random(9)  # no two logits of the reference are nearly equal
    prompts = [[rnd.randrange(256) for _ in range(n)] for n in PROMPT_LENGTHS]
    return [greedy(tiny.model, p, n) for p, n in zip(prompts, NUM_TOKENS, strict=True)]


@pytest.fixture(scope="module")
def comparison():
    comparison = Comparison()
    yield comparison
    comparison.close()


def manager_of(reserve, fit="first", **sizes):
    sizes = {"max_model_len": 80} | POOLS[reserve] | sizes
    return ContiguousKVCacheManager(reserve=reserve, fit=fit, **sizes)


def contents(llm):
    """request_id -> (computed tokens, their K and V through the table, [layer, 2, heads, n, d])."""
    B, held = llm.manager.block_size, {}
    for request in llm.scheduler.running:
        n = request.num_computed_tokens
        if n and request.request_id in llm.manager.tables:
            table = list(llm.manager.tables[request.request_id])
            block_ids = [table[i // B] for i in range(n)]
            offsets = [i % B for i in range(n)]
            kv = [pool[:, block_ids, :, offsets].clone() for pool in llm.runner.pools]
            held[request.request_id] = n, kv
    return held


def poison(llm):
    """All slots but those with computed tokens."""
    B = llm.manager.block_size
    lost = torch.ones(llm.manager.num_blocks * B, dtype=torch.bool)
    for request in llm.scheduler.running:
        table = torch.tensor(list(llm.manager.tables[request.request_id]))
        slots = (table[:, None] * B + torch.arange(B)).view(-1)
        lost[slots[: request.num_computed_tokens]] = False
    lost = lost.view(-1, B).nonzero().T
    for pool in llm.runner.pools:
        pool[:, lost[0], :, lost[1]] = POISON


class Watched:
    """Compares what each running request holds before and after the copies of a step, and then
    poisons the rest. num_moved: blocks that were copied."""

    def __init__(self, llm):
        self.llm, self.before, self.num_moved = llm, {}, 0
        self.copy, self.forward = llm.runner._copy, llm.runner.forward
        llm.runner._copy, llm.runner.forward = self._copy, self._forward
        self.update, llm.scheduler.update = llm.scheduler.update, self._update

    def _copy(self, copies):
        self.num_moved += sum(copy.num_blocks for copy in copies)
        self.copy(copies)

    def _forward(self, packed):
        after = contents(self.llm)
        for request_id, (n, kv) in after.items():
            num_before, kv_before = self.before[request_id]
            assert num_before == n
            for a, b in zip(kv_before, kv, strict=True):
                assert torch.equal(a, b), f"{request_id} lost its content"
        poison(self.llm)
        return self.forward(packed)

    def _update(self, *args):
        ended = self.update(*args)
        self.before = contents(self.llm)
        return ended


def serve(llm, answers, comparison, *, each_step=lambda: None, error=()):
    ids = []
    for answer in answers:
        params = SamplingParams(max_tokens=len(answer.output), ignore_eos=True)
        ids.append(llm.add_request(answer.prompt, params))
    outputs, num_errors = {}, 0
    while llm.has_unfinished_requests():
        try:
            outputs |= {o.request_id: o for o in llm.step() if o.finished}
        except error:
            num_errors += 1
            assert num_errors < 500  # it goes on
            continue
        llm.manager.check()
        each_step()
    for request_id, answer in zip(ids, answers, strict=True):
        comparison.check(outputs[request_id].outputs[0].token_ids, answer, f"request {request_id}")
    assert not llm.manager.tables
    assert llm.manager.num_free_blocks == llm.manager.num_blocks
    return num_errors


CASES = [
    ("max", "first", 80, {}), ("pow2", "first", 80, {}), ("pow2", "buddy", 11, {}),
    ("double", "first", 80, {}), ("double", "best", 7, {}), ("double", "buddy", 80, {}),
    ("exact", "first", 80, {}), ("exact", "worst", 11, {}),
    ("grow", "first", 80, {}), ("grow", "next", 7, {}), ("grow", "buddy", 80, {}),
    ("grow", "best", 80, {"num_blocks": 30, "block_size": 4}),
    ("grow", "worst", 16, {"num_blocks": 8, "block_size": 16}),
]  # fmt: skip


@pytest.mark.parametrize("reserve, fit, budget, sizes", CASES)
def test_every_policy_equals_the_dense_cache_in_a_pool_too_small(
    tiny, answers, comparison, reserve, fit, budget, sizes
):
    manager = manager_of(reserve, fit, **sizes)
    llm = LLM(tiny, kv_cache_manager=manager, max_num_batched_tokens=budget, max_num_seqs=8)
    watched = Watched(llm)
    serve(llm, answers, comparison)
    if reserve in ("double", "grow"):
        assert llm.scheduler.num_preemptions > 0
        assert watched.num_moved == manager.num_moved_blocks > 0
    else:  # whoever gets in stays in; the others wait
        assert llm.scheduler.num_preemptions == watched.num_moved == 0
        assert max(step.num_seqs for step in llm.metrics.steps) < len(answers)


@pytest.mark.parametrize("reserve, fit", [
    ("grow", "first"), ("grow", "buddy"), ("double", "best"), ("exact", "first"), ("max", "worst"),
])  # fmt: skip
def test_compaction_between_steps_changes_no_token(tiny, answers, comparison, reserve, fit):
    llm = LLM(tiny, kv_cache_manager=manager_of(reserve, fit), max_num_batched_tokens=64)
    watched, rnd, num_moved_tokens = Watched(llm), random.Random(0), 0

    def compact():
        nonlocal num_moved_tokens
        for _ in range(rnd.choice([0, 1, 2])):
            num_moved_tokens += llm.manager.compact()

    serve(llm, answers, comparison, each_step=compact)
    assert num_moved_tokens > 0 and watched.num_moved == llm.manager.num_moved_blocks > 0


def test_static_batching_over_an_extent_per_row(tiny, answers, comparison):
    for reserve in POOLS:
        manager = manager_of(reserve, num_blocks=240, block_size=1)
        llm = LLM(tiny, kv_cache_manager=manager, batching="static", max_num_seqs=3)
        serve(llm, answers, comparison)


# -- steps that are cut short -------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["before the copies", "after the copies", "in a layer's copies"])
@pytest.mark.parametrize("reserve", ["grow", "restless"])
def test_a_step_cut_short_around_its_copies_changes_no_token(
    tiny, answers, comparison, reserve, place, error
):
    """Every third step, and now and then twice in a row; the pools are poisoned as ever."""
    if reserve == "grow":
        manager = manager_of(reserve)
    else:
        manager = RestlessManager(40, 4, random.Random(0))
    llm = LLM(tiny, kv_cache_manager=manager, max_num_batched_tokens=64)
    watched, runner, rnd = Watched(llm), llm.runner, random.Random(0)
    run, forward, pools = runner.run, runner.forward, list(runner.pools)

    def maybe():
        if rnd.random() < 0.3:
            raise error("cut short")

    if place == "before the copies":
        runner.run = lambda *args: maybe() or run(*args)
    elif place == "after the copies":
        runner.forward = lambda *args: maybe() or forward(*args)
    else:
        watched.copy = Interrupted(runner, watched.copy, maybe)
    num_errors = serve(llm, answers[:6], comparison, error=error)
    assert num_errors > 3 and watched.num_moved > 0
    assert all(a is b for a, b in zip(runner.pools, pools, strict=True))


class Interrupted:
    """A runner's _copy that may raise when it comes to a layer, having copied those before it."""

    def __init__(self, runner, copy, maybe):
        self.runner, self.copy, self.maybe = runner, copy, maybe

    def __call__(self, copies):
        pools = self.runner.pools
        self.runner.pools = [Pool(pool, self.maybe) for pool in pools]
        try:
            self.copy(copies)
        finally:
            self.runner.pools = pools


class Pool:
    def __init__(self, pool, maybe):
        self.pool, self.maybe = pool, maybe

    def __getitem__(self, index):
        self.maybe()
        return self.pool[index]

    def __setitem__(self, index, value):
        self.pool[index] = value


class Nothing:
    """No model: the runner only copies."""

    dtype = torch.float32

    def parameters(self):
        return iter([torch.zeros(1)])


def runner_of(spec, num_blocks=8, block_size=2):
    runner = ModelRunner(Nothing(), spec, KVCacheManager(num_blocks, block_size))
    for layer, pool in enumerate(runner.pools):
        pool[:] = torch.arange(num_blocks + 1.0).view(1, -1, 1, 1, 1) + 100 * layer
    return runner


def blocks_of(runner):
    """Which block each holds, if all layers agree and K, V, heads and slots do."""
    found = None
    for layer, pool in enumerate(runner.pools):
        ids = pool[0, :, 0, 0, 0] - 100 * layer
        assert torch.equal(pool, (ids + 100 * layer).view(1, -1, 1, 1, 1).expand_as(pool))
        assert found is None or torch.equal(found, ids)
        found = ids
    return found.int().tolist()


COPIES = {
    "overlap up": ([BlockCopy(0, 2, 5)], [0, 1, 0, 1, 2, 3, 4, 7, 8]),
    "overlap down": ([BlockCopy(3, 1, 4)], [0, 3, 4, 5, 6, 5, 6, 7, 8]),
    "cycle": ([BlockCopy(0, 1, 1), BlockCopy(1, 0, 1)], [1, 0, *range(2, 9)]),
    "longer": ([BlockCopy(0, 1, 2), BlockCopy(2, 0, 1)], [2, 0, 1, *range(3, 9)]),
    "runs swapped": ([BlockCopy(0, 4, 4), BlockCopy(4, 0, 4)], [4, 5, 6, 7, 0, 1, 2, 3, 8]),
    "one source twice": ([BlockCopy(7, 0, 1), BlockCopy(7, 1, 1)], [7, 7, *range(2, 9)]),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_overlaps_and_cycles(tiny, name):
    copies, expected = COPIES[name]
    runner = runner_of(tiny.spec)
    assert len(runner.pools) > 1
    assert runner.run([], copies) == []
    assert blocks_of(runner) == expected


# -- a real model -------------------------------------------------------------------------------


@pytest.mark.model
def test_smollm2_under_grow_with_preemption_and_compaction(comparison):
    smollm2 = load("smollm2", dtype="float32", device="cpu")
    texts = ("The first ten prime numbers are", "Once upon a time, in a village by", "def f(n):")
    answers = [greedy(smollm2.model, smollm2.tokenizer(t)["input_ids"], 14) for t in texts]
    manager = ContiguousKVCacheManager(44, 1, max_model_len=44, reserve="grow")
    llm = LLM(smollm2, kv_cache_manager=manager)
    steps = iter(range(1000))
    serve(llm, answers, comparison, each_step=lambda: next(steps) % 4 or manager.compact())
    assert llm.scheduler.num_preemptions > 0 and manager.num_relocations > 0
