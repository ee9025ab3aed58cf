"""The roofline (Williams, Waterman and Patterson, 2009): what a machine can reach at a given number
of operations per byte, and where measured work lies below it."""

from typing import NamedTuple

from matplotlib.ticker import LogLocator, NullLocator

from minikv.viz.style import INK, MUTED, colour, figure, look, tint

MARKERS = ("o", "s", "^", "D")


class Point(NamedTuple):
    """label: stands beside the mark. intensity: FLOP per byte. flops: FLOP/s reached."""

    label: str
    intensity: float
    flops: float


def attainable(intensity, peak, bandwidth) -> float:
    """FLOP/s that a machine can reach at this intensity: bound by memory, then by compute."""
    return min(peak, intensity * bandwidth)


def roofline(peak, bandwidth, series, *, title="The roofline of this machine"):
    """peak: FLOP/s. bandwidth: bytes/s. series: name -> [Point].

    Returns (figure, {"ridge": FLOP per byte, "share": {name: [share of the roof reached]}}). The
    alt text holds no measured value.
    """
    ridge = peak / bandwidth
    share = {
        name: [p.flops / attainable(p.intensity, peak, bandwidth) for p in points]
        for name, points in series.items()
    }
    every = [p for points in series.values() for p in points]
    left = min([p.intensity for p in every] + [ridge]) / 3
    right = max([p.intensity for p in every] + [ridge]) * 2.5
    listed = "; ".join(f"{n}: {', '.join(p.label for p in ps)}" for n, ps in series.items())
    alt = (
        f"{title}, both axes logarithmic. FLOP/s rise with FLOP per byte up to the ridge and are "
        f"flat beyond it. Marks below the roof: {listed}."
    )
    card, ax = figure(7.2, 4.0, alt=alt)
    with look():
        ax.set(xscale="log", yscale="log", title=title)
        roof = [(x, attainable(x, peak, bandwidth) / 1e9) for x in (left, ridge, right)]
        xs, ys = zip(*roof, strict=True)
        low = min([p.flops for p in every] + [ys[0] * 1e9]) / 1e9 / 3
        ax.fill_between(xs, ys, low, color=tint(INK, 0.07), linewidth=0)
        ax.plot(xs, ys, color=INK, linewidth=1.6)
        ax.plot([ridge, ridge], [low, peak / 1e9], color=MUTED, linewidth=1, linestyle=(0, (2, 3)))
        ax.text(ridge, ys[1] * 1.25, "ridge", color=MUTED, fontsize=8, ha="center")
        where = {"y": low * 1.12, "color": MUTED, "fontsize": 8}
        ax.text(ridge / 1.1, s="← bound by memory", ha="right", **where)
        ax.text(ridge * 1.1, s="bound by compute →", ha="left", **where)
        for index, (name, points) in enumerate(series.items()):
            style = {"color": colour(index), "marker": MARKERS[index % len(MARKERS)]}
            x = [p.intensity for p in points]
            y = [p.flops / 1e9 for p in points]
            # Marks that lie on one another (a batch of any size, say) show through.
            style |= {"markeredgecolor": INK, "markersize": 8, "alpha": 0.7, "zorder": 3}
            ax.plot(x, y, linestyle="none", label=name, **style)
            _labels(ax, points)
        ax.set_xlim(left, right)
        ax.set_ylim(low, ys[1] * 1.8)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
        ax.set(xlabel="FLOP per byte read", ylabel="GFLOP per second")
        card.legend(loc="outside lower center", ncols=len(series))
    return card, {"ridge": ridge, "share": share}


def _labels(ax, points):
    """Points at one place share a label, so that none hides another."""
    together = {}
    for point in points:
        together.setdefault(round(point.intensity, 3), []).append(point)
    for same in together.values():
        alone = len(same) == 1  # below its mark; a shared label above all of them
        place = max(same, key=lambda p: p.flops)
        text = same[0].label if alone else f"{same[0].label} … {same[-1].label}"
        ax.annotate(
            text,
            (place.intensity, place.flops / 1e9),
            xytext=(7, -11) if alone else (0, 9),
            textcoords="offset points",
            ha="left" if alone else "center",
            fontsize=8,
            # over the dotted line of the ridge, if need be
            bbox={"boxstyle": "square,pad=0.1", "facecolor": tint(INK, 0.07), "edgecolor": "none"},
        )
