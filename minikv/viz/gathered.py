"""What gather attention copies: the blocks of each request, from where they lie into one rectangle.

Drawn from a PoolSnapshot's tables and nothing else.
"""

from typing import NamedTuple

from matplotlib.patches import FancyArrowPatch, Patch
from matplotlib.path import Path
from matplotlib.patheffects import withStroke

from minikv.observe.pool import FREE, INTERNAL, LIVE, slots_of
from minikv.observe.tokens import PAD, translate
from minikv.viz.states import EDGE, OTHER, OTHER_FACE, fill, legend
from minikv.viz.style import CARD, INK, MUTED, colour, figure, look
from minikv.viz.tables import (
    ROW,
    WIDTH,
    cell,
    frame,
    outline,
    token,
    write,
)

PER_LINE = 16  # slots of the pool in a line, about
LEFT, LINE_GAP, BETWEEN, ROW_GAP = 0.95, 0.24, 0.75, 0.2  # inches
STRAIGHT = 0.16  # inches above the first copy from which all arrows are upright


class GatheredBlock(NamedTuple):
    """One block of the copy. block_id: where it came from; the pool's number of blocks, which no
    manager knows, where a table was too short. num_written: slots with keys and values in it."""

    request_id: str
    place: int
    block_id: int
    num_written: int


