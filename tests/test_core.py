"""The loop as a whole: what the manager refuses, what is aborted and when, the clock, the books."""

import itertools
import random

import pytest
from managers import (
    ByHandManager,
    MinimalManager,
    RestlessManager,
    ScriptedManager,
    refuse_always,
    refuse_calls,
    refuse_steps,
)
from oracle import FakeClock, engine, reference_of

from minikv.core import EngineCore
from minikv.kv_cache.base import BlockCopy, InvariantBroken, MemoryReport, OutOfKVMemory
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.request import Request
from minikv.scheduler import Scheduler

MANAGERS = {
    "contiguous": lambda: ContiguousKVCacheManager(31, 2, max_model_len=14),
    "minimal": lambda: MinimalManager(30, 2),
    "by-hand": lambda: ByHandManager(30, 2),
    "restless": lambda: RestlessManager(30, 2, random.Random(0)),
}
every_manager = pytest.mark.parametrize("make", MANAGERS.values(), ids=MANAGERS)


def small_case():
    """Three requests, one of them with two samples: chunks, decoding and arrivals all occur."""
    requests = [
        Request("a", [1, 2, 3, 4], max_tokens=3),
        Request("b", [1, 2, 0, 0, 1, 2, 3], max_tokens=4),
        Request("c", [4, 4], max_tokens=2),
    ]
    requests[1].children = [Request("b1", [1, 2, 0, 0, 1, 2, 3], max_tokens=2, sample_index=1)]
    return requests


def everyone_in(requests):
    return [r for parent in requests for r in (parent, *parent.children)]


def serve(core, requests, max_steps=300):
    """Runs to the end; returns how often the loop reported OutOfKVMemory, and went on."""
    for request in requests:
        core.scheduler.add(request)
    num_raised = num_steps = 0
    while core.scheduler.has_unfinished_requests:
        num_steps += 1
        assert num_steps < max_steps, "no end"
        live = [*core.scheduler.running, *core.scheduler.waiting]
        before = [(r, r.num_output_tokens) for r in live]
        try:
            core.step()
        except OutOfKVMemory:
            num_raised += 1
            assert not core.scheduler.running  # else it should have gone on
        core.manager.check()
        assert all(r.num_output_tokens - num_before <= 1 for r, num_before in before)
    return num_raised


def assert_as_the_reference(core, everyone):
    for r in everyone:
        assert r.token_ids == reference_of(r)
        assert r.finish_reason == "length"
        emitted = [i for first, last in r.token_runs for i in range(first, last + 1)]
        assert len(emitted) == len(set(emitted)) == r.num_output_tokens
    assert core.manager.num_free_blocks == core.manager.num_blocks and not core.manager.tables


def served_with(make, refuse, budget):
    """The small case over a manager that refuses; returns the manager."""
    manager, requests = ScriptedManager(make(), refuse), small_case()
    core, everyone = engine(manager, max_num_batched_tokens=budget), everyone_in(requests)
    num_raised = serve(core, requests)
    assert_as_the_reference(core, everyone)
    assert num_raised <= manager.num_refused
    return manager


def never(manager, request):
    return False


@every_manager
@pytest.mark.parametrize("budget", [3, 64])
def test_none_at_any_one_call_changes_no_output(make, budget):
    num_calls = served_with(make, never, budget).num_allocates
    for k in range(num_calls):
        assert served_with(make, refuse_calls(k), budget).num_refused == 1


@every_manager
def test_none_for_a_whole_step_changes_no_output(make):
    num_steps = served_with(make, never, 3).num_steps
    for k in range(num_steps):
        # A step without any room is tried again for ever, as long as it is the same step: a
        # refused admission runs no step. So refuse it once, and what it asks again goes through.
        asked = set()

        def refuse(manager, request, k=k, asked=asked):
            first = manager.num_steps == k and request.request_id not in asked
            asked.add(request.request_id) if first else None
            return first

        served_with(make, refuse, 3)


@every_manager
def test_none_at_any_two_calls_changes_no_output(make):
    num_calls = served_with(make, never, 64).num_allocates
    for pair in itertools.combinations(range(num_calls + 4), 2):
        served_with(make, refuse_calls(*pair), 64)


