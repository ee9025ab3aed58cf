"""The radix tree: what it finds, what it locks, what it gives up first, and what its check sees.

That its answers are right under any traffic is test_fuzz.py's, test_interrupts.py's and, with
tensors, the last part's here.
"""

import inspect
import random
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import OracleRunner, engine, reference_of
from reference import Comparison, greedy
from test_fuzz import Trace

from minikv.engine import LLM
from minikv.kv_cache.base import BlockCopy, InvariantBroken
from minikv.kv_cache.block_cache import CachingKVCacheManager
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.kv_cache.radix import RadixKVCacheManager
from minikv.kv_cache.radix_tree import RadixBlockPool, RadixNode, num_common
from minikv.model.loader import load
from minikv.request import Request, SamplingParams

A = list(range(1, 13))  # three blocks of 4


def admit(manager, request):
    """As the scheduler does: what is found is adopted, the rest of the known tokens gets slots.
    Returns the hit, None where there is no room."""
    num_hit = manager.get_num_cached_tokens(request)
    extra = {"num_cached_tokens": num_hit} if num_hit else {}
    if manager.allocate_slots(request, request.num_tokens - num_hit, **extra) is None:
        return None
    request.num_computed_tokens = num_hit
    manager.check()
    return num_hit


def compute(manager, request, num_tokens=None):
    """After the forward of its known tokens, or of the first num_tokens."""
    request.num_computed_tokens = request.num_tokens if num_tokens is None else num_tokens
    manager.cache_blocks(request)
    manager.check()


def run(manager, name, prompt, **options):
    """A request whose prompt is computed: (it, its hit)."""
    request = Request(name, prompt, **options)
    num_hit = admit(manager, request)
    manager.copies()
    compute(manager, request)
    return request, num_hit


def end(manager, *requests):
    for request in requests:
        request.finish_reason = "length"
        manager.free(request)
        manager.check()


def put(manager, *prompts, **options):
    """Computed and ended, one after the other. Returns their hits."""
    hits = []
    for prompt in prompts:
        request, num_hit = run(manager, f"put {id(prompt)}", prompt, **options)
        end(manager, request)
        hits.append(num_hit)
    return hits


def found(manager, prompt, **options):
    return manager.get_num_cached_tokens(Request("looks", prompt, **options))


def shape(node):
    """key -> (lock_ref, the same of its children)"""
    return {tuple(c.key): (c.lock_ref, shape(c)) for c in node.children.values()}


def tree(manager, salt=None):
    root = manager.block_pool.trees.get((False, salt))
    return {} if root is None else shape(root)


def without_locks(nodes):
    return {key: without_locks(below) for key, (_, below) in nodes.items()}


def books(manager):
    """All that a refused call must leave as it was."""
    pool = manager.block_pool
    return (
        {name: shape(root) for name, root in pool.trees.items()},
        {key: list(table) for key, table in manager.tables.items()},
        set(manager.requests),
        [block.ref_cnt for block in pool.blocks],
        [block.block_id for block in pool.get_all_free_blocks()],
        dict(manager._held),
        dict(manager._origins),
        manager.num_evictions,
    )


# -- what is found ---------------------------------------------------------------------------------


def test_a_node_is_split_where_two_prompts_part():
    manager = RadixKVCacheManager(16, 2)
    assert put(manager, [1, 2, 3, 4, 5, 6, 7, 8]) == [0]
    assert without_locks(tree(manager)) == {(1, 2, 3, 4, 5, 6, 7, 8): {}}
    assert put(manager, [1, 2, 3, 4, 9, 9]) == [4]
    parted = {(1, 2, 3, 4): {(5, 6, 7, 8): {}, (9, 9): {}}}
    assert without_locks(tree(manager)) == parted
    assert put(manager, [1, 2, 3, 4, 9, 9]) == [5]  # all of it, but for the last token
    assert put(manager, [7, 7]) == [0]
    assert without_locks(tree(manager)) == parted | {(7, 7): {}}
    assert manager.num_cached_free_blocks == 6 and manager.num_evictions == 0


@pytest.mark.parametrize("num_same", range(1, 12))
def test_with_blocks_of_one_token_every_token_counts(num_same):
    manager = RadixKVCacheManager(32, 1)
    put(manager, A)
    prompt = [*A[:num_same], 99, 98]
    assert found(manager, prompt) == num_same
    request, _ = run(manager, "b", prompt)
    assert manager.copies() == []
    table = manager.tables["b"]
    assert len(table) == num_same + 2
    end(manager, request)
    assert manager.num_cached_free_blocks == 12 + 2


@pytest.mark.parametrize("num_same", range(1, 12))
def test_a_hit_that_ends_inside_a_block_copies_it(num_same):
    manager = RadixKVCacheManager(8, 4)
    first, _ = run(manager, "a", A)
    source = list(manager.tables["a"])
    end(manager, first)
    request = Request("b", [*A[:num_same], 99, 98])
    assert admit(manager, request) == num_same
    table = manager.tables["b"]
    num_shared = num_same // 4
    assert table[:num_shared] == source[:num_shared]
    assert not set(table[num_shared:]) & set(source)  # there was room without them
    copy = [BlockCopy(source[num_shared], table[num_shared], 1)] if num_same % 4 else []
    assert manager.copies() == copy and manager.copies() == []
    assert found(manager, [*A, 0]) == 12  # the source is as it was


def test_of_many_children_the_one_with_most_in_common_is_copied():
    rnd, manager = random.Random(0), RadixKVCacheManager(400, 4)
    prompts = [[5, 6, 7, 8] + [rnd.randrange(3) for _ in range(4)] for _ in range(60)]
    put(manager, *prompts)
    for _ in range(300):
        prompt = [5, 6, 7, 8] + [rnd.randrange(3) for _ in range(rnd.randint(1, 6))]
        most = max(num_common(prompt, each) for each in prompts)
        assert found(manager, prompt) == min(most, len(prompt) - 1), prompt


