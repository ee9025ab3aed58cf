"""How many blocks the pool may have: what a device's memory holds beside all else. And how a CPU's
pool is made, so that it takes memory only as blocks are written."""

import math
import mmap

import psutil
import torch

from minikv.kv_cache.base import OutOfKVMemory

CPU_POOL_BYTES = 1 << 30


def gpu_pool_blocks(free_bytes, total_bytes, utilization, block_bytes) -> int:
    """Blocks for which `utilization` of a GPU's memory has room, beside what is in use; 0 where it
    has none.

    In use is total - free: the weights, which are loaded by now, the driver's own share, and what
    other processes hold. One more block fits than is returned: the runner's padding.

    Left out: what a step needs besides (activations, logits, attention's buffers, the kernels'
    workspaces). It has to fit in the rest, 1 - utilization of the memory. vLLM runs the largest
    step once before it counts, so that this is in use, too.
    """
    num_bytes = int(total_bytes * utilization) - (total_bytes - free_bytes)
    return max(0, num_bytes // block_bytes - 1)


def default_num_blocks(device, spec, block_size, utilization) -> int:
    """Blocks of block_size tokens for a pool on this device, once the weights are loaded: 1 GiB on
    a CPU, which is not ours alone; on a GPU see gpu_pool_blocks.

    Raises OutOfKVMemory, with the numbers, where not even one fits.
    """
    block_bytes = block_size * spec.kv_bytes_per_token
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has let go counts as free
        free, total = torch.cuda.mem_get_info(device)
        num_blocks = gpu_pool_blocks(free, total, utilization, block_bytes)
        room = (
            f"{utilization:.0%} of {device}'s {total:,} bytes less the {total - free:,} in use "
            f"leave no room for the KV cache:"
        )
    else:
        num_blocks = CPU_POOL_BYTES // block_bytes
        room = f"{CPU_POOL_BYTES:,} bytes are left for the KV cache, but"
    if num_blocks < 1:
        raise OutOfKVMemory(f"{room} one block of {block_size} tokens takes {block_bytes:,}")
    return num_blocks


def require_memory(device, spec, num_blocks, block_size) -> None:
    """Asked before a pool is made: the operating system promises memory that is not there.
    Raises OutOfKVMemory for more than the device has in all."""
    if device.type == "cuda":
        num_bytes = torch.cuda.mem_get_info(device)[1]
    else:
        num_bytes = psutil.virtual_memory().total
    wanted = (num_blocks + 1) * block_size * spec.kv_bytes_per_token
    if wanted > num_bytes:
        raise OutOfKVMemory(
            f"a pool of {num_blocks:,} blocks of {block_size:,} tokens takes {wanted:,} bytes, "
            f"but {device} has {num_bytes:,}"
        )


def zeros(shape, *, device, dtype) -> torch.Tensor:
    """What torch.zeros gives; on a CPU it is promised by the operating system, and a page becomes
    memory when it is first written. (torch.zeros writes all of it at once.) It begins at a page.

    Raises OutOfKVMemory where so much is not even promised.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    private = (
        {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    )
    try:
        pages = mmap.mmap(-1, num_bytes, **private)
    except (OSError, ValueError, OverflowError) as error:
        raise OutOfKVMemory(
            f"no {num_bytes:,} bytes for one layer's keys and values: {error}"
        ) from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)  # which keeps the pages alive
