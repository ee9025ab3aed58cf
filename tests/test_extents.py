"""Allocators of extents against a plain list of owners, each fit's choice on hand-drawn pools, the
measures, and check() on each broken invariant."""

import random
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minikv.kv_cache.base import InvariantBroken
from minikv.kv_cache.extent_tree import ExtentTree
from minikv.kv_cache.extents import (
    FITS,
    Extent,
    extent_histogram,
    external_fragmentation,
    largest_extent,
    make_allocator,
    num_free,
    unusable,
)

COALESCING = [fit for fit in FITS if fit != "buddy"]


def draw(fit, picture):
    """A pool in which the blocks drawn as # are in use and those drawn as . are free."""
    allocator = make_allocator(fit, len(picture))
    for block, mark in enumerate(picture):
        if mark == "#":
            assert allocator.allocate_at(block, 1)
    allocator.check()
    return allocator


def state(allocator):
    """All that a refusal must leave alone, the private parts too."""
    tree = getattr(allocator, "_tree", None)
    return (
        allocator.extents(),
        allocator.num_free_blocks,
        allocator.largest_free_extent,
        list(tree._largest) if tree else None,
        list(getattr(allocator, "_by_size", [])),
        getattr(allocator, "_cursor", None),
        sorted(getattr(allocator, "_used", {}).items()),
    )


def free_runs(owners):
    """(start, blocks) of the runs of None, by looking at every block."""
    runs, start = [], None
    for block, owner in enumerate([*owners, "the end"]):
        if owner is None and start is None:
            start = block
        elif owner is not None and start is not None:
            runs.append((start, block - start))
            start = None
    return runs


