"""A block's life: one lane per block, from left to right what it was at each look.

Drawn from the looks of an observe.LifeRecorder and nothing else.
"""

from itertools import groupby
from typing import NamedTuple

from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke

from minikv.observe.blocks import CACHED
from minikv.observe.pool import FREE, LIVE
from minikv.viz.player import play
from minikv.viz.states import PALE, fill, legend
from minikv.viz.style import INK, MUTED, RULE, WHITE, colour, figure, fitted, ink_on, look, tint
from minikv.viz.tables import write

LANE, HEIGHT = 0.27, 0.74  # inches of a lane; how much of it its bar fills
INCHES = 6.3  # that the looks have, about


class Span(NamedTuple):
    """A block that stays what it is from look `first` to look `last`, both included. writer: whose
    tokens it holds. holders: who names it."""

    block_id: int
    first: int
    last: int
    state: str
    writer: str | None
    holders: tuple


def spans_of(looks) -> list[Span]:
    """The bars of the swimlane; a free block that was never written has none."""
    spans = []
    for block_id in range(len(looks[0].blocks)):
        lane = [each.blocks[block_id] for each in looks]
        at = 0
        for (state, holders, writer, _), group in groupby(lane, lambda b: b[:4]):
            length = len(list(group))
            if state != FREE:
                spans.append(Span(block_id, at, at + length - 1, state, writer, holders))
            at += length
    return spans


def block_lives(looks, *, title="The life of every block", until=None):
    """One lane per block, one column per look. Returns (figure, [Span]).

    until: draw the looks up to this one, and leave room for the others. Behind a lane stands which
    free block is taken first, second, … after the last look that is drawn.

    Raises ValueError where there is no look.
    """
    if not looks:
        raise ValueError("there is no look to draw")
    drawn = looks if until is None else looks[: until + 1]
    num_blocks, spans = len(looks[0].blocks), spans_of(drawn)
    names = dict.fromkeys(s.writer for each in looks for s in each.blocks if s.writer)
    colours = {name: colour(i) for i, name in enumerate(names)}
    card, ax = figure(8, 1.75 + LANE * num_blocks, alt=_alt(title, drawn))
    with look():
        ax.add_patch(Rectangle((0, 0), len(looks), num_blocks, facecolor=WHITE, edgecolor="none"))
        edge = {"color": RULE, "linewidth": 0.5, "zorder": 0.9}
        ax.vlines(range(len(looks) + 1), 0, num_blocks, **edge)
        ax.hlines(range(num_blocks + 1), 0, len(looks), **edge)
        for span in spans:
            _draw_span(ax, span, colours[span.writer], INCHES / len(looks))
        for block_id, state in enumerate(drawn[-1].blocks):
            if state.place is not None:
                write(ax, len(looks) + 0.2, block_id + 0.5, _ordinal(state.place), MUTED, ha="left")
        ax.axvline(len(drawn), color=INK, linewidth=1.6)
        width = INCHES / len(looks) * 1.4
        labels = [fitted(each.label, width) if each in drawn else "" for each in looks]
        ax.set_xticks([i + 0.5 for i in range(len(looks))], labels, rotation=35, ha="right",
                      rotation_mode="anchor")  # fmt: skip
        ax.set_yticks([i + 0.5 for i in range(num_blocks)], range(num_blocks))
        ax.set(xlim=(0, len(looks) * 1.09), ylim=(num_blocks, 0), title=title, ylabel="block")
        ax.text(len(looks) * 1.02, -0.35, "taken next", fontsize=8, color=MUTED, ha="center")
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        more = [(Patch(facecolor=WHITE, edgecolor=RULE), "free, and not to be found")]
        legend(card, {LIVE, CACHED}, colours.values(), more, pale=True)
    return card, spans


def lives_player(looks, *, title="The life of every block", milliseconds=900):
    """A Player of the swimlane, one picture per look, named by its label. Its picture: the whole
    swimlane. Raises ValueError where there is no look."""
    if not looks:
        raise ValueError("there is no look to play")
    return play(
        range(len(looks)),
        lambda at: block_lives(looks, title=f"{title}: {looks[at].label}", until=at)[0],
        lambda at: f"{at}: {looks[at].label}",
        name=title,
        picture=block_lives(looks, title=title)[0],
        milliseconds=milliseconds,
    )


def _draw_span(ax, span, of, inches):
    width, y = span.last - span.first + 1, span.block_id + (1 - HEIGHT) / 2
    style = fill(span.state, of, pale=True)
    ax.add_patch(Rectangle((span.first, y), width, HEIGHT, **style))
    edge = {"facecolor": "none", "edgecolor": INK, "linewidth": 0.8}
    ax.add_patch(Rectangle((span.first, y), width, HEIGHT, **edge))
    if span.state == LIVE:
        text, ink = " ".join(span.holders), ink_on(tint(of, PALE))
    else:
        text, ink = f"of {span.writer}", INK
    halo = [] if span.state == LIVE else [withStroke(linewidth=2.4, foreground=WHITE)]
    weight = "bold" if span.state == LIVE else "normal"
    shown = fitted(text, width * inches - 0.06)
    at = span.first + width / 2, span.block_id + 0.52
    write(ax, *at, shown, ink, fontweight=weight, path_effects=halo)


def _ordinal(place):
    return f"{place + 1}."


def _alt(title, looks):
    parts = []
    for block_id, state in enumerate(looks[-1].blocks):
        if state.state == LIVE:
            parts.append(f"block {block_id} is held by {', '.join(state.holders)}")
        elif state.state == CACHED:
            parts.append(f"block {block_id} is cached, with tokens of {state.writer}")
    free = sum(state.state == FREE for state in looks[-1].blocks)
    held = "; ".join(parts) or "no block is held or cached"
    return f"{title}, after {looks[-1].label!r}: {held}; {free} blocks are free without a key."
