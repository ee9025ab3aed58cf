"""Figures: they draw what the manager holds, read in greyscale, and leave no trace."""

import base64
import html
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Patch

from minikv.engine import LLM
from minikv.experiments.first_light import QUESTIONS
from minikv.observe import house
from minikv.observe.pool import FREE, INTERNAL, LIVE, RESERVED, PoolSnapshot, slots_of, snapshot
from minikv.request import SamplingParams
from minikv.viz import players, pool, states, style
from minikv.viz.first_light import first_light

ROOT = Path(__file__).resolve().parents[1]
COLOURS = style.COLOURS
STATES = (LIVE, RESERVED, INTERNAL, FREE)


@pytest.fixture(scope="module")
def run():
    """A real engine with three requests in a pool of three slabs: (snapshots, reports, tables)."""
    llm = LLM("tiny", kv_cache_manager="contiguous", max_model_len=48, num_gpu_blocks_override=9)
    for name, length in (("a", 5), ("b", 12), ("c", 20), ("d", 7)):
        llm.add_request(list(range(1, length + 1)), SamplingParams(12, ignore_eos=True), name)
    snapshots, reports, tables = [], [], []
    while llm.has_unfinished_requests():
        llm.step()
        snapshots.append(snapshot(llm))
        reports.append(llm.memory_report())
        tables.append({name: list(table) for name, table in llm.manager.tables.items()})
    return snapshots, reports, tables


def test_a_snapshot_agrees_with_the_managers_own_report(run):
    for snap, report, tables in zip(*run, strict=True):
        slots = slots_of(snap)
        assert [slots.count(state) for state in STATES] == [
            report.live,
            report.reserved,
            report.internal,
            report.free,
        ]
        for slot, owner in enumerate(slots.owners):
            block = slot // snap.block_size
            assert owner == next((n for n, table in tables.items() if block in table), None)


def test_a_snapshot_does_not_change_with_the_engine():
    llm = LLM("tiny", kv_cache_manager="contiguous", max_model_len=48, num_gpu_blocks_override=9)
    llm.add_request([1, 2, 3], SamplingParams(4, ignore_eos=True), "a")
    llm.step()
    snap = snapshot(llm)
    before = slots_of(snap)
    while llm.has_unfinished_requests():
        llm.step()
    assert slots_of(snap) == before and before.count(LIVE, "a") == 3


def test_every_figure_returns_what_it_drew(run):
    snapshots, reports, _ = run
    _, slots = pool.pool_map(snapshots[0])
    assert slots == slots_of(snapshots[0]) and slots.requests == ["a", "b", "c"]
    _, rows = pool.pool_over_steps(snapshots)
    assert [row.count(LIVE) for row in rows] == [report.live for report in reports]
    _, panels = pool.pool_at_steps(snapshots, count=4)
    assert len(panels) == 4 and (panels[0], panels[-1]) == (rows[0], rows[-1])


def test_the_drawn_rectangles_are_the_data(run):
    """Area by state on the axes, in slots: the data could be right and the picture wrong."""
    snapshots, _, _ = run
    card, rows = pool.pool_over_steps(snapshots)
    area = dict.fromkeys(STATES, 0)
    for patch in card.axes[0].patches[1:]:  # the first is the white pool
        hatch = patch.get_hatch() or ""
        state = RESERVED if "/" in hatch else INTERNAL if "." in hatch else LIVE
        area[state] += round(patch.get_width() * patch.get_height())
    for state in STATES[:3]:
        assert area[state] == sum(row.count(state) for row in rows)


def test_steps_are_labelled_from_the_first_and_an_empty_pool_is_named(run):
    snapshots, _, _ = run
    card, rows = pool.pool_over_steps(snapshots)
    ax = card.axes[0]
    labels = [int(label.get_text()) for label in ax.get_yticklabels()]
    assert labels == sorted(set(labels))
    assert (labels[0], labels[-1]) == (snapshots[0].step, snapshots[-1].step)
    named = [text.get_text() for text in ax.texts].count("all slots free")
    assert named == sum(not row.requests for row in rows) > 0
    assert len(pool.pool_over_steps(snapshots[:1])[0].axes[0].get_yticks()) == 1


def test_scattered_and_shared_blocks_are_drawn_where_they_are():
    snap = PoolSnapshot(
        step=3,
        num_blocks=6,
        block_size=2,
        tables={"a": (4, 1), "b": (4, 0)},
        num_live={"a": 3, "b": 4},
        max_live={"a": 3, "b": 4},
    )
    _, slots = pool.pool_map(snap, blocks_per_row=2)
    assert slots.owners == ("b", "b", "a", "a", None, None, None, None, "a", "a", None, None)
    assert slots.states[:4] == ("live", "live", "live", "internal")
    assert slots.count("free") == 6