def free_buddies(owners, start=0):
    """(start, blocks) of the largest free blocks that can be had by halving the arenas."""

    def halve(start, size):
        if all(owner is None for owner in owners[start : start + size]):
            return [(start, size)]
        if size == 1:
            return []
        return halve(start, size // 2) + halve(start + size // 2, size // 2)

    found, size = [], 1 << 20
    while size:
        if start + size <= len(owners):
            found += halve(start, size)
            start += size
        size //= 2
    return found


def expected_start(fit, free, num_blocks, cursor):
    """Where the fit has to cut num_blocks, from the list of all free extents."""
    enough = [(start, size) for start, size in free if size >= num_blocks]
    if not enough:
        return None
    if fit == "first":
        return min(enough)[0]
    if fit == "next":
        ahead = [(start, size) for start, size in enough if start + size > cursor]
        return min(ahead or enough)[0]
    if fit == "worst":
        return max(enough, key=lambda extent: (extent[1], -extent[0]))[0]
    return min(enough, key=lambda extent: (extent[1], extent[0]))[0]  # best, buddy


class Pool(RuleBasedStateMachine):
    """Any sequence of calls against a list that names the owner of each block."""

    fit = None

    @initialize(num_blocks=st.integers(1, 70))
    def begin(self, num_blocks):
        self.allocator = make_allocator(self.fit, num_blocks)
        self.owners = [None] * num_blocks
        self.asked = {}  # start -> blocks asked for, extensions included
        self.cursor = 0

    def free_extents(self):
        return free_buddies(self.owners) if self.fit == "buddy" else free_runs(self.owners)

    def rounded(self, num_blocks):
        return 1 << (num_blocks - 1).bit_length() if self.fit == "buddy" else num_blocks

    def take(self, start, num_blocks):
        end = start + self.rounded(num_blocks)
        self.owners[start:end] = [start] * (end - start)
        self.asked[start] = num_blocks

    @rule(num_blocks=st.one_of(st.integers(1, 12), st.integers(1, 80)))
    def allocate(self, num_blocks):
        before = state(self.allocator)
        rounded = self.rounded(num_blocks)
        expected = expected_start(self.fit, self.free_extents(), rounded, self.cursor)
        assert self.allocator.round_up(num_blocks) == rounded
        assert self.allocator.allocate(num_blocks) == expected
        if expected is None:
            assert state(self.allocator) == before
        else:
            self.take(expected, num_blocks)
            self.cursor = (expected + num_blocks) % len(self.owners)

    @rule(data=st.data(), num_blocks=st.integers(1, 12))
    def allocate_at(self, data, num_blocks):
        num_blocks = min(num_blocks, len(self.owners))
        start = data.draw(st.integers(0, len(self.owners) - num_blocks))
        before, size = state(self.allocator), self.rounded(num_blocks)
        free = any(s <= start and start + size <= s + n for s, n in self.free_extents())
        expected = free and not (self.fit == "buddy" and start % size)
        assert self.allocator.allocate_at(start, num_blocks) is expected
        if expected:
            self.take(start, num_blocks)
        else:
            assert state(self.allocator) == before

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), num_more=st.one_of(st.just(1), st.integers(1, 20)))
    def extend(self, data, num_more):
        start = data.draw(st.sampled_from(sorted(self.asked)))
        num_blocks = self.asked[start]
        before = state(self.allocator)
        size, wanted = self.rounded(num_blocks), self.rounded(num_blocks + num_more)
        behind = self.owners[start + size : start + wanted]
        expected = len(behind) == wanted - size and all(owner is None for owner in behind)
        if self.fit == "buddy":  # the grown block must be one that halving its arena gives
            alone = [None if owner == start else owner for owner in self.owners]
            expected = start % wanted == 0 and any(
                s <= start and start + wanted <= s + n for s, n in free_buddies(alone)
            )
        assert self.allocator.extend(start, num_blocks, num_more) is expected
        if expected:
            self.take(start, num_blocks + num_more)
        else:
            assert state(self.allocator) == before

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def free(self, data):
        start = data.draw(st.sampled_from(sorted(self.asked)))
        num_blocks = self.asked.pop(start)
        self.allocator.free(start, num_blocks)
        self.owners = [None if owner == start else owner for owner in self.owners]
        before = state(self.allocator)
        with pytest.raises(ValueError, match="in use"):
            self.allocator.free(start, num_blocks)
        with pytest.raises(ValueError, match="in use"):
            self.allocator.extend(start, num_blocks, 1)
        assert state(self.allocator) == before

    @precondition(lambda self: self.fit != "buddy" and self.asked)
    @rule(data=st.data())
    def free_the_end_of_one(self, data):
        start = data.draw(st.sampled_from(sorted(self.asked)))
        num_blocks = self.asked[start]
        kept = data.draw(st.integers(0, num_blocks - 1))
        self.allocator.free(start + kept, num_blocks - kept)
        self.owners[start + kept : start + num_blocks] = [None] * (num_blocks - kept)
        self.asked[start] = kept
        if not kept:
            del self.asked[start]

    @precondition(lambda self: self.fit != "buddy")
    @rule(data=st.data(), num_blocks=st.integers(1, 12))
    def free_anything_that_is_not_all_in_use(self, data, num_blocks):
        start = data.draw(st.integers(0, len(self.owners) - 1))
        if None in self.owners[start : start + num_blocks] or start + num_blocks > len(self.owners):
            before = state(self.allocator)
            with pytest.raises(ValueError, match="not all in"):
                self.allocator.free(start, num_blocks)
            assert state(self.allocator) == before

    @invariant()
    def agrees_with_the_owners(self):
        self.allocator.check()
        free = self.free_extents()
        assert self.allocator.extents() == free
        assert self.allocator.num_free_blocks == self.owners.count(None)
        assert self.allocator.largest_free_extent == max((n for _, n in free), default=0)

    def teardown(self):
        if not hasattr(self, "asked"):
            return
        for start, num_blocks in sorted(self.asked.items(), key=hash):
            self.allocator.free(start, num_blocks)
            self.allocator.check()
        assert self.allocator.extents() == make_allocator(self.fit, len(self.owners)).extents()
        assert self.allocator.largest_free_extent == self.allocator.largest_when_empty


@pytest.mark.parametrize("fit", FITS)
def test_any_sequence_of_calls_agrees_with_a_list_of_owners(fit):
    machine = type(f"Pool_{fit}", (Pool,), {"fit": fit})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
        ),
    )


# -- the choice of each fit ------------------------------------------------------------------------

#          0   3  5      12  15  17     23
PICTURE = "...##......#..#..######......#.."  # free: 3 at 0, 6 at 5, 2 at 12, 2 at 15, 6 at 23, 2


