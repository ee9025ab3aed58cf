"""Prefix caching: what is found, what is compared, what is given up, and what never changes."""

import random

import pytest
from oracle import engine, reference_of

from minikv.kv_cache.base import BlockCopy, InvariantBroken
from minikv.kv_cache.block_cache import CachedBlock
from minikv.kv_cache.eviction import EVICTION, FIFO, LFU, Pinned
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager, contents, digest
from minikv.metrics import summarize
from minikv.request import Request

B = 4
HEADER = list(range(100, 112))  # three blocks


def manager_of(num_blocks=16, **options):
    return PrefixCachingKVCacheManager(num_blocks, B, **options)


def new(name, tokens, **options):
    return Request(name, tokens, **options)


def admit(manager, request, num_tokens=None):
    """As the scheduler does: look up, allocate, compute all, publish. Returns the hit's tokens."""
    hit = manager.get_num_cached_tokens(request)
    num_tokens = (num_tokens or request.num_tokens) - hit
    extra = {"num_cached_tokens": hit} if hit else {}
    assert manager.allocate_slots(request, num_tokens, **extra) is not None
    request.num_computed_tokens = hit + num_tokens
    manager.cache_blocks(request)
    manager.check()
    return hit


def serve(manager, request):
    hit = admit(manager, request)
    end(manager, request)
    return hit


def end(manager, request):
    request.finish_reason = "length"
    manager.free(request)
    manager.check()


def grow(manager, request, tokens):
    for token in tokens:
        request.append(token)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
        manager.cache_blocks(request)
        manager.check()


# -- what is found --------------------------------------------------------------------------------


def test_a_prompt_finds_the_full_blocks_of_one_that_began_alike():
    manager = manager_of()
    assert serve(manager, new("a", [*HEADER, 1, 2])) == 0
    assert serve(manager, new("b", [*HEADER, 3, 4, 5, 6])) == 12
    assert serve(manager, new("c", [*HEADER[:9], 0, 0, 0])) == 8
    assert serve(manager, new("d", [0, *HEADER])) == 0  # one token further on
    assert serve(manager, new("e", [*HEADER[4:8], 1])) == 0  # equal tokens, another history


def test_while_it_runs_its_blocks_are_shared_not_copied():
    manager = manager_of()
    a, b = new("a", [*HEADER, 1]), new("b", [*HEADER, 2])
    admit(manager, a)
    assert admit(manager, b) == 12
    assert manager.tables["a"][:3] == manager.tables["b"][:3]
    assert [manager.block_pool.blocks[i].ref_cnt for i in manager.tables["a"]] == [2, 2, 2, 1]
    assert manager.num_free_blocks == 16 - 5 and not manager.copies()
    report = manager.report()
    assert report.live == 14 and report.total == 64


