"""Whatever is cut short, by an error or an interrupt at any point: the engine then gives the right
answers, and leaves no block, table or id behind. What ran is computed again."""

import random

import pytest
from cut_short import AtBytecode, AtCall, Cut
from managers import MANAGERS, ByHandManager, MinimalManager
from oracle import VOCAB, engine, reference_of

from minikv.engine import LLM
from minikv.kv_cache.base import InvariantBroken, KVCacheManager
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.kv_cache.extents import FirstFit
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.metrics import summarize
from minikv.model.loader import load
from minikv.request import Request, SamplingParams
from minikv.scheduler import ScheduledRequest, Scheduler
from minikv.static_batching import StaticScheduler

# -- one property: an exception at any point leaves an engine that gives right answers ----------

FILES = ("scheduler.py", "static_batching.py", "core.py", "kv_cache/", "request.py", "metrics.py")
ACCOUNTING = (*(f"minikv/{name}" for name in FILES), "tests/managers.py")
KINDS = {"continuous": Scheduler, "static": StaticScheduler}
TWO = {
    "paged": lambda: PagedKVCacheManager(24, 4),
    "contiguous": lambda: ContiguousKVCacheManager(24, 4, max_model_len=32),
}
PLAIN = tuple(name for name in MANAGERS if "refusing" not in name)


class Service:
    """A few requests (samples, stop tokens, aborts, a NaN) over a tiny pool, from a seed. `serve`
    runs them with the exceptions that `cut` raises, once each; `check` says what is wrong then."""

    def __init__(self, name, seed, scheduler):
        rnd = self.rnd = random.Random(f"{name}:{seed}:{scheduler.__name__}")
        self.manager = MANAGERS[name](rnd)
        self.core = engine(
            self.manager,
            scheduler=scheduler,
            max_num_seqs=rnd.randint(1, 4),
            max_num_batched_tokens=rnd.choice([2, 4, 64]),
            has_bad_logits=lambda request: request.request_id in self.bad,
            report_every=rnd.choice([0, 2]),
        )
        self.to_come, self.everyone, self.aborted, self.num_cut = [], [], [], 0
        while not self.everyone:  # some fit no pool of this size
            for i in range(rnd.randint(2, 5)):
                self._new_request(f"r{i}", rnd.choice([1, 1, 2, 3]))
        some = rnd.choice(self.everyone).request_id
        self.bad = {some} if rnd.random() < 0.2 else set()
        self.abort_at = {rnd.randint(0, 9): rnd.choice(self.everyone) for _ in range(2)}

    def _new_request(self, name, n):
        rnd = self.rnd
        prompt = [rnd.randrange(VOCAB) for _ in range(rnd.randint(1, 9))]
        stop, max_tokens = rnd.sample(range(VOCAB), rnd.choice([0, 0, 1])), rnd.randint(1, 6)
        samples = [
            Request(f"{name}.{i}" if i else name, prompt, max_tokens=max_tokens,
                    stop_token_ids=stop, sample_index=i)
            for i in range(n)
        ]  # fmt: skip
        if self.manager.fits_ever(samples[0]):
            samples[0].children = samples[1:]
            self.to_come.append(samples[0])
            self.everyone += samples

    def attempt(self, action, *args):
        try:
            with self.cutter:
                action(*args)
        except (Cut, KeyboardInterrupt):
            self.num_cut += 1
        self.manager.check()

    def serve(self, cutter, max_steps=400):
        self.cutter = cutter
        core, scheduler, step = self.core, self.core.scheduler, 0
        while self.to_come or scheduler.has_unfinished_requests:
            assert step < max_steps, "no end"
            if self.to_come:
                request = self.to_come.pop(0)
                self.attempt(core.submit, request)
                if request.finish_reason is None and not scheduler.is_unfinished(request):
                    core.submit(request)  # it was cut short before it was in
            if step in self.abort_at:
                request = self.abort_at[step]
                if scheduler.is_unfinished(request):
                    self.aborted.append(request)
                    self.attempt(scheduler.abort, request, core.clock.now())
            if scheduler.has_unfinished_requests:
                self.attempt(core.step)
            step += 1

    def check(self):
        manager, scheduler = self.manager, self.core.scheduler
        assert not manager.tables and not manager.requests, manager.tables
        assert manager.num_free_blocks == manager.num_blocks, "blocks leaked"
        assert not scheduler.requests and not scheduler.running and not scheduler.waiting
        assert list(manager.copies()) == []
        for r in self.everyone:
            want = reference_of(r)
            assert r.finish_reason, f"{r!r} was lost"
            assert r.num_tokens == len(r.token_ids)
            assert r.token_ids == want[: r.num_tokens], f"{r!r}: {r.token_ids}, not {want}"
            if r.finish_reason in ("stop", "length"):
                assert r.token_ids == want, f"{r!r}: {r.token_ids}, not {want}"
                stopped = want[-1] in r.stop_token_ids
                assert r.finish_reason == ("stop" if stopped else "length")
            else:
                reasons = {each.finish_reason for each in self.everyone if each in self.aborted}
                assert r.finish_reason == "error" or reasons
                assert r.finish_reason == "abort" or self.bad
            steps = [i for first, last in r.token_runs for i in range(first, last + 1)]
            assert len(steps) == r.num_output_tokens and steps == sorted(set(steps)), r.token_runs
            assert not steps or steps[-1] < len(self.core.metrics.steps)
            assert (r.first_token_time is None) == (r.num_output_tokens == 0)
        summarize(self.everyone, self.core.metrics)  # every time that it needs is there


