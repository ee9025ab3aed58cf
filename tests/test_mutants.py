"""The fuzz and the unit tests, tested by faults: see mutants.py.

Whatever is generated and stands in neither table must be killed by the random traces of
test_fuzz.py, at most 2,000 of them. A sample in `make test`, all in `make test-long`.
"""

import ast

import mutants
import pytest
import test_fuzz
from mutants import (
    MAX_TRACES,
    PLANTED,
    TARGETS,
    UNIT_TESTS,
    Mutant,
    Planted,
    fails,
    fuzz,
    planted,
)

EVERY = mutants.mutants()
SAMPLE_STEP = 5  # every fifth generated mutant in `make test`; the planted ones all


def table(text):
    """{id: heading}: a heading, and under it the ids that it holds for, four columns in."""
    found, heading = {}, None
    for line in filter(None, text.splitlines()):
        if line.startswith("    "):
            assert line.strip() not in found, f"{line.strip()!r} stands twice"
            found[line.strip()] = heading
        else:
            heading = line
    return found


# Alive after the fuzz, which reads content and counts: these change an order, an error, or what
# only a manager of later chapters would show. The test that is named kills them.
BY_TEST = table("""
test_static.test_who_ended_and_waits_for_the_others_has_ended_after_a_recovery_too
    StaticScheduler.recover: without for row in self.rows:
    StaticScheduler.recover: without self._mark(row.request, row.ended, se...
test_prefix.test_a_fork_that_cannot_be_is_refused_in_words
    PagedKVCacheManager.fork: without if of_parent is None:
    PagedKVCacheManager.fork: without if child.request_id in self.tables:
    PagedKVCacheManager.fork: without if child.num_computed_tokens > parent...
    PagedKVCacheManager.fork: without return False
    PagedKVCacheManager.fork: without raise ValueError(f'request {child.req...
    PagedKVCacheManager.fork: without raise ValueError(f'request {child.req... #2
    PagedKVCacheManager.fork: return False: False => True
test_prefix.test_every_copy_and_every_tail_is_forgotten_with_its_block
    PagedKVCacheManager.free: self._origins: negated
    PagedKVCacheManager.free: self._forked_tails: negated
    PagedKVCacheManager.free: without self._forked_tails -= unheld
    PagedKVCacheManager._make_own: without self._forked_tails.discard(tail.block...
test_prefix.test_the_first_writer_copies_a_shared_tail_and_the_last_writes_in_place
    PagedKVCacheManager.allocate_slots: tail.ref_cnt > 1: > => >=
    PagedKVCacheManager.allocate_slots: tail.ref_cnt > 1: 1 => 0
    PagedKVCacheManager.fork: child.num_computed_tokens > parent.nu...: > => >=
test_prefix.test_a_copy_for_somebody_who_left_is_not_made
    PagedKVCacheManager.free: without if self._origins or self._forked_tails:
    PagedKVCacheManager.free: without for block_id in unheld & self._origin...
    PagedKVCacheManager.free: without del self._origins[block_id]
    planted: a copy into a block that was left
test_prefix.test_a_hash_that_is_blind_to_position_still_gives_right_answers_but_fewer_hits
    planted: a key of its own tokens alone
test_prefix.test_a_prompt_finds_the_full_blocks_of_one_that_began_alike
    planted: freed means forgotten
test_prefix.test_a_published_tail_is_copied_while_shared_and_unpublished_by_its_last_holder
    planted: a published tail is written to
test_prefix.test_a_salt_keeps_tenants_apart_from_the_first_block_on
    planted: no salt
test_prefix.test_an_answer_holds_for_its_request_and_until_an_eviction
    planted: an answer outlives an eviction
    planted: another's answer
test_prefix.test_tails_go_before_heads
    planted: heads go before tails
test_prefix.test_who_lost_its_published_beginning_publishes_its_own
    planted: a publication's number is used again
    planted: a stale parent is believed
test_prefix.test_of_two_that_collide_the_newest_is_found
    planted: another's tokens under the same key stay
test_contiguous.test_more_tokens_than_a_slab_is_an_error_and_changes_nothing
    ContiguousKVCacheManager.allocate_slots: without if num_tokens > self._most_slots or m...
    ContiguousKVCacheManager.allocate_slots: without self._refuse(request, max(num_tokens,...
    ContiguousKVCacheManager.allocate_slots: must_fit_tokens > self._most_slots: > => >=
    ContiguousKVCacheManager._refuse: without limit = f'max_model_len is {self.max_...
    ContiguousKVCacheManager._refuse: without raise ValueError(f'request {request.r...
    ContiguousKVCacheManager._refuse: self._most_slots < self.max_model_len: < => >=
    ContiguousKVCacheManager._refuse: self._most_slots < self.max_model_len: < => <=
test_contiguous.test_the_watermark_counts_what_would_stay_free
    ContiguousKVCacheManager.allocate_slots: without if must_fit_blocks - num_held_blocks ...
    ContiguousKVCacheManager.allocate_slots: without return None
test_core.test_check_every_step_is_before_the_runner_and_after_the_update
    EngineCore.step: without if self.check_every_step:
    EngineCore.step: without if self.check_every_step: #2
    EngineCore.step: self.check_every_step: negated
    EngineCore.step: without manager.check()
    EngineCore.step: without manager.check() #2
test_core.test_check_is_not_the_loops_business_but_finds_what_the_loop_was_given
    EngineCore.step: self.check_every_step: negated #2
test_core.test_step_returns_what_was_scheduled_and_who_ended
    Scheduler._check_progress: without if not self.waiting:
    Scheduler._check_progress: without return
test_interrupts.test_an_entry_without_tokens_is_refused
    Scheduler.schedule: without if num_new_tokens < 1:
    Scheduler.schedule: without raise InvariantBroken(f'{request} run...
    Scheduler.schedule: num_new_tokens < 1: 1 => 0
test_paged.test_a_block_in_the_queue_cannot_be_appended_and_those_before_it_are_in
    FreeKVCacheBlockQueue.append_n: without if block.prev_free_block is not None:
    FreeKVCacheBlockQueue.append_n: without raise ValueError(f'block {block.block...
test_paged.test_a_block_is_taken_when_a_write_crosses_into_it
    planted: new blocks in the wrong order
    planted: last in, first out
test_paged.test_a_hit_is_an_error_where_nothing_is_cached
    PagedKVCacheManager.allocate_slots: without return self._admit_with_hit(request, ...
    PagedKVCacheManager.allocate_slots: without if num_cached_tokens:
test_paged.test_blocks_held_in_advance_are_neither_taken_again_nor_given_back
    PagedKVCacheManager.allocate_slots: max(0, cdiv(num_tokens, self.block_si...: 0 => -1
test_paged.test_freed_blocks_wait_in_line_tail_first
    planted: freed head first
test_paged.test_more_than_there_are_cannot_be_taken_and_nothing_changes
    FreeKVCacheBlockQueue.popleft_n: without if not 0 <= n <= self.num_free_blocks:
    FreeKVCacheBlockQueue.popleft_n: without raise ValueError(f'{n} blocks cannot ...
    FreeKVCacheBlockQueue.popleft_n: 0 <= n <= self.num_free_blocks: 0 => -1
test_paged.test_touch_takes_a_free_block_out_of_the_middle
    BlockPool.touch: without if block.ref_cnt == 0:
    BlockPool.touch: without self.free_block_queue.remove(block)
    BlockPool.touch: block.ref_cnt == 0: 0 => -1
test_paged.test_what_a_running_request_still_needs_counts_the_blocks_it_has
    PagedKVCacheManager.allocate_slots: without if num_tokens <= num_slots and must_f...
    PagedKVCacheManager.allocate_slots: num_tokens <= num_slots: <= => <
    PagedKVCacheManager.allocate_slots: must_fit_tokens <= num_slots: <= => >
    PagedKVCacheManager.allocate_slots: must_fit_tokens <= num_slots: <= => <
    PagedKVCacheManager.allocate_slots: without return table #2
    PagedKVCacheManager.allocate_slots: max(0, cdiv(num_tokens, self.block_si...: 0 => 1
test_paged.test_what_nobody_holds_cannot_be_freed_and_nothing_changes
    BlockPool.free_blocks: without if block.ref_cnt == 0:
    BlockPool.free_blocks: without for each in ordered_blocks[:i]:
    BlockPool.free_blocks: without raise ValueError(f'block {block.block...
    BlockPool.free_blocks: without each.ref_cnt += 1
    BlockPool.free_blocks: block.ref_cnt == 0: 0 => -1
    BlockPool.free_blocks: each.ref_cnt += 1: 1 => 2
    BlockPool.free_blocks: each.ref_cnt += 1: 1 => 0
test_relocation.test_a_running_request_can_be_asked_to_fit_as_well
    ContiguousKVCacheManager.allocate_slots: must_fit_tokens <= num_slots: <= => <
    ContiguousKVCacheManager._place: without return None
test_relocation.test_an_admission_takes
    ContiguousKVCacheManager.num_blocks_for: without if self.reserve == 'double':
    ContiguousKVCacheManager.num_blocks_for: without num_slots = 2 * num_held_slots or req...
    ContiguousKVCacheManager.num_blocks_for: self.reserve == 'double': == => !=
    ContiguousKVCacheManager.num_blocks_for: 1 << (request.max_tokens - 1).bit_len...: 1 => 2
    ContiguousKVCacheManager.num_blocks_for: request.max_tokens - 1: 1 => 2
    ContiguousKVCacheManager.num_blocks_for: request.max_tokens - 1: 1 => 0
test_relocation.test_both_limits_together_count_what_must_fit
    ContiguousKVCacheManager.allocate_slots: without if must_fit_tokens > num_tokens:
    ContiguousKVCacheManager.allocate_slots: without must_fit_blocks = round_up(self.num_b...
test_relocation.test_double_doubles_and_grow_grows
    ContiguousKVCacheManager.num_blocks_for: 2 * num_held_slots: 2 => 3
    ContiguousKVCacheManager.num_blocks_for: 2 * num_held_slots: 2 => 1
    ContiguousKVCacheManager._place: without if must_fit_blocks == num_blocks and ...
    ContiguousKVCacheManager._place: must_fit_blocks == num_blocks: == => !=
test_relocation.test_only_blocks_with_computed_tokens_are_copied
    planted: all that is held is copied
test_relocation.test_the_last_extent_grows_in_place_and_the_first_is_relocated
    ContiguousKVCacheManager._place: without self.num_relocations += 1
    ContiguousKVCacheManager._place: self.num_relocations += 1: 1 => 2
    ContiguousKVCacheManager._place: self.num_relocations += 1: 1 => 0
    ContiguousKVCacheManager.copies: without self.num_moved_blocks += num_blocks
test_relocation.test_what_is_too_long_is_named
    ContiguousKVCacheManager._refuse: without if self._most_slots < self.max_model_...
    ContiguousKVCacheManager._refuse: without limit = f"one request gets {self._mos...
test_relocation.test_what_must_fit_must_fit_in_one_piece
    ContiguousKVCacheManager._place: without if must_fit_blocks > allocator.larges...
    ContiguousKVCacheManager._place: without return None #2
test_scheduler.test_a_hit_is_passed_on_and_only_the_rest_is_computed
    Scheduler._admit: without if request.num_cached_tokens < 0:
    Scheduler._admit: without request.num_cached_tokens = num_cache...
    Scheduler._admit: request.num_computed_tokens == 0: == => !=
    Scheduler._admit: request.num_computed_tokens == 0: 0 => 1
    Scheduler._admit: request.num_computed_tokens == 0: 0 => -1
    Scheduler._admit: request.num_cached_tokens < 0: 0 => -1
test_scheduler.test_a_hit_of_the_second_admission_does_not_count_as_one_of_the_first
    Scheduler._admit: request.num_cached_tokens < 0: < => <=
    Scheduler._admit: request.num_cached_tokens < 0: 0 => 1
test_scheduler.test_a_manager_that_always_says_none_is_reported_and_nothing_is_lost
    Scheduler._check_progress: self.waiting[0]: 0 => -1
test_scheduler.test_a_prompt_longer_than_the_budget_is_computed_in_chunks
    planted: only the newest token
test_scheduler.test_a_waiting_request_is_not_overtaken_when_it_gets_no_room
    planted: who gets no room goes to the tail
test_scheduler.test_a_waiting_request_whose_tokens_are_kept_goes_on_from_them
    Scheduler._admit: without num_cached_tokens = 0
    Scheduler._admit: num_cached_tokens = 0: 0 => 1
    Scheduler._admit: num_cached_tokens = 0: 0 => -1
test_scheduler.test_num_cached_tokens_tells_of_the_first_admission
    Scheduler._check_progress: without if self._num_futile < MAX_FUTILE_PREE...
    Scheduler._check_progress: self._num_futile < MAX_FUTILE_PREEMPT...: < => >=
    Scheduler.schedule: without if not scheduled:
    Scheduler.schedule: without self._check_progress(preempted)
    Scheduler.schedule: without preempted.append(victim)
    Scheduler._check_progress: without if preempted:
    Scheduler._check_progress: without raise OutOfKVMemory(f'request {reques...
    Scheduler._check_progress: not self.waiting: negated
    Scheduler._check_progress: preempted: negated
    Scheduler._check_progress: without return #2
    planted: admits in a step that preempted
test_scheduler.test_running_requests_come_first_then_waiting_ones_in_order
    Scheduler.schedule: i += 1: 1 => 2
    planted: admits the last in line
test_scheduler.test_the_last_running_request_steps_back_to_the_head_of_the_queue
    planted: back to the tail of the queue
    planted: freed after its count is reset
test_scheduler.test_many_preemptions_are_fine_while_tokens_come
    Scheduler._check_progress: without if (request, request.num_tokens) != s...
    Scheduler._check_progress: without self._stuck, self._num_futile = ((req...
    Scheduler._check_progress: (request, request.num_tokens) != self...: != => ==
test_scheduler.test_a_lone_request_that_never_gets_on_is_reported
    Scheduler._check_progress: without self._num_futile += 1
    Scheduler._check_progress: self._num_futile += 1: 1 => 2
    Scheduler._check_progress: self._num_futile += 1: 1 => 0
    Scheduler._check_progress: self._num_futile < MAX_FUTILE_PREEMPT...: < => <=
    Scheduler._check_progress: ((request, request.num_tokens), 0): 0 => 1
    Scheduler._check_progress: ((request, request.num_tokens), 0): 0 => -1
test_interrupts.test_all_who_end_in_one_step_end_though_none_can_be_freed
    Scheduler.update: without self._last_update = now
    planted: errors at the end are swallowed
test_scheduler.test_cache_blocks_comes_after_each_forward_and_before_the_new_token
    Scheduler.update: without cache_blocks(request)
test_scheduler.test_tokens_and_entries_must_be_equally_many
    Scheduler.update: zip(scheduled, tokens, strict=True): True => False
test_static.test_samples_come_before_who_waits_already
    planted: static samples at the tail
test_scheduler.test_a_forked_sample_runs_the_last_prompt_token_itself
    Scheduler._fan_out: without child.first_scheduled_time = parent.f...
    Scheduler._fan_out: parent.num_prompt_tokens - 1: 1 => 2
test_scheduler.test_a_prompt_of_one_token_has_nothing_to_share
    Scheduler._fan_out: child.num_computed_tokens > 0: > => >=
    Scheduler._fan_out: child.num_computed_tokens > 0: 0 => -1
test_scheduler.test_no_more_samples_are_forked_than_may_run
    Scheduler._fan_out: (0, -1): 1 => 2
    Scheduler._fan_out: (0, -1): 1 => 0
test_scheduler.test_a_prompt_of_two_tokens_shares_one
    Scheduler._fan_out: child.num_computed_tokens > 0: 0 => 1
test_scheduler.test_a_late_abort_does_not_hit_the_next_bearer_of_the_name
    Scheduler.finish: without if not self.is_unfinished(request):
    Scheduler.finish: without return []
test_scheduler.test_observers_hear_of_who_waits_and_gets_no_room
    Scheduler._admit: without self._refused(request, num_new_tokens)
test_scheduler.test_who_came_to_an_end_in_a_step_that_was_cut_short_has_ended
    Scheduler.recover: without reason = 'error' if request.error els...
    Scheduler.recover: without self._mark(request, reason, self._las...
test_scheduler.test_only_who_has_to_compute_again_was_preempted_by_a_step_cut_short
    Scheduler.recover: without if was_computed:
    Scheduler.recover: request.num_computed_tokens > 0: > => <=
    Scheduler.recover: request.num_computed_tokens > 0: > => >=
    Scheduler.recover: was_computed: negated
    Scheduler.recover: request.num_computed_tokens > 0: 0 => 1
    Scheduler.recover: request.num_computed_tokens > 0: 0 => -1
test_scheduler.test_abort_of_the_parent_before_the_samples_start_ends_them
    Scheduler._forget: without request.children = []
test_static.test_admitted_are_those_of_the_last_schedule_only
    StaticScheduler.schedule: without self.admitted = []
test_static.test_when_the_longest_is_aborted_the_others_leave_without_another_forward_pass
    StaticScheduler.schedule: without if all((row.ended for row in self.row...
    StaticScheduler.schedule: without return ([], [])
test_static.test_without_room_for_anyone_it_says_so
    StaticScheduler.schedule: without if not self.rows: #2
    StaticScheduler.schedule: without self._check_progress([])
test_static.test_an_observer_hears_once_of_rows_of_one_length_that_get_no_room
    StaticScheduler._form_batch: without if size > most_rows_of.get(num_slots,...
    StaticScheduler._form_batch: without most_rows_of[num_slots] = len(held)
    StaticScheduler._form_batch: without continue #2
    StaticScheduler._form_batch: without self._refused(row, num_slots)
test_static.test_a_batch_costs_its_rows_times_its_longest
    StaticScheduler.update: without request.num_computed_tokens = row.num...
test_static.test_tokens_and_rows_must_be_equally_many
    StaticScheduler.update: zip(scheduled, tokens, strict=True): True => False
test_static.test_who_ends_by_a_stop_string_waits_for_the_batch_and_keeps_its_reason
    StaticScheduler.finish: without if reason not in ('abort', 'error'):
    StaticScheduler.finish: without row.ended = row.ended or reason
    StaticScheduler.finish: without return []
test_static.test_the_manager_is_told_how_a_row_ended
    StaticScheduler._leave: without row.finish_reason = reason
""")