def test_of_a_whole_prompt_the_last_token_is_run():
    for block_size in (1, 2, 4, 5):
        manager = RadixKVCacheManager(64, block_size)
        put(manager, A)
        assert found(manager, A) == 11 if block_size != 5 else 10
        assert found(manager, A[:8]) == 7
        assert found(manager, A[:1]) == 0


def test_only_full_blocks_are_kept():
    manager = RadixKVCacheManager(8, 4)
    put(manager, A[:7])
    assert without_locks(tree(manager)) == {(1, 2, 3, 4): {}}
    assert manager.num_free_blocks == 8 and manager.num_cached_free_blocks == 1


def test_salts_have_trees_of_their_own_and_take_them_away():
    manager = RadixKVCacheManager(16, 2)
    put(manager, A[:4])
    put(manager, A[:4], cache_salt="mine")
    assert found(manager, [*A[:4], 0]) == 4
    assert found(manager, [*A[:4], 0], cache_salt="mine") == 4
    assert found(manager, [*A[:4], 0], cache_salt="thine") == 0
    assert set(manager.block_pool.trees) == {(False, None), (False, "mine")}
    request, _ = run(manager, "all", list(range(100, 132)), cache_salt="big")
    assert set(manager.block_pool.trees) == {(False, "big")} and manager.num_evictions == 4
    end(manager, request)
    assert manager.reset_prefix_cache() and manager.block_pool.trees == {}


def test_tokens_of_any_kind():
    manager = RadixKVCacheManager(16, 2)
    odd = [-1, 1 << 40, 0, -7, 3]
    put(manager, odd)
    assert found(manager, odd) == 4 and found(manager, [-1, 5]) == 1


def test_names_of_blocks_stand_for_tokens_that_are_not_known():
    manager = RadixKVCacheManager(64, 4)
    options = {"num_prompt_tokens": 18, "block_hashes": [7, 8, 9, 10]}
    first = Request("a", **options)
    assert admit(manager, first) == 0
    compute(manager, first)
    assert found(manager, None, num_prompt_tokens=9, block_hashes=[7, 8]) == 8
    assert found(manager, None, num_prompt_tokens=8, block_hashes=[7, 8]) == 7  # the second: copied
    assert found(manager, None, num_prompt_tokens=9, block_hashes=[8, 7]) == 0
    assert found(manager, None, num_prompt_tokens=9) == 0
    assert found(manager, [7, 8]) == 0  # they are no tokens
    again = Request("b", **options)
    assert admit(manager, again) == 16
    compute(manager, again)
    assert manager.tables["a"][:4] == manager.tables["b"][:4]
    end(manager, first, again)
    shared = {"num_prompt_tokens": 20, "prefix_id": "header", "prefix_len": 11}
    for hit in (0, 8):
        request = Request("c", **shared)
        assert admit(manager, request) == hit
        compute(manager, request)
        end(manager, request)


@pytest.mark.parametrize("make", [PrefixCachingKVCacheManager, RadixKVCacheManager])
@pytest.mark.parametrize(
    "named", [{"block_hashes": [7, 8]}, {"prefix_id": "header", "prefix_len": 8}], ids=str
)
def test_named_blocks_are_salted_too(make, named):
    manager, hits = make(32, 4), []
    for salt in (None, "a", None, "a", "b"):
        request = Request("r", num_prompt_tokens=9, cache_salt=salt, **named)
        hits.append(admit(manager, request))
        compute(manager, request)
        end(manager, request)
    assert hits == [0, 0, 8, 8, 0]


def test_a_fork_without_tokens_has_its_parents_names():
    manager = RadixKVCacheManager(16, 2)
    parent = Request("p", num_prompt_tokens=5)
    admit(manager, parent)
    compute(manager, parent)
    child = Request("c", num_prompt_tokens=5)
    child.num_computed_tokens = 4
    assert manager.fork(parent, child)
    manager.check()
    child.num_tokens = 8
    manager.allocate_slots(child, 4)
    compute(manager, child)
    assert len({*manager.tables["p"], *manager.tables["c"]}) == 5
    end(manager, parent, child)
    assert manager.num_free_blocks == 16


# -- who holds what, and what is given up --------------------------------------------------------


def test_locks_count_requests_up_to_the_root():
    manager = RadixKVCacheManager(16, 2)
    first, _ = run(manager, "a", [1, 2, 3, 4, 5, 6])
    assert tree(manager) == {(1, 2, 3, 4, 5, 6): (1, {})}
    second, _ = run(manager, "b", [1, 2, 3, 4, 7, 8])
    assert tree(manager) == {(1, 2, 3, 4): (2, {(5, 6): (1, {}), (7, 8): (1, {})})}
    third, _ = run(manager, "c", [1, 2, 9])
    root = manager.block_pool.trees[False, None]
    assert root.lock_ref == 3
    assert shape(root) == {(1, 2): (3, {(3, 4): (2, {(5, 6): (1, {}), (7, 8): (1, {})})})}
    end(manager, first)
    assert shape(root) == {(1, 2): (2, {(3, 4): (1, {(5, 6): (0, {}), (7, 8): (1, {})})})}
    end(manager, third, second)
    assert root.lock_ref == 0 and shape(root)[1, 2][0] == 0