def served(name, seed, kind, cut):
    """cut(service): what raises somewhere. Returns (service, that)."""
    service = Service(name, seed, KINDS[kind])
    cutter = cut(service)
    try:
        service.serve(cutter)
        service.check()
    except Exception as error:
        raise AssertionError(f"{name}:{seed}, {kind}, {cut.__doc__}: {error!r}") from error
    return service, cutter


def at_bytecode(at):
    def cut(service):
        return AtBytecode(ACCOUNTING, at)

    cut.__doc__ = f"before bytecode {at}"
    return cut


def at_call(at, error=Cut):
    def cut(service):
        core = service.core
        inner = getattr(service.manager, "inner", service.manager)
        parts = [inner, core.scheduler, core.runner, core.clock, core.metrics, core]
        return AtCall(parts, at, error)

    cut.__doc__ = f"at call {at}"
    return cut


def cut_everywhere(name, seed, kind, points):
    """The points (of bytecode or of calls) are shares of the run, 0 to 1."""
    _, whole = served(name, seed, kind, at_bytecode(-1))
    _, calls = served(name, seed, kind, at_call(-1))
    num_cut = 0
    for share in points:
        for cut in (at_bytecode(int(share * whole.num)), at_call(int(share * calls.num))):
            num_cut += served(name, seed, kind, cut)[0].num_cut
    return num_cut


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PLAIN)
def test_an_exception_at_any_point_leaves_right_answers_and_an_empty_pool(name, kind):
    rnd, num_cut = random.Random(f"{name}:{kind}"), 0
    for seed in range(3):
        num_cut += cut_everywhere(name, seed, kind, [rnd.random() for _ in range(6)])
    assert num_cut >= 30


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PLAIN)
def test_an_exception_at_many_more_points(name, kind):
    rnd = random.Random(f"long:{name}:{kind}")
    for seed in range(100, 140):
        cut_everywhere(name, seed, kind, [rnd.random() for _ in range(40)])


# -- the same with tensors, jobs and streams ----------------------------------------------------

