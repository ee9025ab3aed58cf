"""The pool as one line of addresses: who holds what, where the gaps are, and who fits in none."""

from itertools import chain

from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from minikv.observe.pool import FREE
from minikv.viz.owners import colours_of
from minikv.viz.states import fill, legend
from minikv.viz.style import INK, MUTED, RULE, WHITE, figure, ink_on, look, tint

MAX_CELLS = 64  # slots that are drawn and numbered one by one
BAR, MARGIN = 0.46, 1.1  # inches: height of the pool, and about what is beside it on the page
CHAR = 0.072  # inches that a letter of a label takes
LIGHT = tint(MUTED, 0.22)


def memory_map(moment, *, colours=None, title=None, room_below=False):
    """The pool's addresses in one row, the largest gap bracketed, and below it, to the same scale,
    the first request in line and the free slots as if they lay together.

    room_below: leave the space for these two even where nobody waits, as an animation needs it.
    Returns (figure, what it drew: {"gap": (start, slots), "free", "needed", "short": slots that
    the largest gap lacks, "request", "verdict"}); what there is none of is None, and needed 0.
    """
    colours = colours or colours_of([moment])
    card, ax = figure(8, 2.55 if moment.waiting or room_below else 1.6)
    with look():
        drawn = draw_map(ax, moment, colours, room_below)
        _headline(card, title or drawn["verdict"])
        legend(card, _states(moment), colours.values())
    card.alt = _alt(moment, drawn)
    return card, drawn


def draw_map(ax, moment, colours, room_below=False) -> dict:
    """memory_map's drawing, in axes that are at hand. Returns what it drew."""
    drawn = _facts(moment)
    rows = [(BAR / 2, "the pool")]
    draw_pool(ax, moment, 0.0, BAR, colours)
    if moment.one_piece and drawn["gap"]:
        _bracket(ax, *drawn["gap"], -0.09, moment.num_slots)
    if drawn["needed"]:
        _draw_waiting(ax, moment, drawn, 0.83)
        _draw_gathered(ax, moment, _place(moment, drawn, drawn["free"]), 1.32)
        rows += [(0.83 + 0.16, "needed"), (1.32 + 0.16, "free in total")]
    bottom = 1.7 if drawn["needed"] or room_below else BAR + 0.12
    _frame(ax, moment, rows, -0.4 if moment.one_piece or room_below else -0.08, bottom)
    _ticks(ax, moment, BAR)
    return drawn


def memory_maps(moments, *, colours=None, title=None):
    """Several moments as rows below each other. moments: [(label, Moment)], over one pool size.
    Returns (figure, [what memory_map says of each])."""
    drawn = [_facts(moment) for _, moment in moments]
    colours = colours or colours_of([moment for _, moment in moments])
    alt = " ".join(f"{label}: {_alt(m, d)}" for (label, m), d in zip(moments, drawn, strict=True))
    pitch = 0.82
    card, ax = figure(8, (0.9 if title else 0.6) + pitch * len(moments), alt=alt)
    with look():
        rows = []
        for i, ((label, moment), facts) in enumerate(zip(moments, drawn, strict=True)):
            top = i * pitch
            draw_pool(ax, moment, top, 0.36, colours)
            above = {"ha": "left", "va": "bottom", "fontsize": 8}
            _text(ax, 0, top - 0.05, facts["verdict"], MUTED, **above)
            rows.append((top + 0.18, label))
            if moment.one_piece and facts["gap"]:
                _bracket(ax, *facts["gap"], top + 0.36 + 0.05, moment.num_slots, below=True)
        _frame(ax, moments[0][1], rows, -0.25, pitch * len(moments) - 0.2)
        if title:
            _headline(card, title)
        states = {FREE}.union(*(_states(moment) for _, moment in moments))
        legend(card, states, colours.values())
    return card, drawn


# --- what it says ------------------------------------------------------------------------------


def _facts(moment):
    gap = moment.largest_gap
    request, needed = moment.waiting[0] if moment.waiting else (None, 0)
    most = moment.largest_free_slots if moment.one_piece else moment.free_slots
    return {
        "gap": (gap.start_slot, gap.num_slots) if gap else None,
        "free": moment.free_slots,
        "needed": needed,
        "short": max(0, needed - most),
        "request": request,
        "verdict": verdict(moment),
    }


def verdict(moment) -> str:
    """What the first in line needs against what there is, in one plain sentence."""
    free, largest = moment.free_slots, moment.largest_free_slots
    pieces = _count(len(moment.free), "piece")
    if not moment.waiting:
        share = f"{free:,} of {moment.num_slots:,} slots are free"
        gaps = f"; the largest gap is {largest:,}" if moment.one_piece else f", in {pieces}"
        return f"{share}{gaps}" if free else "no slot is free"
    request, needed = moment.waiting[0]
    start = f"{request!r} needs {needed:,} slots; {free:,} are free"
    if needed > free:
        return f"{start}: too little memory"
    if not moment.one_piece:
        return f"{start}, in {pieces}, and any will do: it fits"
    fits = "it fits" if needed <= largest else "it waits"
    return f"{start}; the largest gap is {largest:,}: {fits}"


