"""The "triton" backend where no GPU is: its kernels interpreted, compiled, and how they are cut.

Triton belongs to requirements-test.txt. Where it cannot be had these tests are skipped, and say so;
in CI on Linux that would be a failure.
"""

import contextlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_batches import Batch

from minikv.commands import bench
from minikv.model.backends import choose_backend, why_not

ROOT = Path(__file__).resolve().parents[1]
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")


def must_not_skip(environ, system, machine):
    """Whether this is a CI run on a machine that requirements-test.txt has a Triton for."""
    is_ci = environ.get("CI", "").lower() not in ("", "0", "false")
    return is_ci and system == "Linux" and machine in ("x86_64", "aarch64")


def test_ci_does_not_skip_the_kernel():
    if must_not_skip(os.environ, platform.system(), platform.machine()):
        assert HAS_TRITON, "CI without Triton: the kernel's tests would all be skipped"
    assert must_not_skip({"CI": "true"}, "Linux", "x86_64")
    assert not must_not_skip({"CI": "true"}, "Darwin", "arm64")
    assert not must_not_skip({}, "Linux", "x86_64")


def interpreted(*command):
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@needs_triton
@pytest.mark.parametrize(
    ("tests", "num_tests"),
    [
        (["tests/test_backends.py", "-k", "float64 and triton"], 2),
        (["tests/triton_interpreted.py", "-m", "not long"], 11),
        pytest.param(["tests/triton_interpreted.py", "-m", "long"], 2, marks=pytest.mark.long),
    ],
    ids=["float64", "splits and tiny", "all batches"],
)
def test_the_interpreted_kernel(tests, num_tests):
    done = interpreted("-m", "pytest", "-p", "no:cacheprovider", "-rA", *tests)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == num_tests, done.stdout  # nothing was skipped


# -- compiled for GPUs that are not here ----------------------------------------------------------


def compiled(architecture, dtype, head_dim, max_query_len, *, block_size=16, splits=False, **given):
    """The attention kernel as `triton_launch.attend` would launch it for 4 query heads per kv
    head. given: window, softcap, first_visible, where a model has them."""
    import triton

    from minikv.model.kernels.triton_launch import launch_shape
    from minikv.model.kernels.triton_paged import attention_kernel as kernel

    itemsize = 4 if dtype == "fp32" else 2
    rows, tile, num_stages = launch_shape(max_query_len, 4, head_dim, itemsize)
    constants = {
        "PER_KV": 4, "HEAD_DIM": head_dim, "PADDED_DIM": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size, "WINDOW": given.get("window"), "ROWS": rows, "TILE": tile,
        "UPCAST": False,
    }  # fmt: skip
    types = {"out": "*fp32" if splits else f"*{dtype}", "score_scale": "fp32"}
    types |= dict.fromkeys(("query", "keys", "values"), f"*{dtype}")
    types |= dict.fromkeys(("block_tables", "query_start_loc", "seq_lens"), "*i32")
    optional = {"logsumexp": ("*fp32", splits), "softcap": ("fp32", "softcap" in given)}
    optional["first_visible"] = ("*i32", "first_visible" in given)
    for name, (kind, is_there) in optional.items():
        if is_there:
            types[name] = kind
        else:
            constants[name] = None
    return compile_for(architecture, kernel, types, constants, num_stages)


