"""A recording of the pool's memory over time, small enough for an hour of traffic.

A moment is plain data: runs of slots alike, in the order of their addresses, and what waits for
room. The figures (maps, strips, fragmentation) are functions of it alone.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

from minikv.observe.pool import FREE, INTERNAL, LIVE, RESERVED, snapshot_of
from minikv.observe.refusals import RefusalRecorder
from minikv.request import require_int, require_number

ROUNDING = "rounding"
STATES = (LIVE, RESERVED, INTERNAL, ROUNDING)  # of slots that somebody holds
MAX_WAITING = 4  # of the requests in line, so many are written down


class Run(NamedTuple):
    """Slots start_slot to start_slot + num_slots - 1, alike. owner: a request_id, None if free.
    state: one of STATES, or FREE, in MemoryReport's words."""

    start_slot: int
    num_slots: int
    owner: str | None
    state: str


class Waiting(NamedTuple):
    """needed_slots: what the manager's policy asks for, before the request may start."""

    request_id: str
    needed_slots: int


class Moment(NamedTuple):
    """The pool at one time.

    runs: they cover it, in address order; neighbours differ in owner or state, or are free and
        the allocator holds them apart (buddies).
    one_piece: whether a request's slots have to lie side by side (its table is a range).
    waiting: the first few in line. num_waiting: all of them.
    """

    time_s: float
    step: int
    block_size: int
    one_piece: bool
    runs: tuple
    waiting: tuple = ()
    num_waiting: int = 0
    num_running: int = 0

    @property
    def num_slots(self) -> int:
        return self.runs[-1].start_slot + self.runs[-1].num_slots

    @property
    def free(self) -> list[Run]:
        return [run for run in self.runs if run.state == FREE]

    @property
    def free_slots(self) -> int:
        return sum(run.num_slots for run in self.runs if run.state == FREE)

    @property
    def largest_gap(self) -> Run | None:
        """The longest free run, the first of them; None where nothing is free."""
        return max(self.free, key=lambda run: run.num_slots, default=None)

    @property
    def largest_free_slots(self) -> int:
        return max((run.num_slots for run in self.runs if run.state == FREE), default=0)

    def count(self, state, owner=None) -> int:
        return sum(r.num_slots for r in self.runs if r.state == state and owner in (None, r.owner))

    @property
    def owners(self) -> list[str]:
        """Those that hold slots, in the order of their lowest address."""
        return list(dict.fromkeys(r.owner for r in self.runs if r.owner is not None))


class Recording(NamedTuple):
    """moments: in order of time. refusals: the moment in the middle of a step when a request was
    refused at its first attempt, for each of them; its `waiting[0]` is the refused one."""

    moments: tuple
    refusals: tuple = ()

    @property
    def num_slots(self) -> int:
        return self.moments[0].num_slots

    def between(self, start_s, end_s) -> "Recording":
        """Its part from start_s to end_s, both included."""
        kept = (tuple(m for m in part if start_s <= m.time_s <= end_s) for part in self)
        return Recording(*kept)


def enough_in_sum(refusal) -> bool:
    """Whether the free slots would have been enough for the refused, lying together."""
    return refusal.waiting[0].needed_slots <= refusal.free_slots


class MemoryRecorder:
    """Notes the pool of an EngineCore (`llm.core`, a simulation's `core`) after its steps, and
    every request that is refused at its first attempt.

        recorder = MemoryRecorder(simulation.core, every_s=10)
        simulation.run(requests, on_step=recorder)
        memory_strip(recorder.recording)

    In a loop of your own, call `recorder(core)` after each step. Without a core, it takes the one
    that it is first called with, and misses the refusals of that step.

    every_s: seconds of the engine's clock between moments at least; 0 notes every step. max_rows:
    with more moments than that every second one is dropped and every_s grows, so that a run of any
    length stays small.

    Raises TypeError or ValueError for an every_s below 0 and for max_rows below 2.
    """

    def __init__(self, core=None, *, every_s=0.0, max_rows=1000):
        self.every_s = require_number("every_s", every_s, at_least=0)
        self.max_rows = require_int("max_rows", max_rows, at_least=2)
        self.moments, self._refused = [], None
        if core is not None:
            self._refused = _RefusedMoments(core)

    @property
    def refusals(self) -> list[Moment]:
        return self._refused.refusals if self._refused else []

    @property
    def recording(self) -> Recording:
        return Recording(tuple(self.moments), tuple(self.refusals))

    def __call__(self, core):
        if self._refused is None:
            self._refused = _RefusedMoments(core)
            for first in itertools.islice(core.scheduler.waiting, 1):  # it may have been refused
                self._refused.leave_out(first)
        now = core.clock.now()
        if self.moments and now < self.moments[-1].time_s + self.every_s:
            return
        self.moments.append(moment(core))
        if len(self.moments) > self.max_rows:
            span = now - self.moments[0].time_s
            self.every_s = 2 * max(self.every_s, span / len(self.moments))
            self.moments = self.moments[::2]


