"""Hours of traffic in seconds: core's own loop over a runner without tensors.

What is simulated is only how long a step takes (`StepTime`). Scheduler, manager and loop are the
engine's own, so every decision is the engine's.
"""

from minikv.core import EngineCore
from minikv.metrics import summarize
from minikv.simulator.runner import SimulatedRunner, StepTime, VirtualClock

__all__ = ["SimulatedRunner", "Simulation", "StepTime", "VirtualClock"]


class Simulation:
    """One engine on a virtual clock.

    scheduler: any Scheduler; its manager is used. report_every: see EngineCore.
    """

    def __init__(self, scheduler, step_time, *, report_every=0):
        self.clock = VirtualClock()
        self.runner = SimulatedRunner(step_time, scheduler.manager.block_size, self.clock)
        self.core = EngineCore(scheduler, self.runner, self.clock, report_every=report_every)
        self.requests = []

    def run(self, requests, *, on_step=None):
        """Serves requests (in order of arrival) to their end; returns self. A request that can
        never fit is refused by the scheduler, which raises OutOfKVMemory."""
        self.requests += requests
        self.core.run(requests, on_step)
        return self

    def run_closed_loop(self, requests, num_in_flight, *, on_step=None):
        """Keeps num_in_flight requests in the engine: when one ends, the next one comes."""
        queue = iter(requests)

        def feed(core):
            scheduler = core.scheduler
            while len(scheduler.waiting) + len(scheduler.running) < num_in_flight:
                request = next(queue, None)
                if request is None:
                    return
                request.arrival_time = self.clock.now()
                scheduler.add(request)
                self.requests.append(request)

        def each_step(core):
            feed(core)
            if on_step is not None:
                on_step(core)

        feed(self.core)
        self.core.run((), each_step)
        return self

    def summary(self) -> dict:
        """The serving metrics, named as in vLLM's benchmark."""
        return summarize(self.requests, self.core.metrics)
