"""Block tables: which block of the pool holds which part of a sequence, and one token's way there.

Drawn from a PoolSnapshot's tables and nothing else.
"""

from typing import NamedTuple

from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from matplotlib.path import Path
from matplotlib.patheffects import withStroke

from minikv.observe.pool import FREE, INTERNAL, LIVE, RESERVED, slots_of
from minikv.observe.tokens import translate
from minikv.viz.states import OTHER, OTHER_FACE, PALE, fill, legend
from minikv.viz.style import (
    CARD,
    INK,
    MUTED,
    RULE,
    WHITE,
    colour,
    figure,
    fitted,
    ink_on,
    look,
    tint,
)

ROW, GAP = 0.25, 0.075  # inches: a block's height, and between two of them
WIDTH = 7.8


class Arrow(NamedTuple):
    """One entry of a block table. num_live: tokens with keys and values in the block."""

    request_id: str
    logical_block: int
    block_id: int
    num_live: int


# --- all tables of a moment --------------------------------------------------------------------


def block_table_map(snap, labels, *, title="Block tables"):
    """Sequences on the left, in order; the pool on the right, as it lies; between them the block
    tables, an arrow for every entry. Returns (figure, [Arrow]).

    snap: a PoolSnapshot. labels: {request_id: what to write on its tokens}, as labels_of gives
    them; tokens beyond the snapshot's num_live have no keys and values, and are drawn dashed.
    Whoever else holds a table is drawn as another request.
    """
    if not labels:
        raise ValueError("there is no table to draw: labels names no request")
    for name in labels:
        if name not in snap.tables:
            raise ValueError(f"request {name!r} holds no table; held: {', '.join(snap.tables)}")
    size, arrows = snap.block_size, []
    rows = {name: max(len(snap.tables[name]), -(-len(of) // size)) for name, of in labels.items()}
    left = sum(rows.values()) * (ROW + GAP) + 0.34 * len(rows)
    height = max(left, snap.num_blocks * (ROW + GAP)) + 0.3
    card, ax = figure(8, height + 0.7)
    width = min(0.52, 2.35 / size)
    places = {"cells": 0.32, "table": 0.32 + width * size + 0.3, "width": width}
    places |= {"pool": WIDTH - width * size - 0.05, "ids": WIDTH - width * size - 0.4}
    colours = {name: colour(i) for i, name in enumerate(labels)}
    with look():
        _heads(ax, places, size)
        _draw_pool(ax, snap, labels, colours, places)
        y = 0.3 + max(0.0, (height - 0.3 - left) / (len(rows) + 1))
        for name, tokens in labels.items():
            arrows += _draw_sequence(ax, snap, name, tokens, colours[name], places, y)
            y += rows[name] * (ROW + GAP) + 0.34
            y += max(0.0, (height - 0.3 - left) / (len(rows) + 1))
        card.suptitle(title, x=0.012, ha="left", fontsize=10, weight="bold", parse_math=False)
        frame(ax, height)
        _legend(card, snap, labels, colours)
    card.alt = _alt(snap, arrows)
    return card, arrows


def _heads(ax, places, size):
    for x, text in (
        (places["cells"], "sequence, in blocks of " + str(size)),
        (places["table"] - 0.06, "block table"),
        (places["ids"] - 0.05, "the pool's blocks"),
    ):
        ax.text(x, 0.16, text, fontsize=8, color=MUTED, va="center")


def _draw_sequence(ax, snap, name, tokens, of, places, top):
    """Logical blocks with their tokens, the table's rows, and the arrows that leave them."""
    width = places["width"]
    table, size, live = snap.tables[name], snap.block_size, snap.num_live[name]
    most, arrows = snap.max_live[name], []
    write(ax, places["cells"], top + 0.12, name, INK, ha="left", fontweight="bold", fontsize=9)
    num_rows = max(len(table), -(-len(tokens) // size))
    for block in range(num_rows):
        y = top + 0.26 + block * (ROW + GAP)
        write(ax, places["cells"] - 0.13, y + ROW / 2, block, MUTED, fontsize=8)
        for offset in range(size):
            position = block * size + offset
            known, x = position < len(tokens), places["cells"] + width * offset
            if position < live:
                state = LIVE
            elif block < len(table):
                state = RESERVED if position < most else INTERNAL
            elif known:
                state = None  # no block yet
            else:
                continue
            cell(ax, x, y, width, state, of)
            if known:
                token(ax, x + width / 2, y + ROW / 2, tokens[position], state, of, width)
                if state != LIVE:
                    edge = {"facecolor": "none", "edgecolor": INK, "linestyle": (0, (3, 2))}
                    ax.add_patch(
                        Rectangle((x + 0.015, y + 0.015), width - 0.03, ROW - 0.03, **edge)
                    )
        held = block < len(table)
        if held:
            outline(ax, places["cells"], y, width * size)
        x = places["table"]
        face = {"facecolor": tint(of, PALE) if held else WHITE, "edgecolor": INK}
        line = {} if held else {"linestyle": (0, (3, 2))}
        ax.add_patch(Rectangle((x, y), 0.4, ROW, linewidth=0.9, **face, **line))
        shown = table[block] if held else "none"
        ink = ink_on(tint(of, PALE)) if held else MUTED
        write(ax, x + 0.2, y + ROW / 2, shown, ink, fontsize=8.5 if held else 8)
        write(ax, x - 0.15, y + ROW / 2, block, MUTED, fontsize=8)
        if held:
            in_block = min(max(0, live - block * size), size)
            arrows.append(Arrow(name, block, table[block], in_block))
            curve(ax, (x + 0.4, y + ROW / 2), (places["ids"], _pool_y(table[block])), of)
    return arrows


def _pool_y(block_id):
    return 0.3 + block_id * (ROW + GAP) + ROW / 2


def _draw_pool(ax, snap, labels, colours, places):
    width, size, slots = places["width"], snap.block_size, slots_of(snap)
    texts = {}
    for name, tokens in labels.items():
        for position in range(min(len(tokens), snap.num_live[name])):
            texts[translate(snap, name, position).slot] = tokens[position]
    for block_id in range(snap.num_blocks):
        y = _pool_y(block_id) - ROW / 2
        write(ax, places["pool"] - 0.18, y + ROW / 2, block_id, MUTED, fontsize=8)
        owner = next((o for o in slots.owners[block_id * size : (block_id + 1) * size] if o), None)
        for offset in range(size):
            slot, x = block_id * size + offset, places["pool"] + width * offset
            if owner is not None and owner not in labels:
                ax.add_patch(Rectangle((x, y), width, ROW, facecolor=OTHER_FACE, edgecolor="none"))
                continue
            of = colours.get(owner, MUTED)
            cell(ax, x, y, width, slots.states[slot], of)
            if slot in texts:
                token(ax, x + width / 2, y + ROW / 2, texts[slot], LIVE, of, width)
        if owner is not None and owner not in labels:
            middle = places["pool"] + width * size / 2
            write(ax, middle, y + ROW / 2, owner, ink_on(OTHER_FACE))
        outline(ax, places["pool"], y, width * size)


# --- parts that the translation board has, too -------------------------------------------------


def cell(ax, x, y, width, state, of):
    """One slot. state: None for a token that has none."""
    style = fill(state, of, pale=True) if state else {"facecolor": WHITE}
    style = style | ({"edgecolor": RULE, "linewidth": 0.5} if state else {"edgecolor": "none"})
    ax.add_patch(Rectangle((x, y), width, ROW, **style))


def token(ax, x, y, label, state, of, width):
    """A label, as much of it as its cell has room for."""
    shown = fitted(label.replace("\n", "↵").strip(" ") or "␣", width - 0.02)
    ink = ink_on(tint(of, PALE)) if state == LIVE else INK
    halo = [] if state == LIVE else [withStroke(linewidth=2.2, foreground=WHITE)]
    write(ax, x, y, shown, ink, path_effects=halo)


def outline(ax, x, y, width, height=ROW, **style):
    edge = {"facecolor": "none", "edgecolor": INK, "linewidth": 0.9}
    ax.add_patch(Rectangle((x, y), width, height, **(edge | style)))


def curve(ax, start, end, of, *, linewidth=1.4):
    """An arrow that leaves and arrives level, with an edge that keeps crossing ones apart."""
    (x0, y0), (x1, y1) = start, end
    bend = (x1 - x0) * 0.55
    path = Path(
        [(x0, y0), (x0 + bend, y0), (x1 - bend, y1), (x1, y1)],
        [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4],
    )
    arrow = FancyArrowPatch(
        path=path,
        arrowstyle="-|>,head_length=4.5,head_width=2.2",
        color=of,
        linewidth=linewidth,
        shrinkA=0,
        shrinkB=0,
        zorder=0.9,  # below the boxes that it joins
    )
    arrow.set_path_effects([withStroke(linewidth=linewidth + 2, foreground=CARD)])
    ax.add_patch(arrow)


def write(ax, x, y, text, ink, **options):
    options = {"ha": "center", "va": "center", "fontsize": 8, "parse_math": False} | options
    ax.text(x, y, text, color=ink, **options)


def frame(ax, height):
    """Axes in inches, from the top left."""
    ax.set(xlim=(0, WIDTH), ylim=(height, 0), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def unwritten():
    """The legend's mark of a token that is known, but has no keys and values."""
    return Patch(facecolor=WHITE, edgecolor=INK, linestyle=(0, (3, 2)))


def _legend(card, snap, labels, colours):
    slots = slots_of(snap)
    states = {s for s, o in zip(slots.states, slots.owners, strict=True) if o in labels}
    states |= {OTHER} if set(slots.requests) - set(labels) else set()
    states |= {FREE} if FREE in slots.states else set()
    more = []
    if any(len(of) > snap.num_live[name] for name, of in labels.items()):
        more.append((unwritten(), "no K and V yet"))
    legend(card, states, colours.values(), more, pale=True)


def _alt(snap, arrows):
    parts = []
    for name in dict.fromkeys(arrow.request_id for arrow in arrows):
        own = [arrow for arrow in arrows if arrow.request_id == name]
        entries = ", ".join(
            f"logical block {a.logical_block} is block {a.block_id} ({a.num_live} of "
            f"{snap.block_size} slots filled)"
            for a in own
        )
        parts.append(f"The block table of {name!r}: {entries}.")
    held = {block_id for table in snap.tables.values() for block_id in table}
    parts.append(f"{snap.num_blocks - len(held)} of the pool's {snap.num_blocks} blocks are free.")
    return " ".join(parts)
