"""Chapter 4's figures: every arrow and every slot is what the block table says, and a token without
a slot is drawn in none."""

import numpy as np
import pytest

from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.observe import MemoryRecorder, labels_of, rows_of, snapshot, translate
from minikv.request import Request
from minikv.scheduler import Scheduler
from minikv.simulator import Simulation, StepTime
from minikv.specs import GPUS, MODELS
from minikv.viz import batch, board, gathered, maps, pool, states, strips, style, tables

LABELS = {name: tuple(f"{name}{i}" for i in range(30)) for name in ("a", "$b")}


def scattered(block_size=4, num_steps=5):
    """Two requests whose blocks lie apart, after some steps, beside a third one."""
    manager = PagedKVCacheManager(48 // block_size, block_size)
    core = Simulation(Scheduler(manager), StepTime(MODELS["SmolLM2-135M"], GPUS["H100 SXM"])).core
    for name, length in (("a", 3), ("x", 4), ("$b", 6)):
        core.submit(Request(name, list(range(length)), max_tokens=9))
    for _ in range(num_steps):
        core.step()
    return core


def known(core):
    return {name: of for name, of in labels_of(core, str).items() if name != "x"}


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_a_position_is_translated_as_the_contract_says(block_size):
    core = scattered(block_size)
    snap = snapshot(core)
    for name, table in core.manager.tables.items():
        seen = [translate(snap, name, p) for p in range(len(table) * block_size)]
        for p, found in enumerate(seen):
            assert found.block_id == table[p // block_size] and found.position == p
            assert (found.logical_block, found.offset) == (p // block_size, p % block_size)
            assert found.slot == table[p // block_size] * block_size + p % block_size
        for p in (-1, len(table) * block_size):
            with pytest.raises(ValueError, match=f"position {p} .* has no slot"):
                translate(snap, name, p)


@pytest.mark.parametrize("num_steps", range(1, 9))
def test_an_arrow_leads_from_every_entry_to_its_block_and_no_other(num_steps, monkeypatch):
    ends, curve = [], tables.curve
    monkeypatch.setattr(tables, "curve", lambda *way: ends.append(way[1:3]) or curve(*way))
    core = scattered(num_steps=num_steps)
    snap = snapshot(core)
    card, arrows = tables.block_table_map(snap, known(core))
    for name in ("a", "$b"):
        own = [arrow for arrow in arrows if arrow.request_id == name]
        assert [a.block_id for a in own] == list(core.manager.tables[name])
        assert [a.logical_block for a in own] == list(range(len(own)))
        assert sum(a.num_live for a in own) == snap.num_live[name]
        assert all(a.num_live == 4 for a in own[:-1])
    pitch = tables.ROW + tables.GAP
    for (start, end), arrow in zip(ends, arrows, strict=True):
        assert end[1] == pytest.approx(0.3 + tables.ROW / 2 + pitch * arrow.block_id)
        if arrow.request_id == "a":
            assert start[1] - ends[0][0][1] == pytest.approx(pitch * arrow.logical_block)
    assert "The block table of 'a': logical block 0 is block" in card.alt
    assert card.png(dpi=40).startswith(b"\x89PNG")


def texts(card):
    return [text.get_text() for text in card.axes[0].texts]


def test_a_sampled_token_without_a_block_is_drawn_outside_of_all_blocks():
    core = scattered(num_steps=2)  # a: 4 tokens computed, the fifth sampled
    snap, labels = snapshot(core), labels_of(core, lambda t: f"t{t}")
    assert (snap.num_live["a"], len(labels["a"]), len(snap.tables["a"])) == (4, 5, 1)
    card, arrows = tables.block_table_map(snap, {"a": labels["a"]})
    assert len(arrows) == 1 and texts(card).count("none") == 1
    # The first four are drawn twice, in the sequence and in the pool; the fifth has no slot.
    assert len([t for t in texts(card) if t in labels["a"]]) == 2 * 4 + 1


def test_a_sampled_token_whose_block_is_there_is_not_drawn_in_the_pool():
    core = scattered(num_steps=1)  # a: 3 tokens computed, the fourth sampled, one block of 4
    snap, labels = snapshot(core), labels_of(core, lambda t: f"t{t}")
    assert (snap.num_live["a"], len(labels["a"]), len(snap.tables["a"])) == (3, 4, 1)
    card, _ = tables.block_table_map(snap, {"a": ("p", "q", "r", "sampled")})
    shown = ["sampled" if t.startswith("sampl") else t for t in texts(card)]
    assert (shown.count("r"), shown.count("sampled"), shown.count("none")) == (2, 1, 0)


def test_a_map_without_requests_or_of_unknown_ones_is_refused():
    snap = snapshot(scattered())
    with pytest.raises(ValueError, match="no table to draw"):
        tables.block_table_map(snap, {})
    with pytest.raises(ValueError, match="'z' holds no table; held: a, x"):
        tables.block_table_map(snap, {"z": ("t",)})


@pytest.mark.parametrize("position", range(8))
def test_the_board_shows_the_slots_of_all_tokens_up_to_its_own(position):
    core = scattered(num_steps=6)
    snap, labels = snapshot(core), known(core)
    card, found = board.translation(snap, "a", labels["a"], position)
    assert found == translate(snap, "a", position)
    count = max(len(labels["a"]), len(snap.tables["a"]) * 4)
    shown = [t for t in card.axes[0].texts if abs(t.get_position()[1] - 0.62) < 1e-6]
    slots = [int(t.get_text()) for t in shown if t.get_text() != "slot"]
    assert slots == [translate(snap, "a", p).slot for p in range(position + 1)]
    assert str(count - 1) in texts(card) and f"slot is {found.slot}." in card.alt
    assert any(f"= {found.slot}" in text for text in texts(card))
    tip = [a.xy for a in card.axes[0].texts if hasattr(a, "arrow_patch") and a.arrow_patch][-1]
    line, place = divmod(found.slot, 24)
    left = tables.WIDTH - board.MEMORY_WIDTH - 0.08
    assert tip[0] == pytest.approx(left + board.MEMORY_WIDTH / 24 * (place + 0.5))
    pitch = tables.ROW + board.LINE_GAP
    assert tip[1] == pytest.approx(board.TOP + pitch * line)


def test_the_legend_of_the_board_names_the_black_slot_and_the_dashed_token():
    core = scattered(num_steps=6)
    snap, labels = snapshot(core), known(core)["a"]
    for shown, dashed in ((labels, True), (labels[: snap.num_live["a"]], False)):
        card, _ = board.translation(snap, "a", shown, 2)
        words = [text.get_text() for text in card.legends[0].get_texts()]
        assert "its slot" in words and ("no K and V yet" in words) == dashed


def test_the_board_refuses_a_token_that_has_no_slot():
    snap = snapshot(scattered(num_steps=2))
    with pytest.raises(ValueError, match="position 4 of 'a' has no slot"):
        board.translation(snap, "a", LABELS["a"][:5], 4)


def test_the_player_shows_every_token_by_its_position():
    core = scattered(num_steps=6)
    snap, labels = snapshot(core), known(core)
    of = board.translation_player(snap, "a", labels["a"])
    assert snap.num_live["a"] == 8 and of.labels == [f"token {i}" for i in range(8)]
    assert all(card.alt.startswith(f"{label.capitalize()} of") for label, card in of.frames)
    assert "Token 7 of 'a'" in of.picture.alt


def test_the_figures_read_in_greyscale_and_leave_no_trace(tmp_path):
    import matplotlib
    from PIL import Image

    before = dict(matplotlib.rcParams)
    core = scattered()
    card, _ = tables.block_table_map(snapshot(core), known(core))
    card.save(tmp_path / "map.png", dpi=60)
    assert dict(matplotlib.rcParams) == before
    grey = np.asarray(Image.open(tmp_path / "map.png").convert("L"))
    assert len(np.unique(grey // 16)) > 5
    light = [style.lightness(style.tint(style.colour(i), states.PALE)) for i in range(2)]
    other = style.lightness(states.OTHER_FACE)
    assert abs(light[0] - light[1]) > 5 and min(light) - other > 8


def test_all_figures_of_slots_say_the_same_words():
    """So that what a reader learnt of one legend holds in the next."""
    core = scattered()
    snap, labels = snapshot(core), known(core)
    recording = MemoryRecorder(core)
    recording(core)
    cards = [
        tables.block_table_map(snap, labels)[0],
        board.translation(snap, "a", labels["a"], 0)[0],
        gathered.gather_map(snap, labels)[0],
        pool.pool_map(snap)[0],
        pool.token_map(snap, "a", labels["a"], 1)[0],
        maps.memory_map(recording.moments[0])[0],
        strips.memory_strip(recording.recording)[0],
        batch.batch_memory(snap, rows_of(core, str))[0],
    ]
    said = {text.get_text() for card in cards for text in card.legends[0].get_texts()}
    assert said - {look.words for look in states.LOOKS.values()} == {
        "its slot",
        "no K and V yet",
        "held, but not written yet",
        "live: a token of the prompt",
        "live: a token of the answer",
    }
