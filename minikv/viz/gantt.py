"""The chart of who was computed in which step.

Also the two curves of a server under load: where its memory went, and what waiting costs.
"""

from itertools import groupby

from matplotlib.patches import Patch, Rectangle

from minikv.observe.pool import FREE, INTERNAL, LIVE, RESERVED
from minikv.observe.steps import DECODE, FINISHED, PROMPT, lanes_of
from minikv.observe.steps import record as record
from minikv.viz.states import EDGE, fill, legend
from minikv.viz.style import INK, MUTED, RULE, WHITE, colour, figure, ink_on, look, tint

KINDS = {
    PROMPT: "prompt: all its tokens in one step",
    DECODE: "decode: one token",
    FINISHED: "computed after the answer's end",
}


# --- who ran when ------------------------------------------------------------------------------


def gantt(runs, num_lanes=None):
    """One chart per run, one below the other, over the same steps.

    runs: {title: steps, as a Recorder has them}. Returns (figure, {title: Lanes}).
    """
    data = {title: lanes_of(steps, num_lanes) for title, steps in runs.items()}
    names = list(dict.fromkeys(e.request_id for steps in runs.values() for s in steps for e in s))
    colours = {name: colour(i) for i, name in enumerate(names)}
    width = max(run.num_steps for run in data.values())
    alt = " ".join(_gantt_alt(title, run) for title, run in data.items())
    heights = [0.34 * len(run.lanes) + 0.75 for run in data.values()]
    options = {"height_ratios": heights, "squeeze": False, "sharex": True}
    card, axes = figure(8.8, 0.55 + sum(heights), rows=len(data), alt=alt, **options)
    with look():
        for ax, (title, run) in zip(axes.flat, data.items(), strict=True):
            _draw_lanes(ax, run, colours)
            ax.set(xlim=(0, width + 0.1), ylim=(len(run.lanes), 0))
            wasted = 1 - run.utilisation
            ax.set_title(f"{title}: {run.num_steps} steps, {wasted:.0%} of the places wasted")
            ax.set_yticks([i + 0.5 for i in range(len(run.lanes))], range(1, len(run.lanes) + 1))
            ax.set_ylabel("place")
            ax.tick_params(length=0)
            ax.spines[:].set_visible(False)
        every = next(n for n in (1, 2, 5, 10, 20, 50, 100, width) if width / n <= 26)
        ticks = range(0, width, every)
        axes.flat[-1].set_xticks([t + 0.5 for t in ticks], ticks)
        axes.flat[-1].set_xlabel("step")
        handles = [
            Patch(label=text, **_look(kind, colour(0)) | EDGE) for kind, text in KINDS.items()
        ]
        handles.append(Patch(label="empty", facecolor=WHITE, **EDGE))
        card.legend(handles=handles, loc="outside lower center", ncols=4)
    return card, data


def _draw_lanes(ax, run, colours):
    num_steps = run.num_steps
    ax.add_patch(Rectangle((0, 0), num_steps, len(run.lanes), facecolor=WHITE, edgecolor="none"))
    for y, lane in enumerate(run.lanes):
        x = 0
        for name, group in groupby(lane, lambda e: e.request_id if e else None):
            entries = list(group)
            if name is not None:
                _draw_bar(ax, x, y, name, entries, colours[name])
            x += len(entries)
    edge = {"color": RULE, "linewidth": 0.4, "zorder": 0.9}
    ax.vlines(range(num_steps + 1), 0, len(run.lanes), **edge)
    ax.hlines(range(len(run.lanes) + 1), 0, num_steps, **edge)


def _draw_bar(ax, x, y, name, entries, of):
    start = x
    for kind, group in groupby(entries, lambda e: e.kind):
        width = len(list(group))
        ax.add_patch(Rectangle((start, y + 0.08), width, 0.84, **_look(kind, of)))
        start += width
    box = {"facecolor": "none", "edgecolor": INK, "linewidth": 0.9}
    ax.add_patch(Rectangle((x, y + 0.08), len(entries), 0.84, **box))
    own = sum(e.kind != FINISHED for e in entries)
    options = {"ha": "center", "va": "center", "fontsize": 8, "fontweight": "bold"}
    prompts = sum(e.kind == PROMPT for e in entries)
    middle = x + prompts + (own - prompts) / 2 if own > prompts else x + 0.5
    ink = ink_on(_look(DECODE if own > prompts else PROMPT, of)["facecolor"])
    ax.text(middle, y + 0.5, name, color=ink, parse_math=False, **options)


