"""One look for all figures: colours, hatches, type, and a figure that carries its alt text.

The colours are Okabe and Ito's (2008), one of them darkened, in an order whose lightness differs
step by step, so that they stay apart for colour-blind readers and in greyscale. What a colour says,
a hatch or a label says too. A figure has a light background of its own, so that it reads the same
in a light and in a dark notebook. Settings apply while a figure is made or drawn, never globally.
"""

import base64
import html
import io
import os

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from PIL import Image

INK = "#1F2328"  # text and lines
MUTED = "#5C6066"  # second text: still 6:1 against the card
RULE = "#B9B7AF"  # thin lines between blocks
CARD = "#FBFAF7"
WHITE = "#FFFFFF"

# One per request (or series), in this order; lightness 46, 71, 31, 61, 89 of 100.
COLOURS = ("#0072B2", "#E69F00", "#00523F", "#CC79A7", "#F0E442")

DPI = 180  # of the file; on a page an inch has the 96 pixels that CSS gives it
PAGE_DPI = 96  # so a point of a figure is a point of the page
MIN_POINTS = 8  # no text of a figure is smaller, where it is as wide as it can be:
MAX_WIDTH = 8.8  # inches; a laptop of 1280 pixels has 848 beside JupyterLab's file list
PROJECTOR = 1.25  # by so much text grows, in a picture of the same size
RC = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that every machine draws the same
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.facecolor": CARD,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": CARD,
    "savefig.facecolor": CARD,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "hatch.linewidth": 0.9,
    "lines.linewidth": 1.8,
    "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
}


def look():
    """A context in which figures are made and drawn; outside it nothing has changed."""
    return matplotlib.rc_context(RC)


def is_live() -> bool:
    """Whether someone works in a notebook's kernel now; never while MINIKV_STATIC is set."""
    if os.environ.get("MINIKV_STATIC", "0") not in ("", "0"):
        return False
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None


def text_scale() -> float:
    """How much larger than usual text is: MINIKV_PROJECTOR=1 is for the last row of a room."""
    return PROJECTOR if os.environ.get("MINIKV_PROJECTOR", "0") not in ("", "0") else 1.0


class Card(Figure):
    """A figure on a light card. It belongs to no global list (pyplot's), so nothing closes it.

    alt: what it shows, in words, for readers who do not see it. scale: text_scale() when it was
    made; the figure is smaller by it and shown larger by it, so that only what is measured in
    points (text, lines) grows.
    """

    alt = ""

    def __init__(self, figsize, **options):
        self.scale = text_scale()
        super().__init__(figsize=[inches / self.scale for inches in figsize], **options)

    def legend(self, *args, ncols=1, **options):
        """As a Figure's, in as many columns as there is room for, up to ncols."""
        for columns in range(ncols, 0, -1):
            legend = super().legend(*args, ncols=columns, **options)
            wide = legend.get_window_extent(self.canvas.get_renderer()).width
            if columns == 1 or wide <= self.bbox.width:
                return legend
            legend.remove()

    def png(self, dpi=DPI) -> bytes:
        with look():
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=dpi * self.scale)
        # A palette is plenty for flat colours, and a third of the bytes.
        small = io.BytesIO()
        Image.open(buffer).convert("RGB").quantize(128).save(small, format="png", optimize=True)
        return small.getvalue()

    def save(self, path, dpi=DPI):
        with open(path, "wb") as file:
            file.write(self.png(dpi))

    def img(self, png=None) -> str:
        """An HTML element with its alt text. png: its bytes, where they are at hand."""
        width, height = self.shown_size()
        data = base64.b64encode(self.png() if png is None else png).decode()
        alt = html.escape(self.alt, quote=True)
        size = f'width="{width}" height="{height}" style="max-width:100%;height:auto"'
        return f'<img {size} alt="{alt}" src="data:image/png;base64,{data}">'

    def shown_size(self) -> list[int]:
        """Pixels on a page, (width, height), where there is room for it."""
        return [round(inches * PAGE_DPI * self.scale) for inches in self.get_size_inches()]

    def _repr_mimebundle_(self, include=None, exclude=None):
        """For a notebook: markup alone, as no viewer gives a stored PNG its alt text."""
        return {"text/html": self.img(), "text/plain": self.alt}


def figure(width=8.0, height=3.0, *, rows=1, columns=1, alt="", **options):
    """(Card, axes) in the course's look; axes is one Axes, or an array for several."""
    with look():
        card = Card((min(width, MAX_WIDTH), height), layout="constrained")
        FigureCanvasAgg(card)
        card.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
        card.alt = alt
        axes = card.subplots(rows, columns, **options)
    return card, axes


def fitted(text, inches, points=MIN_POINTS) -> str:
    """The text, or its start and an ellipsis, so that it is no wider than that on the page."""

    def fits(shown):
        font = FontProperties(family=RC["font.family"], size=points * text_scale())
        return text_to_path.get_text_width_height_descent(shown, font, False)[0] <= 72 * inches

    if fits(text):
        return text
    return next((s for n in range(len(text) - 1, 0, -1) if fits(s := text[:n] + "…")), text[:1])


def colour(index) -> str:
    """The colour of the index-th series. From the sixth on they repeat: rely on labels then."""
    return COLOURS[index % len(COLOURS)]


def tint(of, amount) -> str:
    """A colour mixed with white; amount 1 leaves it as it is, 0 is white."""
    return to_hex([1 - amount * (1 - part) for part in to_rgb(of)])


def lightness(of) -> float:
    """CIE L*: how light a colour is in greyscale, from 0 (black) to 100 (white)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(of)]
    luminance = sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 903.3 * luminance if luminance <= 0.008856 else 116 * luminance ** (1 / 3) - 16


def ink_on(background) -> str:
    """Black or white text, whichever reads better on a background."""
    return WHITE if lightness(background) < 60 else INK