def test_the_loop_ends_where_nobody_ever_gets_room():
    requests = small_case()
    core = engine(ScriptedManager(MinimalManager(30, 2), refuse_always))
    with pytest.raises(OutOfKVMemory, match="'a' gets no room though nothing else runs"):
        core.run(requests)
    assert not core.metrics.steps and core.manager.num_free_blocks == 30


@pytest.mark.parametrize("first", range(8))
def test_the_loop_ends_where_room_is_refused_from_some_step_on(first):
    requests = small_case()
    everyone = everyone_in(requests)
    manager = ScriptedManager(MinimalManager(30, 2), lambda m, request: m.num_steps >= first)
    core = engine(manager, max_num_batched_tokens=4)
    for request in requests:
        core.scheduler.add(request)
    with pytest.raises(OutOfKVMemory):
        for _ in range(100):
            core.step()
    # All who have not ended wait, in the order in which they came, with their tokens.
    left = [r for r in everyone if r.finish_reason is None]
    waiting = list(core.scheduler.waiting)
    assert sorted(r.request_id for r in left) == sorted(r.request_id for r in everyone_in(waiting))
    assert not core.manager.tables
    manager.refuse = never
    serve(core, [])
    assert_as_the_reference(core, everyone)


# -- abort and failure at every step -----------------------------------------------------------


@every_manager
@pytest.mark.parametrize("budget", [3, 64])
def test_an_abort_at_any_step_returns_every_block(make, budget):
    core = engine(make(), max_num_batched_tokens=budget)
    serve(core, small_case())
    num_steps = len(core.metrics.steps)
    for step, victim in itertools.product(range(num_steps + 1), range(4)):
        requests = small_case()
        everyone = everyone_in(requests)
        core = engine(make(), max_num_batched_tokens=budget)
        for request in requests:
            core.scheduler.add(request)
        for _ in range(step):
            core.step()
        before = everyone[victim].finish_reason
        ended = core.scheduler.abort(everyone[victim], core.clock.now())
        core.manager.check()
        assert (everyone[victim] in ended) == (before is None)
        assert everyone[victim].request_id not in core.manager.tables
        serve(core, [])
        assert_as_the_reference(core, [r for r in everyone if r not in ended or before])
        assert all(r.finish_reason == "abort" for r in ended)


@every_manager
def test_bad_logits_at_any_step_harm_nobody_else(make):
    for bad_step, victim in itertools.product(range(8), range(4)):
        requests = small_case()
        everyone = everyone_in(requests)
        name = everyone[victim].request_id
        core = engine(
            make(),
            max_num_batched_tokens=4,
            has_bad_logits=lambda request: (
                request.request_id == name and len(core.runner.steps) == bad_step + 1  # noqa: B023
            ),
        )
        serve(core, requests)
        assert_as_the_reference(core, [r for r in everyone if r.finish_reason != "error"])
        failed = {r.request_id for r in everyone if r.finish_reason == "error"}
        assert failed <= {name} | ({"b1"} if name == "b" else set())


# -- the learner's class -----------------------------------------------------------------------


@pytest.mark.parametrize("cls", [MinimalManager, ByHandManager])
def test_a_class_with_only_allocate_slots_and_free_is_enough(cls):
    requests = small_case()
    everyone = everyone_in(requests)
    core = engine(cls(10, 2), max_num_batched_tokens=4, report_every=1)
    core.run(requests, on_step=lambda core: core.manager.check())
    assert_as_the_reference(core, everyone)
    assert all(report.total == 20 for _, report in core.metrics.reports)


# -- the clock ---------------------------------------------------------------------------------


def arriving(name, time, max_tokens=2):
    return Request(name, [1, 2, 3], max_tokens=max_tokens, arrival_time=time)


def test_idle_time_costs_no_step():
    requests = [arriving("a", 5.0), arriving("b", 1000.0)]
    core = engine(MinimalManager(8, 1), step_time=2.0)
    core.run(requests)
    assert core.clock.waits == [(0.0, 5.0), (9.0, 1000.0)]
    assert [(s.start, s.end) for s in core.metrics.steps] == [
        (5.0, 7.0), (7.0, 9.0), (1000.0, 1002.0), (1002.0, 1004.0)
    ]  # fmt: skip
    assert [r.first_scheduled_time for r in requests] == [5.0, 1000.0]
    assert [r.finish_time for r in requests] == [9.0, 1004.0]


