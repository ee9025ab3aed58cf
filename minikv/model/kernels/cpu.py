"""Attention on a CPU that reads K and V in place: the C++ of `cpu.cpp`, called through ctypes.

`MINIKV_CPU_KERNELS=0` turns it off. Where there is no compiler, or what it makes does not work, the
engine goes on with gather attention, and this says why, once.
"""

import functools
import sys

import torch  # before the library is loaded: then one OpenMP runtime, torch's, serves both

from minikv.model.kernels import native

IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}


def attend(query, pool, metadata, *, scaling, window=None, softcap=None):
    """See `minikv.model.backends`. float32 or bfloat16; sums are float32."""
    num_tokens, num_query_heads, head_dim = query.shape
    _, pool_blocks, num_kv_heads, block_size, _ = pool.shape
    step = metadata.cache.get("cpu")
    if step is None:
        step = metadata.cache["cpu"] = _step(metadata)
    if query.stride(2) != 1:
        query = query.contiguous()
    shape = native.Shape(
        num_kv_heads,
        num_query_heads // num_kv_heads,
        head_dim,
        block_size,
        pool_blocks,
        query.stride(0),
        query.stride(1),
        min(window or 0, 2**31 - 1),  # the kernel's positions are 32 bits wide
        scaling,
        softcap or 0.0,
    )
    out = query.new_empty((num_tokens, num_query_heads, head_dim))
    library().minikv_attend(
        shape,
        step,
        query.data_ptr(),
        pool.data_ptr(),
        out.data_ptr(),
        IS_BF16[pool.dtype],
        torch.get_num_threads(),
    )
    return out


def write_kv(key, value, pool, write_rows):
    """See `minikv.model.backends`. Five torch operations in one call: they took longer than the
    copy, in every layer of every step."""
    if key.stride(2) != 1:
        key = key.contiguous()
    if value.stride(2) != 1:
        value = value.contiguous()
    num_kv_heads, num_tokens, head_dim = key.shape
    size = pool.element_size()
    library().minikv_write_kv(
        pool.data_ptr(),
        write_rows.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        num_tokens,
        num_kv_heads,
        head_dim * size,
        key.stride(1) * size,
        key.stride(0) * size,
        value.stride(1) * size,
        value.stride(0) * size,
        torch.get_num_threads(),
    )


def _step(metadata):
    """Addresses into the metadata's tensors, which live as long as the cache that keeps this."""
    first_visible = metadata.first_visible
    return native.Step(
        metadata.block_tables.data_ptr(),
        metadata.query_start_loc.data_ptr(),
        metadata.seq_lens.data_ptr(),
        None if first_visible is None else first_visible.data_ptr(),
        *metadata.block_tables.shape,
    )


def why_not(device, dtype):
    """Compiles the library if need be."""
    if device.type != "cpu":
        return f"it reads a CPU's memory, and the model is on {device}"
    if dtype not in IS_BF16:
        return f"it takes float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if not native.wanted():
        return "MINIKV_CPU_KERNELS is 0"
    found = _attempt()
    return str(found) if isinstance(found, native.CannotCompile) else None


def library():
    """The compiled library. Raises CannotCompile."""
    found = _attempt()
    if isinstance(found, native.CannotCompile):
        raise found
    return found


@functools.cache
def _attempt():
    """The library, or the CannotCompile that there is instead: tried once in a process."""
    try:
        return native.load()
    except native.CannotCompile as error:
        print(
            f"minikv: {error}. So attention copies K and V before it reads them, which is slower",
            file=sys.stderr,
            flush=True,
        )
        return error