@pytest.mark.parametrize(
    "fit, starts",
    [
        ("first", {1: 0, 2: 0, 3: 0, 4: 5, 6: 5, 7: None}),
        ("best", {1: 12, 2: 12, 3: 0, 4: 5, 6: 5, 7: None}),
        ("worst", {1: 5, 2: 5, 3: 5, 4: 5, 6: 5, 7: None}),
        ("next", {1: 0, 2: 0, 3: 0, 4: 5, 6: 5, 7: None}),
    ],
)
def test_each_fit_has_its_choice(fit, starts):
    for num_blocks, start in starts.items():
        allocator = draw(fit, PICTURE)
        before = state(allocator)
        assert allocator.allocate(num_blocks) == start, num_blocks
        assert (state(allocator) == before) == (start is None)
        allocator.check()


def test_next_fit_goes_on_where_it_ended_and_once_around():
    allocator = draw("next", PICTURE)
    assert [allocator.allocate(n) for n in (3, 4, 2, 2, 3)] == [0, 5, 9, 12, 23]
    assert allocator.allocate(6) is None  # it has looked everywhere, and stays where it was
    assert [allocator.allocate(n) for n in (3, 2)] == [26, 30]
    allocator.free(5, 4)
    allocator.free(0, 3)
    assert [allocator.allocate(n) for n in (1, 3, 1)] == [0, 5, 8]  # around: 0 comes first
    assert allocator.allocate(3) is None
    allocator.check()


def test_next_fit_counts_an_extent_that_grew_over_its_place_as_ahead():
    allocator = draw("next", "........")
    assert allocator.allocate(3) == 0 and allocator.allocate(3) == 3
    allocator.free(3, 3)  # free is now 3 to 7, the place is 6
    assert allocator.allocate(4) == 3


def test_next_fit_has_passed_what_it_allocated_last():
    allocator = draw("next", "....#...")
    assert allocator.allocate(4) == 0
    allocator.free(0, 4)
    assert allocator.allocate(2) == 5  # its place is 4, behind what has just become free


def test_placing_and_growing_do_not_move_next_fits_place():
    allocator = draw("next", "............")
    assert allocator.allocate(2) == 0
    assert allocator.allocate_at(6, 2) and allocator.extend(6, 2, 2)
    assert allocator.allocate(2) == 2


def test_worst_fit_leaves_the_larger_rest_and_best_fit_the_smaller():
    worst, best = draw("worst", ".....#......."), draw("best", ".....#.......")
    assert (worst.allocate(4), best.allocate(4)) == (6, 0)
    assert worst.extents() == [(0, 5), (10, 3)] and best.extents() == [(4, 1), (6, 7)]


def test_buddy_halves_the_smallest_block_that_is_large_enough():
    buddy = make_allocator("buddy", 16)
    assert buddy.allocate(3) == 0  # 4 of 16: 8 and 4 are left
    assert buddy.extents() == [(4, 4), (8, 8)] and buddy.num_free_blocks == 12
    assert buddy.allocate(1) == 4  # from the 4, not from the 8
    assert buddy.extents() == [(5, 1), (6, 2), (8, 8)]
    buddy.free(0, 3)
    assert buddy.extents() == [(0, 4), (5, 1), (6, 2), (8, 8)]
    assert buddy.allocate(2) == 6  # 2 fits exactly, though 4 lies at a lower address
    buddy.free(4, 1)  # 4 joins 5; their buddy, 6 to 7, is in use
    assert buddy.extents() == [(0, 4), (4, 2), (8, 8)]  # 0 to 5 are neighbours, not buddies
    assert buddy.largest_free_extent == 8
    buddy.free(6, 2)
    assert buddy.extents() == [(0, 16)]


def test_buddy_takes_of_equals_the_one_at_the_lowest_address():
    buddy = make_allocator("buddy", 16)
    assert [buddy.allocate(4) for _ in range(4)] == [0, 4, 8, 12]
    buddy.free(12, 4)
    buddy.free(4, 4)
    assert buddy.allocate(4) == 4


def test_buddy_cuts_a_pool_of_any_size_into_arenas():
    buddy = make_allocator("buddy", 15_700)
    sizes = [8192, 4096, 2048, 1024, 256, 64, 16, 4]
    assert [extent.num_blocks for extent in buddy.extents()] == sizes
    assert buddy.largest_when_empty == buddy.largest_free_extent == 8192
    assert buddy.allocate(8193) is None and buddy.num_free_blocks == 15_700
    assert buddy.allocate(2049) == 8192  # 4096
    assert buddy.allocate(2049) == 0  # the smallest that holds it is the first arena now
    assert buddy.allocate(1) == 15_696  # from the last arena, the smallest


