"""Widgets that compute, and what they leave in a notebook when their kernel is gone."""

GONE = (
    "The sliders ask this notebook's kernel. If they are gone (\u201cmodel not found\u201d), or "
    "nothing follows them: <b>Run &gt; Run All Above Selected Cell</b>, then this cell."
)

# JupyterLab takes keys before a slider does: "b" would insert a cell. Of an element with this
# attribute (itself: what has the focus is asked first) it takes none, but Escape, Ctrl+S and
# Shift+Enter stay the page's.
KEYS = """<script>
for (const note of document.querySelectorAll(".mk-computing")) {
  const area = note.closest(".jp-OutputArea");
  if (!area || area.mkKeys) continue;
  area.mkKeys = true;
  const theirs = (e) => e.ctrlKey || e.metaKey || e.altKey || e.key === "Escape" ||
    (e.shiftKey && e.key === "Enter");
  const guard = (e) => e.target.toggleAttribute("data-lm-suppress-shortcuts", !theirs(e));
  area.addEventListener("focusin", () => window.addEventListener("keydown", guard, true));
  area.addEventListener("focusout", () => window.removeEventListener("keydown", guard, true));
}
</script>"""


class Computing:
    """A widget, and in a line under it, in an output that outlives the kernel, what to run when
    that is gone. card: the picture that a page made of the notebook shows in the widget's place."""

    def __init__(self, widget, card):
        self.widget, self.card = widget, card

    def _ipython_display_(self):
        from IPython.display import display

        picture = {"text/html": self.card.img(), "text/plain": self.card.alt}
        display(self.widget._repr_mimebundle_() | picture, raw=True)
        note = f'<p class="mk-computing">{GONE}</p>{KEYS}'
        display({"text/html": note, "text/plain": ""}, raw=True)
