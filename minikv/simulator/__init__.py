"""Hours of traffic in seconds: core's own loop over a runner without tensors.

What is simulated is only how long a step takes (`StepTime`). Scheduler, manager and loop are the
engine's own, so every decision is the engine's.
"""

import contextlib
import gc
import itertools
import math

from minikv.core import EngineCore
from minikv.kv_cache.base import OutOfKVMemory
from minikv.metrics import summarize
from minikv.request import require_int
from minikv.simulator.runner import SimulatedRunner, StepTime, VirtualClock

__all__ = ["SimulatedRunner", "Simulation", "StepTime", "VirtualClock", "num_blocks_on"]


def num_blocks_on(gpu, model, block_size, *, gpu_memory_utilization=0.9) -> int:
    """Blocks that fit beside the weights in this share of the GPU's memory, as vLLM counts; the
    rest is for activations and the driver.

    Raises ValueError for a share that is not above 0 and at most 1, and OutOfKVMemory where the
    weights leave no room for a block.
    """
    require_int("block_size", block_size, at_least=1)
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(
            f"gpu_memory_utilization is {gpu_memory_utilization}, but must be above 0, at most 1"
        )
    num_bytes = int(gpu.memory_bytes * gpu_memory_utilization) - model.parameter_bytes
    num_blocks = num_bytes // (block_size * model.kv_bytes_per_token)
    if num_blocks < 1:
        raise OutOfKVMemory(
            f"{model.name} weighs {model.parameter_bytes / 1e9:.1f} GB, which leaves no room for a "
            f"block in {gpu_memory_utilization:.0%} of {gpu.name}'s {gpu.memory_gb} GB"
        )
    return num_blocks


@contextlib.contextmanager
def uncollected():
    """A run leaves nothing behind that only Python's garbage collector would find, and the
    collector would walk over all that has been recorded, again and again: a tenth of the time."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


class Simulation:
    """One engine on a virtual clock that starts at 0.

    scheduler: any Scheduler; its manager is used. report_every: see EngineCore.
    requests: all that were served, in the order in which they came.
    """

    def __init__(self, scheduler, step_time, *, report_every=0):
        self.clock = VirtualClock()
        self.runner = SimulatedRunner(step_time, scheduler.manager.block_size, self.clock)
        self.core = EngineCore(scheduler, self.runner, self.clock, report_every=report_every)
        self.requests = []

    def run(self, requests, *, on_step=None, until_s=math.inf):
        """Serves requests, sorted by arrival_time, to their end; returns self. One that can never
        fit ends with finish_reason "error". until_s: begin no step from then on; whoever runs or
        waits stays. Raises ValueError where one arrives before the last.
        """
        requests = list(requests)
        for a, b in itertools.pairwise(requests):
            if a.arrival_time > b.arrival_time:
                raise ValueError(
                    f"request {b.request_id!r} arrives at {b.arrival_time} s, but comes after "
                    f"{a.request_id!r} of {a.arrival_time} s: sort them by arrival_time"
                )
        self.requests += requests
        with uncollected():
            self.core.run(requests, on_step, until_s)
        return self

    def run_closed_loop(self, requests, num_in_flight, *, on_step=None):
        """Keeps num_in_flight requests in the engine: when one ends, the next one comes. Their
        arrival_time is set to the moment. Returns self; raises ValueError for less than one."""
        require_int("num_in_flight", num_in_flight, at_least=1)
        queue, scheduler = iter(requests), self.core.scheduler

        def feed(core):
            while len(scheduler.waiting) + len(scheduler.running) < num_in_flight:
                request = next(queue, None)
                if request is None:
                    return
                request.arrival_time = self.clock.now()
                self.requests.append(request)
                core.submit(request)

        def each_step(core):
            feed(core)
            if on_step is not None:
                on_step(core)

        feed(self.core)
        with uncollected():
            self.core.run((), each_step)
        return self

    def summary(self) -> dict:
        """The serving metrics, named as in vLLM's benchmark."""
        return summarize(self.requests, self.core.metrics)
