"""A batch as the model sees it, and where its tokens lie in the pool: rows on the left, memory on
the right, a line from every token to its slot.

Drawn from block tables and nothing else, so that slabs and scattered blocks are drawn alike.
"""

import html
import io
import itertools
import re
from typing import NamedTuple

from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from minikv.observe.pool import FREE, INTERNAL, LIVE, RESERVED
from minikv.observe.tokens import PAD, cells_of
from minikv.observe.tokens import rows_of as rows_of
from minikv.viz.states import OTHER, OTHER_FACE, PALE, fill, legend
from minikv.viz.style import (
    INK,
    MUTED,
    RULE,
    WHITE,
    colour,
    figure,
    fitted,
    ink_on,
    is_live,
    look,
    tint,
)

LANE = 0.047  # inches between two lines
_svg_numbers = itertools.count()


class Drawn(NamedTuple):
    """What the figure drew. cells: every cell of every row. states: of every slot of the pool."""

    cells: tuple
    states: tuple

    def slots(self, request_id, kind=None) -> list[int]:
        return [c.slot for c in self.cells if c.request_id == request_id and kind in (None, c.kind)]


def batch_memory(snap, rows, *, slots_per_line=None, title="The pool, as it lies in memory"):
    """The rows of a batch beside the pool. Returns (figure, Drawn).

    snap: a PoolSnapshot (pool.snapshot). rows: {request_id: Row}, as rows_of gives them; whoever
    else holds a table is drawn as another request. slots_per_line: as in a long address space
    that is written in lines; the longest table of the rows, unless given.
    """
    if not rows:
        raise ValueError("there is no row to draw: no request with known tokens holds a table")
    size = snap.block_size
    per_line = slots_per_line or max(len(snap.tables[name]) for name in rows) * size
    cells = cells_of(snap, rows)
    states, owners = _states(snap, rows, cells)
    drawn = Drawn(tuple(cells), tuple(states))
    plan = _Plan(rows, cells, len(states), per_line)
    card, ax = figure(8.8, plan.height + 0.75, alt=_alt(snap, rows, drawn))
    colours = {name: colour(i) for i, name in enumerate(rows)}
    with look():
        _draw_memory(ax, plan, drawn, owners, colours, size)
        _draw_rows(ax, plan, rows, colours)
        for cell in cells:
            _draw_link(ax, plan, cell, colours[cell.request_id])
        heading = {"fontweight": "bold", "fontsize": 10, "va": "bottom"}
        ax.text(plan.left, -0.05, "The batch, as the model sees it", **heading)
        ax.text(plan.memory_x, -0.05, title, **heading)
        ax.set(xlim=(0, plan.width), ylim=(plan.height, -0.3), xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        legend(card, {LIVE, PAD, *drawn.states}, colours.values(), pale=True)
    return card, drawn


# --- where things stand ------------------------------------------------------------------------


class _Plan:
    """Coordinates, in inches from the top left."""

    def __init__(self, rows, cells, num_slots, per_line):
        self.width, self.left = 9.8, 0.12
        self.per_line, self.num_slots = per_line, num_slots
        num_links = len(cells)
        columns = max([len(row.labels) for row in rows.values()] + [7])
        self.gutter = LANE * num_links + 0.06 * len(rows)
        room = self.width - self.left - self.gutter - 0.85
        self.slot_w = min(0.42, room * 0.5 / per_line)
        self.cell_w = min(0.55, (room - self.slot_w * per_line) / columns)
        self.cell_h, self.slot_h = 0.34, 0.29
        self.gutter_x = self.left + columns * self.cell_w + 0.12
        self.memory_x = self.width - self.slot_w * per_line - 0.1
        # Lines of memory: room for the links above each line that they reach.
        num_lines = -(-num_slots // per_line)
        into = [sum(c.slot // per_line == line for c in cells) for line in range(num_lines)]
        self.line_y, y = [], 0.08
        for count in into:
            y += LANE * count + (0.06 if count else 0)
            self.line_y.append(y)
            y += self.slot_h + 0.1
        below = {name: LANE * len(row.labels) + 0.1 for name, row in rows.items()}
        needed = sum(0.26 + self.cell_h + space for space in below.values())
        self.height = max(y, needed + 0.2)
        gap = (self.height - needed) / (len(rows) + 0.6)
        self.row_y, y = {}, gap * 0.5
        for name, space in below.items():
            y += 0.26
            self.row_y[name] = y
            y += self.cell_h + space + gap
        self._lanes(rows, cells)

    def _lanes(self, rows, cells):
        """The five corners of every link. The order of the lanes keeps the lines of a row from
        crossing each other where its slots ascend."""
        self.links, x = {}, self.gutter_x
        into = {}  # line of memory -> links that reach it, so far
        for name in rows:
            own = [cell for cell in cells if cell.request_id == name]
            for cell in own:
                n, k = len(own), cell.column
                line = cell.slot // self.per_line
                entry = into[line] = into.get(line, 0) + 1
                out_y = self.row_y[name] + self.cell_h + LANE * (n - k) + 0.02
                in_y = self.line_y[line] - LANE * entry
                turn = x + LANE * (k if in_y > out_y else n - 1 - k)
                cell_x = self.left + self.cell_w * (k + 0.5)
                slot_x = self.memory_x + self.slot_w * (cell.slot % self.per_line + 0.5)
                self.links[name, k] = (
                    (cell_x, self.row_y[name] + self.cell_h),
                    (cell_x, out_y),
                    (turn, out_y),
                    (turn, in_y),
                    (slot_x, in_y),
                    (slot_x, self.line_y[line]),
                )
            x += LANE * len(own) + 0.06


def _states(snap, rows, cells):
    """For every slot its state and whose it is."""
    states, owners = [FREE] * (snap.num_blocks * snap.block_size), {}
    for name, table in snap.tables.items():
        for position in range(len(table) * snap.block_size):
            block, offset = divmod(position, snap.block_size)
            slot = table[block] * snap.block_size + offset
            held = RESERVED if name in rows and position < rows[name].end else INTERNAL
            states[slot] = held if name in rows else OTHER
            owners[slot] = name
    for cell in cells:
        states[cell.slot], owners[cell.slot] = cell.kind, cell.request_id
    return states, owners


# --- the parts of the figure -------------------------------------------------------------------


def _draw_memory(ax, plan, drawn, owners, colours, block_size):
    x0, w, h = plan.memory_x, plan.slot_w, plan.slot_h
    for line, y in enumerate(plan.line_y):
        first = line * plan.per_line
        last = min(first + plan.per_line, plan.num_slots)
        for slot in range(first, last):
            of = colours.get(owners.get(slot), MUTED)
            style = fill(drawn.states[slot], of, pale=True) | {"edgecolor": RULE, "linewidth": 0.5}
            ax.add_patch(Rectangle((x0 + w * (slot - first), y), w, h, **style))
        edge = {"facecolor": "none", "edgecolor": INK}
        for slot in range(first, last, block_size):
            x = x0 + w * (slot - first)
            width = w * min(block_size, last - slot)
            ax.add_patch(Rectangle((x, y), width, h, linewidth=0.9, **edge))
        for name, run in itertools.groupby(range(first, last), owners.get):
            slots = list(run)
            if drawn.states[slots[0]] == OTHER:
                middle = x0 + w * (slots[0] + slots[-1] + 1 - 2 * first) / 2
                options = {"ha": "center", "va": "center", "color": ink_on(OTHER_FACE)}
                ax.text(middle, y + h / 2, name, fontsize=8, **options)
        label = f"slot {first}"
        ax.text(x0 - 0.06, y + h / 2, label, ha="right", va="center", fontsize=8, color=MUTED)
    for cell in drawn.cells:
        line, place = divmod(cell.slot, plan.per_line)
        x, y = x0 + w * place, plan.line_y[line]
        patch = Rectangle((x, y), w, h, facecolor="none", edgecolor="none")
        patch.set_gid(_gid("slot", cell))
        ax.add_patch(patch)
        _label(ax, x + w / 2, y + h / 2, cell.label, cell.kind, colours[cell.request_id], w)


def _draw_rows(ax, plan, rows, colours):
    w, h = plan.cell_w, plan.cell_h
    for name, row in rows.items():
        y = plan.row_y[name]
        for column, (label, pad, position) in enumerate(zip(*row[:3], strict=True)):
            x, kind = plan.left + w * column, PAD if pad else LIVE
            style = fill(kind, colours[name], pale=True) | {"edgecolor": RULE, "linewidth": 0.6}
            patch = Rectangle((x, y), w, h, **style)
            patch.set_gid(f"cell|{name}|{column}")  # as _gid
            ax.add_patch(patch)
            _label(ax, x + w / 2, y + h / 2, label, kind, colours[name], w)
            where = "–" if position is None else str(position)
            small = {"fontsize": 8, "color": MUTED, "ha": "center", "va": "bottom"}
            ax.text(x + w / 2, y - 0.025, where, **small)
        outline = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.1}
        ax.add_patch(Rectangle((plan.left, y), w * len(row.labels), h, **outline))
        text = f"row {name}, with positions"
        ax.text(plan.left, y - 0.15, text, fontsize=8, va="bottom")


def _draw_link(ax, plan, cell, of):
    xs, ys = zip(*plan.links[cell.request_id, cell.column], strict=True)
    style = {"color": of, "linewidth": 0.9, "solid_joinstyle": "round"}
    if cell.kind == PAD:
        style = {"color": MUTED, "linewidth": 0.7, "linestyle": (0, (2, 1.5))}
    [line] = ax.plot(xs, ys, zorder=1.5, **style)
    line.set_gid(_gid("link", cell))


def _label(ax, x, y, text, kind, of, width):
    inches = width * ax.figure.get_figwidth() / 10  # a unit of the plan's is a tenth of the figure
    shown = fitted(text, inches - 0.02)
    shown = "pad" if kind == PAD and shown != text else shown
    face = WHITE if kind == PAD else tint(of, PALE)
    halo = [withStroke(linewidth=2.2, foreground=WHITE)] if kind == PAD else []
    options = {"ha": "center", "va": "center", "parse_math": False, "path_effects": halo}
    ax.text(x, y, shown, fontsize=8, color=INK if kind == PAD else ink_on(face), **options)


def _gid(part, cell):
    return f"{part}|{cell.request_id}|{cell.column}"


def _alt(snap, rows, drawn):
    parts = []
    for name, row in rows.items():
        slots = drawn.slots(name)
        held = len(snap.tables[name]) * snap.block_size
        parts.append(
            f"Row {name!r} reads {' '.join(row.labels)}; it holds {held} slots, its "
            f"{len(slots)} tokens lie in slots {_ranges(slots)}, {sum(row.pads)} of them padding."
        )
    other, free = drawn.states.count(OTHER), drawn.states.count(FREE)
    total = len(drawn.states)
    return f"{' '.join(parts)} Of {total} slots others hold {other}, and {free} are free."


def _ranges(slots):
    """[3, 4, 5, 9] -> '3 to 5, 9'"""
    runs = []
    for slot in slots:
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    return ", ".join(f"{a} to {b}" if b > a else str(a) for a, b in runs)


# --- in a live notebook ------------------------------------------------------------------------


def hoverable(card, drawn) -> str:
    """The figure as SVG in which a token, its line and its slot light up together under the
    pointer: CSS alone. Falls back to nothing: a browser without :has() shows the plain figure."""
    with look():
        buffer = io.StringIO()
        card.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    prefix = f"mk{next(_svg_numbers)}"
    rules = [
        f".{prefix} g[id*='link'] path{{transition:stroke-width .1s}}",
        f".{prefix} g[id*='slot'] path{{pointer-events:all}}",
        f".{prefix} g[id*='text']{{pointer-events:none}}",
    ]
    for number, cell in enumerate(drawn.cells):
        names = {part: html.escape(_gid(part, cell)) for part in ("cell", "link", "slot")}
        ids = {part: f"{prefix}-{part}-{number}" for part in names}
        for part, name in names.items():
            svg = svg.replace(f'id="{name}"', f'id="{ids[part]}"')
        hovered = ",".join(f"#{ids[part]}:hover" for part in names)
        at = f".{prefix}:has({hovered})"
        rules.append(f"{at} #{ids['link']} path{{stroke-width:3.5 !important}}")
        outline = "{stroke:#1F2328 !important;stroke-width:2 !important}"
        rules.append(f"{at} #{ids['cell']} path,{at} #{ids['slot']} path{outline}")
    # Matplotlib's rule for everything, and its ids: neither may reach beyond this picture.
    svg = svg.replace("*{stroke", f".{prefix} *{{stroke")
    svg = re.sub(r'(id="|url\(#|href="#)(?!mk)', rf"\1{prefix}-", svg)
    svg = svg.replace("<svg ", f'<svg class="{prefix}" role="img" style="max-width:100%" ', 1)
    return f"<style>{''.join(rules)}</style>{svg}"


def batch_explorer(draw, **ranges):
    """Sliders over draw(**values) -> (figure, Drawn): with a live kernel a widget, in which
    tokens and slots also answer to the pointer; else the figure at the first values.

    ranges: name -> (first value, lowest, highest).
    """
    start = {name: first for name, (first, _, _) in ranges.items()}
    if not is_live():
        return draw(**start)[0]
    import ipywidgets

    from minikv.viz.widgets import Computing

    sliders = {
        name: ipywidgets.IntSlider(value=first, min=low, max=high, description=name)
        for name, (first, low, high) in ranges.items()
    }
    card, drawn = draw(**start)
    image = ipywidgets.HTML(hoverable(card, drawn))

    def show(_):
        image.value = hoverable(*draw(**{name: s.value for name, s in sliders.items()}))

    for slider in sliders.values():
        slider.observe(show, names="value")
    box = ipywidgets.HBox(list(sliders.values()), layout={"flex_flow": "row wrap"})
    return Computing(ipywidgets.VBox([box, image]), card)
