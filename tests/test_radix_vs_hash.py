"""A map of hashes and a radix tree on the same requests."""

import json

import pytest

from minikv.commands.simulate import main
from minikv.experiments import radix_vs_hash
from minikv.experiments.hits import hits_run
from minikv.experiments.radix_vs_hash import INDEXES, Run, Turn, chats, compare, num_runs, replay
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager

SMALL = {"num_chats": 6, "num_turns": 3}


def by(runs, index, block_size):
    return next(run for run in runs if (run.index, run.block_size) == (index, block_size))


@pytest.fixture(scope="module")
def runs():
    calls = []
    found = compare(chats(**SMALL), rounds=1, on_request=lambda: calls.append(1))
    assert len(calls) == num_runs(rounds=1) * 18
    return found


def test_chats_grow_under_a_shared_header():
    turns = chats(**SMALL, seed=3).turns
    prompts = [turn.prompt["prompt_token_ids"] for turn in turns]
    assert len(turns) == 18
    headers = {tuple(prompt[:75]) for prompt in prompts}
    assert 2 <= len(headers) <= len(radix_vs_hash.HEADERS)
    said = [[*turn.prompt["prompt_token_ids"], *turn.answer] for turn in turns]
    followed = [
        any(later[: len(each)] == each for later in prompts[i + 1 :]) for i, each in enumerate(said)
    ]
    assert sum(followed) == 12  # all but the last turn of each of the six
    assert chats(**SMALL, seed=3) == chats(**SMALL, seed=3) != chats(**SMALL, seed=4)


def test_with_room_for_all_each_finds_what_it_can(runs):
    """By tokens, the two find the same; by blocks, the tree finds what hashes do and the part of a
    block that it copies."""
    for run in runs[:4]:
        assert run.num_evictions == 0 and run.prompt_tokens == runs[0].prompt_tokens
    exact = by(runs, "hashes", 1).hit_tokens
    assert by(runs, "tree", 1).hit_tokens == exact
    few, some = by(runs, "hashes", 16).hit_tokens, by(runs, "tree", 16).hit_tokens
    assert few < some < exact
    assert some - few <= 15 * by(runs, "tree", 16).num_copied_blocks
    assert not by(runs, "tree", 1).num_copied_blocks


def test_in_a_pool_too_small_both_forget(runs):
    for full, scarce in zip(runs[:4], runs[4:], strict=True):
        assert (full.index, full.block_size) == (scarce.index, scarce.block_size)
        assert scarce.num_evictions > 0 and scarce.hit_tokens < full.hit_tokens
        assert scarce.num_cached_tokens <= scarce.num_slots < full.num_slots


def test_what_is_measured_has_a_size(runs):
    for run in runs:
        assert run.us_per_request > 0 and run.us_per_output_token > 0
        assert run.index_bytes > 0 and run.pool_bytes > 0
        assert run.bytes_per_token == run.index_bytes / run.num_cached_tokens
    # A digest and an entry in a map for each token, and eight bytes of a key.
    assert by(runs, "hashes", 1).bytes_per_token > 5 * by(runs, "tree", 1).bytes_per_token


def test_hits_are_those_of_simulate_hits():
    turns = [
        Turn({"num_prompt_tokens": 9, "block_hashes": list(hashes)})
        for hashes in ((1, 2), (1, 2), (1, 3), (4, 5), (1, 2))
    ]
    want = hits_run([turn.request(str(i)) for i, turn in enumerate(turns)],
                    PrefixCachingKVCacheManager(8, 4))  # fmt: skip
    for make in INDEXES.values():
        run = Run("", "", 4, 32)
        replay(turns, make(8, 4), run)
        assert (run.hit_tokens, run.prompt_tokens) == (want.hit_tokens, want.prompt_tokens)


def test_the_command_prints_both(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main(["radix", "--chats", "3", "--turns", "2", "--rounds", "1", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    text = capsys.readouterr().out
    assert len(rows) == 8 and {row["index"] for row in rows} == set(INDEXES)
    assert f"3 chats of 2 turns: {rows[0]['prompt_tokens']:,} prompt tokens" in text
    assert f"{rows[0]['hit_tokens']:,}" in text and f"{rows[3]['index_bytes'] / 1e6:.2f}" in text


def test_the_command_reads_a_trace(tmp_path, capsys):
    lines = [
        {"timestamp": i, "input_length": 1200, "output_length": 5, "hash_ids": ids}
        for i, ids in enumerate([[0, 1, 2], [0, 1, 3], [0, 4, 5], [0, 1, 6]])
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.json"
    argv = ["radix", "--trace", str(path), "--requests", "3", "--rounds", "1", "--json", str(out)]
    assert main(argv) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["hit_tokens"] for row in rows[:2]] == [1536, 1536]
    assert [row["block_size"] for row in rows] == [512] * 4
    assert "mooncake, 3 requests: 3,600 prompt tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--rounds", "0"], "--rounds is 0"),
        (["--chats", "0"], "num_chats is 0"),
        (["--turns", "0"], "num_turns is 0"),
        (["--trace", "/nowhere", "--requests", "0"], "--requests is 0"),
    ],
)
def test_bad_arguments_are_named(argv, words, capsys):
    assert main(["radix", *argv]) == 1
    assert words in capsys.readouterr().err