def test_what_a_running_request_holds_is_not_evicted():
    manager = RadixKVCacheManager(6, 2)
    put(manager, [1, 2, 3, 4, 5, 6])
    request, num_hit = run(manager, "a", [1, 2, 3, 4, 9])
    assert num_hit == 4 and manager.num_free_blocks == 3
    before = books(manager)
    assert admit(manager, Request("b", [7] * 8)) is None
    assert books(manager) == before
    other, _ = run(manager, "c", [7] * 6)  # the last free ones, and (5, 6)
    assert manager.num_evictions == 1 and manager.num_free_blocks == 0
    assert without_locks(tree(manager)) == {(1, 2, 3, 4): {}, (7,) * 6: {}}
    end(manager, request, other)


def test_leaves_go_first_and_of_them_the_least_recently_used():
    manager = RadixKVCacheManager(6, 2)
    put(manager, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [9, 9])
    left = [[1, 2, 3, 4, 5, 6, 0], [1, 2, 3, 4, 7, 8, 0], [9, 9, 0]]
    one_more = [found(manager, prompt) for prompt in left]
    assert one_more == [6, 6, 2] and manager.block_pool.free_block_queue.num_free_blocks == 1
    for num_taken, hits in [
        (1, [6, 6, 2]),  # the block without a key
        (2, [4, 6, 2]),
        (3, [4, 4, 2]),  # not (1, 2, 3, 4), though it was computed first
        (4, [2, 2, 2]),  # the other end of a node of two blocks
        (5, [0, 0, 2]),
        (6, [0, 0, 0]),
    ]:
        other = Request("x", [50 + num_taken] * num_taken * 2)
        admit(manager, other)
        assert [found(manager, prompt) for prompt in left] == hits
        manager.free(other)  # never computed: nothing of it is kept
        manager.check()
    assert manager.num_evictions == 5 and manager.block_pool.trees == {}


def test_used_again_is_used_last():
    manager = RadixKVCacheManager(4, 2)
    put(manager, [1, 2], [3, 4], [5, 6])
    put(manager, [1, 2, 0])
    run(manager, "x", [7, 7, 7, 7])
    assert [found(manager, [*p, 0]) for p in ([1, 2], [3, 4], [5, 6])] == [2, 0, 2]


def test_who_is_evicted_for_his_own_copy_is_read_first():
    """The pool is full: the block that a hit is copied from is itself the only one to be had."""
    manager = RadixKVCacheManager(3, 4)
    runner = OracleRunner(manager)
    first = Request("a", A)
    admit(manager, first)
    runner.run([(first, 12)], manager.copies())
    compute(manager, first)
    end(manager, first)
    second = Request("b", [*A[:10], 0, 0])
    assert admit(manager, second) == 10
    runner.run([(second, 2)], manager.copies())  # reads what it should
    assert second.token_ids[:12] == [*A[:10], 0, 0]
    compute(manager, second)
    assert manager.num_evictions == 1
    end(manager, second)
    third = Request("c", [*A[:6], 0, 0, 0, 0])
    assert admit(manager, third) == 6  # two new blocks, of which one was the source
    runner.run([(third, 4)], manager.copies())


def test_a_source_that_waits_for_its_own_copy_is_traced_back():
    manager = RadixKVCacheManager(8, 4)
    first, _ = run(manager, "a", A)
    source = manager.tables["a"][1]
    second = Request("b", [*A[:6], 0, 0, 0])
    admit(manager, second)
    compute(manager, second)  # in a loop that has not drained yet
    third = Request("c", [*A[:6], 0, 5])
    assert admit(manager, third) == 7
    copies = [BlockCopy(source, manager.tables[name][1], 1) for name in "bc"]
    assert manager.copies() == copies
    end(manager, first, second, third)


def test_equal_prompts_in_one_step_end_with_one_copy():
    manager = RadixKVCacheManager(16, 2)
    pair = [Request(name, [1, 2, 3, 4, 5]) for name in "ab"]
    assert [admit(manager, each) for each in pair] == [0, 0]
    assert manager.num_free_blocks == 10
    for each in pair:
        compute(manager, each)
    a, b = manager.tables["a"], manager.tables["b"]
    assert a[:2] == b[:2] and a[2] != b[2] and manager.num_free_blocks == 12
    assert tree(manager) == {(1, 2, 3, 4): (2, {})}
    end(manager, pair[0])
    assert tree(manager) == {(1, 2, 3, 4): (1, {})} and manager.num_cached_free_blocks == 0
    end(manager, pair[1])
    assert manager.num_free_blocks == 16 and manager.num_cached_free_blocks == 2


def test_two_that_part_in_one_step_share_up_to_there():
    manager = RadixKVCacheManager(16, 2)
    pair = [Request("a", [1, 2, 3, 4, 5, 6]), Request("b", [1, 2, 3, 4, 7, 8])]
    for each in pair:
        admit(manager, each)
    for each in pair:
        compute(manager, each)
    assert tree(manager) == {(1, 2, 3, 4): (2, {(5, 6): (1, {}), (7, 8): (1, {})})}
    assert manager.num_free_blocks == 16 - 4


def test_a_request_grows_its_leaf_and_others_get_a_branch():
    manager = RadixKVCacheManager(16, 1)
    first, _ = run(manager, "a", [1, 2])
    for token in (3, 4):
        first.append(token)
        manager.allocate_slots(first, 1)
        compute(manager, first)
    assert tree(manager) == {(1, 2, 3, 4): (1, {})}
    second, _ = run(manager, "b", [1, 2, 3, 4, 9])  # now it is held by two
    first.append(5)
    manager.allocate_slots(first, 1)
    compute(manager, first)
    assert tree(manager) == {(1, 2, 3, 4): (2, {(9,): (1, {}), (5,): (1, {})})}
    end(manager, first, second)


