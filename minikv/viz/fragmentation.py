"""Free memory, and how much of it is in one piece: over time, and by the length of the pieces.

External fragmentation is 1 - largest free extent / free memory (of one moment): the distance
between the two lines, as a share of the upper one.
"""

from itertools import groupby

import numpy as np
from matplotlib.patches import Patch

from minikv.observe.memory import Moment, enough_in_sum
from minikv.viz.strips import time_axis
from minikv.viz.style import INK, WHITE, colour, figure, look, tint

MAX_POINTS = 160  # with more moments the lines are means over windows of time


def free_vs_largest(
    recording, *, min_free_share=0.0, title="Free memory, and the largest piece of it"
):
    """Two lines in percent of the pool; between them lies what no single request can have. Marks:
    what the requests refused at their first attempt needed, filled where the sum was enough.

    min_free_share: mark only who was refused while at least this share of the pool was free.
    A long recording is drawn as means over windows of equal time, as the legend says.

    Returns (figure, {"times", "free", "largest": shares of the pool, "refused": [(time_s, needed
    share, whether the sum was enough)]}). Raises ValueError without a moment.
    """
    moments = recording.moments
    if not moments:
        raise ValueError("the recording holds no moment")
    num_slots = moments[0].num_slots
    window_s, groups = _windows(moments)
    times = [time_s for time_s, _ in groups]
    free, largest = (
        [sum(getattr(m, of) for m in group) / len(group) / num_slots for _, group in groups]
        for of in ("free_slots", "largest_free_slots")
    )
    refused = [
        (r.time_s, r.waiting[0].needed_slots / num_slots, enough_in_sum(r))
        for r in recording.refusals
        if r.free_slots >= min_free_share * num_slots
    ]
    drawn = {"times": times, "free": free, "largest": largest, "refused": refused}
    start, end = moments[0].time_s, max(moments[-1].time_s, moments[0].time_s + 1e-9)
    means = f" (means over {window_s:,.3g} s)" if window_s else ""
    while_free = f" while {min_free_share:.0%} were free" if min_free_share else ""
    at_least = f" with {min_free_share:.0%} or more free" if min_free_share else ""
    card, ax = figure(8, 3.3, alt=_alt(title, drawn, moments, means, while_free))
    with look():
        above, below = ([100 * share for share in line] for line in (free, largest))
        hatch = {"hatch": "////", "hatchcolor": tint(colour(0), 0.45), "linewidth": 0}
        face = {"facecolor": tint(colour(0), 0.15), "edgecolor": "none"} | hatch
        ax.fill_between(times, below, above, step="post", **face)
        steps = {"drawstyle": "steps-post"}
        lines = [
            *ax.plot(
                times, above, color=colour(0), linewidth=1.4, label=f"free in total{means}", **steps
            ),
            *ax.plot(times, below, color=INK, linewidth=1.0, label=f"largest gap{means}", **steps),
        ]
        marks = [
            ax.scatter(
                [t for t, _, e in refused if e == enough],
                [100 * share for _, share, e in refused if e == enough],
                s=16 if len(refused) <= 150 else 9, facecolor=colour(1) if enough else WHITE,
                marker="v", edgecolor=INK, linewidth=0.5, zorder=4, label=label,
            )
            for enough, label in (
                (True, f"size of a request refused{at_least} (below the free total)"),
                (False, f"size of a request refused{at_least} (above the free total)"),
            )
            if any(e == enough for _, _, e in refused)
        ]  # fmt: skip
        highest = max(5, *above, *(100 * share for _, share, _ in refused))
        ax.set(xlim=(start, end), ylim=(0, highest * 1.05), title=title)
        ax.set_ylabel("% of the slots")
        time_axis(ax, start, end)
        between = Patch(**face, label="free, but not in one piece")
        handles = [lines[0], between, lines[1], *marks]
        card.legend(handles=handles, loc="outside lower center", ncols=2)
    return card, drawn


