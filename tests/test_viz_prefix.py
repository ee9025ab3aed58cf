"""Chapter 7: a block's life is what the pool says at each look, and what prompts and forks are
drawn to share is what their tables share."""

import random

import pytest

from minikv.experiments.prompts import prompts_run
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.observe import LifeRecorder
from minikv.observe.blocks import CACHED
from minikv.observe.pool import FREE, LIVE, snapshot_of
from minikv.request import Request
from minikv.viz import prompts, sharing, style, swimlane
from minikv.viz.states import LOOKS


def start(manager, name, ids):
    request = Request(name, ids, max_tokens=8)
    found = manager.get_num_cached_tokens(request)
    hit = {"num_cached_tokens": found} if found else {}
    assert manager.allocate_slots(request, len(ids) - found, **hit) is not None
    request.num_computed_tokens = len(ids)
    manager.cache_blocks(request)
    return request


# --- a block's life ----------------------------------------------------------------------------

HEAD = [1, 2, 3, 4, 5, 6, 7, 8]


def story():
    """A and B share two blocks, both end, C finds the first, D takes what is left."""
    manager = PrefixCachingKVCacheManager(5, 4)
    look = LifeRecorder(manager)
    a, b = start(manager, "A", [*HEAD, 9]), None
    look("A comes")
    b = start(manager, "B", [*HEAD, 20])
    look("B comes")
    manager.free(a)
    look("A ends")
    manager.free(b)
    look("B ends")
    start(manager, "C", [*HEAD[:4], 30])
    look("C comes")
    start(manager, "D", list(range(50, 62)))
    look("D comes")
    return look.looks


def test_a_look_says_who_holds_a_block_who_wrote_it_and_when_it_is_taken():
    looks = story()
    first = [look.blocks[0] for look in looks]
    assert [b.state for b in first] == [LIVE, LIVE, LIVE, CACHED, LIVE, LIVE]
    assert [b.holders for b in first] == [("A",), ("A", "B"), ("B",), (), ("C",), ("C",)]
    assert {b.writer for b in first} == {"A"} and len({b.content for b in first}) == 1
    second = [look.blocks[1] for look in looks]
    assert second[-1].holders == ("D",) == (second[-1].writer,)  # taken for something else
    assert second[-1].content != second[0].content
    after_b = looks[3].blocks
    assert after_b[2].state == FREE and after_b[2].writer == "A"
    order = sorted((b.place, i) for i, b in enumerate(after_b) if b.place is not None)
    assert [i for _, i in order] == [4, 2, 3, 1, 0]  # without a key first, then the tail
    assert all((b.place is None) == bool(b.holders) for look in looks for b in look.blocks)


@pytest.mark.parametrize("seed", range(20))
def test_looks_are_what_the_manager_says(seed):
    rng, manager = random.Random(seed), PrefixCachingKVCacheManager(12, 2)
    look, running = LifeRecorder(manager), {}
    for step in range(60):
        if running and (rng.random() < 0.5 or manager.num_free_blocks < 5):
            manager.free(running.pop(rng.choice(list(running))))
        else:
            ids = [rng.randrange(2) for _ in range(rng.randint(1, 8))]
            running[f"r{step}"] = start(manager, f"r{step}", ids)
        seen = look(str(step)).blocks
        assert sum(b.state == CACHED for b in seen) == manager.num_cached_free_blocks
        assert sum(b.state != LIVE for b in seen) == manager.num_free_blocks
        for name, table in manager.tables.items():
            assert all(name in seen[block_id].holders for block_id in table)
        assert [len(b.holders) for b in seen] == [b.ref_cnt for b in manager.block_pool.blocks]
    spans = swimlane.spans_of(look.looks)
    for block_id in range(12):
        lane = [s for s in spans if s.block_id == block_id]
        covered = [i for s in lane for i in range(s.first, s.last + 1)]
        not_free = [i for i, each in enumerate(look.looks) if each.blocks[block_id].state != FREE]
        assert covered == not_free