def test_buddy_does_not_join_across_arenas():
    buddy = make_allocator("buddy", 6)  # 4 and 2
    assert [buddy.allocate(2) for _ in range(3)] == [4, 0, 2]
    buddy.free(2, 2)
    buddy.free(4, 2)
    assert buddy.extents() == [(2, 2), (4, 2)]
    assert not buddy.extend(0, 2, 3)  # 8 blocks: beyond its arena
    assert buddy.extend(0, 2, 2)


def test_buddy_grows_where_the_rounding_covers_it_or_the_upper_half_is_free():
    buddy = make_allocator("buddy", 16)
    assert buddy.allocate(3) == 0
    before = state(buddy)
    assert buddy.extend(0, 3, 1) and state(buddy) == before  # 4 were taken from the start
    assert buddy.extend(0, 4, 5)  # 16: twice doubled, 4 and 8
    assert buddy.num_free_blocks == 0 and buddy.extents() == []
    buddy.free(0, 9)
    assert [buddy.allocate(n) for n in (4, 4)] == [0, 4]
    before = state(buddy)
    assert not buddy.extend(4, 4, 1)  # the upper half, though what is behind it is free
    assert not buddy.extend(0, 4, 1)  # its upper half is in use
    buddy.free(0, 4)
    assert not buddy.extend(4, 4, 1)  # nor with its lower half free: it would have to move
    assert buddy.allocate(4) == 0
    buddy.free(4, 4)
    assert buddy.allocate(2) == 4
    assert not buddy.extend(0, 4, 1)  # only half of its upper half is free
    buddy.free(4, 2)
    assert buddy.allocate_at(8, 1)
    before = state(buddy)
    assert not buddy.extend(0, 4, 5)  # it could double once, not twice: nothing is taken
    assert state(buddy) == before


def test_buddy_places_a_block_only_where_one_can_start():
    buddy = make_allocator("buddy", 12)
    before = state(buddy)
    assert not buddy.allocate_at(2, 3)  # 4 blocks begin at 0, 4 or 8
    assert not buddy.allocate_at(4, 5)  # 8 blocks begin at 0
    assert not make_allocator("buddy", 11).allocate_at(8, 3)  # 4 would end behind the pool
    assert state(buddy) == before
    assert buddy.allocate_at(4, 3) and buddy.extents() == [(0, 4), (8, 4)]
    assert not buddy.allocate_at(4, 1) and not buddy.allocate_at(7, 1)  # the rounding is taken too
    assert buddy.allocate_at(10, 1) and buddy.extents() == [(0, 4), (8, 2), (11, 1)]
    buddy.check()


@pytest.mark.parametrize(
    "num_blocks, rounded", [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (513, 1024)]
)
def test_only_buddy_rounds(num_blocks, rounded):
    assert make_allocator("buddy", 8).round_up(num_blocks) == rounded
    assert {make_allocator(fit, 8).round_up(num_blocks) for fit in COALESCING} == {num_blocks}


# -- coalescing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("num_blocks", [14, 16, 32])
def test_freed_in_every_order_the_pool_is_whole_again(fit, num_blocks):
    for order in permutations(range(5)):
        allocator = make_allocator(fit, num_blocks)
        whole = allocator.extents()
        held = [(allocator.allocate(n), n) for n in (3, 1, 4, 1, 2)]
        assert None not in [start for start, _ in held]
        for i in order:
            allocator.free(*held[i])
            allocator.check()
        assert allocator.extents() == whole, order
        assert allocator.largest_free_extent == allocator.largest_when_empty, order
        assert allocator.num_free_blocks == num_blocks


@pytest.mark.parametrize("fit", COALESCING)
@pytest.mark.parametrize(
    "picture, extents",
    [
        ("########", [(3, 2)]),
        ("##.#####", [(2, 3)]),
        ("#####.##", [(3, 3)]),
        ("#..##..#", [(1, 6)]),
        (".#.##.#.", [(0, 1), (2, 4), (7, 1)]),
        ("...##...", [(0, 8)]),
    ],
)
def test_a_freed_extent_joins_both_neighbours_and_no_others(fit, picture, extents):
    allocator = draw(fit, picture)
    allocator.free(3, 2)
    assert allocator.extents() == extents
    assert all(type(extent) is Extent for extent in allocator.extents())
    allocator.check()


