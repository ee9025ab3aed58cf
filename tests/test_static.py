"""Static batching: what enters and leaves together, what the padding costs, and that it changes no
request's tokens. Random traffic over it: test_fuzz.py."""

import random

import pytest
import torch
from managers import MinimalManager, RestlessManager, ScriptedManager, refuse_always
from oracle import PADDING, engine, records_of, reference_of
from reference import Comparison, greedy

from minikv.engine import LLM
from minikv.kv_cache.base import OutOfKVMemory
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.model.loader import load
from minikv.request import Request, SamplingParams
from minikv.scheduler import NOT_FINITE
from minikv.static_batching import StaticScheduler

PROMPTS, OUTPUTS = (5, 2, 9, 1), (3, 7, 2, 4)


def new(name, num_prompt_tokens=3, max_tokens=4, **kwargs):
    prompt = [i % 4 for i in range(num_prompt_tokens)]
    return Request(name, prompt, max_tokens=max_tokens, **kwargs)


def four():
    return [new(f"r{i}", p, n) for i, (p, n) in enumerate(zip(PROMPTS, OUTPUTS, strict=True))]


def static(*requests, manager=None, **limits):
    limits = {"max_num_batched_tokens": 64} | limits
    core = engine(manager or MinimalManager(80, 2), scheduler=StaticScheduler, **limits)
    for request in requests:
        core.scheduler.add(request)
    return core


def finish(core, max_steps=200):
    """Runs to the end; returns those that ended, step by step."""
    ended = []
    while core.scheduler.has_unfinished_requests:
        assert len(ended) < max_steps, "no end"
        ended.append([r.request_id for r in core.step()[1]])
        core.manager.check()
    return ended


def tokens_forwarded(core):
    return sum(step.num_tokens for step in core.metrics.steps)


# -- the batch ----------------------------------------------------------------------------------


def test_a_batch_costs_its_rows_times_its_longest():
    requests = four()
    core = static(*requests)
    ended = finish(core)
    # 9 columns for the longest prompt; its step samples the first token, 6 more the other six.
    assert core.runner.steps == [[(f"r{i}", 9) for i in range(4)]] + 6 * [
        [(f"r{i}", 1) for i in range(4)]
    ]
    assert tokens_forwarded(core) == len(requests) * (max(PROMPTS) + max(OUTPUTS) - 1) == 60
    assert ended == [[]] * 6 + [["r0", "r1", "r2", "r3"]]
    for request in requests:
        assert request.token_ids == reference_of(request)
        assert request.finish_reason == "length" and request.finish_time == 7.0
        assert request.token_runs == [[0, request.max_tokens - 1]]  # its own, not its row's
        assert request.num_computed_tokens == request.num_tokens - 1


def test_the_next_batch_enters_when_the_last_row_has_ended():
    core = static(new("a", 2, 5), new("b", 2, 2), new("c", 4, 1), max_num_seqs=2)
    assert finish(core) == [[]] * 4 + [["a", "b"], ["c"]]
    assert [[name for name, _ in step] for step in core.runner.steps] == [["a", "b"]] * 5 + [["c"]]


def test_nobody_joins_a_batch():
    core = static(new("a", 2, 6))
    core.step()
    core.scheduler.add(new("b", 2, 2))
    assert finish(core) == [[]] * 4 + [["a"], [], ["b"]]


def test_alone_it_computes_what_continuous_batching_computes():
    core = static(new("a", 5, 4))
    finish(core)
    assert core.runner.steps == [[("a", 5)], [("a", 1)], [("a", 1)], [("a", 1)]]


@pytest.mark.parametrize("budget, chunks", [
    (64, [9]), (36, [9]), (35, [8, 1]), (12, [3, 3, 3]), (5, [1] * 9), (4, [1] * 9),
])  # fmt: skip
def test_the_budget_counts_padding_and_is_shared_by_the_rows(budget, chunks):
    requests = four()
    core = static(*requests, max_num_batched_tokens=budget)
    finish(core)
    assert [step[0][1] for step in core.runner.steps] == chunks + [1] * 6
    assert max(step.num_tokens for step in core.metrics.steps) <= budget
    assert [r.token_ids for r in requests] == [reference_of(r) for r in requests]


