"""Which request holds which slots of the KV pool: one moment, or one row per step.

Drawn from snapshots (minikv.observe) and nothing else.
"""

from itertools import groupby

from matplotlib.patches import Patch, Rectangle

from minikv.observe.pool import FREE, INTERNAL, LIVE, RESERVED, slots_of
from minikv.viz.states import EDGE, fill, legend
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

STATES = (LIVE, RESERVED, INTERNAL, FREE)
MAX_SLOT_LINES = 1024  # a line per slot, and per block, only while they can be told apart
MAX_BLOCK_LINES = 256
TOKEN_MAP = 7.2  # inches that token_map's slots have, about


# --- the figures -------------------------------------------------------------------------------


def pool_map(snap, *, blocks_per_row=None, names=None):
    """The whole pool at one moment, in rows of blocks. Returns (figure, Slots)."""
    slots = slots_of(snap)
    blocks_per_row = blocks_per_row or _blocks_per_row(snap.num_blocks)
    num_rows = -(-snap.num_blocks // blocks_per_row)
    card, axes = figure(8, 1.35 + 0.42 * num_rows, alt=_alt(snap, slots))
    with look():
        _draw_map(axes, snap, slots, blocks_per_row, _colours(names or slots.requests))
        axes.set_title(f"The pool after step {snap.step}")
        legend(card, STATES, _colours(names or slots.requests).values())
    return card, slots


def pool_at_steps(snapshots, *, count=4, blocks_per_row=None):
    """The pool at a few moments, evenly spread. Returns (figure, [Slots of each])."""
    chosen = _spread(snapshots, count)
    drawn = [slots_of(snap) for snap in chosen]
    colours = _colours(_names(slots_of(snap) for snap in snapshots))
    blocks_per_row = blocks_per_row or _blocks_per_row(chosen[0].num_blocks)
    map_rows = -(-chosen[0].num_blocks // blocks_per_row)
    rows = -(-len(chosen) // 2)
    alt = " ".join(_alt(snap, slots) for snap, slots in zip(chosen, drawn, strict=True))
    height = 0.7 + rows * (0.75 + 0.3 * map_rows)
    card, axes = figure(8, height, rows=rows, columns=2, squeeze=False, alt=alt)
    with look():
        for ax in axes.flat[len(chosen) :]:
            ax.set_axis_off()
        for ax, snap, slots in zip(axes.flat, chosen, drawn, strict=False):
            _draw_map(ax, snap, slots, blocks_per_row, colours)
            ax.set_title(f"after step {snap.step}")
        legend(card, STATES, colours.values())
    return card, drawn


def pool_over_steps(snapshots, *, title="The pool, step by step"):
    """One row per snapshot, time down, slots across. Returns (figure, [Slots of each row])."""
    drawn = [slots_of(snap) for snap in snapshots]
    first, num_rows = snapshots[0], len(snapshots)
    num_slots = first.num_blocks * first.block_size
    colours = _colours(_names(drawn))
    alt = f"{title}: one row per step. {_alt(first, drawn[0])} {_alt(snapshots[-1], drawn[-1])}"
    card, ax = figure(8, 1.5 + 0.115 * num_rows, alt=alt)
    with look():
        ax.add_patch(Rectangle((0, 0), num_slots, num_rows, facecolor=WHITE, edgecolor="none"))
        for row, slots in enumerate(drawn):
            _draw_row(ax, slots, range(num_slots), row, 1.0, colours)
        for row in range(num_rows + 1):
            ax.axhline(row, color=CARD, linewidth=0.5)
        _block_lines(ax, first.num_blocks, first.block_size, 0, num_rows)
        _label_lifetimes(ax, drawn, colours)
        for row, slots in enumerate(drawn):
            if not slots.requests:
                where = {"x": num_slots / 2, "y": row + 0.52, "ha": "center", "va": "center"}
                box = {"boxstyle": "square,pad=0", "facecolor": WHITE, "edgecolor": "none"}
                ax.text(s="all slots free", fontsize=8, color=MUTED, bbox=box, **where)
        ax.set(xlim=(0, num_slots), ylim=(num_rows, 0), title=title)
        ax.set_xlabel(f"slot in the pool (a line every {first.block_size} slots: one block)")
        ax.set_ylabel("step")
        every = next(n for n in (1, 2, 5, 10, 20, 50, 100, num_rows) if num_rows / n <= 12)
        ends = [0, num_rows - 1] if num_rows > 1 else [0]
        inner = [r for r in range(num_rows) if snapshots[r].step % every == 0]
        inner = [r for r in inner if min(abs(r - end) for end in ends) > (every - 1) // 2]
        rows = sorted(ends + inner)
        ax.spines[:].set_visible(True)  # a frame: rows that hold nothing belong to it, too
        ax.set_yticks([r + 0.5 for r in rows], [snapshots[r].step for r in rows])
        ax.set_xticks(_slot_ticks(first))
        ax.tick_params(length=3)
        legend(card, STATES, colours.values())
    return card, drawn


def token_map(snap, request_id, tokens, num_prompt_tokens):
    """One request's blocks as rows of slots, each with the token whose keys and values it holds.

    tokens: the text of all known tokens, prompt first. Those without keys and values yet stand
    below the blocks. Returns (figure, {slot: text}).
    """
    table, size = snap.tables[request_id], snap.block_size
    live, most = snap.num_live[request_id], snap.max_live[request_id]
    shown = [_short(token, TOKEN_MAP / size - 0.02) for token in tokens]
    drawn = {}
    alt = f"The {len(table)} blocks of {request_id!r} after step {snap.step}: {live} slots hold "
    alt += f"keys and values, {num_prompt_tokens} of them of the prompt; {len(table) * size - live}"
    alt += f" hold nothing. The answer so far: {''.join(tokens[num_prompt_tokens:])!r}"
    card, ax = figure(10, 1.5 + 0.36 * len(table), alt=alt)
    prompt_face, answer_face = tint(colour(0), 0.22), colour(0)
    with look():
        for position in range(len(table) * size):
            row, column = divmod(position, size)
            state = LIVE if position < live else RESERVED if position < most else INTERNAL
            face = prompt_face if position < num_prompt_tokens else answer_face
            style = fill(state, colour(0)) | ({"facecolor": face} if state == LIVE else {})
            ax.add_patch(Rectangle((column, row), 1, 1, **style))
            if position < live:
                drawn[table[row] * size + column] = shown[position]
                _token(ax, column + 0.5, row + 0.5, shown[position], ink_on(face))
        for row in range(len(table) + 1):
            ax.axhline(row, color=INK, linewidth=0.9)
        for column in range(size + 1):
            ax.axvline(column, color=RULE, linewidth=0.6)
        rows = range(len(table))
        labels = [f"block {b}, slots {b * size}–{b * size + size - 1}" for b in table]
        ax.set_yticks([r + 0.5 for r in rows], labels)
        ax.set(xlim=(0, size), ylim=(len(table), 0), xticks=[])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        ax.set_title(f"Where the keys and values of each token lie, after step {snap.step}")
        waiting = ", ".join(repr(token) for token in tokens[live:])
        if waiting:
            ax.set_xlabel(f"sampled, without keys and values yet: {waiting}", loc="left")
        more = [
            (Patch(facecolor=prompt_face, **EDGE), "live: a token of the prompt"),
            (Patch(facecolor=answer_face, **EDGE), "live: a token of the answer"),
        ]
        legend(card, (RESERVED, INTERNAL), [colour(0)], more)
    return card, drawn


# --- the parts of a figure ---------------------------------------------------------------------


def _draw_map(ax, snap, slots, blocks_per_row, colours):
    size = snap.block_size
    row_slots = blocks_per_row * size
    num_slots, height = snap.num_blocks * size, 0.72
    labelled = set()
    for row, start in enumerate(range(0, num_slots, row_slots)):
        span = range(start, min(start + row_slots, num_slots))
        ax.add_patch(Rectangle((0, row), len(span), height, facecolor=WHITE, edgecolor="none"))
        runs = _draw_row(ax, slots, span, row, height, colours)
        if num_slots <= MAX_SLOT_LINES:
            lines = range(len(span) + 1)
            ax.vlines(lines, row, row + height, color=tint(RULE, 0.6), linewidth=0.25)
        _block_lines(ax, -(-len(span) // size), size, row, height)
        ax.add_patch(
            Rectangle((0, row), len(span), height, facecolor="none", edgecolor=INK, linewidth=0.8)
        )
        for owner, state, x, width in runs:
            if state == LIVE and owner not in labelled and width > row_slots / 16:
                labelled.add(owner)
                _name(ax, x + row_slots / 160, row + height / 2, owner, colours[owner])
    num_rows = -(-num_slots // row_slots)
    ax.set(xlim=(-0.2, row_slots + 0.2), ylim=(num_rows - 1 + height + 0.08, -0.08), xticks=[])
    labels = [f"slot {row * row_slots}" for row in range(num_rows)]
    ax.set_yticks([row + height / 2 for row in range(num_rows)], labels)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def _draw_row(ax, slots, span, y, height, colours):
    """One rectangle per run of slots alike; returns the runs as (owner, state, x, width)."""
    runs, x = [], 0
    for (owner, state), group in groupby(span, lambda i: (slots.owners[i], slots.states[i])):
        width = sum(1 for _ in group)
        if state != FREE:
            style = fill(state, colours[owner])
            ax.add_patch(Rectangle((x, y), width, height, **style))
            runs.append((owner, state, x, width))
        x += width
    return runs


def _block_lines(ax, num_blocks, block_size, y, height):
    if num_blocks <= MAX_BLOCK_LINES:
        lines = [i * block_size for i in range(num_blocks + 1)]
        ax.vlines(lines, y, y + height, color=INK, linewidth=0.5, alpha=0.55)


def _label_lifetimes(ax, drawn, colours):
    """Each request's name, once, where it first holds slots."""
    seen = set()
    for row, slots in enumerate(drawn):
        for owner in slots.requests:
            if owner not in seen:
                seen.add(owner)
                first = slots.owners.index(owner)
                _name(ax, first + len(slots.owners) / 250, row + 1.05, owner, colours[owner])


def _name(ax, x, y, text, background):
    ink = ink_on(background)
    box = {"boxstyle": "round,pad=0.15", "facecolor": background, "edgecolor": "none"}
    ax.text(x, y, text, color=ink, va="center", fontsize=8, fontweight="bold", bbox=box)


def _token(ax, x, y, text, ink):
    ax.text(x, y, text, color=ink, ha="center", va="center", fontsize=8, parse_math=False)


def _short(token, inches):
    return fitted(token.replace("\n", "↵").strip(" ") or "␣", inches)


def _names(drawn):
    return list(dict.fromkeys(name for slots in drawn for name in slots.requests))


def _colours(names):
    return {name: colour(i) for i, name in enumerate(names)}


def _blocks_per_row(num_blocks):
    return 8 if num_blocks <= 96 else -(-num_blocks // 12)


def _spread(items, count):
    """`count` of the items, evenly spread, the first and the last among them."""
    count = min(count, len(items))
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]


def _slot_ticks(snap):
    step = -(-snap.num_blocks // 9) * snap.block_size
    return range(0, snap.num_blocks * snap.block_size + 1, step)


def _alt(snap, slots):
    held = [
        f"{name!r} holds {len(snap.tables[name]) * snap.block_size} slots, "
        f"{slots.count(LIVE, name)} of them live"
        for name in slots.requests
    ]
    free = f"{slots.count(FREE)} of {len(slots.states)} slots are free"
    return f"After step {snap.step}: {'; '.join([*held, free])}."
