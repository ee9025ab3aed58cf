"""Online softmax, block by block: what is known after each block, and what it was measured by."""

import math
from typing import NamedTuple

from matplotlib.patches import Patch

from minikv.viz.player import play
from minikv.viz.style import CARD, INK, MUTED, WHITE, colour, figure, look, tint

GAP = 0.6  # slots between two blocks
UNREAD = {"facecolor": "none", "edgecolor": MUTED, "linestyle": (0, (2, 2)), "linewidth": 0.8}
SHRUNK = {"facecolor": "none", "edgecolor": tint(colour(0), 0.6), "linewidth": 1.2}
HIDDEN = {"facecolor": WHITE, "edgecolor": MUTED, "hatch": "////", "linewidth": 0.6}


class SoftmaxState(NamedTuple):
    """After some blocks: the largest score so far, what the earlier sum was multiplied by, the sum
    of exp(score - largest), that weight of each slot seen so far, and the values mixed by it."""

    largest: float
    shrink: float
    total: float
    weights: tuple
    mixed: float | None = None


def softmax_states(blocks, values=None) -> list[SoftmaxState]:
    """blocks: scores of each block's slots, -inf where the query may not look. values: a number
    for each of them. Raises ValueError for values that are not as many as the scores."""
    lengths = [len(scores) for scores in blocks]
    if values is not None and [len(of) for of in values] != lengths:
        raise ValueError(f"values {values!r}: there must be {lengths}, one for each score")
    largest, total, mixed, seen, states = -math.inf, 0.0, None, [], []
    for index, scores in enumerate(blocks):
        new = max([largest, *scores])
        reference = 0.0 if new == -math.inf else new
        shrink = math.exp(largest - reference)
        seen += scores
        weights = tuple(math.exp(score - reference) for score in seen)
        new_weights = weights[len(seen) - len(scores) :]
        total = total * shrink + sum(new_weights)
        if values is not None:
            added = sum(w * v for w, v in zip(new_weights, values[index], strict=True))
            mixed = (mixed or 0.0) * shrink + added
        largest = new
        states.append(SoftmaxState(largest, shrink, total, weights, mixed))
    return states


def online_softmax(blocks, *, values=None, title="Online softmax"):
    """The scores of each block on top; below it one row for the state after each block, in which
    the bars are weights relative to the largest score so far. Returns (figure, [SoftmaxState]).

    blocks, values: as softmax_states takes them. Raises ValueError for no block, or one without
    slots.
    """
    places, states = _places(blocks), softmax_states(blocks, values)
    alt = "; ".join(f"after block {i}: {_said(s)}" for i, s in enumerate(states))
    card, axes = figure(
        8, 2.2 + 1.0 * len(states), rows=1 + len(states), columns=1, sharex=True,
        gridspec_kw={"height_ratios": [2.1] + [1] * len(states)}, alt=f"{title}: {alt}.",
    )  # fmt: skip
    with look():
        _draw_scores(axes[0], blocks, places, states)
        for index, (ax, state) in enumerate(zip(axes[1:], states, strict=True)):
            _draw_state(ax, index, state, places)
        _finish(card, axes[-1], blocks, places, title)
    return card, states


def softmax_at(blocks, index, *, values=None, title="Online softmax"):
    """The moment after block `index`: the scores read so far, and the weights relative to the
    largest of them; an outline is what a weight was before this block made it shrink.

    blocks, values: as softmax_states takes them. Returns (figure, SoftmaxState). Raises ValueError
    for no block, one without slots, or an index that is none of a block.
    """
    places, states = _places(blocks), softmax_states(blocks, values)
    if not 0 <= index < len(blocks):
        raise ValueError(f"index {index}: it must be one of the {len(blocks)} blocks'")
    state = states[index]
    alt = f"{title}: after block {index} of {len(blocks)}: {_said(state)}."
    if state.shrink < 1 and index:
        alt += f" What was summed up before is multiplied by {state.shrink:.2f}."
    card, axes = figure(
        8, 4.1, rows=2, columns=1, sharex=True, gridspec_kw={"height_ratios": [1.6, 1]}, alt=alt
    )
    with look():
        _draw_scores(axes[0], blocks, places, states, index)
        before = states[index - 1].weights if index else ()
        for weight, (*_, x) in zip(before, places, strict=False):
            axes[1].bar(x, weight, 0.8, **SHRUNK)
        _draw_state(axes[1], index, state, places)
        shrunk = [Patch(label="its weight before this block", **SHRUNK)]
        _finish(card, axes[1], blocks, places, title, shrunk)
    return card, state


