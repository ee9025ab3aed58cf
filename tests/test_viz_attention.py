"""Chapter 5's figures: the copy is what gather's own index names, and the states of the online
softmax are those that a softmax over all scores has."""

import math

import pytest
import torch

from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.model.backends import AttentionMetadata
from minikv.model.kernels.gather import query_groups
from minikv.model.kernels.online import OnlineSoftmax
from minikv.observe import PoolSnapshot
from minikv.request import Request
from minikv.viz import gathered, softmax, style

HIDDEN = -math.inf


def decoding(lengths, block_size, num_blocks=30):
    """A manager in which requests grew in turns, each with as many slots written as `lengths`."""
    manager = PagedKVCacheManager(num_blocks, block_size)
    requests = [Request(f"r{i}", num_prompt_tokens=n, max_tokens=9) for i, n in enumerate(lengths)]
    for num_tokens in range(1, max(lengths) + 1):
        for request, length in zip(requests, lengths, strict=True):
            if num_tokens <= length:
                manager.allocate_slots(request, 1)
                request.num_computed_tokens = num_tokens
    return manager


def snapshot_of(manager):
    tables = {name: tuple(table) for name, table in manager.tables.items()}
    live = {name: manager.requests[name].num_computed_tokens for name in tables}
    return PoolSnapshot(3, manager.num_blocks, manager.block_size, tables, live, live)


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize("lengths", [(9, 6), (5,), (1, 8, 4), (4, 4)], ids=str)
def test_what_is_drawn_as_copied_is_what_gather_copies(lengths, block_size):
    manager = decoding(lengths, block_size)
    snap = snapshot_of(manager)
    blocks = gathered.gathered_blocks(snap, snap.tables)
    width = max(map(len, snap.tables.values()))
    padded = [[*t, *[manager.num_blocks] * (width - len(t))] for t in snap.tables.values()]
    one_head = torch.zeros(2, manager.num_blocks + 1, 1, block_size, 8)
    metadata = AttentionMetadata(
        torch.tensor(padded, dtype=torch.int32),
        torch.arange(len(lengths) + 1, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        None,
        1,
        max(lengths),
    )
    [group] = query_groups(metadata, one_head)
    rows = group.gather_rows.tolist()
    assert [b.block_id for b in blocks] == rows[: len(rows) // 2]  # then the same of V
    for name, length in zip(snap.tables, lengths, strict=True):
        assert sum(b.num_written for b in blocks if b.request_id == name) == length


def test_the_map_of_the_copy_says_so_in_words_and_refuses_nothing_to_draw():
    snap = snapshot_of(decoding((9, 6), 4))
    labels = {name: [f"${i}" for i in range(12)] for name in snap.tables}
    card, blocks = gathered.gather_map(snap, labels)
    assert isinstance(card, style.Card) and len(card.png(40)) > 1000
    assert f"r0 0 from {snap.tables['r0'][0]} (4 of 4 written)" in card.alt
    assert "r1 2 from padding (0 of 4 written)" in card.alt and blocks[-1].num_written == 0
    for wrong in ({}, {"nobody": ["x"]}):
        with pytest.raises(ValueError, match="must have K and V"):
            gathered.gather_map(snap, wrong)


BLOCKS = {
    "the largest in the second": [[2.0, 0.0, 1.0, 1.0], [4.0, 1.0, 3.0]],
    "the largest in the first": [[4.0], [1.0, 3.0], [2.0]],
    "one block": [[0.5, 0.25]],
    "negative": [[-3.0, -1.0], [-2.0]],
    "one hidden": [[HIDDEN, HIDDEN], [1.0, HIDDEN], [2.0]],
    "hidden last": [[1.0], [HIDDEN]],
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_states_are_those_of_softmax_and_of_the_package(name):
    blocks = BLOCKS[name]
    values = [[10.0 * (i + 1) + j for j in range(len(of))] for i, of in enumerate(blocks)]
    states = softmax.softmax_states(blocks, values)
    seen, theirs = [], OnlineSoftmax(torch.ones(1, 1, dtype=torch.float64))
    for scores, worth, state in zip(blocks, values, states, strict=True):
        seen += scores
        keys = torch.tensor([[0.0 if s == HIDDEN else s] for s in scores], dtype=torch.float64)
        looks = torch.tensor([[s != HIDDEN for s in scores]])
        theirs.add_block(keys, torch.tensor(worth, dtype=torch.float64)[:, None], looks)
        assert state.largest == theirs.largest.item() == max(seen)
        assert state.total == pytest.approx(theirs.total.item(), rel=1e-12)
        assert state.mixed == pytest.approx(theirs.mixed.item(), rel=1e-12)
        assert sum(state.weights) == pytest.approx(state.total, rel=1e-12)
        if state.largest > HIDDEN:
            exact = torch.tensor(seen, dtype=torch.float64).softmax(0)
            got = torch.tensor(state.weights, dtype=torch.float64) / state.total
            torch.testing.assert_close(got, exact, rtol=1e-12, atol=0)


def test_a_larger_score_shrinks_what_was_summed_and_a_smaller_one_does_not():
    states = softmax.softmax_states([[2.0], [4.0], [1.0]])
    assert [s.shrink for s in states] == [0.0, pytest.approx(math.exp(-2)), 1.0]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_figure_draws_the_states_and_says_them(name):
    card, states = softmax.online_softmax(BLOCKS[name])
    assert states == softmax.softmax_states(BLOCKS[name])
    assert card.alt.count("after block") == len(BLOCKS[name]) and len(card.png(40)) > 1000
    legend = {text.get_text() for text in card.legends[0].get_texts()}
    assert ("not read yet" in legend) == (len(BLOCKS[name]) > 1)
    assert ("hidden by the mask" in legend) == any(HIDDEN in of for of in BLOCKS[name])
    bars = [bar.get_height() for bar in card.axes[-1].patches]
    assert bars == list(states[-1].weights)


def test_values_are_mixed_in_the_figure_too_and_must_be_as_many_as_the_scores():
    card, states = softmax.online_softmax([[0.0], [math.log(3)]], values=[[4.0], [8.0]])
    assert [state.mixed for state in states] == [4.0, pytest.approx(4 / 3 + 8)]
    notes = [ax.texts[-1].get_text() for ax in card.axes[1:]]
    assert "mixed 4.00" in notes[0] and "mixed 9.33" in notes[1] and "mixed 9.33" in card.alt
    with pytest.raises(ValueError, match="one for each score"):
        softmax.online_softmax([[0.0, 1.0]], values=[[4.0]])


@pytest.mark.parametrize("blocks", [[], [[1.0], []]], ids=["none", "an empty one"])
def test_a_figure_of_no_blocks_is_refused(blocks):
    with pytest.raises(ValueError, match="needs a slot"):
        softmax.online_softmax(blocks)
