"""Break it yourself: a small service on a virtual clock, its knobs, and what they do to the memory.

A run is a function of its settings alone. The picture is one figure that is drawn anew for each
run, which costs a third of making one; `python -m minikv bench viz` says how long it takes.
"""

import io
from dataclasses import dataclass

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle

from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.request import require_int, require_number
from minikv.scheduler import Scheduler
from minikv.simulator import Simulation, StepTime
from minikv.specs import find_gpu, find_model
from minikv.viz.maps import draw_map, verdict
from minikv.viz.memory import MemoryRecorder, Moment, Recording, enough_in_sum
from minikv.viz.owners import colours_of
from minikv.viz.strips import mark_refusals, strip_of, time_axis
from minikv.viz.style import INK, MUTED, Card, ink_on, is_live, look, tint
from minikv.workloads import LogNormal, Poisson, RequestClass, Uniform, Workload

NUM_REQUESTS = 300
BLOCK_SIZE, MAX_MODEL_LEN = 16, 2048
# Chats with a header that they share, and now and then a long document: nothing is shared here.
SHORT = (LogNormal(280, 0.3, low=200, high=1000), LogNormal(110, 0.9, low=4, high=500))
LONG = (Uniform(600, 1500), LogNormal(110, 0.9, low=4, high=500))
MIN_SLOTS = 2 * MAX_MODEL_LEN  # every request fits alone, whatever is reserved and rounded
MOMENTS = 200  # recorded while requests arrive
FITS = ("first", "best", "next", "worst", "buddy")
RESERVES = ("exact", "max", "pow2", "double", "grow")
DPI = 100  # of the widget's picture
KEY = (
    "solid: live, striped: reserved, dotted: never used, ruled: rounded up, white: free. "
    "Above: refused, dark if the sum was enough"
)


