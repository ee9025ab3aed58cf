"""`python -m minikv simulate` and `bench simulator`, in this process."""

import json
import subprocess
import sys
import types

import pytest

from minikv import __main__
from minikv.bench import roofs, simulator
from minikv.commands import bench, environment, simulate
from minikv.commands import progress as progress_bars
from minikv.commands.simulate import main
from minikv.metrics import PERCENTILES

SHORT = ["--requests", "30", "--rate", "0.5"]


def run(capsys, *argv):
    status = main([*argv])
    return status, capsys.readouterr()


def result(tmp_path, capsys, *argv):
    path = tmp_path / "out.json"
    status, captured = run(capsys, "--json", str(path), *argv)
    assert status == 0, captured.err
    return json.loads(path.read_text(encoding="utf-8"))


def test_it_serves_and_prints_the_metrics_and_what_it_assumed(capsys):
    status, captured = run(capsys, *SHORT)
    assert status == 0 and captured.err == ""
    for part in (
        "sharegpt: 30 requests, 0.5 per second", "785 blocks of 16 tokens (12,560 slots)",
        "max_model_len 2,048", "continuous batching", "OPT-13B in float16 on A100 40GB SXM",
        "60% of 312 TFLOP/s", "80% of 1555 GB/s", "5 ms", "Left out",
        "completed", "request_throughput", "output_throughput", "total_token_throughput",
        "ttft_ms", "tpot_ms", "itl_ms", "e2el_ms", "queue_time_ms", "p99", "median",
    ):  # fmt: skip
        assert part in captured.out, part


def test_the_json_has_vllms_names(tmp_path, capsys):
    out = result(tmp_path, capsys, *SHORT)
    metrics = out["metrics"]
    assert metrics["completed"] == metrics["num_requests"] == 30 and metrics["failed"] == 0
    for name in ("ttft", "tpot", "itl", "e2el", "queue_time"):
        for column in ("mean", "median", *(f"p{p}" for p in PERCENTILES)):
            assert metrics[f"{column}_{name}_ms"] >= 0
    assert {"duration", "total_input_tokens", "total_output_tokens", "request_throughput",
            "output_throughput", "total_token_throughput"} <= metrics.keys()  # fmt: skip
    assert out["settings"]["model"]["name"] == "OPT-13B" and out["settings"]["seed"] == 0
    assert out["settings"]["manager"] == "paged" and "reserve" not in out["settings"]
    assert out["settings"]["num_blocks"] == 785 and "A step takes" in out["assumptions"]


def test_the_same_command_gives_the_same_numbers(tmp_path, capsys):
    runs = [result(tmp_path, capsys, *SHORT, "--seed", seed)["metrics"] for seed in "001"]
    assert runs[0] == runs[1] != runs[2]


def test_options_reach_the_simulation(tmp_path, capsys):
    def metrics(*argv):
        return result(tmp_path, capsys, "--requests", "60", *argv)["metrics"]

    base = metrics("--rate", "2")
    assert metrics("--rate", "2", "--batching", "static")["mean_tpot_ms"] > base["mean_tpot_ms"]
    assert metrics("--rate", "2", "--gpu", "h100")["mean_itl_ms"] < base["mean_itl_ms"]
    assert metrics("--rate", "2", "--workload", "alpaca")["total_output_tokens"] < 6_000
    assert metrics("--rate", "2", "--max-num-seqs", "1")["mean_num_seqs"] == pytest.approx(1.0)
    slabs = metrics("--rate", "2", "--manager", "contiguous")  # six slabs of 2,048 slots
    assert base["mean_num_seqs"] > 1.5 * slabs["mean_num_seqs"] and slabs["mean_num_seqs"] <= 6
    one = ["--num-blocks", "128", "--manager", "contiguous"]
    assert metrics("--rate", "2", *one)["mean_num_seqs"] == pytest.approx(1.0)
    assert metrics("--rate", "2", "--overhead-ms", "50")["mean_itl_ms"] > 50
    assert metrics("--rate", "2", "--overhead-per-request-ms", "9")["mean_itl_ms"] > 60
    slow = metrics("--rate", "2", "--memory-efficiency", "0.4")
    assert slow["median_itl_ms"] > 1.5 * base["median_itl_ms"]
    assert metrics("--rate", "0.01")["mean_queue_time_ms"] < base["mean_queue_time_ms"]
    burst = metrics("--rate", "0.3", "--cv", "8", "--model", "opt-13b")
    assert burst["p99_queue_time_ms"] > metrics("--rate", "0.3")["p99_queue_time_ms"]
    chunked = metrics("--rate", "2", "--max-num-batched-tokens", "32")
    assert chunked["num_steps"] > base["num_steps"]
    more = ["--gpu-memory-utilization", "1", "--manager", "contiguous"]
    assert metrics("--rate", "2", *more)["mean_num_seqs"] > slabs["mean_num_seqs"]
    assert metrics("--duration", "20")["num_requests"] < 60  # whichever ends first


