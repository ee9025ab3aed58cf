"""Steps that are cut short: the books are made good, and what was computed is told of."""

import sys

import pytest
from managers import MinimalManager
from oracle import engine, reference_of

from minikv.kv_cache.base import InvariantBroken
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.request import Request
from minikv.scheduler import ScheduledRequest, Scheduler
from minikv.static_batching import StaticScheduler


def contiguous(num_blocks, block_size, reserve, fit="first"):
    return ContiguousKVCacheManager(
        num_blocks, block_size, max_model_len=16, reserve=reserve, fit=fit
    )


def test_an_update_cut_short_counts_for_those_before_and_not_for_those_after(monkeypatch):
    import minikv.scheduler

    core = engine(PagedKVCacheManager(12, 2))
    a, b, c = (Request(name, [i, 1, 2], max_tokens=n) for i, (name, n) in enumerate(
        [("a", 1), ("b", 3), ("c", 3)]
    ))  # fmt: skip
    for request in (a, b, c):
        core.scheduler.add(request)
    emit, calls = minikv.scheduler._emit, []

    def interrupted(request, *rest):
        calls.append(request)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return emit(request, *rest)

    monkeypatch.setattr(minikv.scheduler, "_emit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert (a.num_computed_tokens, a.num_tokens) == (3, 4)
    assert (b.num_computed_tokens, b.num_tokens) == (0, 3)
    assert (c.num_computed_tokens, c.num_tokens) == (0, 3)
    core.scheduler.finish(a, a.came_to_its_end, 0.0)  # as LLM does after a step cut short
    core.run()
    assert [r.token_ids for r in (a, b, c)] == [reference_of(r) for r in (a, b, c)]


def test_an_entry_without_tokens_is_refused():
    core = engine(PagedKVCacheManager(12, 2))
    a = Request("a", [1, 2], max_tokens=3)
    core.scheduler.add(a)
    core.step()
    a.num_computed_tokens = a.num_tokens
    with pytest.raises(InvariantBroken, match=r"'a'.* has no token left to compute"):
        core.scheduler.schedule()


def test_the_runner_refuses_an_entry_without_tokens():
    from minikv import LLM

    llm = LLM("tiny", num_gpu_blocks_override=8)
    with pytest.raises(InvariantBroken, match="scheduled with 0 new tokens"):
        llm.runner.run([ScheduledRequest(Request("a", [1]), 0)], [])


@pytest.mark.parametrize("scheduler", [Scheduler, StaticScheduler], ids=["continuous", "static"])
def test_a_manager_of_two_engines_is_refused_and_the_first_goes_on(scheduler):
    manager = PagedKVCacheManager(20, 2)
    one, two = (engine(manager, scheduler=scheduler) for _ in range(2))
    first, second = Request("0", [1, 2, 3], max_tokens=4), Request("0", [4, 4], max_tokens=4)
    one.scheduler.add(first)
    two.scheduler.add(second)
    one.step()
    with pytest.raises(InvariantBroken, match=r"'0' has computed nothing.*another engine"):
        two.step()
    one.run()
    assert first.token_ids == reference_of(first) and manager.num_free_blocks == 20


MANAGERS = {
    "paged": lambda: PagedKVCacheManager(12, 2),
    "grow": lambda: contiguous(24, 1, "grow"),
    "buddy": lambda: contiguous(16, 2, "grow", "buddy"),
}


@pytest.mark.parametrize("name", MANAGERS)
def test_restore_rebuilds_all_from_the_tables(name):
    manager = MANAGERS[name]()
    a, b = Request("a", [1] * 5, max_tokens=4), Request("b", [1] * 3, max_tokens=4)
    assert manager.allocate_slots(a, 5) is not None and manager.allocate_slots(b, 3) is not None
    tables, num_free_blocks = (
        {k: list(t) for k, t in manager.tables.items()},
        (manager.num_free_blocks),
    )
    if name == "paged":
        manager.block_pool.free_block_queue.popleft_n(2)  # and nobody has them
        manager.block_pool.blocks[tables["a"][0]].ref_cnt = 7
    else:
        manager.allocator.allocate(1)
        manager._asked = {"gone": 3}
        manager._origins = {"gone": (0, 1)}
    with pytest.raises(InvariantBroken):
        manager.check()
    manager.restore()
    manager.check()
    assert {k: list(t) for k, t in manager.tables.items()} == tables
    assert manager.num_free_blocks == num_free_blocks
    manager.free(a)
    manager.free(b)
    assert manager.num_free_blocks == manager.num_blocks


def test_a_manager_without_restore_keeps_working():
    core = engine(MinimalManager(12, 2))
    a = Request("a", [1, 2, 3], max_tokens=4)
    core.scheduler.add(a)
    run, core.runner.run = core.runner.run, None  # raises
    with pytest.raises(TypeError):
        core.step()
    core.runner.run = run
    core.run()
    assert a.token_ids == reference_of(a) and core.manager.num_free_blocks == 12


@pytest.mark.parametrize("k", range(1, 7))
def test_a_finished_output_is_told_of_though_a_snapshot_is_cut_short(monkeypatch, k):
    from minikv import LLM, SamplingParams
    from minikv.model.job import Job

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


@pytest.mark.parametrize("name", MANAGERS)
def test_an_interrupt_inside_the_manager_leaks_nothing(name):
    """At each line that the manager runs in a step in which both requests take blocks."""

    def served(k):
        manager, num_lines = MANAGERS[name](), 0
        core = engine(manager)
        requests = [Request("a", [1] * 4, max_tokens=3), Request("b", [2] * 2, max_tokens=3)]
        for request in requests:
            core.scheduler.add(request)

        def traced(frame, event, argument):
            nonlocal num_lines
            if "minikv/kv_cache/" not in frame.f_code.co_filename:
                return None
            num_lines += event == "line"
            if num_lines == k and event == "line":
                raise KeyboardInterrupt
            return traced

        for step in range(20):
            before = sys.gettrace()
            try:
                sys.settrace(traced if step < 2 else before)
                core.step()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            manager.check()
            if not core.scheduler.has_unfinished_requests:
                break
        assert [r.token_ids for r in requests] == [reference_of(r) for r in requests], k
        assert manager.num_free_blocks == manager.num_blocks and not manager.tables, k
        return num_lines

    num_lines = served(0)
    assert num_lines > 30
    for k in range(1, num_lines + 1):
        served(k)


def test_compact_cut_short_changes_nothing(monkeypatch):
    manager = MANAGERS["grow"]()
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
