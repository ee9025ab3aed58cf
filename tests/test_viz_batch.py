"""Chapter 2's figures: they draw what the tables, the steps and the reports say, they read in
greyscale, and they leave no trace."""

import itertools
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import pytest

from minikv.core import EngineCore
from minikv.kv_cache.base import KVCacheManager, MemoryReport
from minikv.kv_cache.contiguous import ContiguousKVCacheManager
from minikv.observe import PoolSnapshot, record, rows_of, snapshot, steps
from minikv.observe.tokens import Row
from minikv.request import Request
from minikv.scheduler import Scheduler
from minikv.simulator import Simulation, StepTime
from minikv.specs import GPUS, MODELS
from minikv.static_batching import StaticScheduler
from minikv.viz import batch, gantt, states, style

ROOT = Path(__file__).resolve().parents[1]
OUTPUTS = {"a": 3, "b": 6, "$c": 1, "d": 4, "e": 2}  # $ must not start mathematics


def static(num_steps, lengths=(7, 4), answers=(3, 6)):
    """Two rows of a static batch between other requests' slabs, after some steps."""
    manager = ContiguousKVCacheManager(24, 4, max_model_len=12)
    others = [Request(f"o{i}", num_prompt_tokens=9, max_tokens=3) for i in range(5)]
    for other in others:
        manager.allocate_slots(other, 9)
    manager.free(others[1])
    manager.free(others[3])
    scheduler = StaticScheduler(manager)
    for name, length, answer in zip("ab", lengths, answers, strict=True):
        scheduler.add(Request(name, list(range(1, length + 1)), max_tokens=answer))
    for step in range(num_steps):
        scheduled, _ = scheduler.schedule()
        scheduler.update(scheduled, [90 + step] * len(scheduled), 0.0, step)
    return scheduler


def drawn_of(scheduler, **options):
    snap = snapshot(scheduler, 1)
    return snap, *batch.batch_memory(snap, rows_of(scheduler, str), **options)


def simulated(scheduler_class, num_places=2, report_every=0):
    manager = ContiguousKVCacheManager(64, 4, max_model_len=16)
    scheduler = scheduler_class(manager, max_num_seqs=num_places)
    step_time = StepTime(MODELS["SmolLM2-135M"], GPUS["H100 SXM"])
    run = Simulation(scheduler, step_time, report_every=report_every)
    recorder = record(run.core)
    prompts = enumerate(OUTPUTS.items(), 2)
    run.run([Request(n, num_prompt_tokens=i, max_tokens=out) for i, (n, out) in prompts])
    return run, recorder


