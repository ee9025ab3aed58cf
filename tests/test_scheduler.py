"""Who computes how many tokens in which step, on schedules small enough to follow by hand."""

import pytest
from managers import MinimalManager, ScriptedManager, refuse_always, refuse_calls
from oracle import engine, reference_of

from minikv.kv_cache.base import OutOfKVMemory
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.request import Request
from minikv.scheduler import MAX_FUTILE_PREEMPTIONS, Scheduler

PLENTY = 64


def prompt(n):
    return [i % 3 for i in range(n)]


def new(name, num_prompt_tokens=3, max_tokens=4, **kwargs):
    return Request(name, prompt(num_prompt_tokens), max_tokens=max_tokens, **kwargs)


def with_samples(name, n, **kwargs):
    """A parent and its n - 1 children."""
    samples = [new(f"{name}{i}", sample_index=i, **kwargs) for i in range(n)]
    samples[0].children = samples[1:]
    return samples


def core_with(*requests, manager=None, **limits):
    core = engine(manager or MinimalManager(PLENTY, 1), **limits)
    for request in requests:
        core.scheduler.add(request)
    return core


def steps_of(core, num_steps=None):
    """The schedule of the next steps (of all, without a number) as "a:3 b:1" strings."""
    first = len(core.runner.steps)
    while core.scheduler.has_unfinished_requests and num_steps != 0:
        core.step()
        core.manager.check()
        num_steps = num_steps and num_steps - 1
    return [" ".join(f"{name}:{n}" for name, n in step) for step in core.runner.steps[first:]]


def names(requests):
    return [request.request_id for request in requests]


# -- order and budget --------------------------------------------------------------------------


def test_a_prompt_is_one_step_and_each_token_after_it_another():
    request = new("a", 3, max_tokens=4)
    assert steps_of(core_with(request)) == ["a:3", "a:1", "a:1", "a:1"]
    assert request.num_tokens == 7 and request.num_computed_tokens == 6  # the last has no KV
    assert request.finish_reason == "length"


def test_running_requests_come_first_then_waiting_ones_in_order():
    core = core_with(new("a", 3), new("b", 4), new("c", 9), new("d", 2), max_num_batched_tokens=8)
    assert steps_of(core, 4) == ["a:3 b:4 c:1", "a:1 b:1 c:6", "a:1 b:1 c:2 d:2", "a:1 b:1 c:1 d:1"]


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks():
    request = new("a", 10, max_tokens=2)
    assert steps_of(core_with(request, max_num_batched_tokens=4)) == ["a:4", "a:4", "a:2", "a:1"]
    assert request.num_output_tokens == 2  # nothing was sampled in the middle of the prompt


def test_a_long_prompt_does_not_stop_those_already_running():
    core = core_with(new("a", 2, max_tokens=9), max_num_batched_tokens=4)
    assert steps_of(core, 1) == ["a:2"]
    core.scheduler.add(new("b", 8))
    assert steps_of(core, 3) == ["a:1 b:3", "a:1 b:3", "a:1 b:2"]


def test_without_budget_the_last_ones_wait_in_their_place():
    core = core_with(*[new(name, 1) for name in "abc"], max_num_batched_tokens=3)
    assert steps_of(core, 1) == ["a:1 b:1 c:1"]
    core.scheduler.max_num_batched_tokens = 2
    assert steps_of(core) == ["a:1 b:1"] * 3 + ["c:1"] * 3


def test_a_waiting_request_is_not_overtaken_when_it_gets_no_room():
    # 6 slots: a takes 3, and b (5) does not fit beside it; c (1) would, but came later.
    core = core_with(
        new("a", 3, max_tokens=2), new("b", 5, max_tokens=1), new("c", 1, max_tokens=1),
        manager=MinimalManager(6, 1),
    )  # fmt: skip
    assert steps_of(core) == ["a:3", "a:1", "b:5 c:1"]


def test_observers_hear_of_who_waits_and_gets_no_room():
    core, heard = core_with(new("a", 4), new("b", 5), manager=MinimalManager(4, 2)), []
    core.scheduler.refusal_observers.append(lambda *refusal: heard.append(refusal))
    core.step()
    assert [(request.request_id, n) for request, n in heard] == [("b", 5)]


