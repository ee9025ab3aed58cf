"""Every attention backend equals plain attention in double precision, whatever the batch.

Slots that no token was written to are poisoned in every batch: recycled blocks hold whatever their
last owner left. Backends that mask their loads get NaN; gather reads what it then weighs with 0,
and 0 x NaN is NaN, so it gets 1e4 (the engine keeps its pool finite).
"""

import functools
import os
import shutil
import subprocess
import sys

import pytest
import torch
from attention_batches import (
    BLOCK_SIZES,
    HEAD_DIMS,
    KINDS,
    LIMITS,
    PER_KV,
    SEEDS,
    SOFTCAPS,
    WINDOWS,
    Batch,
)

from minikv.engine import LLM
from minikv.model.attention import UnsupportedModel
from minikv.model.backends import BACKENDS, choose_backend, why_not, writer_of
from minikv.model.kernels import cpu, gather, online
from minikv.model.loader import load
from minikv.request import SamplingParams

# A backend under test is one line here.
POISON = {"gather": 1e4, "online": float("nan"), "cpu": float("nan")}
if sys.platform == "win32" or not any(map(shutil.which, ("c++", "g++", "clang++"))):
    del POISON["cpu"]  # with a compiler it must run
if os.environ.get("TRITON_INTERPRET") == "1":  # in a process of its own: see test_triton.py
    POISON = {"triton": float("nan")}


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("backend", POISON)
def test_a_backend_equals_float64_on_random_batches(backend, dtype):
    _, attend = choose_backend("cpu", dtype, backend)
    worst = 0.0
    # An interpreted kernel is slow: every kind of step, once or twice (`test --long`: all).
    for seed in range(0, SEEDS, 5 if backend == "triton" else 1):
        error = max(Batch(seed, dtype, POISON[backend]).errors(attend))
        assert error < LIMITS[dtype], f"seed {seed}: {error:.1e}"
        worst = max(worst, error)
    print(f"{backend} {dtype}: {worst:.1e}")


CASES = {  # what the random batches are too small for
    "one kv head for many": {"per_kv": 71, "num_kv_heads": 1, "head_dim": 64},
    "blocks longer than a tile": {"block_size": 300, "head_dim": 32},
    "a window beyond a tile": {"window": 100, "head_dim": 64},
    "a head of 8": {"head_dim": 8, "per_kv": 3},
    "scores that differ by hundreds": {"head_dim": 64, "scaling": 30.0, "softcap": None},
}
LENGTHS = ([1, 1, 130, 100, 3], [700, 65, 130, 520, 129])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", POISON)
def test_longer_and_odder_batches(backend, case):
    if backend == "triton":
        pytest.skip("minutes in the interpreter; see test_triton.py for its own")
    _, attend = choose_backend("cpu", torch.float32, backend)
    lengths = [*map(list, LENGTHS)]
    batch = Batch(3, torch.float32, POISON[backend], lengths, **CASES[case])
    # Large scores are rounded more coarsely before any softmax: at 500 to 3e-5.
    limit = 1e-3 if "scores" in case else LIMITS[torch.float32]
    assert max(batch.errors(attend)) < limit


@pytest.mark.parametrize("backend", POISON)
def test_scores_near_ten_thousand_are_weighed_exactly(backend):
    """Whole scores, exact in float32, of which differences of 1 decide: exp must neither overflow
    nor round them away."""
    _, attend = choose_backend("cpu", torch.float32, backend)
    batch = Batch(
        0, torch.float32, POISON[backend], ([1, 40], [200, 40]), head_dim=16, block_size=16,
        scaling=1.0, window=None, softcap=None,
    )  # fmt: skip
    batch.query[:] = 0.0
    batch.query[..., :2] = torch.tensor([100.0, 1.0])
    keys = batch.pool[0]
    keys[..., 0] = 99 + (keys[..., 0] > 0).float()
    keys[..., 1] = keys[..., 1].round().clamp(-3, 3)
    assert max(batch.errors(attend)) < LIMITS[torch.float32]


