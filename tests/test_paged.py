"""Paged blocks: which block is taken when, the free queue, and check() on each broken invariant."""

import sys
from collections import Counter, deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minikv.kv_cache import paged
from minikv.kv_cache.base import InvariantBroken, MemoryReport, cdiv
from minikv.kv_cache.paged import (
    BlockPool,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    PagedKVCacheManager,
)
from minikv.request import Request


def new(name, num_prompt_tokens=2, max_tokens=2):
    return Request(name, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)


def ids(blocks):
    return [block.block_id for block in blocks]


def free_ids(manager):
    """In the order in which they will be taken."""
    return ids(manager.block_pool.free_block_queue.get_all_free_blocks())


def state(manager):
    """All that a refusal must leave alone."""
    return (
        {key: list(table) for key, table in manager.tables.items()},
        dict(manager.requests),
        free_ids(manager),
        [block.ref_cnt for block in manager.block_pool.blocks],
        manager.num_free_blocks,
        manager.report(),
    )


def compute(manager, request, num_new_tokens=None):
    """One step, as the scheduler makes it. Returns the slots written."""
    if num_new_tokens is None:
        num_new_tokens = request.num_tokens - request.num_computed_tokens
    first = request.num_computed_tokens
    table = manager.allocate_slots(request, num_new_tokens)
    assert table is manager.tables[request.request_id]
    B = manager.block_size
    slots = [table[p // B] * B + p % B for p in range(first, first + num_new_tokens)]
    request.num_computed_tokens += num_new_tokens
    if request.num_computed_tokens == request.num_tokens:
        request.append(0)  # sampled; it has no keys and values yet
    manager.check()
    return slots


# -- when a block is taken ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_prompt_tokens, slots, num_blocks",
    [
        # The prompt's slots, then those of four decode steps; blocks held after each step.
        (3, [[0, 1, 2], [3], [4], [5], [6]], [1, 1, 2, 2, 2]),
        (4, [[0, 1, 2, 3], [4], [5], [6], [7]], [1, 2, 2, 2, 2]),
        (5, [[0, 1, 2, 3, 4], [5], [6], [7], [8]], [2, 2, 2, 2, 3]),
    ],
    ids=["B-1", "B", "B+1"],
)
def test_a_block_is_taken_when_a_write_crosses_into_it(num_prompt_tokens, slots, num_blocks):
    manager, request = PagedKVCacheManager(8, 4), new("a", num_prompt_tokens, 5)
    seen = [(compute(manager, request), len(manager.tables["a"])) for _ in slots]
    assert seen == list(zip(slots, num_blocks, strict=True))
    assert manager.num_free_blocks == 8 - num_blocks[-1]


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_every_written_slot_is_its_own_and_no_block_comes_early(block_size, beyond):
    """Two requests take turns, so that neither's blocks are consecutive."""
    B = block_size
    manager = PagedKVCacheManager(64, B)
    requests = [new(name, max(1, B + beyond), 2 * B + 2) for name in "ab"]
    written = {}
    for _ in range(2 * B + 2):
        for request in requests:
            first = request.num_computed_tokens
            for position, slot in enumerate(compute(manager, request), first):
                assert written.setdefault(slot, (request.request_id, position)) == (
                    request.request_id,
                    position,
                ), f"slot {slot} is written twice"
            num_computed = request.num_computed_tokens
            assert len(manager.tables[request.request_id]) == cdiv(num_computed, B)
    for request in requests:
        assert request.num_computed_tokens == request.max_kv_tokens
        table = manager.tables[request.request_id]
        for position in range(request.num_computed_tokens):
            assert written[table[position // B] * B + position % B] == (
                request.request_id,
                position,
            )
    assert len(written) == sum(r.num_computed_tokens for r in requests)


def test_blocks_of_one_request_need_not_be_neighbours():
    manager, a, b = PagedKVCacheManager(6, 2), new("a", 2, 4), new("b", 2, 4)
    for _ in range(3):
        compute(manager, a), compute(manager, b)
    assert manager.tables == {"a": [0, 2], "b": [1, 3]}
    assert [block.ref_cnt for block in manager.block_pool.blocks] == [1, 1, 1, 1, 0, 0]


def test_a_prompt_in_chunks_takes_blocks_chunk_by_chunk():
    manager, request = PagedKVCacheManager(8, 4), new("a", 10)
    assert [compute(manager, request, n) for n in (3, 3, 3, 1)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9],
    ]
    assert manager.tables["a"] == [0, 1, 2]


def test_slots_asked_for_twice_are_taken_once():
    """A step that was cut short is scheduled again."""
    manager, request = PagedKVCacheManager(8, 4), new("a", 9)
    table = manager.allocate_slots(request, 9)
    before = state(manager)
    assert manager.allocate_slots(request, 9) is table and state(manager) == before
    assert manager.allocate_slots(request, 3) is table and state(manager) == before
    assert manager.allocate_slots(request, 3, must_fit_tokens=32) is table
    assert state(manager) == before


def test_freed_blocks_wait_in_line_tail_first():
    manager, a, b = PagedKVCacheManager(6, 2), new("a", 6), new("b", 2)
    compute(manager, a), compute(manager, b)
    manager.free(a)
    assert free_ids(manager) == [4, 5, 2, 1, 0]
    assert compute(manager, new("c", 7)) == [8, 9, 10, 11, 4, 5, 2]
    assert manager.tables == {"b": [3], "c": [4, 5, 2, 1]} and free_ids(manager) == [0]
    manager.check()


def test_free_without_a_table_does_nothing():
    manager, request = PagedKVCacheManager(6, 2), new("a", 3)
    before = state(manager)
    manager.free(request)
    assert state(manager) == before
    manager.allocate_slots(request, 3)
    manager.free(request)
    once = state(manager)
    manager.free(request)
    assert state(manager) == once and manager.num_free_blocks == 6


# -- refusals ----------------------------------------------------------------------------------


def refused(manager, request, num_new_tokens, **extra):
    before = state(manager)
    answer = manager.allocate_slots(request, num_new_tokens, **extra)
    if answer is None:
        assert state(manager) == before
    return answer is None


def test_no_room_for_a_new_request():
    manager = PagedKVCacheManager(4, 2)
    compute(manager, new("a", 3))
    assert refused(manager, new("b", 5), 5)
    assert not refused(manager, new("c", 4), 4) and manager.num_free_blocks == 0
    assert refused(manager, new("d", 1), 1)


def test_no_room_to_grow():
    manager, a = PagedKVCacheManager(3, 2), new("a", 3, 9)
    compute(manager, a), compute(manager, new("b", 1))
    assert not refused(manager, a, 1)  # position 3, the last of its second block
    a.num_computed_tokens += 1
    assert refused(manager, a, 1) and refused(manager, a, 2)
    manager.check()


@pytest.mark.parametrize(
    "num_new_tokens, must_fit_tokens, keep_free_blocks, is_refused",
    [
        (3, 0, 2, False),  # of 4 free blocks 2 are taken
        (3, 0, 3, True),
        (3, 4, 2, False),
        (3, 5, 2, True),  # the whole request would take 3
        (3, 5, 1, False),
        (3, 8, 0, False),
        (3, 9, 0, True),
        (3, 1, 2, False),  # must_fit_tokens below what is computed now adds nothing
        (3, 1, 3, True),
    ],
)
def test_admission_and_watermark(num_new_tokens, must_fit_tokens, keep_free_blocks, is_refused):
    manager = PagedKVCacheManager(5, 2)
    compute(manager, new("other", 1))
    extra = {"must_fit_tokens": must_fit_tokens, "keep_free_blocks": keep_free_blocks}
    request = new("a", 12)
    assert refused(manager, request, num_new_tokens, **extra) == is_refused
    if not is_refused:  # what must fit is not taken yet
        assert len(manager.tables["a"]) == 2 and manager.num_free_blocks == 2


def test_what_a_running_request_still_needs_counts_the_blocks_it_has():
    manager, request = PagedKVCacheManager(4, 2), new("a", 3, 9)
    compute(manager, request)  # 2 of 4 blocks, 3 of their 4 slots
    assert not refused(manager, request, 1, keep_free_blocks=99)  # takes none: nothing to refuse
    assert not refused(manager, request, 1, must_fit_tokens=4, keep_free_blocks=99)
    assert refused(manager, request, 1, must_fit_tokens=5, keep_free_blocks=2)
    assert not refused(manager, request, 1, must_fit_tokens=5, keep_free_blocks=1)
    assert not refused(manager, request, 1, must_fit_tokens=8) and len(manager.tables["a"]) == 2
    assert refused(manager, request, 1, must_fit_tokens=9)
    assert refused(manager, request, 2, keep_free_blocks=2)
    assert not refused(manager, request, 2, keep_free_blocks=1) and len(manager.tables["a"]) == 3


def test_blocks_held_in_advance_are_neither_taken_again_nor_given_back():
    manager, request = PagedKVCacheManager(6, 2), new("a", 12)
    manager.allocate_slots(request, 8)  # and then, since the step was cut short, less of them
    assert not refused(manager, request, 1, must_fit_tokens=9)
    assert len(manager.tables["a"]) == 4 and manager.num_free_blocks == 2
    assert refused(manager, request, 1, must_fit_tokens=13)


def test_a_hit_is_an_error_where_nothing_is_cached():
    manager = PagedKVCacheManager(4, 2)
    before = state(manager)
    with pytest.raises(ValueError, match="num_cached_tokens is 2, but nothing is cached"):
        manager.allocate_slots(new("a", 4), 2, num_cached_tokens=2)
    assert state(manager) == before and manager.get_num_cached_tokens(new("a")) == 0


def test_fits_ever_counts_every_slot_of_the_pool():
    manager = PagedKVCacheManager(4, 2)
    assert manager.fits_ever(new("a", 4, 5)) and not manager.fits_ever(new("a", 4, 6))
    assert manager.max_slots_per_request == 8


@pytest.mark.parametrize("max_model_len, slots", [(1, 1), (7, 7), (8, 8), (9, 8)])
def test_one_request_has_no_more_than_max_model_len(max_model_len, slots):
    manager = PagedKVCacheManager(4, 2, max_model_len=max_model_len)
    assert manager.max_slots_per_request == slots and manager.max_model_len == max_model_len
    assert manager.fits_ever(new("a", 1, slots)) and not manager.fits_ever(new("a", 1, slots + 1))


@pytest.mark.parametrize(
    "kwargs", [{"num_blocks": 0}, {"block_size": 0}, {"block_size": 1.5}, {"max_model_len": 0}]
)
def test_impossible_pools_are_refused(kwargs):
    name, value = next(iter(kwargs.items()))
    with pytest.raises((TypeError, ValueError), match=f"{name} .*{value}"):
        PagedKVCacheManager(**{"num_blocks": 4, "block_size": 2, **kwargs})


# -- the report --------------------------------------------------------------------------------


def test_the_waste_is_in_the_last_block_alone():
    manager, a, b = PagedKVCacheManager(8, 4), new("a", 5, 2), new("b", 4, 9)
    assert manager.report(new("next", 99)) == MemoryReport(free=32)
    compute(manager, a)  # 5 of 8 slots, and one more token may come: 2 will never be used
    compute(manager, b)
    assert manager.report() == MemoryReport(live=9, reserved=1, internal=2, free=20)
    compute(manager, b)
    assert manager.report() == MemoryReport(live=10, reserved=4, internal=2, free=16)
    assert manager.report(new("next", 99)) == manager.report()  # external is 0 when paged
    assert manager.report().total == 32


# -- the free queue ----------------------------------------------------------------------------


class Queue(RuleBasedStateMachine):
    """The linked list beside a deque, misuse included."""

    def __init__(self):
        super().__init__()
        self.blocks = [KVCacheBlock(i) for i in range(9)]
        self.queue, self.model = FreeKVCacheBlockQueue(self.blocks[:5]), deque(range(5))

    outside = property(lambda self: [b for b in self.blocks if b.block_id not in self.model])

    @rule(n=st.integers(-1, 7))
    def popleft_n(self, n):
        if 0 <= n <= len(self.model):
            assert ids(self.queue.popleft_n(n)) == [self.model.popleft() for _ in range(n)]
        else:
            with pytest.raises(ValueError, match=f"{n} blocks .*: {len(self.model)} are free"):
                self.queue.popleft_n(n)

    @rule()
    def popleft(self):
        if self.model:
            assert self.queue.popleft().block_id == self.model.popleft()
        else:
            with pytest.raises(ValueError, match="1 blocks cannot be taken: 0 are free"):
                self.queue.popleft()

    @precondition(lambda self: self.outside)
    @rule(data=st.data())
    def append(self, data):
        block = data.draw(st.sampled_from(self.outside))
        self.queue.append(block)
        self.model.append(block.block_id)

    @rule(data=st.data())
    def append_n(self, data):
        chosen = data.draw(st.permutations(self.outside).flatmap(_start_of))
        self.queue.append_n(chosen)
        self.model.extend(ids(chosen))

    @rule(data=st.data())
    def append_n_with_one_too_many(self, data):
        """One that is in the queue, or the same one twice: those before it are appended."""
        chosen = data.draw(st.permutations(self.outside).flatmap(_start_of))
        wrong = [self.blocks[i] for i in self.model] + chosen
        if wrong:
            again = data.draw(st.sampled_from(wrong))
            with pytest.raises(ValueError, match=f"block {again.block_id} is in the free queue"):
                self.queue.append_n([*chosen, again, *self.outside])
            self.model.extend(ids(chosen))

    @rule(data=st.data())
    def remove(self, data):
        block = data.draw(st.sampled_from(self.blocks))
        if block.block_id in self.model:
            self.queue.remove(block)
            self.model.remove(block.block_id)
        else:
            with pytest.raises(ValueError, match=f"block {block.block_id} is not in the free"):
                self.queue.remove(block)

    @invariant()
    def same_both_ways(self):
        queue = self.queue
        assert ids(queue.get_all_free_blocks()) == list(self.model)
        assert queue.num_free_blocks == len(self.model)
        forwards, block = [], queue.head.next_free_block
        while block is not queue.tail:
            forwards.append(block.block_id)
            block = block.next_free_block
        backwards, block = [], queue.tail.prev_free_block
        while block is not queue.head:
            backwards.append(block.block_id)
            block = block.prev_free_block
        assert forwards == backwards[::-1] == list(self.model)
        for block in self.outside:
            assert block.prev_free_block is None and block.next_free_block is None


def _start_of(blocks):
    return st.integers(0, len(blocks)).map(lambda n: list(blocks[:n]))


TestQueue = Queue.TestCase
TestQueue.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None, derandomize=True
)