def test_in_chunks_a_prompt_is_found_as_far_as_it_is_computed():
    manager = RadixKVCacheManager(16, 2)
    request = Request("a", A)
    for num_computed in (3, 8, 12):
        manager.allocate_slots(request, num_computed - request.num_computed_tokens)
        compute(manager, request, num_computed)
        assert found(manager, [*A, 0]) == num_computed // 2 * 2
    assert tree(manager) == {tuple(A): (1, {})}


def test_a_preempted_request_finds_its_own():
    manager = RadixKVCacheManager(16, 4)
    request, _ = run(manager, "a", A)
    request.append(7)
    manager.allocate_slots(request, 1)
    compute(manager, request)
    manager.free(request)  # without a finish_reason
    request.num_computed_tokens = 0
    assert admit(manager, request) == 12
    compute(manager, request)
    end(manager, request)


def test_a_refused_call_changes_nothing():
    manager = RadixKVCacheManager(8, 2)
    put(manager, A[:8])
    holder, _ = run(manager, "h", [30] * 6)
    before = books(manager)
    asks = Request("a", [*A[:5], 9, 9, 9, 9])
    assert manager.get_num_cached_tokens(asks) == 5
    for new, extra in [(8, {}), (4, {"must_fit_tokens": 12}), (4, {"keep_free_blocks": 1})]:
        assert manager.allocate_slots(asks, new, num_cached_tokens=5, **extra) is None
        assert books(manager) == before, extra
    assert manager.allocate_slots(asks, 11) is None
    with pytest.raises(ValueError, match="num_cached_tokens is 6, but 5 tokens are found for req"):
        manager.allocate_slots(asks, 3, num_cached_tokens=6)
    with pytest.raises(ValueError, match="num_cached_tokens is 1, but 5 tokens are found"):
        manager.allocate_slots(holder, 9, num_cached_tokens=1)
    with pytest.raises(ValueError, match="num_cached_tokens is 1, but 0 tokens are found"):
        RadixKVCacheManager(8, 2).allocate_slots(holder, 9, num_cached_tokens=1)  # never asked
    with pytest.raises(ValueError, match="its parent has 6"):
        child = Request("c", [30] * 8)
        child.num_computed_tokens = 7
        manager.fork(holder, child)
    assert books(manager) == before
    assert manager.allocate_slots(asks, 4, num_cached_tokens=5) is not None
    manager.check()


def test_an_answer_does_not_outlive_what_it_names():
    manager = RadixKVCacheManager(6, 2)
    put(manager, A[:8])
    asks, other = Request("a", [*A[:8], 9, 9]), Request("o", [*A[:2], 8, 8])
    assert [manager.get_num_cached_tokens(each) for each in (other, asks)] == [2, 8]
    taker = Request("t", [7] * 6)
    manager.allocate_slots(taker, 6)  # two free ones, and (7, 8)
    before = books(manager)
    with pytest.raises(ValueError, match="num_cached_tokens is 8, but 6 tokens are found"):
        manager.allocate_slots(asks, 2, num_cached_tokens=8)
    assert books(manager) == before
    assert [manager.get_num_cached_tokens(each) for each in (asks, other)] == [6, 2]
    manager.free(taker)
    assert manager.allocate_slots(asks, 4, num_cached_tokens=6) is not None  # not other's answer
    manager.check()


def test_an_abort_before_the_copy_leaves_none_to_be_made():
    manager = RadixKVCacheManager(8, 4)
    put(manager, A)
    request = Request("b", [*A[:6], 0, 0])
    assert admit(manager, request) == 6
    request.finish_reason = "abort"
    manager.free(request)
    manager.check()
    assert manager.copies() == [] and manager.num_free_blocks == 8
    manager.free(request)  # again: nothing is held
    assert found(manager, [*A, 0]) == 12


def test_what_ends_with_an_error_is_not_kept():
    """Its keys and values may be no numbers: a token comes back only if logits were finite."""
    manager = RadixKVCacheManager(16, 1)
    core = engine(manager, has_bad_logits=lambda request: True, max_num_batched_tokens=64)
    core.submit(Request("a", [1, 2, 3, 4]))
    core.step()
    assert found(manager, [1, 2, 3, 4, 5]) == 0 and manager.block_pool.trees == {}


def test_reset_forgets_all_unless_somebody_runs():
    manager = RadixKVCacheManager(16, 2)
    request, _ = run(manager, "a", A)
    before = books(manager)
    assert manager.reset_prefix_cache() is False and books(manager) == before
    end(manager, request)
    assert manager.reset_prefix_cache() is True
    manager.check()
    assert found(manager, A) == 0 and manager.num_free_blocks == 16
    assert manager.num_cached_free_blocks == 0 and manager.num_evictions == 0


# -- forks ---------------------------------------------------------------------------------------


def forked(num_computed=7, prompt=A[:8], num_blocks=8):
    """(manager, parent with its prompt computed, child that shares num_computed tokens)"""
    manager = RadixKVCacheManager(num_blocks, 4)
    parent, _ = run(manager, "p", prompt)
    child = Request("c", prompt)
    child.num_computed_tokens = num_computed
    assert manager.fork(parent, child)
    manager.check()
    return manager, parent, child


def test_a_forks_tail_that_lies_in_the_tree_is_copied():
    manager, parent, child = forked()
    assert tree(manager) == {tuple(A[:8]): (2, {})}
    p = manager.tables["p"]
    manager.allocate_slots(child, 1)
    manager.check()
    c = manager.tables["c"]
    assert c[0] == p[0] and manager.copies() == [BlockCopy(p[1], c[1], 1)]
    assert tree(manager) == {(1, 2, 3, 4): (2, {(5, 6, 7, 8): (1, {})})}
    compute(manager, child)  # it wrote the same: one copy is enough
    assert manager.tables["c"] == manager.tables["p"] and manager.num_free_blocks == 6
    end(manager, parent, child)