def _count(number, thing) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def _alt(moment, drawn):
    owners, pieces = _count(len(moment.owners), "request"), _count(len(moment.free), "piece")
    return (
        f"The pool of {moment.num_slots:,} slots at {moment.time_s:,.1f} s: "
        f"{moment.num_slots - drawn['free']:,} slots are held by {owners}; {drawn['free']:,} are "
        f"free, in {pieces}, the largest of {moment.largest_free_slots:,}. "
        f"{drawn['verdict']}."
    )


def _states(moment):
    return {FREE, *(run.state for run in moment.runs)}


# --- the parts ---------------------------------------------------------------------------------


def draw_pool(ax, moment, top, height, colours):
    """The row of addresses, y growing downwards, in inches; x in slots."""
    num_slots = moment.num_slots
    per_inch = _slots_per_inch(ax, num_slots)
    ax.add_patch(Rectangle((0, top), num_slots, height, facecolor=WHITE, edgecolor="none"))
    alike = {}  # (state, colour) -> [(start, end)]
    spans = []  # neighbouring runs of one owner: [owner, start, end, slots of the first run]
    for run in moment.runs:
        if run.state == FREE:
            text = f"{run.num_slots:,}"
            if run.num_slots > (len(text) + 1) * CHAR * per_inch and num_slots > MAX_CELLS:
                _text(ax, run.start_slot + run.num_slots / 2, top + height / 2, text, MUTED)
            continue
        end = run.start_slot + run.num_slots
        alike.setdefault((run.state, colours[run.owner]), []).append((run.start_slot, end))
        if spans and spans[-1][0] == run.owner and spans[-1][2] == run.start_slot:
            spans[-1][2] = end
        else:
            spans.append([run.owner, run.start_slot, end, run.num_slots])
    for (state, of), bars in alike.items():
        _bars(ax, bars, top, height, **fill(state, of))
    if num_slots <= MAX_CELLS:
        ax.vlines(range(1, num_slots), top, top + height, color=RULE, linewidth=0.5)
    edged = [(start, end) for _, start, end, _ in spans if end - start > 0.03 * per_inch]
    _bars(ax, edged, top, height, facecolor="none", edgecolor=INK, linewidth=0.7)
    for owner, start, end, first in spans:
        width = (len(owner) + 1) * CHAR * per_inch
        if end - start > width:
            of = colours[owner]
            x = start + (first if first > width else end - start) / 2
            box = {"boxstyle": "square,pad=0.15", "facecolor": of, "edgecolor": "none"}
            _text(ax, x, top + height / 2, owner, ink_on(of), bbox=box, fontweight="bold")
    outline = {"facecolor": "none", "edgecolor": INK, "linewidth": 0.9}
    ax.add_patch(Rectangle((0, top), num_slots, height, **outline))


def _bars(ax, bars, top, height, **style):
    """Rectangles of one look, [(start, end)], as one patch: a paged pool has hundreds, and one by
    one they take most of a figure's time."""
    bottom = top + height
    corners = (((a, top), (b, top), (b, bottom), (a, bottom), (a, top)) for a, b in bars)
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(bars)
    if bars:
        patch = PathPatch(Path(list(chain.from_iterable(corners)), codes), **style)
        patch.set_snap(True)  # to whole pixels, as a rectangle is
        ax.add_artist(patch)


def _slots_per_inch(ax, num_slots):
    """About: before the layout, all that is known is the width of the whole figure."""
    return num_slots / (ax.figure.get_figwidth() - MARGIN)


def _bracket(ax, start, num_slots, y, pool_slots, below=False):
    """Over (or under) the largest gap, with its size."""
    tick = -0.06 if below else 0.06
    x = [start, start, start + num_slots, start + num_slots]
    ax.plot(x, [y + tick if not below else y - 0.03, y, y, y + tick if not below else y - 0.03],
            color=INK, linewidth=1.1, solid_capstyle="butt", clip_on=False)  # fmt: skip
    text = f"largest gap: {num_slots:,}"
    half = len(text) * CHAR * 0.5 * _slots_per_inch(ax, pool_slots)
    middle = min(max(start + num_slots / 2, half), pool_slots - half)
    align = {"va": "top"} if below else {"va": "bottom"}
    size = 8 if below else 8.5
    ax.text(middle, y + (0.03 if below else -0.04), text, ha="center", fontsize=size, **align)