def test_token_map_says_which_token_lies_in_which_slot(run):
    snap = run[0][0]  # after the first step, with one sampled token that has no slot
    tokens = [f"t{i}" for i in range(13)]
    card, drawn = pool.token_map(snap, "b", tokens, 12)
    first = snap.tables["b"][0] * snap.block_size
    assert drawn == {first + i: f"t{i}" for i in range(12)}
    assert "'t12'" in card.axes[0].get_xlabel()


def test_first_light_takes_any_answers(run):
    snapshots, _, _ = run
    rename = dict(zip("abcd", QUESTIONS, strict=True))
    renamed = [
        snap._replace(
            tables={rename[k]: v for k, v in snap.tables.items()},
            num_live={rename[k]: v for k, v in snap.num_live.items()},
            max_live={rename[k]: v for k, v in snap.max_live.items()},
        )
        for snap in snapshots
    ]
    card, rows = first_light(renamed)
    assert rows == [slots_of(snap) for snap in renamed] and card.png()


# --- the look ----------------------------------------------------------------------------------


def test_colours_stay_apart_in_greyscale():
    levels = [style.lightness(colour) for colour in style.COLOURS]
    for a, b in itertools.combinations(levels, 2):
        assert abs(a - b) >= 9
    assert max(levels) <= style.lightness(style.CARD) - 8


def test_states_differ_in_lightness_or_hatch():
    # another request's slots are grey: they stand beside pale ones only
    own = [state for state in states.LOOKS if state != states.OTHER]
    solid = [(c, {s: states.fill(s, c) for s in own}) for c in COLOURS]
    pale = [(c, {s: states.fill(s, c, pale=True) for s in states.LOOKS}) for c in COLOURS[:2]]
    for colour, fills in solid + pale:
        for a, b in itertools.combinations(fills.values(), 2):
            lightness = abs(style.lightness(a["facecolor"]) - style.lightness(b["facecolor"]))
            assert a.get("hatch") != b.get("hatch") or lightness >= 8, (colour, a, b)


def test_a_legend_has_the_states_that_it_is_given_in_their_own_words():
    card, _ = style.figure()
    states.legend(card, {FREE, LIVE, states.OTHER}, COLOURS, [(Patch(), "more")])
    [legend] = card.legends
    words = [text.get_text() for text in legend.get_texts()]
    looks = states.LOOKS
    assert words == [looks[LIVE].words, looks[states.OTHER].words, "free", "more"]
    swatches = [to_hex(patch.get_facecolor()) for patch in legend.get_patches()]
    assert swatches.count(states.OTHER_FACE) == 1  # whatever colours the requests have
    assert len({look.words for look in looks.values()}) == len(looks)


def test_text_reads_on_what_it_stands_on():
    def contrast(a, b):  # WCAG 2, from L* back to luminance
        ys = sorted(((style.lightness(c) + 16) / 116) ** 3 for c in (a, b))
        return (ys[1] + 0.05) / (ys[0] + 0.05)

    assert contrast(style.INK, style.CARD) >= 7 and contrast(style.MUTED, style.CARD) >= 4.5
    for colour in style.COLOURS:
        assert contrast(style.ink_on(colour), colour) >= 4.5


def test_every_figure_has_alt_text_and_a_light_background(run):
    snapshots, _, _ = run
    cards = [
        pool.pool_map(snapshots[0])[0],
        pool.pool_over_steps(snapshots)[0],
        pool.pool_at_steps(snapshots)[0],
        pool.token_map(snapshots[0], "a", ["x"] * 6, 5)[0],
    ]
    for card in cards:
        assert "slots" in card.alt
        data = card._repr_mimebundle_()
        assert set(data) == {"text/html", "text/plain"} and data["text/plain"] == card.alt
        src = re.search(r'<img [^>]*src="data:image/png;base64,([^"]*)"', data["text/html"])[1]
        assert base64.b64decode(src).startswith(b"\x89PNG")
        assert f'alt="{html.escape(card.alt)}"' in data["text/html"]
        assert matplotlib.colors.to_hex(card.get_facecolor()) == style.CARD.lower()


def test_a_figure_is_the_same_bytes_each_time_and_leaves_no_trace(run):
    before = dict(matplotlib.rcParams)
    first = pool.pool_map(run[0][0])[0].png()
    assert first == pool.pool_map(run[0][0])[0].png()
    assert dict(matplotlib.rcParams) == before
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


