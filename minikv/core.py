"""The one loop: schedule, copy, run, update. Tensors and wall clock for the engine, a step-time
model and a virtual clock for the simulator; neither is known here.
"""

import functools
import math
from typing import Protocol

from minikv.kv_cache.base import OutOfKVMemory
from minikv.metrics import Metrics, StepRecord


class Runner(Protocol):
    def run(self, scheduled, copies) -> list[int | None]:
        """Executes the copies, computes the scheduled tokens and samples one token for each entry
        of scheduled (ignored in the middle of a prompt; None: the logits were not finite). Block
        tables are read from the manager now, not before.

        copies: a list, which the runner empties once they are done: whatever raises after that,
        they are never executed twice (their sources may have changed). A list that is not empty
        when run raises is handed in again, unchanged and alone, before anything else."""


class Clock(Protocol):
    def now(self) -> float: ...

    def advance_to(self, t: float) -> None:
        """Waits, or pretends to, until the time is t."""


def restoring(step):
    """Decorates EngineCore.step: where a step is cut short, by an error or an interrupt at any
    point, the books are made good before anyone looks at them again."""

    @functools.wraps(step)
    def step_or_restore(core):
        try:
            return step(core)
        except BaseException:
            copies_lost, core._copies = core._copies is None, core._copies or []
            core.scheduler.restore(copies_lost)
            raise

    return step_or_restore


class EngineCore:
    """report_every: ask the manager for a MemoryReport every so many steps; 0 for never (a report
    looks at every running request). check_every_step: have the manager check its books, before
    the step's blocks are read or written and again after it."""

    def __init__(self, scheduler, runner, clock, *, report_every=0, check_every_step=False):
        self.scheduler, self.manager = scheduler, scheduler.manager
        self.runner, self.clock = runner, clock
        self.report_every, self.check_every_step = report_every, check_every_step
        self.metrics = Metrics(self.manager.num_blocks)
        self._copies = []  # drained from the manager; the runner empties it when they are done
        self.num_ended = 0  # requests that have ended, the refused ones included

    @restoring
    def step(self):
        """One iteration. Returns (scheduled, finished)."""
        manager, scheduler, steps = self.manager, self.scheduler, self.metrics.steps
        runner = self.runner
        start = self.clock.now()
        scheduled, _ = scheduler.schedule()
        for request in scheduler.admitted:
            if request.first_scheduled_time is None:
                request.first_scheduled_time = start
        if self.check_every_step:
            manager.check()
        if self._copies:
            # A step was cut short before they were done. The manager counts them as done, so they
            # come first, whoever has left or moved since: nothing was written in between, and
            # what they write for a request that has gone is overwritten before it is read.
            runner.run([], self._copies)
        self._copies = None  # cut short here, nobody has them
        self._copies = list(manager.copies())
        tokens = runner.run(scheduled, self._copies)
        self._copies = []
        end = self.clock.now()
        num_tokens = 0
        for _, num_new_tokens in scheduled:
            num_tokens += num_new_tokens
        num_blocks_in_use = manager.num_blocks - manager.num_free_blocks
        steps.append(StepRecord(start, end, len(scheduled), num_tokens, num_blocks_in_use))
        if self.report_every and len(steps) % self.report_every == 0:
            self.metrics.reports.append((len(steps) - 1, self.report()))
        finished = scheduler.update(scheduled, tokens, end, len(steps) - 1)
        self.num_ended += len(finished)
        if self.check_every_step:
            manager.check()
        return scheduled, finished

    def submit(self, request):
        """Queues a request; one that can never fit ends at once, with finish_reason "error"."""
        try:
            self.scheduler.add(request)
        except OutOfKVMemory as refusal:
            for each in (request, *request.children):
                each.finish_reason, each.error = "error", str(refusal)
                each.finish_time = self.clock.now()
                self.num_ended += 1

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