def _look(kind, of):
    looks = {
        PROMPT: {"facecolor": tint(of, 0.3), "hatch": "\\\\\\\\", "hatchcolor": of},
        DECODE: {"facecolor": of},
        FINISHED: {"facecolor": WHITE, "hatch": "xxxx", "hatchcolor": tint(MUTED, 0.7)},
    }
    return looks[kind] | {"edgecolor": "none", "linewidth": 0}


def _gantt_alt(title, run):
    total = len(run.lanes) * run.num_steps
    return (
        f"{title}: {run.num_steps} steps of {len(run.lanes)} places. Of {total} places "
        f"{run.count(FINISHED)} went to answers that had ended, and {run.count(None)} were empty."
    )


# --- a server under load -----------------------------------------------------------------------


def pool_over_time(times, reports, *, title="The pool over time"):
    """Where the slots are, stacked, in percent of the pool.

    times: seconds. reports: a MemoryReport for each. Returns (figure, {state: [shares]}).
    """
    states = (LIVE, RESERVED, INTERNAL, FREE)
    shares = {s: [getattr(r, s) / r.total for r in reports] for s in states}
    shares[FREE] = [a + (r.external / r.total) for a, r in zip(shares[FREE], reports, strict=True)]
    means = {state: sum(values) / len(values) for state, values in shares.items()}
    listed = ", ".join(f"{state} {mean:.0%}" for state, mean in means.items())
    alt = f"{title}: shares of the pool's slots, {len(times)} moments. On average {listed}."
    card, ax = figure(8, 3.1, alt=alt)
    with look():
        below = [0.0] * len(times)
        minutes = [t / 60 for t in times]
        for state in states:
            top = [100 * v + b for v, b in zip(shares[state], below, strict=True)]
            style = fill(state, colour(0)) | {"linewidth": 0}
            ax.fill_between(minutes, below, top, step="post", **style)
            ax.plot(minutes, top, color=INK, linewidth=0.5, drawstyle="steps-post")
            below = top
        ax.set(xlim=(minutes[0], minutes[-1]), ylim=(0, 100), title=title)
        ax.set(xlabel="minutes", ylabel="% of the slots")
        legend(card, states, [colour(0)])
    return card, shares


def curves(
    series, *, title, xlabel, ylabel, log=False, mark=None, powers_of_two=False, legend="upper left"
):
    """Lines with marks, each named at its legend. series: {name: [(x, y)]}. mark: (x, text), a
    vertical line. powers_of_two: x is spaced, and labelled, in these. legend: its place; "below",
    where it would hide a line. Returns (figure, series)."""
    listed = "; ".join(f"{name}: {len(points)} points" for name, points in series.items())
    alt = f"{title}: {ylabel} over {xlabel}. {listed}."
    card, ax = figure(7.2, 3.2, alt=alt)
    with look():
        for i, (name, points) in enumerate(series.items()):
            style = {"color": colour(i), "marker": "os^D"[i % 4], "markersize": 5}
            ax.plot(*zip(*points, strict=True), label=name, **style)
        if mark is not None:
            ax.axvline(mark[0], color=MUTED, linewidth=1, linestyle=(0, (3, 2)))
            ax.text(mark[0], 1.01, mark[1], transform=ax.get_xaxis_transform(), ha="center",
                    va="bottom", fontsize=8, color=MUTED)  # fmt: skip
        ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
        if powers_of_two:
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter("{x:,.0f}")
        if log:
            ax.set_yscale("log")
        else:
            ax.set_ylim(bottom=0)
        if legend == "below":
            card.legend(loc="outside lower center", ncols=4)
        else:
            ax.legend(loc=legend)
    return card, series