def test_who_arrives_while_a_step_runs_joins_the_next_one():
    core = engine(MinimalManager(64, 1), step_time=2.0)
    core.run([arriving("a", 0.0, 4), arriving("b", 1.0), arriving("c", 2.0), arriving("d", 2.5)])
    assert core.runner.steps == [
        [("a", 3)],
        [("a", 1), ("b", 3), ("c", 3)],
        [("a", 1), ("b", 1), ("c", 1), ("d", 3)],
        [("a", 1), ("d", 1)],
    ]
    assert core.clock.waits == []


def test_requests_that_arrive_together_keep_their_order():
    core = engine(MinimalManager(64, 1), max_num_seqs=1)
    core.run(arriving(name, 3.0, 1) for name in "cab")
    assert core.runner.steps == [[("c", 3)], [("a", 3)], [("b", 3)]]


def test_arrivals_are_drawn_when_their_time_has_come():
    """At most one ahead: a trace may be endless, or made while it is served."""
    core = engine(MinimalManager(64, 1))
    drawn = []

    def trace():
        for i in range(4):
            drawn.append(i)
            yield arriving(f"r{i}", 10.0 * i, 1)

    seen = []
    core.run(trace(), on_step=lambda core: seen.append((core.clock.now(), len(drawn))))
    assert seen == [(1.0, 2), (11.0, 3), (21.0, 4), (31.0, 4)]


def test_a_run_can_end_before_its_requests_do():
    core = engine(MinimalManager(64, 1), step_time=2.0)
    requests = [arriving("a", 0.0, 9), arriving("b", 3.0, 9), arriving("c", 7.0)]
    core.run(requests, until_s=7.0)  # the step from 6 to 8 is the last to begin
    assert [(s.start, s.end) for s in core.metrics.steps] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [r.request_id for r in core.scheduler.running] == ["a", "b"]
    core.run([arriving("c", 7.0)])  # and it can go on
    assert [r.num_output_tokens for r in requests[:2]] == [9, 9]
    idle = engine(MinimalManager(64, 1))
    idle.run([arriving("d", 5.0)], until_s=4.0)
    assert idle.clock.now() == 4.0 and not idle.metrics.steps


def test_run_serves_what_was_added_before():
    core = engine(MinimalManager(64, 1))
    core.scheduler.add(arriving("a", 0.0, 1))
    steps = []
    core.run(on_step=steps.append)
    assert core.runner.steps == [[("a", 3)]] and steps == [core]
    core.run()
    assert len(core.metrics.steps) == 1


def test_a_preempted_request_keeps_its_first_times():
    request = Request("a", [1, 2, 3], max_tokens=4)
    manager = ScriptedManager(MinimalManager(8, 1), refuse_steps(1))
    core = engine(manager)
    core.run([request])
    assert core.runner.steps == [[("a", 3)], [], [("a", 4)], [("a", 1)], [("a", 1)]]
    assert (request.first_scheduled_time, request.first_token_time) == (0.0, 1.0)
    assert core.metrics.token_times(request) == [1.0, 3.0, 4.0, 5.0]
    assert core.metrics.of(request).num_preemptions == 1


def test_times_of_a_request_that_waits():
    a, b = Request("a", [1, 2], max_tokens=3), Request("b", [3], max_tokens=1, arrival_time=0.5)
    core = engine(MinimalManager(8, 1), max_num_seqs=1)
    core.run([a, b])
    assert (b.first_scheduled_time, b.first_token_time, b.finish_time) == (3.0, 4.0, 4.0)
    assert core.metrics.of(b).queue_time == 2.5 and core.metrics.of(b).ttft == 3.5


# -- the books of a step -----------------------------------------------------------------------


def test_a_step_records_what_it_computed_and_what_it_held():
    core = engine(MinimalManager(8, 2), max_num_batched_tokens=4)
    core.run([Request("a", [1, 2, 3], max_tokens=2), Request("b", [1, 2], max_tokens=1)])
    rows = [(s.num_seqs, s.num_tokens, s.num_blocks_in_use) for s in core.metrics.steps]
    # a: 3 tokens in 2 blocks; b's prompt in two chunks, 1 token each. Held: before anyone leaves.
    assert rows == [(2, 4, 3), (2, 2, 3)]