@pytest.mark.parametrize("num_tokens, hit", [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_the_last_token_is_always_left_to_run(num_tokens, hit):
    manager = manager_of()
    serve(manager, new("a", HEADER))
    assert serve(manager, new("b", HEADER[:num_tokens])) == hit


def test_output_is_found_too():
    manager = manager_of()
    a = new("a", [1, 2, 3], max_tokens=9)
    admit(manager, a)
    grow(manager, a, [5, 6, 7, 8, 9, 10])
    end(manager, a)
    assert serve(manager, new("b", [1, 2, 3, 5, 6, 7, 8, 9, 10, 11])) == 8


def test_a_preempted_request_finds_its_own_blocks():
    manager = manager_of()
    a = new("a", HEADER, max_tokens=5)
    admit(manager, a)
    a.append(7)
    manager.free(a)
    a.num_computed_tokens = 0
    assert admit(manager, a) == 12
    end(manager, a)


def test_two_equal_prompts_in_one_step_both_compute_and_neither_leaks():
    manager = manager_of(8)
    a, b = new("a", HEADER, max_tokens=9), new("b", HEADER, max_tokens=9)
    for request in (a, b):
        assert manager.get_num_cached_tokens(request) == 0
        manager.allocate_slots(request, 12)
        request.num_computed_tokens = 12
    for request in (a, b):
        manager.cache_blocks(request)
    firsts = list(manager.tables["a"])
    assert [block.block_id for block in manager.block_pool.cached_blocks.values()] == firsts
    end(manager, a)
    grow(manager, b, [1, 2, 3, 4])  # its next block hangs on the first's
    assert len(manager.block_pool.cached_blocks) == 4
    end(manager, b)
    assert manager.num_free_blocks == 8
    assert serve(manager, new("c", [*HEADER, 1, 2, 3, 4, 5])) == 16


def test_who_lost_its_published_beginning_publishes_its_own():
    """a's blocks are evicted while b, which computed the same, still runs."""
    manager = manager_of(8)
    a, b = new("a", HEADER, max_tokens=9), new("b", HEADER, max_tokens=9)
    for request in (a, b):
        manager.allocate_slots(request, 12)
        request.num_computed_tokens = 12
    for request in (a, b):
        manager.cache_blocks(request)
    end(manager, a)
    serve(manager, new("other", list(range(17))))  # 5 blocks: 2 were free, 3 are a's
    assert manager.num_evictions == 3
    grow(manager, b, [1, 2, 3, 4])
    assert [b.block_id for b in manager.block_pool.cached_blocks.values()][-4:] == (
        manager.tables["b"]
    )
    end(manager, b)
    assert serve(manager, new("c", [*HEADER, 1, 2, 3, 4, 5])) == 16


# -- what is compared -----------------------------------------------------------------------------


def test_a_collision_costs_a_miss_and_never_a_wrong_block():
    manager = manager_of(hash_fn=lambda data: b"same")
    serve(manager, new("a", [*HEADER, 1]))
    assert serve(manager, new("b", [7] * 12)) == 0
    assert len(manager.block_pool.cached_blocks) == 1


def test_of_two_that_collide_the_newest_is_found():
    """Else one dead entry would keep its key from everybody for ever."""
    manager = manager_of(hash_fn=lambda data: b"same")
    serve(manager, new("a", [1, 2, 3, 4, 0]))
    assert serve(manager, new("b", [7] * 5)) == 0
    assert serve(manager, new("c", [7] * 5)) == 4


def test_with_a_constant_hash_a_block_is_known_by_its_parent_too():
    """Equal tokens in every block: only the parent tells the second from the first."""
    manager = manager_of(hash_fn=lambda data: b"same")
    serve(manager, new("a", [7] * 9))
    assert serve(manager, new("b", [7] * 9)) in (0, 4)  # the map holds one block under that key
    core = engine(manager, max_num_batched_tokens=64)
    requests = [Request(f"r{i}", [7] * n, max_tokens=6) for i, n in enumerate((9, 9, 13, 4, 1))]
    core.run(requests)
    for request in requests:
        assert request.token_ids == reference_of(request)


def test_a_hash_that_is_blind_to_position_still_gives_right_answers_but_fewer_hits():
    blind = manager_of(64, hash_fn=lambda data: digest(data[-4 * B :]))
    chained = manager_of(64)
    prompts = [[1, 2, 3, 4] * 3 + [9], [5] * 4 + [1, 2, 3, 4] * 2 + [9], [1, 2, 3, 4] * 3 + [8]]
    hits = {}
    for manager in (blind, chained):
        core = engine(manager, max_num_seqs=1)
        requests = [Request(f"r{i}", prompt, max_tokens=3) for i, prompt in enumerate(prompts)]
        core.run(requests)
        for request in requests:
            assert request.token_ids == reference_of(request)
        hits[manager] = [request.num_cached_tokens for request in requests]
    assert hits[chained] == [0, 0, 12] and sum(hits[blind]) < 12


def test_a_salt_keeps_tenants_apart_from_the_first_block_on():
    manager = manager_of(32)
    serve(manager, new("a", [*HEADER, 1], cache_salt="red"))
    assert serve(manager, new("b", [*HEADER, 1], cache_salt="blue")) == 0
    assert serve(manager, new("c", [*HEADER, 1])) == 0
    assert serve(manager, new("d", [*HEADER, 1], cache_salt="red")) == 12
    collided = manager_of(32, hash_fn=lambda data: data[-4 * B :])  # does not see the salt
    serve(collided, new("a", [*HEADER, 1], cache_salt="red"))
    assert serve(collided, new("b", [*HEADER, 1], cache_salt="blue")) == 0


@pytest.mark.parametrize("tokens", [[-1] * 5, [2**40] * 5, [2**32 - 1] * 5, [0] * 5])
def test_any_integer_is_a_token(tokens):
    manager = manager_of()
    serve(manager, new("a", tokens))
    assert serve(manager, new("b", tokens)) == 4
    assert contents(tokens[:4], 2) == contents(tokens[:2], 2) * 2


# -- forks and what may be written ----------------------------------------------------------------


def fork_of(manager, parent, name, num_computed_tokens):
    child = new(name, parent.token_ids, max_tokens=8)
    child.num_computed_tokens = num_computed_tokens
    assert manager.fork(parent, child)
    manager.check()
    return child


@pytest.mark.parametrize("kind", [PagedKVCacheManager, PrefixCachingKVCacheManager])
def test_the_first_writer_copies_a_shared_tail_and_the_last_writes_in_place(kind):
    manager = kind(8, B)
    a = new("a", HEADER[:6], max_tokens=8)
    admit(manager, a)
    b, c = fork_of(manager, a, "b", 6), fork_of(manager, a, "c", 6)
    assert manager.num_free_blocks == 6 and manager.report().live == 6
    [head, tail] = manager.tables["a"]
    for request in (b, c, a):
        request.append(1)
        manager.allocate_slots(request, 1)
        manager.check()
    assert manager.tables["a"] == [head, tail]
    own = [manager.tables[name][1] for name in "bc"]
    assert sorted(manager.copies()) == sorted(BlockCopy(tail, dst, 1) for dst in own)
    assert len({tail, *own}) == 3 and manager.num_free_blocks == 4
    for request in (a, b, c):
        request.num_computed_tokens += 1
        end(manager, request)
    assert manager.num_free_blocks == 8 and not manager._forked_tails


def test_a_published_tail_is_copied_while_shared_and_unpublished_by_its_last_holder():
    """A child runs the last prompt token itself, into a block that is full and published."""
    manager = manager_of(8)
    a = new("a", HEADER, max_tokens=8)
    admit(manager, a)
    b = fork_of(manager, a, "b", 11)
    last = manager.tables["a"][2]
    end(manager, a)
    assert manager.block_pool.blocks[last].key is not None
    manager.allocate_slots(b, 1)
    manager.check()
    assert manager.tables["b"][2] == last and not manager.copies()
    assert manager.block_pool.blocks[last].key is None
    b.num_computed_tokens = 12
    manager.cache_blocks(b)
    assert manager.block_pool.blocks[last].key is not None
    c = fork_of(manager, b, "c", 11)
    manager.allocate_slots(c, 1)
    assert manager.tables["c"][2] != last and manager.block_pool.blocks[last].key is not None


@pytest.mark.parametrize("kind", [PagedKVCacheManager, PrefixCachingKVCacheManager])
def test_a_copy_that_finds_no_room_is_refused_and_changes_nothing(kind):
    manager = kind(2, B)
    a = new("a", HEADER[:6], max_tokens=8)
    admit(manager, a)
    b = fork_of(manager, a, "b", 6)
    before = {name: list(table) for name, table in manager.tables.items()}
    b.append(1)
    assert manager.allocate_slots(b, 1) is None
    manager.check()
    assert before == manager.tables and not manager.copies()
    end(manager, a)
    assert manager.allocate_slots(b, 1) == before["b"]  # now it is the last holder


def test_a_copy_for_somebody_who_left_is_not_made():
    manager = PagedKVCacheManager(8, B)
    a = new("a", HEADER[:6], max_tokens=8)
    admit(manager, a)
    b = fork_of(manager, a, "b", 6)
    b.append(1)
    manager.allocate_slots(b, 1)
    end(manager, b)
    assert manager.copies() == []


def test_every_copy_and_every_tail_is_forgotten_with_its_block():
    """Whatever is left would be read as another's once the block has been taken again."""
    manager = PagedKVCacheManager(8, B)
    a = new("a", HEADER[:6], max_tokens=8)
    admit(manager, a)
    b = fork_of(manager, a, "b", 6)
    for request in (b, a):  # both leave, and neither has written
        end(manager, request)
    assert not manager._forked_tails
    c = new("c", HEADER[:6], max_tokens=8)
    admit(manager, c)
    d = fork_of(manager, c, "d", 6)
    for request in (c, d):
        request.append(1)
        manager.allocate_slots(request, 1)
    assert not manager._forked_tails  # d was the last holder: it is d's own tail
    end(manager, c)
    assert manager.copies() == [] and len(manager.tables["d"]) == 2


def test_a_fork_that_cannot_be_is_refused_in_words():
    manager = PagedKVCacheManager(8, B)
    a, b = new("a", HEADER, max_tokens=8), new("b", HEADER, max_tokens=8)
    assert manager.fork(a, b) is False  # the parent holds nothing
    admit(manager, a)
    b.num_computed_tokens = 13
    with pytest.raises(ValueError, match="counts 13 computed tokens, but its parent has 12"):
        manager.fork(a, b)
    b.num_computed_tokens = 12
    assert manager.fork(a, b)
    with pytest.raises(ValueError, match="'b' has a table"):
        manager.fork(a, b)
    manager.check()


# -- what is given up first -----------------------------------------------------------------------


def test_blocks_without_a_key_are_taken_before_those_with_one():
    """Else three short prompts, whose tails nobody can find, would push out a header."""
    manager = manager_of(5)
    serve(manager, new("a", [*HEADER, 1]))  # three blocks with a key; two without are left
    for i in range(3):
        serve(manager, new(f"short{i}", [i, i]))
    assert manager.num_evictions == 0
    assert serve(manager, new("b", [*HEADER, 2])) == 12


def test_tails_go_before_heads():
    manager = manager_of(4)
    serve(manager, new("a", [*HEADER, 1]))
    serve(manager, new("other", [5] * 8))  # takes the free one, and one of a's three
    assert serve(manager, new("b", [*HEADER, 2])) == 8


def test_least_recently_used():
    manager = manager_of(6)
    a, b = [*HEADER[:8], 1], [7] * 9
    serve(manager, new("a", a))
    serve(manager, new("b", b))
    serve(manager, new("a2", a))
    serve(manager, new("c", [3] * 12))  # two were free; b's tail is the third
    assert manager.num_evictions == 1
    assert serve(manager, new("a3", a)) == 8


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("lru", ["young1", "young0", "old1", "old0"]),
        ("fifo", ["old0", "old1", "young0", "young1"]),
        ("lfu", ["young1", "young0", "old1", "old0"]),
        ("pinned", ["young1", "young0", "old1", "old0"]),
    ],
)
def test_each_order(kind, expected):
    manager = manager_of(16, eviction=kind)
    old, young = new("old", HEADER[:8]), new("young", [7] * 8)
    serve(manager, old)
    serve(manager, young)
    cached = manager.block_pool.cached_blocks
    names = {
        cached[key[0]].block_id: f"{request.request_id}{place}"
        for request in (old, young)
        for place, key in enumerate(manager.block_keys(request, 2))
    }
    for i in range(3):
        assert serve(manager, new(f"again{i}", [*HEADER[:8], i])) == 8
    order = manager.block_pool.cached_free
    listed = [names[block.block_id] for block in order.get_all_free_blocks()]
    taken = [names[block.block_id] for block in order.popleft_n(4)]
    assert listed == taken == expected