@pytest.mark.parametrize("fit", COALESCING)
def test_what_was_taken_may_be_given_back_in_parts(fit):
    allocator = make_allocator(fit, 10)
    assert allocator.allocate(10) == 0
    for start in (4, 0, 8, 2, 6):
        allocator.free(start, 2)
        allocator.check()
    assert allocator.extents() == [(0, 10)]


@pytest.mark.parametrize("fit", COALESCING)
def test_an_extent_grows_by_exactly_the_blocks_behind_it(fit):
    allocator = draw(fit, "##...#..")
    before = state(allocator)
    assert not allocator.extend(0, 2, 4) and not allocator.extend(0, 1, 1)
    assert not allocator.extend(5, 1, 3)  # the pool ends there
    assert state(allocator) == before
    assert allocator.extend(0, 2, 1) and allocator.extents() == [(3, 2), (6, 2)]
    assert allocator.extend(0, 3, 2) and allocator.extents() == [(6, 2)]
    assert allocator.extend(5, 1, 2) and allocator.extents() == []
    assert allocator.num_free_blocks == allocator.largest_free_extent == 0
    allocator.free(0, 5)
    assert allocator.extents() == [(0, 5)]


@pytest.mark.parametrize("fit", FITS)
def test_the_smallest_pool(fit):
    allocator = make_allocator(fit, 1)
    assert allocator.allocate(2) is None and allocator.extents() == [(0, 1)]
    assert allocator.allocate(1) == 0 and allocator.allocate(1) is None
    assert not allocator.allocate_at(0, 1) and not allocator.extend(0, 1, 1)
    allocator.free(0, 1)
    assert allocator.allocate_at(0, 1) and allocator.extents() == []
    allocator.check()


# -- bad arguments ---------------------------------------------------------------------------------

BAD_CALLS = {
    "allocate nothing": (lambda a: a.allocate(0), ValueError, "num_blocks is 0, .* at least 1"),
    "allocate less": (lambda a: a.allocate(-2), ValueError, "num_blocks is -2"),
    "allocate a float": (lambda a: a.allocate(2.0), TypeError, "num_blocks .* not 2.0"),
    "round nothing up": (lambda a: a.round_up(0), ValueError, "num_blocks is 0"),
    "round a float up": (lambda a: a.round_up(1.5), TypeError, "not 1.5"),
    "place before": (lambda a: a.allocate_at(-1, 1), ValueError, "start is -1"),
    "place behind": (lambda a: a.allocate_at(8, 1), ValueError, "blocks 8 to 8 .* blocks 0 to 7"),
    "place over the end": (lambda a: a.allocate_at(6, 3), ValueError, "blocks 6 to 8"),
    "place nothing": (lambda a: a.allocate_at(6, 0), ValueError, "num_blocks is 0"),
    "place at a float": (lambda a: a.allocate_at(6.0, 1), TypeError, "start .* not 6.0"),
    "free before": (lambda a: a.free(-1, 1), ValueError, "start is -1"),
    "free over the end": (lambda a: a.free(7, 2), ValueError, "blocks 7 to 8 .* blocks 0 to 7"),
    "free nothing": (lambda a: a.free(0, 0), ValueError, "num_blocks is 0"),
    "free a float": (lambda a: a.free(0, 2.0), TypeError, "not 2.0"),
    "free twice": (lambda a: a.free(5, 2), ValueError, "blocks 5 to 6 are not .*in use"),
    "free too much": (lambda a: a.free(2, 3), ValueError, "blocks 2 to 4 are not .*in use"),
    "free too early": (lambda a: a.free(1, 3), ValueError, "blocks 1 to 3 are not .*in use"),
    "free all": (lambda a: a.free(0, 8), ValueError, "blocks 0 to 7 are not .*in use"),
    "extend free blocks": (lambda a: a.extend(5, 1, 1), ValueError, "5 to 5 are not .*in use"),
    "extend too much": (lambda a: a.extend(2, 3, 1), ValueError, "2 to 4 are not .*in use"),
    "extend by nothing": (lambda a: a.extend(2, 2, 0), ValueError, "num_more is 0"),
    "extend by a float": (lambda a: a.extend(2, 2, 1.0), TypeError, "num_more .* not 1.0"),
    "extend over the end": (lambda a: a.extend(7, 2, 1), ValueError, "blocks 7 to 8"),
}


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_name_the_numbers_and_change_nothing(fit, name):
    call, error, message = BAD_CALLS[name]
    allocator = make_allocator(fit, 8)
    assert allocator.allocate_at(2, 2)  # ..##....
    before = state(allocator)
    with pytest.raises(error, match=message):
        call(allocator)
    assert state(allocator) == before