# No caller who keeps to the contract can tell these from the original.
EQUIVALENT = table("""
A function that ends without a return returns None.
    PagedKVCacheManager._forked_tail: without return None
All rows stand at one column and are padded to one length, so any of them tells it.
    StaticScheduler.schedule: self.rows[0]: 0 => -1
Below 0 is as 0: no table has fewer slots, and what is taken now is never less.
    PagedKVCacheManager.allocate_slots: must_fit_tokens=0: 0 => -1
    ContiguousKVCacheManager.allocate_slots: must_fit_tokens=0: 0 => -1
It is part of the contract's signature, but not read: no hit is ever found here.
    ContiguousKVCacheManager.allocate_slots: num_cached_tokens=0: 0 => 1
    ContiguousKVCacheManager.allocate_slots: num_cached_tokens=0: 0 => -1
One block more than all that is free passes the count, but no extent is that long.
    ContiguousKVCacheManager.allocate_slots: keep_free_blocks=0: 0 => -1
One token must fit in any case: num_new_tokens is at least 1.
    PagedKVCacheManager.allocate_slots: must_fit_tokens=0: 0 => 1
    ContiguousKVCacheManager.allocate_slots: must_fit_tokens=0: 0 => 1
Only buddies round, and a buddy's free rounds what it is given as allocate did.
    planted: rounding leaks
The same tokens need the same blocks.
    ContiguousKVCacheManager.allocate_slots: must_fit_tokens > num_tokens: > => >=
Where both are equal, it is given the value that it has.
    Scheduler.schedule: num_new_tokens > budget: > => >=
""")