def test_what_was_popular_once_stays_with_lfu_and_goes_with_lru():
    hits = {}
    for kind in ("lru", "lfu"):
        manager = manager_of(6, eviction=kind)
        for i in range(4):
            serve(manager, new(f"old{i}", [*HEADER[:8], i]))
        for i in range(6):
            serve(manager, new(f"young{i}", [50 + i] * 9))
        hits[kind] = serve(manager, new("old", [*HEADER[:8], 9]))
    assert hits == {"lru": 0, "lfu": 8}


@pytest.mark.parametrize("kind", EVICTION.values())
def test_every_order_against_a_list(kind):
    """Enter, leave from the middle, be taken, in random turns: what it says and what it does."""
    for seed in range(20):
        rnd = random.Random(seed)
        blocks = [CachedBlock(block_id) for block_id in range(12)]
        for block in blocks:
            block.key, block.publication = (block.block_id, None), rnd.random()
            block.num_hits = rnd.randrange(3)
        order, inside = kind(), set()
        if kind is Pinned:
            order.pinned = {1, 5, 7}
        for _ in range(200):
            outside = [block for block in blocks if block not in inside]
            listed = order.get_all_free_blocks()
            assert set(listed) == inside and len(listed) == order.num_free_blocks == len(inside)
            move = rnd.randrange(3)
            if move == 0:
                entering = rnd.sample(outside, rnd.randint(0, len(outside)))
                order.append_n(entering)
                inside |= set(entering)
            elif move == 1 and inside:
                block = rnd.choice(listed)
                order.remove(block)
                inside.remove(block)
            else:
                n = rnd.randint(0, len(inside))
                assert order.popleft_n(n) == listed[:n]
                inside -= set(listed[:n])
        outside = [block for block in blocks if block not in inside]
        with pytest.raises(ValueError, match="cannot be taken"):
            order.popleft_n(len(inside) + 1)
        if outside:
            with pytest.raises(ValueError, match="not in the free queue"):
                order.remove(outside[0])
        if inside:
            with pytest.raises(ValueError, match="in the free queue already"):
                order.append_n([next(iter(inside))])
        assert order.num_free_blocks == len(inside)