def test_buddy_frees_only_what_it_gave():
    buddy = make_allocator("buddy", 8)
    assert buddy.allocate(4) == 0
    before = state(buddy)
    for start, num_blocks in [(0, 2), (2, 2), (0, 5), (1, 3)]:
        with pytest.raises(ValueError, match=f"blocks {start} to {start + num_blocks - 1} are not"):
            buddy.free(start, num_blocks)
    assert state(buddy) == before
    buddy.free(0, 3)  # 3 or 4: the same block


@pytest.mark.parametrize("fit", FITS)
def test_numbers_of_other_kinds_of_int_are_taken_as_numbers(fit):
    allocator = make_allocator(fit, np.int64(8))
    start = allocator.allocate(np.int64(2))
    assert allocator.extend(np.int64(start), np.int64(2), np.int64(2))
    allocator.free(np.int64(start), np.int64(4))
    assert allocator.allocate_at(np.int64(4), np.int64(4))
    assert all(type(number) is int for extent in allocator.extents() for number in extent)
    assert type(allocator.num_free_blocks) is int


def test_unknown_fits_and_empty_pools_are_refused():
    with pytest.raises(ValueError, match="'rubber'; known: first, best, next, worst, buddy"):
        make_allocator("rubber", 8)
    for fit in FITS:
        with pytest.raises(ValueError, match="num_blocks is 0"):
            make_allocator(fit, 0)


# -- check() ---------------------------------------------------------------------------------------


def lose_a_block(allocator):
    allocator.num_free_blocks -= 1


def overlap(allocator):
    allocator._tree.set_size(4, 4)


def forget_to_join(allocator):
    allocator._tree.set_size(7, 1)
    allocator._tree.set_size(6, 2)


def spoil_a_node(allocator):
    allocator._tree._largest[2] += 1


def leave_the_pool(allocator):
    allocator._tree.set_size(7, 0)
    allocator._tree.set_size(9, 3)


BREAKS = [
    (lose_a_block, "6 blocks, but 5 are counted"),
    (overlap, "begins before"),
    (forget_to_join, "neighbours, but not one extent"),
    (spoil_a_node, "of the tree says that the largest"),
    (leave_the_pool, "ends at 10, the pool at"),
]


@pytest.mark.parametrize("fit", COALESCING)
@pytest.mark.parametrize("spoil, message", BREAKS, ids=[spoil.__name__ for spoil, _ in BREAKS])
def test_check_sees_broken_books(fit, spoil, message):
    allocator = make_allocator(fit, 9 if spoil is leave_the_pool else 8)
    if spoil is leave_the_pool:
        assert allocator.allocate_at(8, 1)
    assert allocator.allocate_at(3, 2)  # ...##...
    allocator.check()
    spoil(allocator)
    with pytest.raises(InvariantBroken, match=message):
        allocator.check()


@pytest.mark.parametrize("fit", ["best", "worst"])
def test_check_compares_the_order_by_size_with_that_by_address(fit):
    allocator = draw(fit, "...##...")
    allocator._by_size.remove((3, 5))
    allocator._by_size.add((3, 4))
    with pytest.raises(InvariantBroken, match="by size"):
        allocator.check()


def forget_a_used_block(buddy):
    del buddy._used[2]


def hold_it_twice(buddy):
    buddy._used[1] = 1


def leave_buddies_apart(buddy):
    buddy._remove(4, 4)
    buddy._put(4, 2)
    buddy._put(6, 2)


def misalign(buddy):
    del buddy._used[2]
    buddy._remove(0, 2)
    buddy._put(0, 1)
    buddy._put(3, 1)
    buddy._used[1] = 2


def odd_size(buddy):
    del buddy._used[2]
    buddy._remove(0, 2)
    buddy._used[0] = 3
    buddy._put(3, 1)
    buddy.num_free_blocks -= 1


