"""The translation board: one token's way from its position to its slot.

Drawn from a PoolSnapshot's table and nothing else.
"""

from matplotlib.patches import Patch

from minikv.observe.pool import FREE, INTERNAL, LIVE, RESERVED, slots_of
from minikv.observe.tokens import translate
from minikv.viz.player import play
from minikv.viz.states import OTHER, OTHER_FACE, PALE, legend
from minikv.viz.style import INK, MUTED, WHITE, colour, figure, ink_on, look, tint
from minikv.viz.tables import (
    ROW,
    WIDTH,
    cell,
    frame,
    outline,
    token,
    unwritten,
    write,
)

LEFT, TABLE_X = 0.62, 1.05
MEMORY_WIDTH = 5.1
TOP, LINE_GAP = 1.75, 0.26  # inches: where table and memory begin, and between lines of memory
IN_X, OUT_X, TURN_Y = 0.5, 1.85, 1.05  # the corners of a token's way
LINE = {"color": INK, "linewidth": 1.6, "solid_joinstyle": "round"}


def translation(snap, request_id, labels, position, *, title=None):
    """The way of one token from its position to its slot, and the slots of all before it.

    labels: what to write on the request's tokens. Returns (figure, Translation).

    Raises ValueError for a position without a slot.
    """
    found = translate(snap, request_id, position)
    table, of = snap.tables[request_id], colour(0)
    per_line = _slots_per_line(snap)
    num_lines = -(-snap.num_blocks * snap.block_size // per_line)
    height = TOP + max(0.29 * len(table), (ROW + LINE_GAP) * num_lines - LINE_GAP) + 0.08
    card, ax = figure(8, height + 0.9)
    with look():
        token_x = _draw_tokens(ax, snap, request_id, labels, found, of)
        row_in, row_out = _draw_table(ax, table, found, of)
        slot_xy = _draw_memory(ax, snap, request_id, found, of, per_line)
        _draw_way(ax, token_x, row_in, row_out, slot_xy)
        p, b, o, block_id, slot = found
        size = snap.block_size
        sums = (
            f"position {p} = {b} × {size} + {o},    block table[{b}] = {block_id},    "
            f"slot = {block_id} × {size} + {o} = {slot}"
        )
        write(ax, 0.7, 1.3, sums, INK, ha="left", fontsize=9, fontweight="bold")
        heading = title or f"Token {p} of {request_id}"
        card.suptitle(heading, x=0.012, ha="left", fontsize=10, weight="bold", parse_math=False)
        frame(ax, height)
        slots = slots_of(snap)
        states = {s for s, o in zip(slots.states, slots.owners, strict=True) if o == request_id}
        states |= {OTHER} if set(slots.requests) - {request_id} else set()
        more = [(Patch(facecolor=INK), "its slot")]
        if len(labels) > snap.num_live[request_id]:
            more.append((unwritten(), "no K and V yet"))
        legend(card, states | ({FREE} & set(slots.states)), [of], more, pale=True)
    card.alt = (
        f"Token {p} of {request_id!r} is at offset {o} of logical block {b}; row {b} of the block "
        f"table names block {block_id}; its slot is {slot}."
    )
    return card, found


def translation_player(snap, request_id, labels, *, milliseconds=700):
    """A Player of the board, one picture per token, named by its position. Its picture: the board
    of the last token with keys and values, which shows the slots of all."""
    count = min(len(labels), snap.num_live[request_id])
    return play(
        range(count),
        lambda position: translation(snap, request_id, labels, position)[0],
        lambda position: f"token {position}",
        name=f"The translation board of {request_id}, token by token",
        picture=translation(snap, request_id, labels, count - 1)[0],
        milliseconds=milliseconds,
    )


def _slots_per_line(snap):
    """Whole blocks, at most 24 slots."""
    return max(1, 24 // snap.block_size) * snap.block_size


def _draw_tokens(ax, snap, request_id, labels, found, of):
    """The sequence, its positions above and below it the slots found so far."""
    size, live = snap.block_size, snap.num_live[request_id]
    num_slots = len(snap.tables[request_id]) * size
    count = max(len(labels), num_slots)
    width = min(0.58, (WIDTH - LEFT - 0.1) / count)
    for y, text in ((0.1, "position"), (0.36, request_id), (0.62, "slot")):
        bold = {"fontweight": "bold", "color": INK} if text == request_id else {"color": MUTED}
        ax.text(LEFT - 0.1, y, text, ha="right", va="center", fontsize=8, parse_math=False, **bold)
    for p in range(count):
        x, here = LEFT + width * p, p == found.position
        most = snap.max_live[request_id]
        state = LIVE if p < live else RESERVED if p < most else INTERNAL
        state = state if p < num_slots else None
        ink, weight = (INK, "bold") if here else (MUTED, "normal")
        write(ax, x + width / 2, 0.1, p, ink, fontweight=weight)
        cell(ax, x, 0.23, width, state, of)
        if p < len(labels):
            token(ax, x + width / 2, 0.23 + ROW / 2, labels[p], state, of, width)
            if state != LIVE:
                edge = {"linestyle": (0, (3, 2)), "linewidth": 0.9}
                outline(ax, x + 0.02, 0.25, width - 0.04, ROW - 0.04, **edge)
        if p <= found.position:
            slot = translate(snap, request_id, p).slot
            write(ax, x + width / 2, 0.62, slot, ink, fontweight=weight)
    for block in range(num_slots // size):
        x = LEFT + width * size * block
        outline(ax, x, 0.23, width * size)
        write(ax, x + width * size / 2, 0.83, f"logical block {block}", MUTED)
    x = LEFT + width * found.position
    outline(ax, x, 0.23, width, linewidth=2.2)
    return x + width / 2


def _draw_table(ax, table, found, of):
    """Returns where the way enters the row, and where it leaves it."""
    write(ax, TABLE_X + 0.24, TOP - 0.14, "block table", MUTED, fontsize=8)
    for row, block_id in enumerate(table):
        y, here = TOP + 0.29 * row, row == found.logical_block
        face = tint(of, PALE) if here else WHITE
        outline(ax, TABLE_X, y, 0.48, facecolor=face, linewidth=2.2 if here else 0.9)
        weight = "bold" if here else "normal"
        ink = ink_on(face) if here else INK
        write(ax, TABLE_X + 0.24, y + ROW / 2, block_id, ink, fontsize=9, fontweight=weight)
        write(ax, TABLE_X - 0.13, y + ROW / 2, row, MUTED, fontweight=weight)
    y = TOP + 0.29 * found.logical_block + ROW / 2
    return (TABLE_X - 0.24, y), (TABLE_X + 0.48, y)


def _draw_memory(ax, snap, request_id, found, of, per_line):
    """The pool, in lines of slots. Returns the place of the token's slot."""
    size, slots = snap.block_size, slots_of(snap)
    width, x0 = MEMORY_WIDTH / per_line, WIDTH - MEMORY_WIDTH - 0.08
    for first in range(0, len(slots.states), per_line):
        y = TOP + (ROW + LINE_GAP) * (first // per_line)
        write(ax, x0 - 0.06, y + ROW / 2, f"slot {first}", MUTED, ha="right")
        for start in range(first, min(first + per_line, len(slots.states)), size):
            x = x0 + width * (start - first)
            for slot in range(start, start + size):
                owner, at = slots.owners[slot], x + width * (slot - start)
                if owner in (None, request_id):
                    cell(ax, at, y, width, slots.states[slot], of)
                else:
                    outline(ax, at, y, width, facecolor=OTHER_FACE, linewidth=0)
            here = start // size == found.block_id
            outline(ax, x, y, width * size, linewidth=1.8 if here else 0.8)
            write(ax, x + width * size / 2, y - 0.06, start // size, MUTED)
    line, place = divmod(found.slot, per_line)
    x, y = x0 + width * place, TOP + (ROW + LINE_GAP) * line
    outline(ax, x, y, width, facecolor=INK)
    return x + width / 2, y


def _draw_way(ax, token_x, row_in, row_out, slot_xy):
    """From the token to its row of the table, and from there into the slot, level and upright."""
    ax.plot([token_x, token_x, IN_X, IN_X], [0.92, TURN_Y, TURN_Y, row_in[1]], **LINE)
    _head(ax, (IN_X, row_in[1]), row_in)
    lane = slot_xy[1] - 0.17
    xs = [row_out[0], OUT_X, OUT_X, slot_xy[0], slot_xy[0]]
    ax.plot(xs, [row_out[1], row_out[1], lane, lane, lane + 0.03], **LINE)
    _head(ax, (slot_xy[0], lane), slot_xy)


def _head(ax, start, end):
    arrow = {"arrowstyle": "-|>,head_length=0.45,head_width=0.22", "shrinkA": 0, "shrinkB": 0}
    style = {"color": INK, "linewidth": LINE["linewidth"]}
    ax.annotate("", end, start, arrowprops=arrow | style)