def test_a_heap_forgets_its_ghosts():
    for kind in (FIFO, LFU):
        order, blocks = kind(), manager_of(8).block_pool.blocks
        for _ in range(1000):
            order.append_n(blocks)
            for block in blocks:
                order.remove(block)
        assert len(order._heap) <= 100


# -- pins -----------------------------------------------------------------------------------------


def test_a_pinned_header_outlives_whoever_washes_through():
    hits = {}
    for kind in ("lru", "pinned"):
        manager = manager_of(12, eviction=kind, max_pinned_blocks=3)
        if kind == "pinned":
            assert manager.pin(new("pin", [*HEADER, 1])) == 3
        serve(manager, new("a", [*HEADER, 1]))
        waits = new("waits", [1, 2])  # somebody runs meanwhile, or the pins would yield
        admit(manager, waits)
        for i in range(5):
            serve(manager, new(f"unique{i}", [50 + i] * 32))
        end(manager, waits)
        hits[kind] = serve(manager, new("b", [*HEADER, 2]))
    assert hits == {"lru": 0, "pinned": 12}


def test_pins_yield_when_nothing_else_can_run():
    manager = manager_of(6, eviction="pinned", max_pinned_blocks=3)
    manager.pin(new("pin", HEADER))
    serve(manager, new("a", [*HEADER, 1]))
    small, big = new("small", [1]), new("big", [9] * 24)
    admit(manager, small)
    assert manager.allocate_slots(big, 24) is None and manager.num_free_blocks == 5
    assert manager.allocate_slots(big, 12) is None
    assert manager.allocate_slots(big, 8) is not None
    manager.free(big)
    end(manager, small)
    assert serve(manager, big) == 0 and manager.num_evictions == 3


