"""An hour of traffic in one pool of 15,700 slots, under different ways to give it out.

The pool is that of Kwon et al. 2023 (PagedAttention), figures 2 and 13: what OPT-13B leaves of an
A100 with 40 GB. Each function runs one hour, from a seed, and returns what was measured; the
commands that print it are in minikv.simulate.
"""

from dataclasses import dataclass

from minikv.kv_cache.base import MemoryReport
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.scheduler import Scheduler
from minikv.simulator import Simulation, StepTime
from minikv.simulator.refusals import Refusal, RefusalRecorder
from minikv.specs import find_gpu, find_model
from minikv.workloads import alpaca, shared_header, sharegpt

NUM_SLOTS = 15_700
HOUR_S, WARMUP_S = 3_600.0, 600.0


def simulation_of(manager, step_time, *, report_every=0) -> Simulation:
    """First come, first served, as wide as memory allows: 256 requests and 2,560 tokens a step."""
    scheduler = Scheduler(manager, max_num_seqs=256, max_num_batched_tokens=2_560)
    return Simulation(scheduler, step_time, report_every=report_every)


# -- the paradox ----------------------------------------------------------------------------------

PARADOX_MAX_MODEL_LEN = 8_192  # prompts of up to 6,000 tokens and answers of up to 1,500


def paradox_step_time(gpu="H100", model="Vicuna 13B v1.5 16K", **options) -> StepTime:
    """OPT-13B ends at 2,048 positions. This model has its shape, hence its bytes per token, and
    16,384. An A100 cannot keep up with 2 requests a second of this traffic, so that whatever is
    measured there is a queue that grows; an H100 just can."""
    return StepTime(find_model(model), find_gpu(gpu), **options)


@dataclass
class ParadoxRun:
    """simulation: with `core`, `requests` and `summary()`, as the hour left it."""

    refusals: list[Refusal]
    simulation: Simulation

    @property
    def core(self):
        return self.simulation.core

    @property
    def metrics(self):
        return self.simulation.core.metrics


def paradox_run(
    seed=0,
    fit="first",
    *,
    workload=None,
    manager=None,
    step_time=None,
    duration_s=HOUR_S,
    on_step=None,
) -> ParadoxRun:
    """Who is refused while a service with a shared prompt header runs.

    workload: default shared_header(rate=2). manager: default contiguous, block size 1, with exact
    reservation and this fit. step_time: default paradox_step_time(). on_step(core): called after
    each step. The run ends at duration_s, whoever waits.
    """
    if workload is None:
        workload = shared_header(rate=2.0)
    if manager is None:
        manager = ContiguousKVCacheManager(
            NUM_SLOTS, 1, max_model_len=PARADOX_MAX_MODEL_LEN, reserve="exact", fit=fit
        )
    simulation = simulation_of(manager, step_time or paradox_step_time())
    recorder = RefusalRecorder(simulation.core)
    try:
        requests = workload.requests(duration_s=duration_s, seed=seed)
        simulation.run(requests, on_step=on_step, until_s=duration_s)
    finally:
        recorder.detach()
    return ParadoxRun(recorder.refusals, simulation)


# -- figures 2 and 13 of the PagedAttention paper --------------------------------------------------

PAPER_MAX_MODEL_LEN = 2_048
PAPER_POLICIES = {
    "max": {"reserve": "max", "fit": "buddy"},
    "pow2": {"reserve": "pow2", "fit": "buddy"},
    "exact": {"reserve": "exact", "fit": "buddy"},
    "first_fit_exact": {"reserve": "exact", "fit": "first"},
    "paged": None,
}
FIG2_PAPER = {  # percent; the last is the figure's "external fragmentation & others"
    "max": {"token": 20.4, "reserved": 13.3, "internal": 57.3, "external": 8.9},
    "pow2": {"token": 26.8, "reserved": 17.9, "internal": 13.6, "external": 41.6},
    "exact": {"token": 38.2, "reserved": 25.2, "internal": 0.0, "external": 36.6},
}
FIG13_PAPER = {  # mean number of batched requests
    "sharegpt": {"max": 7.00, "pow2": 9.81, "exact": 13.62, "paged": 30.42},
    "alpaca": {"max": 7.00, "pow2": 43.24, "exact": 72.75, "paged": 132.44},
}
FIG13_WORKLOADS = {"sharegpt": sharegpt(rate=2.0), "alpaca": alpaca(rate=30.0)}
FIG13_MODELS = {  # of the step time; the second was fitted to the paper's 30.42
    "roofline": {},
    "roofline + 0.30 ms per request": {"overhead_per_request_s": 0.0003},
}