def test_at_most_max_num_seqs_run_and_who_is_done_leaves_at_once():
    core = core_with(
        new("a", 3, max_tokens=2), new("b", 3, max_tokens=3), new("c", 3, max_tokens=2),
        max_num_seqs=2,
    )  # fmt: skip
    assert steps_of(core) == ["a:3 b:3", "a:1 b:1", "b:1 c:3", "c:1"]


def test_room_of_a_finished_request_is_free_in_the_next_step():
    core = core_with(new("a", 3, 1), new("b", 3, 1), manager=MinimalManager(3, 1))
    assert steps_of(core) == ["a:3", "b:3"]


def test_admitted_names_those_that_left_the_queue_in_the_last_step():
    core = core_with(new("a"), new("b"), max_num_seqs=1)
    core.scheduler.schedule()
    assert names(core.scheduler.admitted) == ["a"]
    core.scheduler.schedule()
    assert core.scheduler.admitted == []


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "8", None])
def test_limits_are_whole_numbers_from_1(name, value):
    with pytest.raises((TypeError, ValueError), match=name):
        Scheduler(MinimalManager(4, 1), **{name: value})


# -- what the manager is asked -----------------------------------------------------------------


def test_arguments_at_their_defaults_are_not_passed():
    manager = ScriptedManager(MinimalManager(PLENTY, 1))
    steps_of(core_with(new("a", 3, 2), new("b", 5, 2), manager=manager, max_num_batched_tokens=4))
    assert manager.calls == [
        ("allocate", "a", 3, {}),
        ("allocate", "b", 1, {}),
        ("allocate", "a", 1, {}),
        ("allocate", "b", 3, {}),
        ("free", "a", "length", 4),
        ("allocate", "b", 1, {}),
        ("allocate", "b", 1, {}),
        ("free", "b", "length", 6),
    ]


class HitManager(ScriptedManager):
    """Claims that the first two tokens of everyone are cached. Only the schedule is looked at."""

    num_lookups = 0

    def get_num_cached_tokens(self, request):
        self.num_lookups += 1
        return 2

    def allocate_slots(self, request, num_new_tokens, num_cached_tokens=0, **extra):
        table = super().allocate_slots(request, num_new_tokens + num_cached_tokens, **extra)
        if num_cached_tokens:
            self.calls.append(("hit", request.request_id, num_cached_tokens))
        return table


def test_a_hit_is_passed_on_and_only_the_rest_is_computed():
    manager, request = HitManager(MinimalManager(8, 1)), new("a", 5, 3)
    scheduler = Scheduler(manager)
    scheduler.add(request)
    assert scheduler.schedule() == ([(request, 3)], [])
    assert manager.calls == [("allocate", "a", 5, {}), ("hit", "a", 2)]
    assert (request.num_computed_tokens, request.num_cached_tokens) == (2, 2)
    scheduler.update([(request, 3)], [1], 0.0, 0)
    assert scheduler.schedule() == ([(request, 1)], [])
    assert manager.num_lookups == 1  # at admission only


def test_a_hit_and_the_budget_count_together():
    manager, request = HitManager(MinimalManager(16, 1)), new("a", 9)
    scheduler = Scheduler(manager, max_num_batched_tokens=4)
    scheduler.add(request)
    assert scheduler.schedule()[0] == [(request, 4)]  # tokens computed are budgeted, hits are free


def test_num_cached_tokens_tells_of_the_first_admission():
    request = new("a", 5, 3)
    manager = HitManager(MinimalManager(8, 1), refuse_calls(0, 2))
    assert request.num_cached_tokens == -1
    scheduler = Scheduler(manager)
    scheduler.add(request)
    with pytest.raises(OutOfKVMemory):
        scheduler.schedule()  # refused: nothing has changed
    assert (request.num_computed_tokens, request.num_cached_tokens) == (0, -1)
    scheduled, _ = scheduler.schedule()
    scheduler.update(scheduled, [1], 0.0, 0)
    assert request.num_cached_tokens == 2
    assert scheduler.schedule() == ([], [request])
    manager.get_num_cached_tokens = lambda request: 4
    assert scheduler.schedule() == ([(request, 2)], [])
    assert (request.num_computed_tokens, request.num_cached_tokens) == (4, 2)