def test_a_batch_has_no_more_rows_than_the_budget_has_tokens():
    core = static(*four(), max_num_batched_tokens=3)
    finish(core)
    assert [len(step) for step in core.runner.steps] == [3] * 15 + [1] * 4
    assert [r.num_tokens for r in core.metrics.steps] == [3] * 15 + [1] * 4


def test_as_many_rows_as_there_is_room_for():
    # r0 and r1 need 5 + 7 - 1 = 11 slots each; with r2 in it, three rows would need 15 each.
    core = static(*four(), manager=MinimalManager(22, 1))
    ended = finish(core)
    assert [name for step in ended for name in step] == ["r0", "r1", "r2", "r3"]
    assert len(core.runner.steps[0]) == 2
    assert core.manager.num_free_blocks == 22


def test_what_is_too_long_together_comes_one_after_the_other():
    """Each fits a slab of 12; the longest prompt with the longest answer does not."""
    a, b = new("a", 10, 3), new("b", 2, 10)
    manager = ContiguousKVCacheManager(24, 1, max_model_len=12)
    core = static(a, b, manager=manager)
    finish(core)
    assert [len(step) for step in core.runner.steps] == [1] * 13
    assert a.token_ids == reference_of(a) and b.token_ids == reference_of(b)


def test_without_room_for_anyone_it_says_so():
    core = static(new("a"), manager=ScriptedManager(MinimalManager(30, 2), refuse_always))
    with pytest.raises(OutOfKVMemory, match="'a' gets no room though nothing else runs"):
        core.step()
    assert not core.manager.tables


def test_a_refused_row_leaves_nothing_behind():
    for k in range(4):
        manager = ScriptedManager(MinimalManager(80, 2), lambda m, r, k=k: m.num_allocates == k)
        requests = four()
        core = static(*requests, manager=manager)
        finish(core)
        assert [r.token_ids for r in requests] == [reference_of(r) for r in requests]
        assert manager.num_free_blocks == 80


def test_the_manager_is_told_how_a_row_ended():
    manager = ScriptedManager(MinimalManager(80, 2))
    core = static(new("a", 1, 3), new("b", 4, 1), manager=manager)
    finish(core)
    # Once for the row, with all that it computed; then the request, which holds nothing.
    assert [call for call in manager.calls if call[0] == "free"][::2] == [
        ("free", "a", "length", 6), ("free", "b", "length", 6),
    ]  # fmt: skip


def test_admitted_are_those_of_the_last_schedule_only():
    requests = four()
    core = static(*requests)
    core.step()
    assert core.scheduler.admitted == requests
    core.step()
    assert core.scheduler.admitted == []


def test_an_observer_hears_once_of_rows_of_one_length_that_get_no_room():
    """Two rows of 6 slots fit. Where six of that length did not, five need not be tried."""
    core, heard = static(*(new(f"r{i}") for i in range(6)), manager=MinimalManager(12, 1)), []
    core.scheduler.refusal_observers.append(lambda row, num: heard.append((row.request_id, num)))
    core.step()
    assert heard == [("r2", 6)]


def test_tokens_and_rows_must_be_equally_many():
    core = static(*four())
    scheduled, _ = core.scheduler.schedule()
    with pytest.raises(ValueError, match="zip"):
        core.scheduler.update(scheduled, [1], 0.0, 0)


def test_who_ends_by_a_stop_string_waits_for_the_batch_and_keeps_its_reason():
    a, b = new("a", 3, 4), new("b", 3, 6)
    core = static(a, b)
    core.step()
    assert core.scheduler.finish(a, "stop", 1.0) == [] and a.finish_reason is None
    assert len(core.scheduler.rows) == 2
    assert finish(core) == [[]] * 4 + [["a", "b"]]
    assert (a.finish_reason, a.num_output_tokens) == ("stop", 1)


