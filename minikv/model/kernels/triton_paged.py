"""One GPU kernel that reads K and V where they lie, through block tables, and one that merges.

It is the "online" backend's loop (softmax by tiles of keys, a running maximum and a running sum)
with one program for each tile of queries, instead of a Python loop. Three ideas make it fast:

- The rows of a tile are all query heads that share a kv head, for as many query positions as fit.
  So K and V are read from memory once per kv head, and a decode (one position) is the same code
  as a chunk of a prompt.
- Reading K and V is what takes the time, so loads are kept in flight: tiles of about 16 KB each
  for K and V, and the compiler's pipeline (num_stages) asks for the next while this one is used.
- A GPU needs several programs per multiprocessor. Where requests are few and long, each one's
  slots are split among programs, and a second kernel merges what they found (flash-decoding).

Sources: Dao, FlashAttention-2 (2307.08691); Kwon et al., PagedAttention (2309.06180); Dao et al.,
Flash-Decoding (2023); the row packing as in vLLM's unified Triton kernel.
"""

import triton
import triton.language as tl


# Without do_not_specialize Triton compiles anew when one of these becomes 1, or a multiple of 16.
@triton.jit(do_not_specialize=["num_splits", "split_slots", "num_tokens", "stride_table"])
def attention_kernel(
    out,  # [T, num_query_heads, HEAD_DIM]; of partial results [num_splits, T, ...], float32
    logsumexp,  # [num_splits, T, num_query_heads], base 2; None where nothing is split
    query,  # [T, num_query_heads, HEAD_DIM]
    keys,  # [num_blocks + 1, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    values,
    block_tables,  # [num_seqs, max_blocks]
    query_start_loc,  # [num_seqs + 1]
    seq_lens,  # [num_seqs]
    first_visible,  # [num_seqs], or None
    score_scale,  # triton_launch.attend says what is in these two
    softcap,
    num_splits,
    split_slots,  # how many slots of a request each program reads
    num_tokens,  # T
    stride_query_token,
    stride_query_head,
    stride_table,
    stride_block,
    PER_KV: tl.constexpr,  # query heads that share a kv head
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,  # a power of two: shapes in Triton are
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    seq, split = tl.program_id(2) // num_splits, tl.program_id(2) % num_splits

    # -- which queries: QUERIES positions from first_query on, times the heads of this kv head
    QUERIES: tl.constexpr = ROWS // PER_KV
    first_token = tl.load(query_start_loc + seq)  # of this request, among the step's T
    query_len = tl.load(query_start_loc + seq + 1) - first_token
    first_query = tl.program_id(0) * QUERIES
    if first_query >= query_len:  # the grid is as wide as the step's longest chunk
        return
    seq_len = tl.load(seq_lens + seq)
    context_len = seq_len - query_len  # slots written before this step

    row = tl.arange(0, ROWS)
    nth_query = first_query + row // PER_KV
    head = (kv_head * PER_KV + row % PER_KV).to(tl.int64)
    row_used = (row < QUERIES * PER_KV) & (nth_query < query_len)
    token = (first_token + nth_query).to(tl.int64)
    dim = tl.arange(0, PADDED_DIM)
    dim_used = dim < HEAD_DIM
    q_at = token * stride_query_token + head * stride_query_head
    q_mask = row_used[:, None] & dim_used[None, :]
    q = tl.load(query + q_at[:, None] + dim[None, :], mask=q_mask, other=0.0)

    # -- which slots: a query sees visible_from to position, its own slot included
    position = context_len + nth_query
    visible_from = tl.zeros_like(position)
    if WINDOW is not None:
        visible_from = tl.maximum(position - (WINDOW - 1), 0)
    if first_visible is not None:  # a padding query sees only itself
        padding = tl.minimum(tl.load(first_visible + seq), position)
        visible_from = tl.maximum(visible_from, padding)
    # The tile reads from its first query's first slot to its last query's own: nothing before a
    # window, nothing after the diagonal. A split is a share of that.
    start = tl.min(visible_from, 0) + split * split_slots
    end = context_len + tl.minimum(first_query + QUERIES, query_len)
    end = tl.minimum(end, start + split_slots)

    # -- online softmax: all weights seen so far are relative to the largest score seen so far
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for tile_start in range(start, end, TILE):
        slot = tile_start + tl.arange(0, TILE)
        # Slots from `end` on may be unwritten and hold NaN. A weight of 0 would not hide it in V.
        in_reach = slot < end
        # The page table walk. Neighbours in a block ask for the same entry: one memory access.
        block_id = tl.load(
            block_tables + seq * stride_table + slot // BLOCK_SIZE, mask=in_reach, other=0
        )
        # int64: a pool has more than 2^31 numbers once it takes 4 GB per layer.
        kv_at = block_id.to(tl.int64) * stride_block
        kv_at += (kv_head * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
        kv_at = kv_at[:, None] + dim[None, :]
        kv_mask = in_reach[:, None] & dim_used[None, :]
        k = tl.load(keys + kv_at, mask=kv_mask, other=0.0)
        v = tl.load(values + kv_at, mask=kv_mask, other=0.0)
        if UPCAST:  # the interpreter multiplies bfloat16 wrongly
            q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scale
        if softcap is not None:  # softcap * tanh(s / softcap), where tanh(x) = 1 - 2 / (e^2x + 1)
            scores = softcap - 2 * softcap / (tl.exp2(scores) + 1)
        visible = (slot[None, :] >= visible_from[:, None]) & (slot[None, :] <= position[:, None])
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen nothing yet: -inf minus -inf would be NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(row_max - shift)  # what was summed before, relative to the new maximum
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        mixed = mixed * rescale[:, None]
        mixed += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        row_max = new_max

    row_sum = tl.where(row_sum == 0, 1.0, row_sum)  # a split may have seen nothing
    mixed = mixed / row_sum[:, None]
    num_query_heads = num_kv_heads * PER_KV
    out_row = (split.to(tl.int64) * num_tokens + token) * num_query_heads + head
    tl.store(out + out_row[:, None] * HEAD_DIM + dim[None, :], mixed, mask=q_mask)
    if logsumexp is not None:
        tl.store(logsumexp + out_row, row_max + tl.log2(row_sum), mask=row_used)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    out,  # [T * num_query_heads, HEAD_DIM]
    partial,  # [num_splits, T * num_query_heads, HEAD_DIM]
    logsumexp,  # [num_splits, T * num_query_heads]
    num_splits,
    PADDED_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Each split's result is an average over its own slots; it counts by its share of the sum."""
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    split, dim = tl.arange(0, PADDED_SPLITS), tl.arange(0, PADDED_DIM)
    at = split * num_rows.to(tl.int64) + row
    there, dim_used = split < num_splits, dim < HEAD_DIM
    lse = tl.load(logsumexp + at, mask=there, other=float("-inf"))
    share = tl.exp2(lse - tl.max(lse, 0))  # 0 for a split that has seen nothing
    mask = there[:, None] & dim_used[None, :]
    mixed = tl.load(partial + at[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    mixed = tl.sum(mixed * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out + row * HEAD_DIM + dim, mixed, mask=dim_used)


# TRITON_INTERPRET=1, set before Triton is imported, runs the kernels in Python on CPU tensors.
INTERPRETED = not isinstance(attention_kernel, triton.runtime.JITFunction)
