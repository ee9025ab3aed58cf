"""Decoding with a cache: what a token costs, which slots it fills, what attention reads, and where
the two counters of a request stand. Pure functions: plain data in, (figure, what it drew) out."""

from typing import NamedTuple

from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
from matplotlib.ticker import LogLocator, NullLocator

from minikv.viz.player import play
from minikv.viz.states import EDGE
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

PROMPT, OLD, NEW, EMPTY = "prompt", "decoded", "new", "empty"
PROMPT_FACE, OLD_FACE, NEW_FACE = tint(colour(0), 0.22), colour(0), colour(1)
FILLS = {
    PROMPT: {"facecolor": PROMPT_FACE},
    OLD: {"facecolor": OLD_FACE},
    NEW: {"facecolor": NEW_FACE, "hatch": "////", "hatchcolor": tint(INK, 0.75)},
    EMPTY: {"facecolor": WHITE},
}
MARKERS = ("o", "s", "^", "D")


# --- what a token costs ------------------------------------------------------------------------


def cost_per_token(series, *, title, predicted=(), log=False):
    """Milliseconds for the next token over the tokens before it.

    series: name -> [(tokens, seconds)]. predicted: names drawn as a dashed line without marks.
    log: both axes logarithmic, for series that differ by orders of magnitude.
    Returns (figure, {name: [(tokens, milliseconds)]}). The alt text holds no measured value.
    """
    drawn = {name: [(n, s * 1e3) for n, s in points] for name, points in series.items()}
    spans = [f"{name}, {points[0][0]} to {points[-1][0]} tokens" for name, points in drawn.items()]
    alt = f"{title}. Milliseconds for the next token over the tokens before it: {'; '.join(spans)}."
    card, ax = figure(7.2, 3.2, alt=alt)
    with look():
        for index, (name, points) in enumerate(drawn.items()):
            style = {"color": colour(index), "marker": MARKERS[index % len(MARKERS)]}
            if name in predicted:
                style = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 1.3}
            ax.plot(*zip(*points, strict=True), label=name, **style)
        ax.set(title=title, xlabel="tokens before it", ylabel="milliseconds for the next token")
        if log:
            ax.set(xscale="log", yscale="log")
            lengths = sorted({n for points in drawn.values() for n, _ in points})
            ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            ax.yaxis.set_major_formatter("{x:g}")
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_minor_locator(NullLocator())
            ax.set_xlabel("tokens before it (both axes are logarithmic)")
        else:
            ax.set_ylim(bottom=0)
            ax.set_xlim(left=0)
        ax.legend(loc="upper left")
    return card, drawn


# --- the cache, slot by slot -------------------------------------------------------------------


class CacheStep(NamedTuple):
    """A slab right after one forward pass. tokens: all that were fed so far, as text; sampled:
    the text of the one that this forward gave. new: how many of tokens this forward computed."""

    step: int
    capacity: int
    tokens: tuple
    num_prompt_tokens: int
    new: int
    sampled: str

    @property
    def states(self) -> tuple:
        """For each slot of the slab: prompt, decoded, new or empty."""
        n, start = len(self.tokens), len(self.tokens) - self.new
        known = [
            NEW if i >= start else PROMPT if i < self.num_prompt_tokens else OLD for i in range(n)
        ]
        return tuple(known + [EMPTY] * (self.capacity - n))


def cache_steps(tokens, num_prompt_tokens, capacity) -> list[CacheStep]:
    """One CacheStep per forward pass: the prompt in one, then a token each; the last token of
    `tokens` is sampled and never fed."""
    steps = []
    for step, end in enumerate(range(num_prompt_tokens, len(tokens)), 1):
        new = num_prompt_tokens if step == 1 else 1
        fed = tuple(tokens[:end])
        steps.append(CacheStep(step, capacity, fed, num_prompt_tokens, new, tokens[end]))
    return steps


