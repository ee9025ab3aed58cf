"""An hour of traffic in one pool of 15,700 slots, under different ways to give it out.

The pool is that of Kwon et al. 2023 (PagedAttention), figures 2 and 13: what OPT-13B leaves of an
A100 with 40 GB.
"""

from dataclasses import dataclass

from minikv.kv_cache.base import MemoryReport
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.scheduler import Scheduler
from minikv.simulator import Simulation, StepTime
from minikv.specs import find_gpu, find_model
from minikv.workloads import sharegpt

NUM_SLOTS = 15_700
HOUR_S, WARMUP_S = 3_600.0, 600.0


def simulation_of(manager, step_time, *, report_every=0) -> Simulation:
    """First come, first served, as wide as memory allows: 256 requests and 2,560 tokens a step."""
    scheduler = Scheduler(manager, max_num_seqs=256, max_num_batched_tokens=2_560)
    return Simulation(scheduler, step_time, report_every=report_every)


PAPER_MAX_MODEL_LEN = 2_048
PAPER_POLICIES = {
    "max": {"reserve": "max", "fit": "buddy"},
    "pow2": {"reserve": "pow2", "fit": "buddy"},
    "exact": {"reserve": "exact", "fit": "buddy"},
    "first_fit_exact": {"reserve": "exact", "fit": "first"},
    "paged": None,
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
    requests = (workload or sharegpt(rate=2.0)).requests(duration_s=duration_s, seed=seed)
    simulation.run(requests, on_step=on_step, until_s=duration_s)
    metrics = simulation.core.metrics
    steps = [step for step in metrics.steps if step.start >= warmup_s]
    mean_batched = weighted_mean((s.num_seqs, s.end - s.start) for s in steps)
    report = None
    if report_every:
        reports = [
            (report, metrics.steps[i].end - metrics.steps[i].start)
            for i, report in metrics.reports
            if metrics.steps[i].start >= warmup_s
        ]
        columns = zip(*(report for report, _ in reports), strict=True)
        weights = [weight for _, weight in reports]
        report = MemoryReport(*(weighted_mean(zip(c, weights, strict=True)) for c in columns))
    return PaperRun(mean_batched, report, simulation)


def mean(values) -> float:
    """Of an iterable; 0 if it is empty."""
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def weighted_mean(values_and_weights) -> float:
    total = weights = 0.0
    for value, weight in values_and_weights:
        total += value * weight
        weights += weight
    if not weights:
        raise ValueError("nothing was measured: no step lies between warmup_s and duration_s")
    return total / weights