def test_a_closed_loop(tmp_path, capsys):
    out = result(tmp_path, capsys, "--closed-loop", "3", "--requests", "40")
    assert out["metrics"]["completed"] == 40
    assert 2.5 < out["metrics"]["mean_num_seqs"] <= 3
    assert out["metrics"]["mean_queue_time_ms"] == 0  # there is room for more


def test_what_never_fits_is_counted_and_said(tmp_path, capsys):
    status, captured = run(capsys, *SHORT, "--max-model-len", "300")
    assert status == 0
    assert "requests were refused, the first: request 'sharegpt-" in captured.out
    out = result(tmp_path, capsys, *SHORT, "--max-model-len", "300")["metrics"]
    assert out["failed"] > 0 and out["failed"] + out["completed"] == 30


def test_where_nothing_fits_there_are_no_metrics(capsys):
    status, captured = run(capsys, *SHORT, "--max-model-len", "5")
    assert status == 0 and "30 requests were refused" in captured.out
    assert "ttft_ms" in captured.out


@pytest.mark.parametrize("reserve, fit", [
    ("max", "first"), ("pow2", "best"), ("double", "worst"), ("exact", "buddy"), ("grow", "next"),
])  # fmt: skip
def test_a_contiguous_cache_under_any_policy(tmp_path, capsys, reserve, fit):
    options = ["--reserve", reserve, "--fit", fit]
    options += ["--num-blocks", "150", "--closed-loop", "8", "--requests", "30"]
    out = result(tmp_path, capsys, *options)
    assert (out["settings"]["reserve"], out["settings"]["fit"]) == (reserve, fit)
    assert out["settings"]["manager"] == "contiguous"
    assert out["metrics"]["completed"] == 30
    moved = out["metrics"]["num_relocations"], out["metrics"]["num_moved_blocks"]
    assert (min(moved) > 0) == (reserve in ("double", "grow")), moved
    status, captured = run(capsys, *options)
    assert status == 0 and f"ContiguousKVCacheManager ({reserve}, {fit} fit)" in captured.out
    assert "num_moved_blocks" in captured.out


def test_a_model_of_long_contexts_is_clipped_to_the_pool(capsys):
    status, captured = run(capsys, *SHORT, "--model", "llama-3.1-8b", "--num-blocks", "200")
    assert status == 0 and "max_model_len 3,200" in captured.out


