"""Write your prompts: what each finds of those before it, and six text boxes over that picture.

Drawn from a PromptsResult (experiments.prompts) and nothing else.
"""

from typing import NamedTuple

from matplotlib.patches import Patch, Rectangle

from minikv.observe.blocks import CACHED
from minikv.observe.pool import LIVE
from minikv.viz.sharing import LEFT, LINE, MAX_TOKEN, MIN_TOKEN, NAMES
from minikv.viz.states import EDGE, PALE, fill
from minikv.viz.style import INK, MUTED, RULE, WHITE, colour, figure, is_live, look, tint
from minikv.viz.tables import ROW, WIDTH, frame, outline, token, write
from minikv.viz.widgets import Computing


class Row(NamedTuple):
    """A prompt as it was drawn. blocks: of each (start, end, owner, whether it was found)."""

    num_found: int
    blocks: tuple


def prompt_hits(result, labels, *, title=None) -> tuple:
    """Prompts in the order in which they came; what is found has the colour of the prompt that
    computed it. Returns (figure, [Row]). labels: of each prompt, what to write on its tokens."""
    names = NAMES[: len(labels)]
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
    y, blocks = 0.36 + LINE * prompt, []
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
            if width >= MIN_TOKEN:
                state, middle = None if is_found else LIVE, LEFT + width * (n + 0.5)
                token(ax, middle, y + ROW / 2, labels[n], state, of, width)
            ax.add_patch(Rectangle((LEFT + width * n, y), width, ROW, facecolor="none",
                                   edgecolor=RULE, linewidth=0.5))  # fmt: skip
        outline(ax, x, y, wide, linewidth=1.2)
        blocks.append((piece.start, piece.end, piece.owner, is_found))
    return Row(found, tuple(blocks))


# --- six text boxes ----------------------------------------------------------------------------


def prompts_lab(run, prompts, encode, *, block_size=4):
    """Write your prompts: a text box for each, and a slider for the block size. Change one, and all
    are served anew, in order.

    run: (lists of token ids, block size) -> PromptsResult (experiments.prompts_run). prompts: what
    stands in the boxes at the start. encode: text -> [(token id, what to write on it)]. Without a
    live kernel: the picture of the start.
    """
    lab = PromptsLab(run, prompts, encode, block_size)
    return lab if is_live() else lab.draw()


class PromptsLab:
    """In a notebook: the boxes above the picture, and in a line, which outlives the kernel, what to
    run when that is gone. boxes, slider: the widgets. image: the picture. box: all of them."""

    def __init__(self, run, prompts, encode, block_size):
        self._run, self._encode = run, encode
        self._prompts, self._block_size = list(prompts), block_size
        self.box = None

    def draw(self):
        """The picture of the prompts as they are now."""
        tokens = [self._encode(text) if text else [] for text in self._prompts]
        result = self._run([[token_id for token_id, _ in of] for of in tokens], self._block_size)
        return prompt_hits(result, [[label for _, label in of] for of in tokens])[0]

    def make(self):
        import ipywidgets as w

        wide = w.Layout(width="640px", max_width="100%")
        style = {"description_width": "72px"}
        self.boxes = [
            w.Text(value=text, description=f"prompt {name}", layout=wide, style=style,
                   continuous_update=False)
            for name, text in zip(NAMES, self._prompts, strict=False)
        ]  # fmt: skip
        self.slider = w.IntSlider(
            value=self._block_size, min=1, max=16, description="block size", layout=wide,
            style=style, continuous_update=False,
        )  # fmt: skip
        self.image = w.HTML()
        for each in (*self.boxes, self.slider):
            each.observe(self._change, names="value")
        self.box = w.VBox([*self.boxes, self.slider, self.image])
        self._change(None)
        return self.box

    def _change(self, _):
        self._prompts = [box.value for box in self.boxes]
        self._block_size = self.slider.value
        self._card = self.draw()
        self.image.value = self._card.img()

    def _ipython_display_(self):
        box = self.box or self.make()
        Computing(box, self._card)._ipython_display_()