def gathered_blocks(snap, names) -> list[GatheredBlock]:
    """What is copied for a step of these requests: each table as long as the longest."""
    longest = max(-(-snap.num_live[name] // snap.block_size) for name in names)
    blocks = []
    for name in names:
        for place in range(longest):
            written = min(max(0, snap.num_live[name] - place * snap.block_size), snap.block_size)
            block_id = snap.tables[name][place] if written else snap.num_blocks
            blocks.append(GatheredBlock(name, place, block_id, written))
    return blocks


def gather_map(snap, labels, *, title="What gather copies"):
    """The pool above, the copy below, an arrow for every block. Returns (figure,
    [GatheredBlock]). labels: {request_id: what to write on its tokens}, as for block_table_map.

    Raises ValueError where there is no request, or one without keys and values.
    """
    if not labels or not all(snap.num_live.get(name) for name in labels):
        raise ValueError(f"requests {', '.join(labels) or 'none'}: each must have K and V")
    blocks, size = gathered_blocks(snap, labels), snap.block_size
    per_line = max(1, PER_LINE // size)
    num_lines = -(-(snap.num_blocks + 1) // per_line)
    pool_height = 0.25 + num_lines * (ROW + LINE_GAP)
    height = pool_height + BETWEEN + len(labels) * (ROW + ROW_GAP) + 0.1
    card, ax = figure(8, height + 0.85)
    width = (WIDTH - LEFT - 0.1) / (per_line * size)
    colours = {name: colour(i) for i, name in enumerate(labels)}

    def corner(block_id):
        line, place = divmod(block_id, per_line)
        return LEFT + place * size * width, 0.25 + line * (ROW + LINE_GAP)

    with look():
        _draw_pool(ax, snap, labels, colours, corner, width)
        places = {
            name: pool_height + BETWEEN + i * (ROW + ROW_GAP) for i, name in enumerate(labels)
        }
        write(ax, LEFT - 0.1, 0.25 + ROW / 2, "the pool", MUTED, ha="right")
        corners = [(LEFT + b.place * size * width, places[b.request_id]) for b in blocks]
        # Each request's arrows have a place of their own in a block, so that an arrow that goes on
        # behind the copies above is not taken for one that ends there.
        entry = {name: (i + 1) / (len(labels) + 1) for i, name in enumerate(labels)}
        above = min(places.values()) - STRAIGHT
        for block, (x, y) in zip(blocks, corners, strict=True):
            from_x, from_y = corner(block.block_id)
            inwards = entry[block.request_id] * size * width
            _curve(ax, (from_x + inwards, from_y + ROW), (x + inwards, y), above, block, colours)
        for block, at in zip(blocks, corners, strict=True):  # over the arrows to the rows below
            _draw_copy(ax, snap, block, labels, colours[block.request_id], at, width)
        for name, y in places.items():
            write(ax, LEFT - 0.1, y + ROW / 2, f"copy of {name}", INK, ha="right")
        card.suptitle(title, x=0.012, ha="left", fontsize=10, weight="bold", parse_math=False)
        frame(ax, height)
        unwritten = tuple(Patch(**fill(INTERNAL, of) | EDGE) for of in list(colours.values())[:3])
        more = [(unwritten, "held, but not written yet")]
        legend(card, {LIVE, PAD, OTHER, FREE}, colours.values(), more, pale=True)
    listed = ", ".join(
        f"{b.request_id} {b.place} from {'padding' if not b.num_written else b.block_id} "
        f"({b.num_written} of {size} written)"
        for b in blocks
    )
    card.alt = f"{title}: {listed}."
    return card, blocks


def _draw_pool(ax, snap, labels, colours, corner, width):
    size, slots = snap.block_size, slots_of(snap)
    texts = {
        translate(snap, name, position).slot: of[position]
        for name, of in labels.items()
        for position in range(min(len(of), snap.num_live[name]))
    }
    for block_id in range(snap.num_blocks + 1):
        x, y = corner(block_id)
        if block_id == snap.num_blocks:
            outline(ax, x, y, width * size, **_padding(0.8))
            _number(ax, x + width * size / 2, y, "padding")
            continue
        _number(ax, x + width * size / 2, y, block_id)
        for offset in range(size):
            slot, at = block_id * size + offset, x + width * offset
            owner = slots.owners[slot]
            if owner is not None and owner not in labels:
                outline(ax, at, y, width, facecolor=OTHER_FACE, linewidth=0)
                continue
            # What is reserved is unwritten, as is the rest of a block: a copy takes both.
            state = slots.states[slot] if slots.states[slot] in (LIVE, FREE) else INTERNAL
            cell(ax, at, y, width, state, colours.get(owner, MUTED))
            if slot in texts:
                token(ax, at + width / 2, y + ROW / 2, texts[slot], LIVE, colours[owner], width)
        outline(ax, x, y, width * size, linewidth=0.8)


def _padding(linewidth):
    return fill(PAD, MUTED) | {"edgecolor": INK, "linewidth": linewidth}


def _number(ax, x, y, text):
    """Over the arrows, which would make it unreadable."""
    halo = [withStroke(linewidth=3, foreground=CARD)]
    write(ax, x, y - 0.07, text, MUTED, fontsize=8, zorder=4, path_effects=halo)


def _draw_copy(ax, snap, block, labels, of, at, width):
    (x, y), size = at, snap.block_size
    for offset in range(size):
        position = block.place * size + offset
        if not block.num_written:
            outline(ax, x, y, width * size, **_padding(0.6))
        else:
            state = LIVE if offset < block.num_written else INTERNAL
            cell(ax, x + width * offset, y, width, state, of)
            if state == LIVE and position < len(labels[block.request_id]):
                label = labels[block.request_id][position]
                token(ax, x + width * (offset + 0.5), y + ROW / 2, label, LIVE, of, width)
    outline(ax, x, y, width * size)


def _curve(ax, start, end, above, block, colours):
    """An arrow that leaves upright, over the pool's other lines, and is upright from `above` on."""
    (x0, y0), (x1, y1) = start, end
    bend = (above - y0) * 0.5
    path = Path(
        [(x0, y0), (x0, y0 + bend), (x1, above - bend), (x1, above), (x1, y1)],
        [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4, Path.LINETO],
    )
    arrow = FancyArrowPatch(
        path=path, arrowstyle="-|>,head_length=4.5,head_width=2.2", linewidth=1.4, shrinkA=0,
        shrinkB=0, color=colours[block.request_id] if block.num_written else MUTED,
    )  # fmt: skip
    arrow.set_path_effects([withStroke(linewidth=3.2, foreground=CARD)])
    ax.add_patch(arrow)
