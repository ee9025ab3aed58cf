"""The figure of README.md, from the snapshots of experiments.first_light."""

from minikv.observe.pool import LIVE
from minikv.viz.pool import pool_over_steps
from minikv.viz.style import INK, WHITE, look


def first_light(snapshots):
    """(figure, [Slots of each row]): pool_over_steps, and what happens in it said on the spot."""
    title = "Four questions in one KV pool: their keys and values, step by step"
    card, rows = pool_over_steps(snapshots, title=title)
    first, *_, last = dict.fromkeys(name for slots in rows for name in slots.requests)
    with look():
        ax = card.axes[0]
        text = "each step adds the keys\nand values of one token"
        row = _last_row(rows, first)
        edge = rows[row].owners.index(first) + rows[row].count(LIVE, first)
        _note(ax, (edge - 1, row + 1), (8, row + 5.5), text)
        row = _last_row(rows, last)
        text = "an answer ends, and its\nslots are free at once"
        start = rows[row].owners.index(last)
        _note(ax, (start + 48, row + 1), (start + 8, row + 6), text)
    card.alt = f"{title}. {card.alt}"
    return card, rows


def _last_row(rows, name):
    return max(i for i, slots in enumerate(rows) if name in slots.requests)


def _note(ax, point, corner, text):
    arrow = {"arrowstyle": "->", "color": INK, "linewidth": 1.0}
    box = {"facecolor": WHITE, "edgecolor": "none", "pad": 2}
    ax.annotate(text, point, corner, arrowprops=arrow, bbox=box, va="center", fontsize=8.5)
