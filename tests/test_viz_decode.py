"""Chapter 1's figures: what they say they drew, their alt text, and that they read in greyscale."""

import itertools
import re

import matplotlib
import pytest

from minikv.viz import decode, roofline
from minikv.viz.style import Card, lightness

TOKENS = ["a", " b", "\n", "$d", "e", "f"]  # 3 of them prompt; $ must not start mathematics


def figures():
    steps = decode.cache_steps(TOKENS, 3, 8)
    points = {
        "linear": [roofline.Point("1 row", 0.5, 5e9), roofline.Point("64 rows", 32, 9e10)],
        "attention": [roofline.Point("batch 1", 1.5, 7e9), roofline.Point("batch 8", 1.5, 8e9)],
    }
    series = {"without": [(1, 0.1), (9, 0.9)], "with": [(1, 0.1), (9, 0.1)]}
    return {
        "cost_per_token": decode.cost_per_token(series, title="Cost", predicted=["with"])[0],
        "cache_at": decode.cache_at(steps[1])[0],
        "cache_filling": decode.cache_filling(steps)[0],
        "tokens_computed": decode.tokens_computed(3, 3)[0],
        "attention_reads": decode.attention_reads(3, 3)[0],
        "life_cycle": decode.life_cycle([("one", 3, 0), ("two", 4, 3)])[0],
        "roofline": roofline.roofline(9e10, 2e10, points)[0],
    }


def test_every_figure_draws_with_alt_text_and_leaves_no_trace():
    before = dict(matplotlib.rcParams)
    for name, card in figures().items():
        assert isinstance(card, Card) and len(card.alt) > 40, name
        assert card.png(dpi=40).startswith(b"\x89PNG"), name
    assert dict(matplotlib.rcParams) == before


def test_costs_are_milliseconds_and_the_alt_text_holds_none():
    card, drawn = decode.cost_per_token({"x": [(16, 0.0123), (64, 0.0456)]}, title="Cost")
    assert drawn == {"x": [(16, pytest.approx(12.3)), (64, pytest.approx(45.6))]}
    assert "12.3" not in card.alt and "x, 16 to 64 tokens" in card.alt


def test_costs_on_logarithmic_axes_stand_at_their_lengths():
    series = {"without": [(16, 0.2), (512, 4.6)], "with": [(16, 0.04), (512, 0.08)]}
    card, _ = decode.cost_per_token(series, title="Cost", log=True)
    ax = card.axes[0]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["16", "512"]
    assert "logarithmic" in ax.get_xlabel()


def test_a_cache_fills_prompt_first_then_one_slot_a_step():
    steps = decode.cache_steps(TOKENS, 3, 8)
    assert [s.states for s in steps] == [
        ("new",) * 3 + ("empty",) * 5,
        ("prompt",) * 3 + ("new",) + ("empty",) * 4,
        ("prompt",) * 3 + ("decoded", "new") + ("empty",) * 3,
    ]
    # What a pass samples is what the next one feeds, and the last is never fed.
    assert [s.sampled for s in steps] == ["$d", "e", "f"]
    assert all(s.sampled == after.tokens[-1] for s, after in itertools.pairwise(steps))
    _, drawn = decode.cache_filling(steps, count=2)
    assert drawn == [steps[0].states, steps[-1].states]


def test_a_full_slab_and_a_one_token_prompt():
    steps = decode.cache_steps(["a", "b", "c"], 1, 2)
    assert [s.states for s in steps] == [("new", "empty"), ("prompt", "new")]
    assert decode.cache_filling(steps[:1], count=4)[1] == [("new", "empty")]


def test_tokens_computed_with_and_without_a_cache():
    _, data = decode.tokens_computed(8, 7)
    assert data == {"without": [8, 9, 10, 11, 12, 13, 14], "with": [8, 1, 1, 1, 1, 1, 1]}


def test_reads_are_a_triangle():
    _, data = decode.attention_reads(3, 3)
    assert data == [(1, 0), (2, 0), (3, 0), (1, 3), (1, 4)]


def test_counters_move_at_the_end_of_a_step_and_slots_before_attention():
    _, [row] = decode.life_cycle([("a decode", 9, 8)])
    assert [tuple(m) for m in row] == [
        ("schedule", 9, 8, 8),
        ("write K, V", 9, 8, 9),
        ("attend", 9, 8, 9),
        ("sample", 9, 8, 9),
        ("append", 10, 9, 9),
    ]


def test_between_the_first_arrow_and_the_last_only_what_moves_is_written():
    card, _ = decode.life_cycle([("a decode", 9, 8)])
    texts = [text.get_text() for text in card.axes[0].texts]
    assert [text for text in texts if re.fullmatch(r"[a-z]+ \d+", text)] == [
        *("tokens 9", "computed 8", "slots 8"),
        "slots 9",
        *("tokens 10", "computed 9", "slots 9"),
    ]


def test_roof():
    assert roofline.attainable(1, 90, 10) == 10 and roofline.attainable(20, 90, 10) == 90
    point = roofline.Point("p", 1, 5)
    card, data = roofline.roofline(90, 10, {"s": [point]})
    assert data == {"ridge": 9, "share": {"s": [0.5]}}
    assert "s: p" in card.alt


def test_slots_differ_in_greyscale_or_by_hatch():
    looks = [(lightness(f["facecolor"]), f.get("hatch")) for f in decode.FILLS.values()]
    for i, (light, hatch) in enumerate(looks):
        for other, other_hatch in looks[:i]:
            assert hatch != other_hatch or abs(light - other) >= 8


def test_the_player_shows_each_forward_and_a_few_where_scripts_do_not_run():
    of = decode.cache_player(decode.cache_steps(TOKENS, 3, 8))
    assert of.labels == ["forward 1", "forward 2", "forward 3"]
    assert all(card.alt.startswith(f"After {label}:") for label, card in of.frames)
    assert isinstance(of.picture, Card) and "After forward 3" in of.picture.alt
