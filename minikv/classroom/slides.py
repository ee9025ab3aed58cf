"""A chapter as a talk: `jupyter nbconvert --to slides`. Nothing of it is written by hand."""

import re

SECTION = re.compile(r"^##? ", re.M)
LINES, COLUMNS = 20, 90  # of text that a slide of 1280 x 720 has room for


def set_slides(notebook):
    """A section is a slide, and what would not fit below it goes on one step down. What follows a
    code cell does so too, as its output needs the room."""
    room, after_code = 0, False
    for cell in notebook.cells:
        lines = sum(1 + len(line) // COLUMNS for line in cell.source.splitlines())
        if cell.cell_type == "markdown" and SECTION.search(cell.source):
            kind = "slide"
        else:
            kind = "subslide" if after_code or lines > room else "-"
        room = (room if kind == "-" else LINES) - lines
        after_code = cell.cell_type == "code"
        cell.metadata["slideshow"] = {"slide_type": kind}