# -- samples ------------------------------------------------------------------------------------


def test_samples_two_to_n_come_in_the_next_batch():
    a, b = new("a", 4, 3), new("b", 2, 5)
    a.children = [new(f"a.{i}", 4, 3, sample_index=i) for i in (1, 2, 3)]
    children = list(a.children)
    core = static(a, b, new("c", 1, 1))
    core.scheduler.abort(children[1])
    assert finish(core) == [[]] * 4 + [["a", "b", "c"], [], [], ["a.1", "a.3"]]
    assert all(r.token_ids == reference_of(r) for r in (a, b, children[0], children[2]))
    assert children[1].finish_reason == "abort" and children[1].num_output_tokens == 0


def test_samples_come_before_who_waits_already():
    a = new("a", 4, 1)
    a.children = [new(f"a.{i}", 4, 1, sample_index=i) for i in (1, 2)]
    core = static(a, new("b"), new("c"), max_num_seqs=1)
    assert [names for names in finish(core) if names] == [["a"], ["a.1"], ["a.2"], ["b"], ["c"]]


def test_a_batch_that_was_cut_short_goes_on_with_what_is_known():
    """Rows are formed anew around the tokens so far; whoever had ended leaves at once."""
    requests = four()
    core = static(*requests)
    for _ in range(4):
        core.step()
    core.runner.cut_short = lambda when: 1 / 0
    with pytest.raises(ZeroDivisionError):
        core.step()
    assert [r.finish_reason for r in requests] == ["length", None, "length", "length"]
    assert requests[1].num_output_tokens == 4 and not core.manager.tables
    core.runner.cut_short = lambda when: None
    finish(core)
    # Its 2 prompt tokens and 4 of output at once, then one by one.
    assert core.runner.steps[5:] == [[("r1", 6)], [("r1", 1)], [("r1", 1)]]
    assert [r.token_ids for r in requests] == [reference_of(r) for r in requests]


def test_an_abort_before_the_first_token_ends_all_samples():
    a = new("a", 4, 3)
    a.children = [new("a.1", 4, 3, sample_index=1)]
    core = static(a, max_num_batched_tokens=2)
    core.step()
    assert [r.request_id for r in core.scheduler.abort(a)] == ["a", "a.1"]
    assert finish(core) == [] and not core.manager.tables


# -- ends of every kind -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["r0", "r1", "r2", "r3"])
@pytest.mark.parametrize("budget", [64, 12])
def test_an_abort_at_any_step_leaves_at_once_and_changes_nobody_else(name, budget):
    for num_steps in range(10):
        requests = four()
        core = static(*requests, max_num_batched_tokens=budget)
        for _ in range(num_steps):
            if core.scheduler.has_unfinished_requests:
                core.step()
        request = requests[int(name[1])]
        already = request.finish_reason
        ended = core.scheduler.abort(request, core.clock.now())
        assert ended == ([] if already else [request])
        assert name not in core.manager.tables
        finish(core)
        assert not core.manager.tables and core.manager.num_free_blocks == 80
        for each in requests:
            want = reference_of(each)
            assert each.token_ids == want[: each.num_tokens]
            if each is not request:
                assert each.token_ids == want and each.finish_reason == "length"


def test_when_the_longest_is_aborted_the_others_leave_without_another_forward_pass():
    requests = four()
    core = static(*requests)
    for _ in range(5):  # all but r1 have their tokens
        core.step()
    num_tokens = tokens_forwarded(core)
    core.scheduler.abort(requests[1])
    assert finish(core) == [["r0", "r2", "r3"]]
    assert tokens_forwarded(core) == num_tokens


def test_logits_that_are_not_finite_end_their_row_alone():
    for bad_step in range(7):
        requests = four()
        core = static(*requests)
        core.runner.has_bad_logits = lambda request, core=core, bad_step=bad_step: (
            request.request_id == "r1" and len(core.metrics.steps) == bad_step
        )
        finish(core)
        bad, good = requests[1], [requests[0], *requests[2:]]
        assert bad.finish_reason == "error" and bad.error == NOT_FINITE
        assert bad.num_output_tokens == bad_step
        assert all(r.token_ids == reference_of(r) and r.error is None for r in good)
        assert core.manager.num_free_blocks == 80


