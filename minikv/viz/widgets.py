"""Widgets that compute, and what they leave in a notebook when their kernel is gone."""

GONE = (
    "The sliders ask this notebook's kernel. If they are gone (\u201cmodel not found\u201d), or "
    "nothing follows them: <b>Run &gt; Run All Above Selected Cell</b>, then this cell."
)


class Computing:
    """A widget, and in a line under it, in an output that outlives the kernel, what to run when
    that is gone. card: the picture that a page made of the notebook shows in the widget's place."""

    def __init__(self, widget, card):
        self.widget, self.card = widget, card

    def _ipython_display_(self):
        from IPython.display import display

        picture = {"text/html": self.card.img(), "text/plain": self.card.alt}
        display(self.widget._repr_mimebundle_() | picture, raw=True)
        display({"text/html": f"<p>{GONE}</p>", "text/plain": ""}, raw=True)
