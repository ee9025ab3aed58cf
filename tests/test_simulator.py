"""The simulator: how long a step takes by hand, and that everything else is the engine's."""

import gc
import itertools

import pytest
from managers import MinimalManager, RestlessManager

from minikv.engine import LLM
from minikv.kv_cache.base import BlockCopy, OutOfKVMemory
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.model.loader import load
from minikv.request import Request, SamplingParams
from minikv.scheduler import ScheduledRequest, Scheduler
from minikv.simulator import SimulatedRunner, Simulation, StepTime, VirtualClock, num_blocks_on
from minikv.specs import GPU, ModelSpec, find_gpu, find_model
from minikv.static_batching import BATCHING
from minikv.workloads import sharegpt

# Round numbers, so that a step can be reckoned by hand: 2 layers of 4 query and 2 kv heads of 8.
MODEL = ModelSpec("toy", 2, 4, 2, 8, 32, 100, num_parameters=1_000, max_model_len=4_096)
TOY_GPU = GPU("toy GPU", 1, bandwidth=1_000.0, bf16_flops=10_000.0, source="made up")
KV_BYTES = 2 * 2 * 2 * 8 * 2  # K and V, layers, kv heads, head_dim, bytes
PAIR_FLOP = 4 * 2 * 4 * 8  # a product with K and one with V: 2 x 2 FLOP, layers, heads, head_dim
FULL = {"compute_efficiency": 1, "memory_efficiency": 1, "overhead_s": 0}


def toy(**options):
    return StepTime(MODEL, TOY_GPU, **(FULL | options))


def simulation(*, num_blocks=4_000, max_model_len=2_048, step_time=None, scheduler=None, **limits):
    manager = ContiguousKVCacheManager(num_blocks, 16, max_model_len=max_model_len)
    return Simulation((scheduler or Scheduler)(manager, **limits), step_time or toy())


def requests_of(*sizes, arrivals=None):
    return [
        Request(f"r{i}", num_prompt_tokens=p, max_tokens=n, arrival_time=t)
        for i, ((p, n), t) in enumerate(zip(sizes, arrivals or [0.0] * len(sizes), strict=True))
    ]


# -- how long a step takes ----------------------------------------------------------------------


def test_a_decode_step_is_bound_by_memory():
    """Three requests with 10, 20 and 30 tokens in the cache, one more each."""
    step = {"num_seqs": 3, "num_tokens": 3, "num_pairs": 63, "num_kv_tokens": 63}
    memory = (2 * 1_000 + 63 * KV_BYTES) / 1_000.0
    compute = (3 * 2 * 1_000 + 63 * PAIR_FLOP) / 10_000.0
    assert memory > compute
    assert toy().seconds(**step) == pytest.approx(memory)
    assert toy(memory_efficiency=0.5).seconds(**step) == pytest.approx(2 * memory)
    overheads = toy(overhead_s=7.0, overhead_per_request_s=0.25)
    assert overheads.seconds(**step) == pytest.approx(memory + 7.0 + 3 * 0.25)


def test_a_long_prompt_is_bound_by_compute():
    step = {"num_seqs": 1, "num_tokens": 100, "num_pairs": 5_050, "num_kv_tokens": 100}
    compute = (100 * 2 * 1_000 + 5_050 * PAIR_FLOP) / 10_000.0
    assert toy().seconds(**step) == pytest.approx(compute)
    assert toy(compute_efficiency=0.25).seconds(**step) == pytest.approx(4 * compute)


def seconds_of(scheduled, copies=(), block_size=4, **options):
    clock = VirtualClock()
    runner = SimulatedRunner(toy(**options), block_size, clock)
    assert runner.run(scheduled, list(copies)) == [0] * len(scheduled)
    return clock.now(), runner


def at(num_computed_tokens, num_new_tokens):
    request = Request("a", num_prompt_tokens=num_computed_tokens + num_new_tokens)
    request.num_computed_tokens = num_computed_tokens
    return ScheduledRequest(request, num_new_tokens)


def test_a_mixed_step_counts_every_query_with_every_key_it_sees():
    """Decoding at 10 tokens, and a chunk of 3 after 5: its queries see 6, 7 and 8 keys."""
    seconds, _ = seconds_of([at(10, 1), at(5, 3)])
    by_hand = toy().seconds(
        num_seqs=2, num_tokens=4, num_pairs=11 + 6 + 7 + 8, num_kv_tokens=11 + 8
    )
    assert seconds == by_hand


