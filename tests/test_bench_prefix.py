"""`bench prefix` and `bench differential`: what they measure and compare, not how fast it is."""

import itertools
import json
import sys
from pathlib import Path

import pytest

import minikv
from minikv.bench import differential, prefix, vllm_differential, vllm_prefix
from minikv.bench import workload as workload_module
from minikv.bench.engines import Settings
from minikv.bench.workload import make_workload
from minikv.commands import bench
from minikv.kv_cache.prefix import PrefixCachingKVCacheManager
from minikv.request import Request

ROOT = Path(minikv.__file__).parent.parent
SMALL = (128, 256)  # blocks: two prompts of 1,024 tokens, and four


def fake_python(tmp_path, code):
    """A Python in which vLLM's place is taken by this code; settings in sys.argv[2]."""
    python = tmp_path / "python"
    head = f"#!{sys.executable}\nimport json, sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    python.write_text(head + code, encoding="utf-8")
    python.chmod(0o755)
    return str(python)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(prefix, "SECONDS", 1e-9)
    monkeypatch.setattr(prefix, "NUM_BLOCKS", SMALL)


# -- the life of a prompt -------------------------------------------------------------------


class Watched:
    """An engine that is kept, and counts."""

    def __init__(self, kind, num_blocks):
        self.engine, self.hits = kind(num_blocks), []
        Watched.last = self

    def new_request(self, request_id, token_ids):
        return self.engine.new_request(request_id, token_ids)

    def live(self, request):
        hit = self.engine.live(request)
        self.hits.append(hit)
        return hit


def watch(case, kind, num_blocks, monkeypatch):
    """One batch, on a clock that goes on by a second at each look."""
    monkeypatch.setattr(vllm_prefix.time, "process_time", itertools.count().__next__)
    us = vllm_prefix.us_per_life(case, lambda n: Watched(kind, n), num_blocks, 16, 1e-9)
    assert us == 1e6 / vllm_prefix.BATCH
    return Watched.last.engine, Watched.last.hits


@pytest.mark.parametrize("num_blocks", [640, 1_000])
def test_without_a_hit_each_block_evicts_another(num_blocks, monkeypatch):
    engine, hits = watch("miss", prefix.Minikv, num_blocks, monkeypatch)
    num_before = num_blocks // 64 + 1
    assert hits == [0] * (num_before + vllm_prefix.BATCH)
    manager = engine.manager
    assert manager.num_evictions == len(hits) * 64 - num_blocks
    assert manager.num_free_blocks == manager.num_cached_free_blocks == num_blocks
    manager.check()


def test_a_full_hit_finds_all_but_the_last_block_and_evicts_nothing(monkeypatch):
    engine, hits = watch("hit", prefix.Minikv, 1_000, monkeypatch)
    assert hits == [0] * 7 + [1_008] * vllm_prefix.BATCH  # the seven that fill half of the pool
    assert engine.manager.num_evictions == 0
    engine.manager.check()


@pytest.mark.parametrize("case, expected", [("miss", 0), ("hit", 1_008)])
def test_transformers_manager_does_the_same(case, expected, monkeypatch):
    engine, hits = watch(case, prefix.Transformers, 256, monkeypatch)
    assert hits[-vllm_prefix.BATCH :] == [expected] * vllm_prefix.BATCH
    allocator = engine.cache.cache_allocators["full_attention"]
    assert not allocator.block_table  # all were freed
    assert allocator.ledger.cached_blocks and engine.cache.num_blocks == 256


class Forgetful(prefix.Minikv):
    def live(self, request):
        super().live(request)
        self.manager.reset_prefix_cache()
        return 0


class Dreamer(prefix.Minikv):
    def live(self, request):
        return 1_008


@pytest.mark.parametrize("case, kind", [("hit", Forgetful), ("miss", Dreamer)])
def test_an_engine_that_does_something_else_is_not_timed(case, kind):
    with pytest.raises(RuntimeError, match=r"hits of .* tokens, but .* were expected"):
        vllm_prefix.us_per_life(case, kind, 256, 16, 1e-9)


def test_a_manager_that_refuses_is_not_timed():
    with pytest.raises(RuntimeError, match="refused"):
        vllm_prefix.us_per_life("miss", prefix.Minikv, 63, 16, 1e-9)