def test_a_hit_of_the_second_admission_does_not_count_as_one_of_the_first():
    request, manager = new("a", 5, 3), HitManager(MinimalManager(8, 1), refuse_calls(1))
    manager.get_num_cached_tokens = lambda request: 0
    scheduler = Scheduler(manager)
    scheduler.add(request)
    scheduled, _ = scheduler.schedule()
    scheduler.update(scheduled, [1], 0.0, 0)
    assert scheduler.schedule() == ([], [request])
    manager.get_num_cached_tokens = lambda request: 4
    assert scheduler.schedule() == ([(request, 2)], [])
    assert (request.num_computed_tokens, request.num_cached_tokens) == (4, 0)


def test_a_waiting_request_whose_tokens_are_kept_goes_on_from_them():
    manager = HitManager(MinimalManager(16, 1))
    scheduler, request = Scheduler(manager), new("a", 5)
    request.num_computed_tokens = 3  # as after a swap
    scheduler.add(request)
    assert scheduler.schedule()[0] == [(request, 2)]
    assert manager.num_lookups == 0 and request.num_cached_tokens == 0


class CountingManager(MinimalManager):
    def __init__(self):
        super().__init__(PLENTY, 1)
        self.cached = []

    def cache_blocks(self, request):
        assert request.request_id in self.tables
        row = (request.request_id, request.num_computed_tokens, request.num_tokens)
        self.cached.append(row)


def test_cache_blocks_comes_after_each_forward_and_before_the_new_token():
    manager = CountingManager()
    steps_of(core_with(new("a", 5, 2), manager=manager, max_num_batched_tokens=3))
    assert manager.cached == [("a", 3, 5), ("a", 5, 5), ("a", 6, 6)]


def test_blocks_with_bad_content_are_not_cached():
    manager = CountingManager()
    steps_of(core_with(new("a", 3), manager=manager, has_bad_logits=lambda request: True))
    assert manager.cached == []


# -- the end of a request ----------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_and_both_numbers_are_named():
    scheduler = Scheduler(MinimalManager(6, 2))
    scheduler.add(new("fits", 5, max_tokens=8))  # the last token needs no slot
    with pytest.raises(OutOfKVMemory, match=r"'big' may need 13 slots .* at most 12 of the"):
        scheduler.add(new("big", 6, max_tokens=8))
    assert names(scheduler.waiting) == ["fits"]


def test_the_manager_says_what_can_never_fit():
    scheduler = Scheduler(ContiguousKVCacheManager(10, 2, max_model_len=7))
    scheduler.add(new("fits", 4, max_tokens=4))
    with pytest.raises(OutOfKVMemory, match="may need 8 slots"):
        scheduler.add(new("big", 4, max_tokens=5))


def test_a_stop_token_ends_the_output_and_stays_in_it():
    free = new("a", 3, max_tokens=6)
    steps_of(core_with(free))
    stop = free.token_ids[4]  # the second output token
    assert stop != free.token_ids[3]
    request = new("a", 3, max_tokens=6, stop_token_ids=[stop])
    steps_of(core_with(request))
    assert request.token_ids == free.token_ids[:5] and request.finish_reason == "stop"
    # Both at once is a stop: the model had said all it wanted.
    request = new("a", 3, max_tokens=2, stop_token_ids=[stop])
    steps_of(core_with(request))
    assert request.token_ids == free.token_ids[:5] and request.finish_reason == "stop"


def test_a_stop_token_in_the_prompt_ends_nothing():
    output = reference_of(new("a", 3, 4))[3:]
    stop = next(token for token in prompt(3) if token not in output)
    request = new("a", 3, 4, stop_token_ids=[stop])
    steps_of(core_with(request))
    assert request.finish_reason == "length"


