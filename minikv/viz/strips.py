"""The pool over time: addresses upwards, time to the right, one colour per request.

A request in one piece is a band for as long as it holds its slots; a hole is white. Drawn as an
image, point by point, so that thousands of slots at hundreds of moments take no longer than few.
"""

from typing import NamedTuple

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import AutoLocator, ScalarFormatter

from minikv.observe.memory import ROUNDING, STATES, enough_in_sum
from minikv.observe.pool import FREE, INTERNAL, LIVE, RESERVED
from minikv.viz.owners import colours_of, owner_index, sample
from minikv.viz.states import (
    EDGE,
    LOOKS,
    REFUSED_WITH_ENOUGH,
    REFUSED_WITH_TOO_LITTLE,
    legend,
)
from minikv.viz.style import COLOURS, DPI, INK, MUTED, RULE, WHITE, figure, look, tint

HEIGHT = 2.1  # inches of one strip
DIMMED = tint(MUTED, 0.3)  # of requests that are not highlighted
# Refused at the first attempt, by whether the sum of the free slots was enough.
REFUSED = (
    Line2D([], [], color=INK, marker="|", linestyle="none", label=REFUSED_WITH_ENOUGH),
    Line2D([], [], color=RULE, marker="|", linestyle="none", label=REFUSED_WITH_TOO_LITTLE),
)

OTHERS = Patch(facecolor=DIMMED, **EDGE, label="other requests")


class Strip(NamedTuple):
    """What one strip shows. owners[i, j], states[i, j]: of slot slots[i] at times[j], numbers of
    `names` and of memory.STATES, -1 where it is free. image: its points, red, green and blue from
    0 to 1, the lowest address in the first row. refused: [(time_s, needed_slots, whether the sum
    of the free slots was enough)] of the requests refused at their first attempt."""

    names: tuple
    times: tuple
    slots: tuple
    owners: np.ndarray
    states: np.ndarray
    image: np.ndarray
    refused: list


def memory_strip(recording, *, title="The memory over time", highlight=()):
    """Returns (figure, Strip). recording: a Recording, or the MemoryRecorder that makes it."""
    card, (strip,) = memory_strips([(title, recording)], highlight=highlight)
    return card, strip


def memory_strips(recordings, *, highlight=()):
    """Strips above each other over one time axis, [(title, recording)]. In the margin above each,
    the requests that were refused at their first attempt, in two lanes: the sum of the free slots
    was enough, and was not. highlight: ids of requests; where given, all others are grey, and these
    look the same in all strips.

    Returns (figure, [Strip of each]). Raises ValueError for a recording without a moment.
    """
    for title, recording in recordings:
        if not recording.moments:
            raise ValueError(f"the recording {title!r} holds no moment")
    start = min(recording.moments[0].time_s for _, recording in recordings)
    end = max(recording.moments[-1].time_s for _, recording in recordings)
    end = end if end > start else start + 1
    options = {"squeeze": False, "sharex": True}
    size = (8, 1.0 + (HEIGHT + 0.5) * len(recordings))
    card, axes = figure(*size, rows=len(recordings), **options)
    strips, states, shared = [], {FREE}, {}
    for _, recording in recordings if highlight else ():
        shared = colours_of(recording.moments) | shared
    with look():
        for ax, (title, recording) in zip(axes.flat, recordings, strict=True):
            ax.set(xlim=(start, end), ylim=(0, recording.moments[0].num_slots))
            ax.set_title(title, pad=21)
            ax.set_ylabel("slot")
            ax.yaxis.set_major_formatter("{x:,.0f}")
            ax.spines[:].set_visible(True)
            states |= {run.state for moment in recording.moments for run in moment.runs}
        time_axis(axes.flat[-1], start, end)
        refused = any(recording.refusals for _, recording in recordings)
        own = {name: of for name, of in shared.items() if name in highlight}
        more = (OTHERS,) * bool(highlight) + REFUSED * refused
        more = [(handle, handle.get_label()) for handle in more]
        legend(card, states, (own or dict(enumerate(COLOURS))).values(), more)
        card.get_layout_engine().execute(card)
        card.set_layout_engine("none")  # the axes keep their size, so that points are drawn 1:1
        for ax, (_, recording) in zip(axes.flat, recordings, strict=True):
            box = ax.get_window_extent()
            shape = [
                round(pixels * DPI * card.scale / card.dpi) for pixels in (box.height, box.width)
            ]
            options = {"highlight": highlight, "colours": shared}
            strip = strip_of(recording, *shape, start=start, end=end, **options)
            extent = (start, end, 0, recording.moments[0].num_slots)
            ax.imshow(strip.image, origin="lower", extent=extent, aspect="auto",
                      interpolation="nearest")  # fmt: skip
            mark_refusals(ax, strip.refused, start, end)
            strips.append(strip)
        card.alt = " ".join(
            _alt(title, recording, strip)
            for (title, recording), strip in zip(recordings, strips, strict=True)
        )
    return card, strips


