"""Random traffic through the loop, over every manager in managers.py, against the oracle.

A failure names its seed and the command that replays it. Accounting is cheap: a trace takes about
a millisecond, so what three hundred of them do not find, thirty thousand may.
"""

import random

import pytest
from managers import MANAGERS, MinimalManager, RestlessManager, ScriptedManager
from oracle import (
    VOCAB,
    FakeClock,
    OracleError,
    OracleRunner,
    engine,
    expect,
    history,
    reference,
    reference_of,
)

from minikv.core import EngineCore
from minikv.kv_cache.base import BlockCopy, OutOfKVMemory
from minikv.request import Request
from minikv.scheduler import ScheduledRequest, Scheduler
from minikv.static_batching import StaticScheduler

# Per manager in `make test`, about 2,400 in all; with the long test LONG_FACTOR times as many.
NUM_TRACES = 1_600 // len(MANAGERS)
NUM_STATIC_TRACES = 800 // len(MANAGERS)  # of static batches
RESERVED_AT_ONCE = ("contiguous-max", "contiguous-pow2", "contiguous-exact")
FORKS = ("restless", "paged-3", "prefix", "prefix-collisions", "radix-2", "radix-4")
MOVES = (
    *FORKS,
    "contiguous-double",
    "contiguous-grow",
    "contiguous-compacting",
    "contiguous-refusing",
)
LONG_FACTOR = 100
NUM_LONG_TRACES = 30_000  # at least, with the long test, where requests share blocks
MAX_STEPS = 5_000  # a trace needs a few hundred: beyond this it hangs


class CutShort(BaseException):
    """As KeyboardInterrupt is, no Exception."""


