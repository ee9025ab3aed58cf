"""Break it yourself: the picture of a run of experiments.lab, and sliders over any such function.

The picture is one figure that is drawn anew for each run, which costs a third of making one;
`python -m minikv bench viz` says how long it takes.
"""

import io
from dataclasses import replace

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle

from minikv.kv_cache.contiguous import RESERVE_POLICIES
from minikv.kv_cache.extents import FITS
from minikv.viz.maps import draw_map, verdict
from minikv.viz.owners import colours_of
from minikv.viz.strips import mark_refusals, strip_of, time_axis
from minikv.viz.style import INK, MUTED, Card, ink_on, is_live, look, tint
from minikv.viz.widgets import Computing

DPI = 120  # of the widget's picture
WIDTH, LEFT, ROOM = 6.2, 0.86, 5.2  # inches: of the picture, left of its axes, and of these
CONTROL = "246px"  # wide, its name above it; less leaves no room for track and value
KEY = (
    "solid: live, striped: reserved, dotted: never used, ruled: rounded up,\n"
    "white: free. Above the strip: refused; dark, if enough was free in total"
)


def lab_figure(result) -> tuple:
    """The strip of a run, the paradox meter, and its worst moment. Returns (figure, {"refused":
    {"started at once", "too little free", "enough free in total": requests}, "worst": what
    memory_map says of it or None, "strip": the Strip})."""
    picture = LabPicture()
    return picture.card, picture.draw(result)


class LabPicture:
    """One figure for any number of runs. card: the Card. compare: leave room for the run before,
    so that the two are seen beside each other."""

    def __init__(self, compare=False):
        self._shown = None  # the run that is drawn, and its Strip
        height = 6.1 if compare else 4.95
        with look():
            self.card = Card((WIDTH, height))
            FigureCanvasAgg(self.card)

            # At fixed places: laying out anew would cost as much as drawing.
            def axes(top, inches):
                where = (LEFT / WIDTH, 1 - (top + inches) / height)
                return self.card.add_axes([*where, ROOM / WIDTH, inches / height])

            self.strip_axes = axes(0.45, 1.45)
            self.before_axes = axes(2.97, 0.75) if compare else None
            self.meter_axes = axes(4.0, 0.42) if compare else axes(2.9, 0.3)
            self.map_axes = axes(height - 1.36, 1.34)

    def draw(self, result) -> dict:
        """Draws a run; the one that was drawn last becomes the run before."""
        before = self._shown if self.before_axes else None
        with look():
            for ax in self.card.axes:
                for artist in (*ax.patches, *ax.texts, *ax.lines, *ax.images, *ax.collections):
                    artist.remove()  # clear() would make all ticks anew
            strip = self._draw_strip(result, before)
            if self.before_axes:
                self._draw_before(before)
            meter = self._draw_meter(result, before)
            worst = self._draw_worst(result)
        self.card.alt = _alt(result)
        if before:
            self.card.alt += f" The run before, {_named(before[0])}: {_alt(before[0])}"
        self._shown = (result, strip)
        return {"strip": strip, "refused": meter, "worst": worst}

    def _draw_strip(self, result, before):
        ax, recording = self.strip_axes, result.recording
        pixels = ax.get_window_extent().size / self.card.dpi * self.card.scale * DPI
        strip = strip_of(recording, int(pixels[1]), int(pixels[0]))
        end = max(_end(r) for r in (result, *(before or ())[:1]))
        _show_strip(ax, result, strip, end)
        ax.set_title(_named(result), pad=19, fontsize=9)
        ax.set_ylabel("slot")
        time_axis(ax, recording.moments[0].time_s, end)
        ax.set_xlabel(f"{ax.get_xlabel()}     {KEY}", fontsize=8)
        return strip

    def _draw_before(self, before):
        ax = self.before_axes
        ax.set_axis_on() if before else ax.set_axis_off()
        ax.set_title("")
        if not before:
            hint = "Change a control: this run then stays here, beside the new one."
            ax.text(0, 0.5, hint, transform=ax.transAxes, color=MUTED, fontsize=8)
        else:
            _show_strip(ax, *before, self.strip_axes.get_xlim()[1])
            ax.set_title(f"Before: {_named(before[0])}", pad=13, fontsize=9, fontweight="normal")
            ax.set_xticks([])
            ax.set_yticks([0, before[0].recording.num_slots])

    def _draw_meter(self, result, before):
        ax, refused = self.meter_axes, result.num_refused
        _draw_bar(ax, _parts(result), 0)
        if before:
            _draw_bar(ax, _parts(before[0]), 1.25)
        ax.set_title(
            f"Refused with enough free in total: {result.num_paradox} of {result.num_requests}; "
            f"for lack of it: {refused - result.num_paradox}",
            fontsize=9,
        )
        ax.set(xlim=(0, result.num_requests), ylim=(2.25 if self.before_axes else 1, 0), xticks=[])
        ax.set_yticks(*([0.5, 1.75], ["now", "before"]) if before else ([], []))
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        return _parts(result)

    def _draw_worst(self, result):
        ax, moment = self.map_axes, result.worst or result.fullest
        drawn = draw_map(ax, moment, colours_of([moment]), room_below=True)
        if result.worst is None:
            title = "No request was refused with enough free in total. The fullest moment:"
            ax.set_title(title, fontsize=9)
            return None
        free, largest = (
            number / moment.num_slots for number in (moment.free_slots, moment.largest_free_slots)
        )
        ax.set_title(
            f"At worst {free:.0%} is free, the largest gap has {largest:.0%}: "
            f"{drawn['request']} needs {drawn['needed']:,} slots",
            fontsize=9,
        )
        return drawn

    def img(self) -> str:
        """The picture as an HTML element, with its alt text."""
        return self.card.img(self.png())

    def png(self) -> bytes:
        """The picture for the widget: fewer points than Card.png, and less time to pack them."""
        with look():
            buffer = io.BytesIO()
            self.card.savefig(
                buffer, format="png", dpi=DPI * self.card.scale, pil_kwargs={"compress_level": 1}
            )
        return buffer.getvalue()


