"""Break it yourself: a small service on a virtual clock, and its knobs. A run is a function of its
settings alone; minikv.viz.lab draws it.
"""

from dataclasses import dataclass
from typing import ClassVar

from minikv.kv_cache.contiguous import RESERVE_POLICIES, ContiguousKVCacheManager
from minikv.kv_cache.extents import FITS
from minikv.observe.memory import MemoryRecorder, Moment, Recording, enough_in_sum
from minikv.request import require_int, require_number
from minikv.scheduler import Scheduler
from minikv.simulator import Simulation, StepTime
from minikv.specs import find_gpu, find_model
from minikv.workloads import LogNormal, Poisson, RequestClass, Uniform, Workload

NUM_REQUESTS = 300
BLOCK_SIZE, MAX_MODEL_LEN = 16, 2048
# Chats with a header that they share, and now and then a long document: nothing is shared here.
SHORT = (LogNormal(280, 0.3, low=200, high=1000), LogNormal(110, 0.9, low=4, high=500))
LONG = (Uniform(600, 1500), LogNormal(110, 0.9, low=4, high=500))
MOMENTS = 200  # recorded while requests arrive


@dataclass(frozen=True)
class LabSettings:
    """rate: requests per second. long_share: of prompts that are long, 0 to 1. fit, reserve: as
    in ContiguousKVCacheManager. num_slots: of the pool, rounded down to whole blocks.

    Raises TypeError or ValueError, naming the value and its limits.
    """

    rate: float = 5.0
    long_share: float = 0.15
    fit: str = "first"
    reserve: str = "exact"
    num_slots: int = 6144
    seed: int = 0
    min_slots: ClassVar[int] = 2 * MAX_MODEL_LEN  # every request fits alone, even rounded up

    def __post_init__(self):
        require_number("rate", self.rate, above=0)
        require_number("long_share", self.long_share, at_least=0, at_most=1)
        require_int("num_slots", self.num_slots, at_least=self.min_slots)
        require_int("seed", self.seed, at_least=0)
        for name, known in (("fit", FITS), ("reserve", RESERVE_POLICIES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; known: {', '.join(known)}")


@dataclass(frozen=True)
class LabResult:
    """num_refused: requests that got no room at their first attempt. num_paradox: those among them
    that the sum of the free slots would have been enough for. worst: of their refusals the one
    while most was free; None where there is none. fullest: the recorded moment while least was.
    mean_running: requests in a step, on average.
    """

    settings: LabSettings
    recording: Recording
    num_requests: int
    num_refused: int
    num_paradox: int
    worst: Moment | None
    fullest: Moment
    mean_running: float


def lab_run(settings=LabSettings()) -> LabResult:
    """Serves 300 requests: OPT-13B on an A100 with a pool that is small enough to see."""
    s = settings
    shares = (("short", 1 - s.long_share, SHORT), ("long", s.long_share, LONG))
    classes = tuple(RequestClass(name, share, *lengths) for name, share, lengths in shares if share)
    requests = Workload("lab", Poisson(s.rate), classes).requests(
        num_requests=NUM_REQUESTS, seed=s.seed
    )
    manager = ContiguousKVCacheManager(
        s.num_slots // BLOCK_SIZE,
        BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        reserve=s.reserve,
        fit=s.fit,
    )
    step_time = StepTime(find_model("opt-13b"), find_gpu("A100-40G"))
    scheduler = Scheduler(manager, max_num_seqs=256, max_num_batched_tokens=2560)
    simulation = Simulation(scheduler, step_time)
    every_s = requests[-1].arrival_time / MOMENTS
    recorder = MemoryRecorder(simulation.core, every_s=every_s, max_rows=2 * MOMENTS)
    simulation.run(requests, on_step=recorder)
    paradox = [refusal for refusal in recorder.refusals if enough_in_sum(refusal)]
    return LabResult(
        settings=s,
        recording=recorder.recording,
        num_requests=len(requests),
        num_refused=len(recorder.refusals),
        num_paradox=len(paradox),
        worst=max(paradox, key=lambda refusal: refusal.free_slots, default=None),
        fullest=min(recorder.moments, key=lambda moment: moment.free_slots),
        mean_running=simulation.summary()["mean_num_seqs"],
    )