def test_the_last_holder_takes_its_tail_out_of_the_tree_and_writes_in_place():
    manager, parent, child = forked(num_blocks=3)
    parent.append(9)
    manager.allocate_slots(parent, 1)
    compute(manager, parent)
    for token in (10, 11, 12):
        parent.append(token)
    compute(manager, parent)  # a block stands after the tail
    assert without_locks(tree(manager)) == {tuple(A[:8]): {tuple(A[8:]): {}}}
    end(manager, parent)
    before = list(manager.tables["c"])
    child.token_ids[7] = 99
    manager.allocate_slots(child, 1)
    manager.check()
    assert manager.tables["c"] == before and manager.copies() == []
    assert tree(manager) == {(1, 2, 3, 4): (1, {})}
    assert manager.num_free_blocks == 1 and manager.num_cached_free_blocks == 0
    compute(manager, child)
    assert tree(manager) == {(1, 2, 3, 4, 5, 6, 7, 99): (1, {})}


def test_a_fork_of_what_is_not_cached_yet_is_held_by_both():
    manager = RadixKVCacheManager(8, 4)
    parent = Request("p", A)
    admit(manager, parent)
    parent.num_computed_tokens = 12
    child = Request("c", [*A, 0])
    child.num_computed_tokens = 12
    assert manager.fork(parent, child)
    assert tree(manager) == {tuple(A): (2, {})}
    end(manager, parent)
    assert manager.num_free_blocks == 5 and admit(manager, Request("x", [70] * 24)) is None
    assert not manager.fork(Request("nobody", A), Request("d", A))
    end(manager, child)