@pytest.mark.parametrize("backend", POISON)
def test_keys_out_of_sight_do_not_set_the_measure(backend):
    """Hidden keys with enormous scores: were one taken for the largest, all weights would be 0."""
    _, attend = choose_backend("cpu", torch.float32, backend)
    batch = Batch(
        0, torch.float32, POISON[backend], ([1, 30], [90, 75]), head_dim=64, block_size=16, window=9
    )
    for table, query_len, seq_len in zip(
        batch.tables, batch.query_lens, batch.seq_lens, strict=True
    ):
        for place in range(seq_len - query_len - 9 + 1):
            batch.pool[0, table[place // 16], :, place % 16] *= 1e4
    assert max(batch.errors(attend)) < LIMITS[torch.float32]


@pytest.mark.parametrize("backend", POISON)
@pytest.mark.parametrize("half", [0, 1], ids=["K", "V"])
@pytest.mark.parametrize("victim", [0, 1], ids=["decode", "chunk"])
def test_a_nan_is_passed_on_to_its_own_request_and_to_no_other(backend, half, victim):
    """The engine ends a request whose logits are not finite; a kernel that swallowed NaN would
    let it go on with wrong tokens."""
    _, attend = choose_backend("cpu", torch.float32, backend)
    for slot in (0, 1, 7, 15):  # one slot: a kernel may lose it when it looks for the largest
        batch = Batch(
            0, torch.float32, 0.0, ([1, 9, 1], [40, 30, 20]), head_dim=64, block_size=16,
            window=None,
        )  # fmt: skip
        block_id = batch.tables[victim][0]
        assert sum(block_id in table for table in batch.tables) == 1
        batch.pool[half, block_id, :, slot, 3] = float("nan")
        errors = batch.errors(attend)
        assert errors.pop(victim) == float("inf")  # what NaN counts as
        assert max(errors) < 1e-5


@pytest.mark.skipif("cpu" not in POISON, reason="no compiler")
@pytest.mark.parametrize("seed", [0, 1, 2, 4])
def test_the_number_of_threads_changes_no_bit(seed, monkeypatch):
    _, attend = choose_backend("cpu", torch.bfloat16, "cpu")
    batch = Batch(seed, torch.bfloat16, 0.0)
    outputs = []
    for num_threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=num_threads: n)
        outputs.append(attend(batch.query, batch.pool, batch.metadata(), scaling=0.1))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@pytest.mark.skipif("cpu" not in POISON, reason="no compiler")
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 5, 200])
def test_the_kernels_write_equals_gathers(dtype, num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    num_kv_heads, head_dim, num_rows = 3, 20, 2 * 201 * 3
    key = torch.randn(num_tokens, num_kv_heads, head_dim, generator=generator).to(dtype)
    value = torch.randn(num_kv_heads, num_tokens, head_dim, generator=generator).to(dtype)
    rows = torch.randperm(num_rows, generator=generator)[: 2 * num_tokens * num_kv_heads]
    pools = [torch.zeros(2, 201, num_kv_heads, 1, head_dim, dtype=dtype) for _ in range(2)]
    for pool, backend in zip(pools, ("gather", "cpu"), strict=True):
        writer_of(choose_backend("cpu", dtype, backend)[1])(key.transpose(0, 1), value, pool, rows)
    assert torch.equal(*pools) and pools[0].any()
    assert writer_of(cpu.attend) is cpu.write_kv
    assert writer_of(functools.partial(cpu.attend)) is writer_of(len) is gather.write_kv


def test_the_batches_cover_what_they_claim():
    batches = [Batch(seed, torch.float32, 0.0) for seed in range(SEEDS)]
    for name, values in [
        ("kind", KINDS), ("per_kv", PER_KV), ("head_dim", HEAD_DIMS),
        ("block_size", BLOCK_SIZES), ("window", WINDOWS), ("softcap", SOFTCAPS),
    ]:  # fmt: skip
        assert {getattr(batch, name) for batch in batches} == set(values)
    assert any(len({b for t in x.tables for b in t}) < sum(map(len, x.tables)) for x in batches)
    assert any(any(batch.padding) for batch in batches)
    kinds = {(batch.kind, batch.window is None, batch.softcap is None) for batch in batches}
    assert len(kinds) == 4 * len(KINDS)


# -- in the engine --------------------------------------------------------------------------------


PROMPTS = ([5, 6, 7], [9] * 20, [*range(40, 73)], [1])


def greedy_tokens(loaded, prompts, backend, **options):
    llm = LLM(loaded, attention_backend=backend, max_num_batched_tokens=24, **options)
    assert llm.attention_backend == backend
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_swapping_backends_changes_no_fp32_greedy_token(batching):
    loaded = load("tiny", dtype="float32", device="cpu")
    options = {"batching": batching, "block_size": 4, "num_gpu_blocks_override": 200}
    options |= {"max_model_len": 64}
    if batching == "static":
        options["max_num_seqs"] = 4
    expected = greedy_tokens(loaded, PROMPTS, "gather", **options)
    for backend in POISON:
        assert greedy_tokens(loaded, PROMPTS, backend, **options) == expected, backend


@pytest.mark.model
def test_swapping_backends_changes_no_fp32_greedy_token_of_smollm2():
    loaded = load("smollm2", dtype="float32", device="cpu")
    prompts = ["Why is the sky blue?", "def fibonacci(n):\n    ", "The first ten primes are"]
    expected = greedy_tokens(loaded, prompts, "gather")
    for backend in POISON:
        assert greedy_tokens(loaded, prompts, backend) == expected, backend


# -- a function of your own -----------------------------------------------------------------------


def test_a_function_of_your_own_is_a_backend():
    loaded, shapes = load("tiny", dtype="float32", device="cpu"), []

    def mine(query, pool, metadata, *, scaling, window=None, softcap=None):
        shapes.append((len(query), int(metadata.query_start_loc[-1])))
        return online.attend(query, pool, metadata, scaling=scaling, window=window, softcap=softcap)

    options = {"block_size": 4, "num_gpu_blocks_override": 200}
    expected = greedy_tokens(loaded, PROMPTS, "gather", **options)
    llm = LLM(loaded, attention_backend=mine, max_num_batched_tokens=24, **options)
    assert llm.attention_backend == "mine"
    shapes.clear()
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert shapes and all(rows == new_tokens for rows, new_tokens in shapes)


def test_a_wrong_function_of_your_own_is_refused_before_any_request():
    def mine(query, pool, metadata, *, scaling, window=None, softcap=None):
        return online.attend(query, pool, metadata, scaling=1.3 * scaling)

    with pytest.raises(UnsupportedModel, match=r"your attention function .* off its own"):
        LLM(load("tiny", dtype="float32", device="cpu"), attention_backend=mine)


@pytest.mark.parametrize("returns, said", [
    (lambda query: None, "returned NoneType, but must return"),
    (lambda query: query[:1], r"returned \(1, 6, 16\) in torch.float32, but must return \(3"),
    (lambda query: query.double(), r"returned \(3, 6, 16\) in torch.float64, but must return"),
], ids=["nothing", "one row", "float64"])  # fmt: skip
def test_what_a_function_of_your_own_returns_is_looked_at(returns, said):
    def mine(query, pool, metadata, *, scaling, window=None, softcap=None):
        return returns(query)

    _, attend = choose_backend("cpu", torch.float32, mine)
    query = torch.zeros(3, 6, 16)
    with pytest.raises(ValueError, match=f"your attention function mine {said}"):
        attend(query, None, None, scaling=1.0)
    with pytest.raises(UnsupportedModel, match="your attention function"):
        LLM(load("tiny", dtype="float32", device="cpu"), attention_backend=mine)


def test_a_function_that_takes_other_arguments_is_named():
    def mine(query, pool):
        return query

    with pytest.raises(
        UnsupportedModel, match=r"in your attention function mine: .*argument 'scaling'"
    ):
        LLM(load("tiny", dtype="float32", device="cpu"), attention_backend=mine)


# -- the choice -----------------------------------------------------------------------------------


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="attention_backend is 'flash'; known: cpu, gather, onl"):
        choose_backend("cpu", torch.float32, "flash")
    with pytest.raises(ValueError, match="'flash'"):
        LLM("tiny", attention_backend="flash")


