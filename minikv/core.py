"""The one loop: schedule, copy, run, update. Tensors and wall clock for the engine, a step-time
model and a virtual clock for the simulator; neither is known here.
"""

import math
from typing import Protocol

from minikv.kv_cache.base import OutOfKVMemory
from minikv.metrics import Metrics, StepRecord
from minikv.scheduler import whole


class Runner(Protocol):
    def run(self, scheduled, copies) -> list[int | None]:
        """Executes the copies, computes the scheduled tokens and samples one token for each entry
        of scheduled (ignored in the middle of a prompt; None: the logits were not finite). Block
        tables are read from the manager now, not before."""


class Clock(Protocol):
    def now(self) -> float: ...

    def advance_to(self, t: float) -> None:
        """Waits, or pretends to, until the time is t."""


class EngineCore:
    """report_every: ask the manager for a MemoryReport every so many steps; 0 for never (a report
    looks at every running request). check_every_step: have the manager check its books, before
    the step's blocks are read or written and again after it."""

    def __init__(self, scheduler, runner, clock, *, report_every=0, check_every_step=False):
        self.scheduler, self.manager = scheduler, scheduler.manager
        self.runner, self.clock = runner, clock
        self.report_every, self.check_every_step = report_every, check_every_step
        self.metrics = Metrics(self.manager.num_blocks)
        self.manager.reset_prefix_cache()  # this runner's pool holds nothing yet
        self._num_refused = 0

    def step(self):
        """One iteration. Returns (scheduled, finished)."""
        manager, scheduler, metrics = self.manager, self.scheduler, self.metrics
        start = self.clock.now()
        scheduled, _ = scheduler.schedule()
        metrics.note_starts(scheduler.admitted, start)
        if self.check_every_step:
            manager.check()
        copies = list(manager.copies())
        tokens = self.runner.run(scheduled, copies)
        end = self.clock.now()
        step = self._record(scheduled, start, end)
        finished = scheduler.update(scheduled, tokens, end, step)
        if self.check_every_step:
            manager.check()
        return scheduled, finished

    def _record(self, scheduled, start, end):
        """Of the blocks in use, those that the step used: before any of them is given back. Returns
        the number of the step, as update() tells the requests which one gave them a token."""
        manager, steps = self.manager, self.metrics.steps
        num_tokens = 0
        for _, num_new_tokens in scheduled:
            num_tokens += num_new_tokens
        num_blocks_in_use = manager.num_blocks - manager.num_free_blocks
        steps.append(StepRecord(start, end, len(scheduled), num_tokens, num_blocks_in_use))
        if self.report_every and len(steps) % self.report_every == 0:
            self.metrics.reports.append((len(steps) - 1, self.report()))
        return len(steps) - 1

    @property
    def num_ended(self) -> int:
        """Requests that have ended, the refused ones included."""
        return self.scheduler.num_ended + self._num_refused

    def recover(self):
        """After a step that was cut short: see Scheduler.recover. What ran is computed again."""
        self.scheduler.recover()

    @whole
    def reset_prefix_cache(self) -> bool:
        """See KVCacheManager. Cut short, all is forgotten, and what ran is computed again."""
        return self.manager.reset_prefix_cache()

    def submit(self, request):
        """Queues a request; one that can never fit ends at once, with finish_reason "error"."""
        try:
            self.scheduler.add(request)
        except OutOfKVMemory as refusal:
            for each in (request, *request.children):
                each.finish_reason, each.error = "error", str(refusal)
                each.finish_time = self.clock.now()
                self._num_refused += 1

    def report(self):
        """Where the pool's slots are now, measured against the request that is next in line.
        `live` counts a step's new tokens once update() has been told of them."""
        waiting = self.scheduler.waiting
        return self.manager.report(waiting[0] if waiting else None)

    def run(self, arrivals=(), on_step=None, until_s=math.inf):
        """Serves `arrivals`, requests in order of arrival_time, until nothing is left to do, or
        no step begins before until_s; who runs or waits then is left as it is.
        What happens to a request that can never fit: see submit. on_step(core): called after each
        step."""
        scheduler, clock, queue = self.scheduler, self.clock, iter(arrivals)
        arriving = next(queue, None)
        while arriving is not None or scheduler.has_unfinished_requests:
            now = clock.now()
            if now >= until_s:
                return
            while arriving is not None and arriving.arrival_time <= now:
                self.submit(arriving)
                arriving = next(queue, None)
            if not scheduler.has_unfinished_requests:
                if arriving is not None:
                    clock.advance_to(min(arriving.arrival_time, until_s))
                continue
            self.step()
            if on_step is not None:
                on_step(self)


# Every step, whoever makes it. Here, so that the text of step() is the loop and nothing else.
EngineCore.step = whole(EngineCore.step)
