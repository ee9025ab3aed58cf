"""How fast the simulator's loop is on one core, and how well it predicts this machine.

The loop is core's: schedule, a runner, update. vLLM's scheduler, where an environment has it, does
the same without a model in `vllm_scheduler.py`.
"""

import statistics
import time

import numpy as np

from minikv.bench.ask_vllm import ask_vllm
from minikv.kv_cache.base import cdiv
from minikv.kv_cache.paged import PagedKVCacheManager
from minikv.request import Request, SamplingParams
from minikv.simulator import Simulation, StepTime
from minikv.specs import find_gpu, find_model
from minikv.static_batching import BATCHING
from minikv.workloads import sharegpt

PROMPT_TOKENS, BLOCK_SIZE = 100, 16
# requests running -> (steps of a run, goal in steps per second)
RUNNING = {128: (2_000, 6_000), 8: (20_000, 60_000)}
NUM_SHAREGPT, SHAREGPT_GOAL = 2_000, 2_000  # requests of a run, goal in requests per second
POOL_SLOTS = 15_700  # OPT-13B's on an A100 with 40 GB (Kwon et al. 2023)

CALIBRATION_REQUESTS = 8
MAX_MODEL_LEN = 192
MAX_NUM_BATCHED_TOKENS = 128  # the longest prompts come in chunks
# what is predicted -> (seed, requests at once); the first run is what the overheads are fitted to
FITTED = (0, 6)
PREDICTED = {"another seed": (1, 6), "another batch size": (2, 3), "static batches": (3, 6)}


# -- speed ----------------------------------------------------------------------------------


def speed(rounds, vllm_python=None) -> list[dict]:
    """Rows {"what", "per_s", "range", "goal", "vllm_per_s" (None: not measured)}: medians over the
    rounds, and the range of them. One core does all of it."""
    vllm = _vllm_steps(vllm_python, rounds) if vllm_python else {}
    rows = []
    for running, (num_steps, goal) in RUNNING.items():
        rates = [_steps_per_s(running, num_steps) for _ in range(rounds)]
        rows.append(_row(f"steps/s, {running} running", rates, goal, vllm.get(str(running))))
    rates = [_requests_per_s() for _ in range(rounds)]
    rows.append(_row("ShareGPT requests/s, end to end", rates, SHAREGPT_GOAL, None))
    return rows


def _row(what, rates, goal, vllm_per_s):
    return {
        "what": what,
        "per_s": statistics.median(rates),
        "range": [min(rates), max(rates)],
        "goal": goal,
        "vllm_per_s": vllm_per_s,
    }


