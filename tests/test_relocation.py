"""Extents under every policy: who gets what, what moves, what is copied, and that nothing is lost.

The stateful test holds a manager against a plain list of owners and a pool in which everything
that nobody needs is poisoned; the rest is by hand.
"""

import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from managers import MinimalManager, RestlessManager
from oracle import engine, reference_of

from minikv.kv_cache.base import BlockCopy, InvariantBroken, MemoryReport, cdiv
from minikv.kv_cache.contiguous import RESERVE_POLICIES, ContiguousKVCacheManager
from minikv.kv_cache.extents import FITS
from minikv.request import Request
from minikv.scheduler import ScheduledRequest, Scheduler
from minikv.simulator import SimulatedRunner, Simulation, StepTime, VirtualClock
from minikv.specs import find_gpu, find_model
from minikv.static_batching import StaticScheduler


def new(name, num_prompt_tokens=2, max_tokens=8):
    return Request(name, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)


def make(reserve="grow", fit="first", num_blocks=12, block_size=1, max_model_len=64):
    return ContiguousKVCacheManager(
        num_blocks, block_size, max_model_len=max_model_len, reserve=reserve, fit=fit
    )


def take(manager, request, num_new_tokens):
    """Allocates, and pretends that the tokens were computed (the copies are not drained)."""
    table = manager.allocate_slots(request, num_new_tokens)
    assert table is not None
    request.num_computed_tokens += num_new_tokens
    request.num_tokens = max(request.num_tokens, request.num_computed_tokens)
    return table


def state(manager):
    """All that a refusal must leave alone."""
    return (
        dict(manager.tables),
        dict(manager.requests),
        manager.allocator.extents(),
        getattr(manager.allocator, "_cursor", None),
        dict(manager._origins),
        dict(manager._asked),
        (manager.num_relocations, manager.num_moved_blocks),
        manager.report(),
    )


# -- what each policy asks for ------------------------------------------------------------------


@pytest.mark.parametrize("reserve, prompt, max_tokens, num_new_tokens, num_slots", [
    ("max", 5, 3, 5, 64), ("max", 1, 1, 1, 64),
    ("pow2", 5, 3, 5, 9), ("pow2", 5, 4, 2, 9), ("pow2", 5, 5, 5, 13), ("pow2", 5, 1, 5, 6),
    ("pow2", 40, 20, 40, 64),  # 72, clipped at max_model_len
    ("exact", 5, 3, 2, 7), ("exact", 5, 1, 5, 5),
    ("double", 5, 3, 5, 5), ("double", 5, 3, 2, 5),  # the prompt, not the chunk
    ("grow", 5, 3, 5, 5), ("grow", 5, 3, 2, 2),
])  # fmt: skip
def test_an_admission_takes(reserve, prompt, max_tokens, num_new_tokens, num_slots):
    manager, request = make(reserve, num_blocks=70), new("a", prompt, max_tokens)
    assert manager.num_blocks_for(request, num_new_tokens) == num_slots
    assert manager.allocate_slots(request, num_new_tokens) == range(num_slots)
    manager.check()


@pytest.mark.parametrize("reserve", RESERVE_POLICIES)
def test_room_is_counted_in_whole_blocks(reserve):
    manager = make(reserve, num_blocks=40, block_size=4, max_model_len=66)
    table = manager.allocate_slots(new("a", 5, 6), 5)  # pow2: 13 slots, exact: 10
    expected = {"max": 17, "pow2": 4, "double": 2, "exact": 3, "grow": 2}
    assert len(table) == expected[reserve]


def test_double_doubles_and_grow_grows():
    sizes = {}
    for reserve in ("double", "grow"):
        manager, request = make(reserve, num_blocks=30, max_model_len=30), new("a", 3, 28)
        sizes[reserve] = [len(take(manager, request, 1)) for _ in range(30)]
        manager.check()
        assert manager.num_relocations == 0 and manager.copies() == []  # all of it in place
    assert sizes["grow"] == list(range(1, 31))
    assert sizes["double"] == [3] * 3 + [6] * 3 + [12] * 6 + [24] * 12 + [30] * 6