def softmax_player(blocks, *, values=None, title="Online softmax", milliseconds=1500):
    """A Player of softmax_at, one picture per block. Its picture: online_softmax."""
    return play(
        range(len(blocks)),
        lambda index: softmax_at(blocks, index, values=values, title=title)[0],
        lambda index: f"after block {index}",
        name=f"{title}, block by block",
        picture=online_softmax(blocks, values=values, title=title)[0],
        milliseconds=milliseconds,
    )


def _places(blocks):
    """(block, slot, x) of every slot."""
    if not blocks or not all(len(scores) for scores in blocks):
        raise ValueError(f"blocks {blocks!r}: there must be one, and each needs a slot")
    return [
        (index, slot, sum(map(len, blocks[:index])) + slot + GAP * index)
        for index, scores in enumerate(blocks)
        for slot in range(len(scores))
    ]


def _finish(card, lowest, blocks, places, title, more=()):
    lowest.set_xticks([x for *_, x in places], [str(i) for i in range(len(places))])
    lowest.set_xlabel("position of the key")
    lowest.set_xlim(-0.8, places[-1][2] + 4.1)
    card.suptitle(title, x=0.012, ha="left", fontsize=10, weight="bold")
    handles = [
        Patch(facecolor=colour(0), edgecolor=INK, label="weights of this block's slots"),
        Patch(
            facecolor=tint(colour(0), 0.35), edgecolor=INK, label="weights of earlier blocks' slots"
        ),
        *more,
    ]
    if len(blocks) > 1:
        handles.append(Patch(label="not read yet", **UNREAD))
    if any(score == -math.inf for scores in blocks for score in scores):
        handles.append(Patch(label="hidden by the mask", **HIDDEN))
    card.legend(handles=handles, loc="outside lower center", ncols=4)


def _draw_scores(ax, blocks, places, states, newest=None):
    """newest: the block read last, of those that are drawn; all, unless given."""
    finite = [score for scores in blocks for score in scores if score != -math.inf]
    low, high = min([0.0, *finite]), max([1.0, *finite])
    for index, slot, x in places:
        score = blocks[index][slot]
        if newest is not None and index > newest:
            ax.bar(x, high - low, 0.8, bottom=low, **UNREAD)
        elif score == -math.inf:
            ax.bar(x, high - low, 0.8, bottom=low, **HIDDEN)
        else:
            shade = 0.3 if newest in (None, index) else 0.12
            ax.bar(x, score, 0.8, color=tint(INK, shade), edgecolor=INK, linewidth=0.6)
            ax.text(
                x,
                max(score, 0) + (high - low) * 0.03,
                f"{score:g}",
                ha="center",
                va="bottom",
                fontsize=8,
            )
    for index, state in enumerate(states):
        xs = [x for block, _, x in places if block == index]
        span = (xs[0] - 0.5, xs[-1] + 0.5)
        if state.largest != -math.inf and (newest is None or index <= newest):
            ax.plot(span, [state.largest] * 2, color=colour(1), linewidth=2.4, zorder=3)
        ax.text(sum(span) / 2, high + (high - low) * 0.28, f"block {index}", ha="center",
                fontsize=8, color=MUTED)  # fmt: skip
    ax.plot([], [], color=colour(1), linewidth=2.4, label="largest so far")
    ax.legend(loc="center right")
    ax.set_ylim(low, high + (high - low) * 0.5)
    ax.set_ylabel("score")


def _draw_state(ax, index, state, places):
    for block, slot, x in places:
        if block > index:
            ax.bar(x, 1, 0.8, **UNREAD)
            continue
        weight = state.weights[sum(b < block for b, *_ in places) + slot]
        face = colour(0) if block == index else tint(colour(0), 0.35)
        ax.bar(x, weight, 0.8, color=face, edgecolor=INK, linewidth=0.6)
        shown = "0" if weight == 0 else f"{weight:.2f}"
        behind = {"facecolor": CARD, "edgecolor": "none", "pad": 0.4}
        ax.text(x, weight + 0.05, shown, ha="center", va="bottom", fontsize=8, bbox=behind)
    ax.set(ylim=(0, 1.45), yticks=(0, 1))
    ax.set_ylabel(f"after\nblock {index}", rotation=0, ha="right", va="center")
    largest = "none" if state.largest == -math.inf else f"{state.largest:g}"
    earlier = f"earlier × {state.shrink:.2f}\n" if index else ""
    said = f"largest {largest}\n{earlier}sum {state.total:.2f}" + _mixed(state, "\n")
    ax.text(places[-1][2] + 0.9, 0.78, said, va="center", fontsize=8.5)


def _said(state):
    return f"largest {state.largest:g}, sum {state.total:.2f}{_mixed(state, ', ')}"


def _mixed(state, before):
    return "" if state.mixed is None else f"{before}mixed {state.mixed:.2f}"