def test_a_hit_on_pinned_blocks_is_no_eviction():
    """They are idle and pinned, but this request is what they are kept for."""
    manager = manager_of(6, eviction="pinned", max_pinned_blocks=3)
    manager.pin(new("pin", HEADER))
    serve(manager, new("a", [*HEADER, 1]))
    admit(manager, new("small", [1]))
    assert admit(manager, new("b", [*HEADER, 2, 3])) == 12


def test_pins_outlive_a_reset_and_can_be_taken_back():
    manager = manager_of(12, eviction="pinned", max_pinned_blocks=4)
    manager.pin(new("pin", HEADER))
    serve(manager, new("a", [*HEADER, 1]))
    manager.reset()
    manager.check()
    serve(manager, new("b", [*HEADER, 1]))
    assert manager.block_pool.cached_free.kept.num_free_blocks == 3
    assert manager.unpin(new("pin", HEADER[:4])) == 2
    manager.check()
    assert manager.block_pool.cached_free.kept.num_free_blocks == 2
    assert manager.block_pool.cached_free.others.num_free_blocks == 1


def test_pins_beyond_the_cap_and_without_the_order_are_refused():
    manager = manager_of(12, eviction="pinned")
    assert manager.pin(new("pin", HEADER)) == 3
    with pytest.raises(ValueError, match="4 blocks would be pinned, but max_pinned_blocks is 3"):
        manager.pin(new("more", [1, 2, 3, 4]))
    assert len(manager._pins) == 3
    with pytest.raises(ValueError, match="LRU keeps no pins"):
        manager_of(12).pin(new("pin", HEADER))
    with pytest.raises(ValueError, match="known: lru, fifo, lfu, pinned"):
        manager_of(12, eviction="mru")