def strip_of(
    recording, height, width, *, start=None, end=None, highlight=(), colours=None
) -> Strip:
    """A strip of height x width points; a moment is shown until the next one. After the last
    one, and before the first, there is nothing: all is free. colours: {request_id: colour};
    default colours_of its moments."""
    moments = list(recording.moments)
    num_slots = moments[0].num_slots
    start = moments[0].time_s if start is None else start
    end = moments[-1].time_s if end is None else end
    colours = colours or colours_of(moments)
    if highlight:
        colours = {name: of if name in highlight else DIMMED for name, of in colours.items()}
    index = owner_index(moments)
    # Points stand for the middle of what they cover.
    slots = ((np.arange(height) + 0.5) * num_slots / height).astype(int)
    times = start + (np.arange(width) + 0.5) * (end - start) / width
    at = np.searchsorted([m.time_s for m in moments], times, side="right") - 1
    owners = np.full((height, width), -1)
    states = np.full((height, width), -1)
    for k in np.unique(at):
        if k >= 0:
            columns = at == k
            one_owners, one_states = sample(moments[k], slots, index)
            owners[:, columns], states[:, columns] = one_owners[:, None], one_states[:, None]
    past = times > moments[-1].time_s
    owners[:, past], states[:, past] = -1, -1
    names = tuple(index)
    image = _paint(owners, states, [colours[name] for name in names])
    refused = [(r.time_s, r.waiting[0].needed_slots, enough_in_sum(r)) for r in recording.refusals]
    return Strip(names, tuple(times), tuple(slots), owners, states, image, refused)


def _paint(owners, states, colours):
    """Colour by owner; what is no live token is light, with a pattern of its own."""
    height, width = owners.shape
    y, x = np.mgrid[0:height, 0:width]
    marks = {
        LIVE: np.zeros((height, width), bool),
        RESERVED: (x + y) % 7 < 2,
        INTERNAL: (x % 5 < 2) & (y % 5 < 2),
        ROUNDING: y % 5 < 1,
    }
    paper = np.array(to_rgb(WHITE))
    palette = np.array([*(to_rgb(c) for c in colours), paper])  # the last is that of owner -1
    image = palette[owners]
    for number, state in enumerate(STATES):
        _, face, mark, _ = LOOKS[state]
        here = states == number
        amount = np.where(marks[state], mark, face)[here][:, None]
        image[here] = 1 - amount * (1 - image[here])
    image[_edges(owners, palette)] = to_rgb(INK)
    return image


def _edges(owners, palette):
    """Points at which another request of the same colour begins: a line keeps them apart."""
    edge = np.zeros(owners.shape, bool)
    for a, b, of in (
        (owners[:-1], owners[1:], edge[1:]),
        (owners[:, :-1], owners[:, 1:], edge[:, 1:]),
    ):
        differ = (a != b) & (a >= 0) & (b >= 0)
        one, other = palette[a[differ]], palette[b[differ]]
        differ[differ] = (one == other).all(axis=-1) & (one != to_rgb(DIMMED)).any(axis=-1)
        of |= differ
    return edge


def mark_refusals(ax, refused, start, end):
    for lane, (enough, handle) in enumerate(zip((True, False), REFUSED, strict=True)):
        times = [t for t, _, e in refused if e == enough and start <= t <= end]
        top = 1.095 - 0.045 * lane
        ax.vlines(times, top - 0.035, top, transform=ax.get_xaxis_transform(), clip_on=False,
                  color=handle.get_color(), linewidth=0.8)  # fmt: skip


def time_axis(ax, start, end):
    """Labels the time axis, in minutes where the run is long."""
    if end - start < 600:
        # Set, as the axes may have been in minutes before.
        ax.xaxis.set_major_locator(AutoLocator())
        ax.xaxis.set_major_formatter(ScalarFormatter())
        ax.set_xlabel("seconds")
        return
    ax.xaxis.set_major_formatter(lambda value, _: f"{value / 60:,.0f}")
    minutes = (end - start) / 60
    step = next(n for n in (1, 2, 5, 10, 20, 30, 60, 120, 240, minutes) if minutes / n <= 9)
    ax.set_xticks(np.arange(np.ceil(start / 60 / step) * step, end / 60 + 1e-9, step) * 60)
    ax.set_xlabel("minutes")


def _alt(title, recording, strip):
    moments = recording.moments
    shares = [m.free_slots / m.num_slots for m in moments]
    enough = sum(e for _, _, e in strip.refused)
    return (
        f"{title}: {moments[0].num_slots:,} slots from {moments[0].time_s:,.0f} to "
        f"{moments[-1].time_s:,.0f} s, {len(strip.names)} requests. Between {min(shares):.0%} and "
        f"{max(shares):.0%} of the slots are free. {len(strip.refused)} requests were refused at "
        f"their first attempt, {enough} of them though the free slots were enough in sum."
    )
