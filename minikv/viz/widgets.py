"""A slider and a play button over a figure function; a plain figure where no kernel can answer."""

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