def test_a_block_has_no_dictionary():
    """A pool has a hundred thousand of them."""
    assert not hasattr(KVCacheBlock(0), "__dict__")


def test_a_sentinel_cannot_be_removed():
    queue = FreeKVCacheBlockQueue([KVCacheBlock(0)])
    for sentinel in (queue.head, queue.tail):
        with pytest.raises(ValueError, match="not in the free queue"):
            queue.remove(sentinel)
    assert ids(queue.get_all_free_blocks()) == [0]


# -- the pool ----------------------------------------------------------------------------------


def pool_state(pool):
    return ids(pool.free_block_queue.get_all_free_blocks()), [b.ref_cnt for b in pool.blocks]


def test_a_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(4)
    a, b = pool.get_new_blocks(2)
    pool.touch([a])
    pool.touch([a])
    assert (a.ref_cnt, b.ref_cnt, pool.num_free_blocks) == (3, 1, 2)
    pool.check({0: ["x", "y", "z"], 1: ["x"]})
    pool.free_blocks([b, a])
    pool.free_blocks([a])
    assert pool_state(pool) == ([2, 3, 1], [1, 0, 0, 0])
    pool.free_blocks([a])
    assert pool_state(pool) == ([2, 3, 1, 0], [0, 0, 0, 0])
    pool.check({})