def test_what_is_no_name_is_refused():
    with pytest.raises(ValueError, match=r"attention_backend is \[\]; known"):
        choose_backend("cpu", torch.float32, [])


def test_what_cannot_run_says_why(monkeypatch):
    monkeypatch.setitem(BACKENDS, "triton", "not_a_package.at_all")
    assert why_not("triton", "cpu", torch.float32) == "not_a_package is not installed"
    with pytest.raises(ValueError, match="'triton' cannot run here: not_a_package is not inst"):
        choose_backend("cpu", torch.float32, "triton")


@pytest.mark.parametrize("backend", [None, "gather", "online"])
def test_the_llm_tells_which_backend_runs(backend):
    llm = LLM("tiny", attention_backend=backend)
    assert llm.attention_backend == (backend or choose_backend("cpu", torch.float32)[0])
    assert llm.runner.last_step is None
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
    module = BACKENDS[llm.attention_backend]
    assert llm.runner.last_step.attend.__module__ == module


@pytest.mark.parametrize("backend", POISON)
def test_layers_with_different_windows_share_one_step(backend):
    """What a backend makes once for all layers is made for each window: the metadata is one."""
    _, attend = choose_backend("cpu", torch.float32, backend)
    for kind in range(len(KINDS)):
        batch = Batch(kind, torch.float32, POISON[backend])
        metadata = batch.metadata()
        batch.metadata = lambda metadata=metadata: metadata
        for batch.window in (5, None, 1, 40, 5):
            assert max(batch.errors(attend)) < LIMITS[torch.float32], (batch.kind, batch.window)


@pytest.mark.skipif("cpu" not in POISON, reason="no compiler")
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="not Linux")
def test_the_kernel_lets_torchs_threads_live():
    """With fewer pieces of work than threads: gcc's runtime ends those that are left out, and the
    next product starts them anew, 13 of 16 in each layer of each step."""
    script = """if True:
        import os, torch
        torch.set_num_threads(8)
        from minikv.model.backends import AttentionMetadata
        from minikv.model.kernels import cpu
        ints = lambda numbers: torch.tensor(numbers, dtype=torch.int32)
        step = AttentionMetadata(ints([[0]]), ints([0, 1]), ints([5]), None, 1, 5)
        query, pool = torch.randn(1, 9, 64), torch.randn(2, 4, 3, 16, 64)
        x, weight, seen = torch.randn(64, 576), torch.randn(1536, 576), set()
        for _ in range(20):
            torch.nn.functional.linear(x, weight)
            cpu.attend(query, pool, step, scaling=0.1)
            seen |= set(os.listdir("/proc/self/task"))
        print(len(seen))
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40  # it was 111