def test_a_finished_rows_logits_interest_nobody():
    requests = four()
    core = static(*requests)
    core.runner.has_bad_logits = lambda request: (
        request.request_id == "r2" and len(core.metrics.steps) >= 2
    )
    finish(core)
    assert [r.finish_reason for r in requests] == ["length"] * 4


def test_an_error_in_the_middle_of_the_prompt_ends_its_row():
    requests = four()
    core = static(*requests, max_num_batched_tokens=12)
    core.runner.has_bad_logits = lambda request: request.request_id == "r2"
    core.step()
    assert [r.finish_reason for r in requests] == [None, None, "error", None]
    finish(core)
    assert all(r.token_ids == reference_of(r) for r in requests if r.finish_reason == "length")


def test_a_stop_token_ends_the_answer_but_not_the_row():
    full = reference_of(new("a", 4, 12))
    stop = full[6]
    a, b = new("a", 4, 12, stop_token_ids=[stop]), new("b", 2, 9)
    core = static(a, b)
    finish(core)
    assert a.finish_reason == "stop" and a.token_ids == full[: full.index(stop, 4) + 1]
    assert tokens_forwarded(core) == 2 * (4 + 9 - 1)
    assert a.finish_time == b.finish_time


def test_who_ended_and_waits_for_the_others_has_ended_after_a_recovery_too():
    """By a stop string, say: no token tells it, so only its row knows."""
    short, long = new("short", max_tokens=9), new("long", max_tokens=9)
    core = static(short, long)
    core.step()
    assert core.scheduler.finish(short, "stop", 1.0) == [] and short.finish_reason is None
    core.recover()
    assert (short.finish_reason, long.finish_reason) == ("stop", None)
    assert list(core.scheduler.waiting) == [long] and not core.scheduler.rows


def test_a_batch_of_short_answers_ends_before_its_reservation():
    """Slots were held for 12 tokens; all have stopped long before."""
    full = reference_of(new("a", 4, 12))
    a = new("a", 4, 12, stop_token_ids=[full[4]])
    core = static(a, new("b", 4, 2))
    finish(core)
    assert len(core.runner.steps) == 2 and core.manager.num_free_blocks == 80


# -- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [
    lambda: ContiguousKVCacheManager(70, 2, max_model_len=33),
    lambda: MinimalManager(80, 2),
    lambda: MinimalManager(160, 1),
])  # fmt: skip
@pytest.mark.parametrize("budget", [64, 12])
def test_padding_and_finished_rows_report_as_internal(make, budget):
    requests, manager = four(), make()
    core = static(*requests, manager=manager, max_num_batched_tokens=budget)
    held_from_the_start = None
    while True:
        core.step()
        if not core.scheduler.has_unfinished_requests:
            break
        report = core.report()
        size = manager.block_size
        held = sum(len(table) * size for table in manager.tables.values())
        held_from_the_start = held_from_the_start or held
        assert held == held_from_the_start  # as long as the batch runs
        ended = {row.request.request_id: row.ended is not None for row in core.scheduler.rows}
        live = sum(r.num_computed_tokens for r in requests)  # padding is not among them
        still = sum(
            r.max_kv_tokens - r.num_computed_tokens for r in requests if not ended[r.request_id]
        )
        assert report.live == live and report.reserved == still
        assert report.internal == held - live - still
        assert report.total == manager.num_blocks * size
    # By hand, at the last step but one: only r1 is still at work.
    assert report.reserved == 1
    assert report.live == (5 + 2) + (2 + 5) + (9 + 1) + (1 + 3)