class Trace:
    """One random run: `Trace(name, seed).run()` raises, or returns what happened as counts."""

    def __init__(self, name, seed, scheduler=Scheduler):
        rnd = self.rnd = random.Random(f"{name}:{seed}")
        self.manager = MANAGERS[name](rnd)
        self.never_preempts = name.startswith(RESERVED_AT_ONCE)
        self.may_run_out = isinstance(self.manager, ScriptedManager)
        self.bad = set()
        self.core = engine(
            self.manager,
            scheduler=scheduler,
            max_num_seqs=rnd.randint(1, 5),
            max_num_batched_tokens=rnd.choice([1, 2, 4, 8, 64]),
            has_bad_logits=lambda request: request.request_id in self.bad,
            report_every=rnd.choice([0, 1, 3]),
        )
        self.scheduler = self.core.scheduler
        self.to_come, self.everyone, self.ended = [], [], []
        self.refused, self.batch = 0, set()
        self.in_use, self.first_starts = 0, {}
        self._watch_refusals()
        common = [rnd.randrange(VOCAB) for _ in range(20)]
        for i in range(rnd.randint(1, 7)):
            self._new_request(f"r{i}", common)

    def _new_request(self, name, common):
        """A prompt that may start as others do, and n - 1 children for n samples of it."""
        rnd, n = self.rnd, self.rnd.choice([1, 1, 1, 2, 3])
        num_prompt_tokens = rnd.randint(1, 14)
        shared = rnd.randint(0, num_prompt_tokens) if rnd.random() < 0.7 else 0
        own = [rnd.randrange(VOCAB) for _ in range(num_prompt_tokens - shared)]
        stop = rnd.sample(range(VOCAB), rnd.choice([0, 0, 1, 2]))
        max_tokens = rnd.randint(1, 8)
        samples = [
            Request(
                name if i == 0 else f"{name}.{i}",
                common[:shared] + own,
                max_tokens=max_tokens,
                stop_token_ids=stop,
                sample_index=i,
            )
            for i in range(n)
        ]
        samples[0].children = samples[1:]
        self.to_come.append(samples[0])
        self.everyone += samples

    def run(self):
        rnd, scheduler = self.rnd, self.scheduler
        p_abort, p_bad = rnd.choice([0, 0, 0.1, 0.3]), rnd.choice([0, 0, 0.02])
        p_arrive = rnd.choice([0.2, 0.6, 1])
        self.p_cut, self.num_cut = rnd.choice([0, 0, 0.05]), 0
        self.core.runner.cut_short = self._cut_short
        for _ in range(MAX_STEPS):
            while self.to_come and rnd.random() < p_arrive:
                self._add(self.to_come.pop(0))
            if self.everyone and rnd.random() < p_abort:
                self._abort(rnd.choice(self.everyone))
            if scheduler.running and rnd.random() < p_bad:
                self.bad.add(rnd.choice(scheduler.running).request_id)
            if scheduler.has_unfinished_requests:
                self._step()
            elif not self.to_come:
                break
        else:
            raise OracleError(f"still not done after {MAX_STEPS} steps")
        self._check_end()
        return {
            "steps": len(self.core.metrics.steps),
            "preemptions": scheduler.num_preemptions,
            "moved": self.core.runner.num_moved["device"],
            "forked": sum(r.num_cached_tokens > 0 for r in self.everyone),
            "refused": self.refused,
            "cut short": self.num_cut,
            **{
                reason: sum(r.finish_reason == reason for r in self.everyone)
                for reason in ("stop", "length", "abort", "error")
            },
        }

    def _watch_refusals(self):
        """None means "not now", and that nothing has changed."""
        manager, allocate_slots = self.manager, self.manager.allocate_slots

        def books():
            tables = {key: list(table) for key, table in manager.tables.items()}
            return tables, set(manager.requests), manager.num_free_blocks

        def watched(request, num_new_tokens, **extra):
            before = books()
            table = allocate_slots(request, num_new_tokens, **extra)
            if table is None:
                expect(books() == before, f"{request!r} was refused, but something has changed")
            return table

        manager.allocate_slots = watched

    def _cut_short(self, when):
        if when == "before the copies":
            for name, _ in self.core.runner.steps[-1]:
                self.first_starts.setdefault(name, self.core.clock.now())
        if when == "at the end":
            self.in_use = self.manager.num_blocks - self.manager.num_free_blocks
        if self.rnd.random() < self.p_cut:
            self.num_cut += 1
            raise CutShort(when)

    def _add(self, request):
        if request.finish_reason is not None:
            return
        fits = self.manager.fits_ever(request)
        try:
            self.scheduler.add(request)
        except OutOfKVMemory:
            expect(not fits, f"{request!r} fits, but was refused")
            self.refused += 1
            samples = [request, *request.children]
            self.everyone = [r for r in self.everyone if r not in samples]
            return
        expect(fits, f"{request!r} can never fit, but was taken")

    def _abort(self, request):
        """At any moment: running, waiting, ended; again; a sample that waits for its prompt."""
        if request in self.to_come or any(request in r.children for r in self.to_come):
            return
        before = request.finish_reason
        ended = self.scheduler.abort(request, self.core.clock.now())
        expect((before is None) == (request in ended), f"abort of {request!r} returned {ended}")
        expect(request.finish_reason == (before or "abort"), f"{request!r}: {before}")
        self.ended += ended
        self.manager.check()

    def _step(self):
        start, num_steps = self.core.clock.now(), len(self.core.metrics.steps)
        try:
            scheduled, finished = self.core.step()
            self._check_books(start, num_steps, scheduled)
        except OutOfKVMemory:
            # Only a manager that says None to a lone request gets here; the caller may try again.
            expect(self.may_run_out, "out of memory with a manager that keeps its word")
            scheduled, finished = [], []
        except CutShort:  # all of it again, but for those who had come to their end
            scheduled, told = [], {id(request) for request in self.ended}
            finished = [r for r in self.everyone if r.finish_reason and id(r) not in told]
            expect(not self.manager.tables and not self.scheduler.running, "not all is forgotten")
        num_tokens = sum(n for _, n in scheduled)
        expect(num_tokens <= self.scheduler.max_num_batched_tokens, "over the token budget")
        expect(len(scheduled) <= self.scheduler.max_num_seqs, "too many requests in a step")
        expect(len(self.scheduler.running) <= self.scheduler.max_num_seqs, "too many run")
        self.ended += finished
        for request in (*self.scheduler.running, *(request for request, _ in scheduled)):
            self.first_starts.setdefault(request.request_id, start)
        self.manager.check()
        slots = self.manager.num_blocks * self.manager.block_size
        for _, report in self.core.metrics.reports[-1:]:
            expect(report.total == slots and min(report) >= 0, f"{report} of {slots} slots")
        if isinstance(self.scheduler, StaticScheduler):
            self._check_batch(scheduled)

    def _check_books(self, start, num_steps, scheduled):
        """One record for each step that was not cut short. An empty one was recorded as well."""
        *_, last = steps = self.core.metrics.steps
        expect(len(steps) == num_steps + 1, f"{len(steps) - num_steps} records of one step")
        expect(last[:2] == (start, self.core.clock.now()), f"{last} began at {start}")
        num_tokens = sum(n for _, n in scheduled)
        expect(last[2:] == (len(scheduled), num_tokens, self.in_use), f"{last}: {scheduled}")

    def _check_batch(self, scheduled):
        """Whoever is scheduled stands in one batch, all rows at one column; nobody joins later."""
        columns = {row.num_computed_tokens for row in self.scheduler.rows}
        expect(len(columns) <= 1, f"rows at columns {columns}")
        expect(len({n for _, n in scheduled}) <= 1, "rows are not computed in step")
        batch, self.batch = self.batch, {row for row, _ in scheduled}
        expect(not scheduled or self.batch <= batch or not self.batch & batch, "a row came later")
        running = [row.request for row in self.scheduler.rows]
        expect(running == self.scheduler.running, "rows and running requests differ")

    def _check_end(self):
        manager = self.manager
        expect(not manager.tables and not manager.requests, f"tables left: {manager.tables}")
        expect(manager.num_free_blocks == manager.num_blocks, "blocks leaked")
        expect(not self.scheduler.waiting and not self.scheduler.running, "requests left")
        scheduler, core = self.scheduler, self.core
        num_preemptions = sum(r.num_preemptions for r in self.everyone)
        expect(num_preemptions == scheduler.num_preemptions, "preemptions are miscounted")
        if self.never_preempts and not self.num_cut:
            expect(not num_preemptions, "all was reserved, yet preempted")
        expect(core.num_ended == len(self.ended), f"num_ended is {core.num_ended}")
        every, steps = core.report_every, core.metrics.steps
        due = list(range(every - 1, len(steps), every)) if every else []
        expect([step for step, _ in core.metrics.reports] == due, f"reports other than {due}")
        names = sorted(r.request_id for r in self.ended)
        expect(names == sorted(r.request_id for r in self.everyone), f"ended: {names}")
        for r in self.everyone:
            want = reference_of(r)
            expect(len(r.token_ids) == r.num_tokens, f"{r!r} has {len(r.token_ids)} tokens")
            if r.finish_reason in ("stop", "length"):
                expect(r.token_ids == want, f"{r!r}: output {r.token_ids}, reference {want}")
                stopped = want[-1] in r.stop_token_ids
                expect(r.finish_reason == ("stop" if stopped else "length"), f"{r!r}")
            else:
                expect(r.finish_reason in ("abort", "error"), f"{r!r} ended: {r.finish_reason}")
                expect(r.token_ids == want[: r.num_tokens], f"{r!r}: not the reference's start")
                expect((r.error is None) == (r.finish_reason == "abort"), f"{r!r}: {r.error}")
                names = {r.request_id, r.request_id.partition(".")[0]}  # its own, or its parent's
                expect(r.error is None or names & self.bad, f"{r!r} ended without bad logits")
            in_steps = [i for first, last in r.token_runs for i in range(first, last + 1)]
            expect(len(in_steps) == r.num_output_tokens, f"{r!r}: tokens in steps {r.token_runs}")
            expect(in_steps == sorted(set(in_steps)), f"{r!r}: steps {r.token_runs} overlap")
            if in_steps:
                times = steps[in_steps[0]].end, steps[in_steps[-1]].end
                expect(r.first_token_time == times[0], f"{r!r}: first token in step {in_steps[0]}")
                if r.finish_reason in ("stop", "length") and not isinstance(
                    scheduler, StaticScheduler
                ):
                    expect(r.finish_time == times[1], f"{r!r}: last token in step {in_steps[-1]}")
            if r.num_cached_tokens <= 0:  # else a sample that has its parent's
                first = self.first_starts.get(r.request_id)
                expect(r.first_scheduled_time == first, f"{r!r}: scheduled first at {first}")