def fragmentation_lab(run, **settings):
    """Break it yourself: sliders over `run` (experiments.lab_run), and its picture with that of the
    run before. Let one go, and 300 requests are served anew. With the keyboard, Tab goes to the
    next control and the arrow keys change it.

    run: LabSettings -> LabResult; without an argument, the result of its defaults. settings: those
    that differ from these at the start. Without a live kernel: the picture of the start.
    """
    result = run()
    if settings:
        result = run(replace(result.settings, **settings))
    return Lab(run, result) if is_live() else lab_figure(result)[0]


class Lab:
    """In a notebook: the controls beside the picture, or above it where there is no room; and in a
    line, which outlives the kernel, what to run when that is gone. controls: the widgets by the
    names of LabSettings. image: the picture. box: all of them."""

    def __init__(self, run, result):
        import ipywidgets as w

        def control(kind, value, name, **options):
            # The name in a line of its own, so that the track gets the width.
            layout = w.Layout(flex_flow="row wrap", height="auto", width=CONTROL, margin="0 0 6px")
            style = {"description_width": "100%"}
            options |= {"continuous_update": False, "layout": layout, "style": style}
            return kind(value=value, description=name, **options)

        s = self._settings = result.settings
        pool = {"min": s.min_slots, "max": 16384, "step": 256}
        self.controls = {
            "rate": control(w.FloatSlider, s.rate, "requests/s", min=0.5, max=10, step=0.5),
            "long_share": control(
                w.FloatSlider, s.long_share, "share of long prompts", min=0, max=0.5, step=0.05
            ),
            "num_slots": control(w.IntSlider, s.num_slots, "slots in the pool", **pool),
            "fit": control(w.SelectionSlider, s.fit, "fit", options=list(FITS)),
            "reserve": control(w.SelectionSlider, s.reserve, "reserve", options=RESERVE_POLICIES),
            "seed": control(w.IntSlider, s.seed, "seed of the traffic", min=0, max=20),
        }
        self._run, self._picture, self.image = run, LabPicture(compare=True), w.HTML()
        for each in self.controls.values():
            each.observe(self._change, names="value")
        self._show(result)
        column = w.VBox(list(self.controls.values()))
        self.box = w.Box([column, self.image], layout=w.Layout(flex_flow="row wrap"))

    def _change(self, _):
        chosen = {name: control.value for name, control in self.controls.items()}
        self._show(self._run(replace(self._settings, **chosen)))

    def _show(self, result):
        self._picture.draw(result)
        self.image.value = self._picture.img()

    def _ipython_display_(self):
        Computing(self.box, self._picture.card)._ipython_display_()


def _end(result):
    return result.recording.moments[-1].time_s


def _named(result):
    s = result.settings
    return (
        f"{s.rate:g} requests/s, {s.long_share:.0%} long, {s.fit} fit, {s.reserve!r}: "
        f"{result.mean_running:.1f} run at once"
    )


def _show_strip(ax, result, strip, end):
    """end: of the axis; a strip may be shorter."""
    recording, start = result.recording, result.recording.moments[0].time_s
    ax.imshow(strip.image, origin="lower", extent=(start, _end(result), 0, recording.num_slots),
              aspect="auto", interpolation="nearest")  # fmt: skip
    mark_refusals(ax, strip.refused, start, end)
    ax.set(xlim=(start, end), ylim=(0, recording.num_slots))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.spines[:].set_visible(True)


def _parts(result):
    return {
        "started at once": result.num_requests - result.num_refused,
        "too little free": result.num_refused - result.num_paradox,
        "enough free in total": result.num_paradox,
    }


def _draw_bar(ax, parts, y):
    looks = (tint(MUTED, 0.22), tint(MUTED, 0.6), INK)
    x, total = 0, sum(parts.values())
    for (name, count), face in zip(parts.items(), looks, strict=True):
        edge = {"edgecolor": INK, "linewidth": 0.8, "clip_on": False}
        ax.add_patch(Rectangle((x, y), count, 1, facecolor=face, **edge))
        if count > 0.04 * total:
            label = f"{count} {name}" if count > 0.32 * total else count
            ax.text(x + count / 2, y + 0.52, label, color=ink_on(face), ha="center", va="center",
                    fontsize=8, fontweight="bold")  # fmt: skip
        x += count


def _alt(result):
    start = (
        f"{result.num_requests} requests in a pool of {result.recording.num_slots:,} slots: "
        f"{result.num_refused} were refused at their first attempt, {result.num_paradox} of them "
        f"though enough was free in sum."
    )
    if result.worst is None:
        return start
    free = result.worst.free_slots / result.worst.num_slots
    return f"{start} At worst {free:.0%} was free: {verdict(result.worst)}."