class OwnWays:
    """Forks that share any beginning of their parent and then part from it, as beams do; some step
    back, some end. Every slot that is read is compared with the tokens' history."""

    def __init__(self, make, seed):
        rnd = self.rnd = random.Random(seed)
        self.manager = make(rnd.randint(4, 24), rnd.choice([1, 2, 3, 4, 5]))
        self.runner = OracleRunner(self.manager)
        self.running, self.num_named = [], 0
        self.common = self.tokens(12)
        self.counts = {"hits": 0, "forks": 0, "copies": 0, "refused": 0}

    def tokens(self, most):
        return [self.rnd.randrange(3) for _ in range(self.rnd.randint(1, most))]

    def request(self, token_ids):
        self.num_named += 1
        return Request(f"r{self.num_named}", token_ids)

    def run(self, num_steps=60):
        rnd, manager = self.rnd, self.manager
        for _ in range(num_steps):
            while self.running and rnd.random() < 0.5:
                self.fork(rnd.choice(self.running))
            for request in rnd.sample(self.running, len(self.running) // 3):
                self.leave(request, rnd.choice([None, "length", "abort"]))
            scheduled = []
            for request in list(self.running):
                if request in self.running:  # nobody has taken its blocks
                    self.schedule(request, scheduled)
            if rnd.random() < 0.5:
                self.admit(scheduled)
            copies = manager.copies()
            self.counts["copies"] += len(copies)
            manager.check()
            self.runner.run(scheduled, copies)
            for request, num_new_tokens in scheduled:
                request.num_computed_tokens += num_new_tokens
                manager.cache_blocks(request)
                if request.num_computed_tokens == request.num_tokens:
                    request.append(rnd.randrange(3))
            manager.check()
        for request in list(self.running):
            self.leave(request, "length")
        assert manager.num_free_blocks == manager.num_blocks and not manager.copies()
        assert not manager._forked_tails
        return self.counts

    def leave(self, request, reason):
        request.finish_reason = reason
        self.manager.free(request)
        self.running.remove(request)

    def fork(self, parent):
        if not parent.num_computed_tokens:
            return
        num_shared = self.rnd.randint(1, parent.num_computed_tokens)
        child = self.request(parent.token_ids[:num_shared] + self.tokens(3))
        child.num_computed_tokens = num_shared
        assert self.manager.fork(parent, child)
        self.manager.check()
        self.running.append(child)
        self.counts["forks"] += 1

    def schedule(self, request, scheduled):
        num_new_tokens = self.rnd.randint(1, request.num_tokens - request.num_computed_tokens)
        while self.manager.allocate_slots(request, num_new_tokens) is None:
            self.counts["refused"] += 1
            victim = self.running[-1]
            assert all(victim is not each for each, _ in scheduled)
            self.leave(victim, None)
            if victim is request:
                return
        scheduled.append((request, num_new_tokens))

    def admit(self, scheduled):
        request = self.request(self.common[: self.rnd.randint(0, 12)] + self.tokens(4))
        num_hit = self.manager.get_num_cached_tokens(request)
        num_new_tokens = self.rnd.randint(1, request.num_tokens - num_hit)
        extra = {"num_cached_tokens": num_hit} if num_hit else {}
        if self.manager.allocate_slots(request, num_new_tokens, **extra) is not None:
            request.num_computed_tokens = num_hit
            self.running.append(request)
            scheduled.append((request, num_new_tokens))
            self.counts["hits"] += bool(num_hit)


@pytest.mark.parametrize(
    "make", [PagedKVCacheManager, PrefixCachingKVCacheManager, RadixKVCacheManager]
)
def test_forks_go_their_own_ways(make):
    totals = {}
    for seed in range(150):
        try:
            counts = OwnWays(make, seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
        totals = {key: totals.get(key, 0) + value for key, value in counts.items()}
    assert all(totals[key] for key in totals if key != "hits"), totals
    assert totals["hits"] or make is PagedKVCacheManager


# -- check sees -----------------------------------------------------------------------------------


def node_at(manager, *names):
    node = manager.block_pool.trees[False, None]
    for name in names:
        node = node.children[name]
    return node


def break_queue(manager):
    queue = manager.block_pool.cached_free
    block = queue.popleft_n(1)[0]
    queue.append(block)


BROKEN = {
    "key": lambda m: node_at(m, (1, 2)).key.pop(),
    "another key": lambda m: node_at(m, (1, 2)).key.__setitem__(0, 5),
    "deep in a key": lambda m: node_at(m, (1, 2)).key.__setitem__(3, 5),
    "parent": lambda m: setattr(node_at(m, (1, 2), (5, 6)), "parent", None),
    "name": lambda m: setattr(node_at(m, (1, 2), (5, 6)), "name", (5, 7)),
    "order": lambda m: node_at(m, (1, 2)).order.reverse(),
    "order has another": lambda m: node_at(m, (1, 2)).order.append((9, 9)),
    "lock": lambda m: setattr(node_at(m, (1, 2)), "lock_ref", 2),
    "leaf's lock": lambda m: setattr(node_at(m, (1, 2), (5, 6)), "lock_ref", 1),
    "block of another": lambda m: setattr(node_at(m, (1, 2)).blocks[1], "key", node_at(m)),
    "twice": lambda m: node_at(m, (1, 2)).blocks.__setitem__(0, node_at(m, (1, 2)).blocks[1]),
    "lost": lambda m: node_at(m, (1, 2)).remove(node_at(m, (1, 2), (5, 6))),
    "no blocks": lambda m: node_at(m, (1, 2), (5, 6)).blocks.clear(),
    "empty tree": lambda m: m.block_pool.trees.update({(False, 1): RadixNode((False, 1))}),
    "order of eviction": break_queue,
    "held by nobody": lambda m: m._held.update(x=m._held["h"]),
    "holds less": lambda m: m._held.update(h=(node_at(m, (1, 2)), 1)),
    "holds nothing": lambda m: m._held.pop("h"),
    "holds another": lambda m: m._held.update(h=(node_at(m, (1, 2), (5, 6)), 2)),
    "other tokens": lambda m: m.requests["h"].token_ids.__setitem__(1, 77),
    "other tree": lambda m: setattr(m.requests["h"], "cache_salt", "x"),
    "table": lambda m: m.tables["h"].reverse(),
}


@pytest.mark.parametrize("what", BROKEN)
def test_check_sees_what_is_broken(what):
    manager = RadixKVCacheManager(16, 2)
    put(manager, [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 7, 8])
    run(manager, "h", [1, 2, 3, 4, 9])
    manager.check()
    BROKEN[what](manager)
    with pytest.raises(InvariantBroken):
        manager.check()


def test_errors_are_words():
    with pytest.raises(ValueError, match="num_blocks is 0"):
        RadixKVCacheManager(0, 4)
    with pytest.raises(ValueError, match="max_model_len is 0"):
        RadixKVCacheManager(4, 4, max_model_len=0)


# -- the same hits as by hashes -------------------------------------------------------------------

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=12)


def hits_one_by_one(manager, prompts):
    """Each ends before the next comes."""
    return put(manager, *prompts)


@given(PROMPTS, st.integers(2, 5))
@settings(deadline=None, max_examples=150)
def test_hits_with_room_for_all_are_those_of_hashes_of_one_token(prompts, block_size):
    """And with larger blocks they lie between: the copied part of a block is what hashes lose."""
    by_token = hits_one_by_one(PrefixCachingKVCacheManager(400, 1), prompts)
    assert hits_one_by_one(RadixKVCacheManager(400, 1), prompts) == by_token
    by_block = hits_one_by_one(PrefixCachingKVCacheManager(400, block_size), prompts)
    radix_hits = hits_one_by_one(RadixKVCacheManager(400, block_size), prompts)
    for prompt, few, some, many in zip(prompts, by_block, radix_hits, by_token, strict=True):
        assert few <= some <= many
        assert some // block_size * block_size in (few, few + block_size), prompt


@given(PROMPTS, st.integers(25, 60))
@settings(deadline=None, max_examples=150)
def test_a_full_pool_forgets_in_the_order_of_hashes(prompts, num_blocks):
    prompts = [[*prompt, 100 + i] for i, prompt in enumerate(prompts)]
    by_hash = PrefixCachingKVCacheManager(num_blocks, 1)
    by_tree = RadixKVCacheManager(num_blocks, 1)
    assert hits_one_by_one(by_hash, prompts) == hits_one_by_one(by_tree, prompts)
    assert by_hash.num_evictions == by_tree.num_evictions


def test_what_is_computed_again_counts_as_used():
    """The one difference in the order: the last token of a prompt that is there already is run
    again, and the map of hashes keeps the block that it had, where it stood in line."""
    hits = {}
    for make in (PrefixCachingKVCacheManager, RadixKVCacheManager):
        manager = make(4, 1)
        put(manager, [1], [2], [3], [1], [4, 4])
        hits[make] = [found(manager, [token, 0]) for token in (1, 2, 3)]
    assert hits == {PrefixCachingKVCacheManager: [0, 1, 1], RadixKVCacheManager: [1, 0, 1]}


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=16),
        st.integers(1, 6),
        st.sampled_from([None, None, "a", "b"]),
        st.integers(1, 3),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=10,
)


