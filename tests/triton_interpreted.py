"""The Triton kernels in Triton's interpreter, on the CPU. test_triton.py runs this in a process of
its own, with TRITON_INTERPRET=1: the variable counts when Triton is first imported."""

import pytest
import torch
from attention_batches import LIMITS, SEEDS, Batch
from reference import Comparison, greedy

from minikv.engine import LLM
from minikv.model.kernels import triton_launch
from minikv.model.loader import load
from minikv.request import SamplingParams

NAN = float("nan")


@pytest.fixture
def small_tiles(monkeypatch):
    """Sixteen rows and sixteen slots: several of each even in a short request."""
    monkeypatch.setattr(triton_launch, "launch_shape", lambda *shapes: (16, 16, 3))


@pytest.mark.parametrize(("num_splits", "most_queries"), [(1, 10), (2, 150), (5, 10)])
def test_splits_change_nothing(small_tiles, num_splits, most_queries):
    for seed in range(0, SEEDS, 7):  # every kind of step
        batch = Batch(seed, torch.float32, NAN)
        if sum(batch.query_lens) <= most_queries:
            error = max(batch.errors(triton_launch.attend, num_splits=num_splits))
            assert error < LIMITS[torch.float32], f"seed {seed}: {error:.1e}"


def test_a_window_as_wide_as_a_tile(small_tiles):
    """Three queries of a tile see 18 slots between them: two turns of the loop."""
    batch = Batch(4, torch.float32, NAN, lengths=([9], [60]))
    batch.window = 16
    assert batch.per_kv == 5
    assert max(batch.errors(triton_launch.attend)) < LIMITS[torch.float32]


def test_splits_in_bfloat16(small_tiles):
    batch = Batch(12, torch.bfloat16, NAN)
    assert batch.kind == "decodes" and max(batch.seq_lens) > 64
    assert max(batch.errors(triton_launch.attend, num_splits=3)) < LIMITS[torch.bfloat16]


@pytest.mark.long
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_every_batch(dtype):
    for seed in range(SEEDS):
        error = max(Batch(seed, dtype, NAN).errors(triton_launch.attend))
        assert error < LIMITS[dtype], f"seed {seed}: {error:.1e}"


def test_float16():
    for seed in (0, 6, 17):
        assert max(Batch(seed, torch.float16, NAN).errors(triton_launch.attend)) < 2e-3


def test_as_many_query_heads_as_a_tile_has_no_rows_for(monkeypatch):
    """Falcon's 71 query heads on one kv head: tiles grow with them."""
    assert triton_launch.launch_shape(1, 71, 64, 4)[0] == 128
    batch = Batch(0, torch.float32, NAN)
    batch.per_kv, shape = 71, batch.query.shape
    batch.query = torch.randn(shape[0], 71 * batch.num_kv_heads, shape[2])
    assert max(batch.errors(triton_launch.attend)) < LIMITS[torch.float32]


def test_a_tile_writes_its_own_rows_only(monkeypatch):
    """Five heads, three positions, a row to spare: on a GPU nobody says which tile writes last."""
    kernel, outputs = triton_launch.attention_kernel, []

    class FirstTile:
        def __getitem__(self, grid):
            assert grid[0] == 4

            def launch(out, *arguments, **options):
                outputs.append(out.fill_(7.0))
                kernel[(1, *grid[1:])](out, *arguments, **options)

            return launch

    monkeypatch.setattr(triton_launch, "attention_kernel", FirstTile())
    batch = Batch(4, torch.float32, NAN, lengths=([10, 1], [12, 5]))
    assert batch.per_kv == 5
    triton_launch.attend(batch.query, batch.pool, batch.metadata(), scaling=1.0)
    written = (outputs[0] != 7.0).flatten(1).any(1)
    assert written.nonzero().flatten().tolist() == [0, 1, 2, 10]


def test_the_split_that_is_chosen_reads_every_slot(monkeypatch):
    """One long request on a GPU of four multiprocessors, where the choice is to split."""
    monkeypatch.setattr(triton_launch, "num_multiprocessors", lambda device: 4)
    launched = []
    kernel = triton_launch.attention_kernel

    class Spy:
        def __getitem__(self, grid):
            launched.append(grid)
            return kernel[grid]

    monkeypatch.setattr(triton_launch, "attention_kernel", Spy())
    batch = Batch(4, torch.float32, NAN, lengths=([1], [1400]))
    assert batch.window is None
    assert max(batch.errors(triton_launch.attend)) < LIMITS[torch.float32]
    assert launched == [(1, batch.num_kv_heads, 5)]  # 256 slots each at least


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_tiny_equals_the_dense_cache(batching):
    loaded = load("tiny", dtype="float32", device="cpu")
    answers = [greedy(loaded.model, prompt, 3) for prompt in ([5, 6, 7], [*range(40, 51)])]
    sizes = {"block_size": 4, "num_gpu_blocks_override": 40, "max_model_len": 32}
    sizes |= {"max_num_batched_tokens": 24, "max_num_seqs": 2}
    llm = LLM(loaded, attention_backend="triton", batching=batching, **sizes)
    assert llm.attention_backend == "triton"
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    outputs = llm.generate([a.prompt for a in answers], params, use_tqdm=False)
    comparison = Comparison()
    for answer, output in zip(answers, outputs, strict=True):
        comparison.check(output.outputs[0].token_ids, answer)
    comparison.close()