@pytest.mark.parametrize("bad_step, num_output_tokens", [(0, 0), (1, 0), (2, 1), (4, 3)])
def test_bad_logits_end_only_their_request(bad_step, num_output_tokens):
    bad, good = new("bad", 4, max_tokens=9), new("good", 4, max_tokens=6)
    core = core_with(
        bad, good, max_num_batched_tokens=6,
        has_bad_logits=lambda request: request is bad and len(core.runner.steps) > bad_step,
    )  # fmt: skip
    core.scheduler.max_num_batched_tokens = 3  # so that step 0 is the middle of a prompt
    for step in range(20):
        if step == 1:
            core.scheduler.max_num_batched_tokens = 6
        if core.scheduler.has_unfinished_requests:
            _, finished = core.step()
            if step == bad_step:
                assert finished == [bad] and "bad" not in core.manager.tables
    assert bad.finish_reason == "error" and "not finite" in bad.error
    assert bad.num_output_tokens == num_output_tokens
    assert good.token_ids == reference_of(good) and good.error is None
    assert core.manager.num_free_blocks == PLENTY


def test_tokens_and_entries_must_be_equally_many():
    scheduler, request = Scheduler(MinimalManager(8, 1)), new("a")
    scheduler.add(request)
    scheduled, _ = scheduler.schedule()
    with pytest.raises(ValueError):
        scheduler.update(scheduled, [], 0.0, 0)


def test_token_runs_name_the_steps_that_gave_a_token():
    a, b = new("a", 2, max_tokens=5), new("b", 5, max_tokens=2)
    core = core_with(a, b, max_num_batched_tokens=4)
    steps_of(core)
    assert a.token_runs == [[0, 4]]
    assert b.token_runs == [[1, 2]]


def test_abort_wherever_a_request_stands():
    core = core_with(*[new(name) for name in "abc"], max_num_seqs=2)
    scheduler, (a, b, c) = core.scheduler, core.scheduler.waiting
    assert scheduler.abort(b, 0.0) == [b]  # before the first step
    steps_of(core, 1)
    assert names(scheduler.running) == ["a", "c"]
    assert scheduler.abort(a, 5.0) == [a] and a.finish_time == 5.0  # running
    assert scheduler.abort(a, 6.0) == [] and a.finish_time == 5.0  # twice
    steps_of(core)
    assert scheduler.abort(c, 9.0) == [] and c.finish_reason == "length"  # done
    assert [r.finish_reason for r in (a, b, c)] == ["abort", "abort", "length"]
    assert core.manager.num_free_blocks == PLENTY and not scheduler.has_unfinished_requests


def test_a_late_abort_does_not_hit_the_next_bearer_of_the_name():
    old, young = new("a", 3, 1), new("a", 3, 4)
    core = core_with(old)
    steps_of(core)
    core.scheduler.add(young)
    steps_of(core, 2)
    assert core.scheduler.abort(old) == []
    assert steps_of(core) == ["a:1", "a:1"] and young.token_ids == reference_of(young)


# -- preemption --------------------------------------------------------------------------------


def test_the_last_running_request_steps_back_to_the_head_of_the_queue():
    # 8 slots. a and b take 6, then 8 with one token each; then there is no ninth.
    a, b, c = new("a", 3, 5), new("b", 3, 4), new("c", 1, 1)
    manager = ScriptedManager(MinimalManager(8, 1))
    core = core_with(a, b, manager=manager)
    assert steps_of(core, 2) == ["a:3 b:3", "a:1 b:1"]
    core.scheduler.add(c)
    tokens = list(b.token_ids)
    core.step()
    assert core.runner.steps[-1] == [("a", 1)]  # c would fit, but nobody overtakes b
    assert names(core.scheduler.waiting) == ["b", "c"]
    assert b.token_ids == tokens and (b.num_computed_tokens, b.num_preemptions) == (0, 1)
    assert core.scheduler.num_preemptions == 1 and a.num_preemptions == 0
    # While freed it still said what it had computed; without a finish_reason, since it goes on.
    assert ("free", "b", None, 4) in manager.calls
    # It needs 5 slots, more than a leaves: it waits for a's end, then computes all at once.
    assert steps_of(core) == ["a:1", "a:1", "b:5 c:1", "b:1"]
    assert b.token_runs == [[0, 1], [5, 6]]
    assert all(r.token_ids == reference_of(r) for r in (a, b, c))