def cache_at(step):
    """The slab after one forward pass. Returns (figure, the state of every slot)."""
    card, ax = figure(8.8, 1.75, alt=_cache_alt(step))
    with look():
        _draw_slab(ax, step)
        card.legend(handles=_slab_handles(), loc="outside lower center", ncols=4)
    return card, step.states


def cache_filling(steps, *, count=4):
    """The slab after a few of the forward passes, one below the other. Returns (figure, [the
    states of every slot, for each pass that is drawn])."""
    count = min(count, len(steps))
    chosen = [steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)]
    alt = " ".join(map(_cache_alt, chosen))
    card, axes = figure(8.8, 0.6 + 1.0 * count, rows=count, squeeze=False, alt=alt)
    with look():
        for ax, step in zip(axes.flat, chosen, strict=True):
            _draw_slab(ax, step)
        card.legend(handles=_slab_handles(), loc="outside lower center", ncols=4)
    return card, [step.states for step in chosen]


def cache_player(steps):
    """A Player of `cache_at`, one picture per forward pass. Its picture: `cache_filling`."""
    return play(
        steps,
        lambda step: cache_at(step)[0],
        lambda step: f"forward {step.step}",
        name="The cache, forward by forward",
        picture=cache_filling(steps)[0],
        milliseconds=900,
    )


def _cache_alt(step):
    states = step.states
    return (
        f"After forward {step.step}: of {step.capacity} slots {len(step.tokens)} hold K and V, "
        f"{step.new} of them written now, {states.count(EMPTY)} are empty. The sampled token "
        f"{step.sampled!r} has no slot yet."
    )


def _draw_slab(ax, step):
    inch = 8.4 / (step.capacity + 2.1)  # of a slot
    for slot, state in enumerate(step.states):
        ax.add_patch(Rectangle((slot, 0), 1, 1, edgecolor=RULE, linewidth=0.8, **FILLS[state]))
        if slot < len(step.tokens):
            face = FILLS[state]["facecolor"]
            box = {"boxstyle": "round,pad=0.12", "facecolor": face, "edgecolor": "none"}
            options = {"bbox": box} if state == NEW else {}
            _text(
                ax,
                slot + 0.5,
                0.5,
                _short(step.tokens[slot], inch - 0.02),
                color=ink_on(face),
                **options,
            )
    ax.add_patch(Rectangle((0, 0), step.capacity, 1, facecolor="none", edgecolor=INK))
    x = step.capacity + 0.55
    outline = {"facecolor": CARD, "edgecolor": INK, "linestyle": (0, (3, 2)), "linewidth": 1}
    ax.add_patch(Rectangle((x, 0), 1.25, 1, **outline))
    _text(ax, x + 0.62, 0.5, _short(step.sampled, 1.25 * inch), color=INK)
    ax.text(x + 0.62, 1.4, "sampled", ha="center", fontsize=8, color=MUTED)
    ax.set(xlim=(-0.1, step.capacity + 2), ylim=(1.55, -0.1), xticks=[], yticks=[])
    what = "the prompt" if step.step == 1 else "one token"
    ax.set_title(f"forward {step.step}: {what} in, one token out", fontsize=9)
    ax.spines[:].set_visible(False)
    for slot in range(step.capacity):
        ax.text(slot + 0.5, 1.4, str(slot), ha="center", fontsize=8, color=MUTED)


def _slab_handles():
    return [
        Patch(label="K and V of the prompt", **FILLS[PROMPT], **EDGE),
        Patch(label="K and V of decoded tokens", **FILLS[OLD], **EDGE),
        Patch(label="written in this forward", **FILLS[NEW], **EDGE),
        Patch(label="empty slot", **FILLS[EMPTY], **EDGE),
    ]


def _text(ax, x, y, text, **options):
    ax.text(x, y, text, ha="center", va="center", fontsize=8, parse_math=False, **options)


def _short(token, inches):
    return fitted(token.replace("\n", "↵").strip(" ") or "␣", inches)


# --- what is computed, what is read ------------------------------------------------------------