def test_a_block_given_back_by_two_holders_at_once_is_free_once():
    pool = BlockPool(2)
    [a] = pool.get_new_blocks(1)
    pool.touch([a])
    pool.free_blocks([a, a])
    assert pool_state(pool) == ([1, 0], [0, 0])


def test_touch_takes_a_free_block_out_of_the_middle():
    pool = BlockPool(5)
    pool.touch([pool.blocks[2]])
    assert pool_state(pool) == ([0, 1, 3, 4], [0, 0, 1, 0, 0]) and pool.num_free_blocks == 4
    pool.touch([pool.blocks[2], pool.blocks[0]])
    assert pool_state(pool) == ([1, 3, 4], [1, 0, 2, 0, 0])
    pool.check({2: ["a", "b"], 0: ["b"]})


@pytest.mark.parametrize("wrong", [[0, 1, 2], [3], [0, 0], [1, 0, 1, 1]])
def test_what_nobody_holds_cannot_be_freed_and_nothing_changes(wrong):
    pool = BlockPool(4)
    _, b = pool.get_new_blocks(2)
    pool.touch([b])
    before = pool_state(pool)
    with pytest.raises(ValueError, match=f"block {wrong[-1]} is freed, but nobody holds it"):
        pool.free_blocks([pool.blocks[i] for i in wrong])
    assert pool_state(pool) == before == ([2, 3], [1, 2, 0, 0])