def test_admission_does_not_stand_on_an_answer_that_has_passed():
    """It takes the answer of the question before; here the blocks are gone in between."""
    manager = PrefixCachingKVCacheManager(4, 2)
    first = Request("first", [1, 2, 3, 4])
    manager.allocate_slots(first, 4)
    first.num_computed_tokens = 4
    manager.cache_blocks(first)
    manager.free(first)
    second = Request("second", [1, 2, 3, 4, 5])
    assert manager.get_num_cached_tokens(second) == 4
    manager.allocate_slots(Request("other", [9] * 8), 8)
    with pytest.raises(ValueError, match="num_cached_tokens is 4, but 0 blocks of 2 are found"):
        manager.allocate_slots(second, 1, num_cached_tokens=4)
    manager.check()


# -- the command ----------------------------------------------------------------------------


def test_json_and_table(capsys, tmp_path, quick):
    file = tmp_path / "out.json"
    assert bench.main(["prefix", "--rounds", "2", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    result = json.loads(file.read_text())
    keys = [(row["engine"], row["case"], row["num_blocks"]) for row in result["rows"]]
    assert keys == list(itertools.product(("minikv", "transformers"), ("miss", "hit"), SMALL))
    for row in result["rows"]:
        low, high = row["us_range"]
        assert 0 < low <= row["us_per_1024_tokens"] <= high
        assert f"{row['us_per_1024_tokens']:.0f} ({low:.0f}-{high:.0f})" in out
    few, many = (row["us_per_1024_tokens"] for row in result["rows"][:2])
    assert f" {many / few:.2f}\n" in out and out.count("not measured   --vllm-python") == 2


def test_vllms_manager_is_timed_in_its_own_environment(tmp_path, quick, capsys):
    code = """
settings = json.loads(sys.argv[2])
rounds = [300.0, 100.0, 200.0][: settings["rounds"]]
times = {case: {n: rounds for n in settings["num_blocks"]} for case in settings["cases"]}
print("noise")
print(json.dumps(times))
"""
    rows = prefix.speed(3, fake_python(tmp_path, code))
    rows = [row for row in rows if row["engine"] == "vllm"]
    assert [(row["case"], row["num_blocks"]) for row in rows] == [
        *itertools.product(("miss", "hit"), SMALL)
    ]
    assert all(row["us_per_1024_tokens"] == 200 and row["us_range"] == [100, 300] for row in rows)
    broken = fake_python(tmp_path, "raise SystemExit('no vllm here')")
    assert bench.main(["prefix", "--rounds", "1", "--vllm-python", broken]) == 1
    assert "vLLM's manager failed: no vllm here" in capsys.readouterr().err


# -- in the engine --------------------------------------------------------------------------

SETTINGS = Settings(model="tiny", dtype="float32", device="cpu")


def test_the_stopwatch_adds_up_and_goes_away(monkeypatch):
    monkeypatch.setattr(prefix.time, "perf_counter", itertools.count().__next__)
    values = [3, 1, 2]

    class List(list):
        pass

    watched = List(values)
    clock = prefix.Stopwatch(watched, ["append", "index"])
    watched.append(4)
    assert watched.index(2) == 2
    with pytest.raises(ValueError):
        watched.index(7)
    assert clock.seconds == 3 and watched == [3, 1, 2, 4]
    clock.stop()
    watched.append(5)
    assert clock.seconds == 3 and not vars(watched)


def test_share_and_ttft(monkeypatch):
    monkeypatch.setattr(workload_module, "OUTPUT_TOKENS", (3, 6))
    monkeypatch.setattr(prefix, "SHARED_TOKENS", 64)
    llm = prefix.make_llm(SETTINGS, max_model_len=600, num_gpu_blocks_override=120)
    share = prefix.share_of_steps(llm, make_workload(6, vocab_size=256))
    assert share["requests"] == 6 and share["hit_tokens"] == 0
    assert 0 < share["manager_s"] < share["steps_s"]
    assert share["share"] == share["manager_s"] / share["steps_s"]
    assert not vars(llm.manager).keys() & set(prefix.CALLED) and "step" not in vars(llm.core)
    first = prefix.ttft(llm, 2)
    assert first["skipped_tokens"] == 64 and first["predicted"] == 0.5
    assert first["saved"] == 1 - first["hit_s"] / first["miss_s"]
    assert first["saved_of_predicted"] == first["saved"] / 0.5


def test_the_command_prints_what_the_engine_says(capsys, tmp_path, monkeypatch, quick):
    monkeypatch.setattr(workload_module, "OUTPUT_TOKENS", (2, 3))
    file = tmp_path / "out.json"
    argv = ["prefix", "--rounds", "1", "--ttft", "--json", str(file), "--model", "tiny"]
    assert bench.main([*argv, "--dtype", "float32", "--device", "cpu"]) == 0
    result, out = json.loads(file.read_text()), capsys.readouterr().out
    assert result["zero_hits"]["requests"] == 64 and result["ttft"]["skipped_tokens"] == 512
    assert f"{result['zero_hits']['share']:.2%} (goal: less than 2%)" in out
    assert f"{result['ttft']['saved_of_predicted']:.0%} of what they predict" in out


# -- the differential -----------------------------------------------------------------------


def test_the_stream_is_what_it_is_said_to_be():
    stream = differential.make_stream()
    assert len(stream) == 2_000 and stream == differential.make_stream()
    assert stream != differential.make_stream(seed=1)
    num_slots = differential.NUM_BLOCKS * differential.BLOCK_SIZE
    assert max(len(prompt) + len(answer) for prompt, answer, _, _ in stream) <= num_slots
    turns = [(prompt, after) for prompt, _, after, _ in stream if after is not None]
    assert len(turns) > 500
    for prompt, after in turns:
        before = stream[after][0] + stream[after][1]
        assert prompt[: len(before)] == before
    twins = [
        (a, b)
        for a, b in itertools.pairwise(stream)
        if a[0] == b[0] and a[2] is b[2] is None and a[3] == b[3]
    ]
    assert len(twins) > 50  # at once


def test_the_stream_makes_what_a_cache_can_get_wrong():
    rows = differential.serve_minikv(differential.make_stream(400))
    hit_tokens, evictions, free, stepped_back = map(list, zip(*rows, strict=True))
    assert sum(map(bool, hit_tokens)) > 100 and sum(map(bool, evictions)) > 500
    assert sum(map(bool, stepped_back)) > 5 and min(free) < 10 and free[-1] == 200


@pytest.mark.parametrize("reason, rest", [("written", ()), ("parent", ("written",))])
def test_each_reason_of_ours_shows(reason, rest):
    """ "first" is a switch of vLLM's."""
    stream = differential.make_stream(800)
    with_it = differential.serve_minikv(stream, rest)
    assert with_it != differential.serve_minikv(stream, {reason, *rest})


OURS_FOR_THEIRS = """
from minikv.bench.differential import *
stream = json.load(sys.stdin)
assert json.loads(sys.argv[2])["keep_first"] == [False, True]
rows = serve_minikv(stream, ("written", "parent"))
"""


def run_differential(tmp_path, monkeypatch, code, *argv):
    monkeypatch.setattr(
        differential, "make_stream", lambda make=differential.make_stream: make(300)
    )
    code = OURS_FOR_THEIRS + code + 'print(json.dumps({"version": "0.1", "rows": rows}))\n'
    return bench.main(["differential", "--vllm-python", fake_python(tmp_path, code), *argv])


def test_differential_json_and_table(tmp_path, monkeypatch, capsys):
    """Ours in vLLM's place, which keeps the first of two in any case."""
    file = tmp_path / "out.json"
    code = "rows = [rows, rows]\n"
    assert run_differential(tmp_path, monkeypatch, code, "--json", str(file)) == 0
    result, out = json.loads(file.read_text()), capsys.readouterr().out
    assert result["status"] == "passed" and result["vllm"] == "0.1"
    rows = {" ".join(row["reasons"]): row["different_steps"] for row in result["rows"]}
    assert list(rows) == ["written first parent", "written", "first", "parent", ""]
    assert set(rows[""].values()) == set(rows["first"].values()) == {0}
    assert rows["written"]["hit tokens"] > 0 and rows["parent"]["evictions"] > 0
    for row in result["rows"]:
        assert f"{row['minikv']['evictions']:8,}" in out
    assert "equal in every step" in out and "vLLM 0.1" in out


@pytest.mark.parametrize(
    "fault",
    [
        'rows = serve(Minikv(HashIsEnough(200, 4, eviction="lfu"), early=True), stream, **LIMITS)',
        "rows[-1][2] -= 1",
        "rows.pop()",
    ],
)
def test_a_difference_without_a_reason_fails(fault, tmp_path, monkeypatch, capsys):
    code = f"{fault}\nrows = [rows, rows]\n"
    assert run_differential(tmp_path, monkeypatch, code) == 1
    assert "steps differ, and no reason says why" in capsys.readouterr().out


def test_differential_needs_a_vllm(capsys):
    assert bench.main(["differential"]) == 1
    assert "--vllm-python says where it is installed" in capsys.readouterr().err


class Refusing(differential.Minikv):
    def allocate(self, request, num_new_tokens, hit):
        return False


def test_an_engine_that_never_gives_room_is_no_hang():
    with pytest.raises(RuntimeError, match="0 of 2 requests ended in 401 steps"):
        engine = Refusing(PrefixCachingKVCacheManager(8, 4))
        vllm_differential.serve(engine, [[[1], [2], None, 0]] * 2, **differential.LIMITS)