WITH_JOBS = (*ACCOUNTING, "minikv/engine/llm.py", "minikv/engine/desk.py", "minikv/engine/job.py")
LLM_MANAGERS = {
    "paged": lambda: PagedKVCacheManager(10, 4),
    "grow": lambda: ContiguousKVCacheManager(40, 1, max_model_len=40, reserve="grow"),
    "minimal": lambda: MinimalManager(10, 4),
}
THREE = ([1, 2, 3, 4, 5], SamplingParams(max_tokens=4, n=2, ignore_eos=True)), (
    [7, 8], SamplingParams(max_tokens=6, ignore_eos=True)), (
    [9] * 9, SamplingParams(max_tokens=2, ignore_eos=True))  # fmt: skip


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def right(tiny):
    llm = LLM(tiny, num_gpu_blocks_override=64, block_size=4)
    prompts, params = zip(*THREE, strict=True)
    return [
        [sample.token_ids for sample in output.outputs]
        for output in llm.generate(list(prompts), list(params), use_tqdm=False)
    ]


class Session:
    """Adds, steps, aborts, streams and generates on one LLM, each of them perhaps cut short."""

    def __init__(self, tiny, manager, batching, cutter):
        self.llm = LLM(tiny, kv_cache_manager=manager, batching=batching, max_num_seqs=3)
        self.cutter, self.num_cut, self.told = cutter, 0, {}

    def attempt(self, action, *args):
        try:
            with self.cutter:
                return action(*args)
        except (Cut, KeyboardInterrupt):
            self.num_cut += 1
            self.llm.manager.check()

    def step(self):
        for output in self.attempt(self.llm.step) or ():
            self.told[output.request_id] = output

    def run(self):
        """Returns the answers of the three, whatever was cut short."""
        llm = self.llm
        for name, (prompt, params) in zip("abc", THREE, strict=True):
            if self.attempt(llm.add_request, prompt, params, name) is None:  # then it is not in
                assert not llm._desk.is_taken(name)
                llm.add_request(prompt, params, name)
        llm.add_request([3] * 5, SamplingParams(max_tokens=9, n=2), "gone")
        self.step()
        stream = llm.stream([4, 4], SamplingParams(max_tokens=5))
        self.attempt(next, stream, "")
        self.step()
        if self.attempt(llm.abort, "gone") is None:
            llm.abort("gone")
        self.attempt(lambda: llm.generate([[5, 6]], SamplingParams(max_tokens=3), use_tqdm=False))
        self.attempt(lambda: "".join(stream))
        self.step()
        stream.close()
        for _ in range(60):
            if not llm.has_unfinished_requests():
                break
            self.step()
        return [[sample.token_ids for sample in self.told[name].outputs] for name in "abc"]

    def check(self):
        llm = self.llm
        assert not llm.has_unfinished_requests()
        assert not llm.manager.tables and llm.manager.num_free_blocks == llm.manager.num_blocks
        assert not llm.scheduler.requests and not llm._desk.jobs and not llm._desk.held
        for name in ("a", "a.1", "b", "c", "gone", "gone.1"):
            assert not llm._desk.is_taken(name)
        assert all(self.told[name].finished for name in "abc")


def session(tiny, name, batching, cutter, right):
    done = Session(tiny, LLM_MANAGERS[name](), batching, cutter)
    if isinstance(cutter, AtCall):
        llm = done.llm
        cutter.watch([llm.scheduler, llm.manager, llm.core, llm.runner, llm.metrics])
        cutter.watch([llm._desk])  # who is told that step() has returned has its outputs
    what = f"{name}, {batching}, {type(cutter).__name__} {cutter.at}"
    try:
        assert done.run() == right
        done.check()
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error
    return done


def sessions(tiny, right, name, batching, shares):
    num_cut = 0
    for kind in (lambda at: AtBytecode(WITH_JOBS, at), lambda at: AtCall([], at)):
        whole = kind(-1)
        session(tiny, name, batching, whole, right)
        for share in shares:
            num_cut += session(tiny, name, batching, kind(int(share * whole.num)), right).num_cut
    return num_cut