class _RefusedMoments(RefusalRecorder):
    """A refusal is noted where it happens, with the whole pool: when the step has ended, others
    have left."""

    def __init__(self, core):
        super().__init__(core)
        self._core = core

    def leave_out(self, request):
        self._refused.add(request.request_id)

    def _note(self, request, num_new_tokens):
        num_tokens = request.num_computed_tokens + num_new_tokens
        needed = needed_slots(self.manager, request, num_tokens)
        waiting = (Waiting(request.request_id, needed),)
        self.refusals.append(moment(self._core)._replace(waiting=waiting))


def moment(core) -> Moment:
    """The pool of an EngineCore as it is now, and its scheduler's queue."""
    scheduler = core.scheduler
    return moment_of(
        core.manager,
        scheduler.waiting,
        time_s=core.clock.now(),
        step=len(core.metrics.steps),
        num_running=len(scheduler.running),
    )


def moment_of(manager, waiting=(), *, time_s=0.0, step=0, num_running=0) -> Moment:
    """The pool of a manager as it is now, for whoever calls it by hand. waiting: the requests in
    line. Live are num_computed_tokens slots of a request, those of its padding included (a
    MemoryReport counts these as internal)."""
    snap = snapshot_of(manager, step)
    # a buddy allocator rounds up, and cannot join all neighbours
    cuts = [start * manager.block_size for start, _ in manager.free_extents()]
    rounding = {name: manager.num_rounding_slots(name) for name in snap.tables}
    return Moment(
        time_s=time_s,
        step=step,
        block_size=snap.block_size,
        one_piece=all(isinstance(table, range) for table in manager.tables.values()),
        runs=tuple(runs_of(snap, cuts, rounding)),
        waiting=tuple(
            Waiting(request.request_id, needed_slots(manager, request))
            for request in itertools.islice(waiting, MAX_WAITING)
        ),
        num_waiting=len(waiting),
        num_running=num_running,
    )


def needed_slots(manager, request, num_tokens=None) -> int:
    """Slots that the request has to be given at once so that its first num_tokens tokens (all that
    it knows, unless given) have room: what the manager's policy reserves for them, before an
    allocator rounds it up; else a block for every block_size of them."""
    num_tokens = request.num_tokens if num_tokens is None else num_tokens
    return manager.num_blocks_for(request, num_tokens) * manager.block_size


def runs_of(snap, cuts=(), rounding=None) -> list[Run]:
    """The pool of a PoolSnapshot as runs. A slot that stands in several tables counts once: as
    live if it is so for any of them, and for the first table otherwise.

    cuts: slots where a run of free ones begins, whatever lies before it. rounding: request_id ->
    the last slots of its table that the allocator added.
    """
    apart = all(isinstance(table, range) for table in snap.tables.values())
    ends = {}  # of each table: where its live slots end, its reserved ones, internal, rounding
    for name, table in snap.tables.items():
        size = len(table) * snap.block_size
        asked = size - (rounding or {}).get(name, 0)
        ends[name] = (snap.num_live[name], min(snap.max_live[name], asked), asked, size)
    held = _held_apart(snap, ends) if apart else _held_anyhow(snap, ends)
    runs, at = [], 0
    cuts = iter([*sorted(cuts), math.inf])
    cut = next(cuts)
    for run in (*held, Run(snap.num_blocks * snap.block_size, 0, None, FREE)):
        while at < run.start_slot:
            while cut <= at:
                cut = next(cuts)
            end = min(cut, run.start_slot)
            runs.append(Run(at, end - at, None, FREE))
            at = end
        runs.append(run)
        at += run.num_slots
    return runs[:-1]


def _held_apart(snap, ends):
    """The held runs of tables that are ranges, in address order."""
    size, runs = snap.block_size, []
    for name, table in sorted(snap.tables.items(), key=lambda item: item[1].start):
        start, at = table.start * size, 0
        for end, state in zip(ends[name], STATES, strict=True):
            if end > at:
                runs.append(Run(start + at, end - at, name, state))
                at = end
    return runs


def _held_anyhow(snap, ends):
    """The held runs of any tables, slot by slot: blocks may be scattered, and shared."""
    size, names = snap.block_size, list(snap.tables)
    codes = np.full(snap.num_blocks * size, -1)  # owner's index * 4 + state's
    for live_pass in (False, True):
        for index in range(len(names) - 1, -1, -1):
            table = snap.tables[names[index]]
            slots = (np.asarray(table, int)[:, None] * size + np.arange(size)).ravel()
            bounds = itertools.pairwise((0, *ends[names[index]]))
            for state, (start, end) in enumerate(bounds):
                if (state == 0) == live_pass and end > start:
                    codes[slots[start:end]] = len(STATES) * index + state
    starts = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist()]
    bounds = itertools.pairwise([*starts, len(codes)])
    for (start, end), code in zip(bounds, codes[starts].tolist(), strict=True):
        if code >= 0:
            owner, state = divmod(code, len(STATES))
            yield Run(start, end - start, names[owner], STATES[state])