def compile_for(architecture, kernel, types, constants, num_stages=3):
    """types: of arguments that are not i32. constants: values of those that are compiled in."""
    import triton
    from triton.backends.compiler import GPUTarget

    signature = {
        n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names
    }
    aligned = {"stride_query_token", "stride_query_head", "stride_block"}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in aligned
    }
    where = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = triton.compiler.ASTSource(kernel, signature, where, attributes)
    options = {"num_warps": 4, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


SHARED_BYTES = {
    80: 163 << 10,
    86: 99 << 10,
    90: 227 << 10,
    120: 99 << 10,
}  # of one program, at most


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # else an old result would be taken


@needs_triton
@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_a_decode_keeps_two_tiles_in_flight(own_cache, architecture):
    """What the compiler made of the loop for an A100, an RTX 30, an H100 and an RTX 50: K and V
    are copied 16 bytes at a time, into two buffers each, and multiplied by tensor cores."""
    kernel = compiled(architecture, "bf16", 128, 1)
    assert kernel.metadata.shared <= SHARED_BYTES[architecture]
    loop = kernel.asm["ttgir"]
    assert loop.count("ttg.local_alloc : () -> !ttg.memdesc<2x64x128xbf16") == 2  # K and V
    wide = [line for line in kernel.asm["ptx"].splitlines() if "cp.async.cg" in line]
    assert wide and all("0x10" in line for line in wide)
    assert "mma.sync" in kernel.asm["ptx"]


@needs_triton
@pytest.mark.parametrize(
    "shape",
    [
        ("bf16", 64, 512, {"window": 1024}),
        ("fp16", 80, 1, {"block_size": 1}),
        ("bf16", 128, 512, {"softcap": 50.0, "first_visible": True, "window": 7}),
        ("bf16", 128, 1, {"splits": True}),
        ("bf16", 256, 512, {}),
        ("fp32", 128, 512, {}),
    ],
    ids=lambda shape: f"{shape[0]}-{shape[1]}-{shape[2]}",
)
def test_every_shape_fits_into_the_smallest_shared_memory(own_cache, shape):
    dtype, head_dim, max_query_len, options = shape
    kernel = compiled(86, dtype, head_dim, max_query_len, **options)
    assert kernel.metadata.shared <= SHARED_BYTES[86]
    products = "fma.rn.f32" if dtype == "fp32" else "mma.sync"  # float32 without TF32
    assert products in kernel.asm["ptx"] and "tf32" not in kernel.asm["ptx"]


@needs_triton
@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_the_merge_compiles(own_cache, architecture):
    from minikv.model.kernels.triton_paged import merge_kernel

    types = {"out": "*bf16", "partial": "*fp32", "logsumexp": "*fp32"}
    for splits, head_dim, padded in ((1, 16, 16), (2, 80, 128), (64, 128, 128)):
        constants = {"PADDED_SPLITS": splits, "HEAD_DIM": head_dim, "PADDED_DIM": padded}
        kernel = compile_for(architecture, merge_kernel, types, constants)
        assert "st.global" in kernel.asm["ptx"]


class H100:
    """What Triton asks of a driver in order to compile: the GPU that it compiles for."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 99  # kernels are kept by device: no real one may find these

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def warmed_up(own_cache, monkeypatch):
    """`attend` compiles what it would launch. Gives the list of (grid, compiled kernel)."""
    import triton

    from minikv.model.kernels import triton_launch

    seen = []

    class WarmUp:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            def compile_only(*arguments, **options):
                seen.append((grid, self.kernel.warmup(*arguments, grid=grid, **options)))

            return compile_only

    for name in ("attention_kernel", "merge_kernel"):
        monkeypatch.setattr(triton_launch, name, WarmUp(getattr(triton_launch, name)))
    monkeypatch.setattr(triton.runtime.driver, "_active", H100())
    return seen


@needs_triton
def test_a_serving_engine_compiles_no_kernel_twice(warmed_up):
    """Batches, contexts and splits change at every step; a decode's kernel must not."""
    from minikv.model.kernels.triton_launch import attend

    for context, num_seqs in ((1, 1), (100, 2), (300, 16), (512, 33)):
        for num_splits in (2, 3, 16):
            lengths = ([1] * num_seqs, [context] * num_seqs)
            batch = Batch(4, torch.bfloat16, 0.0, lengths)
            attend(batch.query, batch.pool, batch.metadata(), scaling=0.1, num_splits=num_splits)
    decodes = {id(kernel) for grid, kernel in warmed_up if len(grid) == 3}
    merges = {id(kernel) for grid, kernel in warmed_up if len(grid) == 1}
    assert len(warmed_up) == 24
    assert (len(decodes), len(merges)) == (1, 3)  # merges: of 2, 4 and 16 rows


# -- how the work is cut --------------------------------------------------------------------------


@needs_triton
def test_the_tiles():
    from minikv.model.kernels.triton_launch import launch_shape

    assert launch_shape(1, 4, 128, 2) == (16, 64, 5)  # a decode: 4 rows of 16 are used
    assert launch_shape(512, 4, 128, 2) == (64, 64, 3)  # 16 positions of a chunk
    assert launch_shape(5, 4, 64, 2) == (32, 128, 3)
    assert launch_shape(512, 4, 128, 4) == (16, 32, 5)  # float32
    for max_query_len in (1, 3, 100, 10_000):
        for per_kv in range(1, 130):
            for head_dim in (1, 16, 80, 128, 256, 512):
                for itemsize in (2, 4):
                    rows, slots, _ = launch_shape(max_query_len, per_kv, head_dim, itemsize)
                    assert rows >= max(16, per_kv) and rows & (rows - 1) == 0
                    assert 16 <= slots <= 128 and slots & (slots - 1) == 0


@needs_triton
@pytest.mark.parametrize(
    ("programs", "slots", "row_bytes", "splits"),
    [
        (512, 4096, 1 << 20, 2),  # 64 requests of 4K with 8 kv heads on 132 multiprocessors
        (528, 4096, 1 << 20, 1),  # enough programs without
        (512, 32768, 1 << 20, 8),  # no program reads more than 4096 slots
        (8, 32768, 1 << 14, 64),  # one request: as many as may be
        (8, 2048, 1 << 14, 8),  # but no share below 256 slots
        (8, 300, 1 << 14, 1),
        (8, 511, 1 << 14, 1),
        (8, 512, 1 << 14, 2),
        (8, 1, 1 << 14, 1),
        (2, 131072, 64 << 20, 2),  # partial results stay below 128 MiB
        (2, 131072, 256 << 20, 1),
    ],
)
def test_the_number_of_splits(programs, slots, row_bytes, splits):
    from minikv.model.kernels.triton_launch import choose_num_splits

    assert choose_num_splits(programs, slots, row_bytes, num_sms=132) == splits


# -- who gets it ----------------------------------------------------------------------------------


@needs_triton
def test_on_a_cpu_it_must_be_interpreted():
    reason = why_not("triton", "cpu", torch.float32)
    assert "needs a CUDA GPU" in reason and "TRITON_INTERPRET=1" in reason
    with pytest.raises(ValueError, match="'triton' cannot run here: it needs a CUDA GPU"):
        choose_backend("cpu", torch.float32, "triton")
    assert "no kernel for torch.float64" in why_not("triton", "cpu", torch.float64)
    assert choose_backend("cpu", torch.float32)[0] != "triton"


@needs_triton
@pytest.mark.parametrize("trouble", [None, "old", "compiler"])
def test_a_gpu_that_cannot_run_it_gets_gather(monkeypatch, trouble):
    from minikv.model.kernels import triton_launch

    def ones(*shape, device):
        return torch.full(shape, 1.0)

    class Kernel:
        def __getitem__(self, grid):
            return self

        def __call__(self, *arguments):
            if trouble == "compiler":
                raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    capability = (7, 5) if trouble == "old" else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(triton_launch.torch, "ones", ones)
    monkeypatch.setattr(triton_launch, "merge_kernel", Kernel())
    triton_launch._why_not_on_gpu.cache_clear()
    reason = why_not("triton", "cuda", torch.bfloat16)
    assert choose_backend("cuda", torch.bfloat16)[0] == ("gather" if trouble else "triton")
    assert (reason or "") == {
        None: "",
        "old": "it needs compute capability 8.0, and this GPU has 7.5",
        "compiler": "a trial kernel failed (RuntimeError: Failed to find C compiler. Please "
        "specify via CC)",
    }[trouble]
    triton_launch._why_not_on_gpu.cache_clear()


# -- bench kernel -------------------------------------------------------------------------------


def test_without_a_gpu_the_bench_says_that_it_was_not_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["kernel", "--json", str(tmp_path / "k.json")]) == 0
    assert capsys.readouterr().out == "not run: torch sees no CUDA GPU\n"
    result = json.loads((tmp_path / "k.json").read_text())
    assert (result["status"], result["reason"]) == ("not run", "torch sees no CUDA GPU")
    assert result["rows"] == []