def tokens_computed(num_prompt_tokens, num_new_tokens):
    """Which positions each forward pass computes, without a cache and with one.

    Returns (figure, {"without": [tokens computed per forward], "with": [...]}).
    """
    rows = range(num_new_tokens)
    data = {
        "without": [num_prompt_tokens + row for row in rows],
        "with": [num_prompt_tokens if row == 0 else 1 for row in rows],
    }
    width = num_prompt_tokens + num_new_tokens - 1
    alt = (
        f"Positions computed by each of {num_new_tokens} forward passes. Without a cache all of "
        f"them each time, {sum(data['without'])} in all; with one the prompt once and then one a "
        f"pass, {sum(data['with'])} in all."
    )
    card, axes = figure(8, 2.6, columns=2, alt=alt)
    with look():
        for ax, (name, counts) in zip(axes, data.items(), strict=True):
            for row, count in enumerate(counts):
                end = num_prompt_tokens + row
                for position in range(end):
                    new = position >= end - count
                    _cell(ax, position, row, NEW if new else PROMPT)
            title = f"{name} a cache: {sum(counts)} tokens computed"
            _grid(ax, title, width, num_new_tokens, "position", "forward pass")
            ax.set_yticks([row + 0.5 for row in rows], [row + 1 for row in rows])
        handles = [
            Patch(label="K and V computed", **FILLS[NEW], **EDGE),
            Patch(label="read from the cache", **FILLS[PROMPT], **EDGE),
        ]
        card.legend(handles=handles, loc="outside lower center", ncols=2)
    return card, data


def attention_reads(num_prompt_tokens, num_new_tokens):
    """Which keys each query reads: a triangle that grows by one row with every decode step.

    Returns (figure, [(new keys, keys read from the cache) for each query]).
    """
    num_rows = num_prompt_tokens + num_new_tokens - 1  # the last token is sampled, never a query
    data = []
    for query in range(num_rows):
        start = 0 if query < num_prompt_tokens else query  # first position of its forward pass
        data.append((query + 1 - start, start))
    alt = (
        f"A triangle of {num_rows} rows, one per query, {num_rows} columns, one per key. Row i "
        f"reads keys 0 to i. The first {num_prompt_tokens} rows are one forward pass, which wrote "
        "their keys itself; each later row is a pass of its own, with one new key and the rest "
        "from the cache."
    )
    card, ax = figure(5.6, 4.6, alt=alt)
    with look():
        for query, (_, cached) in enumerate(data):
            for key in range(query + 1):
                _cell(ax, key, query, PROMPT if key < cached else NEW)
        for y in range(num_prompt_tokens, num_rows):
            ax.plot([0, y + 1], [y, y], color=INK, linewidth=1)
        title = "Which keys each token's query reads"
        _grid(ax, title, num_rows, num_rows, "key: position that is read", "query: position")
        ax.set_yticks([row + 0.5 for row in range(num_rows)], range(num_rows))
        where = {"x": num_rows - 0.2, "color": MUTED, "fontsize": 8, "ha": "right"}
        ax.text(y=1.6, s="white: later tokens,\nnever read", **where)
        first, last = f"row {num_prompt_tokens}", f"rows 0 to {num_prompt_tokens - 1}"
        ax.text(y=num_prompt_tokens - 2.1, s=f"{last}:\nthe prompt, in one pass", **where)
        if num_rows > num_prompt_tokens:
            box = {"boxstyle": "square,pad=0.2", "facecolor": PROMPT_FACE, "edgecolor": "none"}
            ax.text(0.25, num_rows - 0.3, f"from {first} on: a pass for each row", color=INK,
                    fontsize=8, bbox=box)  # fmt: skip
        handles = [
            Patch(label="key written in this pass", **FILLS[NEW], **EDGE),
            Patch(label="key from the cache", **FILLS[PROMPT], **EDGE),
        ]
        card.legend(handles=handles, loc="outside lower center", ncols=2)
    return card, data


def _cell(ax, x, y, state):
    ax.add_patch(Rectangle((x, y), 1, 1, edgecolor=RULE, linewidth=0.6, **FILLS[state]))