def test_attention_in_chunks_costs_the_same_arithmetic_as_in_one():
    whole = seconds_of([at(0, 60)], memory_efficiency=1)[0]
    chunks = sum(seconds_of([at(start, 20)])[0] for start in (0, 20, 40))
    assert chunks >= whole
    pairs = [n * s + n * (n + 1) // 2 for s, n in ((0, 20), (20, 20), (40, 20))]
    assert sum(pairs) == 60 * 61 // 2


def test_a_copied_block_is_read_and_written():
    bare, _ = seconds_of([at(10, 1)])
    copied, runner = seconds_of([at(10, 1)], [BlockCopy(0, 8, 3), BlockCopy(20, 30, 1)])
    assert copied - bare == pytest.approx(2 * 4 * (4 * KV_BYTES) / 1_000.0)
    assert runner.num_copied_blocks == 4
    assert runner.seconds_in_copies == pytest.approx(copied - bare)
    slower, _ = seconds_of([at(10, 1)], [BlockCopy(0, 8, 4)], memory_efficiency=0.5)
    assert slower == pytest.approx(2 * copied)


def test_a_step_without_tokens_costs_its_copies_only():
    assert seconds_of([], overhead_s=9.0)[0] == 0
    seconds, _ = seconds_of([], [BlockCopy(0, 1, 1)], overhead_s=9.0)
    assert seconds == pytest.approx(2 * 4 * KV_BYTES / 1_000.0)


@pytest.mark.parametrize("options, message", [
    ({"compute_efficiency": 0}, "compute_efficiency is 0, but must be above 0"),
    ({"memory_efficiency": 1.1}, "memory_efficiency is 1.1"),
    ({"memory_efficiency": float("nan")}, "memory_efficiency is nan"),
    ({"overhead_s": -1}, "overhead_s is -1, but must be at least 0"),
    ({"overhead_per_request_s": float("nan")}, "overhead_per_request_s is nan"),
])  # fmt: skip
def test_a_step_time_of_nonsense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        toy(**options)


def test_what_is_assumed_is_said():
    text = toy(overhead_s=0.005, compute_efficiency=0.6).describe()
    for part in ("toy GPU", "made up", "60%", "5 ms", "128 bytes", "assumptions", "Left out"):
        assert part in text


def test_decoding_opt_13b_on_an_a100():
    """17 ms to read 25.7 GB at 1,555 GB/s at full speed, whatever else."""
    step_time = StepTime(find_model("opt-13b"), find_gpu("A100-40G"), **FULL)
    alone = step_time.seconds(num_seqs=1, num_tokens=1, num_pairs=1, num_kv_tokens=1)
    assert alone == pytest.approx(25.706946e9 / 1_555e9, rel=1e-3)


def test_the_pool_of_a_gpu():
    model, gpu = find_model("opt-13b"), find_gpu("A100-40G")
    by_hand = (36_000_000_000 - 25_706_946_560) // (16 * 819_200)
    assert num_blocks_on(gpu, model, 16) == by_hand == 785
    assert num_blocks_on(gpu, model, 1, gpu_memory_utilization=1) > 16 * by_hand
    with pytest.raises(OutOfKVMemory, match=r"OPT-13B weighs 25.7 GB.*L4's 24 GB"):
        num_blocks_on(find_gpu("L4"), model, 16)
    for share in (0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="gpu_memory_utilization is"):
            num_blocks_on(gpu, model, 16, gpu_memory_utilization=share)


# -- the clock ----------------------------------------------------------------------------------


def test_idle_time_costs_nothing():
    """A day between two requests: no step, no time spent, and the clock is there."""
    sim = simulation()
    sim.run(requests_of((10, 3), (10, 3), arrivals=[1.0, 86_400.0]))
    steps = sim.core.metrics.steps
    assert len(steps) == 6 and steps[0].start == 1.0 and steps[3].start == 86_400.0
    summary = sim.summary()
    assert summary["mean_num_seqs"] == 1.0
    assert summary["duration"] == steps[-1].end - 1.0


def test_steps_follow_one_another_without_a_gap_while_there_is_work():
    sim = simulation(max_num_seqs=3)
    sim.run(requests_of(*[(20, 9)] * 8))
    for a, b in itertools.pairwise(sim.core.metrics.steps):
        assert b.start == a.end > a.start


def test_a_request_waits_for_the_step_that_runs_when_it_comes():
    sim = simulation()
    first = requests_of((10, 3), arrivals=[0.0])
    one_step = simulation().run(requests_of((10, 1))).core.metrics.steps[0].end
    late = Request("late", num_prompt_tokens=5, max_tokens=1, arrival_time=one_step / 2)
    sim.run([*first, late])
    assert late.first_scheduled_time == one_step


def test_the_clock_never_goes_back():
    clock = VirtualClock()
    clock.advance_to(3.0)
    clock.advance_to(2.0)
    clock.advance(1.5)
    assert clock.now() == 4.5


# -- traffic ------------------------------------------------------------------------------------


def test_an_hour_of_traffic():
    """7,000 requests and 50,000 steps; every one ends, and the pool is whole again."""
    opt, a100 = find_model("opt-13b"), find_gpu("A100-80G")
    sim = simulation(
        num_blocks=num_blocks_on(a100, opt, 16),
        step_time=StepTime(opt, a100),
        max_num_seqs=256,
        max_num_batched_tokens=2_048,
    )
    requests = sharegpt(rate=2.0).requests(duration_s=3_600, seed=0)
    sim.run(requests)
    assert all(r.finish_reason == "length" for r in requests)
    assert all(r.num_output_tokens == r.max_tokens for r in requests)
    assert sim.core.manager.num_free_blocks == sim.core.manager.num_blocks
    assert sim.core.num_ended == len(requests) == sim.summary()["completed"] > 7_000


def test_a_run_goes_without_the_garbage_collector_and_leaves_nothing_for_it():
    one = simulation(num_blocks=1_000)
    requests = sharegpt(rate=2.0).requests(duration_s=300, seed=0)
    gc.collect()
    seen = set()
    one.run(requests, on_step=lambda core: seen.add(gc.isenabled()))
    num_steps, found = len(one.core.metrics.steps), gc.collect()
    assert seen == {False} and gc.isenabled()
    assert found < 100 < num_steps  # objects

    def stop(core):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one.run(requests_of((8, 8)), on_step=stop)
    assert gc.isenabled()
    gc.disable()
    try:
        simulation().run_closed_loop(requests_of((8, 8)), 1)
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()


def test_the_same_seed_gives_the_same_run():
    runs = [
        simulation().run(sharegpt(rate=0.01).requests(num_requests=50, seed=3)) for _ in range(2)
    ]
    assert runs[0].core.metrics.steps == runs[1].core.metrics.steps
    assert runs[0].summary() == runs[1].summary()


@pytest.mark.parametrize("batching", BATCHING)
def test_a_closed_loop_keeps_so_many_in_flight(batching):
    sim = simulation(max_num_seqs=3, scheduler=BATCHING[batching])
    requests, seen, running = requests_of(*[(10, n % 7 + 1) for n in range(40)]), [], []

    def look(core):
        seen.append(len(core.scheduler.waiting) + len(core.scheduler.running))
        running.append(len(core.scheduler.running))

    sim.run_closed_loop(requests, 5, on_step=look)
    assert [r.finish_reason for r in requests] == ["length"] * 40
    last = next(i for i, n in enumerate(seen) if n < 5)  # from here on no more come
    assert set(seen[:last]) == {5} and max(running) == 3
    assert sim.requests == requests
    assert sorted(r.arrival_time for r in requests) == [r.arrival_time for r in requests]
    ends = {r.finish_time for r in requests} | {0.0}
    assert {r.arrival_time for r in requests} <= ends  # each comes when another ends


def test_a_closed_loop_goes_on_after_a_request_that_never_fits():
    sim = simulation(max_model_len=64)
    sizes = [(10, 5), (100, 5), (100, 5), (10, 5), (60, 60)]
    requests = requests_of(*sizes)
    sim.run_closed_loop(requests, 2)
    assert [r.finish_reason for r in requests] == ["length", "error", "error", "length", "error"]


@pytest.mark.parametrize("num", [0, -1])
def test_a_closed_loop_of_none_is_refused(num):
    with pytest.raises(ValueError, match=f"num_in_flight is {num}, but must be at least 1"):
        simulation().run_closed_loop(requests_of((1, 1)), num)


def test_a_request_that_never_fits_ends_with_an_error_and_the_rest_go_on():
    requests = requests_of((10, 5), (2_000, 500), (20, 3), arrivals=[0.0, 0.5, 1e6])
    requests[1].children = [Request("child", num_prompt_tokens=2_000, max_tokens=500)]
    child = requests[1].children[0]
    sim = simulation()
    sim.run(requests)
    assert [r.finish_reason for r in requests] == ["length", "error", "length"]
    for refused in (requests[1], child):
        assert refused.finish_reason == "error" and "may need 2499 slots" in refused.error
        assert "at most 2048" in refused.error
        assert refused.finish_time >= 0.5 and refused.first_scheduled_time is None
    summary = sim.summary()
    assert (summary["completed"], summary["failed"], summary["num_requests"]) == (2, 1, 3)


def test_arrivals_out_of_order_are_refused():
    with pytest.raises(ValueError, match=r"'r1' arrives at 1.0 s.*'r0' of 2.0 s: sort"):
        simulation().run(requests_of((1, 1), (1, 1), arrivals=[2.0, 1.0]))


def test_nobody_to_serve():
    sim = simulation()
    assert sim.run([]).summary() == {"completed": 0, "failed": 0, "num_requests": 0}


# -- decision for decision the engine ------------------------------------------------------------

ENGINE_MODEL_LEN = 96


class TimedRunner:
    """The engine's runner, on the simulator's clock: a step takes as long as StepTime says."""

    def __init__(self, runner, simulated):
        self.runner, self.simulated, self.steps = runner, simulated, []

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def run(self, scheduled, copies):
        self.steps.append([(request.request_id, n) for request, n in scheduled])
        tokens = self.runner.run(scheduled, copies)
        self.simulated.run(scheduled, copies)
        return tokens


class RecordingRunner(TimedRunner):
    """The simulator's own, written down."""

    def run(self, scheduled, copies):
        self.steps.append([(request.request_id, n) for request, n in scheduled])
        return self.simulated.run(scheduled, copies)


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", dtype="float32", device="cpu")


STREAM = [  # (arrival time in steps of about 1, prompt tokens, output tokens)
    (0.0, 5, 9), (0.0, 40, 3), (0.1, 1, 20), (2.5, 17, 6), (2.6, 33, 1), (9.0, 8, 30),
    (9.0, 50, 25), (60.0, 3, 4), (61.0, 70, 7), (200.0, 16, 16),
]  # fmt: skip


def paged(num_blocks, block_size, max_model_len):
    return MinimalManager(num_blocks, block_size)


def slabs(num_blocks, block_size, max_model_len):
    return ContiguousKVCacheManager(num_blocks, block_size, max_model_len=max_model_len)


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("make, num_blocks, num_seqs, budget", [
    (slabs, 100, 16, 512), (slabs, 100, 2, 24), (slabs, 50, 16, 7),
    (paged, 200, 4, 64), (paged, 26, 16, 30),  # the last preempts, under continuous batching
])  # fmt: skip
def test_the_simulator_schedules_what_the_engine_schedules(
    tiny, batching, make, num_blocks, num_seqs, budget
):
    limits = {"max_num_seqs": num_seqs, "max_num_batched_tokens": budget}
    step_time = StepTime(tiny.spec, GPU("fast", 1, 1e9, 1e9, "made up"), overhead_s=0.7)

    manager = make(num_blocks, 4, ENGINE_MODEL_LEN)
    llm = LLM(tiny, scheduler=BATCHING[batching](manager, **limits), max_model_len=ENGINE_MODEL_LEN)
    clock = VirtualClock()
    llm.core.clock = clock
    llm.core.runner = TimedRunner(llm.runner, SimulatedRunner(step_time, 4, clock))
    stream = [(t, [7] * p, n) for t, p, n in STREAM]
    ended, to_come = {}, list(enumerate(stream))
    while to_come or llm.has_unfinished_requests():
        while to_come and to_come[0][1][0] <= clock.now():
            i, (_, prompt, num_tokens) = to_come.pop(0)
            llm.add_request(prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True), str(i))
        if not llm.has_unfinished_requests():
            clock.advance_to(to_come[0][1][0])
            continue
        for output in llm.step():
            ended[output.request_id] = output.metrics[0]

    sim = Simulation(BATCHING[batching](make(num_blocks, 4, ENGINE_MODEL_LEN), **limits), step_time)
    recorder = sim.core.runner = RecordingRunner(None, sim.runner)
    requests = [
        Request(str(i), num_prompt_tokens=p, max_tokens=n, arrival_time=t)
        for i, (t, p, n) in enumerate(STREAM)
    ]
    sim.run(requests)

    assert recorder.steps == llm.core.runner.steps
    assert sim.core.metrics.steps == llm.metrics.steps  # when, how many, and the pool in use
    for request in requests:
        of, engines = sim.core.metrics.of(request), ended[request.request_id]
        assert (of.first_token_time, of.finish_time, of.itl, of.num_preemptions) == (
            engines.first_token_time, engines.finish_time, engines.itl, engines.num_preemptions,
        )  # fmt: skip
    if make is paged and num_blocks == 26 and batching == "continuous":
        assert sim.core.scheduler.num_preemptions > 0


def test_copies_are_charged_under_core(monkeypatch):
    """A manager that moves blocks all the time: what it copies is what the clock is charged."""
    import random

    manager = RestlessManager(60, 2, random.Random(0))
    sim = Simulation(Scheduler(manager), toy())
    moved, copies = [], manager.copies

    def counted():
        out = copies()
        moved.append(sum(c.num_blocks for c in out))
        return out

    monkeypatch.setattr(manager, "copies", counted)
    sim.run([Request(f"r{i}", [1] * 9, max_tokens=6) for i in range(4)])
    assert sim.runner.num_copied_blocks == sum(moved) > 20
    plain = Simulation(Scheduler(MinimalManager(60, 2)), toy())
    plain.run([Request(f"r{i}", [1] * 9, max_tokens=6) for i in range(4)])
    extra = sim.core.metrics.steps[-1].end - plain.core.metrics.steps[-1].end
    assert extra == pytest.approx(sum(moved) * 2 * 2 * KV_BYTES / 1_000.0)
