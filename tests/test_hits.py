"""Hit rate against capacity: the engine's prefix cache finds what a dictionary would."""

import json
import math
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minikv.commands import progress as progress_bars
from minikv.commands.simulate import main
from minikv.experiments import hits
from minikv.experiments.hits import POLICIES, HitCounts, TraceFacts, coarser, facts_of, hits_run
from minikv.kv_cache.base import cdiv
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.request import Request

B = 4  # tokens of a block in these tests


@dataclass
class Entry:
    publication: int
    parent: int
    num_hits: int = 0
    entered: int = 0  # when it was last let go


RANK = {  # the lowest goes first
    "lru": lambda entry: entry.entered,
    "fifo": lambda entry: entry.publication,
    "lfu": lambda entry: (entry.num_hits, entry.entered),
}


class DictionaryCache:
    """The reference: published blocks by key, sorted anew whenever some must go. Between requests
    nobody holds a block, so those that are not published have no key, and are taken first."""

    def __init__(self, num_blocks, policy):
        self.num_blocks, self.policy = num_blocks, policy
        self.entries, self.clock = {}, 0

    def tick(self):
        self.clock += 1
        return self.clock

    def hit_blocks(self, keys, num_tokens):
        """Blocks found, or None for a prompt that does not fit."""
        found, parent = [], 0
        for key in keys[: (num_tokens - 1) // B]:
            entry = self.entries.get(key)
            if entry is None or entry.parent != parent:
                break
            found.append(entry)
            parent = entry.publication
        num_new = cdiv(num_tokens, B) - len(found)
        if num_new > self.num_blocks - len(found):
            return None
        mine = list(found)
        for entry in found:
            entry.num_hits += 1
        idle = [key for key, entry in self.entries.items() if entry not in found]
        idle.sort(key=lambda key: RANK[self.policy](self.entries[key]))
        for key in idle[: max(0, num_new - (self.num_blocks - len(self.entries)))]:
            del self.entries[key]
        for key in keys[len(found) :]:
            entry = self.entries.get(key)
            if entry is None or entry.parent != parent:
                entry = self.entries[key] = Entry(self.tick(), parent)
                mine.append(entry)
            parent = entry.publication
        for entry in reversed(mine):
            entry.entered = self.tick()
        return len(found)


def prompts_of(seed, num_requests=60, num_branches=3, max_blocks=9):
    """(keys of full blocks, tokens) of random prompts that begin alike: a key is all before it."""
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(num_requests):
        num_tokens = int(rng.integers(1, max_blocks * B + 1))
        steps = rng.zipf(1.6, num_tokens // B).clip(max=num_branches).tolist()
        prompts.append(([tuple(steps[: i + 1]) for i in range(len(steps))], num_tokens))
    return prompts


def requests_of(prompts):
    return [
        Request(f"r{i}", num_prompt_tokens=num_tokens, block_hashes=list(keys))
        for i, (keys, num_tokens) in enumerate(prompts)
    ]


class Checked(PrefixCachingKVCacheManager):
    def free(self, request):
        super().free(request)
        self.check()


# -- the engine's cache and a dictionary ----------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.sampled_from(sorted(POLICIES)))
def test_the_manager_finds_what_a_dictionary_finds(seed, num_blocks, policy):
    prompts, reference = prompts_of(seed), DictionaryCache(num_blocks, policy)
    expected = HitCounts()
    for keys, num_tokens in prompts:
        num_hit = reference.hit_blocks(keys, num_tokens)
        expected.num_requests += 1
        expected.num_refused += num_hit is None
        expected.hit_blocks += num_hit or 0
        expected.hit_tokens += B * (num_hit or 0)
        expected.full_blocks += num_tokens // B
        expected.prompt_tokens += num_tokens
    manager = Checked(num_blocks, B, eviction=policy)
    assert hits_run(requests_of(prompts), manager) == expected
    assert manager.num_free_blocks == num_blocks and not manager.tables


def test_the_policies_differ_on_such_traces():
    """Otherwise the test above would not tell one from another."""
    found = {
        policy: [
            hits_run(requests_of(prompts_of(seed)), Checked(12, B, eviction=policy)).hit_blocks
            for seed in range(5)
        ]
        for policy in POLICIES
    }
    assert len({tuple(each) for each in found.values()}) == len(POLICIES) and max(found["lru"]) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_for_all_forgets_nothing(policy):
    for seed in range(10):
        prompts = prompts_of(seed)
        facts = facts_of(requests_of(prompts), B)
        assert facts.different_blocks == len({key for keys, _ in prompts for key in keys})
        manager = Checked(facts.blocks_for_all(B), B, eviction=policy)
        counts = hits_run(requests_of(prompts), manager)
        seen, expected = set(), 0
        for keys, num_tokens in prompts:
            expected += sum(key in seen for key in keys[: (num_tokens - 1) // B])
            seen.update(keys)
        assert counts.hit_blocks == expected > 0
        assert manager.num_evictions == counts.num_refused == 0
        assert counts.prompt_tokens == facts.prompt_tokens
        assert counts.full_blocks == facts.full_blocks


def test_rates_by_hand():
    keys = [(0,), (0, 1), (0, 1, 2)]
    prompts = [(keys, 13), (keys, 12), (keys[:1], 6)]  # of 3 full blocks, 3 and 1
    counts = hits_run(requests_of(prompts), Checked(8, B))
    # The second is found whole, less a block: its last token is left to run.
    assert (counts.hit_blocks, counts.full_blocks) == (0 + 2 + 1, 7)
    assert counts.block_rate == pytest.approx(100 * 3 / 7)
    assert counts.token_rate == pytest.approx(100 * 12 / 31)
    assert HitCounts().block_rate == HitCounts().token_rate == 0


def test_a_prompt_longer_than_the_pool_is_refused_and_counts_as_missed():
    keys = [(0,), (0, 1), (0, 1, 2)]
    counts = hits_run(requests_of([(keys[:1], 4), (keys, 12), (keys[:1], 5)]), Checked(2, B))
    assert (counts.num_refused, counts.hit_blocks, counts.full_blocks) == (1, 1, 5)


def test_blocks_of_twice_the_size_from_the_same_keys():
    for seed in range(5):
        prompts = prompts_of(seed)
        wide = [(keys[1::2], num_tokens) for keys, num_tokens in prompts]
        twice = [
            hits_run(requests, PrefixCachingKVCacheManager(400, 2 * B))
            for requests in (coarser(requests_of(prompts), B), requests_of(wide))
        ]
        assert twice[0] == twice[1]
        assert 0 < twice[0].hit_tokens < hits_run(requests_of(prompts), Checked(400, B)).hit_tokens


# -- the command ----------------------------------------------------------------------------------


def write_trace(path, prompts, bad=()):
    """Mooncake's format, blocks of 512, from prompts of blocks of B."""
    ids = {}
    lines = []
    for i, (keys, num_tokens) in enumerate(prompts):
        full = [ids.setdefault(key, len(ids)) for key in keys]
        length = len(full) * 512 + num_tokens % B
        rest = [ids.setdefault(("rest", i), len(ids))] if num_tokens % B else []
        row = {"timestamp": i, "input_length": length, "output_length": 3, "hash_ids": full + rest}
        lines.append(json.dumps(row))
    lines[1:1] = bad
    path.write_text("".join(line + "\n" for line in lines))
    return path


PROMPTS = [(keys, num_tokens) for keys, num_tokens in prompts_of(3) if keys]


def run(capsys, *argv):
    status = main(["hits", *map(str, argv)])
    return status, capsys.readouterr()


def test_the_command_prints_the_rates_of_its_runs(tmp_path, capsys):
    path, out = write_trace(tmp_path / "t.jsonl", PROMPTS, bad=["{damaged"]), tmp_path / "out.json"
    capacities = ["5,120", "10240", "inf", "inf"]
    argv = ["--trace", path, "--capacity-tokens", *capacities, "--policy", *POLICIES, "lru"]
    status, captured = run(capsys, *argv, "--json", out)
    assert status == 0 and captured.err == f"{path}, line 2: is no JSON: {DAMAGED}; skipped\n"
    result = json.loads(out.read_text())
    rows = {(row["capacity_tokens"], row["policy"]): row for row in result["rows"]}
    assert list(rows) == list(product([5120, 10240, "inf"], POLICIES))
    for (capacity, policy), row in rows.items():
        num_blocks = 1_000 if capacity == "inf" else capacity // 512
        requests = [
            Request(f"r{i}", num_prompt_tokens=512 * len(keys) + n % B, block_hashes=keys)
            for i, (keys, n) in enumerate(PROMPTS)
        ]
        manager = PrefixCachingKVCacheManager(num_blocks, 512, eviction=policy)
        counts = hits_run(requests, manager)
        assert row["hit_blocks"] == counts.hit_blocks and row["hit_tokens"] == counts.hit_tokens
        assert row["num_requests"] == len(PROMPTS) and row["fig9"] is None
        cell = f"{counts.block_rate:.1f} ({counts.token_rate:.1f})"
        shown = capacity if capacity == "inf" else f"{capacity:,}"
        line = next(x for x in captured.out.splitlines() if x.split()[:1] == [shown])
        assert cell in line
    assert f"{len(PROMPTS)} requests, 1 malformed rows skipped" in captured.out
    assert result["published"] is None and "Fig. 9" not in captured.out
    assert "requests/s" in captured.out
    wide = [
        Request(f"r{i}", num_prompt_tokens=512 * len(keys) + n % B, block_hashes=keys[1::2])
        for i, (keys, n) in enumerate(PROMPTS)
    ]
    assert result["twice"] == hits_run(wide, PrefixCachingKVCacheManager(1_000, 1024)).token_rate


DAMAGED = "Expecting property name enclosed in double quotes at column 2"


def test_the_first_requests_only(tmp_path, capsys):
    path, out = write_trace(tmp_path / "t.jsonl", PROMPTS), tmp_path / "out.json"
    argv = ["--trace", path, "--capacity-tokens", 9_000, "--requests", 7, "--json", out]
    assert run(capsys, *argv)[0] == 0
    result = json.loads(out.read_text())
    assert result["facts"]["num_requests"] == result["rows"][0]["num_requests"] == 7
    assert result["rows"][0]["num_blocks"] == 17 and result["twice"] is None
    argv[3] = "inf"
    results = []
    for each in (path, write_trace(tmp_path / "seven.jsonl", PROMPTS[:7])):
        assert run(capsys, *argv[:1], each, *argv[2:])[0] == 0
        results.append(json.loads(out.read_text()))
    assert results[0]["rows"] == results[1]["rows"] and results[0]["twice"] == results[1]["twice"]


def test_a_capacity_beyond_all_memory_costs_none(tmp_path, capsys):
    path = write_trace(tmp_path / "t.jsonl", PROMPTS)
    status, captured = run(capsys, "--trace", path, "--capacity-tokens", 10**17, "inf")
    assert status == 0
    cells = [line.split()[2:4] for line in captured.out.splitlines() if " (" in line][-2:]
    assert cells[0] == cells[1]


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n"


@pytest.mark.parametrize("argv, message", [
    (["--capacity-tokens", "511"], "--capacity-tokens is 511, but must be at least 512"),
    (["--capacity-tokens", "1e6"], "--capacity-tokens is '1e6', but must be a whole number or inf"),
    (["--capacity-tokens", "-1"], "--capacity-tokens is '-1'"),
    (["--policy", "mru"], "--policy is 'mru'; known: lru, fifo, lfu"),
    (["--requests", "0"], "--requests is 0, but must be at least 1"),
    (["--json", "/nowhere/out.json"], "there is no folder /nowhere"),
    (["--strict"], "line 2: is no JSON"),
])  # fmt: skip
def test_it_says_what_is_wrong(argv, message, tmp_path, capsys):
    path = write_trace(tmp_path / "t.jsonl", PROMPTS, bad=["{damaged"])
    status, captured = run(capsys, "--trace", path, *argv)
    assert status == 1 and captured.err.startswith("minikv simulate hits: ")
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_a_trace_without_hits_to_find(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text(AZURE)
    assert run(capsys, "--trace", path)[0] == 1
    row = {"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}
    path.write_text(json.dumps(row) + "\n")
    status, captured = run(capsys, "--trace", path)
    assert status == 1 and "no request is left" in captured.err
    row |= {"input_length": 9, "hash_ids": [0]}  # less than a block: nothing can be found
    path.write_text(json.dumps(row) + "\n")
    status, captured = run(capsys, "--trace", path, "--capacity-tokens", 512, "inf")
    assert status == 0 and "0.0 (0.0)" in captured.out


def test_the_bar_counts_every_request_of_every_run(tmp_path, capsys, monkeypatch):
    bars = []

    class Bar(progress_bars.RequestsProgress):
        def __init__(self, total):
            super().__init__(total)
            self.total, self.seen = total, 0
            bars.append(self)

        def __call__(self):
            super().__call__()
            self.seen += 1

    monkeypatch.setattr("minikv.commands.experiments.RequestsProgress", Bar)
    path = write_trace(tmp_path / "t.jsonl", PROMPTS)
    argv = ["--trace", path, "--capacity-tokens", 5120, "inf", "--policy", "lru", "fifo"]
    assert run(capsys, *argv)[0] == 0
    assert [bar.seen for bar in bars] == [bar.total for bar in bars] == [5 * len(PROMPTS)]


# -- beside the paper -----------------------------------------------------------------------------


def test_a_published_trace_is_told_by_its_size():
    facts = TraceFacts(num_requests=12_031, prompt_tokens=144_793_823)
    assert facts.published.name == "Conversation" and facts.published.cache_ratio == 40
    assert TraceFacts(num_requests=3_993, prompt_tokens=61_194_628).published.name == "Synthetic"
    assert TraceFacts(num_requests=12_030, prompt_tokens=144_793_823).published is None
    assert TraceFacts().published is None
    for paper in hits.MOONCAKE_PAPER:  # its figure ends where its table is, and never falls
        assert abs(paper.fig9[-1] - paper.cache_ratio) < 1
        assert list(paper.fig9) == sorted(paper.fig9) and len(paper.fig9) == 12
    conversation = hits.MOONCAKE_PAPER[0]
    assert hits._fig9(conversation, 2_000_000) == 12.0 and hits._fig9(conversation, 3_000) is None
    assert hits._fig9(conversation, math.inf) == 40.1 and hits._fig9(None, math.inf) is None


def rows_of(rates):
    """Rows as `measure` returns them, of 1,000 full blocks."""
    return [
        {"capacity_tokens": capacity, "policy": policy, "block_rate": rate,
         "token_rate": rate - 1, "hit_blocks": 10 * rate, "num_blocks": i}
        for i, ((capacity, policy), rate) in enumerate(rates.items())
    ]  # fmt: skip


def test_what_it_concludes_is_what_its_rows_say():
    rates = {
        (1024, "lru"): 10.0, (1024, "fifo"): 12.5, (2048, "lru"): 38.0, (2048, "fifo"): 37.99,
        (4096, "lru"): 38.1, (4096, "fifo"): 38.1,
        ("inf", "lru"): 38.2, ("inf", "fifo"): 38.2,
    }  # fmt: skip
    paper = {"name": "Conversation", "cache_ratio": 40.0, "fig9": [4.5, 40.1]}
    result = {"rows": rows_of(rates), "published": paper, "block_size": 512, "twice": 34.0}
    said = hits.conclusions(result)
    assert len(said) == 4
    assert "38.2% of full blocks are hit, -1.8 points from it, and 37.2% of tokens, -2.8" in said[0]
    assert "blocks of 1,024, 34.0%" in said[1] and "37.2 + (37.2 - 34.0) = 40.4%" in said[1]
    assert "ends at 40.1%" in said[1]
    assert said[2].startswith("2,048 tokens are the least") and "99%" in said[2]
    assert said[3] == "At 1,024 tokens fifo finds most, lru least: 2.5 points apart."
    rates[2048, "lru"] = 37.0  # 97% of what infinite capacity finds: not nearly all
    result |= {"rows": rows_of(rates), "published": None}
    assert hits.conclusions(result) == [
        said[2].replace("2,048", "4,096"),
        said[3],
        "At 2,048 tokens fifo finds most, lru least: 1.0 points apart.",
    ]
    result["rows"] = rows_of({(1024, "lru"): 10.0})
    assert hits.conclusions(result) == []