def test_several_step_back_for_one_and_keep_their_order():
    manager = ScriptedManager(MinimalManager(PLENTY, 1), refuse_calls(4, 5))
    core = core_with(*[new(name) for name in "abcd"], manager=manager)
    core.scheduler.add(new("e"))
    core.scheduler.max_num_seqs = 4
    steps_of(core, 1)
    scheduled, preempted = core.scheduler.schedule()
    assert [(r.request_id, n) for r, n in scheduled] == [("a", 1), ("b", 1)]
    assert names(preempted) == ["d", "c"]
    assert names(core.scheduler.waiting) == ["c", "d", "e"]
    assert core.scheduler.admitted == []


def test_a_request_may_step_back_itself_when_it_is_the_last():
    manager = ScriptedManager(MinimalManager(PLENTY, 1), refuse_calls(3))
    core = core_with(new("a"), new("b"), manager=manager)
    assert steps_of(core, 3) == ["a:3 b:3", "a:1", "a:1 b:4"]


def test_a_preempted_request_may_be_recomputed_in_chunks():
    manager = ScriptedManager(MinimalManager(PLENTY, 1), refuse_calls(4))
    request = new("a", 6, 4)
    core = core_with(request, manager=manager, max_num_batched_tokens=3)
    assert steps_of(core) == ["a:3", "a:3", "a:1", "a:1", "", "a:3", "a:3", "a:3"]
    assert request.token_ids == reference_of(request)


def test_a_manager_that_always_says_none_is_reported_and_nothing_is_lost():
    core = core_with(
        new("a"), new("b"), manager=ScriptedManager(MinimalManager(8, 1), refuse_always)
    )
    for _ in range(3):
        with pytest.raises(OutOfKVMemory, match=r"'a' gets no room .* 3 tokens, 8 of 8 blocks"):
            core.step()
        assert names(core.scheduler.waiting) == ["a", "b"] and not core.scheduler.running
    core.manager.refuse = lambda manager, request: False  # it has come to its senses
    waiting = list(core.scheduler.waiting)
    steps_of(core)
    assert all(r.token_ids == reference_of(r) for r in waiting)


def test_a_lone_request_that_never_gets_on_is_reported():
    """fits_ever lies: two tokens have room, a third never."""
    manager = ScriptedManager(
        MinimalManager(8, 1),
        lambda manager, request: len(manager.tables.get(request.request_id, ())) >= 2,
    )
    core = core_with(new("a"), manager=manager, max_num_batched_tokens=2)
    with pytest.raises(OutOfKVMemory, match="'a' gets no room"):
        steps_of(core, 1000)
    assert core.scheduler.num_preemptions == MAX_FUTILE_PREEMPTIONS
    assert names(core.scheduler.waiting) == ["a"] and not manager.tables


def test_many_preemptions_are_fine_while_tokens_come():
    """One fewer in vain than the limit, again for each token."""
    refused = {}

    def refuse(manager, request):
        if request.request_id not in manager.tables:  # admission
            return False
        refused[request.num_tokens] = refused.get(request.num_tokens, 0) + 1
        return refused[request.num_tokens] < MAX_FUTILE_PREEMPTIONS

    request = new("a", 3, max_tokens=5)
    manager = ScriptedManager(MinimalManager(8, 1), refuse)
    core = core_with(request, manager=manager, max_num_batched_tokens=2)
    steps_of(core)
    assert request.token_ids == reference_of(request)
    assert request.num_preemptions == 5 * (MAX_FUTILE_PREEMPTIONS - 1)


# -- samples -----------------------------------------------------------------------------------


def test_the_ids_of_all_samples_are_taken_until_they_end():
    samples = with_samples("a", 3, max_tokens=2)
    core = core_with(samples[0], manager=MinimalManager(60, 2))
    for name in [request.request_id for request in samples]:
        with pytest.raises(ValueError, match=f"{name!r} is taken"):
            core.scheduler.add(new(name))
        twice = new("b")
        twice.children = [new(name)]
        with pytest.raises(ValueError, match=f"{name!r} is taken"):
            core.scheduler.add(twice)
    assert names(core.scheduler.waiting) == ["a0"]
    steps_of(core)
    for request in samples:
        core.scheduler.add(new(request.request_id))