def test_the_swimlane_draws_its_spans_and_the_player_goes_through_the_looks():
    looks = story()
    card, spans = swimlane.block_lives(looks)
    assert [s.holders for s in spans if s.block_id == 0] == [
        ("A",), ("A", "B"), ("B",), (), ("C",)
    ]  # fmt: skip
    assert "block 0 is held by C" in card.alt and len(card.png(40)) > 1000
    early, _ = swimlane.block_lives(looks, until=3)
    assert "block 1 is cached, with tokens of A" in early.alt
    assert "3 blocks are free without a key" in early.alt
    player = swimlane.lives_player(looks)
    assert player.labels[1] == "1: B comes" and len(player.frames) == len(looks)
    assert "A B" in {text.get_text() for text in card.axes[0].texts}
    for draw in (swimlane.block_lives, swimlane.lives_player):
        with pytest.raises(ValueError, match="no look"):
            draw([])


def test_a_manager_without_keys_has_no_cached_blocks():
    manager = PagedKVCacheManager(4, 4)
    look = LifeRecorder(manager)
    request = start(manager, "A", HEAD)
    look("A comes")
    manager.free(request)
    assert [b.state for b in look("A ends").blocks] == [FREE] * 4


def test_a_cached_block_looks_like_no_other_state():
    hatches = [look.hatch for state, look in LOOKS.items() if state != CACHED]
    assert LOOKS[CACHED].hatch and LOOKS[CACHED].hatch not in hatches


# --- prompts -----------------------------------------------------------------------------------

SIX = [
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    [1, 2, 3, 4, 5, 6, 7, 8, 11, 10],
    [1, 2, 3, 4, 5, 6, 12, 13, 14, 15],
    [1, 2, 3, 4, 16, 6, 7],
    [1, 2, 17],
    [7, 8, 9, 10],
]


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                min(len(a), len(b)))  # fmt: skip