# -- the whole cache ------------------------------------------------------------------------------


def test_the_cache_is_reset_only_while_nobody_holds_blocks():
    manager = manager_of(8)
    a = new("a", [*HEADER, 1])
    admit(manager, a)
    assert manager.reset_prefix_cache() is False
    end(manager, a)
    assert manager.report().cached == 12 and manager.num_cached_free_blocks == 3
    assert manager.reset_prefix_cache() is True
    manager.check()
    assert manager.report().cached == 0 and manager.num_free_blocks == 8
    assert serve(manager, new("b", [*HEADER, 1])) == 0


def test_a_stale_hit_is_an_error_that_changes_nothing():
    manager = manager_of(8)
    serve(manager, new("a", HEADER))
    b = new("b", [*HEADER, 1])
    for wrong in (16, 5):
        with pytest.raises(ValueError, match=f"num_cached_tokens is {wrong}, but"):
            manager.allocate_slots(b, 1, num_cached_tokens=wrong)
    assert not manager.tables
    manager.check()
    with pytest.raises(ValueError, match="nothing is cached"):
        PagedKVCacheManager(8, B).allocate_slots(b, 1, num_cached_tokens=4)


def test_an_answer_holds_for_its_request_and_until_an_eviction():
    manager = manager_of(8)
    other = [7] * 12
    serve(manager, new("a", HEADER))
    serve(manager, new("b", other))
    c, d = new("c", [*HEADER, 1]), new("d", [*other, 1])
    assert manager.get_num_cached_tokens(c) == 12
    table = list(manager.allocate_slots(d, 1, num_cached_tokens=12))  # not what c was told
    manager.free(d)
    cached = manager.block_pool.cached_blocks
    assert [cached[key[0]].block_id for key in d.block_keys] == table[:3]
    assert manager.get_num_cached_tokens(c) == 12
    e = new("e", list(range(20)))
    manager.allocate_slots(e, 20)  # takes a's blocks
    with pytest.raises(ValueError, match="num_cached_tokens is 12, but"):
        manager.allocate_slots(c, 1, num_cached_tokens=12)
    assert manager.tables.keys() == {"e"}


def test_must_fit_and_watermark_count_what_is_still_to_be_taken():
    def fits(**limits):
        manager = manager_of(8)
        serve(manager, new("a", HEADER))
        b = new("b", [*HEADER, 1], max_tokens=99)
        return manager.allocate_slots(b, 1, num_cached_tokens=12, **limits) is not None

    assert fits(must_fit_tokens=32) and not fits(must_fit_tokens=33)
    assert fits(keep_free_blocks=4) and not fits(keep_free_blocks=5)
    manager = manager_of(8)
    admit(manager, new("a", [*HEADER, 0]))  # it holds the header: a hit takes only one block
    b = new("b", [*HEADER, 1])
    assert manager.allocate_slots(b, 1, num_cached_tokens=12, keep_free_blocks=4) is None
    assert manager.allocate_slots(b, 1, num_cached_tokens=12, keep_free_blocks=3) is not None


