"""Widgets that compute, and what they leave in a notebook when their kernel is gone."""

import ipywidgets
from IPython.display import HTML, display

NOTE = (
    "These controls compute in the kernel. Where they are gone or do not answer, "
    "run this cell again (Shift+Enter)."
)


class Panel(ipywidgets.VBox):
    """Controls and what they draw, below each other; under them, in an output of its own that
    stays when the kernel is gone, what to run. card: the picture at the first values, which an
    export shows in their place."""

    def __init__(self, children, card):
        super().__init__(children)
        self.card = card

    def _repr_mimebundle_(self, **kwargs):
        data = super()._repr_mimebundle_(**kwargs)
        return data | {"text/html": self.card.img(), "text/plain": self.card.alt}

    def _ipython_display_(self):
        display(self._repr_mimebundle_(), raw=True)
        display(HTML(f"<p>{NOTE}</p>"))