def ids_of(target, chosen=EVERY):
    return [key for key, mutant in chosen.items() if mutant.target == target]


def sample_of(target):
    generated = [key for key in ids_of(target) if not key.startswith("planted")]
    return [key for key in ids_of(target) if key not in generated] + generated[::SAMPLE_STEP]


def named_test(name):
    return mutants.test_functions([name.partition(".")[0]])[name]


def judge(key, max_traces=MAX_TRACES):
    """What is wrong with the mutant's verdict; None where it is as the tables say."""
    mutant = EVERY[key]
    num_traces, message = fuzz(mutant, max_traces)
    if num_traces is not None:
        in_a_table = key in BY_TEST or key in EQUIVALENT
        return f"{key}: in a table, but the fuzz kills it: {message}" if in_a_table else None
    if key in BY_TEST:
        killed = fails(mutant, named_test(BY_TEST[key]))
        return None if killed else f"{key}: survives {BY_TEST[key]} as well"
    if key not in EQUIVALENT:
        return f"{key}: survives {max_traces} traces, and no table says why"
    for name, test in mutants.test_functions(UNIT_TESTS[TARGETS[mutant.target]]).items():
        if fails(mutant, test):
            return f"{key}: called equivalent, but {name} kills it"
    return None


def report(wrong):
    wrong = [line for line in wrong if line]
    assert not wrong, "\n".join(["", *wrong])