def test_more_than_there_are_cannot_be_taken_and_nothing_changes():
    pool = BlockPool(3)
    pool.get_new_blocks(1)
    with pytest.raises(ValueError, match="3 blocks cannot be taken: 2 are free"):
        pool.get_new_blocks(3)
    assert pool_state(pool) == ([1, 2], [1, 0, 0])
    with pytest.raises(ValueError, match="-1 blocks cannot be taken"):
        pool.get_new_blocks(-1)
    assert pool_state(pool) == ([1, 2], [1, 0, 0])
    assert pool.get_new_blocks(0) == []


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_block_in_the_queue_cannot_be_appended_and_those_before_it_are_in(waiting):
    blocks = [KVCacheBlock(block_id) for block_id in range(5)]
    queue = FreeKVCacheBlockQueue(blocks[:2])
    with pytest.raises(ValueError, match=f"block {waiting} is in the free queue already"):
        queue.append_n([blocks[2], blocks[3], blocks[waiting], blocks[4]])
    assert queue.get_all_free_blocks() == blocks[:4] and queue.num_free_blocks == 4
    assert blocks[4].prev_free_block is blocks[4].next_free_block is None
    queue.append_n(blocks[4:])
    assert queue.get_all_free_blocks() == blocks


# -- any order of events, beside a model that is a list ----------------------------------------