def run_traces(name, seeds, scheduler=Scheduler):
    totals, test = {}, "test_traces" if scheduler is Scheduler else "test_static_traces"
    for seed in seeds:
        try:
            counts = Trace(name, seed, scheduler).run()
        except Exception as error:
            # A new error, since pytest prints only the message of the last one in short.
            raise AssertionError(
                f"{type(error).__name__}: {error}\n"
                f"replay: python -m pytest 'tests/test_fuzz.py::{test}[{name}]' "
                f"--fuzz-seed {seed}"
            ) from error
        add_up(totals, counts)
    return totals


def add_up(totals, counts):
    for key, value in counts.items():
        totals[key] = totals.get(key, 0) + value


def check_what_happened(name, totals):
    """What the traces are for must happen in them."""
    for what in ("stop", "length", "abort", "error", "cut short"):
        assert totals[what] > 0, totals
    assert totals["preemptions"] > 0 or name.startswith(RESERVED_AT_ONCE), totals
    if name in MOVES:
        assert totals["moved"] > 0, totals
    if name in FORKS:
        assert totals["forked"] > 0, totals


@pytest.mark.parametrize("name", MANAGERS)
def test_traces(name, request):
    seed = request.config.getoption("--fuzz-seed")
    if seed is not None:
        print(run_traces(name, [seed]))
        return
    check_what_happened(name, run_traces(name, range(NUM_TRACES)))


