"""Who was computed in which step: a recorder for any run of the loop, and a run as places."""

from typing import NamedTuple

# What a step computed for a request.
PROMPT, DECODE, FINISHED = "prompt", "decode", "finished"


class Entry(NamedTuple):
    """One request in one step. num_tokens: rows that the model computed for it; num_useful: those
    among them that were no padding and did not come after the end of its answer."""

    request_id: str
    kind: str
    num_tokens: int
    num_useful: int


class Recorder:
    """A Runner that notes what it is asked to compute, and has another one compute it.

    steps: for each step, its Entries.
    """

    def __init__(self, runner):
        self.runner, self.steps = runner, []

    def run(self, scheduled, copies, *how):
        self.steps.append([_entry(request, n) for request, n in scheduled])
        return self.runner.run(scheduled, copies, *how)


def record(core) -> Recorder:
    """From now on, notes every step of an EngineCore (`llm.core`, a simulation's `core`)."""
    core.runner = Recorder(core.runner)
    return core.runner


def _entry(request, num_tokens):
    start = request.num_computed_tokens
    if getattr(request, "ended", None) is not None:  # a row of a static batch that goes on
        return Entry(request.request_id, FINISHED, num_tokens, 0)
    kind = PROMPT if start < request.num_prompt_tokens else DECODE
    num_pads = max(0, min(start + num_tokens, request.num_pad_tokens) - start)
    return Entry(request.request_id, kind, num_tokens, num_tokens - num_pads)


class Lanes(NamedTuple):
    """A run as places in the batch. lanes[i]: for each step the Entry in place i, or None.

    A request takes the lowest free place when it first appears, and keeps it until it is gone.
    """

    lanes: tuple

    @property
    def num_steps(self):
        return len(self.lanes[0])

    def count(self, kind) -> int:
        """Places in steps that were spent on this kind; None counts the empty ones."""
        return sum((e.kind if e else None) == kind for lane in self.lanes for e in lane)

    @property
    def utilisation(self) -> float:
        """The share of all places, over all steps, that gave a token to somebody who wanted it."""
        return 1 - (self.count(None) + self.count(FINISHED)) / (len(self.lanes) * self.num_steps)


def lanes_of(steps, num_lanes=None) -> Lanes:
    """num_lanes: places of the batch (max_num_seqs); the most that were in use, unless given."""
    last = {e.request_id: i for i, step in enumerate(steps) for e in step}
    most = max(map(len, steps))
    lanes = [[None] * len(steps) for _ in range(num_lanes or most)]
    place = {}
    for i, step in enumerate(steps):
        place = {name: lane for name, lane in place.items() if last[name] >= i}
        for entry in step:
            if entry.request_id not in place:
                free = next(k for k in range(len(lanes)) if k not in place.values())
                place[entry.request_id] = free
            lanes[place[entry.request_id]][i] = entry
    return Lanes(tuple(map(tuple, lanes)))
