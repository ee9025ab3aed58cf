"""How many blocks a device's memory has room for; no GPU is needed to know."""

import types

import psutil
import pytest
import torch

from minikv.engine import LLM
from minikv.kv_cache.base import OutOfKVMemory
from minikv.model import memory
from minikv.model.loader import load
from minikv.model.memory import gpu_pool_blocks

GIB = 1 << 30


@pytest.mark.parametrize("free, total, utilization, block_bytes, num_blocks", [
    (1000, 1000, 1.0, 10, 99),  # nothing in use: 100 fit, one of them the runner's padding
    (1000, 1000, 0.9, 10, 89),
    (999, 1000, 0.9, 10, 88),  # one byte in use: 89 fit
    (600, 1000, 0.9, 10, 49),  # the weights take 400 of 900
    (600, 1000, 0.5, 10, 9),
    (600, 1000, 0.42, 10, 1),  # room for two blocks exactly
    (601, 1000, 0.42, 10, 1),
    (599, 1000, 0.42, 10, 0),  # for the padding alone
    (600, 1000, 0.4, 10, 0),
    (600, 1000, 0.1, 10, 0),  # more in use than it may take: no negative number
    (0, 1000, 1.0, 10, 0),
    (80 * GIB - 16 * GIB, 80 * GIB, 0.9, 2 * GIB, 27),
])  # fmt: skip
def test_a_gpus_pool_is_its_share_less_what_is_in_use(
    free, total, utilization, block_bytes, num_blocks
):
    assert gpu_pool_blocks(free, total, utilization, block_bytes) == num_blocks


@pytest.fixture
def gpu(monkeypatch):
    """Makes the engine see a GPU with 1,000,000 bytes, of which gpu.free are free."""
    gpu = types.SimpleNamespace(free=600_000, emptied=0)

    def empty_cache():
        gpu.emptied += 1

    def mem_get_info(device):
        assert gpu.emptied, "asked before the allocator gave back what it keeps"
        return gpu.free, 1_000_000

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    return gpu


def spec_of(kv_bytes_per_token):
    return types.SimpleNamespace(kv_bytes_per_token=kv_bytes_per_token)


def test_a_gpu_is_asked_and_a_cpu_is_not(gpu):
    cuda, cpu = torch.device("cuda:0"), torch.device("cpu")
    assert memory.default_num_blocks(cuda, spec_of(100), 16, 0.9) == 500_000 // 1_600 - 1
    assert memory.default_num_blocks(cuda, spec_of(100), 16, 0.5) == 100_000 // 1_600 - 1
    gpu.free = 0
    assert memory.default_num_blocks(cpu, spec_of(64), 16, 0.9) == 1 << 20


def test_no_room_is_said_with_its_numbers(gpu):
    cuda = torch.device("cuda:1")
    gpu.free = 101_599
    with pytest.raises(
        OutOfKVMemory,
        match=r"90% of cuda:1's 1,000,000 bytes less the 898,401 in use leave no room .* "
        r"one block of 16 tokens takes 1,600",
    ):
        memory.default_num_blocks(cuda, spec_of(100), 16, 0.9)
    with pytest.raises(OutOfKVMemory, match=r"1,073,741,824 bytes .* takes 1,073,741,825"):
        memory.default_num_blocks(torch.device("cpu"), spec_of(GIB + 1), 1, 0.9)


def test_a_pool_larger_than_the_device_is_refused(gpu):
    gpu.emptied = 1
    memory.require_memory(torch.device("cuda"), spec_of(100), 99, 100)  # and one of padding
    with pytest.raises(OutOfKVMemory, match=r"a pool of 100 blocks .* 1,010,000 bytes, but cuda"):
        memory.require_memory(torch.device("cuda"), spec_of(100), 100, 100)


def test_the_share_reaches_the_pool(monkeypatch):
    seen = []

    def default_num_blocks(device, spec, block_size, utilization):
        seen.append((device.type, block_size, utilization))
        return 5

    monkeypatch.setattr("minikv.engine.assemble.default_num_blocks", default_num_blocks)
    tiny = load("tiny", dtype="float32", device="cpu")
    assert LLM(tiny, gpu_memory_utilization=0.37, block_size=8).manager.num_blocks == 5
    assert LLM(tiny, max_num_seqs=1, max_model_len=40).manager.num_blocks == 3
    assert seen == [("cpu", 8, 0.37), ("cpu", 16, 0.9)]


# -- a CPU's pool takes memory as it is used ---------------------------------------------------


def resident():
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_zeros_are_zeros_that_can_be_written(dtype):
    dtype = getattr(torch, dtype)
    made = memory.zeros((2, 3, 5, 7, 64), device="cpu", dtype=dtype)
    assert made.shape == (2, 3, 5, 7, 64) and made.dtype == dtype and made.is_contiguous()
    assert made.data_ptr() % 64 == 0  # a line of the CPU's cache
    assert not made.any()
    made[1, 2] = 3
    made[:, [0, 2]] = made[:, [2, 1]]
    assert made.unique().tolist() == [0, 3] and made[1, 0].eq(3).all()
    part = made[1, 0, 0]
    del made  # the pages live as long as anything that looks at them
    assert part.eq(3).all()


def test_a_pool_takes_memory_as_it_is_written():
    loaded = load("tiny", dtype="float32")
    num_blocks = 2 * GIB // (16 * loaded.spec.kv_bytes_per_token)
    before = resident()
    llm = LLM(loaded, num_gpu_blocks_override=num_blocks)
    llm.generate([[1, 2, 3], [4] * 40], use_tqdm=False)
    assert resident() - before < GIB // 4
    assert sum(pool.nbytes for pool in llm.runner.pools) > 1.9 * GIB
    # The bound above can be broken: what is written is resident.
    before, pool = resident(), llm.runner.pools[0]
    pool[0, : num_blocks // 4] = 1
    assert resident() - before > pool.nbytes // 10
    assert not pool[0, num_blocks // 4 :].any() and not llm.runner.pools[-1][1, -1].any()


def test_what_is_not_even_promised_is_refused(monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(memory.mmap, "mmap", refuse)
    with pytest.raises(OutOfKVMemory, match=r"no 4,096 bytes .*Cannot allocate memory"):
        memory.zeros((2, 512), device="cpu", dtype=torch.float32)