@pytest.mark.parametrize("name", MANAGERS)
def test_static_traces(name, request):
    seed = request.config.getoption("--fuzz-seed")
    seeds = range(NUM_STATIC_TRACES) if seed is None else [seed]
    totals = run_traces(name, seeds, StaticScheduler)
    if seed is None:
        for reason in ("stop", "length", "abort", "error"):
            assert totals[reason] > 0, totals
        assert totals["forked"] == 0, totals


def test_there_are_as_many_traces_as_promised():
    """2,000 in `make test` and 100,000 in `make test-long`, however many managers share them."""
    num_traces = len(MANAGERS) * (NUM_TRACES + NUM_STATIC_TRACES)
    assert num_traces >= 2_000 and num_traces * (LONG_FACTOR - 1) >= 100_000


@pytest.mark.long
@pytest.mark.parametrize("scheduler", [Scheduler, StaticScheduler])
@pytest.mark.parametrize("name", MANAGERS)
def test_many_more_traces(name, scheduler):
    num_traces = NUM_TRACES * LONG_FACTOR
    if name in FORKS and scheduler is Scheduler:
        num_traces = max(num_traces, NUM_TRACES + NUM_LONG_TRACES)
    run_traces(name, range(NUM_TRACES, num_traces), scheduler)


# -- who watches the watcher: the oracle sees what it is there to see --------------------------


def outputs_over(manager, *, strict=True):
    """The outputs of two requests over the manager, and those of the reference."""
    prompts = [(1, 2, 3, 4, 0, 1), (2, 0, 1, 3, 3)]
    requests = [Request(f"r{i}", prompt, max_tokens=6) for i, prompt in enumerate(prompts)]
    runner = OracleRunner(manager, strict=strict)
    EngineCore(Scheduler(manager), runner, FakeClock()).run(requests)
    return [r.token_ids for r in requests], [reference(prompt, 6) for prompt in prompts]


class CopiesLost(RestlessManager):
    def copies(self):
        super().copies()
        return []


class BlockTooFew(MinimalManager):
    def allocate_slots(self, request, num_new_tokens):
        table = super().allocate_slots(request, num_new_tokens)
        self.free_ids.append(table.pop())
        return table


class HandsOutTwice(MinimalManager):
    def allocate_slots(self, request, num_new_tokens):
        before = list(self.free_ids)
        table = super().allocate_slots(request, num_new_tokens)
        self.free_ids = before
        return table


class OutsideThePool(MinimalManager):
    def allocate_slots(self, request, num_new_tokens):
        return [b + self.num_blocks for b in super().allocate_slots(request, num_new_tokens)]

    def set_table(self, request, block_ids):
        return super().set_table(request, [b + self.num_blocks for b in block_ids])


