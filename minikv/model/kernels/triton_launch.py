"""The "triton" backend: how the kernels of `triton_paged` are launched for a step.

What has to be decided is how wide a tile is and among how many programs a request's slots are
divided. Both follow from the shapes alone; nothing is tuned by trying.
"""

import contextlib
import functools
import math

import torch
import triton

from minikv.model.kernels.triton_paged import INTERPRETED, attention_kernel, merge_kernel

LOG2E = math.log2(math.e)
TILE_BYTES = 16 << 10  # of K, and as much of V, in one turn of the loop
PROGRAMS_PER_SM = 4  # enough loads in flight to keep the memory busy, with room for uneven lengths
MIN_SLOTS_PER_SPLIT = 256  # below it, merging costs more than it gains
MAX_SLOTS_PER_SPLIT = 4096  # so that no program runs long after the others of a ragged batch
MAX_SPLITS = 64  # the merge holds one row of each in registers
MAX_PARTIAL_BYTES = 128 << 20


def launch_shape(max_query_len, per_kv, head_dim, itemsize) -> tuple[int, int, int]:
    """(rows, slots, num_stages) of the loop: at least 16 of each in a product, which tensor cores
    need. Float32 is multiplied without them, from registers, of which more rows have too few."""
    widest = max(64 if itemsize < 4 else 16, triton.next_power_of_2(per_kv))
    rows = max(16, min(widest, triton.next_power_of_2(max_query_len * per_kv)))
    slots = TILE_BYTES // (triton.next_power_of_2(head_dim) * itemsize)
    # The pipeline spends a stage on the block ids and one on K and V, then the same again for each
    # turn that it runs ahead: 5 stages read two tiles at once, 3 stages read one. A chunk reuses
    # what it reads, and needs the shared memory for its queries.
    return rows, max(16, min(128, slots)), 5 if rows == 16 else 3


def choose_num_splits(num_programs, num_slots, row_bytes, num_sms) -> int:
    """Among how many programs each request's slots are divided.

    num_programs: there are without splitting. num_slots: the most that one of them reads.
    row_bytes: of one split's partial results. num_sms: the GPU's multiprocessors.
    """
    to_fill = -(-PROGRAMS_PER_SM * num_sms // num_programs)
    to_balance = -(-num_slots // MAX_SLOTS_PER_SPLIT)
    most = min(num_slots // MIN_SLOTS_PER_SPLIT, MAX_PARTIAL_BYTES // row_bytes, MAX_SPLITS)
    return max(1, min(max(to_fill, to_balance), most))


@functools.cache
def num_multiprocessors(device) -> int:
    """Of a GPU; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def why_not(device, dtype):
    """See `minikv.model.backends`."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it has no kernel for {dtype}"
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return (
            f"it needs a CUDA GPU, and the device is {device}; to try it slowly in Triton's "
            "interpreter, set TRITON_INTERPRET=1 before Python starts"
        )
    return _why_not_on_gpu(device)


@functools.cache
def _why_not_on_gpu(device):
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):  # no asynchronous copies: the loop would spill, measured by compiling
        return f"it needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    # What compiling needs (a C compiler for the launcher, an assembler that knows this GPU) is
    # found missing only at the first launch: so there is one here, of the smaller kernel.
    out, partial = torch.ones(1, 16, device=device), torch.ones(1, 1, 16, device=device)
    try:
        with torch.cuda.device(device):
            merge_kernel[(1,)](out, partial, partial[..., 0], 1, 1, 16, 16)
            torch.cuda.synchronize()
    except Exception as error:  # of Triton, of the C compiler, of the driver
        return f"a trial kernel failed ({type(error).__name__}: {' '.join(str(error).split())})"
    return None


def attend(query, pool, metadata, *, scaling, window=None, softcap=None, num_splits=None):
    """See `minikv.model.backends`. num_splits: None for what `choose_num_splits` says."""
    num_tokens, num_query_heads, head_dim = query.shape
    _, _, num_kv_heads, block_size, _ = pool.shape
    num_seqs, per_kv = len(metadata.seq_lens), num_query_heads // num_kv_heads
    rows, tile, num_stages = launch_shape(
        metadata.max_query_len, per_kv, head_dim, pool.element_size()
    )
    queries = rows // per_kv
    num_tiles = triton.cdiv(metadata.max_query_len, queries)

    num_slots = metadata.max_seq_len  # of the most that one program would read
    if window is not None:
        num_slots = min(num_slots, window - 1 + queries)
    if num_splits is None:
        row_bytes = 4 * num_tokens * num_query_heads * head_dim
        num_programs = num_tiles * num_kv_heads * num_seqs
        sms = num_multiprocessors(query.device)
        num_splits = choose_num_splits(num_programs, num_slots, row_bytes, sms)
    split_slots = triton.cdiv(triton.cdiv(num_slots, num_splits), tile) * tile

    # exp(x) is exp2(x * LOG2E), and exp2 is what the hardware has: one product instead of two.
    score_scale = scaling * LOG2E
    if softcap is not None:  # the argument of e^2x, as a power of two; then the score's factor
        score_scale, softcap = 2 * score_scale / softcap, softcap * LOG2E
    out = query.new_empty(query.shape)
    partial, logsumexp = out, None
    if num_splits > 1:
        partial = query.new_empty((num_splits, *query.shape), dtype=torch.float32)
        logsumexp = partial.new_empty((num_splits, num_tokens, num_query_heads))
    # Triton launches on the current device, which need not be the one of the tensors.
    on_device = torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext()
    dims = {"HEAD_DIM": head_dim, "PADDED_DIM": max(16, triton.next_power_of_2(head_dim))}
    with on_device:
        attention_kernel[num_tiles, num_kv_heads, num_seqs * num_splits](
            partial, logsumexp, query, *pool,
            metadata.block_tables, metadata.query_start_loc, metadata.seq_lens,
            metadata.first_visible,
            score_scale, softcap,
            num_splits, split_slots, num_tokens,
            query.stride(0), query.stride(1), metadata.block_tables.stride(0), pool.stride(1),
            PER_KV=per_kv, **dims, BLOCK_SIZE=block_size, WINDOW=window,
            ROWS=rows, TILE=tile, UPCAST=INTERPRETED and pool.dtype == torch.bfloat16,
            num_warps=4, num_stages=num_stages,
        )  # fmt: skip
        if num_splits > 1:
            merge_kernel[(num_tokens * num_query_heads,)](
                out, partial, logsumexp, num_splits,
                PADDED_SPLITS=triton.next_power_of_2(num_splits), **dims,
            )  # fmt: skip
    return out