@needs_triton
def test_the_bench_in_small(tmp_path):
    """The whole program but for the GPU: three layouts of the same K and V, equal answers."""
    file = tmp_path / "k.json"
    done = interpreted("-m", "minikv", "bench", "kernel", "--dry-run", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["status"] == "run" and result["copy_bytes_per_s"] > 0
    assert [row["engine"] for row in result["rows"]] == [
        "minikv", "sdpa, contiguous", "flex, page table",
    ]  # fmt: skip
    for row in result["rows"]:
        assert row["error"] is None and row["bytes_per_s"] > 0
        assert row["kv_bytes"] == 2 * 3 * 256 * 2 * 16 * 2


def test_an_engine_that_fails_or_answers_wrongly_is_a_row_of_the_bench(monkeypatch, capsys):
    from minikv.bench import kernel

    def broken(*tensors):
        raise RuntimeError("a guard\nfailed")

    def wrong(query, *others):
        return lambda: torch.zeros_like(query)

    monkeypatch.setattr(kernel, "ENGINES", {"minikv": wrong, "sdpa, contiguous": kernel.sdpa,
                                            "flex, page table": broken})  # fmt: skip
    monkeypatch.setattr(kernel, "why_not", lambda *where: None)
    result = kernel.measure(dry_run=True)
    ours, sdpa, flex = result["rows"]
    assert ours["error"] == "ArithmeticError: its output is wrong by 1.0e+00 of its norm"
    assert sdpa["error"] is None
    assert flex["error"] == "RuntimeError: a guard failed"
    kernel.report(result)
    assert "failed: this engine's own kernel" in capsys.readouterr().out
    monkeypatch.setattr(kernel, "measure", lambda dry_run: result)
    assert bench.main(["kernel", "--dry-run"]) == 1