def test_step_returns_what_was_scheduled_and_who_ended():
    core = engine(MinimalManager(8, 2))
    a, b = Request("a", [1, 2, 3], max_tokens=2), Request("b", [1, 2], max_tokens=1)
    core.scheduler.add(a)
    core.scheduler.add(b)
    assert core.step() == ([(a, 3), (b, 2)], [b])
    assert core.step() == ([(a, 1)], [a])
    assert core.step() == ([], [])


@pytest.mark.parametrize("every, expected", [(0, []), (1, [0, 1, 2, 3]), (3, [2])])
def test_reports_come_on_a_schedule(every, expected):
    core = engine(MinimalManager(8, 2), report_every=every)
    core.run([Request("a", [1, 2, 3], max_tokens=4)])
    assert [step for step, _ in core.metrics.reports] == expected


def test_a_report_is_measured_against_who_is_next():
    core = engine(ContiguousKVCacheManager(5, 2, max_model_len=4))
    for name in "abc":
        core.scheduler.add(Request(name, [1, 2], max_tokens=2))
    core.step()
    assert core.report() == MemoryReport(live=4, reserved=2, internal=2, external=2)
    core.scheduler.abort(core.scheduler.waiting[0])
    assert core.report() == MemoryReport(live=4, reserved=2, internal=2, free=2)


class CopyingManager(MinimalManager):
    """Wants one copy after each call that allocates, and one in a step that allocates nothing."""

    pending = ()

    def allocate_slots(self, request, num_new_tokens):
        table = super().allocate_slots(request, num_new_tokens)
        if table is None or len(table) > 4:
            self.pending = [BlockCopy(0, 1, 1)]
            return None
        self.pending = [BlockCopy(table[-1], table[-1], 1)]
        return table

    def copies(self):
        pending, self.pending = self.pending, []
        return pending


class WritesDown:
    """A runner that only notes what it got."""

    def __init__(self):
        self.runs = []

    def run(self, scheduled, copies):
        self.runs.append(([(r.request_id, n) for r, n in scheduled], copies))
        return [1] * len(scheduled)


def test_copies_are_drained_after_scheduling_in_each_step_even_an_empty_one():
    manager, runner = CopyingManager(8, 1), WritesDown()
    core = EngineCore(Scheduler(manager), runner, FakeClock())
    core.scheduler.add(Request("a", [1, 2, 3], max_tokens=6))
    for _ in range(3):
        core.step()
    last = [7, 5, 3, 1, 6, 4, 2, 0]  # the order in which the minimal class hands out its blocks
    assert [run[0] for run in runner.runs] == [[("a", 3)], [("a", 1)], []]
    assert runner.runs[0][1] == [BlockCopy(last[2], last[2], 1)]
    assert runner.runs[1][1] == [BlockCopy(last[3], last[3], 1)]
    assert runner.runs[2][1] == [BlockCopy(0, 1, 1)]


def test_check_is_not_the_loops_business_but_finds_what_the_loop_was_given():
    """A class that frees nothing: the loop serves it, check() says what is wrong."""

    class Leaky(ContiguousKVCacheManager):
        def free(self, request):
            self.drop_table(request)

    core = engine(Leaky(4, 1, max_model_len=4))
    core.run([Request("a", [1, 2], max_tokens=2)])
    with pytest.raises(InvariantBroken, match="0 blocks in use and 0 free do not add up to 4"):
        core.manager.check()


@pytest.mark.parametrize("check_every_step", [False, True])
def test_check_every_step_is_before_the_runner_and_after_the_update(check_every_step):
    """Before: bad books must not be read or written through. After: who has left is counted."""
    events = []

    class Noted(MinimalManager):
        def check(self):
            events.append("check")

        def free(self, request):
            events.append("free")
            super().free(request)

    manager, runner = Noted(8, 1), WritesDown()
    runner.run = lambda scheduled, copies: events.append("run") or [1] * len(scheduled)
    core = EngineCore(Scheduler(manager), runner, FakeClock(), check_every_step=check_every_step)
    core.scheduler.add(Request("a", [1, 2], max_tokens=1))
    core.step()
    assert events == (["check", "run", "free", "check"] if check_every_step else ["run", "free"])
