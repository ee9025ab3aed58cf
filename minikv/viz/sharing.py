"""Who shares what: the blocks of forks, and of prompts that begin alike.

What several requests hold is drawn once, as high as they are many: a tree that grows to the right.
"""

from typing import NamedTuple

from matplotlib.patches import Patch

from minikv.observe.pool import LIVE
from minikv.viz.states import EDGE, PALE
from minikv.viz.style import INK, MUTED, WHITE, colour, figure, look, tint
from minikv.viz.tables import ROW, WIDTH, frame, outline, token, write

LEFT, LINE, NOTED = 1.2, 0.34, 0.52  # inches: left of the tokens, from row to row; with a note
MAX_TOKEN, MIN_TOKEN = 0.72, 0.16  # inches of a token; in less there is no room for its label
NAMES = "ABCDEFGHIJKL"  # of prompts, in the order in which they come


class Box(NamedTuple):
    """What is drawn once. rows: the first and the last line that it spans. start: its first token.
    tokens: what stands in it. num_holders: the number in it; a block's ref_cnt."""

    name: str
    rows: tuple
    start: int
    tokens: tuple
    num_holders: int


# --- forks -------------------------------------------------------------------------------------


def fork_tree(snap, labels, ref_cnts, *, title="What the forks share"):
    """Blocks as a tree, each with its id and its ref_cnt. Returns (figure, [Box]).

    snap: a PoolSnapshot. labels: {request_id: what to write on its tokens}. ref_cnts: by block id,
    how many tables name it. Raises ValueError where labels names a request without a table.
    """
    for name in labels:
        if name not in snap.tables:
            raise ValueError(f"request {name!r} holds no table; held: {', '.join(snap.tables)}")
    size, names = snap.block_size, list(labels)
    order = _tree_order([snap.tables[name] for name in names])
    rows = [names[i] for i in order]
    tables, boxes = [list(snap.tables[name]) for name in rows], []
    for row, table in enumerate(tables):
        for place, block_id in enumerate(table):
            if row and tables[row - 1][place : place + 1] == [block_id]:
                continue
            last = row
            while last + 1 < len(rows) and tables[last + 1][place : place + 1] == [block_id]:
                last += 1
            # Of its holders, whoever has written most of it.
            most = max(rows[row : last + 1], key=lambda each: snap.num_live[each])
            start, end = place * size, min((place + 1) * size, snap.num_live[most])
            known = tuple(labels[most][start:end])
            boxes.append(Box(f"block {block_id}", (row, last), start, known, ref_cnts[block_id]))
    longest = max(len(table) for table in tables) * size
    return _tree(boxes, rows, longest, title, block_size=size), boxes


# --- prompts that begin alike ------------------------------------------------------------------


def prompt_tree(result, labels, *, title):
    """The pieces of a PromptsResult as a tree: blocks, or the nodes of a radix tree. Returns
    (figure, [Box]). labels: of each prompt, what to write on its tokens. Beside a prompt stands how
    many of its tokens were found."""
    order = _tree_order(result.pieces)
    place = {prompt: row for row, prompt in enumerate(order)}
    boxes, seen = [], set()
    for prompt in order:
        for piece in result.pieces[prompt]:
            if piece in seen:
                continue
            seen.add(piece)
            rows = sorted(place[holder] for holder in piece.holders)
            tokens = tuple(labels[prompt][piece.start : piece.end])
            ends = rows[0], rows[-1]
            boxes.append(Box(NAMES[piece.owner], ends, piece.start, tokens, len(rows)))
    shown = [f"{NAMES[i]}: {result.num_found[i]} of {result.num_tokens[i]}" for i in order]
    card = _tree(boxes, shown, max(result.num_tokens), title)
    return card, boxes


def _tree_order(pieces):
    """Prompts in the order in which a tree meets them, so that those with a common beginning are
    neighbours."""
    first = {}
    for prompt, of in enumerate(pieces):
        for piece in of:
            first.setdefault(piece, prompt)
    return sorted(range(len(pieces)), key=lambda i: [first[piece] for piece in pieces[i]] + [i])


def _tree(boxes, rows, num_tokens, title, *, block_size=None):
    """block_size: draw whole blocks, and a note in each. Else a piece is as wide as its tokens, and
    only what is shared has a note."""
    line = NOTED if block_size else LINE
    height = 0.42 + line * len(rows)
    card, ax = figure(8, height + 0.75)
    width = min(MAX_TOKEN, (WIDTH - LEFT - 0.1) / max(1, num_tokens))
    with look():
        for row, name in enumerate(rows):
            y = 0.36 + line * row + (line - LINE + ROW) / 2
            write(ax, LEFT - 0.1, y, name, INK, ha="right", fontweight="bold")
        for box in boxes:
            _draw_box(ax, box, width, line, block_size)
        for n in range(num_tokens):
            if n % _every(width) == 0:
                write(ax, LEFT + width * (n + 0.5), 0.16, n, MUTED)
        write(ax, LEFT - 0.1, 0.16, "position", MUTED, ha="right")
        card.suptitle(title, x=0.012, ha="left", fontsize=10, weight="bold", parse_math=False)
        frame(ax, height)
        who = "tables that name it (ref_cnt)" if block_size else "prompts that have it"
        handles = [
            Patch(facecolor=tint(colour(0), PALE), label=f"shared; ×: {who}", **EDGE),
            Patch(facecolor=WHITE, label="not shared", **EDGE),
        ]
        card.legend(handles=handles, loc="outside lower center", ncols=2)
    listed = "; ".join(
        f"{' '.join(t.strip() or '␣' for t in b.tokens) or 'nothing yet'} ({b.name}, "
        f"×{b.num_holders})"
        for b in boxes
    )
    card.alt = f"{title}: {listed}."
    return card


def _every(width):
    return next(n for n in (1, 2, 4, 5, 10, 20, 50, 100) if n * width > 0.22)


def _draw_box(ax, box, width, line, block_size):
    first, last = box.rows
    x, y = LEFT + width * box.start, 0.36 + line * first
    wide = width * (block_size or len(box.tokens))
    high = line * (last - first + 1) - (LINE - ROW)
    shared = box.num_holders > 1
    face = tint(colour(first), PALE) if shared else WHITE
    outline(ax, x + 0.015, y, wide - 0.03, high, facecolor=face, linewidth=1.1)
    middle = y + high / 2 - (0.1 if block_size else 0)
    for i, label in enumerate(box.tokens if width >= MIN_TOKEN else ()):
        token(ax, x + width * (i + 0.5), middle, label, LIVE, colour(first), width)
    if block_size or shared:
        note = f"{box.name} ×{box.num_holders}" if block_size else f"×{box.num_holders}"
        below = middle + 0.2 if block_size else y + high - 0.09
        write(ax, x + wide / 2, below, note, INK, fontweight="bold")