def test_figures_need_neither_torch_nor_pyplot():
    code = "import sys, minikv.viz; print({'torch', 'matplotlib.pyplot'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def test_a_projector_gets_larger_text_in_a_picture_of_the_same_size(run, monkeypatch):
    def drawn():
        card, _ = pool.pool_map(run[0][0])
        [legend] = card.legends
        zoom = card.shown_size()[0] / style.PAGE_DPI / card.get_figwidth()
        wide = legend.get_window_extent(card.canvas.get_renderer()).width / card.bbox.width
        return card.shown_size(), zoom * card.axes[0].title.get_fontsize(), wide

    usual = drawn()
    monkeypatch.setenv("MINIKV_PROJECTOR", "1")
    large = drawn()
    assert large[0] == usual[0] and large[1] == pytest.approx(1.25 * usual[1])
    assert usual[2] <= 1 and large[2] <= 1  # no legend sticks out
    monkeypatch.setenv("MINIKV_PROJECTOR", "0")
    assert drawn() == usual


def test_a_label_is_cut_to_its_cell():
    assert style.fitted("plants", 1.0) == "plants"
    assert style.fitted("photosynthesis", 0.4) == "phot…"
    assert style.fitted("W", 0.01) == "W"  # never nothing


# --- the player --------------------------------------------------------------------------------


def test_the_player_names_the_steps_of_its_snapshots(run):
    of = players.pool_player(run[0][2:])
    assert of.labels == [f"after step {snap.step}" for snap in run[0][2:]]
    for (label, card), snap in zip(of.frames, run[0][2:], strict=True):
        assert card.alt.startswith(f"{label.capitalize()}:") and str(snap.step) in label
    assert isinstance(of.picture, style.Card)


def test_minikv_static_wins_over_a_live_kernel(run, monkeypatch):
    monkeypatch.setattr("IPython.get_ipython", lambda: type("Shell", (), {"kernel": object()}))
    monkeypatch.setitem(os.environ, "MINIKV_STATIC", "1")
    assert not style.is_live()
    monkeypatch.delitem(os.environ, "MINIKV_STATIC")
    assert style.is_live()


# --- the house, and the map in chapter 00 ------------------------------------------------------


def test_lines_of_minikv_count_code_alone(tmp_path):
    tmp_path.joinpath("request.py").write_text(
        '"""What it is.\n\nMore."""\n\nimport os  # why\n\n# a comment\n\n\n'
        'def f():\n    """Docs."""\n    return """two\nlines"""\n'
    )
    folder = tmp_path / "model"
    folder.mkdir()
    folder.joinpath("__init__.py").write_text("")
    folder.joinpath("b.py").write_text("x = (\n    1\n)\n")
    found = house.lines_of_minikv(package=tmp_path)
    assert found == [("request.py", 4, "What it is."), ("model/", 3, "b")]


def test_a_part_as_text_is_a_row_that_a_page_does_not_break():
    rows = [str(part) for part in house.lines_of_minikv((*house.ENGINE, "model/loader"))]
    for line in "\n".join(rows).splitlines():
        assert len(line) <= house.COLUMNS
    about = "one two " * 20 + "three"
    row, *more = str(house.Part("kv_cache/extent_tree.py", 1234, about)).splitlines()
    assert row.startswith("kv_cache/extent_tree.py 1,234 lines  one two")
    column = row.index("one two")
    assert more and all(line[:column].isspace() and line[column] != " " for line in more)
    assert " ".join([row[column:], *map(str.strip, more)]) == about
    assert str(house.Part("empty/", 0, "")) == "empty/                      0 lines"


def test_the_engines_parts_are_in_the_order_of_their_floors():
    names = [part.name.removesuffix(".py").rstrip("/") for part in house.lines_of_minikv()]
    assert names == [name for name in house.ENGINE if name in names] and "engine" in names


def test_the_map_in_chapter_00_marks_exactly_the_chapters_to_come():
    """Fails when a chapter lands: then its line in notebooks/src/00_welcome.py loses its mark."""
    text = (ROOT / "notebooks" / "src" / "00_welcome.py").read_text(encoding="utf-8")
    lines = re.findall(r"^# \| (\d\d) \|(.*)$", text, re.M)
    assert [number for number, _ in lines] == [f"{n:02d}" for n in range(11)]
    for number, line in lines:
        sources = list((ROOT / "notebooks" / "src").glob(f"{number}_*.py"))
        assert bool(sources) != ("*(coming)*" in line), f"chapter {number} in the map of chapter 00"