@pytest.mark.parametrize("argv, message", [
    (["--workload", "shargpt"], "--workload is 'shargpt'; known: sharegpt, alpaca"),
    (["--gpu", "A100"], "one of A100 40GB SXM, A100 80GB SXM, or this-machine"),
    (["--gpu", "tpu"], "none of L4, RTX 4090"),
    (["--model", "gpt-5"], "model 'gpt-5' is none of"),
    (["--gpu", "L4"], "leaves no room for a block in 90% of L4's 24 GB"),
    (["--batching", "dynamic"], "--batching is 'dynamic'; known: continuous, static"),
    (["--rate", "0"], "rate is 0.0, but must be above 0"),
    (["--rate", "nan"], "rate is nan"),
    (["--cv", "0"], "cv is 0.0"),
    (["--duration", "-3"], "duration_s is -3.0"),
    (["--duration", "inf"], "duration_s is inf"),
    (["--duration", "0.001"], "no request comes in 0.001 s at 1 per second"),
    (["--requests", "0"], "num_requests is 0"),
    (["--seed", "-1"], "--seed is -1"),
    (["--closed-loop", "0"], "--closed-loop is 0, but must be at least 1"),
    (["--closed-loop", "4", "--rate", "2"], "--closed-loop has no use for --rate"),
    (["--closed-loop", "4", "--requests", "0"], "num_requests is 0"),
    (["--max-num-seqs", "0"], "max_num_seqs is 0"),
    (["--max-num-batched-tokens", "0"], "max_num_batched_tokens is 0"),
    (["--max-model-len", "4096"], "--max-model-len is 4096, but OPT-13B was made for 2048"),
    (["--max-model-len", "0"], "max_model_len is 0"),
    (["--block-size", "0"], "--block-size is 0"),
    (["--num-blocks", "0"], "--num-blocks is 0"),
    (["--num-blocks", "9", "--max-model-len", "145"], "145, but the pool has 144 slots"),
    (["--num-blocks", "9", "--max-model-len", "200", "--manager", "contiguous"], "a slab of 13"),
    (["--reserve", "most"], "--reserve is 'most'; known: max, pow2, double, exact, grow"),
    (["--fit", "tight"], "--fit is 'tight'; known: first, best, next, worst, buddy"),
    (["--fit", "buddy", "--num-blocks", "100", "--max-model-len", "1500"],
     "a slab of 94 blocks of 16 tokens, but the pool has only 100 blocks, and buddy fit gives 64"),
    (["--fit", "best", "--manager", "paged"], "--fit is for --manager contiguous, not paged"),
    (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization is 1.5"),
    (["--compute-efficiency", "2"], "compute_efficiency is 2.0"),
    (["--overhead-ms", "-1"], "overhead_s is -0.001"),
    (["--json", ""], "--json '': that file cannot be written"),
    (["--json", "/nowhere/out.json"], "there is no folder /nowhere"),
    (["--json", "/tmp"], "--json '/tmp': that file cannot be written"),
])  # fmt: skip
def test_an_error_is_one_line_and_status_1(capsys, argv, message):
    status, captured = run(capsys, *argv)
    assert status == 1 and captured.out == ""
    assert captured.err.startswith("minikv simulate: ") and captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("argv, status", [
    (["--help"], 0), (["fig99"], 2), (["--manager", "magic"], 2), (["--rate", "fast"], 2),
])  # fmt: skip
def test_help_and_usage(capsys, argv, status):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == status
    captured = capsys.readouterr()
    assert "python -m minikv simulate" in captured.out + captured.err
    if argv == ["--help"]:
        for option in ("--workload", "--gpu", "--closed-loop", "--max-num-seqs", "examples:"):
            assert option in captured.out


def test_a_subcommand_takes_over(monkeypatch, capsys):
    seen = []
    module = types.ModuleType("an_experiment")
    module.main = lambda argv: seen.append(argv) or 7
    monkeypatch.setitem(sys.modules, "an_experiment", module)
    monkeypatch.setitem(simulate.EXPERIMENTS, "fig0", ("an_experiment:main", "draws nothing"))
    assert main(["fig0", "--seeds", "3"]) == 7 and seen == [["--seeds", "3"]]
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "simulate fig0" in capsys.readouterr().out


def test_it_is_a_command_of_minikv_and_needs_no_torch():
    code = (
        "import sys; from minikv.commands.simulate import main\n"
        "assert main(['--requests', '3']) == 0 and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_command_of_minikv(monkeypatch, capsys):
    monkeypatch.setattr(environment, "hand_over", lambda argv: None)
    assert __main__.main(["simulate", "--requests", "3"]) == 0
    assert "sharegpt: 3 requests" in capsys.readouterr().out


def test_progress_counts_whoever_has_ended():
    core = types.SimpleNamespace(num_ended=0, clock=types.SimpleNamespace(now=lambda: 5.0))
    updates = []
    with progress_bars.Progress(10, core) as progress:
        progress._bar = types.SimpleNamespace(
            update=updates.append, set_postfix_str=lambda *a, **k: None, close=lambda: None
        )
        for core.num_ended in (0, 1, 1, 4):
            progress(core)
        core.num_ended = 6  # refused after the last step
    assert updates == [1, 3, 2]


# -- this machine, and bench simulator --------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """Few steps; what they measure is of no account here."""
    monkeypatch.setattr(roofs, "SIDE", 64)
    monkeypatch.setattr(roofs, "NUM_BYTES", 1 << 20)
    monkeypatch.setattr(roofs, "SECONDS", 0.0)
    monkeypatch.setattr(simulator, "RUNNING", {4: (30, 60_000)})
    monkeypatch.setattr(simulator, "NUM_SHAREGPT", 5)
    monkeypatch.setattr(simulator, "CALIBRATION_REQUESTS", 4)


def test_this_machine_is_a_gpu_like_any_other(quick, tmp_path, capsys):
    here = roofs.this_machine()
    assert here.name == "this machine" and here.bf16_flops > 1e6 and here.bandwidth > 1e6
    assert here.memory_gb >= 1 and "products of 64 x 64" in here.source
    argv = ["--gpu", "this-machine", "--model", "smollm2", "--max-model-len", "2048", *SHORT]
    out = result(tmp_path, capsys, *argv)
    assert out["settings"]["gpu"]["name"] == "this machine" and out["metrics"]["completed"] == 30


def test_bench_simulator_reports_speed_and_the_error_of_its_predictions(quick, tmp_path, capsys):
    path = tmp_path / "out.json"
    argv = ["simulator", "--model", "tiny", "--dtype", "float32", "--device", "cpu"]
    assert bench.main([*argv, "--rounds", "2", "--json", str(path)]) == 0
    captured = capsys.readouterr()
    for part in ("steps/s, 4 running", "not measured", "another seed", "static batches", "error"):
        assert part in captured.out
    out = json.loads(path.read_text(encoding="utf-8"))
    assert [row["goal"] for row in out["speed"]] == [60_000, 2_000]
    assert all(row["per_s"] > 0 and row["vllm_per_s"] is None for row in out["speed"])
    rows = out["calibration"]["rows"]
    assert [row["what"] for row in rows] == ["the fitted run", *simulator.PREDICTED]
    for row in rows:
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)


FAKE_SCHEDULER_RUN = """#!{python}
import json, sys
settings = json.loads(sys.argv[2])
print("noise")
print(json.dumps({{n: [10.0, 30.0, 20.0] for n in settings["running"]}}))
"""


def test_vllms_scheduler_is_asked_in_its_own_environment(quick, tmp_path):
    python = tmp_path / "python"
    python.write_text(FAKE_SCHEDULER_RUN.format(python=sys.executable), encoding="utf-8")
    python.chmod(0o755)
    rows = simulator.speed(1, str(python))
    assert [row["vllm_per_s"] for row in rows] == [20.0, None]
    python.write_text(f"#!{sys.executable}\nraise SystemExit('no vllm here')\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match="vLLM's scheduler failed: no vllm here"):
        simulator.speed(1, str(python))


class Step:
    def __init__(self, seconds, num_seqs):
        self.start, self.end, self.num_seqs = 10.0, 10.0 + seconds, num_seqs


def test_the_fit_finds_what_made_the_steps():
    roof = [0.5, 1.0, 0.25, 2.0, 0.75, 1.5]
    seqs = [1, 4, 2, 8, 3, 1]
    bare = [Step(r, n) for r, n in zip(roof, seqs, strict=True)]
    for efficiency, overhead, each in [(0.5, 0.2, 0.03), (1.0, 0.0, 0.1), (0.8, 0.0, 0.0)]:
        measured = [
            Step(r / efficiency + overhead + each * n, n) for r, n in zip(roof, seqs, strict=True)
        ]
        assert simulator._fit(measured, bare) == pytest.approx((efficiency, overhead, each))


def test_the_fit_stays_within_what_a_step_time_can_be():
    """Steps faster than the roofs: nothing negative, no efficiency above 1."""
    bare = [Step(r, n) for r, n in [(1.0, 1), (2.0, 3), (4.0, 2)]]
    measured = [Step(s.end - s.start - 0.5, s.num_seqs) for s in bare]
    assert simulator._fit(measured, bare) == (1.0, 0.0, 0.0)
