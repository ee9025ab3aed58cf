"""Memory over time: what is recorded is what the manager holds, what is drawn is what was recorded,
and it reads in greyscale."""

import dataclasses
import html
import itertools
import re

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from minikv.experiments import LabSettings, lab_run
from minikv.kv_cache.base import KVCacheManager, cdiv
from minikv.kv_cache.contiguous import RESERVE_POLICIES, ContiguousKVCacheManager
from minikv.kv_cache.extents import FITS
from minikv.observe import RefusalRecorder, memory, slots_of, snapshot
from minikv.observe.pool import PoolSnapshot
from minikv.request import Request
from minikv.scheduler import Scheduler
from minikv.simulator import Simulation, StepTime
from minikv.specs import find_gpu, find_model
from minikv.viz import fragmentation, lab, maps, owners, players, strips, style

STATES = {"": "live", "'": "reserved", "_": "internal", "~": "rounding"}


def hand(cells, needed=0, *, time_s=0.0, one_piece=True):
    """A moment from a picture: "a a a' . . b b_": who holds each slot, and how; . is free."""
    slots = [(c[0], STATES[c[1:]]) if c != "." else (None, "free") for c in cells.split()]
    runs, start = [], 0
    for (owner, state), group in itertools.groupby(slots):
        size = len(list(group))
        runs.append(memory.Run(start, size, owner, state))
        start += size
    waiting = (memory.Waiting("w", needed),) if needed else ()
    return memory.Moment(time_s, 1, 1, one_piece, tuple(runs), waiting, len(waiting), 2)


TEN = "a a . . c c c' . . e"


class FirstFit(KVCacheManager):
    """Exact reservation in one piece, at the lowest place: slow and plain."""

    def num_blocks_for(self, request, num_tokens):
        return cdiv(request.max_kv_tokens, self.block_size)

    def allocate_slots(self, request, num_new_tokens):
        if request.request_id in self.tables:
            return self.tables[request.request_id]
        size, start = self.num_blocks_for(request, num_new_tokens), 0
        for table in sorted(self.tables.values(), key=lambda table: table.start):
            if table.start - start >= size:
                break
            start = table.stop
        if start + size > self.num_blocks:
            return None
        return self.set_table(request, range(start, start + size))

    def free(self, request):
        self.drop_table(request)


class Scattered(KVCacheManager):
    """A block at a time, the highest free one first, every second one first of all."""

    def allocate_slots(self, request, num_new_tokens):
        table = list(self.tables.get(request.request_id, ()))
        wanted = cdiv(request.num_computed_tokens + num_new_tokens, self.block_size) - len(table)
        held = {block for other in self.tables.values() for block in other}
        free = [b for b in range(self.num_blocks) if b not in held]
        free.sort(key=lambda b: (b % 2, -b))
        if wanted > len(free):
            return None
        return self.set_table(request, table + free[: max(0, wanted)])

    def free(self, request):
        self.drop_table(request)


def simulation(manager, **limits):
    step_time = StepTime(find_model("opt-13b"), find_gpu("A100-40G"))
    return Simulation(Scheduler(manager, **limits), step_time)


def requests_of(lengths):
    return [
        Request(f"r{i}", num_prompt_tokens=prompt, max_tokens=output)
        for i, (prompt, output) in enumerate(lengths)
    ]


def record(manager, lengths, **options):
    """(recorder, snapshots after each step, reports): requests r0, r1... all there at the start."""
    run = simulation(manager)
    recorder = memory.MemoryRecorder(run.core, **options)
    snapshots, reports = [], []

    def on_step(core):
        recorder(core)
        snapshots.append(snapshot(core))
        reports.append(core.manager.report())

    run.run(requests_of(lengths), on_step=on_step)
    return recorder, snapshots, reports


LENGTHS = [(5, 4), (9, 8), (3, 2), (12, 3), (4, 9), (14, 2), (2, 7)]


