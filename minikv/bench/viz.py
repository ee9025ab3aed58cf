"""How long the widget "break it yourself" takes from a moved slider to a picture, part by part."""

import itertools
import statistics
import time

from minikv.experiments import LabSettings, lab_run
from minikv.viz.lab import LabPicture

GOAL_MS = 300  # for a run of 300 requests
PARTS = ("simulate", "draw", "encode")
SETTINGS = (
    LabSettings(),
    LabSettings(fit="best"),
    LabSettings(fit="buddy"),
    LabSettings(reserve="max"),
    LabSettings(reserve="grow"),
    LabSettings(rate=2.0, num_slots=4096),
    LabSettings(rate=10.0, num_slots=16384),
)


def redraw(rounds) -> list[dict]:
    """Rows {"settings", "simulate_ms", "draw_ms", "encode_ms", "total_ms", "total_ms_range",
    "cpu_ms"}: medians over the rounds, of one picture that is drawn again and again, as the widget
    does it. cpu_ms: of this process alone, which a busy machine changes less."""
    picture = LabPicture(compare=True)
    _redraw(picture, SETTINGS[0])  # fonts are loaded, caches filled
    rows = []
    for settings in SETTINGS:
        times, cpu = [], []
        for _ in range(rounds):
            start = time.process_time()
            times.append(_redraw(picture, settings))
            cpu.append(1e3 * (time.process_time() - start))
        totals = [sum(parts) for parts in times]
        medians = (statistics.median(part) for part in zip(*times, strict=True))
        rows.append(
            {
                "settings": vars(settings),
                **{f"{part}_ms": ms for part, ms in zip(PARTS, medians, strict=True)},
                "total_ms": statistics.median(totals),
                "total_ms_range": [min(totals), max(totals)],
                "cpu_ms": statistics.median(cpu),
            }
        )
    return rows


def _redraw(picture, settings):
    """Milliseconds of each part."""
    times = [time.perf_counter()]
    result = lab_run(settings)
    times.append(time.perf_counter())
    picture.draw(result)
    times.append(time.perf_counter())
    picture.png()
    times.append(time.perf_counter())
    return [1e3 * (b - a) for a, b in itertools.pairwise(times)]


def report(rows):
    heads = "".join(f"{head:>10}" for head in (*PARTS, "total"))
    print(f"{'a redraw of 300 requests, in ms':42}{heads}{'range':>14}{'CPU time':>10}")
    for row in rows:
        s, (low, high) = row["settings"], row["total_ms_range"]
        name = f"{s['fit']}, {s['reserve']}, {s['rate']:g}/s, {s['num_slots']:,} slots"
        parts = "".join(f"{row[f'{part}_ms']:10.0f}" for part in (*PARTS, "total"))
        print(f"{name:42}{parts}{f'{low:.0f}-{high:.0f}':>14}{row['cpu_ms']:10.0f}")
    median = statistics.median(row["total_ms"] for row in rows)
    print(f"\nmedian of the settings: {median:.0f} ms; goal: {GOAL_MS} ms, from slider to picture")