class Paged(RuleBasedStateMachine):
    NUM_BLOCKS, BLOCK_SIZE = 9, 2

    def __init__(self):
        super().__init__()
        self.manager = PagedKVCacheManager(self.NUM_BLOCKS, self.BLOCK_SIZE)
        self.free, self.tables, self.running = list(range(self.NUM_BLOCKS)), {}, []
        self.count = 0

    def allocate(self, request, n, must_fit, keep):
        before, table = state(self.manager), self.tables.get(request.request_id, [])
        need = cdiv(request.num_computed_tokens + n, self.BLOCK_SIZE) - len(table)
        want = max(need, cdiv(must_fit, self.BLOCK_SIZE) - len(table))
        got = self.manager.allocate_slots(
            request, n, must_fit_tokens=must_fit, keep_free_blocks=keep
        )
        assert (got is None) == (want > 0 and want + keep > len(self.free))
        if got is None:
            assert state(self.manager) == before
            return False
        taken, self.free = self.free[: max(0, need)], self.free[max(0, need) :]
        self.tables[request.request_id] = table + taken
        assert got == self.tables[request.request_id]
        request.num_computed_tokens += n
        request.num_tokens = max(request.num_tokens, request.num_computed_tokens + 1)
        return True

    @rule(n=st.integers(1, 8), must_fit=st.integers(0, 20), keep=st.integers(0, 9))
    def admit(self, n, must_fit, keep):
        request = new(f"r{self.count}", n, 12)
        self.count += 1
        if self.allocate(request, n, must_fit, keep):
            self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(n=st.integers(1, 5), must_fit=st.integers(0, 20), keep=st.integers(0, 9), data=st.data())
    def go_on(self, n, must_fit, keep, data):
        self.allocate(data.draw(st.sampled_from(self.running)), n, must_fit, keep)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data):
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.free += self.tables.pop(request.request_id)[::-1]
        self.manager.free(request)

    @invariant()
    def agrees(self):
        manager = self.manager
        manager.check()
        assert manager.tables == self.tables and free_ids(manager) == self.free
        assert manager.num_free_blocks == manager.block_pool.num_free_blocks == len(self.free)
        report = manager.report()
        assert report.total == self.NUM_BLOCKS * self.BLOCK_SIZE and min(report) >= 0
        assert report.free == len(self.free) * self.BLOCK_SIZE
        assert report.rounding == report.cached == report.external == 0