def hits_in_the_loop(make, requests, budget):
    """(hit and output of each request, the tokens computed in each step)"""
    core = engine(make(2_000, 1), max_num_seqs=4, max_num_batched_tokens=budget)
    everyone = []
    for i, (prompt, max_tokens, salt, n, num_steps) in enumerate(requests):
        samples = [
            Request(f"{i}.{j}", prompt, max_tokens=max_tokens, cache_salt=salt, sample_index=j)
            for j in range(n)
        ]
        samples[0].children = samples[1:]
        core.submit(samples[0])
        everyone += samples
        for _ in range(num_steps):
            if core.scheduler.has_unfinished_requests:
                core.step()
                core.manager.check()
    core.run()
    assert all(r.token_ids == reference_of(r) for r in everyone)
    steps = [step.num_tokens for step in core.metrics.steps]
    return [(r.num_cached_tokens, r.token_ids) for r in everyone], steps


@given(REQUESTS, st.sampled_from([2, 7, 64]))
@settings(deadline=None, max_examples=150)
def test_any_traffic_with_room_for_all_hits_what_hashes_of_one_token_hit(requests, budget):
    by_hash = hits_in_the_loop(PrefixCachingKVCacheManager, requests, budget)
    assert hits_in_the_loop(RadixKVCacheManager, requests, budget) == by_hash


# -- planted faults: each is noticed --------------------------------------------------------------

PLANTED = [
    # (what, class, method, old text, new text)
    ("a hit of the last token, too", RadixKVCacheManager, "match_prefix",
     "request.num_tokens - 1", "request.num_tokens"),
    ("nothing is copied", RadixKVCacheManager, "_admit_with_hit",
     "self._origins[own] = self._origins.get(source, source)", "pass"),
    ("copied from the block before", RadixKVCacheManager, "_admit_with_hit",
     "found[num_hit_blocks].block_id", "found[num_hit_blocks - 1].block_id"),
    ("a block found in part is shared", RadixKVCacheManager, "_admit_with_hit",
     "hit = found[:num_hit_blocks]", "hit = found[:num_hit_blocks + bool(num_copied_tokens)]"),
    ("an answer outlives what it names", RadixKVCacheManager, "_admit_with_hit",
     " or num_unpublished != self.block_pool.num_unpublished", ""),
    ("another's answer", RadixKVCacheManager, "_admit_with_hit", "asked is not request or ", ""),
    ("idle hits counted as room", RadixKVCacheManager, "_admit_with_hit",
     "num_needed + num_idle + keep_free", "num_needed + keep_free"),
    ("chains of copies cut", RadixKVCacheManager, "_admit_with_hit",
     "self._origins.get(source, source)", "source"),
    ("a hit is not locked", RadixKVCacheManager, "_admit_with_hit",
     "self._hold(request, num_hit_blocks)", "pass"),
    ("new blocks before the hit is touched", RadixKVCacheManager, "_admit_with_hit",
     "        self.block_pool.touch(hit)\n"
     "        blocks = hit + self.block_pool.get_new_blocks(num_new_blocks)",
     "        blocks = hit + self.block_pool.get_new_blocks(num_new_blocks)\n"
     "        self.block_pool.touch(hit)"),
    ("the old lock stays", RadixKVCacheManager, "_hold", "before.lock(-1)", "pass"),
    ("locked without a cut", RadixKVCacheManager, "_hold",
     "if node.blocks[-1] is not last:", "if False:"),
    ("blocks not full are cached", RadixKVCacheManager, "cache_blocks",
     "num_full_blocks = request.num_computed_tokens // self.block_size",
     "num_full_blocks = -(-request.num_computed_tokens // self.block_size)"),
    ("own copies leak", RadixKVCacheManager, "cache_blocks",
     "pool.free_blocks(own[: len(found)][::-1])", "pass"),
    ("the tree's blocks untouched", RadixKVCacheManager, "cache_blocks",
     "pool.touch(found)", "pass"),
    ("the table keeps its own", RadixKVCacheManager, "cache_blocks",
     "table[num_held : num_held + len(found)] = [block.block_id for block in found]", "pass"),
    ("a leaf of two grows with one", RadixKVCacheManager, "cache_blocks",
     "node.lock_ref == 1 and ", ""),
    ("an inner node grows", RadixKVCacheManager, "cache_blocks",
     " and not node.children", ""),
    ("a branch without a split", RadixKVCacheManager, "cache_blocks",
     "node.split(num_passed) if num_passed < len(node.blocks) else node", "node"),
    ("locks stay at the end", RadixKVCacheManager, "free", "self._hold(request, 0)", "pass"),
    ("a fork holds nothing", RadixKVCacheManager, "fork",
     "self._hold(child, min(num_held, len(self.tables[child.request_id])))", "pass"),
    ("a fork holds all that its parent holds", RadixKVCacheManager, "fork",
     "self._hold(child, min(num_held, len(self.tables[child.request_id])))",
     "self._held.update({child.request_id: self._held[parent.request_id]}) if num_held else 0;"
     " num_held and self._held[parent.request_id][0].lock(1)"),
    ("a fork of what is not cached", RadixKVCacheManager, "fork",
     "self.cache_blocks(parent)", "pass"),
    ("a cached tail is written to", RadixKVCacheManager, "_make_own",
     "self.block_pool.prune(tail.key)", "pass"),
    ("a copied tail is still held", RadixKVCacheManager, "_make_own",
     "self._hold(request, table.index(tail.block_id))", "pass"),
    ("one tree for all salts", RadixKVCacheManager, "_tree_of",
     "(is_named, request.cache_salt)", "(is_named, None)"),
    ("names among tokens", RadixKVCacheManager, "_tree_of",
     "(is_named, request.cache_salt)", "(None, request.cache_salt)"),
    ("reset while others run", CachingKVCacheManager, "reset_prefix_cache",
     "if self.tables:", "if False:"),
    ("the locks of a split are lost", RadixNode, "split", ", self.lock_ref)", ")"),
    ("a split node keeps its name", RadixNode, "split",
     "self.name = tuple(self.key[:width])", "pass"),
    ("a split forgets whose the blocks are", RadixNode, "split",
     "upper.add(self)", "upper.add(self); [setattr(b, 'key', self) for b in upper.blocks]"),
    ("locks only the node itself", RadixNode, "lock", "node = node.parent", "break"),
    ("goes on after a mismatch", RadixNode, "match",
     "num_passed == len(node.blocks)", "num_passed"),
    ("rounds a match up", RadixNode, "match", "]) // width", "] ) // width + 1"),
    ("one token too many in a block", RadixNode, "match_in_block",
     "best, most = block, num_common(name, tokens)",
     "best, most = block, num_common(name, tokens) + 1"),
    ("only the neighbour behind", RadixNode, "match_in_block",
     "self.order[max(0, place - 1) : place + 1]", "self.order[place : place + 1]"),
    ("only the neighbour before", RadixNode, "match_in_block",
     "self.order[max(0, place - 1) : place + 1]", "self.order[max(0, place - 1) : place]"),
    ("the first block of a node is copied", RadixNode, "match_in_block",
     "self.blocks[num_passed])]", "self.blocks[0])]"),
    ("evicted, but still in its node", RadixBlockPool, "forget", "node.blocks.pop()", "pass"),
    ("the head goes before the tail", RadixBlockPool, "forget",
     "node.blocks.pop()", "node.blocks.pop(0)"),
    ("an empty tree stays", RadixBlockPool, "forget",
     "del self.trees[node.parent.name]", "pass"),
    ("only the node is pruned", RadixBlockPool, "prune",
     "nodes += each.children.values()", "pass"),
]  # fmt: skip