@pytest.mark.parametrize("batching", KINDS)
@pytest.mark.parametrize("name", LLM_MANAGERS)
def test_an_exception_at_any_point_of_a_session(tiny, right, name, batching):
    rnd = random.Random(f"{name}:{batching}")
    assert sessions(tiny, right, name, batching, [rnd.random() for _ in range(5)]) >= 9


@pytest.mark.long
@pytest.mark.parametrize("batching", KINDS)
@pytest.mark.parametrize("name", LLM_MANAGERS)
def test_an_exception_at_many_more_points_of_a_session(tiny, right, name, batching):
    rnd = random.Random(f"long:{name}:{batching}")
    sessions(tiny, right, name, batching, [rnd.random() for _ in range(400)])


# -- the kinds of it, one by one ---------------------------------------------------------------


def grow(num_blocks):
    return ContiguousKVCacheManager(num_blocks, 1, max_model_len=16, reserve="grow")


def three(n=1):
    """n samples each, of three prompts."""
    for name, prompt, max_tokens in (("a", [1, 2, 3], 1), ("b", [2, 2], 3), ("c", [4], 5)):
        samples = [
            Request(f"{name}.{i}" if i else name, prompt, max_tokens=max_tokens, sample_index=i)
            for i in range(n)
        ]
        samples[0].children = samples[1:]
        yield from samples


def failing(monkeypatch, owner, name, at, error=KeyboardInterrupt):
    """Has one call raise: the at-th, from 1."""
    original, calls = getattr(owner, name), []

    def called(*args, **options):
        calls.append(args)
        if len(calls) == at:
            raise error(f"call {at} of {name}")
        return original(*args, **options)

    monkeypatch.setattr(owner, name, called)


def finish(core, requests, *, num_cut=1):
    """To the end, past the exceptions; all is right and nothing left."""
    for request in requests:
        if not any(request in each.children for each in requests):
            core.submit(request)
    errors = []
    for _ in range(100):
        if not core.scheduler.has_unfinished_requests:
            break
        try:
            core.step()
        except (KeyboardInterrupt, RuntimeError) as error:
            errors.append(error)
        core.manager.check()
    assert len(errors) == num_cut
    assert [r.token_ids for r in requests] == [reference_of(r) for r in requests]
    assert not core.manager.tables and core.manager.num_free_blocks == core.manager.num_blocks
    assert not core.scheduler.requests and core.num_ended == len(requests)
    summarize(requests, core.metrics)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", range(1, 9))
def test_a_token_is_there_or_not(monkeypatch, kind, at, error):
    import minikv.scheduler
    import minikv.static_batching

    module = minikv.scheduler if kind == "continuous" else minikv.static_batching
    failing(monkeypatch, module, "emit", at, error)
    finish(engine(PagedKVCacheManager(12, 2), scheduler=KINDS[kind]), list(three()))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["allocate_slots", "free", "cache_blocks", "copies"])
def test_any_call_of_a_manager_may_raise(monkeypatch, kind, method, error):
    if (kind, method) == ("static", "cache_blocks"):
        return  # a batch shares nothing
    for at in range(1, 4):
        core = engine(MinimalManager(40, 1), scheduler=KINDS[kind])
        failing(monkeypatch, core.manager, method, at, error)
        finish(core, list(three(2)))


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_fork_that_fails_doubles_no_sample(monkeypatch, at):
    core = engine(PagedKVCacheManager(40, 2), max_num_seqs=9)
    failing(monkeypatch, core.manager, "fork", at, RuntimeError)
    finish(core, list(three(3)))


def test_who_was_admitted_by_a_schedule_that_failed_has_its_times(monkeypatch):
    core = engine(PagedKVCacheManager(12, 2))
    failing(monkeypatch, core.manager, "allocate_slots", 2, RuntimeError)
    requests = list(three())
    finish(core, requests)
    assert [r.first_scheduled_time for r in requests] == [0.0, 0.0, 0.0]
    assert [r.num_preemptions for r in requests] == [0, 0, 0]  # nothing was lost