TestPaged = Paged.TestCase
TestPaged.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None, derandomize=True
)


# -- check() sees planted faults ---------------------------------------------------------------


def two_running():
    """Ten blocks of 2: a holds 0, 1 and 2; b holds 3; both share 4; 5 to 9 are free."""
    manager = PagedKVCacheManager(10, 2)
    a, b = new("a", 5), new("b", 2)
    compute(manager, a), compute(manager, b)
    [shared] = manager.block_pool.get_new_blocks(1)
    manager.block_pool.touch([shared])
    for name in "ab":
        manager.tables[name].append(shared.block_id)
    manager.check()
    return manager


def block(manager, i):
    return manager.block_pool.blocks[i]


def queue_of(manager):
    return manager.block_pool.free_block_queue


def outside(m):
    m.tables["b"] = [3, 10]


def negative(m):
    m.tables["a"] = [-1, 0, 1]


def twice_in_one_table(m):
    m.tables["a"] = [0, 1, 2, 4, 2]
    block(m, 2).ref_cnt = 2


def twice_in_one_table_and_shared(m):
    m.tables["b"] = [3, 4, 4]
    block(m, 4).ref_cnt = 3


def held_by_two(m):
    m.tables["b"] = [3, 4, 1]


def ref_cnt_too_high(m):
    block(m, 3).ref_cnt = 2


def ref_cnt_too_low(m):
    block(m, 4).ref_cnt = 1


def ref_cnt_of_a_free_block(m):
    block(m, 7).ref_cnt = 1


def table_lost(m):
    del m.tables["b"]


def request_lost(m):
    del m.requests["b"]


def block_dropped(m):
    m.tables["a"] = [0, 1, 2]


def freed_while_shared(m):
    queue_of(m).append(block(m, 4))


def freed_while_held(m):
    queue_of(m).append(block(m, 1))


