"""Slabs of one size: where they lie, what they waste, and check() on each broken invariant."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minikv.kv_cache.base import InvariantBroken, KVCacheManager, MemoryReport
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.request import Request


def new(name, num_prompt_tokens=2, max_tokens=2):
    return Request(name, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)


def make(num_blocks=11, block_size=2, max_model_len=7):
    """By default two slabs of 4 blocks, and 3 blocks left over."""
    return ContiguousKVCacheManager(num_blocks, block_size, max_model_len=max_model_len)


def state(manager):
    """All that a refusal must leave alone."""
    return (
        {key: tuple(table) for key, table in manager.tables.items()},
        dict(manager.requests),
        manager.allocator.extents(),
        manager.num_free_blocks,
        manager.report(),
    )


def test_tables_are_consecutive_ranges_from_the_lowest_free_slab():
    manager = make()
    a, b, c = new("a"), new("b"), new("c")
    assert manager.allocate_slots(a, 2) == range(0, 4)
    assert manager.allocate_slots(b, 2) == range(4, 8)
    manager.free(a)
    assert manager.allocate_slots(c, 2) == range(0, 4)
    manager.check()


def test_a_slab_is_reserved_once_and_for_all():
    manager, request = make(), new("a", 2, 6)
    table = manager.allocate_slots(request, 1)
    free = manager.num_free_blocks
    for request.num_computed_tokens in range(1, 7):
        assert manager.allocate_slots(request, 1) == table
        assert manager.num_free_blocks == free == 7
    manager.check()


def test_no_slab_no_room_and_nothing_changes():
    manager = make()
    manager.allocate_slots(new("a"), 2)
    manager.allocate_slots(new("b"), 2)
    before = state(manager)
    assert manager.allocate_slots(new("c"), 1) is None  # 3 blocks are free, but no slab
    assert state(manager) == before


def test_the_watermark_counts_what_would_stay_free():
    manager = make(num_blocks=12)
    before = state(manager)
    assert manager.allocate_slots(new("a"), 2, keep_free_blocks=9) is None
    assert state(manager) == before
    assert manager.allocate_slots(new("a"), 2, keep_free_blocks=8) is not None


def test_the_watermark_does_not_hold_back_who_has_a_slab():
    manager, request = make(num_blocks=4), new("a")
    table = manager.allocate_slots(request, 2)
    request.num_computed_tokens = 2
    assert manager.allocate_slots(request, 1, keep_free_blocks=99) == table


@pytest.mark.parametrize("num_new_tokens, extra", [(8, {}), (1, {"must_fit_tokens": 8})])
def test_more_tokens_than_a_slab_is_an_error_and_changes_nothing(num_new_tokens, extra):
    manager = make()
    before = state(manager)
    with pytest.raises(ValueError, match="'a' wants 8 slots, but max_model_len is 7"):
        manager.allocate_slots(new("a"), num_new_tokens, **extra)
    assert state(manager) == before
    assert manager.allocate_slots(new("a"), 7) is not None  # the limit itself is fine
    assert manager.allocate_slots(new("b"), 1, must_fit_tokens=7) is not None


def test_growing_beyond_the_slab_is_an_error():
    manager, request = make(), new("a")
    manager.allocate_slots(request, 7)
    request.num_computed_tokens = 7
    with pytest.raises(ValueError, match="wants 8 slots"):
        manager.allocate_slots(request, 1)


def test_fits_ever_does_not_count_the_last_token():
    manager = make()
    assert manager.fits_ever(new("a", 4, 4)) and not manager.fits_ever(new("a", 4, 5))
    assert manager.fits_ever(new("a", 7, 1)) and not manager.fits_ever(new("a", 8, 1))


def test_free_without_a_table_does_nothing():
    manager, request = make(), new("a")
    before = state(manager)
    manager.free(request)
    assert state(manager) == before
    manager.allocate_slots(request, 2)
    manager.free(request)
    manager.free(request)
    assert state(manager) == before


def test_the_rest_of_the_contract_is_answered_by_the_base():
    manager, request = make(), new("a")
    manager.allocate_slots(request, 2)
    assert manager.get_num_cached_tokens(request) == 0
    assert manager.fork(request, new("b")) is False and manager.swap_out(request) is False
    assert manager.compact() == 0 and manager.copies() == []
    assert manager.cache_blocks(request) is None


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"block_size": -1}, "block_size is -1"),
        ({"block_size": 1.0}, "block_size"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_model_len": True}, "max_model_len"),
        ({"num_blocks": 3}, "max_model_len 7 needs a slab of 4 blocks of 2 tokens, .* only 3"),
    ],
)
def test_impossible_pools_are_refused(kwargs, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(**kwargs)


def test_an_unknown_policy_is_refused_and_the_known_are_named():
    with pytest.raises(ValueError, match="reserve is 'most'; known: max, pow2, double"):
        ContiguousKVCacheManager(8, 2, max_model_len=4, reserve="most")


# -- the report --------------------------------------------------------------------------------


def test_each_slot_of_the_pool_is_counted_once():
    manager = make()  # 22 slots: two slabs of 8, 6 left over
    request = new("a", 3, 3)  # may use 5 of the slab's 8
    manager.allocate_slots(request, 3)
    request.num_computed_tokens = 3
    assert manager.report() == MemoryReport(live=3, reserved=2, internal=3, free=14)
    report = manager.report(new("next"))
    assert report == MemoryReport(live=3, reserved=2, internal=3, external=6, free=8)
    assert report.total == 22


def test_the_remainder_is_external_also_when_all_slabs_are_taken():
    manager = make()
    manager.allocate_slots(new("a"), 2)
    manager.allocate_slots(new("b"), 2)
    assert manager.report(new("next")) == MemoryReport(reserved=6, internal=10, external=6)


def test_a_pool_without_a_remainder_has_no_external_waste():
    assert make(num_blocks=8).report(new("next")) == MemoryReport(free=16)


class Slabs(RuleBasedStateMachine):
    """Any order of admissions, progress and departures."""

    def __init__(self):
        super().__init__()
        self.manager, self.running, self.count = make(), [], 0

    @rule(num_prompt_tokens=st.integers(1, 7), keep=st.integers(0, 11), data=st.data())
    def admit(self, num_prompt_tokens, keep, data):
        max_tokens = data.draw(st.integers(1, 8 - num_prompt_tokens))
        request = new(f"r{self.count}", num_prompt_tokens, max_tokens)
        self.count += 1
        before = state(self.manager)
        room = len(self.running) < 2 and self.manager.num_free_blocks - 4 >= keep
        table = self.manager.allocate_slots(request, num_prompt_tokens, keep_free_blocks=keep)
        assert (table is not None) == room
        if room:
            request.num_computed_tokens = num_prompt_tokens
            self.running.append(request)
        else:
            assert state(self.manager) == before

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def go_on(self, data):
        request = data.draw(st.sampled_from(self.running))
        if request.num_computed_tokens < request.max_kv_tokens:
            table = self.manager.tables[request.request_id]
            assert self.manager.allocate_slots(request, 1) == table
            request.append(0)
            request.num_computed_tokens += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data):
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.manager.free(request)

    @invariant()
    def adds_up(self):
        manager = self.manager
        manager.check()
        assert all(t == range(t[0], t[0] + 4) for t in manager.tables.values())
        assert manager.tables.keys() == {r.request_id for r in self.running}
        live = sum(r.num_computed_tokens for r in self.running)
        for report in (manager.report(), manager.report(new("next"))):
            assert report.total == 22 and min(report) >= 0 and report.live == live
            assert report.rounding == report.cached == 0
        assert report.external == 6 and report.free == 8 * (2 - len(self.running))


TestSlabs = Slabs.TestCase
TestSlabs.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True
)


# -- check() sees planted faults ---------------------------------------------------------------


def two_running():
    """Three slabs of 4 blocks, two of them taken."""
    manager = make(num_blocks=14)
    for name in "ab":
        request = new(name)
        manager.allocate_slots(request, 2)
        request.num_computed_tokens = 2
    manager.check()
    return manager


def outside(m):
    m.tables["b"] = range(11, 15)


def negative(m):
    m.tables["a"] = range(-1, 3)


def overlap(m):
    m.tables["b"] = range(3, 7)


def twice_in_one_table(m):
    m.tables["a"] = [0, 1, 2, 2]


def table_too_short(m):
    m.tables["a"] = range(0, 3)


def table_empty(m):
    m.tables["a"] = ()


def table_lost(m):
    del m.tables["a"]


def extent_lost(m):
    m.allocator.allocate(6)


def extent_free_and_in_use(m):
    m.allocator.free(0, 4)


def extent_free_instead_of_another(m):
    m.allocator.free(0, 4)
    m.allocator.allocate_at(8, 4)


def slab_moved(m):
    m.tables["b"] = range(5, 9)


def reordered(m):
    m.tables["a"] = [1, 0, 2, 3]


def asked_forgotten(m):
    del m._asked["a"]


def asked_for_nobody(m):
    m._asked["gone"] = 4


def copies_of_nobody(m):
    m._origins["gone"] = (0, 2)


def copies_too_long(m):
    m._origins["a"] = (0, 5)


def computed_beyond_the_slab(m):
    m.requests["a"].num_computed_tokens = 9


FAULTS = [
    (outside, "holds block 14, but the pool has blocks 0 to 13"),
    (negative, "holds block -1"),
    (overlap, "block 3 is held twice: by 'a' and 'b'"),
    (twice_in_one_table, "block 2 is held twice"),
    (table_too_short, "do not add up to 14"),
    (table_empty, "'a' has 2 computed tokens in 0 slots"),
    (table_lost, "'a' has 2 computed tokens in 0 slots"),
    (extent_lost, "8 blocks in use and 0 free do not add up to 14"),
    (extent_free_and_in_use, "8 blocks in use and 10 free do not add up to 14"),
    (extent_free_instead_of_another, "overlap or are lost at block 4"),
    (slab_moved, "overlap or are lost at block 4"),
    (reordered, r"the extent of 'a' is \[1, 0, 2, 3\], but should be 4 consecutive blocks"),
    (asked_forgotten, "the extent of 'a' is range.0, 4., but should be 1 consecutive"),
    (asked_for_nobody, "extents of nobody"),
    (copies_of_nobody, "2 blocks of 'gone' are to be copied, but it holds None"),
    (copies_too_long, "5 blocks of 'a' are to be copied"),
    (computed_beyond_the_slab, "'a' has 9 computed tokens in 8 slots"),
]


@pytest.mark.parametrize("plant, message", FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_check_sees(plant, message):
    manager = two_running()
    plant(manager)
    with pytest.raises(InvariantBroken, match=message):
        manager.check()


def test_check_sees_a_slab_that_is_not_a_range():
    manager = two_running()
    manager.tables["a"] = [0, 2, 1, 3]
    with pytest.raises(InvariantBroken, match=r"the extent of 'a' is \[0, 2, 1, 3\]"):
        manager.check()


# -- the base alone ----------------------------------------------------------------------------


class Bare(KVCacheManager):
    pass


def test_the_base_names_what_is_missing():
    with pytest.raises(NotImplementedError, match=r"Bare\.allocate_slots"):
        Bare(4, 2).allocate_slots(new("a"), 1)
    with pytest.raises(NotImplementedError, match=r"Bare\.free"):
        Bare(4, 2).free(new("a"))


def test_the_base_counts_and_reports_from_the_tables():
    manager, request = Bare(8, 2), new("a", 3, 2)
    assert manager.num_free_blocks == 8
    manager.set_table(request, [6, 1, 3])
    request.num_computed_tokens = 3
    assert manager.num_free_blocks == 5
    assert manager.report() == MemoryReport(live=3, reserved=1, internal=2, free=10)
    manager.tables["by hand"] = [0]
    assert manager.report() == MemoryReport(live=3, reserved=3, internal=2, free=8)
    assert manager.fits_ever(new("b", 9, 8)) and not manager.fits_ever(new("b", 9, 9))
    assert manager.drop_table(request) == [6, 1, 3] and manager.drop_table(request) == ()
    assert not manager.requests


def test_the_base_counts_a_shared_block_once():
    manager = Bare(8, 2)
    manager.set_table(new("a"), [1, 2])
    manager.set_table(new("b"), [1, 3])
    assert manager.num_free_blocks == 5


def test_check_sees_a_free_count_that_is_wrong():
    class Wrong(Bare):
        num_free_blocks = 8

    manager = Wrong(8, 2)
    manager.check()
    manager.set_table(new("a"), [0, 1])
    with pytest.raises(InvariantBroken, match="2 blocks in use and 8 free do not add up to 8"):
        manager.check()