def planted(monkeypatch, owner, method, old, new):
    """The method with another text, in place of its original."""
    text = textwrap.dedent(inspect.getsource(vars(owner)[method]))
    old, new = textwrap.dedent(old), textwrap.dedent(new)
    old = old if old in text else textwrap.indent(old, "    ")
    if old not in text:
        raise LookupError(f"{old!r} does not stand in {owner.__name__}.{method}")
    new = textwrap.indent(new, "    ") if old.startswith("    ") else new
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times"
    code = f"def make(__class__):\n{textwrap.indent(text.replace(old, new), '    ')}"
    names = {}
    exec(f"{code}\n    return {method}", vars(inspect.getmodule(owner)), names)
    monkeypatch.setattr(owner, method, names["make"](owner))


def without_parameters():
    return [
        test
        for name, test in globals().items()
        if name.startswith("test_")
        and inspect.isfunction(test)
        and not inspect.signature(test).parameters
        and not hasattr(test, "hypothesis")
    ]


def noticed_by(num_seeds=60):
    """Which test of this file, or trace of the fuzz, fails first."""
    for test in without_parameters():
        try:
            test()
        except (Exception, pytest.fail.Exception) as error:  # the second is none
            return f"{test.__name__}: {error!r}"
    for seed in range(num_seeds):
        for name in ("radix-1", "radix-2", "radix-4"):
            try:
                Trace(name, seed).run()
            except Exception as error:
                return f"{name}:{seed}: {error!r}"
    return None


@pytest.mark.parametrize("what, owner, method, old, new", PLANTED, ids=[p[0] for p in PLANTED])
def test_a_planted_fault_is_noticed(monkeypatch, what, owner, method, old, new):
    planted(monkeypatch, owner, method, old, new)
    assert noticed_by() is not None


# -- with tensors ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def answers(tiny):
    """Prompts of which many begin alike: a header, turns of a chat, the same again."""
    rnd = random.Random(0)
    header = [rnd.randrange(256) for _ in range(37)]
    own = [[rnd.randrange(256) for _ in range(n)] for n in (1, 5, 16, 17, 30)]
    prompts = [header + each for each in own]
    prompts += [prompts[2], header, header[:20] + own[3], prompts[4] + own[1], own[4]]
    return [greedy(tiny.model, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("num_slots, budget", [(2048, 512), (2048, 17), (144, 40)])
def test_answers_are_those_of_the_dense_cache(tiny, answers, block_size, num_slots, budget):
    """Twice: the second time, all is found, or what a pool too small for all has kept."""
    llm = LLM(
        tiny,
        kv_cache_manager="radix",
        block_size=block_size,
        num_gpu_blocks_override=num_slots // block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        check_every_step=True,
    )
    assert isinstance(llm.manager, RadixKVCacheManager)
    comparison = Comparison()
    for _ in range(2):
        outputs = llm.generate(
            [answer.prompt for answer in answers],
            SamplingParams(max_tokens=12, ignore_eos=True),
            use_tqdm=False,
        )
        for answer, output in zip(answers, outputs, strict=True):
            comparison.check(output.outputs[0].token_ids, answer, f"{output}")
    hits = [output.num_cached_tokens for output in outputs]
    if num_slots == 2048:
        for hit, answer in zip(hits, answers, strict=True):
            most = len(answer.prompt) - 1
            assert most // block_size * block_size <= hit <= most
        assert block_size == 1 or any(hit % block_size for hit in hits)
    else:
        assert any(hits) and llm.manager.num_evictions > 0
    assert not llm.manager.tables and llm.manager.num_free_blocks == llm.manager.num_blocks
    comparison.close()


def test_samples_of_one_prompt_are_those_of_the_prompt_alone(tiny, answers):
    llm = LLM(tiny, kv_cache_manager="radix", block_size=4, num_gpu_blocks_override=100)
    params = SamplingParams(max_tokens=12, n=3, ignore_eos=True)
    (output,) = llm.generate([answers[4].prompt], params, use_tqdm=False)
    comparison = Comparison()
    for sample in output.outputs:
        comparison.check(sample.token_ids, answers[4])
    comparison.close()