def test_whoever_comes_back_takes_all_its_known_tokens():
    manager, request = make("double", num_blocks=30), new("a", 3, 9)
    for _ in range(4):
        request.append(0)
    assert len(manager.allocate_slots(request, 2)) == 7  # after a preemption: prompt and answer


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("reserve", RESERVE_POLICIES)
def test_what_a_policy_adds_never_makes_a_request_impossible(reserve, fit):
    """Whatever fits_ever accepts runs to its end alone, at any chunk size."""
    for num_blocks, block_size in ((5, 1), (7, 2), (8, 1), (13, 3)):
        for max_model_len in (3, 8, 24, 60):
            try:
                manager = make(reserve, fit, num_blocks, block_size, max_model_len)
            except ValueError:
                assert reserve == "max"  # no slab
                continue
            most = manager.max_slots_per_request
            limit = manager.allocator.largest_when_empty * block_size
            assert most == min(max_model_len, limit)
            for prompt, budget in itertools.product((1, 2, most // 2, most), (1, 3, 64)):
                prompt = max(1, prompt)
                for max_tokens in {1, most - prompt + 1, most - prompt + 2}:
                    request = Request("a", [1] * prompt, max_tokens=max(1, max_tokens))
                    assert manager.fits_ever(request) == (request.max_kv_tokens <= most)
                    if not manager.fits_ever(request):
                        continue
                    core = engine(manager, max_num_batched_tokens=budget)
                    core.run([request], on_step=lambda core: core.manager.check())
                    assert request.token_ids == reference_of(request)
                    assert core.scheduler.num_preemptions == 0


@pytest.mark.parametrize("reserve, fit, message", [
    ("grow", "first", "'a' wants 13 slots, but one request gets 12 of the pool's slots at most"),
    ("exact", "buddy", "'a' wants 9 slots, but one request gets 8 of the pool's slots at most"),
    ("max", "buddy", "needs a slab of 12 blocks .* only 12 blocks, and buddy fit gives 8"),
    ("max", "worst fit", "fit is 'worst fit'; known: first"),
])  # fmt: skip
def test_what_is_too_long_is_named(reserve, fit, message):
    with pytest.raises(ValueError, match=message):
        manager = make(reserve, fit, max_model_len=12 if reserve == "max" else 64)
        most = manager.max_slots_per_request
        before = state(manager)
        try:
            manager.allocate_slots(new("a", 40), most + 1)
        finally:
            assert state(manager) == before


# -- relocation ---------------------------------------------------------------------------------


def two_neighbours(**options):
    """a in blocks 0-2, b in 3-4; 7 blocks behind them are free."""
    manager, a, b = make(**options), new("a", 3), new("b", 2)
    take(manager, a, 3)
    take(manager, b, 2)
    return manager, a, b


def test_the_last_extent_grows_in_place_and_the_first_is_relocated():
    manager, a, b = two_neighbours()
    assert take(manager, b, 1) == range(3, 6) and manager.num_relocations == 0
    assert take(manager, a, 1) == range(6, 10) and manager.num_relocations == 1
    assert manager.copies() == [BlockCopy(0, 6, 3)] and manager.copies() == []
    assert manager.num_moved_blocks == 3
    manager.check()


def test_its_own_room_counts_when_it_moves():
    manager, a, b = make(num_blocks=7), new("a"), new("b", 4)
    take(manager, a, 2)
    take(manager, b, 4)
    manager.free(a)  # blocks 0-1 and 6 are free
    b.num_tokens += 2
    assert manager.allocate_slots(b, 2) == range(0, 6)
    assert manager.copies() == [BlockCopy(2, 0, 4)]  # onto itself: sources are read first
    manager.check()


def test_only_blocks_with_computed_tokens_are_copied():
    manager, a, b = make(block_size=4), new("a", 20), new("b")
    manager.allocate_slots(a, 14)  # 4 blocks, in which 5 tokens get computed
    a.num_computed_tokens = 5
    take(manager, b, 2)
    assert manager.allocate_slots(a, 13) == range(5, 10)
    assert manager.copies() == [BlockCopy(0, 5, 2)]


def test_whoever_has_no_content_moves_for_nothing():
    manager, a, b = make(), new("a", 9), new("b")
    manager.allocate_slots(a, 2)
    take(manager, b, 2)
    assert manager.allocate_slots(a, 5) == range(4, 9)
    assert manager.copies() == [] and manager.num_relocations == 1
    manager.check()


def test_two_moves_before_the_copies_are_one_copy():
    manager, a, _b = two_neighbours()
    assert manager.allocate_slots(a, 1) == range(5, 9)
    assert manager.compact() == 2 + 3  # both slide down, in the order in which they lie
    assert manager.tables == {"b": range(0, 2), "a": range(2, 6)}
    assert manager.copies() == [BlockCopy(0, 2, 3), BlockCopy(3, 0, 2)]
    assert manager.num_moved_blocks == 5
    manager.check()


def test_there_and_back_again_is_no_copy():
    manager, a, b = two_neighbours()
    manager.allocate_slots(a, 1)  # to 5-8
    manager.free(b)
    assert manager.compact() == 3 and manager.tables["a"] == range(0, 4)
    assert manager.copies() == [] and manager.num_moved_blocks == 0


def test_copies_of_whoever_has_left_are_dropped():
    manager, a, _b = two_neighbours()
    manager.allocate_slots(a, 1)
    manager.free(a)
    assert manager.copies() == []
    a.num_computed_tokens = 0
    manager.allocate_slots(a, 3)  # the same request again has nothing to bring along
    assert manager.copies() == []


@pytest.mark.parametrize("fit", FITS)
def test_a_refused_move_changes_nothing(fit):
    manager, a, b = two_neighbours(fit=fit, num_blocks=8)
    manager.allocate_slots(b, 1)
    b.num_computed_tokens += 1
    before = state(manager)
    assert manager.allocate_slots(a, 5) is None and state(manager) == before
    assert manager.allocate_slots(new("c"), 7) is None and state(manager) == before
    manager.check()


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("extra", [{"must_fit_tokens": 8}, {"keep_free_blocks": 7}])
def test_admission_looks_ahead(fit, extra):
    """16 blocks; a holds 8, so 8 are free: two tokens of b fit, but not what is asked beside."""
    manager, a, b = make(fit=fit, num_blocks=16), new("a", 8), new("b", 9)
    take(manager, a, 8)
    before = state(manager)
    assert manager.allocate_slots(b, 2, **{key: n + 1 for key, n in extra.items()}) is None
    assert state(manager) == before
    if "keep_free_blocks" in extra:
        extra = {"keep_free_blocks": 6}
    assert len(manager.allocate_slots(b, 2, **extra)) == 2  # it is asked for, and not taken
    manager.check()


def test_both_limits_together_count_what_must_fit():
    manager, b = make(num_blocks=16), new("b", 12)
    assert manager.allocate_slots(b, 2, must_fit_tokens=12, keep_free_blocks=5) is None
    assert manager.allocate_slots(b, 2, must_fit_tokens=12, keep_free_blocks=4) == range(2)


def test_what_must_fit_must_fit_in_one_piece():
    """9 of 10 blocks are free, 3 before b and 6 behind it."""
    manager, a, b = make(num_blocks=10), new("a", 3), new("b", 1)
    take(manager, a, 3), take(manager, b, 1)
    manager.free(a)
    before = state(manager)
    assert manager.allocate_slots(new("c"), 2, must_fit_tokens=7) is None
    assert state(manager) == before
    assert manager.allocate_slots(new("c"), 2, must_fit_tokens=6) == range(2)


def test_a_running_request_can_be_asked_to_fit_as_well():
    manager, a, _b = two_neighbours()
    before = state(manager)
    a.num_tokens = 20
    assert manager.allocate_slots(a, 1, must_fit_tokens=8) is None  # 7 are free behind b
    assert state(manager) == before
    assert manager.allocate_slots(a, 1, must_fit_tokens=7) == range(5, 9)
    assert len(manager.allocate_slots(a, 1, must_fit_tokens=4)) == 4  # it has them already


@pytest.mark.parametrize("scheduler", [Scheduler, StaticScheduler])
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("reserve", RESERVE_POLICIES)
def test_either_batching_runs_over_every_policy_and_fit(reserve, fit, scheduler):
    manager = make(reserve, fit, num_blocks=21, block_size=2, max_model_len=16)
    rnd = random.Random(1)
    prompts = [[rnd.randrange(5) for _ in range(rnd.randint(1, 9))] for _ in range(9)]
    requests = [Request(f"r{i}", p, max_tokens=7) for i, p in enumerate(prompts)]
    core = engine(manager, scheduler=scheduler, max_num_batched_tokens=16, report_every=1)
    core.run(requests, on_step=lambda core: core.manager.check())
    for request in requests:
        assert request.token_ids == reference_of(request)
    assert all(r.total == 42 and min(r) >= 0 for _, r in core.metrics.reports)
    assert manager.num_free_blocks == 21


# -- compaction ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fit", FITS)
def test_compaction_leaves_one_hole(fit):
    manager = make(fit=fit, num_blocks=32)
    requests = [new(f"r{i}", 2) for i in range(10)]
    for request in requests:
        take(manager, request, 2)
    for request in requests[::2]:
        manager.free(request)
    assert manager.allocator.largest_free_extent < manager.num_free_blocks == 22
    manager.requests["r9"].num_computed_tokens = 1
    assert manager.compact() == 4 * 2 + 1
    assert [tuple(e) for e in manager.allocator.extents() if fit != "buddy"] in ([(10, 22)], [])
    assert manager.allocator.largest_free_extent == (16 if fit == "buddy" else 22)
    assert [manager.tables[f"r{i}"].start for i in (1, 3, 5, 7, 9)] == [0, 2, 4, 6, 8]
    assert manager.copies() == [BlockCopy(4 * i + 2, 2 * i, 2 if i < 4 else 1) for i in range(5)]
    manager.check()
    assert manager.compact() == 0 and manager.copies() == []


def test_buddies_are_placed_by_size():
    manager = make(fit="buddy", num_blocks=16)
    for name, size in (("a", 1), ("b", 4), ("c", 1), ("d", 2)):
        take(manager, new(name, size), size)
    tables = dict(manager.tables)
    assert manager.compact() == 1 + 4 + 1 + 2 and tables["a"] == range(0, 1)
    assert manager.tables == {
        "b": range(0, 4), "d": range(4, 6), "a": range(6, 7), "c": range(7, 8)
    }  # fmt: skip
    assert manager.allocator.largest_free_extent == 8
    manager.check()


# -- the report ---------------------------------------------------------------------------------


def test_the_report_tells_the_policies_apart():
    """5 prompt tokens of 5 + 3 - 1 = 7 slots, in blocks of 2; a second one would wait."""
    expected = {  # in blocks: 6 of max_model_len 12, 5, 3, 4, 3
        "max": MemoryReport(live=5, reserved=2, internal=5, external=8),
        "pow2": MemoryReport(live=5, reserved=2, internal=3, free=10),
        "double": MemoryReport(live=5, reserved=1, free=14),
        "exact": MemoryReport(live=5, reserved=2, internal=1, free=12),
        "grow": MemoryReport(live=5, reserved=1, free=14),
    }
    for reserve, report in expected.items():
        manager = make(reserve, num_blocks=10, block_size=2, max_model_len=12)
        take(manager, new("a", 5, 3), 5)
        assert manager.report(new("b", 5, 4)) == report, reserve


def test_what_buddies_add_is_rounding_until_a_token_reaches_it():
    manager, request = make("grow", "buddy", num_blocks=16), new("a", 5, 12)
    take(manager, request, 5)
    assert manager.report() == MemoryReport(live=5, rounding=3, free=8)
    take(manager, request, 2)
    assert manager.report() == MemoryReport(live=7, rounding=1, free=8)
    take(manager, request, 2)
    assert manager.report() == MemoryReport(live=9, rounding=7)


def test_external_is_what_is_too_short_for_the_next_one():
    manager = make("exact", num_blocks=16)
    requests = [new(f"r{i}", 3, 1) for i in range(5)]
    for request in requests:
        take(manager, request, 3)
    for request in requests[1::2]:
        manager.free(request)  # holes of 3 and 3, and 1 at the end
    for need, external in ((1, 0), (2, 1), (3, 1), (4, 7)):
        report = manager.report(new("next", 1, need))
        assert (report.external, report.free) == (external, 7 - external)
        assert (manager.allocate_slots(new("x", need, 1), need) is None) == (report.free == 0)
        manager.free(manager.requests.get("x", new("x")))
    assert manager.report().external == 0


# -- any sequence of calls, against a list of owners ------------------------------------------


class Extents(RuleBasedStateMachine):
    """owners: a plain list, who has each block. pool: per slot (request_id, position), or None
    for poison, which is written wherever no computed token should lie."""

    @initialize(
        reserve=st.sampled_from(RESERVE_POLICIES),
        fit=st.sampled_from(list(FITS)),
        block_size=st.sampled_from([1, 1, 2, 3]),
        num_blocks=st.integers(6, 24),
        data=st.data(),
    )
    def begin(self, reserve, fit, block_size, num_blocks, data):
        largest = 1 << num_blocks.bit_length() - 1 if fit == "buddy" else num_blocks
        most = largest * block_size if reserve == "max" else 2 * num_blocks * block_size
        max_model_len = data.draw(st.integers(min(4, most), most))
        self.manager = make(reserve, fit, num_blocks, block_size, max_model_len)
        self.owners = [None] * num_blocks
        self.pool = [None] * (num_blocks * block_size)
        self.running, self.pending, self.count = [], {}, 0  # pending: request_id -> new tokens

    def longest_run(self, request_id=None):
        """Of blocks that are free, or the request's own."""
        runs = [(key, len(list(run))) for key, run in itertools.groupby(
            self.owners, lambda owner: owner is None or owner == request_id
        )]  # fmt: skip
        return max((length for free, length in runs if free), default=0)

    def allocate(self, request, num_new_tokens, must=0, keep=0):
        manager, name = self.manager, request.request_id
        if max(request.num_computed_tokens + num_new_tokens, must) > manager.max_slots_per_request:
            return None
        num_tokens = request.num_computed_tokens + num_new_tokens
        held = self.owners.count(name)
        fits = max(num_tokens, must) <= held * manager.block_size
        want, most = (
            manager.allocator.round_up(manager.num_blocks_for(request, n))
            for n in (num_tokens, max(num_tokens, must))
        )
        before, num_free = state(manager), self.owners.count(None)
        table = manager.allocate_slots(
            request, num_new_tokens, must_fit_tokens=must, keep_free_blocks=keep
        )
        if table is None:
            assert not fits and state(manager) == before
            # A buddy's halves may lie side by side without being one.
            assert most - held + keep > num_free or (
                manager.fit == "buddy" or most > self.longest_run(name)
            )
            return None
        assert fits or (most - held + keep <= num_free and most <= self.longest_run(name))
        assert len(table) == (held if fits else want)
        assert all(self.owners[block_id] in (None, name) for block_id in table)
        self.owners = [None if owner == name else owner for owner in self.owners]
        for block_id in table:
            self.owners[block_id] = name
        self.pending[name] = num_new_tokens
        return table

    @rule(prompt=st.integers(1, 9), max_tokens=st.integers(1, 20), data=st.data())
    def admit(self, prompt, max_tokens, data):
        request = new(f"r{self.count}", prompt, max_tokens)
        self.count += 1
        if not self.manager.fits_ever(request):
            return
        num_new_tokens = data.draw(st.integers(1, prompt))
        must = data.draw(st.sampled_from([0, 0, prompt]))
        keep = data.draw(st.sampled_from([0, 0, 1, 5]))
        if self.allocate(request, num_new_tokens, must, keep) is not None:
            self.running.append(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def grow(self, data):
        request = data.draw(st.sampled_from(self.running))
        left = request.max_kv_tokens - request.num_computed_tokens
        if left < 1:
            return
        num_new_tokens = data.draw(st.integers(1, left))
        request.num_tokens = max(request.num_tokens, request.num_computed_tokens + num_new_tokens)
        must = data.draw(st.sampled_from([0, 0, request.max_kv_tokens]))
        self.allocate(request, num_new_tokens, must)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data):
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.pending.pop(request.request_id, None)
        self.manager.free(request)
        self.owners = [None if o == request.request_id else o for o in self.owners]

    @rule()
    def compact(self):
        manager, before = self.manager, dict(self.manager.tables)
        num_moved_tokens = manager.compact()
        moved = [r for r in self.running if manager.tables[r.request_id] != before[r.request_id]]
        assert num_moved_tokens == sum(r.num_computed_tokens for r in moved)
        assert {k: len(t) for k, t in before.items()} == {
            k: len(t) for k, t in manager.tables.items()
        }
        self.owners = [None] * len(self.owners)
        for name, table in manager.tables.items():
            for block_id in table:
                assert self.owners[block_id] is None
                self.owners[block_id] = name
        in_use = len(self.owners) - self.owners.count(None)
        assert None not in self.owners[:in_use]

    @rule(computes=st.booleans())
    def step(self, computes):
        """Drains the copies, poisons what is left behind, and computes the pending tokens."""
        manager, B, written = self.manager, self.manager.block_size, set()
        old = list(self.pool)
        for src, dst, num_blocks, kind in manager.copies():
            assert kind == "device" and num_blocks >= 1 and src != dst
            blocks = set(range(dst, dst + num_blocks))
            assert not blocks & written
            written |= blocks
            self.pool[dst * B : (dst + num_blocks) * B] = old[src * B : (src + num_blocks) * B]
        content = {
            table.start * B + position: (r.request_id, position)
            for r in self.running
            for table in [manager.tables[r.request_id]]
            for position in range(r.num_computed_tokens)
        }
        for slot, record in content.items():
            assert self.pool[slot] == record
        self.pool = [content.get(slot) for slot in range(len(self.pool))]
        for request in self.running if computes else ():
            start = manager.tables[request.request_id].start * B
            for _ in range(self.pending.pop(request.request_id, 0)):
                position = request.num_computed_tokens
                self.pool[start + position] = (request.request_id, position)
                request.num_computed_tokens += 1

    @invariant()
    def adds_up(self):
        if not hasattr(self, "manager"):
            return
        manager = self.manager
        manager.check()
        assert manager.num_free_blocks == self.owners.count(None)
        owners = [None] * len(self.owners)
        for name, table in manager.tables.items():
            for block_id in table:
                owners[block_id] = name
        assert owners == self.owners
        live = sum(r.num_computed_tokens for r in self.running)
        for report in (manager.report(), manager.report(new("next", 3, 4))):
            assert report.total == len(self.pool) and min(report) >= 0 and report.live == live
            assert report.rounding == 0 or manager.fit == "buddy"
        waiting = new("next", 1, 3)
        if manager.fits_ever(waiting) and manager.fit != "buddy":
            need = manager.num_blocks_for(waiting, 1)
            assert (manager.report(waiting).free == 0) == (need > self.longest_run())


TestExtents = Extents.TestCase
TestExtents.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, derandomize=True
)


# -- steps that are cut short ------------------------------------------------------------------

POINTS = ("before the copies", "before the writes", "before the reads", "at the end")


def traffic():
    rnd = random.Random(7)
    prompts = [[rnd.randrange(5) for _ in range(n)] for n in (5, 3, 6, 2)]
    return [Request(f"r{i}", prompt, max_tokens=7) for i, prompt in enumerate(prompts)]


def serve_cut_short(manager, cut, *, abort_after=None, compact=False, max_steps=400):
    """Serves traffic(); the runner raises at the (step, point) pairs in `cut`, counting the steps
    that the loop tries. Returns (requests, core, at how many points it could have raised)."""
    core, requests, tries = engine(manager, max_num_batched_tokens=8), traffic(), itertools.count()
    reached = set()

    def cut_short(when):
        reached.add((now, when))
        if (now, when) in cut:
            cut.discard((now, when))
            raise KeyboardInterrupt(when)

    core.runner.cut_short = cut_short
    for request in requests:
        core.scheduler.add(request)
    while core.scheduler.has_unfinished_requests:
        now = next(tries)
        assert now < max_steps
        try:
            core.step()
        except KeyboardInterrupt:
            if abort_after is not None:
                core.scheduler.abort(requests[abort_after])
        if compact:
            manager.compact()
        manager.check()
    for request in requests:
        want = reference_of(request)
        assert request.token_ids == want[: request.num_tokens]
        assert request.finish_reason == "abort" or request.token_ids == want
    return requests, core, reached


CUT_MANAGERS = {
    "grow": lambda: make("grow", num_blocks=24),
    "grow, best fit": lambda: make("grow", "best", num_blocks=15, block_size=2),
    "double": lambda: make("double", num_blocks=26),
    "grow, buddy": lambda: make("grow", "buddy", num_blocks=28),
    "restless": lambda: RestlessManager(14, 2, random.Random(0)),
    "minimal": lambda: MinimalManager(14, 2),
}


@pytest.mark.parametrize("compact", [False, True], ids=["", "compact"])
@pytest.mark.parametrize("name", CUT_MANAGERS)
def test_a_step_cut_short_at_any_point_loses_no_copy_and_makes_none_twice(name, compact):
    make_manager = CUT_MANAGERS[name]
    _, core, points = serve_cut_short(make_manager(), set(), compact=compact)
    num_moved = core.runner.num_moved["device"]
    assert num_moved > 0 or name == "minimal"
    for point in sorted(points):
        serve_cut_short(make_manager(), {point}, compact=compact)
        # once more in the same step, at each later point
        step, _when = point
        for later in POINTS:
            serve_cut_short(make_manager(), {point, (step + 1, later)}, compact=compact)


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("name", CUT_MANAGERS)
def test_who_leaves_after_a_step_cut_short_leaves_no_harm(name, victim):
    """Its copies may still be made: into blocks that somebody else may have by then."""
    _, _, points = serve_cut_short(CUT_MANAGERS[name](), set())
    for point in sorted(points):
        requests, _, _ = serve_cut_short(CUT_MANAGERS[name](), {point}, abort_after=victim)
        assert sum(r.finish_reason == "abort" for r in requests) <= 1


# -- the simulator ------------------------------------------------------------------------------


def test_the_simulator_charges_a_move_twice_read_and_write():
    step_time = StepTime(find_model("opt-13b"), find_gpu("A100-40G"))
    manager, clock = make(num_blocks=64, block_size=16, max_model_len=1_024), VirtualClock()
    runner = SimulatedRunner(step_time, 16, clock)
    a, b = new("a", 100, 900), new("b", 10)
    take(manager, a, 100)  # 7 blocks
    take(manager, b, 10)
    take(manager, a, 13)
    copies = manager.copies()
    assert copies == [BlockCopy(0, 8, 7)]
    runner.run([], copies)
    kv_bytes = 7 * 16 * 819_200
    assert clock.now() == pytest.approx(2 * kv_bytes / (0.8 * 1_555e9))
    assert runner.num_copied_blocks == manager.num_moved_blocks == 7
    bare = SimulatedRunner(step_time, 16, VirtualClock())
    bare.run([ScheduledRequest(b, 1)], [])
    both = SimulatedRunner(step_time, 16, VirtualClock())
    both.run([ScheduledRequest(b, 1)], [BlockCopy(0, 8, 7)])
    assert both.clock.now() - bare.clock.now() == pytest.approx(clock.now())


@pytest.mark.parametrize("reserve", ["double", "grow"])
def test_every_move_of_a_simulation_is_charged(reserve):
    from minikv.workloads import sharegpt

    manager = make(reserve, num_blocks=200, block_size=16, max_model_len=2_048)
    step_time = StepTime(find_model("opt-13b"), find_gpu("A100-40G"))
    simulation = Simulation(Scheduler(manager, max_num_seqs=64), step_time)
    simulation.run(sharegpt(rate=2.0).requests(num_requests=60, seed=0))
    assert simulation.runner.num_copied_blocks == manager.num_moved_blocks > 100
    assert manager.num_relocations > 10 and manager.num_free_blocks == 200
    assert all(cdiv(r.num_tokens, 16) for r in simulation.requests)


def test_check_sees_a_table_that_the_policy_did_not_ask_for():
    manager, _a, _b = two_neighbours()
    manager.tables["b"] = range(3, 6)
    manager.allocator.allocate_at(5, 1)
    with pytest.raises(InvariantBroken, match=r"the extent of 'b' is range.3, 6."):
        manager.check()
