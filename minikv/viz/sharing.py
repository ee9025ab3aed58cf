"""Who shares what: the blocks of forks, and of prompts that begin alike.

What several requests hold is drawn once, as high as they are many: a tree that grows to the right.
"""

from typing import NamedTuple

from matplotlib.patches import Patch, Rectangle

from minikv.observe.blocks import CACHED
from minikv.viz.states import EDGE, PALE, fill
from minikv.viz.style import INK, MUTED, RULE, WHITE, Card, colour, figure, is_live, look, tint
from minikv.viz.tables import ROW, WIDTH, frame, outline, token, write

LEFT, LINE = 1.2, 0.34  # inches: left of the tokens, and from one row to the next
MAX_TOKEN = 0.72  # inches
COLOUR_OF_ONE = WHITE  # what nobody shares has no colour


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
    """Blocks as a tree, each with its id and how many tables name it. Returns (figure, [Box]).

    snap: a PoolSnapshot. labels: {request_id: what to write on its tokens}. ref_cnts: of the blocks,
    by block id. Raises ValueError where labels names a request without a table.
    """
    for name in labels:
        if name not in snap.tables:
            raise ValueError(f"request {name!r} holds no table; held: {', '.join(snap.tables)}")
    size, rows, boxes = snap.block_size, list(labels), []
    tables = [list(snap.tables[name]) for name in rows]
    for row, table in enumerate(tables):
        for place, block_id in enumerate(table):
            if row and place < len(tables[row - 1]) and tables[row - 1][place] == block_id:
                continue
            last = row
            while last + 1 < len(rows) and tables[last + 1][place : place + 1] == [block_id]:
                last += 1
            start, name = place * size, rows[row]
            known = labels[name][start : min(start + size, snap.num_live[name])]
            box = Box(f"block {block_id}", (row, last), start, tuple(known), ref_cnts[block_id])
            boxes.append(box)
    longest = max(len(table) for table in tables) * size
    card = _tree(boxes, rows, longest, title, widths=size, what="ref_cnt")
    return card, boxes


# --- prompts that begin alike ------------------------------------------------------------------


def prompt_tree(result, labels, names, *, title):
    """The pieces of a PromptsResult as a tree: blocks, or the nodes of a radix tree. Returns
    (figure, [Box]). labels: of each prompt, what to write on its tokens. names: of each prompt."""
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
            boxes.append(Box(names[piece.owner], ends, piece.start, tokens, len(rows)))
    shown = [f"{names[i]}: {result.num_found[i]} of {result.num_tokens[i]}" for i in order]
    card = _tree(boxes, shown, max(result.num_tokens), title, what="prompts")
    return card, boxes


def _tree_order(pieces):
    """Prompts in the order in which a tree meets them, so that those with a common beginning are
    neighbours."""
    first = {}
    for prompt, of in enumerate(pieces):
        for piece in of:
            first.setdefault(piece, prompt)
    return sorted(range(len(pieces)), key=lambda i: [first[piece] for piece in pieces[i]] + [i])


def _tree(boxes, rows, num_tokens, title, *, what, widths=None):
    height = 0.42 + LINE * len(rows)
    card, ax = figure(8, height + 0.75)
    width = min(MAX_TOKEN, (WIDTH - LEFT - 0.1) / max(1, num_tokens))
    with look():
        for row, name in enumerate(rows):
            write(ax, LEFT - 0.1, _y(row) + ROW / 2, name, INK, ha="right", fontweight="bold")
        for box in boxes:
            _draw_box(ax, box, width, widths)
        shown = [n for n in range(num_tokens) if n % _every(width) == 0]
        for n in shown:
            write(ax, LEFT + width * (n + 0.5), 0.16, n, MUTED)
        write(ax, LEFT - 0.1, 0.16, "position", MUTED, ha="right")
        card.suptitle(title, x=0.012, ha="left", fontsize=10, weight="bold", parse_math=False)
        frame(ax, height)
        handles = [
            Patch(facecolor=tint(colour(0), PALE), label=f"shared; ×: {what} that hold it", **EDGE),
            Patch(facecolor=COLOUR_OF_ONE, label="held by one", **EDGE),
        ]
        card.legend(handles=handles, loc="outside lower center", ncols=2)
    listed = "; ".join(
        f"{' '.join(t.strip() or '␣' for t in b.tokens) or 'nothing yet'} ({b.name}, held by "
        f"{b.num_holders})"
        for b in boxes
    )
    card.alt = f"{title}: {listed}."
    return card