@pytest.mark.parametrize("target", TARGETS)
def test_a_sample_of_the_mutants(target):
    """Those known to survive the fuzz meet little of it here, and those called equivalent none:
    in the long test they have all of it, and the unit tests, to be killed after all."""
    sample = [key for key in sample_of(target) if key not in EQUIVALENT]
    report(judge(key, 20 if key in BY_TEST else MAX_TRACES) for key in sample)


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_every_mutant(target):
    report(judge(key) for key in ids_of(target))


def test_the_tables_name_what_exists():
    """A mutant that is no more has no place in a table; nor has one that stands in both."""
    gone = [key for key in (*BY_TEST, *EQUIVALENT) if key not in EVERY]
    assert not gone and not BY_TEST.keys() & EQUIVALENT.keys()
    assert all(EQUIVALENT.values())
    for name in {*BY_TEST.values()}:
        assert callable(named_test(name))


# -- the generator ------------------------------------------------------------------------------


def mutations_of(source):
    (tree,) = ast.parse(source).body
    return [text for text, _ in mutants._mutations(tree)]


def test_what_is_generated():
    source = '''
def f(self, n=0):
    """A docstring with 1 number stays."""
    if n < 3 and not self.done:
        self.n += 1
    return self.n is None
'''
    assert sorted(mutations_of(source)) == sorted(
        [
            "without if n < 3 and (not self.done):",
            "without self.n += 1",
            "without return self.n is None",
            "n < 3: < => >=",
            "n < 3: < => <=",
            "self.n is None: is => is not",
            "not self.done: negated",
            "n < 3: 3 => 4",
            "n < 3: 3 => 2",
            "self.n += 1: 1 => 2",
            "self.n += 1: 1 => 0",
            "n=0: 0 => 1",
            "n=0: 0 => -1",
        ]
    )