def lose_the_last_block(buddy):
    buddy._remove(4, 4)
    buddy.num_free_blocks -= 4


def only_by_size(buddy):
    buddy._by_size.add((1, 2))


BUDDY_BREAKS = [
    (lose_a_block, "6 blocks, but 5 are counted"),
    (forget_a_used_block, "no buddy that begins at 2"),
    (hold_it_twice, "no buddy"),
    (leave_buddies_apart, "both free"),
    (misalign, "no buddy that begins at 1"),
    (odd_size, r"\(0, 3\) is no buddy"),
    (lose_the_last_block, "the blocks end at 4, the pool at 8"),
    (only_by_size, "by size"),
]


@pytest.mark.parametrize("spoil, message", BUDDY_BREAKS, ids=[s.__name__ for s, _ in BUDDY_BREAKS])
def test_check_sees_broken_books_of_the_buddies(spoil, message):
    buddy = make_allocator("buddy", 8)
    assert buddy.allocate_at(2, 2)
    buddy.check()
    spoil(buddy)
    with pytest.raises(InvariantBroken, match=message):
        buddy.check()


# -- the tree --------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_the_tree_finds_what_a_walk_over_all_blocks_finds(sizes, data):
    tree = ExtentTree(len(sizes))
    for last, size in enumerate(sizes):  # sizes alone: whether extents overlap is not its concern
        tree.set_size(last, size)
    tree.check()
    assert tree.largest == max(sizes)
    for num_blocks in range(1, 7):
        for from_block in range(len(sizes)):
            enough = (i for i, n in enumerate(sizes) if i >= from_block and n >= num_blocks)
            assert tree.first(num_blocks, from_block) == next(enough, None)


class CountingList(list):
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("fit", ["first", "next"])
def test_a_hundred_thousand_extents_cost_a_few_nodes_a_level(fit):
    """Counted, not timed: an allocation or a free reads a number of nodes that is logarithmic."""
    num_blocks = 1 << 18
    allocator = make_allocator(fit, num_blocks)
    for start in range(1, 200_000, 2):
        assert allocator.allocate_at(start, 1)
    assert len(allocator.extents()) == 100_001
    tree = allocator._tree
    tree._largest = counting = CountingList(tree._largest)
    rng = random.Random(0)
    for _ in range(200):
        counting.reads = 0
        start = allocator.allocate(rng.choice([1, 2, 40_000]))
        assert counting.reads <= 8 * 18
        counting.reads = 0
        if start is not None:
            allocator.free(start, 1)
        assert counting.reads <= 12 * 18


# -- measures --------------------------------------------------------------------------------------

HOLES = [Extent(0, 3), Extent(5, 6), Extent(12, 2), Extent(17, 6), Extent(30, 1)]


def test_the_measures_of_a_list_drawn_by_hand():
    assert num_free(HOLES) == 18
    assert largest_extent(HOLES) == 6
    assert external_fragmentation(HOLES) == pytest.approx(2 / 3)  # against what is free: 1 - 6/18
    assert extent_histogram(HOLES) == {1: 1, 2: 2, 4: 2}
    assert [unusable(HOLES, n) for n in (1, 2, 3, 4, 6, 7)] == [0, 1, 3, 6, 6, 18]


def test_buckets_begin_at_powers_of_two_and_none_is_left_out():
    extents = [Extent(10 * i, n) for i, n in enumerate([1, 7, 8, 16])]
    assert extent_histogram(extents) == {1: 1, 2: 0, 4: 1, 8: 1, 16: 1}
    assert list(extent_histogram(extents)) == [1, 2, 4, 8, 16]


def test_the_measures_where_nothing_is_free_or_all_is_one():
    assert (num_free([]), largest_extent([]), unusable([], 5)) == (0, 0, 0)
    assert external_fragmentation([]) == 0.0 and extent_histogram([]) == {}
    assert external_fragmentation([Extent(3, 7)]) == 0.0


@pytest.mark.parametrize("fit", FITS)
def test_the_measures_agree_with_the_allocator(fit):
    allocator = draw(fit, PICTURE)
    extents = allocator.extents()
    assert num_free(extents) == allocator.num_free_blocks == PICTURE.count(".")
    assert largest_extent(extents) == allocator.largest_free_extent
    need = allocator.round_up(4)
    assert (unusable(extents, need) == num_free(extents)) == (allocator.allocate(4) is None)