def free_extent_histogram(recording, *, needed=None, title="The free pieces by their length"):
    """How many free pieces there are of each length, and how much of the free memory lies in them:
    means over the moments. recording: a Recording, or one Moment.

    needed: slots that a request asks for; lengths that are all too short for it are light.

    Returns (figure, {shortest length of a bucket: (pieces, slots)}): buckets from a power of two
    to below the next, means per moment; "slots" add up to the mean of the free slots.
    """
    moments = [recording] if isinstance(recording, Moment) else recording.moments
    lengths = [run.num_slots for moment in moments for run in moment.free]
    buckets = {}
    longest = max(lengths).bit_length() if lengths else 1
    for power in range(min(lengths, default=1).bit_length() - 1, longest):
        inside = [n for n in lengths if n.bit_length() == power + 1]
        buckets[1 << power] = (len(inside) / len(moments), sum(inside) / len(moments))
    card, axes = figure(8, 3.6, rows=2, sharex=True, alt=_histogram_alt(title, buckets, needed))
    with look():
        total = sum(slots for _, slots in buckets.values()) or 1
        pieces = [count for count, _ in buckets.values()]
        shares = [100 * slots / total for _, slots in buckets.values()]
        short = [needed is not None and 2 * low <= needed for low in buckets]
        for ax, heights, label in ((axes[0], pieces, "pieces"), (axes[1], shares, "% of the free")):
            bars = ax.bar(range(len(heights)), heights, width=0.86, linewidth=0)
            for bar, light, height in zip(bars, short, heights, strict=True):
                bar.set(facecolor=tint(colour(0), 0.15) if light else colour(0))
                if light:
                    bar.set(hatch="////", hatchcolor=tint(colour(0), 0.6))
                text = f"{height:.1f}" if height < 9.95 else f"{height:.0f}"
                text = "<0.1" if height < 0.05 else text
                if height > 0:
                    ax.text(bar.get_x() + 0.43, height, text, ha="center", va="bottom", fontsize=8)
            ax.set_ylabel(label)
            ax.margins(y=0.16)
        names = [_bucket(low, "–") for low in buckets]
        tilt = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if len(names) > 8 else {}
        axes[1].set_xticks(range(len(names)), names, **tilt)
        axes[1].set_xlabel("slots in a piece")
        axes[0].set_title(title)
        if needed is not None:
            light = {"facecolor": tint(colour(0), 0.15), "hatch": "////", "linewidth": 0}
            light["hatchcolor"] = tint(colour(0), 0.6)
            patch = Patch(label=f"all too short for {needed:,} slots", **light)
            other = Patch(label="long enough, at least in part", facecolor=colour(0))
            card.legend(handles=[patch, other], loc="outside lower center", ncols=2)
    return card, buckets


def _bucket(low, to) -> str:
    return f"{low:,}{to}{2 * low - 1:,}" if low > 1 else "1"


def _windows(moments):
    """(seconds, [(start, the moments in it)]); seconds is None where each stands for itself."""
    if len(moments) <= MAX_POINTS:
        return None, [(m.time_s, [m]) for m in moments]
    start = moments[0].time_s
    window_s = (moments[-1].time_s - start) / MAX_POINTS
    groups = groupby(moments, lambda m: int((m.time_s - start) / window_s))
    return window_s, [(start + i * window_s, list(group)) for i, group in groups]


def _alt(title, drawn, moments, means, while_free):
    times, free, largest = drawn["times"], drawn["free"], drawn["largest"]
    mean_free, mean_largest = (  # over the moments: windows may hold unequal numbers of them
        np.mean([getattr(m, of) for m in moments]) / moments[0].num_slots
        for of in ("free_slots", "largest_free_slots")
    )
    widest = int(np.argmax(np.subtract(free, largest)))
    enough = sum(e for _, _, e in drawn["refused"])
    return (
        f"{title}, in percent of the pool{means}, from {moments[0].time_s:,.0f} to "
        f"{moments[-1].time_s:,.0f} s: on average "
        f"{mean_free:.0%} is free, and the largest gap has {mean_largest:.0%}. They are "
        f"farthest apart at {times[widest]:,.0f} s: {free[widest]:.0%} free, {largest[widest]:.0%} "
        f"in the largest gap. {len(drawn['refused'])} requests were refused at their first "
        f"attempt{while_free}, {enough} of them though enough was free in sum."
    )


def _histogram_alt(title, buckets, needed):
    listed = "; ".join(
        f"{_bucket(low, ' to ')} slots: {count:.1f} pieces, {slots:,.0f} slots"
        for low, (count, slots) in buckets.items()
        if count
    )
    short = f" A request needs {needed:,} slots." if needed is not None else ""
    return f"{title}, means over the moments. {listed or 'Nothing is free'}.{short}"