def paper_step_time(**options) -> StepTime:
    return StepTime(find_model("OPT-13B"), find_gpu("A100-40G"), **options)


def paper_manager(policy, *, num_slots=NUM_SLOTS, **options):
    """One of PAPER_POLICIES; options replace reserve and fit. "paged": blocks of 16 tokens."""
    if policy not in PAPER_POLICIES:
        raise ValueError(f"policy is {policy!r}; known: {', '.join(PAPER_POLICIES)}")
    if policy == "paged":
        return PagedKVCacheManager(num_slots // 16, 16)
    options = PAPER_POLICIES[policy] | options
    return ContiguousKVCacheManager(num_slots, 1, max_model_len=PAPER_MAX_MODEL_LEN, **options)


class CautiousPagedManager(PagedKVCacheManager):
    """Admits a request only if num_kept_blocks stay free for those that run (vLLM's watermark)."""

    def __init__(self, num_blocks, block_size, num_kept_blocks):
        super().__init__(num_blocks, block_size)
        self.num_kept_blocks = num_kept_blocks

    def allocate_slots(self, request, num_new_tokens, **extra):
        if self.tables and request.request_id not in self.tables:
            extra["keep_free_blocks"] = self.num_kept_blocks
        return super().allocate_slots(request, num_new_tokens, **extra)


@dataclass
class PaperRun:
    """mean_batched: requests in a step, over the time in steps once the first minutes are over.
    report: the mean MemoryReport in token slots over the same time; None if none was asked for."""

    mean_batched: float
    report: MemoryReport | None
    simulation: Simulation

    @property
    def shares(self) -> dict:
        """Percent of the pool, cut as Fig. 2 cuts it: what an allocator rounds up, and what nobody
        holds, is "external fragmentation & others" there."""
        r = self.report
        slots = {
            "token": r.live,
            "reserved": r.reserved,
            "internal": r.internal,
            "external": r.rounding + r.external + r.free + r.cached,
        }
        return {name: 100 * value / r.total for name, value in slots.items()}


def paper_run(
    policy,
    seed=0,
    *,
    workload=None,
    manager=None,
    step_time=None,
    duration_s=HOUR_S,
    warmup_s=WARMUP_S,
    report_every=0,
    on_step=None,
) -> PaperRun:
    """One policy of Fig. 2 or 13 for an hour, the first minutes left out.

    workload: default sharegpt(rate=2). manager: default paper_manager(policy). report_every: steps
    between two memory reports; each counts with the duration of its own step.
    """
    if not warmup_s < duration_s:
        raise ValueError(f"warmup_s is {warmup_s}, but the run ends at {duration_s} s")
    simulation = simulation_of(
        manager or paper_manager(policy),
        step_time or paper_step_time(),
        report_every=report_every,
    )
    requests = (workload or FIG13_WORKLOADS["sharegpt"]).requests(duration_s=duration_s, seed=seed)
    simulation.run(requests, on_step=on_step, until_s=duration_s)
    metrics = simulation.core.metrics
    steps = [step for step in metrics.steps if step.start >= warmup_s]
    mean_batched = _weighted((s.num_seqs, s.end - s.start) for s in steps)
    report = None
    if report_every:
        reports = [
            (report, metrics.steps[i].end - metrics.steps[i].start)
            for i, report in metrics.reports
            if metrics.steps[i].start >= warmup_s
        ]
        columns = zip(*(report for report, _ in reports), strict=True)
        weights = [weight for _, weight in reports]
        report = MemoryReport(*(_weighted(zip(c, weights, strict=True)) for c in columns))
    return PaperRun(mean_batched, report, simulation)


def fig2_run(policy, seed=0, **options) -> PaperRun:
    """paper_run with a memory report every step, for `shares`."""
    return paper_run(policy, seed, **({"report_every": 1} | options))


def _weighted(values_and_weights) -> float:
    total = weights = 0.0
    for value, weight in values_and_weights:
        total += value * weight
        weights += weight
    if not weights:
        raise ValueError("nothing was measured: no step lies between warmup_s and duration_s")
    return total / weights