def found_by_hand(run, block_size):
    """Of each prompt the longest beginning in whole blocks that one before it has in whole blocks,
    less what its last token needs."""
    found = []
    for i, ids in enumerate(run):
        most = max((min(common(ids, o), len(o)) // block_size for o in run[:i]), default=0)
        found.append(min(most, max(0, len(ids) - 1) // block_size) * block_size)
    return tuple(found)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("seed", [None, *range(8)])
def test_what_prompts_find_is_their_longest_common_beginning(block_size, seed):
    run = SIX
    if seed is not None:
        rng = random.Random(seed)
        run = [[rng.randrange(2) for _ in range(rng.randint(0, 9))] for _ in range(8)]
    result = prompts_run(run, block_size)
    assert result.num_found == found_by_hand(run, block_size)
    for ids, pieces, found in zip(run, result.pieces, result.num_found, strict=True):
        assert [i for p in pieces for i in range(p.start, p.end)] == list(range(len(ids)))
        assert all(len(p.holders) > 1 for p in pieces if p.start < found)
    for piece in {p for pieces in result.pieces for p in pieces}:
        beginnings = {tuple(run[i][: piece.end]) for i in piece.holders}
        assert len(beginnings) == 1 and piece.owner == min(piece.holders)


def test_prompts_are_counted_and_the_block_size_is_a_number():
    for wrong in ([], [[1]] * 13):
        with pytest.raises(ValueError, match="from 1 to 12"):
            prompts_run(wrong)
    with pytest.raises(ValueError, match="block_size is 0"):
        prompts_run([[1]], 0)
    assert prompts_run([[]]).num_found == (0,)


def labels_of(run):
    return [[f"${i}" for i in ids] for ids in run]


@pytest.mark.parametrize("block_size", [1, 4])
def test_hits_have_the_colour_of_whoever_computed_them(block_size):
    result = prompts_run(SIX, block_size)
    card, rows = prompts.prompt_hits(result, labels_of(SIX))
    assert [row.num_found for row in rows] == list(result.num_found)
    for row, found in zip(rows, result.num_found, strict=True):
        assert all((start < found) == is_found for start, _, _, is_found in row.blocks)
    assert f"B: {result.num_found[1]} of 10 tokens are found, computed by A." in card.alt
    assert "F: 0 of 4 tokens are found." in card.alt and len(card.png(40)) > 1000
    hatched = [p for p in card.axes[0].patches if p.get_hatch() == LOOKS[CACHED].hatch]
    assert len(hatched) == sum(found for row in rows for *_, found in row.blocks)


def test_a_tree_draws_each_shared_piece_once_and_as_high_as_its_prompts():
    for block_size in (1, 4):
        result = prompts_run(SIX, block_size)
        card, boxes = sharing.prompt_tree(result, labels_of(SIX), title="six")
        assert len(boxes) == len({piece for of in result.pieces for piece in of})
        assert all(b.rows[1] - b.rows[0] + 1 == b.num_holders for b in boxes)
        assert sum(len(b.tokens) for b in boxes) == sum(map(len, SIX)) - sum(result.num_found)
        assert "$1 $2" in card.alt and isinstance(card, style.Card)
    shuffled = [SIX[i] for i in (0, 5, 3, 4, 1, 2)]  # neighbours in the tree, not in time
    _, boxes = sharing.prompt_tree(prompts_run(shuffled, 1), labels_of(shuffled), title="six")
    assert all(b.rows[1] - b.rows[0] + 1 == b.num_holders for b in boxes)


# --- forks -------------------------------------------------------------------------------------


def forked(num_children):
    manager = PagedKVCacheManager(12, 4)
    parent = start(manager, "parent", [1, 2, 3, 4, 5, 6, 7])
    children = []
    for i in range(num_children):
        child = Request(f"child {i}", [1, 2, 3, 4, 5, 6, 7], max_tokens=8)
        child.num_computed_tokens = 6
        assert manager.fork(parent, child)
        children.append(child)
    return manager, [parent, *children]


def draw(manager, requests):
    labels = {r.request_id: [str(i) for i in range(8)] for r in requests}
    counts = [block.ref_cnt for block in manager.block_pool.blocks]
    return sharing.fork_tree(snapshot_of(manager, 0), labels, counts)


def test_a_fork_is_drawn_as_its_tables_are():
    manager, requests = forked(3)
    card, boxes = draw(manager, requests)
    assert [(b.rows, b.num_holders) for b in boxes] == [((0, 3), 4), ((0, 3), 4)]
    manager.allocate_slots(requests[1], 1)  # a middle row leaves: the others stay neighbours
    requests[1].num_computed_tokens = 7
    card, boxes = draw(manager, requests)
    assert [(b.rows, b.num_holders) for b in boxes] == [((0, 3), 4), ((0, 2), 3), ((3, 3), 1)]
    assert boxes[1].tokens == ("4", "5", "6") == boxes[2].tokens
    assert "block 0, ×4" in card.alt and len(card.png(40)) > 1000
    with pytest.raises(ValueError, match="'nobody' holds no table"):
        sharing.fork_tree(snapshot_of(manager, 0), {"nobody": ["x"]}, [])


# --- write your prompts ------------------------------------------------------------------------


def encode(text):
    return [(ord(letter), letter) for letter in text]


def test_the_lab_is_a_picture_without_a_kernel_and_follows_its_boxes_with_one(monkeypatch):
    texts = ["abcdef", "abcdxx", ""]
    card = prompts.prompts_lab(prompts_run, texts, encode)
    assert isinstance(card, style.Card) and "B: 4 of 6 tokens are found" in card.alt
    monkeypatch.setattr(prompts, "is_live", lambda: True)
    lab = prompts.prompts_lab(prompts_run, texts, encode)
    lab.make()
    assert "B: 4 of 6" in lab.image.value
    lab.boxes[1].value = "abxxxx"
    assert "B: 0 of 6" in lab.image.value
    lab.slider.value = 2
    assert "B: 2 of 6" in lab.image.value and "Blocks of 2" in lab.image.value
    lab.boxes[2].value = "abc" * 40  # longer than there is room for
    assert "C: 2 of 120" in lab.image.value


def test_tokens_too_narrow_for_a_label_have_none():
    for length, are_named in ((30, True), (90, False)):
        run = [[*range(length)], [*range(length)]]
        result, labels = prompts_run(run, 2), [["x"] * length] * 2
        for card, _ in (
            prompts.prompt_hits(result, labels),
            sharing.prompt_tree(result, labels, title="two"),
        ):
            assert ("x" in {text.get_text() for text in card.axes[0].texts}) == are_named