def taken_and_forgotten(m):
    queue_of(m).remove(block(m, 6))


def of_another_pool(m):
    queue_of(m).append(KVCacheBlock(6))


def of_no_pool(m):
    queue_of(m).append(KVCacheBlock(-1))


def prev_torn(m):
    block(m, 7).prev_free_block = block(m, 5)


def next_torn(m):
    block(m, 6).next_free_block = block(m, 8)


def next_missing(m):
    block(m, 8).next_free_block = None


def tail_torn(m):
    queue_of(m).tail.prev_free_block = block(m, 8)


def head_torn(m):
    block(m, 5).prev_free_block = None


def cycle(m):
    """The last block leads back to the front."""
    queue_of(m).head.prev_free_block = block(m, 9)
    block(m, 9).next_free_block = queue_of(m).head


def skipped(m):
    """Both links agree, but two blocks are jumped over."""
    block(m, 5).next_free_block, block(m, 8).prev_free_block = block(m, 8), block(m, 5)


def counted_too_few(m):
    queue_of(m).num_free_blocks -= 1


def counted_too_many(m):
    queue_of(m).num_free_blocks += 1


def table_too_short(m):
    m.requests["a"].num_computed_tokens = 9


FAULTS = [
    (outside, r"request 'b' holds block 10, but the pool has blocks 0 to 9"),
    (negative, r"request 'a' holds block -1"),
    (twice_in_one_table, r"request 'a' holds block 2 twice"),
    (twice_in_one_table_and_shared, r"request 'b' holds block 4 twice"),
    (held_by_two, r"block 1 has ref_cnt 1, but 2 tables name it: \['a', 'b'\]"),
    (ref_cnt_too_high, r"block 3 has ref_cnt 2, but 1 tables name it: \['b'\]"),
    (ref_cnt_too_low, r"block 4 has ref_cnt 1, but 2 tables name it: \['a', 'b'\]"),
    (ref_cnt_of_a_free_block, r"block 7 has ref_cnt 1, but 0 tables name it"),
    (table_lost, r"'b' has 2 computed tokens in 0 slots"),
    (request_lost, r"table of 'b'"),
    (block_dropped, r"block 4 has ref_cnt 2, but 1 tables name it: \['b'\]"),
    (freed_while_shared, r"block 4 is free, but in the tables of \['a', 'b'\]"),
    (freed_while_held, r"block 1 is free, but in the tables of \['a'\]"),
    (taken_and_forgotten, r"block 6 is lost: in no table, and not free"),
    (of_another_pool, r"KVCacheBlock\(6, ref_cnt 0\), which is not of this pool"),
    (of_no_pool, r"KVCacheBlock\(-1, ref_cnt 0\), which is not of this pool"),
    (prev_torn, r"torn: .* KVCacheBlock\(6.* is KVCacheBlock\(7.* previous is KVCacheBlock\(5"),
    (next_torn, r"torn: .* KVCacheBlock\(6.* is KVCacheBlock\(8.* previous is KVCacheBlock\(7"),
    (next_missing, r"torn: .* KVCacheBlock\(8.* is None, whose previous is None"),
    (tail_torn, r"torn: .* KVCacheBlock\(9.* is KVCacheBlock\(-1.* previous is KVCacheBlock\(8"),
    (head_torn, r"torn: .* KVCacheBlock\(-1.* is KVCacheBlock\(5.* previous is None"),
    (cycle, r"num_free_blocks is 5, but the free queue is longer"),
    (skipped, r"num_free_blocks is 5, but the free queue has 3 blocks"),
    (counted_too_few, r"num_free_blocks is 4, but the free queue is longer"),
    (counted_too_many, r"num_free_blocks is 6, but the free queue has 5 blocks"),
    (table_too_short, r"request 'a' has 9 computed tokens in 8 slots"),
]