def _simulation(num_slots, max_model_len, max_num_seqs, max_num_batched_tokens):
    num_blocks = cdiv(num_slots, BLOCK_SIZE)
    manager = PagedKVCacheManager(num_blocks, BLOCK_SIZE, max_model_len=max_model_len)
    scheduler = BATCHING["continuous"](
        manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    return Simulation(scheduler, StepTime(find_model("opt-13b"), find_gpu("A100-40G")))


def _steps_per_s(running, num_steps):
    """All are there from the start and of one length: each step computes a token of each."""
    length = PROMPT_TOKENS + num_steps
    slots = running * cdiv(length, BLOCK_SIZE) * BLOCK_SIZE
    simulation = _simulation(slots, length, running, running * PROMPT_TOKENS)
    requests = [
        Request(f"r{i}", num_prompt_tokens=PROMPT_TOKENS, max_tokens=num_steps)
        for i in range(running)
    ]
    seconds = _timed(lambda: simulation.run(requests))
    assert len(simulation.core.metrics.steps) == num_steps
    return num_steps / seconds


def _requests_per_s():
    """From drawing the traffic to the summary."""

    def serve():
        requests = sharegpt(rate=2).requests(num_requests=NUM_SHAREGPT, seed=0)
        _simulation(POOL_SLOTS, 2048, 256, 2048).run(requests).summary()

    return NUM_SHAREGPT / _timed(serve)


def _timed(function):
    """Seconds of this process, so that whatever else is running takes none of them away."""
    start = time.process_time()
    function()
    return time.process_time() - start


def _vllm_steps(python, rounds):
    """requests running, as text -> steps per second of vLLM's own scheduler."""
    from minikv.model.fetch import default_model_dir

    settings = {
        "model": str(default_model_dir()),
        "block_size": BLOCK_SIZE,
        "prompt_tokens": PROMPT_TOKENS,
        "running": {running: num_steps for running, (num_steps, _) in RUNNING.items()},
        "rounds": rounds,
    }
    rates = ask_vllm(python, "vllm_scheduler.py", "vLLM's scheduler", settings)
    return {running: statistics.median(values) for running, values in rates.items()}


# -- calibration ----------------------------------------------------------------------------


def calibrate(settings, roofs) -> dict:
    """Fits StepTime to one run of the engine on this machine, then predicts runs that the fit has
    not seen. roofs: this machine as a GPU (`roofs.this_machine`).

    The fit: efficiency (one for both roofs) and the two overheads, by least squares over steps.
    {"efficiency", "overhead_ms", "overhead_per_request_ms", "rows": [{"what", "max_num_seqs",
    "steps", "measured_s", "predicted_s", "error"}]}; error is predicted / measured - 1, and the
    first row is the fitted run itself.
    """
    from minikv.model.loader import Loaded

    model, _, spec = settings.load()
    loaded = Loaded(model, None, spec)
    _measure(loaded, *FITTED)  # buffers grow, kernels are chosen
    bare = StepTime(spec, roofs, compute_efficiency=1, memory_efficiency=1, overhead_s=0)
    fitted = _fit(_measure(loaded, *FITTED), _predict(bare, *FITTED))
    step_time = StepTime(
        spec,
        roofs,
        compute_efficiency=fitted[0],
        memory_efficiency=fitted[0],
        overhead_s=fitted[1],
        overhead_per_request_s=fitted[2],
    )
    rows = []
    for what, (seed, num_seqs) in {"the fitted run": FITTED, **PREDICTED}.items():
        batching = "static" if what.startswith("static") else "continuous"
        measured = _measure(loaded, seed, num_seqs, batching)
        predicted = _predict(step_time, seed, num_seqs, batching)
        if [s[2:4] for s in measured] != [s[2:4] for s in predicted]:
            raise RuntimeError(f"{what}: the simulator's schedule is not the engine's")
        seconds = [sum(step.end - step.start for step in steps) for steps in (measured, predicted)]
        rows.append(
            {
                "what": what,
                "max_num_seqs": num_seqs,
                "steps": len(measured),
                "measured_s": seconds[0],
                "predicted_s": seconds[1],
                "error": seconds[1] / seconds[0] - 1,
            }
        )
    return {
        "efficiency": fitted[0],
        "overhead_ms": 1e3 * fitted[1],
        "overhead_per_request_ms": 1e3 * fitted[2],
        "rows": rows,
    }


def _lengths(seed):
    """(prompt tokens, output tokens) of each request."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(16, 129, CALIBRATION_REQUESTS).tolist()
    outputs = rng.integers(8, 41, CALIBRATION_REQUESTS).tolist()
    return list(zip(prompts, outputs, strict=True))


def _limits(num_seqs):
    return {"max_num_seqs": num_seqs, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS}


def _measure(loaded, seed, num_seqs, batching="continuous"):
    """The engine's steps."""
    from minikv.engine import LLM

    llm = LLM(loaded, max_model_len=MAX_MODEL_LEN, batching=batching, **_limits(num_seqs))
    rng = np.random.default_rng(seed)
    for prompt, output in _lengths(seed):
        ids = rng.integers(0, loaded.spec.vocab_size, prompt).tolist()
        llm.add_request(ids, SamplingParams(max_tokens=output, ignore_eos=True))
    while llm.has_unfinished_requests():
        llm.step()
    return llm.metrics.steps


def _predict(step_time, seed, num_seqs, batching="continuous"):
    """The simulator's steps for the same requests."""
    num_blocks = num_seqs * cdiv(MAX_MODEL_LEN, BLOCK_SIZE)  # as many as the engine has
    manager = PagedKVCacheManager(num_blocks, BLOCK_SIZE, max_model_len=MAX_MODEL_LEN)
    simulation = Simulation(BATCHING[batching](manager, **_limits(num_seqs)), step_time)
    requests = [
        Request(str(i), num_prompt_tokens=prompt, max_tokens=output)
        for i, (prompt, output) in enumerate(_lengths(seed))
    ]
    return simulation.run(requests).core.metrics.steps


def _fit(measured, bare):
    """(efficiency, overhead_s, overhead_per_request_s) so that a step takes bare / efficiency +
    overheads. Nothing may come out negative, and no efficiency above 1: a factor that would is
    left out, and the others are fitted again."""
    seconds = np.array([step.end - step.start for step in measured])
    roof = np.array([step.end - step.start for step in bare])
    seqs = np.array([step.num_seqs for step in measured], float)
    # In these unknowns all must be at least 0: 1 / efficiency - 1, and the two overheads.
    columns = np.stack([roof, np.ones_like(roof), seqs], axis=1)
    kept, found = [0, 1, 2], np.zeros(3)
    while kept:
        values = np.linalg.lstsq(columns[:, kept], seconds - roof, rcond=None)[0]
        if (values >= 0).all():
            found[kept] = values
            break
        del kept[int(values.argmin())]
    return 1 / (1 + float(found[0])), float(found[1]), float(found[2])


# -- the report -----------------------------------------------------------------------------


def report(speeds, calibration, roofs):
    print(f"\n{'one core':34} {'measured':>9} {'range':>19} {'goal':>8} {'vLLM scheduler':>15}")
    for row in speeds:
        low, high = row["range"]
        vllm = "not measured" if row["vllm_per_s"] is None else f"{row['vllm_per_s']:,.0f}"
        print(
            f"{row['what']:34} {row['per_s']:9,.0f} {f'{low:,.0f}-{high:,.0f}':>19} "
            f"{row['goal']:8,} {vllm:>15}"
        )
    print(
        f"\nthis machine: {roofs.bf16_flops / 1e9:.0f} GFLOP/s, {roofs.bandwidth / 1e9:.1f} GB/s "
        f"({roofs.source})\nfitted: {calibration['efficiency']:.0%} of these roofs, "
        f"{calibration['overhead_ms']:.2f} ms a step and "
        f"{calibration['overhead_per_request_ms']:.2f} ms for each request in it\n\n"
        f"{'the engine against the simulator':34} {'seqs':>4} {'steps':>6} {'measured s':>11} "
        f"{'predicted s':>12} {'error':>7}"
    )
    for row in calibration["rows"]:
        print(
            f"{row['what']:34} {row['max_num_seqs']:4} {row['steps']:6} {row['measured_s']:11.2f} "
            f"{row['predicted_s']:12.2f} {row['error']:+7.1%}"
        )
    print("\nerror: of the total time; who ran in which step is equal, checked step by step")