class ForkingManager(MinimalManager):
    """Forks by computing nothing at all: good enough where only the schedule is looked at."""

    forks = ()

    def fork(self, parent, child):
        self.forks = (*self.forks, (parent.request_id, child.request_id, child.num_computed_tokens))
        return MinimalManager.allocate_slots(self, child, 0) is not None


def test_samples_that_share_nothing_queue_at_the_head_in_order():
    samples = with_samples("a", 3, max_tokens=2)
    core = core_with(samples[0], new("b", 3, 1), max_num_seqs=2)
    assert steps_of(core, 1) == ["a0:3 b:3"]
    assert names(core.scheduler.waiting) == ["a1", "a2"]
    core.scheduler.add(new("c", 3, 1))
    assert steps_of(core) == ["a0:1 a1:3", "a1:1 a2:3", "a2:1 c:3"]
    assert [r.token_ids for r in samples] == [reference_of(r) for r in samples]
    assert [r.num_cached_tokens for r in samples] == [0, 0, 0]


def test_samples_wait_for_the_whole_prompt():
    samples = with_samples("a", 2, num_prompt_tokens=5, max_tokens=1)
    core = core_with(samples[0], max_num_batched_tokens=3)
    assert steps_of(core) == ["a0:3", "a0:2", "a1:3", "a1:2"]


def fan_out(num_prompt_tokens, **limits):
    """Three samples whose parent's prompt has just been computed, over a manager that forks."""
    samples = with_samples("a", 3, num_prompt_tokens=num_prompt_tokens, max_tokens=3)
    manager = ForkingManager(PLENTY, 1)
    scheduler = Scheduler(manager, **limits)
    scheduler.add(samples[0])
    scheduled, _ = scheduler.schedule()
    samples[0].first_scheduled_time = 4.0  # as the loop does
    scheduler.update(scheduled, [1], 5.0, 0)
    return scheduler, samples


def test_a_forked_sample_runs_the_last_prompt_token_itself():
    scheduler, samples = fan_out(num_prompt_tokens=4)
    assert sorted(scheduler.manager.forks) == [("a0", "a1", 3), ("a0", "a2", 3)]
    assert [r.num_computed_tokens for r in samples] == [4, 3, 3]
    assert [r.num_cached_tokens for r in samples] == [0, 3, 3]
    assert [r.first_scheduled_time for r in samples] == [4.0, 4.0, 4.0]
    scheduled, _ = scheduler.schedule()
    assert sorted((r.request_id, n) for r, n in scheduled) == [("a0", 1), ("a1", 1), ("a2", 1)]
    assert not samples[0].children


def test_no_more_samples_are_forked_than_may_run():
    scheduler, _ = fan_out(num_prompt_tokens=4, max_num_seqs=2)
    assert len(scheduler.running) == 2 and len(scheduler.waiting) == 1
    (queued,) = scheduler.waiting
    assert (queued.num_computed_tokens, queued.num_cached_tokens) == (0, -1)
    assert queued.first_scheduled_time is None


def test_a_prompt_of_one_token_has_nothing_to_share():
    scheduler, _ = fan_out(num_prompt_tokens=1)
    assert scheduler.manager.forks == ()
    assert names(scheduler.waiting) == ["a1", "a2"]


def test_a_prompt_of_two_tokens_shares_one():
    scheduler, _ = fan_out(num_prompt_tokens=2)
    assert sorted(scheduler.manager.forks) == [("a0", "a1", 1), ("a0", "a2", 1)]


def test_samples_are_made_once_even_if_the_parent_steps_back():
    samples = with_samples("a", 2, max_tokens=3)
    manager = ScriptedManager(MinimalManager(PLENTY, 1), refuse_calls(2, 3))
    core = core_with(samples[0], manager=manager)
    steps_of(core)
    assert [r.token_ids for r in samples] == [reference_of(r) for r in samples]
    assert core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_abort_of_the_parent_before_the_samples_start_ends_them(num_steps):
    samples = with_samples("a", 3, num_prompt_tokens=5)
    core = core_with(samples[0], max_num_batched_tokens=2)
    steps_of(core, num_steps)
    assert core.scheduler.abort(samples[0], 7.0) == samples
    assert [(r.finish_reason, r.finish_time) for r in samples] == [("abort", 7.0)] * 3
    assert not samples[0].children
    assert not core.scheduler.has_unfinished_requests
    assert core.manager.num_free_blocks == PLENTY