@dataclass(frozen=True)
class LabSettings:
    """rate: requests per second. long_share: of prompts that are long, 0 to 1. fit, reserve: as
    in ContiguousKVCacheManager. num_slots: of the pool, rounded down to whole blocks.

    Raises TypeError or ValueError, naming the value and its limits.
    """

    rate: float = 5.0
    long_share: float = 0.15
    fit: str = "first"
    reserve: str = "exact"
    num_slots: int = 6000
    seed: int = 0

    def __post_init__(self):
        require_number("rate", self.rate, above=0)
        require_number("long_share", self.long_share, at_least=0, at_most=1)
        require_int("num_slots", self.num_slots, at_least=MIN_SLOTS)
        require_int("seed", self.seed, at_least=0)
        for name, known in (("fit", FITS), ("reserve", RESERVES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; known: {', '.join(known)}")


@dataclass(frozen=True)
class LabResult:
    """num_refused: requests that got no room at their first attempt. num_paradox: those among them
    that the sum of the free slots would have been enough for. worst: of their refusals the one
    while most was free; None where there is none. fullest: the recorded moment while least was.
    mean_running: requests in a step, on average.
    """

    settings: LabSettings
    recording: Recording
    num_requests: int
    num_refused: int
    num_paradox: int
    worst: Moment | None
    fullest: Moment
    mean_running: float


def lab_run(settings=LabSettings()) -> LabResult:
    """Serves 300 requests: OPT-13B on an A100 with a pool that is small enough to see."""
    s = settings
    shares = (("short", 1 - s.long_share, SHORT), ("long", s.long_share, LONG))
    classes = tuple(RequestClass(name, share, *lengths) for name, share, lengths in shares if share)
    requests = Workload("lab", Poisson(s.rate), classes).requests(
        num_requests=NUM_REQUESTS, seed=s.seed
    )
    manager = ContiguousKVCacheManager(
        s.num_slots // BLOCK_SIZE,
        BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        reserve=s.reserve,
        fit=s.fit,
    )
    step_time = StepTime(find_model("opt-13b"), find_gpu("A100-40G"))
    scheduler = Scheduler(manager, max_num_seqs=256, max_num_batched_tokens=2560)
    simulation = Simulation(scheduler, step_time)
    every_s = requests[-1].arrival_time / MOMENTS
    recorder = MemoryRecorder(simulation.core, every_s=every_s, max_rows=2 * MOMENTS)
    simulation.run(requests, on_step=recorder)
    paradox = [refusal for refusal in recorder.refusals if enough_in_sum(refusal)]
    return LabResult(
        settings=s,
        recording=recorder.recording,
        num_requests=len(requests),
        num_refused=len(recorder.refusals),
        num_paradox=len(paradox),
        worst=max(paradox, key=lambda refusal: refusal.free_slots, default=None),
        fullest=min(recorder.moments, key=lambda moment: moment.free_slots),
        mean_running=simulation.summary()["mean_num_seqs"],
    )


def lab_figure(result) -> tuple:
    """The strip of a run, the paradox meter, and its worst moment. Returns (figure, {"refused":
    {"started at once", "too little free", "enough free in sum": requests}, "worst": what
    memory_map says of it or None, "strip": the Strip})."""
    picture = LabPicture()
    return picture.card, picture.draw(result)


class LabPicture:
    """One figure for any number of runs. card: the Card."""

    def __init__(self):
        with look():
            self.card = Card(figsize=(8, 5.1))
            FigureCanvasAgg(self.card)
            # At fixed places: laying out anew would cost as much as drawing.
            self.strip_axes = self.card.add_axes([0.105, 0.545, 0.865, 0.35])
            self.meter_axes = self.card.add_axes([0.105, 0.36, 0.865, 0.055])
            self.map_axes = self.card.add_axes([0.105, 0.02, 0.865, 0.275])

    def draw(self, result) -> dict:
        with look():
            for ax in self.card.axes:
                for artist in (*ax.patches, *ax.texts, *ax.lines, *ax.images, *ax.collections):
                    artist.remove()  # clear() would make all ticks anew
            strip = self._draw_strip(result)
            meter = self._draw_meter(result)
            worst = self._draw_worst(result)
        self.card.alt = _alt(result)
        return {"strip": strip, "refused": meter, "worst": worst}

    def _draw_strip(self, result):
        ax, recording = self.strip_axes, result.recording
        start, end = recording.moments[0].time_s, recording.moments[-1].time_s
        inches = ax.get_window_extent().size / self.card.dpi
        width, height = (int(size * DPI) for size in inches)
        strip = strip_of(recording, height, width)
        ax.imshow(strip.image, origin="lower", extent=(start, end, 0, recording.num_slots),
                  aspect="auto", interpolation="nearest")  # fmt: skip
        mark_refusals(ax, strip.refused, start, end)
        ax.set(xlim=(start, end), ylim=(0, recording.num_slots))
        s = result.settings
        title = (
            f"{s.rate:g} requests/s, {s.long_share:.0%} long, {s.fit} fit, reserve {s.reserve!r}"
        )
        ax.set_title(f"{title}: {result.mean_running:.1f} run at once", pad=21)
        ax.set_ylabel("slot")
        ax.yaxis.set_major_formatter("{x:,.0f}")
        ax.spines[:].set_visible(True)
        time_axis(ax, start, end)
        ax.set_xlabel(f"{ax.get_xlabel()}     {KEY}", fontsize=7.5)
        return strip

    def _draw_meter(self, result):
        ax, refused, paradox = self.meter_axes, result.num_refused, result.num_paradox
        parts = {
            "started at once": result.num_requests - refused,
            "too little free": refused - paradox,
            "enough free in sum": paradox,
        }
        looks = (tint(MUTED, 0.22), tint(MUTED, 0.6), INK)
        x = 0
        for (name, count), face in zip(parts.items(), looks, strict=True):
            edge = {"edgecolor": INK, "linewidth": 0.8, "clip_on": False}
            ax.add_patch(Rectangle((x, 0), count, 1, facecolor=face, **edge))
            if count > 0.03 * result.num_requests:
                label = f"{count} {name}" if count > 0.25 * result.num_requests else count
                ax.text(x + count / 2, 0.48, label, color=ink_on(face), ha="center", va="center",
                        fontsize=8, fontweight="bold")  # fmt: skip
            x += count
        ax.set_title(
            f"{paradox} of {result.num_requests} requests refused though enough was free in sum, "
            f"{refused - paradox} for lack of it"
        )
        ax.set(xlim=(0, result.num_requests), ylim=(0, 1), xticks=[], yticks=[])
        return parts

    def _draw_worst(self, result):
        ax, moment = self.map_axes, result.worst or result.fullest
        drawn = draw_map(ax, moment, colours_of([moment]), room_below=True)
        if result.worst is None:
            ax.set_title("Nobody was refused who had enough in sum. The fullest moment:")
            return None
        free, largest = (
            number / moment.num_slots for number in (moment.free_slots, moment.largest_free_slots)
        )
        ax.set_title(
            f"At worst {free:.0%} is free, the largest gap has {largest:.0%}: "
            f"{drawn['request']} needs {drawn['needed']:,} slots"
        )
        return drawn

    def img(self) -> str:
        """The picture as an HTML element, with its alt text."""
        return self.card.img(self.png())

    def png(self) -> bytes:
        """The picture for the widget: fewer points than Card.png, and less time to pack them."""
        with look():
            buffer = io.BytesIO()
            self.card.savefig(buffer, format="png", dpi=DPI, pil_kwargs={"compress_level": 1})
        return buffer.getvalue()


def fragmentation_lab(settings=None):
    """Break it yourself: sliders over lab_run, and its picture. Let one go, and 300 requests are
    served anew. With the keyboard, Tab goes to the next control and the arrow keys change it.

    Without a live kernel: the picture of these settings (or of the defaults).
    """
    settings = settings or LabSettings()
    if not is_live():
        return lab_figure(lab_run(settings))[0]
    import ipywidgets as w

    s = settings
    options = {"continuous_update": False, "style": {"description_width": "9em"}}
    late, style = options, {"style": options["style"]}
    controls = {
        "rate": w.FloatSlider(s.rate, min=0.5, max=10, step=0.5, description="requests/s", **late),
        "long_share": w.FloatSlider(
            s.long_share, min=0, max=0.5, step=0.05, description="share of long", **late
        ),
        "num_slots": w.IntSlider(
            s.num_slots, min=MIN_SLOTS, max=16384, step=256, description="slots in the pool", **late
        ),
        "fit": w.Dropdown(options=FITS, value=s.fit, description="fit", **style),
        "reserve": w.Dropdown(options=RESERVES, value=s.reserve, description="reserve", **style),
        "seed": w.IntSlider(s.seed, min=0, max=20, description="seed of the traffic", **late),
    }
    picture, image = LabPicture(), w.HTML()

    def redraw(_=None):
        chosen = {name: control.value for name, control in controls.items()}
        picture.draw(lab_run(LabSettings(**chosen)))
        image.value = picture.img()

    for control in controls.values():
        control.observe(redraw, names="value")
    redraw()
    pairs = list(controls.values())
    columns = [w.VBox(pairs[:3]), w.VBox(pairs[3:])]
    return w.VBox([w.HBox(columns), image])


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
