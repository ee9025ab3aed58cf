"""A player: pictures one after the other, with a slider and keys, in a notebook's output alone.

Its frames and the few lines of script that show them are stored in the output, so that it works
after a notebook was closed, with any kernel or none, and in an export to HTML. Where scripts do not
run (a notebook that is not trusted, a viewer on the web), its picture stands in its place.
"""

import base64
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

from minikv.viz.style import CARD, look

DPI = 144  # of the frames: sharp enough, with fewer bytes than a figure's
COLOURS = 64
PNG = "data:image/png;base64,"
SCRIPT, STYLE = (Path(__file__).with_name(f"player.{kind}") for kind in ("js", "css"))


class Player:
    """frames: [(label, Card)], cards of one size. A label says what the slider's value means, with
    its unit: "step 5", "610.3 s". name: what is played, for readers who do not see it. picture: the
    Card that stands in its place where scripts do not run. milliseconds: of a frame when it plays.
    dpi: of the frames; half the resolution is half the bytes, or less.

    Raises ValueError for no frame, or cards of several sizes.
    """

    def __init__(self, frames, *, name, picture, milliseconds=400, dpi=DPI):
        if not frames:
            raise ValueError(f"the player {name!r} has no frame")
        sizes = {tuple(card.get_size_inches()) for _, card in frames}
        if len(sizes) > 1:
            raise ValueError(f"the frames of {name!r} have {len(sizes)} sizes; they must have one")
        self.frames, self.name, self.picture = frames, name, picture
        self.milliseconds, self.dpi, self._html = milliseconds, dpi, None

    @property
    def labels(self) -> list[str]:
        return [label for label, _ in self.frames]

    def __repr__(self):
        ends = f"{self.labels[0]} to {self.labels[-1]}"
        return f"{self.name}: {len(self.frames)} pictures, {ends}. {self.picture.alt}"

    def _repr_html_(self) -> str:
        """The same text for the same frames. It holds no id, so that any number of players may
        stand on a page."""
        if self._html is None:
            # "<" would end the script that the data lie in.
            data = json.dumps(self._data(), ensure_ascii=False).replace("<", "\\u003c")
            self._html = (
                f'<div class="mk-player"><style>{STYLE.read_text("utf-8")}</style>\n'
                f'<div class="mk-stage">{self.picture.img()}</div>\n'
                f'<script type="application/json">{data}</script>\n'
                f"<script>{SCRIPT.read_text('utf-8')}</script></div>"
            )
        return self._html

    def _data(self) -> dict:
        """What player.js reads. Each frame is stored as what differs from the first."""
        _, first = self.frames[0]
        ground = _pixels(first, self.dpi)
        width, height = first.shown_size()
        changed = ["", *(_over(ground, _pixels(card, self.dpi)) for _, card in self.frames[1:])]
        return {
            "name": self.name,
            "milliseconds": self.milliseconds,
            "width": width,
            "height": height,
            "base": _png(Image.fromarray(ground).quantize(COLOURS)),
            "frames": [
                [label, card.alt, over]
                for (label, card), over in zip(self.frames, changed, strict=True)
            ],
        }


def play(states, draw, label, **options) -> Player:
    """A player of draw(state), a Card, named label(state), for every state. options: Player's."""
    return Player([(label(state), draw(state)) for state in states], **options)


def _pixels(card, dpi):
    with look():
        card.set_dpi(dpi * card.scale)
        card.canvas.draw()
        return np.asarray(card.canvas.buffer_rgba())[..., :3].copy()


def _over(ground, pixels) -> str:
    """The pixels that differ, in a PNG that is transparent elsewhere; "" where none does."""
    differs = Image.fromarray((ground != pixels).any(axis=2))
    if not differs.getbbox():
        return ""
    # And two around it: a browser that scales both would leave a pale outline of what was there.
    same = ~np.asarray(differs.convert("L").filter(ImageFilter.MaxFilter(5)), dtype=bool)
    pixels[same] = Image.new("RGB", (1, 1), CARD).getpixel((0, 0))
    image = Image.fromarray(pixels).quantize(COLOURS)
    indices = np.asarray(image).copy()
    indices[same] = COLOURS
    seen = Image.fromarray(indices)
    colours = (image.getpalette() + [0] * 3 * COLOURS)[: 3 * COLOURS]
    seen.putpalette([*colours, 0, 0, 0])
    return _png(seen, transparency=COLOURS)


def _png(image, **options) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="png", optimize=True, **options)
    return PNG + base64.b64encode(buffer.getvalue()).decode()