# --- the padded batch --------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", range(1, 6))
@pytest.mark.parametrize("lengths", [(7, 4), (4, 7), (5, 5), (1, 7)])
def test_every_token_is_linked_to_the_slot_that_its_table_says(num_steps, lengths):
    scheduler = static(num_steps, lengths)
    _, card, drawn = drawn_of(scheduler)
    assert {c.request_id for c in drawn.cells} == {"a", "b"}
    for cell in drawn.cells:
        block_id = scheduler.manager.tables[cell.request_id][cell.column // 4]
        assert cell.slot == block_id * 4 + cell.column % 4
        assert drawn.states[cell.slot] == cell.kind
    width = max(lengths) + num_steps - 1
    assert [len(drawn.slots(name)) for name in "ab"] == [width, width]
    assert card.png(dpi=40).startswith(b"\x89PNG")


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_the_states_are_the_managers_own_report(num_steps):
    scheduler = static(num_steps)
    _, _, drawn = drawn_of(scheduler)
    for other in [name for name in scheduler.manager.tables if name.startswith("o")]:
        scheduler.manager.free(scheduler.manager.requests[other])
    report = scheduler.manager.report()
    counts = {state: drawn.states.count(state) for state in states.LOOKS}
    assert (counts["live"], counts["reserved"]) == (report.live, report.reserved)
    assert counts["pad"] + counts["internal"] == report.internal
    assert counts["other"] == 3 * 12 and counts["free"] == report.free - 3 * 12


def test_pads_stand_before_the_prompt_and_after_the_end():
    scheduler = static(5)
    rows = rows_of(scheduler, str)
    # 7 prompt tokens and 2 of the answer: the third was sampled and is never fed.
    assert rows["a"].pads == (False,) * 9 + (True,) * 2
    assert rows["a"].labels[6:] == ("7", "90", "91", "<pad>", "<pad>")
    assert rows["b"].pads == (True,) * 3 + (False,) * 8
    assert rows["b"].positions == (None,) * 3 + tuple(range(8))


def test_the_lines_end_where_the_slots_are_drawn():
    """The data could be right and the picture wrong."""
    _, card, drawn = drawn_of(static(3))
    [ax] = card.axes
    by_gid = {artist.get_gid(): artist for artist in ax.get_children() if artist.get_gid()}
    assert len(by_gid) == 3 * len(drawn.cells)
    for cell in drawn.cells:
        name = f"{cell.request_id}|{cell.column}"
        xs, ys = by_gid[f"link|{name}"].get_data()
        for part, x, y in (("cell", xs[0], ys[0]), ("slot", xs[-1], ys[-1])):
            box = by_gid[f"{part}|{name}"]
            edge = box.get_y() + (box.get_height() if part == "cell" else 0)
            assert x == pytest.approx(box.get_x() + box.get_width() / 2)
            assert y == pytest.approx(edge)
    slots = {(by_gid[f"slot|{c.request_id}|{c.column}"].get_xy()) for c in drawn.cells}
    assert len(slots) == len(drawn.cells)


def crossings(card, name):
    """How often two links of one row cross each other."""
    lines = [a for a in card.axes[0].lines if (a.get_gid() or "").startswith(f"link|{name}|")]
    count = 0
    for one, other in itertools.combinations(lines, 2):
        for a, b in itertools.product(
            *(itertools.pairwise(zip(*x.get_data(), strict=True)) for x in (one, other))
        ):
            (ax0, ay0), (ax1, ay1) = a
            (bx0, by0), (bx1, by1) = b
            if (ax0 == ax1) == (bx0 == bx1):
                continue
            (vx, (v0, v1)), (hy, (h0, h1)) = (
                ((ax0, sorted((ay0, ay1))), (by0, sorted((bx0, bx1))))
                if ax0 == ax1
                else ((bx0, sorted((by0, by1))), (ay0, sorted((ax0, ax1))))
            )
            count += h0 < vx < h1 and v0 < hy < v1
    return count


def test_the_links_of_a_slab_do_not_cross():
    _, card, _ = drawn_of(static(4))
    assert crossings(card, "a") == crossings(card, "b") == 0


def test_any_tables_can_be_drawn_scattered_ones_too():
    tables = {"a": (14, 3), "b": (8,), "o": (0, 13)}
    live = {"a": 7, "b": 4, "o": 8}
    snap = PoolSnapshot(1, 24, 4, tables, live, live)
    labels = {"a": tuple("abcdefg"), "b": tuple("wxyz")}
    rows = {
        name: Row(text, (False,) * len(text), tuple(range(len(text))), len(text))
        for name, text in labels.items()
    }
    card, drawn = batch.batch_memory(snap, rows, slots_per_line=12)
    assert drawn.slots("a") == [56, 57, 58, 59, 12, 13, 14]
    assert drawn.slots("b") == [32, 33, 34, 35]
    assert drawn.states[15] == "internal" and drawn.states.count("other") == 8
    assert "slots 56 to 59, 12 to 14" in card.alt


def test_without_a_row_there_is_nothing_to_draw():
    manager = KVCacheManager(4, 4)
    with pytest.raises(ValueError, match="no row to draw"):
        batch.batch_memory(PoolSnapshot(0, 4, 4, {}, {}, {}), {})
    assert manager.tables == {}


def test_the_hover_picture_is_one_svg_whose_rules_name_what_it_holds():
    _, card, drawn = drawn_of(static(2))
    one, two = batch.hoverable(card, drawn), batch.hoverable(card, drawn)
    ids = []
    for text in (one, two):
        style_sheet, _, svg = text.partition("</style>")
        assert "*{" not in text.replace(" *{", "")  # matplotlib's rules for all stay in the figure
        found = [e.get("id") for e in ElementTree.fromstring(svg).iter() if e.get("id")]
        assert style_sheet.count(":hover") == 9 * len(drawn.cells)
        for number in range(len(drawn.cells)):
            for part in ("cell", "link", "slot"):
                assert sum(i.endswith(f"-{part}-{number}") for i in found) == 1
        ids.append(set(found))
    assert not ids[0] & ids[1]  # both may stand on one page


def test_the_explorer_follows_its_sliders_and_falls_back_to_a_figure(monkeypatch):
    def draw(step, length):
        return drawn_of(static(step, (length, 4)))[1:]

    assert isinstance(batch.batch_explorer(draw, step=(5, 1, 5), length=(7, 1, 7)), style.Card)
    pytest.importorskip("ipywidgets")
    monkeypatch.setattr(batch, "is_live", lambda: True)
    live = batch.batch_explorer(draw, step=(5, 1, 5), length=(7, 1, 7))
    controls, image = live.widget.children
    step, length = controls.children
    before = image.value
    assert (step.min, step.max, step.value, length.value) == (1, 5, 5, 7)
    step.value = 1
    assert image.value != before and image.value.count("-link-") < before.count("-link-")


# --- who ran when ------------------------------------------------------------------------------


def test_a_recorder_sees_every_step_and_changes_none():
    run, recorder = simulated(Scheduler)
    plain = Simulation(
        Scheduler(ContiguousKVCacheManager(64, 4, max_model_len=16), max_num_seqs=2),
        StepTime(MODELS["SmolLM2-135M"], GPUS["H100 SXM"]),
    )
    prompts = enumerate(OUTPUTS.items(), 2)
    plain.run([Request(n, num_prompt_tokens=i, max_tokens=out) for i, (n, out) in prompts])
    assert plain.core.metrics.steps == run.core.metrics.steps
    assert [len(s) for s in recorder.steps] == [s.num_seqs for s in run.core.metrics.steps]
    assert [sum(e.num_tokens for e in s) for s in recorder.steps] == [
        s.num_tokens for s in run.core.metrics.steps
    ]


@pytest.mark.parametrize("scheduler_class", [Scheduler, StaticScheduler])
def test_lanes_hold_each_request_in_one_place_for_as_long_as_it_ran(scheduler_class):
    run, recorder = simulated(scheduler_class)
    lanes = steps.lanes_of(recorder.steps, 2)
    for request in run.requests:
        name = request.request_id
        found = [
            (place, step, entry.kind)
            for place, lane in enumerate(lanes.lanes)
            for step, entry in enumerate(lane)
            if entry and entry.request_id == name
        ]
        assert len({place for place, _, _ in found}) == 1
        [(first, last)] = request.token_runs
        useful = [step for _, step, kind in found if kind != steps.FINISHED]
        assert useful == list(range(first, last + 1)) and len(useful) == OUTPUTS[name]
        assert found[0][2] == steps.PROMPT
    assert lanes.count(steps.PROMPT) + lanes.count(steps.DECODE) == sum(OUTPUTS.values())
    assert lanes.utilisation == pytest.approx(sum(OUTPUTS.values()) / (2 * lanes.num_steps))


def test_static_batches_waste_rows_and_iteration_level_ones_none():
    _, static_run = simulated(StaticScheduler)
    _, run = simulated(Scheduler)
    assert len(static_run.steps) == 6 + 4 + 2
    assert steps.lanes_of(static_run.steps, 2).count(steps.FINISHED) == 3 + 3
    # Prompts of 2 and 3, of 4 and 5, of 6: one pad in each of the first two batches.
    pads = [e.num_tokens - e.num_useful for s in static_run.steps for e in s if e.kind == "prompt"]
    assert sum(pads) == 2
    assert all(e.num_useful == e.num_tokens > 0 for s in run.steps for e in s)


def test_the_chart_is_drawn_as_its_data_says():
    runs = {"static": simulated(StaticScheduler)[1].steps, "other": simulated(Scheduler)[1].steps}
    card, data = gantt.gantt(runs, 2)
    for ax, run in zip(card.axes, data.values(), strict=True):
        hatched = [p for p in ax.patches if p.get_hatch() and "x" in p.get_hatch()]
        assert round(sum(p.get_width() for p in hatched)) == run.count(steps.FINISHED)
        assert f"{run.num_steps} steps" in ax.get_title(loc="left")
    kinds = [gantt._look(kind, style.colour(0)) for kind in gantt.KINDS]
    assert len({kind.get("hatch") for kind in kinds}) == len(kinds)


# --- under load --------------------------------------------------------------------------------


def test_pool_over_time_is_the_reports():
    run, _ = simulated(Scheduler, report_every=1)
    times = [run.core.metrics.steps[i].end for i, _ in run.core.metrics.reports]
    reports = [report for _, report in run.core.metrics.reports]
    card, shares = gantt.pool_over_time(times, reports)
    assert shares["live"] == [r.live / 256 for r in reports]
    for at in zip(*shares.values(), strict=True):
        assert sum(at) == pytest.approx(1)
    assert card.png(dpi=40)
    external = MemoryReport(live=1, external=2, free=1)
    assert gantt.pool_over_time([0, 1], [external] * 2)[1]["free"] == [0.75, 0.75]


def test_figures_have_alt_text_are_repeatable_and_leave_no_trace():
    before = dict(matplotlib.rcParams)
    series = {"p50": [(1, 2.0), (2, 3.0)], "p99": [(1, 4.0), (2, 9.0)]}
    options = {"title": "T", "xlabel": "x", "ylabel": "y", "mark": (2, "limit")}
    for draw in (
        lambda: drawn_of(static(2))[1],
        lambda: gantt.gantt({"one": simulated(Scheduler)[1].steps})[0],
        lambda: gantt.curves(series, **options)[0],
        lambda: gantt.curves(series, log=True, **options)[0],
    ):
        card = draw()
        assert isinstance(card, style.Card) and len(card.alt) > 20
        assert card.png(dpi=40) == draw().png(dpi=40)
    assert dict(matplotlib.rcParams) == before


def test_recording_and_drawing_need_no_torch():
    code = "import sys, minikv.viz.batch, minikv.viz.gantt; print('torch' in sys.modules)"
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "False", done.stderr


def test_record_works_on_any_core():
    class Fake:
        def run(self, scheduled, copies):
            return [0] * len(scheduled)

    class Clock:
        def now(self):
            return 0.0

    core = EngineCore(Scheduler(ContiguousKVCacheManager(8, 4, max_model_len=16)), Fake(), Clock())
    recorder = record(core)
    core.scheduler.add(Request("r", num_prompt_tokens=5, max_tokens=2))
    core.step()
    core.step()
    assert recorder.steps == [[("r", "prompt", 5, 5)], [("r", "decode", 1, 1)]]