def test_a_request_that_waits_is_hashed_once():
    num_hashed = 0

    def counted(data):
        nonlocal num_hashed
        num_hashed += 1
        return digest(data)

    manager = manager_of(8, hash_fn=counted)
    core = engine(manager, max_num_seqs=4)
    core.submit(new("runs", list(range(20)), max_tokens=12))
    core.step()
    core.submit(new("waits", list(range(50, 70)), max_tokens=1))
    before = num_hashed
    for _ in range(8):
        core.step()
    assert core.scheduler.waiting and num_hashed - before == 4 + 2  # its four; two that filled


def test_hits_are_counted_once_at_the_first_admission():
    manager = manager_of(10)
    core = engine(manager, max_num_seqs=1)
    requests = [new(f"r{i}", [*HEADER, i], max_tokens=2) for i in range(3)]
    core.run(requests)
    assert [request.num_cached_tokens for request in requests] == [0, 12, 12]
    summary = summarize(requests, core.metrics)
    assert summary["total_cached_tokens"] == 24
    assert summary["prefix_cache_hit_rate"] == 24 / 39


# -- requests without tokens ----------------------------------------------------------------------


def test_simulated_requests_share_what_they_name():
    manager = manager_of(64)

    def sim(name, prefix_id="p", prefix_len=10, **options):
        return Request(
            name, num_prompt_tokens=20, prefix_id=prefix_id, prefix_len=prefix_len, **options
        )

    assert serve(manager, sim("a")) == 0
    assert serve(manager, sim("b")) == 8  # two full blocks of ten tokens
    assert serve(manager, sim("c", prefix_id="q")) == 0
    assert serve(manager, sim("d", cache_salt="red")) == 0
    assert serve(manager, Request("e", num_prompt_tokens=20)) == 0
    assert serve(manager, Request("f", num_prompt_tokens=20)) == 0


def test_a_traces_own_keys_are_taken_as_they_are():
    manager = manager_of(64)

    def traced(name, hashes, num_prompt_tokens=16):
        return Request(name, num_prompt_tokens=num_prompt_tokens, block_hashes=hashes)

    assert serve(manager, traced("a", [1, 2, 3, 4])) == 0
    assert serve(manager, traced("b", [1, 2, 5, 6])) == 8
    assert serve(manager, traced("c", [1, 2, 3, 4], 14)) == 12
    assert serve(manager, traced("d", [1, 2, 3, 4], 18)) == 16


def test_tokens_and_names_together_are_refused():
    for names in ({"prefix_id": "p", "prefix_len": 1}, {"block_hashes": [1]}):
        with pytest.raises(ValueError, match="they say what it shares"):
            Request("a", [1, 2], **names)
    with pytest.raises(ValueError, match="prefix_len of request 'a' is 3, but must be from 0 to 2"):
        Request("a", num_prompt_tokens=2, prefix_id="p", prefix_len=3)


# -- check() --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "harm, message",
    [
        (lambda pool: pool.cached_blocks.popitem(), "map of keys"),
        (lambda pool: pool.cached_blocks.update(x=pool.blocks[7]), "map of keys"),
        (lambda pool: setattr(pool.blocks[0], "key", None), "has no key"),
        (lambda pool: setattr(pool.blocks[7], "key", (b"x", b"")), "without|map of keys"),
        (
            lambda pool: pool.free_block_queue.append_n(pool.cached_free.popleft_n(1)),
            "waits among those without",
        ),
        (
            lambda pool: pool.cached_free.append_n(pool.free_block_queue.popleft_n(1)),
            "has no key",
        ),
        (lambda pool: pool.cached_free.popleft_n(1), "lost"),
    ],
)
def test_check_sees_a_broken_cache(harm, message):
    manager = manager_of(8)
    serve(manager, new("a", HEADER))
    admit(manager, new("b", [1, 2, 3, 4, 5]))
    harm(manager.block_pool)
    with pytest.raises(InvariantBroken, match=message):
        manager.check()


def test_check_sees_counts_for_nobody():
    manager = manager_of(8)
    manager._published["ghost"] = 1, None, 0
    with pytest.raises(InvariantBroken, match="ghost"):
        manager.check()
