"""A slider and a play button over a figure function; a plain figure where no kernel can answer."""

from minikv.viz.maps import memory_map, memory_maps, verdict
from minikv.viz.owners import colours_of
from minikv.viz.pool import pool_at_steps, pool_map
from minikv.viz.style import is_live


def pool_player(snapshots, *, blocks_per_row=None, names=None):
    """The pool, step by step: with the keyboard, Tab goes to the play button (space presses it)
    and to the slider (arrow keys move it).

    Without a live kernel: the pool at four of the steps, side by side.
    """
    if not is_live():
        return pool_at_steps(snapshots, blocks_per_row=blocks_per_row)[0]
    if names is None:  # so that a request keeps its colour from step to step
        names = list(dict.fromkeys(name for snap in snapshots for name in snap.tables))

    def draw(snap):
        return pool_map(snap, blocks_per_row=blocks_per_row, names=names)[0]

    return step_player(snapshots, draw)


def memory_player(recording, *, count=60):
    """The memory over time as an animation of `count` moments, evenly spread; the keys are those
    of pool_player. recording: a Recording, drawn as memory_map, or several, [(title, Recording)],
    over pools of one size and at the same times, drawn as memory_maps.

    Without a live kernel: four of the moments, below each other. Raises ValueError where a
    recording holds no moment.
    """
    named = recording if isinstance(recording, list) else [("", recording)]
    for title, each in named:
        if not each.moments:
            raise ValueError(f"the recording {title!r} holds no moment")
    colours = [colours_of(each.moments) for _, each in named]
    both = {name: of for each in colours for name, of in each.items()}
    start = min(each.moments[0].time_s for _, each in named)
    end = max(each.moments[-1].time_s for _, each in named)
    if is_live():
        times = [start + (end - start) * i / (count - 1) for i in range(count)]
    else:  # the ends of four quarters: at the start there is little to see
        times = [start + (end - start) * i / 4 for i in (1, 2, 3, 4)]

    def at(each, time_s):
        return next((m for m in reversed(each.moments) if m.time_s <= time_s), each.moments[0])

    def draw(time_s):
        moments = [(title, at(each, time_s)) for title, each in named]
        if len(moments) > 1:
            return memory_maps(moments, colours=both, title=f"{time_s:,.1f} s")[0]
        moment = moments[0][1]
        title = f"{moment.time_s:,.1f} s: {verdict(moment)}"
        return memory_map(moment, colours=both, title=title, room_below=True)[0]

    if is_live():
        return step_player(times, draw)
    moments = [
        (f"{title} {moment.time_s:,.1f} s".strip(), moment)
        for time_s in times
        for title, each in named
        for moment in [at(each, time_s)]
    ]
    return memory_maps(moments, colours=both)[0]


def step_player(states, draw, *, milliseconds=400):
    """A widget that shows draw(state), a Card, for the state that the slider stands at."""
    import ipywidgets

    pictures = {}  # drawn when first looked at

    def picture(index):
        if index not in pictures:
            pictures[index] = draw(states[index]).img()
        return pictures[index]

    last = len(states) - 1
    slider = ipywidgets.IntSlider(min=1, max=last + 1, description="step")
    play = ipywidgets.Play(min=1, max=last + 1, interval=milliseconds)
    image = ipywidgets.HTML(picture(0))
    ipywidgets.jslink((play, "value"), (slider, "value"))

    def show(change):
        image.value = picture(change["new"] - 1)

    slider.observe(show, names="value")
    return ipywidgets.VBox([ipywidgets.HBox([play, slider]), image])