def test_every_mutant_is_another_program():
    """Also: no two of one function are the same by mistake, and every one compiles."""
    for target in TARGETS:
        original = ast.dump(mutants.find(target)[-1])
        dumps = [ast.dump(EVERY[key].tree) for key in ids_of(target)]
        assert original not in dumps
        for key in ids_of(target):
            mutants.build(target, EVERY[key].tree)


def test_a_planted_fault_whose_text_is_gone_is_an_error(monkeypatch):
    monkeypatch.setattr(mutants, "PLANTED", [Planted("x", PLANTED[0].target, "no such text", "")])
    with pytest.raises(LookupError, match="stands 0 times"):
        mutants.mutants()


def test_the_originals_pass_and_come_back():
    before = {target: mutants.find(target)[1].__dict__[target.split(".")[1]] for target in TARGETS}
    assert fuzz(None, 100) == (None, "")
    num_traces, message = fuzz(EVERY["planted: budget not decreased"])
    assert num_traces < 50 and "over the token budget" in message
    with pytest.raises(ZeroDivisionError), planted(EVERY["planted: preempts the first"]):
        raise ZeroDivisionError
    after = {target: mutants.find(target)[1].__dict__[target.split(".")[1]] for target in TARGETS}
    assert after == before


def test_a_loop_without_end_is_ended():
    """Its own, or one of another target that runs in a ring which the mutant has made."""
    (tree,) = ast.parse("def get_new_blocks(self, n):\n    while True:\n        n += 1").body
    num_traces, message = fuzz(Mutant("endless", "BlockPool.get_new_blocks", tree))
    assert num_traces == 1 and "Endless" in message
    (tree,) = ast.parse("def schedule(self):\n    while True:\n        pass").body
    endless = Mutant("endless", "Scheduler.schedule", tree)
    assert "Endless" in fails(endless, lambda: test_fuzz.Trace("minimal", 0).run())