# --- the recording -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FirstFit, Scattered], ids=["one-piece", "scattered"])
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_moment_agrees_with_the_snapshot_slot_by_slot(kind, block_size):
    recorder, snapshots, reports = record(kind(32 // block_size, block_size), LENGTHS)
    assert len(recorder.moments) == len(snapshots) > 10
    for moment, snap, report in zip(recorder.moments, snapshots, reports, strict=True):
        slots = slots_of(snap)
        held = [run.owner for run in moment.runs for _ in range(run.num_slots)]
        states = [run.state for run in moment.runs for _ in range(run.num_slots)]
        assert (tuple(states), tuple(held)) == slots
        starts = [run.start_slot for run in moment.runs]
        assert starts == list(
            itertools.accumulate([r.num_slots for r in moment.runs[:-1]], initial=0)
        )
        assert all(a[2:] != b[2:] for a, b in itertools.pairwise(moment.runs))  # runs are merged
        assert (moment.free_slots, moment.num_slots) == (report.free, 32)
        assert moment.one_piece == (kind is FirstFit or not snap.tables)


@pytest.mark.parametrize("reserve", RESERVE_POLICIES)
@pytest.mark.parametrize("fit", ["first", "buddy"])
def test_a_moment_agrees_with_the_report_of_every_policy(fit, reserve):
    """Rounding included, and the free extents are the allocator's, which may be neighbours."""
    manager = ContiguousKVCacheManager(22, 4, max_model_len=16, reserve=reserve, fit=fit)
    run = simulation(manager)
    recorder = memory.MemoryRecorder(run.core)
    seen = set()

    def on_step(core):
        recorder(core)
        moment, report = recorder.moments[-1], manager.report()
        assert {state: moment.count(state) for state in memory.STATES} == {
            state: getattr(report, state) for state in memory.STATES
        }
        free = [(run.start_slot, run.num_slots) for run in moment.free]
        assert free == [(e.start * 4, e.num_blocks * 4) for e in manager.allocator.extents()]
        seen.update(run.state for run in moment.runs)

    run.run(requests_of(LENGTHS), on_step=on_step)
    assert (memory.ROUNDING in seen) == (fit == "buddy" and reserve != "max")


def test_a_moment_of_a_manager_that_is_called_by_hand():
    manager = ContiguousKVCacheManager(10, 1, max_model_len=10, reserve="exact")
    a, b, c, d = requests_of([(3, 1), (2, 1), (3, 2), (3, 1)])
    for request in (a, b, c):
        manager.allocate_slots(request, request.num_tokens)
        request.num_computed_tokens = request.num_tokens
    manager.free(b)
    moment = memory.moment_of(manager, [d])
    assert moment.runs == (
        memory.Run(0, 3, "r0", "live"),
        memory.Run(3, 2, None, "free"),
        memory.Run(5, 3, "r2", "live"),
        memory.Run(8, 1, "r2", "reserved"),
        memory.Run(9, 1, None, "free"),
    )
    _, drawn = maps.memory_map(moment)
    assert (drawn["needed"], drawn["free"], drawn["gap"], drawn["short"]) == (3, 3, (3, 2), 1)
    assert manager.allocate_slots(d, 3) is None  # the verdict is the manager's


def test_a_shared_block_counts_once_and_as_live():
    snap = PoolSnapshot(3, 6, 2, {"a": (4, 1), "b": (4, 0)}, {"a": 1, "b": 4}, {"a": 2, "b": 4})
    assert memory.runs_of(snap) == [
        memory.Run(0, 2, "b", "live"),
        memory.Run(2, 2, "a", "internal"),
        memory.Run(4, 4, None, "free"),
        memory.Run(8, 1, "a", "live"),
        memory.Run(9, 1, "b", "live"),
        memory.Run(10, 2, None, "free"),
    ]


def test_a_refusal_is_the_state_in_the_middle_of_the_step():
    """r2 is refused while r0 still holds its slots; at the end of that step r0 has left."""
    recorder, *_ = record(FirstFit(10, 1), [(3, 1), (4, 4), (5, 1)])
    (refusal,) = recorder.refusals
    assert refusal.waiting == (memory.Waiting("r2", 5),)
    assert [run[1:3] for run in refusal.runs] == [(3, "r0"), (7, "r1")]
    assert refusal.free_slots == 0 and not memory.enough_in_sum(refusal)
    assert recorder.moments[0].owners == ["r1"]


def test_who_is_refused_again_or_steps_back_is_no_first_attempt():
    run = simulation(Scattered(10, 1))
    recorder = memory.MemoryRecorder(run.core)
    lengths = [(4, 6), (4, 6), (8, 2)]
    run.run(requests_of(lengths), on_step=recorder)
    assert run.core.scheduler.num_preemptions > 0
    assert [r.waiting for r in recorder.refusals] == [(memory.Waiting("r2", 8),)]


def test_the_refusals_are_those_of_the_experiments():
    """Same rule, same numbers as RefusalRecorder's, whether the core was known before or not."""
    for known in (True, False):
        run = simulation(
            ContiguousKVCacheManager(22, 4, max_model_len=16, reserve="exact", fit="buddy")
        )
        plain = RefusalRecorder(run.core)
        recorder = memory.MemoryRecorder(run.core if known else None)
        run.run(requests_of([(1, 1), *LENGTHS, *LENGTHS][:12]), on_step=recorder)
        found = [
            (r.waiting[0].request_id, r.time_s, r.free_slots / 88, r.largest_free_slots / 88)
            for r in recorder.recording.refusals
        ]
        assert len(found) >= (3 if known else 2)
        expected = plain.refusals[-len(found) :]
        assert found == [
            (r.request_id, r.time_s, r.free_share, r.largest_extent_share) for r in expected
        ]
        assert [memory.enough_in_sum(r) for r in recorder.refusals] == [
            r.had_enough_in_sum for r in expected
        ]


def test_a_long_recording_stays_small_and_even():
    recorder, snapshots, _ = record(FirstFit(400, 1), [(20, 300)], max_rows=16)
    assert len(snapshots) == 300 and 8 <= len(recorder.moments) <= 16
    gaps = np.diff([moment.time_s for moment in recorder.moments])
    assert gaps[:-1].max() < 1.5 * gaps[:-1].min()
    assert recorder.moments[0].step == 1 and recorder.moments[-1].step > 250


def test_moments_lie_every_s_apart():
    recorder, snapshots, _ = record(FirstFit(400, 1), [(20, 300)], every_s=0.5)
    assert len(recorder.moments) < len(snapshots) / 5
    assert np.diff([moment.time_s for moment in recorder.moments]).min() >= 0.5


@pytest.mark.parametrize(
    "options, message",
    [
        ({"every_s": -1}, "every_s is -1.0"),
        ({"max_rows": 1}, "max_rows is 1, but must be at least"),
    ],
    ids=["every_s", "max_rows"],
)
def test_a_recorder_refuses_bad_limits(options, message):
    with pytest.raises(ValueError, match=message):
        memory.MemoryRecorder(simulation(FirstFit(4, 1)).core, **options)


def test_a_part_of_a_recording():
    refused = hand(TEN, 3, time_s=1.0), hand(TEN, 9, time_s=2.5)
    part = recording(*ROWS, refusals=refused).between(1.0, 2.0)
    assert [m.time_s for m in part.moments] == [1.0, 2.0]
    assert [r.time_s for r in part.refusals] == [1.0]


# --- the map -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cells, needed, one_piece, expected",
    [
        (TEN, 3, True, "'w' needs 3 slots; 4 are free; the largest gap is 2: it waits"),
        (TEN, 2, True, "'w' needs 2 slots; 4 are free; the largest gap is 2: it fits"),
        (TEN, 5, True, "'w' needs 5 slots; 4 are free: too little memory"),
        (TEN, 3, False, "'w' needs 3 slots; 4 are free, in 2 pieces, and any will do: it fits"),
        (TEN, 0, True, "4 of 10 slots are free; the largest gap is 2"),
        ("a .", 0, False, "1 of 2 slots are free, in 1 piece"),
        ("a a", 0, True, "no slot is free"),
    ],
    ids=["fragmented", "fits", "too-little", "paged", "nobody", "paged-nobody", "full"],
)
def test_the_verdict(cells, needed, one_piece, expected):
    card, drawn = maps.memory_map(hand(cells, needed, one_piece=one_piece))
    assert drawn["verdict"] == expected == card._suptitle.get_text()
    assert expected in card.alt and card.png()


def test_the_map_returns_what_it_drew():
    _, drawn = maps.memory_map(hand(TEN, 3))
    assert (drawn["gap"], drawn["free"], drawn["needed"], drawn["short"]) == ((2, 2), 4, 3, 1)
    assert maps.memory_map(hand(TEN, 3, one_piece=False))[1]["short"] == 0
    assert maps.memory_map(hand("a a b", 3))[1]["gap"] is None


def rectangles(card, face):
    """(x, width) of the rectangles of a colour, from left to right."""
    found = [p for p in card.axes[0].patches if to_hex(p.get_facecolor()) == face.lower()]
    return sorted(bar for patch in found for bar in bars(patch))


def bars(patch):
    """(x, width) of a rectangle, or of each one that a patch is made of."""
    if isinstance(patch, Rectangle):
        return [(patch.get_x(), patch.get_width())]
    corners = patch.get_path().vertices.reshape(-1, 5, 2)[:, :, 0]
    return [(x.min(), x.max() - x.min()) for x in corners]


def test_the_waiting_request_is_drawn_to_the_pools_scale():
    card, _ = maps.memory_map(hand(TEN, 3))
    assert rectangles(card, maps.LIGHT) == [(2, 2)]  # as far as the gap goes
    assert rectangles(card, style.INK) == [(4, 1)]  # and beyond it
    card, _ = maps.memory_map(hand("a . b b b c c . . .", 4))  # no room to the right of the gap
    assert rectangles(card, maps.LIGHT) == [(7, 3)] and rectangles(card, style.INK) == [(6, 1)]


def test_the_drawn_runs_are_the_data():
    card, _ = maps.memory_map(hand("a a a' . b_ b~ . ."))
    drawn = {}
    for patch in card.axes[0].patches:
        hatch = patch.get_hatch() or ""
        state = {"/": "reserved", ".": "internal", "-": "rounding"}.get(hatch[:1])
        if state or to_hex(patch.get_facecolor()) in [c.lower() for c in style.COLOURS]:
            drawn |= {x: (state or "live", width) for x, width in bars(patch)}
    assert drawn == {0: ("live", 2), 2: ("reserved", 1), 4: ("internal", 1), 5: ("rounding", 1)}


def test_maps_draw_each_moment():
    moments = [("before", hand("a a b b . .")), ("after", hand("a a . . . .", 5))]
    card, drawn = maps.memory_maps(moments, title="b leaves")
    assert [d["gap"] for d in drawn] == [(4, 2), (2, 4)]
    assert "after: " in card.alt and "needs 5 slots" in card.alt and card.png()


def test_no_label_of_the_map_is_clipped_or_overlaps():
    long = memory.Moment(0.0, 1, 1, True, (
        memory.Run(0, 9000, "a-request-with-a-long-name", "live"),
        memory.Run(9000, 3000, None, "free"),
        memory.Run(12000, 3700, "another-long-name-42", "live"),
    ), (memory.Waiting("long-12", 3500),), 1, 2)  # fmt: skip
    for moment in (long, hand(TEN, 3), hand(TEN, 9), hand(". a . .", 1)):
        card, _ = maps.memory_map(moment)
        with style.look():
            card.draw_without_rendering()  # lays it out
        texts = [card._suptitle, *card.axes[0].texts, *card.axes[0].get_yticklabels()]
        boxes = {text.get_text(): text.get_window_extent() for text in texts}
        for text, box in boxes.items():
            assert 0 <= box.x0 < box.x1 <= card.bbox.x1 and box.y1 <= card.bbox.y1, text
        for (one, a), (other, b) in itertools.combinations(boxes.items(), 2):
            assert not a.overlaps(b), (one, other)


# --- colours -----------------------------------------------------------------------------------


def test_neighbours_in_memory_and_in_time_differ_in_colour():
    recorder, *_ = record(FirstFit(60, 1), [(3 + i % 7, 2 + 5 * i % 11) for i in range(80)])
    colours = owners.colours_of(recorder.moments)
    assert len(colours) == 80 and set(colours.values()) == set(style.COLOURS)
    for moment in recorder.moments:
        held = [run.owner for run in moment.runs if run.owner]
        for a, b in itertools.pairwise(held):
            assert a == b or colours[a] != colours[b]


# --- the strip ---------------------------------------------------------------------------------


def recording(*rows, refusals=()):
    moments = [hand(row, time_s=float(i)) for i, row in enumerate(rows)]
    return memory.Recording((*moments, moments[-1]._replace(time_s=float(len(rows)))), refusals)


ROWS = ("a a a' .", "a a a .", "b b_ . .")


def test_the_strip_shows_each_slot_at_each_time():
    strip = strips.strip_of(recording(*ROWS), 4, 3)
    assert strip.names == ("a", "b") and strip.slots == (0, 1, 2, 3)
    assert strip.times == (0.5, 1.5, 2.5)
    assert strip.owners.tolist() == [[0, 0, 1], [0, 0, 1], [0, 0, -1], [-1, -1, -1]]
    assert strip.states.tolist() == [[0, 0, 0], [0, 0, 2], [1, 0, -1], [-1, -1, -1]]


def test_a_moment_is_shown_from_its_own_time_on():
    strip = strips.strip_of(recording("a .", ". b"), 2, 2, start=0.5, end=2.5)
    assert strip.times == (1.0, 2.0) and strip.owners[:, 0].tolist() == [-1, 1]


def test_the_strip_is_drawn_as_it_says():
    """Every point: its colour is the owner's, free is white, what is only reserved is lighter."""
    card, strip = strips.memory_strip(recording(*ROWS))
    (image,) = card.axes[0].images
    assert np.array_equal(image.get_array(), strip.image) and image.origin == "lower"
    assert tuple(image.get_extent()) == (0, 3, 0, 4)
    colours = owners.colours_of(recording(*ROWS).moments)
    assert (strip.image[strip.owners < 0] == 1).all()
    for number, name in enumerate(strip.names):
        live = strip.image[(strip.owners == number) & (strip.states == 0)]
        assert {to_hex(point) for point in live} == {colours[name].lower()}
        held = strip.image[(strip.owners == number) & (strip.states > 0)]
        lightness = np.mean([style.lightness(to_hex(point)) for point in held])
        assert style.lightness(colours[name]) + 10 < lightness < 99.5
        assert len({to_hex(point) for point in held}) == 2  # a pattern, not a plain tint


def test_a_highlighted_request_has_one_colour_in_all_strips():
    other = ("b a a .", "b . . c", "b b b c")
    plain = [strips.strip_of(recording(*rows), 4, 3) for rows in (ROWS, other)]
    numbers = [strip.names.index("b") for strip in plain]

    def points(drawn):
        return [
            {to_hex(p) for p in strip.image[(strip.owners == number) & (strip.states == 0)]}
            for strip, number in zip(drawn, numbers, strict=True)
        ]

    assert points(plain)[0] != points(plain)[1]  # alone, each chooses its own
    _, lit = strips.memory_strips([("", recording(*ROWS)), ("", recording(*other))], highlight="b")
    first, second = points(lit)
    assert first == second and len(first) == 1


def test_the_legend_of_a_highlighted_strip_has_its_colour_and_the_grey_of_the_others():
    def faces(card):
        legend = card.legends[0]
        words = [text.get_text() for text in legend.get_texts()]
        return words, {to_hex(p.get_facecolor()) for p in legend.get_patches()}

    (strip,) = strips.memory_strips([("", recording(*ROWS))], highlight="b")[1]
    own = {
        to_hex(p)
        for p in strip.image[(strip.owners == strip.names.index("b")) & (strip.states == 0)]
    }
    words, shown = faces(strips.memory_strips([("", recording(*ROWS))], highlight="b")[0])
    assert "other requests" in words and own | {to_hex(strips.DIMMED)} <= shown
    assert not ({to_hex(c) for c in style.COLOURS} - own) & shown
    words, shown = faces(strips.memory_strips([("", recording(*ROWS))])[0])
    assert "other requests" not in words and to_hex(strips.DIMMED) not in shown


def test_the_pixels_of_the_saved_picture_are_the_strips(tmp_path):
    from PIL import Image

    card, strip = strips.memory_strip(recording(*ROWS))
    card.save(tmp_path / "strip.png")
    box = card.axes[0].get_window_extent()
    scale = style.DPI / card.dpi
    with Image.open(tmp_path / "strip.png") as picture:
        pixels = np.asarray(picture.convert("RGB")) / 255
    height, width = strip.owners.shape
    for slot, moment in itertools.product(range(4), range(3)):
        i, j = int((slot + 0.5) * height / 4), int((moment + 0.5) * width / 3)
        y = pixels.shape[0] - round(box.y0 * scale) - i
        x = round(box.x0 * scale) + j
        near = pixels[y - 4 : y + 5, x - 4 : x + 5].mean(axis=(0, 1))
        drawn = strip.image[i - 4 : i + 5, j - 4 : j + 5].mean(axis=(0, 1))
        assert np.abs(near - drawn).max() < 0.1, (slot, moment)


def test_states_of_the_strip_differ_in_greyscale():
    rows = ("a a' a_ a~ .",) * 2
    for colour in style.COLOURS:
        strip = strips.strip_of(recording(*rows), 100, 60)
        image = strips._paint(strip.owners, strip.states, [colour])
        means = [
            np.mean([style.lightness(to_hex(point)) for point in image[strip.states == state][::7]])
            for state in (0, 1, 2, 3, -1)
        ]
        gap = 2 if colour == "#F0E442" else 5  # yellow is nearly white in grey: the pattern tells
        live, reserved, _, _, free = means
        assert live + gap < reserved < free - 1


def test_a_line_parts_neighbours_of_one_colour():
    strip = strips.strip_of(recording("a b", "a b"), 10, 8)
    ink = [[to_hex(point) == style.INK.lower() for point in row] for row in strip.image]
    assert not np.any(ink)  # they differ in colour
    image = strips._paint(strip.owners, strip.states, [style.COLOURS[0]] * 2)
    ink = np.array([[to_hex(point) == style.INK.lower() for point in row] for row in image])
    assert ink[5].all() and ink.sum() == 8


def test_highlighted_requests_keep_their_colour_and_the_others_turn_grey():
    plain, lit = (strips.strip_of(recording(*ROWS), 4, 3, highlight=h) for h in ((), ("b",)))
    assert (plain.image[0, 2] == lit.image[0, 2]).all()
    assert to_hex(lit.image[0, 0]) == strips.DIMMED


def test_two_strips_stand_on_one_time_axis_with_their_refusals():
    refused = hand(TEN, 3, time_s=1.0), hand(TEN, 9, time_s=2.0)
    one, two = recording(*ROWS, refusals=refused), recording(*ROWS, *ROWS)
    card, drawn = strips.memory_strips([("in one piece", one), ("scattered", two)])
    assert [ax.get_xlim() for ax in card.axes] == [(0, 6), (0, 6)]
    assert drawn[0].refused == [(1.0, 3, True), (2.0, 9, False)] and drawn[1].refused == []
    assert (drawn[0].owners[:, drawn[0].owners.shape[1] // 2 + 2 :] == -1).all()  # it has ended
    lanes = [[path[0, 0] for path in lane.get_segments()] for lane in card.axes[0].collections]
    assert lanes == [[1.0], [2.0]]
    assert "in one piece: 4 slots from 0 to 3 s" in card.alt
    assert "2 requests were refused at their first attempt, 1 of them though" in card.alt


def test_strips_of_large_pools_sample_them():
    runs = (memory.Run(0, 7850, "a", "live"), memory.Run(7850, 7850, None, "free"))
    moments = [memory.Moment(float(t), t, 1, True, runs) for t in range(3)]
    _, strip = strips.memory_strip(memory.Recording(tuple(moments)))
    assert strip.image.shape[0] < 800
    assert abs((strip.owners >= 0).mean() - 0.5) < 0.01


# --- free memory against the largest piece -----------------------------------------------------


def test_free_vs_largest_returns_both_lines():
    refused = hand(TEN, 3, time_s=1.0), hand(TEN, 9, time_s=2.0)
    moments = tuple(
        hand(cells, time_s=float(t)) for t, cells in enumerate((TEN, "a . . . . b c d e f"))
    )
    card, drawn = fragmentation.free_vs_largest(memory.Recording(moments, refused))
    assert drawn["free"] == [0.4, 0.4] and drawn["largest"] == [0.2, 0.4]
    assert drawn["refused"] == [(1.0, 0.3, True), (2.0, 0.9, False)]
    above, below = (line.get_ydata() for line in card.axes[0].lines)
    assert list(above) == [40, 40] and list(below) == [20, 40]
    shade = card.axes[0].collections[0].get_paths()[0].vertices.tolist()
    assert [1, 20] in shade  # each moment lasts until the next, as the lines do
    assert "at 0 s: 40% free, 20% in the largest gap" in card.alt and card.png()
    few = (hand("a . " + "b " * 8, 1, time_s=1.0), *refused)
    card, drawn = fragmentation.free_vs_largest(memory.Recording(moments, few), min_free_share=0.4)
    assert [time_s for time_s, _, _ in drawn["refused"]] == [1.0, 2.0]
    assert "2 requests were refused at their first attempt while 40% were free" in card.alt


def test_a_long_recording_is_drawn_as_means_and_says_so():
    rows = [TEN, "a . . . . b c d e f"] * 500
    moments = tuple(hand(cells, time_s=float(t)) for t, cells in enumerate(rows))
    card, drawn = fragmentation.free_vs_largest(memory.Recording(moments))
    assert 100 < len(drawn["times"]) <= fragmentation.MAX_POINTS + 1
    assert np.mean(drawn["largest"]) == pytest.approx(0.3, abs=0.01)
    assert "means over 6.24 s" in card.legends[0].get_texts()[0].get_text()


def test_the_histogram_counts_pieces_and_their_slots():
    first, second = hand(TEN), hand("a . a . . . . . b c")
    card, buckets = fragmentation.free_extent_histogram(memory.Recording((first, second)), needed=4)
    assert buckets == {1: (0.5, 0.5), 2: (1.0, 2.0), 4: (0.5, 2.5)}
    heights = [bar.get_height() for bar in card.axes[0].patches]
    assert heights == [0.5, 1.0, 0.5]
    light = [bar.get_hatch() is not None for bar in card.axes[0].patches]
    assert light == [True, True, False]  # all of 1, and of 2 to 3, are too short for 4
    assert "4 to 7 slots: 0.5 pieces, 2 slots" in card.alt and "needs 4 slots" in card.alt
    assert fragmentation.free_extent_histogram(first)[1] == {2: (2.0, 4.0)}
    assert fragmentation.free_extent_histogram(hand("a a"))[0].png()


# --- animation and widget ----------------------------------------------------------------------


def test_the_player_walks_through_the_recording_and_names_the_seconds():
    of = players.memory_player(recording(*ROWS), count=4)
    assert of.labels == ["0.0 s", "1.0 s", "2.0 s", "3.0 s"]
    for (label, card), free in zip(of.frames, (1, 1, 2, 2), strict=True):
        assert f"at {label}" in card.alt and f" {free} are free" in card.alt
    late = recording(*ROWS).between(1, 3)
    assert players.memory_player(late, count=3).labels == ["1.0 s", "2.0 s", "3.0 s"]


def test_two_recordings_are_played_at_the_same_time():
    late = memory.Recording((hand("z z z z", time_s=2.0), hand(". . . .", time_s=3.0)))
    of = players.memory_player([("first", recording(*ROWS)), ("late", late)], count=4)
    alt = of.frames[-1][1].alt
    assert (
        "first: The pool of 4 slots at 3.0 s" in alt and "late: The pool of 4 slots at 3.0" in alt
    )


def test_where_scripts_do_not_run_the_player_shows_four_moments():
    card = players.memory_player(recording(*ROWS), count=2).picture
    labels = [label.get_text() for label in card.axes[0].get_yticklabels()]
    assert labels == ["0.0 s", "1.0 s", "2.0 s", "3.0 s"]
    late = memory.Recording((hand("z z z z", time_s=1.5), hand(". . . .", time_s=3.0)))
    card = players.memory_player([("first", recording(*ROWS)), ("late", late)], count=2).picture
    labels = [label.get_text() for label in card.axes[0].get_yticklabels()]
    assert labels[-4:] == ["first 2.0 s", "late 1.5 s", "first 3.0 s", "late 3.0 s"]
    with pytest.raises(ValueError, match="count 1: it must be at least 2"):
        players.memory_player(recording(*ROWS), count=1)
    with pytest.raises(ValueError, match="'empty' holds no moment"):
        players.memory_player([("empty", memory.Recording(()))])


@pytest.fixture(scope="module")
def broken():
    return lab_run(LabSettings())


def test_a_run_of_the_lab_is_a_function_of_its_settings(broken):
    again = lab_run(LabSettings())
    assert again == broken
    assert lab_run(LabSettings(seed=1)) != broken


def test_the_lab_counts_what_was_recorded(broken):
    refusals = broken.recording.refusals
    paradox = [r for r in refusals if r.waiting[0].needed_slots <= r.free_slots]
    assert (broken.num_requests, broken.num_refused) == (300, len(refusals))
    assert broken.num_paradox == len(paradox) > 0  # the defaults break it
    assert broken.worst.free_slots == max(r.free_slots for r in paradox)
    needed = broken.worst.waiting[0].needed_slots
    assert broken.worst.largest_free_slots < needed <= broken.worst.free_slots
    assert broken.fullest.free_slots == min(m.free_slots for m in broken.recording.moments)


@pytest.mark.parametrize("reserve", RESERVE_POLICIES)
@pytest.mark.parametrize("fit", FITS)
def test_every_knob_of_the_lab_runs(fit, reserve):
    result = lab_run(LabSettings(fit=fit, reserve=reserve, rate=8.0))
    assert result.recording.moments[-1].num_slots == 6144
    for refusal in result.recording.refusals:  # the recorder's need is what the manager asked for
        assert refusal.largest_free_slots < refusal.waiting[0].needed_slots


def test_the_labs_figure_shows_the_meter_and_the_worst_moment(broken):
    card, drawn = lab.lab_figure(broken)
    assert drawn["refused"] == {
        "started at once": 300 - broken.num_refused,
        "too little free": broken.num_refused - broken.num_paradox,
        "enough free in total": broken.num_paradox,
    }
    assert drawn["worst"]["free"] == broken.worst.free_slots
    assert len(drawn["strip"].refused) == broken.num_refused
    bars = [bar.get_width() for bar in card.axes[1].patches]
    assert bars == list(drawn["refused"].values())
    assert f"{broken.num_paradox} of them though enough was free in sum" in card.alt


def test_a_picture_that_is_drawn_again_is_like_a_new_one(broken):
    other = lab_run(LabSettings(reserve="max"))
    assert other.worst is None  # slabs of one size: enough in sum is enough
    picture = lab.LabPicture()
    pictures = []
    for result in (broken, other, broken):
        picture.draw(result)
        pictures.append(picture.png())
    assert pictures[0] == pictures[2] != pictures[1]
    fresh = lab.LabPicture()
    fresh.draw(other)
    assert fresh.png() == pictures[1]


def test_the_labs_sliders_run_it_anew_and_keep_the_run_before(broken, monkeypatch):
    monkeypatch.setattr(lab, "is_live", lambda: True)
    live = lab.fragmentation_lab(lab_run)

    def alt():
        return html.unescape(re.search('alt="(.*?)"', live.image.value)[1])

    first = lab.lab_figure(broken)[0].alt
    assert alt() == first
    live.controls["rate"].value = 2.0
    expected = lab.lab_figure(lab_run(LabSettings(rate=2.0)))[0].alt
    assert alt().startswith(expected + " The run before, 5 requests/s") and first in alt()
    assert expected != first


def test_every_control_of_the_lab_takes_arrow_keys_and_starts_on_its_own_grid(monkeypatch):
    import ipywidgets

    monkeypatch.setattr(lab, "is_live", lambda: True)
    controls = lab.fragmentation_lab(lab_run).controls
    assert set(controls) == {field.name for field in dataclasses.fields(LabSettings)}
    for name, control in controls.items():
        if isinstance(control, ipywidgets.SelectionSlider):  # a dropdown leaves arrows to the page
            assert control.value in control.options
        else:
            assert isinstance(control, ipywidgets.IntSlider | ipywidgets.FloatSlider)
            steps = (control.value - control.min) / control.step
            assert abs(steps - round(steps)) < 1e-9, name


def test_what_a_notebook_keeps_of_the_lab_says_what_to_run(monkeypatch):
    monkeypatch.setattr(lab, "is_live", lambda: True)
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    live = lab.fragmentation_lab(lab_run)
    live._ipython_display_()
    widget, line = shown
    assert "application/vnd.jupyter.widget-view+json" in widget
    assert "<img " in widget["text/html"] and widget["text/plain"].startswith("300 requests")
    assert "Run All Above Selected Cell" in line["text/html"]


def test_seconds_come_back_after_minutes(broken):
    slow = lab_run(LabSettings(rate=0.5))
    assert slow.recording.moments[-1].time_s > 600
    picture = lab.LabPicture()
    texts = []
    for result in (broken, slow, broken):
        picture.draw(result)
        picture.png()
        axis = picture.strip_axes.xaxis
        texts.append((axis.get_label_text()[:7], [t.get_text() for t in axis.get_ticklabels()]))
    assert texts[0] == texts[2] and texts[0][0] == "seconds" and texts[1][0] == "minutes"
    assert len(texts[0][1]) >= 4


def test_without_a_kernel_the_lab_is_a_figure(broken):
    card = lab.fragmentation_lab(lab_run)
    assert isinstance(card, style.Card) and card.alt == lab.lab_figure(broken)[0].alt


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rate": 0}, "rate is 0.0"),
        ({"long_share": 1.5}, "long_share is 1.5"),
        ({"num_slots": 100}, "num_slots is 100, but must be at least 4096"),
        ({"fit": "tight"}, "fit is 'tight'; known: first"),
        ({"reserve": "all"}, "reserve is 'all'; known: max, pow2"),
    ],
    ids=["rate", "long_share", "num_slots", "fit", "reserve"],
)
def test_the_lab_refuses_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        LabSettings(**settings)