def _place(moment, drawn, num_slots):
    """Where a bar of that many slots begins: with the largest gap, so that it sticks out to the
    right of it; where the pool ends before, it sticks out to the left."""
    if not (drawn["gap"] and moment.one_piece):
        return 0
    start, gap = drawn["gap"]
    if start + num_slots <= moment.num_slots:
        return start
    return max(0, start + gap - num_slots)


def _draw_waiting(ax, moment, drawn, top):
    """The request in line, held against the largest gap: what does not go in is dark."""
    needed, short, height = drawn["needed"], drawn["short"], 0.32
    start, fits = _place(moment, drawn, needed), needed - short
    to_the_left = drawn["gap"] and moment.one_piece and start < drawn["gap"][0]
    light = start + short if to_the_left else start
    edge = {"edgecolor": INK, "linewidth": 0.9}
    ax.add_patch(Rectangle((light, top), fits, height, facecolor=LIGHT, **edge))
    if short:
        dark = start if to_the_left else start + fits
        ax.add_patch(Rectangle((dark, top), short, height, facecolor=INK, **edge))
        text = f"{short:,} too {'long' if moment.one_piece and needed <= drawn['free'] else 'many'}"
        bar = (start, start + needed)
        _label(ax, (dark, dark + short), bar, top, text, WHITE, moment, to_the_left)
    name = f"{drawn['request']}: {needed:,}"
    if fits > (len(name) + 1) * CHAR * _slots_per_inch(ax, moment.num_slots):
        _text(ax, light + fits / 2, top + height / 2, name, INK, fontweight="bold")
    if drawn["gap"] and moment.one_piece:
        for x in (drawn["gap"][0], sum(drawn["gap"])):
            ax.plot([x, x], [BAR, top], color=INK, linewidth=0.8, linestyle=(0, (2, 2)))


def _draw_gathered(ax, moment, start, top):
    height, x = 0.32, start
    outline = {"facecolor": WHITE, "edgecolor": INK, "linewidth": 0.9}
    ax.add_patch(Rectangle((start, top), moment.free_slots, height, **outline))
    apart = moment.free_slots > 0.05 * len(moment.free) * _slots_per_inch(ax, moment.num_slots)
    for run in moment.free[:-1] if apart else ():  # where the pieces meet
        x += run.num_slots
        ax.plot([x, x], [top, top + height], color=RULE, linewidth=0.8)
    bar = (start, start + moment.free_slots)
    _label(ax, bar, bar, top, f"{moment.free_slots:,}", INK, moment)


def _label(ax, part, bar, top, text, ink, moment, to_the_left=False):
    """In the middle of a part of a bar if there is room, else beside the bar, on the part's side
    if there is room. A bar as long as the pool may leave no room at all."""
    width = (len(text) + 1) * CHAR * _slots_per_inch(ax, moment.num_slots)
    y = top + 0.16
    if part[1] - part[0] > width:
        face = INK if ink == WHITE else WHITE
        box = {"boxstyle": "square,pad=0.1", "facecolor": face, "edgecolor": "none"}
        _text(ax, sum(part) / 2, y, text, ink, bbox=box)
    elif bar[1] + width < moment.num_slots and not (to_the_left and bar[0] > width):
        _text(ax, bar[1], y, " " + text, INK, ha="left")
    elif bar[0] > width:
        _text(ax, bar[0], y, text + " ", INK, ha="right")


def _text(ax, x, y, text, ink, **options):
    options = {"ha": "center", "va": "center", "fontsize": 8} | options
    ax.text(x, y, text, color=ink, parse_math=False, **options)


def _headline(card, text):
    card.suptitle(text, x=0.012, ha="left", fontsize=10, weight="bold", parse_math=False)


def _frame(ax, moment, rows, top, bottom):
    edge = moment.num_slots * 0.004
    ax.set(xlim=(-edge, moment.num_slots + edge), ylim=(bottom, top), xticks=[])
    ax.set_yticks([y for y, _ in rows], [label for _, label in rows])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _ticks(ax, moment, y):
    num_slots = moment.num_slots
    if num_slots <= MAX_CELLS:
        every = next(n for n in (1, 2, 4, 8) if num_slots / n <= 32)
        places = [(i + 0.5, i) for i in range(0, num_slots, every)]
    else:
        every = nice_step(num_slots, 6)
        places = [(i, f"{i:,}") for i in range(0, num_slots + 1, every)]
        if num_slots - places[-1][0] > every / 2:
            places.append((num_slots, f"{num_slots:,}"))
        ax.vlines([x for x, _ in places], y, y + 0.05, color=INK, linewidth=0.8)
    for x, text in places:
        _text(ax, x, y + 0.06, text, MUTED, va="top")


def nice_step(total, count):
    """A round step that cuts total into at most count pieces."""
    step = 1
    while total / step > count:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return step