def test_a_rows_waste_by_hand():
    """a: 4 tokens of padding, 1 of prompt, 2 of output, in a row of 5 + 4 - 1 = 8 slots."""
    core = static(new("a", 1, 2), new("b", 5, 4), manager=MinimalManager(16, 1))
    reports = []
    while core.scheduler.has_unfinished_requests:
        core.step()
        reports.append(core.report())
    got = [(r.live, r.reserved, r.internal, r.free) for r in reports]
    assert got == [
        (1 + 5, 1 + 3, 6, 0),  # a's 8 slots: 1 live, 1 for its next token, 4 + 2 for nothing
        (2 + 6, 0 + 2, 6, 0),  # a has ended, and its row goes on
        (2 + 7, 0 + 1, 6, 0),
        (0, 0, 0, 16),
    ]


def test_padding_is_written_and_never_read():
    core = static(new("a", 1, 3), new("b", 5, 2))
    core.step()
    row = core.scheduler.rows[0]
    assert row.num_pad_tokens == 4 and records_of(row, 5)[:4] == [PADDING] * 4
    table, pool = core.manager.tables["a"], core.runner.pool
    slots = [pool[table[p // 2] * 2 + p % 2] for p in range(5)]
    assert slots[:4] == [PADDING] * 4 and slots[4] != PADDING


def test_tables_may_move_while_a_batch_is_formed():
    for seed in range(20):
        requests = four()
        finish(static(*requests, manager=RestlessManager(40, 2, random.Random(seed))))
        assert [r.token_ids for r in requests] == [reference_of(r) for r in requests]


# -- on tensors ---------------------------------------------------------------------------------

PROMPT_LENGTHS = (1, 17, 33, 16, 3, 40, 2)
NUM_TOKENS = (9, 12, 3, 10, 17, 1, 7)


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def answers(tiny):
    rnd = random.Random(4)  # no near ties
    prompts = [[rnd.randrange(256) for _ in range(n)] for n in PROMPT_LENGTHS]
    return [greedy(tiny.model, p, n) for p, n in zip(prompts, NUM_TOKENS, strict=True)]


def static_llm(model, **options):
    return LLM(model, batching="static", **({"max_model_len": 128} | options))


@pytest.mark.parametrize("options", [
    {}, {"block_size": 1}, {"max_num_seqs": 1}, {"max_num_seqs": 3},
    {"max_num_batched_tokens": 20}, {"max_num_batched_tokens": 9},
    {"num_gpu_blocks_override": 26},
    {"kv_cache_manager": lambda num_blocks, block_size: MinimalManager(120, 4),
     "max_num_batched_tokens": 50},
], ids=lambda options: "-".join(options) or "defaults")  # fmt: skip
def test_tokens_equal_the_dense_cache(tiny, answers, options):
    llm, comparison = static_llm(tiny, **options), Comparison()
    params = [SamplingParams(max_tokens=len(a.output), ignore_eos=True) for a in answers]
    outputs = llm.generate([a.prompt for a in answers], params, use_tqdm=False)
    for answer, output in zip(answers, outputs, strict=True):
        comparison.check(output.outputs[0].token_ids, answer, f"{options}")
    comparison.close()
    llm.manager.check()
    assert not llm.manager.tables and not llm.has_unfinished_requests()


def test_positions_start_at_0_after_the_padding(tiny, monkeypatch):
    llm, seen = static_llm(tiny), []
    model, forward = llm.model, llm.model.forward
    monkeypatch.setattr(
        model, "forward", lambda *a, **k: seen.append(k["position_ids"]) or forward(*a, **k)
    )
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 3)]
    llm.generate([[5, 6], [1, 2, 3, 4, 5]], params, use_tqdm=False)
    assert [p.tolist()[0] for p in seen] == [
        [0, 0, 0, 0, 1, 0, 1, 2, 3, 4],  # the padding's own positions are of no account
        [2, 5],
        [3, 6],
    ]


def test_rows_are_really_computed(tiny, answers, monkeypatch):
    """What goes through the model is batch x longest, finished rows and padding included."""
    llm, rows = static_llm(tiny), []
    forward = llm.model.forward
    monkeypatch.setattr(
        llm.model,
        "forward",
        lambda *a, **k: rows.append(k["input_ids"].numel()) or forward(*a, **k),
    )
    params = [SamplingParams(max_tokens=len(a.output), ignore_eos=True) for a in answers]
    llm.generate([a.prompt for a in answers], params, use_tqdm=False)
    assert sum(rows) == len(answers) * (max(PROMPT_LENGTHS) + max(NUM_TOKENS) - 1)


def test_sampling_and_its_random_streams_are_those_of_continuous_batching(tiny, answers):
    params = SamplingParams(max_tokens=9, temperature=1.3, top_k=50, n=3, ignore_eos=True)
    prompts = [a.prompt for a in answers[:5]]
    got = [
        [[s.token_ids for s in o.outputs] for o in llm.generate(prompts, params, use_tqdm=False)]
        for llm in (
            static_llm(tiny, seed=5),
            LLM(tiny, max_model_len=128, seed=5),
        )
    ]
    assert got[0] == got[1]


def test_a_stop_string_ends_the_answer_but_not_the_row(tiny):
    llm = static_llm(tiny)
    free = llm.generate(["Hello", "Hi"], SamplingParams(max_tokens=30), use_tqdm=False)
    text = free[0].outputs[0].text
    stop = text[5:8]
    num_steps = len(llm.metrics.steps)
    params = [SamplingParams(max_tokens=30, stop=[stop]), SamplingParams(max_tokens=30)]
    stopped, other = llm.generate(["Hello", "Hi"], params, use_tqdm=False)
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert stopped.outputs[0].finish_reason == "stop"
    assert len(stopped.outputs[0].token_ids) < 30
    assert other.outputs == free[1].outputs
    assert len(llm.metrics.steps) == 2 * num_steps  # the batch ran as long as the other needed
    assert not llm.manager.tables


def test_a_stop_string_in_every_row_closes_the_batch(tiny):
    llm = static_llm(tiny)
    [free] = llm.generate("Hello", SamplingParams(max_tokens=30), use_tqdm=False)
    stop = free.outputs[0].text[3]
    [output] = llm.generate("Hello", SamplingParams(max_tokens=30, stop=[stop]), use_tqdm=False)
    assert output.finished and output.outputs[0].finish_reason == "stop"
    assert not llm.manager.tables and not llm.has_unfinished_requests()


def test_aborts_on_tensors_change_nobody_else(tiny, answers):
    params = [SamplingParams(max_tokens=len(a.output), ignore_eos=True) for a in answers]
    for num_steps in (0, 1, 8):
        llm = static_llm(tiny, max_num_seqs=5)
        ids = [llm.add_request(a.prompt, p) for a, p in zip(answers, params, strict=True)]
        last = {}
        for _ in range(num_steps):
            last |= {o.request_id: o for o in llm.step()}
        llm.abort(ids[4])  # of the first batch the one with the longest answer
        llm.abort(ids[6])  # in line
        while llm.has_unfinished_requests():
            last |= {o.request_id: o for o in llm.step()}
        for i, answer in enumerate(answers):
            if i not in (4, 6):
                assert last[ids[i]].finished
                assert last[ids[i]].outputs[0].token_ids == answer.output
        llm.manager.check()
        assert not llm.manager.tables


def test_the_kernels_are_those_of_the_other_path(tiny):
    """A batch at one column is one group of queries, its padding masked, not a path of its own."""
    llm = static_llm(tiny)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    llm.add_request([1, 2, 3], params)
    llm.add_request([1, 2, 3, 4, 5], params)
    for num_queries in (5, 1):
        llm.step()
        [group] = llm.runner.last_step.groups
        assert (group.num_seqs, group.num_queries) == (2, num_queries)
        assert torch.equal(group.first_visible.flatten(), torch.tensor([2, 0]))


def test_an_unknown_batching_is_refused(tiny):
    with pytest.raises(ValueError, match="batching is 'dynamic'; known: continuous, static"):
        LLM(tiny, batching="dynamic")
    with pytest.raises(ValueError, match="scheduler decides the batching"):
        LLM(tiny, batching="static", scheduler=StaticScheduler)