def test_an_error_of_the_parent_before_the_samples_start_ends_them():
    samples, other = with_samples("a", 2), new("b")
    core = core_with(
        samples[0], other, has_bad_logits=lambda request: request.request_id == "a0"
    )  # fmt: skip
    _, finished = core.step()
    assert finished == samples
    assert all(r.finish_reason == "error" and "not finite" in r.error for r in samples)
    steps_of(core)
    assert other.token_ids == reference_of(other)


def test_abort_of_the_parent_after_the_samples_started_ends_only_itself():
    samples = with_samples("a", 2)
    core = core_with(samples[0])
    steps_of(core, 1)
    assert core.scheduler.abort(samples[0], 1.0) == samples[:1]
    steps_of(core)
    assert samples[1].token_ids == reference_of(samples[1])


@pytest.mark.parametrize("forks", [False, True])
def test_a_sample_aborted_while_it_waits_for_the_prompt_never_starts(forks):
    samples = with_samples("a", 3, num_prompt_tokens=5, max_tokens=2)
    manager = (ForkingManager if forks else MinimalManager)(PLENTY, 1)
    scheduler = Scheduler(manager, max_num_batched_tokens=3)
    scheduler.add(samples[0])
    assert scheduler.abort(samples[1], 3.0) == [samples[1]]
    step = 0
    while scheduler.has_unfinished_requests:
        scheduled, _ = scheduler.schedule()
        assert samples[1] not in [request for request, _ in scheduled]
        scheduler.update(scheduled, [1] * len(scheduled), 9.0, step)
        step += 1
    assert [r.finish_reason for r in samples] == ["length", "abort", "length"]
    assert samples[1].finish_time == 3.0 and samples[1].num_output_tokens == 0


def test_ending_the_parent_leaves_an_aborted_sample_as_it_ended():
    samples = with_samples("a", 3)
    core = core_with(samples[0], has_bad_logits=lambda request: True)
    core.scheduler.abort(samples[1], 3.0)
    _, finished = core.step()
    assert finished == [samples[0], samples[2]]
    assert samples[1].finish_reason == "abort" and samples[1].error is None


# -- a step that was cut short: what is counted and who ends ------------------------------------


class StumblesOver(MinimalManager):
    """cache_blocks fails for one request, after those before it have got their token."""

    def cache_blocks(self, request):
        if request.request_id == "b":
            raise ZeroDivisionError


@pytest.mark.parametrize("bad, reason", [((), "length"), (("a",), "error")])
def test_who_came_to_an_end_in_a_step_that_was_cut_short_has_ended(bad, reason):
    core = engine(StumblesOver(16, 2), has_bad_logits=lambda request: request.request_id in bad)
    a, b = Request("a", [1, 2], max_tokens=1), Request("b", [1, 2], max_tokens=1)
    core.scheduler.add(a)
    core.scheduler.add(b)
    with pytest.raises(ZeroDivisionError):
        core.step()
    assert (a.finish_reason, b.finish_reason) == (reason, None)
    assert not core.scheduler.is_unfinished(a) and core.scheduler.is_unfinished(b)


def test_only_who_has_to_compute_again_was_preempted_by_a_step_cut_short():
    """One computed token is enough to count; who only waited has lost nothing."""
    core = engine(MinimalManager(16, 2), max_num_seqs=1, max_num_batched_tokens=1)
    a, b = Request("a", [1, 2, 3], max_tokens=1), Request("b", [1, 2], max_tokens=1)
    core.scheduler.add(a)
    core.scheduler.add(b)
    core.step()
    core.runner.cut_short = lambda when: 1 / 0
    with pytest.raises(ZeroDivisionError):
        core.step()
    assert (a.num_preemptions, b.num_preemptions, core.scheduler.num_preemptions) == (1, 0, 1)