@pytest.mark.parametrize("plant, message", FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_check_sees(plant, message):
    manager = two_running()
    plant(manager)
    with pytest.raises(InvariantBroken, match=message):
        manager.check()


def test_a_shared_block_outlives_its_first_holder():
    manager = two_running()
    manager.free(manager.requests["a"])
    manager.check()
    assert block(manager, 4).ref_cnt == 1 and free_ids(manager) == [5, 6, 7, 8, 9, 2, 1, 0]
    manager.free(manager.requests["b"])
    manager.check()
    assert free_ids(manager) == [5, 6, 7, 8, 9, 2, 1, 0, 4, 3]


# -- O(blocks touched), never O(pool) ----------------------------------------------------------


COUNT = Counter()


class CountedBlock(KVCacheBlock):
    """Counts every look at a link or a counter, and every change of one."""

    __slots__ = ()

    def __getattribute__(self, name):
        COUNT["read", name] += 1
        return super().__getattribute__(name)

    def __setattr__(self, name, value):
        COUNT["written", name] += 1
        super().__setattr__(name, value)


class CountedList(list):
    """Counts the entries that are looked at; a walk or a copy counts them all."""

    def __getitem__(self, key):
        COUNT["entries"] += 1
        if isinstance(key, slice):
            COUNT["entries"] += len(range(len(self))[key])
        return super().__getitem__(key)

    def __iter__(self):
        COUNT["entries"] += len(self)
        return super().__iter__()

    def __contains__(self, value):
        COUNT["entries"] += len(self)
        return super().__contains__(value)


def operations(num_blocks, monkeypatch):
    """Requests come, grow, are refused, report and go. Returns what was counted: looks at blocks
    and at the list of them, and the lines of minikv that were executed."""
    monkeypatch.setattr(paged, "KVCacheBlock", CountedBlock)
    manager = PagedKVCacheManager(num_blocks, 16)
    manager.block_pool.blocks = CountedList(manager.block_pool.blocks)
    lines = Counter()

    def trace(frame, event, arg):
        if "minikv" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines[frame.f_code.co_filename, frame.f_lineno] += 1
        return trace

    COUNT.clear()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        requests = [new(f"r{i}", 100 + i, 60) for i in range(5)]
        for request in requests:
            manager.allocate_slots(request, request.num_tokens)
            request.num_computed_tokens = request.num_tokens
        for _ in range(40):
            for request in requests:
                manager.allocate_slots(request, 1)
                request.num_computed_tokens += 1
        assert manager.allocate_slots(new("huge"), 16 * num_blocks) is None
        manager.report(new("next"))
        manager.block_pool.touch([manager.block_pool.blocks[num_blocks // 2]])
        for request in requests:
            assert manager.num_free_blocks < num_blocks
            manager.free(request)
    finally:
        sys.settrace(before)
    return dict(COUNT), dict(lines)


def test_a_larger_pool_costs_no_operation_more(monkeypatch):
    counts, lines = operations(1_000, monkeypatch)
    many_counts, many_lines = operations(100_000, monkeypatch)
    assert many_counts == counts and many_lines == lines
    # Per block: its reference count is set when it is taken and lowered when it goes back.
    num_blocks = sum(cdiv(100 + i + 40, 16) for i in range(5))
    assert counts["written", "ref_cnt"] == 2 * num_blocks + 1
    assert counts["entries"] == num_blocks + 1
    assert 0 < counts["written", "next_free_block"] < 5 * num_blocks


def test_the_count_would_see_a_walk_through_the_pool(monkeypatch):
    class Walks(BlockPool):
        @property
        def num_free_blocks(self):
            return sum(block.ref_cnt == 0 for block in self.blocks)

        def get_new_blocks(self, num_blocks):
            assert num_blocks <= self.num_free_blocks
            return super().get_new_blocks(num_blocks)

    monkeypatch.setattr(paged, "BlockPool", Walks)
    assert operations(1_000, monkeypatch) != operations(1_100, monkeypatch)