@pytest.mark.parametrize("method", ["free", "copies"])
def test_what_had_come_to_its_end_is_ended_and_the_rest_computed_again(monkeypatch, method):
    core, requests = engine(PagedKVCacheManager(12, 2)), list(three())
    a, b, c = requests
    for request in requests:
        core.scheduler.add(request)
    core.manager.fork = lambda *args: False
    failing(monkeypatch, core.manager, method, 1 if method == "free" else 2, RuntimeError)
    if method == "copies":
        core.step()
    with pytest.raises(RuntimeError):
        core.step()
    assert (a.finish_reason, a.finish_time) == ("length", 1.0) and core.num_ended == 1
    assert list(core.scheduler.waiting) == [b, c] and not core.scheduler.running
    assert [r.num_computed_tokens for r in (b, c)] == [0, 0]
    assert [r.num_tokens for r in requests] == [4, 3, 2]
    assert [r.num_preemptions for r in requests] == [0, 1, 1]


def test_all_who_end_in_one_step_end_though_none_can_be_freed():
    core = engine(PagedKVCacheManager(12, 2))
    requests = [Request(name, [1, 2], max_tokens=1) for name in "abc"]
    for request in requests:
        core.scheduler.add(request)

    def free(request):
        raise RuntimeError(f"of {request.request_id}")

    core.manager.free = free
    with pytest.raises(RuntimeError, match="of a"):  # told, and told once
        core.step()
    assert [r.finish_reason for r in requests] == ["length"] * 3 and core.num_ended == 3
    assert [r.finish_time for r in requests] == [1.0] * 3
    assert core.manager.num_free_blocks == 12 and not core.scheduler.has_unfinished_requests


