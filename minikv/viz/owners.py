"""Which request has which colour, and who is where in memory at which time."""

import numpy as np

from minikv.observe.memory import STATES
from minikv.observe.pool import FREE
from minikv.viz.style import COLOURS, colour

MAX_SAMPLES = 1024  # addresses that are looked at to tell neighbours apart


def owner_index(moments) -> dict:
    """{request_id: number} in the order of appearance."""
    names = dict.fromkeys(run.owner for moment in moments for run in moment.runs)
    names.pop(None, None)
    return {name: i for i, name in enumerate(names)}


def sample(moment, slots, index):
    """(owners, states) at these slots: arrays of numbers, -1 for a free slot."""
    starts = [run.start_slot for run in moment.runs]
    owners = np.array([-1 if r.owner is None else index[r.owner] for r in moment.runs])
    states = np.array([-1 if r.state == FREE else STATES.index(r.state) for r in moment.runs])
    at = np.searchsorted(starts, slots, side="right") - 1
    return owners[at], states[at]


def colours_of(moments) -> dict:
    """{request_id: colour}. There are five colours and any number of requests: one takes that
    which meets its like least, beside it in memory or before and after it in time."""
    index = owner_index(moments)
    num_slots, num_owners = moments[0].num_slots, len(index)
    slots = np.arange(num_slots) if num_slots <= MAX_SAMPLES else (
        np.linspace(0, num_slots - 1, MAX_SAMPLES).astype(int)
    )  # fmt: skip
    grid = np.array([sample(moment, slots, index)[0] for moment in moments])
    meetings = [{} for _ in range(num_owners)]
    for axis in (0, 1):
        filled = _fill_free(grid, axis)  # those with only a gap between them are neighbours, too
        a, b = (filled[:-1], filled[1:]) if axis == 0 else (filled[:, :-1], filled[:, 1:])
        meet = (a != b) & (a >= 0) & (b >= 0)
        pairs, counts = np.unique(a[meet] * num_owners + b[meet], return_counts=True)
        for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            one, other = divmod(pair, num_owners)
            meetings[one][other] = meetings[one].get(other, 0) + count
            meetings[other][one] = meetings[other].get(one, 0) + count
    chosen, uses = [], [0] * len(COLOURS)
    for number in range(num_owners):
        clash = [0] * len(COLOURS)
        for other, count in meetings[number].items():
            if other < number:
                clash[chosen[other]] += count
        best = min(range(len(COLOURS)), key=lambda c: (clash[c], uses[c], c))
        uses[best] += 1
        chosen.append(best)
    return {name: colour(chosen[i]) for name, i in index.items()}


def _fill_free(grid, axis):
    """Each free place as the last one before it that is held, along an axis."""
    shape = [-1 if axis == k else 1 for k in (0, 1)]
    place = np.where(grid >= 0, np.arange(grid.shape[axis]).reshape(shape), 0)
    return np.take_along_axis(grid, np.maximum.accumulate(place, axis=axis), axis=axis)