class TablesReordered(MinimalManager):
    """Right blocks, wrong order: no count can see it."""

    def set_table(self, request, block_ids):
        return super().set_table(request, block_ids[::-1])


def test_a_correct_manager_passes_strict_or_not():
    for strict in (True, False):
        got, want = outputs_over(RestlessManager(16, 2, random.Random(0)), strict=strict)
        assert got == want


@pytest.mark.parametrize(
    "manager, message",
    [
        (CopiesLost(16, 2, random.Random(0)), "wrong content"),
        (BlockTooFew(16, 2), "needs position"),
        (HandsOutTwice(16, 2), "written twice|shared"),
        (OutsideThePool(16, 2), "of 0 to 15"),
        (TablesReordered(16, 2), "wrong content"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_the_oracle_sees_a_manager_that_is_wrong(manager, message):
    with pytest.raises(OracleError, match=message):
        outputs_over(manager)


@pytest.mark.parametrize("cls", [CopiesLost, TablesReordered])
def test_a_wrong_read_changes_the_output(cls):
    manager = cls(16, 2, random.Random(0)) if cls is CopiesLost else cls(16, 2)
    got, want = outputs_over(manager, strict=False)
    assert got != want


class Pool:
    """Just enough of a manager for OracleRunner's copies."""

    num_blocks, block_size, tables = 4, 1, {}


def pool_after(*copies):
    runner = OracleRunner(Pool())
    runner.pool = list("abcd")
    runner.run([], [BlockCopy(*copy) for copy in copies])
    return "".join(runner.pool)


def test_all_sources_are_read_before_any_destination_is_written():
    assert pool_after((0, 1, 1), (1, 0, 1)) == "bacd"
    assert pool_after((0, 1, 3)) == "aabc"
    assert pool_after((1, 0, 3)) == "bcdd"
    assert pool_after((0, 7, 1, "out"), (1, 0, 1)) == "bbcd"


@pytest.mark.parametrize(
    "copies",
    [
        [(0, 2, 1), (1, 2, 1)],
        [(0, 1, 2), (3, 2, 1)],
        [(0, 7, 1, "out"), (1, 7, 1, "out")],
        [(3, 0, 2)],
        [(0, 3, 2)],
        [(0, -1, 1)],
        [(7, 0, 1, "in")],
        [(0, 1, 0)],
        [(0, 1, 1, "host")],
    ],
)
def test_copies_that_break_the_contract_are_seen(copies):
    with pytest.raises(OracleError):
        pool_after(*copies)


def test_swapped_out_blocks_come_back():
    runner = OracleRunner(Pool())
    runner.pool = list("abcd")
    runner.run([], [BlockCopy(0, 5, 2, "out")])
    runner.run([], [BlockCopy(6, 3, 1, "in"), BlockCopy(3, 0, 1)])
    assert "".join(runner.pool) == "dbcb"
    assert runner.num_moved == {"device": 1, "out": 2, "in": 1}


HISTORY_123 = 0xEB86FEFD83F17B29
REFERENCE_123 = [1, 2, 3, 0, 3, 2, 4, 1, 0, 0, 4]


def test_the_oracles_hash_is_the_same_everywhere():
    assert history([1, 2, 3])[-1] == HISTORY_123
    assert reference([1, 2, 3], 8) == REFERENCE_123
    assert reference([1, 2, 3], 8, sample_index=1) != REFERENCE_123
    assert history([1, 2]) != history([2, 1])
    stopped = reference([1, 2, 3], 8, stop_token_ids=REFERENCE_123[5:6])
    assert stopped == REFERENCE_123[: len(stopped)] and stopped[-1] == REFERENCE_123[5]


def test_the_oracle_sees_a_schedule_that_is_wrong():
    manager = MinimalManager(8, 2)
    request = Request("a", [1, 2, 3])
    manager.allocate_slots(request, 3)
    for scheduled, message in [
        ([(request, 0)], "0 tokens"),
        ([(request, 4)], "does not know"),
        ([(request, 1), (request, 1)], "twice"),
        ([(Request("b", [1]), 1)], "without a block table"),
    ]:
        scheduled = [ScheduledRequest(*each) for each in scheduled]
        with pytest.raises(OracleError, match=message):
            OracleRunner(manager).run(scheduled, [])