def _y(row):
    return 0.36 + LINE * row


def _every(width):
    return next(n for n in (1, 2, 4, 5, 10, 20, 50, 100) if n * width > 0.22)


def _draw_box(ax, box, width, widths):
    first, last = box.rows
    x, y = LEFT + width * box.start, _y(first)
    wide = width * (widths or len(box.tokens))
    high = LINE * (last - first) + ROW
    of = tint(colour(first), PALE) if box.num_holders > 1 else COLOUR_OF_ONE
    outline(ax, x + 0.015, y, wide - 0.03, high, facecolor=of, linewidth=1.1)
    middle = y + high / 2
    for i, label in enumerate(box.tokens):
        token(ax, x + width * (i + 0.5), middle, label, "live", colour(first), width)
    if box.num_holders > 1:
        note = f"{box.name} ×{box.num_holders}" if widths else f"×{box.num_holders}"
        write(ax, x + wide / 2, y + high - 0.09, note, INK, fontsize=8, fontweight="bold")


# --- write your prompts ------------------------------------------------------------------------


class Row(NamedTuple):
    """A prompt as it was drawn: for each of its blocks (start, end, owner, found)."""

    num_found: int
    blocks: tuple


def prompt_hits(result, labels, names, *, title=None) -> tuple:
    """Prompts in the order in which they came; what is found has the colour of the prompt that
    computed it. Returns (figure, [Row])."""
    total, found = sum(result.num_tokens), sum(result.num_found)
    title = title or f"Blocks of {result.block_size}: {found} of {total} tokens are found"
    rows, height = [], 0.42 + LINE * len(names)
    card, ax = figure(8, height + 0.8)
    width = min(MAX_TOKEN, (WIDTH - LEFT - 0.1) / max(1, *result.num_tokens))
    with look():
        for prompt, name in enumerate(names):
            rows.append(_draw_prompt(ax, result, prompt, name, labels[prompt], width))
        write(ax, LEFT - 0.1, 0.16, "found of all", MUTED, ha="right")
        card.suptitle(title, x=0.012, ha="left", fontsize=10, weight="bold", parse_math=False)
        frame(ax, height)
        shared = {piece.owner for of in result.pieces for piece in of if len(piece.holders) > 1}
        colours = [colour(owner) for owner in sorted(shared)][:3] or [colour(0)]
        handles = [
            Patch(facecolor=tint(colours[0], PALE), label="computed, and found later", **EDGE),
            Patch(label="found: not computed again", **fill(CACHED, colours[0]) | EDGE),
            Patch(facecolor=WHITE, label="computed, and never found", **EDGE),
        ]
        card.legend(handles=handles, loc="outside lower center", ncols=3)
    card.alt = title + ". " + " ".join(
        f"{name}: {result.num_found[i]} of {result.num_tokens[i]} tokens are found"
        f"{_from_whom(rows[i], names)}."
        for i, name in enumerate(names)
    )  # fmt: skip
    return card, rows


def _from_whom(row, names):
    owners = list(dict.fromkeys(names[owner] for *_, owner, found in row.blocks if found))
    return f", computed by {', '.join(owners)}" if owners else ""


def _draw_prompt(ax, result, prompt, name, labels, width):
    y, blocks = _y(prompt), []
    found, total = result.num_found[prompt], result.num_tokens[prompt]
    write(ax, LEFT - 0.1, y + ROW / 2, f"{name}  {found}/{total}", INK, ha="right",
          fontweight="bold")  # fmt: skip
    for piece in result.pieces[prompt]:
        is_found, of = piece.start < found, colour(piece.owner)
        x, wide = LEFT + width * piece.start, width * (piece.end - piece.start)
        shared = len(piece.holders) > 1
        if is_found:
            style = fill(CACHED, of)
        else:
            style = {"facecolor": tint(of, PALE) if shared else WHITE}
        ax.add_patch(Rectangle((x, y), wide, ROW, **style))
        for n in range(piece.start, piece.end):
            state = None if is_found else "live"
            ax.add_patch(Rectangle((LEFT + width * n, y), width, ROW, facecolor="none",
                                   edgecolor=RULE, linewidth=0.5))  # fmt: skip
            token(ax, LEFT + width * (n + 0.5), y + ROW / 2, labels[n], state, of, width)
        outline(ax, x, y, wide, linewidth=1.2)
        blocks.append((piece.start, piece.end, piece.owner, is_found))
    return Row(found, tuple(blocks))