def _grid(ax, title, width, height, xlabel, ylabel):
    ax.set(xlim=(0, width), ylim=(height, 0), title=title, xlabel=xlabel, ylabel=ylabel)
    ax.set_xticks([x + 0.5 for x in range(0, width, 2)], range(0, width, 2))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


# --- the life of a step ------------------------------------------------------------------------


class Stage(NamedTuple):
    """Where a request stands after one stage of a step."""

    stage: str
    num_tokens: int
    num_computed_tokens: int
    slots_written: int


STAGES = {
    "schedule": "which tokens\nhave no K, V?",
    "write K, V": "of the new tokens,\ninto their slots",
    "attend": "new queries read\nall slots so far",
    "sample": "one token from\nthe last row",
    "append": "computed catches up,\nthe token is added",
}


COUNTERS = ("tokens", "computed", "slots")


def stages(num_tokens, num_computed_tokens) -> list[Stage]:
    """A step's stages: both counters move only at its end, slots are written at once."""
    before, after = (num_tokens, num_computed_tokens), (num_tokens + 1, num_tokens)
    written = {"schedule": num_computed_tokens}
    return [
        Stage(stage, *(after if stage == "append" else before), written.get(stage, num_tokens))
        for stage in STAGES
    ]


def life_cycle(steps):
    """Schedule, write K and V, attend, sample, append. At an arrow stand the counters that have
    moved; at the first and the last all of them.

    steps: [(title, num_tokens, num_computed_tokens)] at their start, one row each. Returns
    (figure, [the stages of each row]).
    """
    data = [stages(*counters) for _, *counters in steps]
    alt = " ".join(
        f"{title}: "
        + ", ".join(
            f"{m.stage} {m.num_tokens}/{m.num_computed_tokens}/{m.slots_written}" for m in r
        )
        + "."
        for (title, *_), r in zip(steps, data, strict=True)
    )
    alt = f"Stages of a step with num_tokens/num_computed_tokens/slots written after each. {alt}"
    card, axes = figure(8.8, 0.5 + 1.95 * len(steps), rows=len(steps), squeeze=False, alt=alt)
    with look():
        for ax, (title, *_), row in zip(axes.flat, steps, data, strict=True):
            _draw_cycle(ax, title, row)
    return card, data


def _draw_cycle(ax, title, row):
    gap, width = 2.0, 1.28
    for index, (at, (stage, text)) in enumerate(zip(row, STAGES.items(), strict=True)):
        x, last = index * gap, index == len(row) - 1
        face = tint(colour(1), 0.45) if stage == "append" else tint(colour(0), 0.16)
        box = {"boxstyle": "round,pad=0.02,rounding_size=0.08", "edgecolor": INK, "facecolor": face}
        ax.add_patch(FancyBboxPatch((x, 0), width, 1, **box))
        ax.text(x + width / 2, 0.3, stage, ha="center", va="center", fontweight="bold")
        ax.text(x + width / 2, 0.68, text, ha="center", va="center", fontsize=8)
        arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
        start, end = x + width + 0.06, x + gap - 0.08
        ax.annotate("", xy=(end, 0.5), xytext=(start, 0.5), arrowprops=arrow)
        before = row[index - 1][1:] if index else None
        for line, (name, count) in enumerate(zip(COUNTERS, at[1:], strict=True)):
            moved = before is not None and before[line] != count
            if before is None or last or moved:  # in between, only what changes
                style = {"fontweight": "bold", "color": INK} if moved else {"color": MUTED}
                text = {"s": f"{name} {count}", "fontsize": 8, "ha": "center", "va": "center"}
                ax.text((start + end) / 2, 1.28 + 0.3 * line, **text, **style)
        if last:
            ax.text(end + 0.05, 0.5, "next\nstep", va="center", fontsize=8, color=MUTED)
    ax.set(xlim=(-0.1, gap * len(row) + 0.35), ylim=(2.1, -0.1), xticks=[], yticks=[])
    ax.set_title(title)
    ax.spines[:].set_visible(False)