@pytest.mark.parametrize("name", ["paged", "contiguous"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_recovery_may_be_cut_short_too(monkeypatch, kind, name):
    """A second Ctrl-C, at any point of recover()."""
    for at in range(0, 10_000, 29):
        core = engine(TWO[name](), scheduler=KINDS[kind], max_num_seqs=4)
        everyone = []
        for i in range(3):
            pair = [Request(f"{i}.{k}", [i, 2, 3, 4, 5], max_tokens=4) for k in range(2)]
            pair[0].children = pair[1:]
            core.submit(pair[0])
            everyone += pair
        core.step()
        core.step()
        second = AtBytecode(ACCOUNTING, at)

        def recover(recover=core.scheduler.recover, second=second):
            with second:
                recover()

        monkeypatch.setattr(core.scheduler, "recover", recover)
        failing(monkeypatch, core.runner, "run", 1)
        with pytest.raises(KeyboardInterrupt):
            core.step()
        was_cut = second.num > at
        while core.scheduler.has_unfinished_requests:
            core.step()
        core.manager.check()
        assert core.manager.num_free_blocks == core.manager.num_blocks
        assert not core.scheduler.requests
        for request in everyone:
            assert request.token_ids == reference_of(request), at
        if not was_cut:
            break
    assert 1_000 < at < 9_000  # it was cut short in all of it


@pytest.mark.parametrize("kind", KINDS)
def test_bad_logits_are_an_error_though_the_step_is_cut_short(monkeypatch, kind):
    core = engine(PagedKVCacheManager(12, 2), scheduler=KINDS[kind])
    core.runner.has_bad_logits = lambda request: request.request_id == "a"
    a = Request("a", [1, 2], max_tokens=3)
    a.children = [Request("a.1", [1, 2], max_tokens=3)]
    core.scheduler.add(a)
    failing(monkeypatch, core.manager, "free", 1)
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert a.finish_reason == "error" and "not finite" in a.error
    assert not core.scheduler.requests and not core.manager.tables


def test_an_id_that_another_has_by_now_stays_taken():
    scheduler = Scheduler(PagedKVCacheManager(12, 2))
    a = Request("a", [1, 2], max_tokens=3)
    a.children = [Request("a.1", [1, 2], max_tokens=3)]
    scheduler.add(a)
    scheduler.abort(a.children[0])
    scheduler.add(Request("a.1", [3], max_tokens=2))
    scheduler.abort(a)
    with pytest.raises(ValueError, match=r"'a\.1' is taken"):
        scheduler.add(Request("a.1", [3], max_tokens=2))


# -- reset ---------------------------------------------------------------------------------------


class WithWords(MinimalManager):
    """Arguments of its own, and state that no table tells of."""

    def __init__(self, num_blocks, block_size, *words, twice=False):
        super().__init__(num_blocks, block_size)
        self.words, self.given = [*words] * (1 + twice), []

    def allocate_slots(self, request, num_new_tokens):
        self.given.append(request.request_id)
        return super().allocate_slots(request, num_new_tokens)


class OfAnother(KVCacheManager):
    """Its allocator is handed in: making the manager anew does not empty it."""

    def __init__(self, num_blocks, block_size, allocator):
        super().__init__(num_blocks, block_size)
        self.allocator = allocator

    def allocate_slots(self, request, num_new_tokens):
        if request.request_id in self.tables:
            return self.tables[request.request_id]
        start = self.allocator.allocate(request.max_kv_tokens)
        return None if start is None else self.set_table(
            request, range(start, start + request.max_kv_tokens)
        )  # fmt: skip

    def free(self, request):
        table = self.drop_table(request)
        if table:
            self.allocator.free(table.start, len(table))

    def reset(self):
        super().reset()
        self.allocator = FirstFit(self.num_blocks)


@pytest.mark.parametrize(
    "make",
    [
        lambda: WithWords(12, 1, "x", "y", twice=True),
        lambda: ByHandManager(12, 1),
        lambda: OfAnother(12, 1, FirstFit(12)),
        lambda: PagedKVCacheManager(12, 1, max_model_len=9),
        lambda: grow(12),
    ],
    ids=["words", "by hand", "of another", "paged", "grow"],
)
def test_a_manager_made_anew_forgets_all_but_what_it_was_made_with(make):
    manager, request = make(), Request("a", [1, 2], max_tokens=4)
    before = {name: repr(value) for name, value in vars(manager).items()}
    observer = manager.observer = object()
    manager.allocate_slots(request, 2)
    manager.reset()
    assert manager.observer is observer
    del manager.observer
    if not isinstance(manager, PagedKVCacheManager | ContiguousKVCacheManager | OfAnother):
        assert {name: repr(value) for name, value in vars(manager).items()} == before
    assert not manager.tables and not manager.requests and manager.num_free_blocks == 12
    manager.check()
    core = engine(manager)
    a, b = Request("a", [1, 2], max_tokens=4), Request("b", [2], max_tokens=4)
    core.runner.cut_short = lambda when: 1 / 0 if len(core.runner.steps) == 2 else None
    for each in (a, b):
        core.scheduler.add(each)
    core.step()
    with pytest.raises(ZeroDivisionError):
        core.step()
    core.run()
    assert [r.token_ids for r in (a, b)] == [reference_of(r) for r in (a, b)]
    assert manager.num_free_blocks == 12 and not manager.tables


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", ["00", "01"])
def test_a_manager_of_two_engines_is_refused_and_the_first_goes_on(kind, names):
    manager = PagedKVCacheManager(20, 2)
    one, two = (engine(manager, scheduler=KINDS[kind]) for _ in range(2))
    first, second = (Request(name, [1, 2, 3], max_tokens=4) for name in names)
    one.scheduler.add(first)
    two.scheduler.add(second)
    one.step()
    with pytest.raises(InvariantBroken, match="serves another engine, which holds 1 tables"):
        two.step()
    one.run()
    assert first.token_ids == reference_of(first) and manager.num_free_blocks == 20
    two.run()  # its turn
    assert second.token_ids == reference_of(second)


def test_a_request_that_was_not_freed_is_refused():
    manager = PagedKVCacheManager(20, 2)
    a = Request("a", [1, 2], max_tokens=2)
    manager.allocate_slots(a, 2)
    core = engine(manager)
    core.scheduler.add(a)
    with pytest.raises(InvariantBroken, match=r"'a' has computed nothing.*was it not freed"):
        core.step()


# -- what LLM keeps ------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_request_that_was_cut_short_on_its_way_in_is_not_in(tiny, monkeypatch, when, error):
    llm = LLM(tiny, num_gpu_blocks_override=64)
    add = llm.scheduler.add

    def queued(request):
        if when == "after":
            add(request)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(llm.scheduler, "add", queued)
        for attempt in (
            lambda: llm.add_request([1, 2], SamplingParams(n=2), "a"),
            lambda: llm.generate([[1, 2], [3]], SamplingParams(n=2), use_tqdm=False),
            lambda: next(llm.stream([1, 2])),
        ):
            with pytest.raises(error):
                attempt()
            assert not llm.has_unfinished_requests() and not llm.scheduler.requests
            assert llm.step() == []
    assert llm.add_request([1, 2], SamplingParams(n=2), "a") == "a"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("name", ["scheduler.abort", "scheduler.finish", "manager.free"])
def test_an_abort_that_is_cut_short_leaves_no_ghost(tiny, monkeypatch, name, at, error):
    llm = LLM(tiny, num_gpu_blocks_override=64)
    llm.add_request([1, 2, 3], SamplingParams(max_tokens=30, n=2), "a")
    llm.step()
    part, method = name.split(".")
    failing(monkeypatch, getattr(llm, part), method, at, error)
    with pytest.raises(error):
        llm.abort("a")
    for _ in range(3):
        if llm.has_unfinished_requests():
            assert llm.step() == []
    assert not llm.has_unfinished_requests() and not llm.scheduler.requests
    assert llm.manager.num_free_blocks == 64 and not llm.abort("a")


@pytest.mark.parametrize("k", range(1, 7))
def test_a_finished_output_is_told_of_though_a_snapshot_is_cut_short(monkeypatch, k):
    from minikv.engine.job import Job

    llm = LLM("tiny", num_gpu_blocks_override=64)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    ids = [llm.add_request([5 + i] * 3, params) for i in range(2)]
    snapshot, calls, ended = Job.snapshot, [], []

    def interrupted(self, metrics):
        calls.append(self)
        if len(calls) == k:
            raise KeyboardInterrupt
        return snapshot(self, metrics)

    monkeypatch.setattr(Job, "snapshot", interrupted)
    while llm.has_unfinished_requests():
        try:
            ended += [output.request_id for output in llm.step() if output.finished]
        except KeyboardInterrupt:
            continue
    assert sorted(ended) == ids


def test_an_entry_without_tokens_is_refused():
    core = engine(PagedKVCacheManager(12, 2))
    a = Request("a", [1, 2], max_tokens=3)
    core.scheduler.add(a)
    core.step()
    a.num_computed_tokens = a.num_tokens
    with pytest.raises(InvariantBroken, match=r"'a'.* has no token left to compute"):
        core.scheduler.schedule()


def test_the_runner_refuses_an_entry_without_tokens():
    llm = LLM("tiny", num_gpu_blocks_override=8)
    with pytest.raises(InvariantBroken, match="scheduled with 0 new tokens"):
        llm.runner.run([ScheduledRequest(Request("a", [1]), 0)], [])


def test_compact_cut_short_changes_nothing(monkeypatch):
    manager = grow(24)
    a, b = Request("a", [1] * 5, max_tokens=4), Request("b", [1] * 3, max_tokens=4)
    manager.allocate_slots(a, 5)
    manager.allocate_slots(b, 3)
    b.num_computed_tokens = 3
    manager.free(a)

    def interrupted(self, *blocks):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(manager.allocator), "allocate_at", interrupted)
        manager.compact()
    assert manager.tables == {"b": range(5, 8)} and manager.copies() == []
    manager.check()
    assert manager.compact() == 3 and manager.tables == {"b": range(3)}
