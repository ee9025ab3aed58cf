"""The states of a slot, in every figure with the same look and the same words."""

from typing import NamedTuple

from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from minikv.observe.blocks import CACHED
from minikv.observe.memory import ROUNDING
from minikv.observe.pool import FREE, INTERNAL, LIVE, RESERVED
from minikv.observe.tokens import PAD
from minikv.viz.style import INK, MUTED, tint

OTHER = "other"  # held by a request that the figure is not about


class Look(NamedTuple):
    """words: for a legend. face, mark: how much of the request's colour is in a slot's ground and
    in its hatch, as for style.tint. hatch: matplotlib's; colour never says anything alone."""

    words: str
    face: float
    mark: float = 0.0
    hatch: str | None = None


LOOKS = {  # in the order of a legend
    LIVE: Look("live: holds keys and values", 1.0),
    PAD: Look("padding: stored, but never read", 0.0, 0.6, "xxxxx"),
    RESERVED: Look("reserved: for tokens that may still come", 0.15, 0.7, "/////"),
    INTERNAL: Look("internal: held, but never to be used", 0.0, 0.8, "...."),
    ROUNDING: Look("rounding: added by the allocator", 0.0, 0.8, "-----"),
    CACHED: Look("cached: free, and found again by its key", 0.12, 0.75, "|||||"),
    OTHER: Look("held by another request", 0.7),
    FREE: Look("free", 0.0),
}
PALE = 0.42  # of the colour of live slots, where a token's text stands on them
OTHER_FACE = tint(MUTED, LOOKS[OTHER].face)
EDGE = {"edgecolor": INK, "linewidth": 0.6}  # of a swatch in a legend
# Of requests that got no room at their first attempt.
REFUSED_WITH_ENOUGH = "refused, though enough was free in total"
REFUSED_WITH_TOO_LITTLE = "refused: too little was free"


def fill(state, of, *, pale=False) -> dict:
    """How a slot looks. of: its request's colour. pale: a live one is light enough for text."""
    look = LOOKS[state]
    of = MUTED if state == OTHER else of
    face = PALE if pale and state == LIVE else look.face
    style = {"facecolor": tint(of, face), "edgecolor": "none", "linewidth": 0}
    return style | ({"hatch": look.hatch, "hatchcolor": tint(of, look.mark)} if look.hatch else {})


def legend(card, states, colours, more=(), *, pale=False):
    """These states, each in the first three of the requests' colours, in as many columns as there
    is room for. more: (handle, words) of other things."""
    shown = list(colours)[:3] or [MUTED]
    entries = [
        (_swatches(state, shown[:1] if state in (OTHER, FREE) else shown, pale), look.words)
        for state, look in LOOKS.items()
        if state in states
    ]
    entries += more
    card.legend(
        handles=[handle for handle, _ in entries],
        labels=[words for _, words in entries],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="outside lower center",
        ncols=len(entries) if len(entries) <= 4 else 3,
        columnspacing=1.2,
    )


def _swatches(state, colours, pale):
    return tuple(Patch(**fill(state, of, pale=pale) | EDGE) for of in colours)
