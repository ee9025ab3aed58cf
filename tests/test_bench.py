"""`python -m minikv bench`: what it reports, not how fast anything is."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from minikv.bench import allocator, engines, machine, steptime, vllm_allocator
from minikv.bench import workload as workload_module
from minikv.bench.workload import MAX_MODEL_LEN, make_workload
from minikv.commands import bench
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.model.backends import why_not

ENGINES = ["minikv-2", "generate-2", "generate_batch-2"]
SETTINGS = engines.Settings(model="tiny", dtype="float32", device="cpu")

# A vLLM that gives as many tokens as it is asked for, but speaks no arithmetic.
FAKE_VLLM = """
class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        self.max_tokens = max_tokens
class Output:
    def __init__(self, n):
        self.token_ids, self.outputs = [7] * n, [self]
class Engine:
    def step(self):
        return []
class LLM:
    def __init__(self, model, dtype, max_num_seqs, max_model_len, **options):
        print("loading", model, dtype)
        self.llm_engine = Engine()
    def generate(self, prompts, params, use_tqdm):
        self.llm_engine.step(), self.llm_engine.step()
        return [Output(p.max_tokens) for p in params]
__version__ = "0"
"""


def small_workload(num_requests=5):
    """Short enough for a test; requests of unlike lengths, more than run at once."""
    items = make_workload(num_requests, vocab_size=256)
    return [
        item._replace(prompt_token_ids=item.prompt_token_ids[: 3 + 9 * i], num_output_tokens=2 + i)
        for i, item in enumerate(items)
    ]


@pytest.fixture
def quick(monkeypatch):
    """Few tokens and few steps for the whole command."""
    monkeypatch.setattr(workload_module, "OUTPUT_TOKENS", (3, 6))
    monkeypatch.setattr(steptime, "NUM_STEPS", 4)


def run_bench(capsys, *argv, name=()):
    here = ["--model", "tiny", "--dtype", "float32", "--device", "cpu"]
    status = bench.main([*name, *here, *argv])
    return status, capsys.readouterr()


# -- the workload ---------------------------------------------------------------------------


def test_workload_is_pinned():
    workload = make_workload(64, vocab_size=49152)
    lengths = [(len(ids), n) for ids, n in workload]
    assert lengths[:4] == [(344, 178), (262, 44), (214, 124), (122, 150)]
    assert workload[0].prompt_token_ids[:5] == [44186, 14695, 44340, 33036, 43766]
    assert (sum(p for p, _ in lengths), sum(n for _, n in lengths)) == (13680, 7177)
    assert max(p + n for p, n in lengths) <= MAX_MODEL_LEN


def test_lengths_do_not_depend_on_the_vocabulary():
    small, large = make_workload(8, vocab_size=259), make_workload(8, vocab_size=100_000)
    assert [(len(a), n) for a, n in small] == [(len(a), n) for a, n in large]
    assert all(20 <= t < 259 for ids, _ in small for t in ids)


# -- engines --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_makes_exactly_the_tokens_asked_for(name):
    kind, num_seqs = engines.parse(name)
    workload = small_workload()
    engine = engines.KINDS[kind](SETTINGS, num_seqs)
    try:
        for _ in range(2):  # a second round starts where the first one started
            run = engine.run(workload)
            assert run.num_tokens == [n for _, n in workload]
            assert run.peak_kv_bytes > 0
            if kind == "generate":
                assert run.steps == 3 + 5 + 6  # the longest output of each batch of two
                positions = len(workload[3].prompt_token_ids) + 5 - 1
                assert run.peak_kv_bytes == 2 * positions * SETTINGS.spec.kv_bytes_per_token
            else:
                assert 10 <= run.steps <= 20  # 20 output tokens, two at once
    finally:
        engine.close()


def test_peak_kv_of_minikv_is_its_blocks():
    """The last two overlap when they have 33 and 39 tokens: three blocks of 16 each."""
    run = engines.Minikv(SETTINGS, 2).run(small_workload())
    assert run.peak_kv_bytes == 6 * 16 * SETTINGS.spec.kv_bytes_per_token


def test_vllm_worker(tmp_path, capsys):
    """The worker's protocol, with a fake in vLLM's place and a Python of its own."""
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    python = tmp_path / "python"
    inject = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    inject += "import runpy; runpy.run_path(sys.argv[-1], run_name='__main__')"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{inject}" "$@"\n')
    python.chmod(0o755)
    folder = tmp_path / "model"
    loaded = SETTINGS.load()
    loaded.model.save_pretrained(folder)
    capsys.readouterr()
    argv = ["--engines", "vllm-2", "--requests", "2", "--rounds", "1"]
    argv += ["--vllm-python", str(python), "--json", str(tmp_path / "out.json")]
    status, out = run_bench(capsys, *argv, "--model", str(folder))
    assert status == 0, out.err
    row = json.loads((tmp_path / "out.json").read_text())["rows"][0]
    assert (row["engine"], row["steps"], row["peak_kv_bytes"]) == ("vllm", 2, None)

    (tmp_path / "vllm.py").write_text("raise ImportError('no kernels for this CPU')")
    status, out = run_bench(capsys, *argv, "--model", str(folder))
    assert status == 1 and "no kernels for this CPU" in out.err


# -- the command ----------------------------------------------------------------------------

HAS_COMPILER = sys.platform != "win32" and any(map(shutil.which, ("c++", "g++", "clang++")))
BACKEND = "cpu" if HAS_COMPILER else "gather"


def test_json_and_table(capsys, tmp_path, quick):
    file = tmp_path / "out.json"
    status, out = run_bench(
        capsys, "--requests", "2", "--rounds", "2", "--json", str(file), "--engines", *ENGINES
    )
    assert status == 0
    result = json.loads(file.read_text())
    assert [(row["engine"], row["max_num_seqs"]) for row in result["rows"]] == [
        engines.parse(name) for name in ENGINES
    ]
    useful = result["workload"]["output_tokens"]
    for row in result["rows"]:
        low, high = row["useful_tok_per_s_range"]
        assert 0 < low <= row["useful_tok_per_s"] <= high
        assert low == pytest.approx(useful / row["seconds_range"][1])
        assert row["dtype"] == "float32" and row["steps"] > 0 and row["peak_kv_bytes"] > 0
        assert len(row["cores_busy_with_others"]) == result["rounds"] == 2
        assert f"{row['useful_tok_per_s']:.1f}" in out.out
        # Where there is a compiler, what is measured is the kernel, not what stands in for it.
        backend = BACKEND if row["engine"] == "minikv" else None
        assert row["attention_backend"] == backend
        assert (row["threads"] is not None) == (row["engine"] == "minikv")
    assert f"minikv's attention backend: {BACKEND}\n" in out.out
    for row in result["rows"]:
        if row["threads"]:
            assert f"minikv-{row['max_num_seqs']}'s threads: {row['threads']}\n" in out.out
    assert result["rows"][1]["ratio_to_generate"] == 1
    assert result["machine"]["torch"] == torch.__version__
    assert "round 2" in out.err  # the progress bar


def test_vllm_is_left_out_with_a_word(capsys, quick):
    status, out = run_bench(
        capsys, "--requests", "1", "--rounds", "1", "--engines", "minikv-1,vllm-1"
    )
    assert status == 0
    assert "vllm is left out: --vllm-python" in out.out
    assert "\nvllm" not in out.out


def test_an_engine_that_makes_fewer_tokens_is_an_error(capsys, monkeypatch, quick):
    honest = engines.Minikv.run

    def short(self, workload):
        return honest(self, [item._replace(num_output_tokens=2) for item in workload])

    monkeypatch.setattr(engines.Minikv, "run", short)
    status, out = run_bench(capsys, "--requests", "2", "--rounds", "1", "--engines", "minikv-2")
    assert status == 1
    assert "made 2 tokens for request 0, which asked for" in out.err


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--requests", "0"], "--requests is 0"),
        (["--rounds", "-1"], "--rounds is -1"),
        (["--engines", "sglang-16"], "'sglang-16' is not known"),
        (["--engines", "minikv-0"], "'minikv-0' is not known"),
        (["--engines", "minikv-"], "'minikv-' is not known"),
        (["--engines", "vllm"], "no engine is left"),
        (["--engines", "vllm", "--vllm-python", sys.executable], "tiny is made in memory"),
        (["--vllm-python", "/no/such/python"], "no such file"),
        (["--json", "/no/such/folder/out.json"], "there is no folder"),
        (["--json", "/"], "cannot be written"),
        (["--json", ""], "--json '': that file cannot be written"),
        (["--dtype", "float7"], "float7"),
    ],
)
def test_bad_input_is_one_line(capsys, argv, message):
    status, out = run_bench(capsys, *argv)
    assert status == 1
    lines = [line for line in out.err.splitlines() if line.startswith("minikv bench: ")]
    assert len(lines) == 1 and message in lines[0]


@pytest.mark.parametrize(
    "argv, message",
    [
        (["profile", "--engines", "minikv-1"], "unrecognized arguments: --engines"),
        (["allocator", "--requests", "3"], "unrecognized arguments: --requests"),
        (["viz", "profile"], "unrecognized arguments: profile"),
        (["radix"], "no bench 'radix'; known: throughput, profile,"),
        (["--profile"], "unrecognized arguments: --profile"),
    ],
)
def test_what_a_bench_has_no_use_for_is_refused(capsys, argv, message):
    with pytest.raises(SystemExit) as stop:
        bench.main(argv)
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], *([name] for name in bench.BENCHES)])
def test_every_bench_has_help(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        bench.main([*argv, "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and " ".join(["usage: python -m minikv bench", *argv]) in out
    assert all(f"bench {name}" in out for name in bench.BENCHES) or argv


def test_help_imports_no_torch():
    code = (
        "import sys\nfrom minikv.commands import bench\n"
        "try:\n    bench.main(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "generate_batch-N" in done.stdout


# -- the profile ----------------------------------------------------------------------------


ATTENTION_PARTS = {
    "gather": ("attention: gather K and V", "attention: scores and mixing", "attention: softmax"),
    "cpu": ("attention: K and V read in place", "attention: write K and V"),
}


@pytest.mark.parametrize("backend", ATTENTION_PARTS)
def test_profile_adds_up(capsys, tmp_path, quick, backend, monkeypatch):
    if backend == "gather":
        monkeypatch.setenv("MINIKV_CPU_KERNELS", "0")
    elif why_not("cpu", "cpu", torch.bfloat16):
        pytest.skip("no compiler")
    file = tmp_path / "out.json"
    status, out = run_bench(capsys, "--max-num-seqs", "2", "--json", str(file), name=["profile"])
    assert status == 0
    profile = json.loads(file.read_text())["profile"]
    assert profile["attention_backend"] == backend
    assert f"threads: {profile['threads']}:" in out.out
    rows = {row["part"]: row for row in profile["rows"]}
    assert sum(row["ms"] for row in rows.values()) == pytest.approx(profile["step_ms"])
    assert sum(row["percent"] for row in rows.values()) == pytest.approx(100)
    assert all(row["ms"] >= 0 for row in rows.values())
    for part in (
        "linears",
        "output head",
        "norms",
        "rope",
        "activation",
        *ATTENTION_PARTS[profile["attention_backend"]],
        "sampling",
        "metadata building",
        "scheduling and outputs",
        "Python between the operations",
    ):
        assert part in rows, part
    assert profile["unprofiled_step_ms"] > 0
    assert "linears" in out.out and "unprofiled" in out.out


def test_profile_leaves_the_engine_as_it_was(quick):
    llm = engines.Minikv(SETTINGS, 2).llm
    functions = llm.runner.attend, llm.runner.write_kv
    before = llm.generate([[5, 6, 7]], use_tqdm=False)[0].outputs[0].token_ids
    steptime.profile_decode(llm, small_workload(2))
    assert not llm.has_unfinished_requests()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in llm.model.modules())
    assert "forward" not in vars(llm.model) and "run" not in vars(llm.runner)
    assert (llm.runner.attend, llm.runner.write_kv) == functions
    assert llm.generate([[5, 6, 7]], use_tqdm=False)[0].outputs[0].token_ids == before


# -- the allocator --------------------------------------------------------------------------


def test_allocator_json_and_table(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(allocator, "SECONDS", 1e-9)
    file = tmp_path / "out.json"
    assert bench.main(["allocator", "--rounds", "2", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    names = [(engine, n) for engine in ("minikv", "dict and lists") for n in (1_000, 100_000)]
    assert [(row["engine"], row["num_blocks"]) for row in rows] == names
    by_name = dict(zip(names, rows, strict=True))
    for row in rows:
        for name, unit in (("appends_per_s", 1e6), ("requests_per_s", 1e3)):
            low, high = row[f"{name}_range"]
            assert 0 < low <= row[name] <= high and f"{row[name] / unit:.2f} (" in out
    few, many = by_name["minikv", 1_000], by_name["minikv", 100_000]
    for name in ("appends_per_s", "requests_per_s"):
        assert f"{few[name] / many[name]:.2f} " in out.split("time at 100,000 blocks")[1]
    assert "vllm                             not measured" in out


class CountingManager(allocator.DictAndListsManager):
    num_calls = most_in_use = 0

    def allocate_slots(self, request, num_new_tokens):
        self.num_calls += 1
        table = super().allocate_slots(request, num_new_tokens)
        self.most_in_use = max(self.most_in_use, self.num_blocks - self.num_free_blocks)
        return table


def test_the_allocator_loops_do_what_they_count(monkeypatch):
    """One pass each, on a clock that goes on by a second at each look."""
    clock = iter(range(100))
    monkeypatch.setattr(vllm_allocator.time, "process_time", lambda: next(clock))
    manager = CountingManager(1_000, 16)
    rate = vllm_allocator.appends_per_s(manager, allocator._new_request, 1)
    assert rate == 8 * 1_800 and manager.num_calls == 8 + 8 * 1_800
    assert manager.most_in_use == 8 * 119  # blocks of 16 for 1,900 tokens
    assert manager.num_free_blocks == 1_000
    rate = vllm_allocator.requests_per_s(manager, allocator._new_request, 2)
    assert rate == 200 and manager.num_calls == 8 + 8 * 1_800 + 2 * 200
    manager.check()


@pytest.mark.parametrize("engine", [PagedKVCacheManager, allocator.DictAndListsManager])
@pytest.mark.parametrize("loop", ["appends_per_s", "requests_per_s"])
@pytest.mark.parametrize("num_blocks", [9, 55])  # too few at once, and for eight that grow
def test_a_manager_that_refuses_is_not_timed(loop, engine, num_blocks):
    with pytest.raises(RuntimeError, match="refused"):
        getattr(vllm_allocator, loop)(engine(num_blocks, 16), allocator._new_request, 1e-9)


FAKE_VLLM_ALLOCATOR = """#!{python}
import json, sys
settings = json.loads(sys.argv[2])
print("noise")
print(json.dumps({{n: [[1.0, 20.0], [3.0, 10.0], [2.0, 30.0]] for n in settings["num_blocks"]}}))
"""


def test_vllms_manager_is_timed_in_its_own_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(allocator, "SECONDS", 1e-9)
    python = tmp_path / "python"
    python.write_text(FAKE_VLLM_ALLOCATOR.format(python=sys.executable), encoding="utf-8")
    python.chmod(0o755)
    rows = [row for row in allocator.speed(1, str(python)) if row["engine"] == "vllm"]
    assert [row["num_blocks"] for row in rows] == [1_000, 100_000]
    assert all(row["appends_per_s"] == 2 and row["requests_per_s"] == 20 for row in rows)
    assert rows[0]["requests_per_s_range"] == [10, 30]
    python.write_text(f"#!{sys.executable}\nraise SystemExit('no vllm here')\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match="vLLM's manager failed: no vllm here"):
        allocator.speed(1, str(python))


def test_the_allocator_is_timed_without_torch():
    code = (
        "import sys\nfrom minikv.commands import bench\nfrom minikv.bench import allocator\n"
        "allocator.SECONDS = 1e-9\nassert bench.main(['allocator', '--rounds', '1']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- the machine ----------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="needs /proc/stat")
def test_watch_sees_others_but_not_itself_nor_its_own_process():
    spin = [sys.executable, "-c", "import time\nwhile time.perf_counter() < 1e18: pass"]
    process = subprocess.Popen(spin)
    try:
        with machine.Watch() as others, machine.Watch(process.pid) as own:
            end = machine.time.perf_counter() + 0.5
            while machine.time.perf_counter() < end:
                pass
    finally:
        process.kill()
        process.wait()
    assert own.others is not None
    assert others.others > own.others


def test_watch_without_proc(monkeypatch):
    monkeypatch.setattr(machine, "Path", lambda path: __import__("pathlib").Path("/no") / path[1:])
    with machine.Watch() as watch:
        pass
    assert watch.others is None and not watch.busy
    assert machine.cpu_name()


# -- the widget -----------------------------------------------------------------------------


def test_viz_json_and_table(capsys, tmp_path):
    file = tmp_path / "out.json"
    assert bench.main(["viz", "--rounds", "1", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) >= 5 and len({json.dumps(row["settings"]) for row in rows}) == len(rows)
    for row in rows:
        parts = [row[f"{part}_ms"] for part in ("simulate", "draw", "encode")]
        assert min(parts) > 0 and sum(parts) == pytest.approx(row["total_ms"])
        assert f"{row['total_ms']:10.0f} " in out
    assert "goal: 300 ms" in out
